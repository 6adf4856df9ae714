// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"net/url"

	"github.com/tandem-gpu/tandem/internal/records"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Records have what GPUs were like before their holders, and which are not clean: one file for each used GPU. They end with the boot, as the
// settings do. All methods are safe for concurrent use.
type Records struct{ *records.Store[string, before] }

// before is the record of a GPU since its first holder. A GPU whose record is unreadable keeps its settings, and may not be clean.
type before struct {
	Settings device.Settings `json:"settings"`
	// Unclean means that the last attempt to clean the GPU failed, or did not end.
	Unclean bool `json:"unclean,omitempty"`
}

// NewRecords has no visible effect. Call Load before any other method.
func NewRecords(dir, bootID string) *Records {
	return &Records{records.New(records.Options[string, before]{
		What: "settings of a GPU", Dir: dir, BootID: bootID, Name: url.PathEscape, Parse: url.PathUnescape,
		Unreadable: func(string) before { return before{Unclean: true} },
	})}
}
