// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/internal/records"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/mps"
)

// Records remember through crashes what was set for claims, or is about to be: one file for each device of a claim, in a
// directory that ends with the boot, as the settings do. All methods are safe for concurrent use.
type Records struct {
	store  *records.Store[Key, setting]
	bootID string
}

// setting is what one device was brought to, and from what.
type setting struct {
	BootID string `json:"bootID"`
	// Namespace and Name of the claim, for messages.
	Namespace string                     `json:"namespace,omitempty"`
	Name      string                     `json:"name,omitempty"`
	Strategy  parametersv1beta1.Strategy `json:"strategy,omitempty"`
	// Interval is set with TimeSlicing.
	Interval parametersv1beta1.Interval `json:"interval,omitempty"`
	// Untouched is set while the time slice cannot have been set yet. A record of before this was noted counts as one that may.
	Untouched bool `json:"untouched,omitempty"`
	// Before is the compute mode to go back to; empty for partitions, which have none.
	Before device.ComputeMode `json:"before,omitempty"`
	// Daemon is the name of the MPS daemon, and Settings are those of it, which are the same for all devices of the daemon.
	Daemon   string        `json:"daemon,omitempty"`
	Settings *mps.Settings `json:"settings,omitempty"`
	// Undoing is set once the daemon was told to end.
	Undoing bool `json:"undoing,omitempty"`
	// Unknown is set where nothing but the claim and the device is known.
	Unknown bool `json:"unknown,omitempty"`
}

// NewRecords does nothing visible: there are none before Load.
func NewRecords(dir, bootID string) *Records {
	return &Records{bootID: bootID, store: records.New(dir, bootID, records.Format[Key, setting]{
		What: "sharing setting", Name: fileName, Parse: parseName,
		Boot:       func(s setting) string { return s.BootID },
		Unreadable: func(Key) setting { return setting{BootID: bootID, Unknown: true} },
	})}
}

// Load reads what an earlier process has left. Called once, before anything is set, by whoever makes sure that no other process
// uses the directory. Records of an earlier boot are removed: the settings went with it. Problems are files that are not as they
// should be; they are kept, and the devices that they are named after count as set.
func (r *Records) Load() (problems []error, err error) { return r.store.Load() }

// Applied reports whether something was set on the device for that claim, or is about to be.
func (r *Records) Applied(claim string, ref device.Ref) bool {
	_, ok := r.store.Get(Key{claim, ref})
	return ok
}

// All are the devices and claims of which Applied is true, in no order.
func (r *Records) All() []Key { return r.store.Keys() }

// where are the records that match, by device.
func (r *Records) where(match func(Key, setting) bool) []Key {
	found := slices.DeleteFunc(r.All(), func(k Key) bool {
		s, ok := r.store.Get(k)
		return !ok || !match(k, s)
	})
	slices.SortFunc(found, func(a, b Key) int { return strings.Compare(fileName(a), fileName(b)) })
	return found
}

// separator is in no UID and in no Ref.
const separator = "~"

func fileName(k Key) string {
	return url.PathEscape(k.Claim) + separator + url.PathEscape(k.Device.String())
}

func parseName(name string) (Key, error) {
	claim, place, ok := strings.Cut(name, separator)
	if !ok {
		return Key{}, errors.New("its name is not a claim and a device")
	}
	claim, err := url.PathUnescape(claim)
	if err == nil {
		place, err = url.PathUnescape(place)
	}
	if err != nil {
		return Key{}, fmt.Errorf("its name is not a claim and a device: %w", err)
	}
	ref, err := device.ParseRef(place)
	return Key{claim, ref}, err
}
