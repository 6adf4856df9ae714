// SPDX-License-Identifier: Apache-2.0

package health

import (
	"fmt"
	"net/url"
	"time"

	"github.com/tandem-gpu/tandem/internal/records"
)

// Records are the XIDs of GPUs that have not ended: one file for each GPU that had one, by its PCI address. They end with the boot. All
// methods are safe for concurrent use.
type Records struct{ *records.Store[string, xids] }

// xids are the XIDs of one GPU.
type xids struct {
	// Last is the number of the last record of the kernel's log that counted.
	Last uint64 `json:"last,omitempty"`
	XIDs []xid  `json:"xids,omitempty"`
}

// xid is an XID that has not ended. The instances are device.NoInstance for the GPU.
type xid struct {
	XID             int       `json:"xid"`
	GPUInstance     int       `json:"gpuInstance"`
	ComputeInstance int       `json:"computeInstance"`
	Time            time.Time `json:"time"`
	// seen is set once the partition that it concerns was in the inventory.
	seen bool
}

// NewRecords has no visible effect. Call Load before any other method.
func NewRecords(dir, bootID string) *Records {
	return &Records{records.New(records.Options[string, xids]{
		What: "GPU's XID", Dir: dir, BootID: bootID, Name: url.PathEscape, Parse: parseName,
		// The driver still says what the GPU needs.
		Unreadable: func(string) xids { return xids{} },
	})}
}

func parseName(name string) (string, error) {
	address, err := url.PathUnescape(name)
	if err != nil {
		return "", fmt.Errorf("parse PCI address from the name of its record: %w", err)
	}
	return address, nil
}
