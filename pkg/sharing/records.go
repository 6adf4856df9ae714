// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"fmt"
	"net/url"
	"slices"
	"strings"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/internal/records"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/mps"
)

// Records are the sharing settings that were applied, or are about to be: one file for each device of a claim, in a directory
// that ends with the boot, as the settings do. All methods are safe for concurrent use.
type Records struct{ *records.Store[Key, setting] }

// setting is what was set on one device, and what has to be restored.
type setting struct {
	// Namespace and Name of the claim, for messages.
	Namespace string                     `json:"namespace,omitempty"`
	Name      string                     `json:"name,omitempty"`
	Strategy  parametersv1beta1.Strategy `json:"strategy,omitempty"`
	// Interval is set with TimeSlicing.
	Interval parametersv1beta1.Interval `json:"interval,omitempty"`
	// SliceUnset is true while the time slice cannot have been set yet.
	SliceUnset bool `json:"sliceUnset,omitempty"`
	// Before is the compute mode to restore; empty for partitions, which have none.
	Before device.ComputeMode `json:"before,omitempty"`
	// Daemon is the name of the MPS daemon. All devices of a daemon have the same Settings.
	Daemon   string        `json:"daemon,omitempty"`
	Settings *mps.Settings `json:"settings,omitempty"`
	// Reverting is true once the daemon was told to end.
	Reverting bool `json:"reverting,omitempty"`
	// Unknown means that the file was unreadable: only the claim and the device are known.
	Unknown bool `json:"unknown,omitempty"`
}

// sameAs reports whether next needs no revert of s before it is applied.
func (s setting) sameAs(next *setting) bool {
	return next != nil && !s.Unknown && !s.Reverting && next.Strategy == s.Strategy && next.Interval == s.Interval && next.Daemon == s.Daemon
}

// NewRecords has no visible effect. Call Load before any other method. A device whose record is unreadable counts as set.
func NewRecords(dir, bootID string) *Records {
	return &Records{records.New(records.Options[Key, setting]{
		What: "sharing setting", Dir: dir, BootID: bootID, Name: fileName, Parse: parseName,
		Unreadable: func(Key) setting { return setting{Unknown: true} },
	})}
}

// Applied reports whether settings of that claim were applied to the device, or are about to be.
func (r *Records) Applied(claim string, ref device.Ref) bool {
	return r.has(Key{OwnerOf(claim), ref})
}

func (r *Records) has(key Key) bool {
	_, ok := r.Get(key)
	return ok
}

// where returns the keys of matching records, sorted.
func (r *Records) where(match func(Key, setting) bool) []Key {
	found := slices.DeleteFunc(r.Keys(), func(k Key) bool {
		s, ok := r.Get(k)
		return !ok || !match(k, s)
	})
	slices.SortFunc(found, func(a, b Key) int { return strings.Compare(fileName(a), fileName(b)) })
	return found
}

// separator occurs in no UID and in no Ref.
const separator = "~"

func fileName(k Key) string {
	return url.PathEscape(string(k.Owner)) + separator + url.PathEscape(k.Device.String())
}

func parseName(name string) (Key, error) {
	owner, ref, _ := strings.Cut(name, separator)
	owner, err := url.PathUnescape(owner)
	if err == nil {
		ref, err = url.PathUnescape(ref)
	}
	var parsed device.Ref
	if err == nil {
		parsed, err = device.ParseRef(ref)
	}
	if err != nil {
		return Key{}, fmt.Errorf("parse owner and device from the name of the record: %w", err)
	}
	return Key{Owner(owner), parsed}, nil
}
