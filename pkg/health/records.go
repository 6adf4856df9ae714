// SPDX-License-Identifier: Apache-2.0

package health

import (
	"net/url"
	"time"

	"github.com/tandem-gpu/tandem/internal/records"
)

// Records are the XIDs that have not ended: one file for each GPU that has one, by its PCI address, and one about the kernel's log. They end
// with the boot. If another process removes the file of a GPU, the GPU's XIDs end. All methods are safe for concurrent use.
type Records struct{ *records.Store[string, xids] }

// xids are the XIDs of one GPU.
type xids struct {
	XIDs []xid `json:"xids,omitempty"`
	// Log is that of the record logKey, which is of no GPU.
	Log *progress `json:"log,omitempty"`
}

// logKey is the key of the record about the kernel's log. It is no PCI address.
const logKey = "log"

// progress is what agents have done with the kernel's log of this boot.
type progress struct {
	// Since is when the first agent of this boot began.
	Since time.Time `json:"since"`
	// Last is the number of the last line that changed a record.
	Last uint64 `json:"last,omitempty"`
}

// xid is an XID that has not ended. The instances are device.NoInstance for the GPU.
type xid struct {
	XID             int       `json:"xid"`
	GPUInstance     int       `json:"gpuInstance"`
	ComputeInstance int       `json:"computeInstance"`
	Time            time.Time `json:"time"`
	// seen is set once the partition that it concerns was in the inventory, or if it must have been before the agent started.
	seen bool
}

// NewRecords has no visible effect. Call Load before any other method.
func NewRecords(dir, bootID string) *Records {
	return &Records{records.New(records.Options[string, xids]{
		What: "GPU's XID", Dir: dir, BootID: bootID, Name: url.PathEscape, Parse: url.PathUnescape,
		// The driver still says what the GPU needs.
		Unreadable: func(string) xids { return xids{} },
	})}
}
