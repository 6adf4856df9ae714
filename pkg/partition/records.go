// SPDX-License-Identifier: Apache-2.0

package partition

import (
	"errors"
	"fmt"
	"net/url"

	"github.com/tandem-gpu/tandem/internal/records"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Records remember through crashes which partitions were made for claims, or are about to be: one file each, in a directory that
// ends with the boot. What is not recorded is somebody else's. All methods are safe for concurrent use.
type Records struct {
	store  *records.Store[device.Ref, made]
	bootID string
}

// made is what is known of a partition that was made. The name of the file carries its place, so that one that cannot be read
// still says what is ours.
type made struct {
	BootID    string `json:"bootID"`
	ProfileID int    `json:"profileID"`
	// UUID is empty until the partition is complete.
	UUID string `json:"uuid,omitempty"`
	// Unknown is set where nothing but the place is known.
	Unknown bool `json:"unknown,omitempty"`
}

// names reports whether a partition in the recorded place is the recorded one. One whose UUID is not recorded was about to be
// made when the process ended.
func (m made) names(p device.Partition) bool {
	return m.Unknown || m.ProfileID == p.ProfileID && (m.UUID == "" || p.UUID == "" || m.UUID == p.UUID)
}

// NewRecords does nothing visible: there are none before Load.
func NewRecords(dir, bootID string) *Records {
	return &Records{bootID: bootID, store: records.New(dir, bootID, records.Format[device.Ref, made]{
		What: "partition", Name: fileName, Parse: parseName,
		Boot:       func(m made) string { return m.BootID },
		Unreadable: func(device.Ref) made { return made{BootID: bootID, Unknown: true} },
	})}
}

// Load reads what an earlier process has left. Called once, before anything is made, by whoever makes sure that no other process
// uses the directory. Records of an earlier boot are removed: the partitions went with it. Problems are files that are not as
// they should be; they are kept, and what they are named after counts as made.
func (r *Records) Load() (problems []error, err error) { return r.store.Load() }

func parseName(name string) (device.Ref, error) {
	text, err := url.PathUnescape(name)
	if err != nil {
		return device.Ref{}, fmt.Errorf("its name is no place: %w", err)
	}
	ref, err := device.ParseRef(text)
	if err != nil {
		return device.Ref{}, fmt.Errorf("its name is no place: %w", err)
	}
	if ref.Whole() {
		return device.Ref{}, errors.New("its name is that of a whole GPU")
	}
	return ref, nil
}

func fileName(ref device.Ref) string { return url.PathEscape(ref.String()) }

// Made reports whether the partition was made for a claim, or is about to be.
func (r *Records) Made(ref device.Ref) bool {
	_, ok := r.get(ref)
	return ok
}

// All returns every recorded place, in no order.
func (r *Records) All() []device.Ref { return r.store.Keys() }

func (r *Records) get(ref device.Ref) (made, bool) { return r.store.Get(ref) }

// put records that the partition is about to be made, or with a UUID that it is. It is on disk when put returns nil.
func (r *Records) put(p device.Partition) error {
	m := made{BootID: r.bootID, ProfileID: p.ProfileID, UUID: p.UUID}
	if known, ok := r.get(p.Ref); ok && known == m {
		return nil
	}
	return r.store.Put(p.Ref, m)
}

// drop forgets a partition that is gone.
func (r *Records) drop(ref device.Ref) error { return r.store.Drop(ref) }

// Repair writes anew what was removed from the directory by somebody else. It costs one look at each record.
func (r *Records) Repair() error { return r.store.Repair() }
