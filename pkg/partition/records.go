// SPDX-License-Identifier: Apache-2.0

package partition

import (
	"errors"
	"fmt"
	"net/url"

	"github.com/tandem-gpu/tandem/internal/records"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Records are the partitions that were created for claims, or are about to be: one file each, in a directory that ends with
// the boot. A partition without a record is unmanaged. All methods are safe for concurrent use.
type Records struct {
	store *records.Store[device.Ref, made]
}

// made is the content of a record. The name of the file is the partition's ref, so that an unreadable file still
// identifies the partition that Tandem created.
type made struct {
	ProfileID int `json:"profileID"`
	// UUID is empty until the partition is complete.
	UUID string `json:"uuid,omitempty"`
	// Unknown means that the file was unreadable: only the ref is known.
	Unknown bool `json:"unknown,omitempty"`
}

// NewRecords has no visible effect. Call Load before any other method.
func NewRecords(dir, bootID string) *Records {
	return &Records{records.New(records.Options[device.Ref, made]{
		What: "partition", Dir: dir, BootID: bootID, Name: fileName, Parse: parseName,
		Unreadable: func(device.Ref) made { return made{Unknown: true} },
	})}
}

// Load reads the records of an earlier process. main calls it once, while no other process uses the directory. It removes
// records of an earlier boot: the partitions ended with it. Problems are unreadable files. They are kept, and the partitions
// that they are named after count as created.
func (r *Records) Load() (problems []error, err error) { return r.store.Load() }

func parseName(name string) (device.Ref, error) {
	text, err := url.PathUnescape(name)
	var ref device.Ref
	if err == nil {
		ref, err = device.ParseRef(text)
	}
	if err == nil && ref.Whole() {
		err = errors.New("it is a whole GPU")
	}
	if err != nil {
		return device.Ref{}, fmt.Errorf("parse partition from the name of its record: %w", err)
	}
	return ref, nil
}

func fileName(ref device.Ref) string { return url.PathEscape(ref.String()) }

// Made reports whether the partition was created for a claim, or is about to be.
func (r *Records) Made(ref device.Ref) bool {
	_, ok := r.store.Get(ref)
	return ok
}

// Complete reports whether the partition was created for a claim, and its creation has ended.
func (r *Records) Complete(ref device.Ref) bool {
	m, ok := r.store.Get(ref)
	return ok && m.UUID != ""
}

// created reports whether p is the recorded partition at its placement. A record without a UUID matches any UUID: the process
// ended while it created the partition.
func (r *Records) created(p device.Partition) bool {
	m, ok := r.store.Get(p.Ref)
	return ok && (m.Unknown || m.ProfileID == p.ProfileID && (m.UUID == "" || p.UUID == "" || m.UUID == p.UUID))
}

// All returns every recorded ref, in no order.
func (r *Records) All() []device.Ref { return r.store.Keys() }

// put records that the partition is about to be created, or with a UUID that it exists. It is on disk when put returns nil.
func (r *Records) put(p device.Partition) error {
	m := made{ProfileID: p.ProfileID, UUID: p.UUID}
	if known, ok := r.store.Get(p.Ref); ok && known == m {
		return nil
	}
	return r.store.Put(p.Ref, m)
}

// Repair writes records again that another process removed. It costs one stat for each record.
func (r *Records) Repair() error { return r.store.Repair() }
