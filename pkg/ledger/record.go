// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"fmt"
	"net/url"
	"strings"

	"github.com/tandem-gpu/tandem/internal/records"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// newRecords returns the holds on disk, one file for each: <kind>~<holder>~<device>. An empty or unreadable file still holds its
// device. A later version may add fields to a record and kinds of holders; this version ignores the fields, and such a holder holds.
func newRecords(dir string, o Options) *records.Store[key, Hold] {
	return records.New(records.Options[key, Hold]{
		What: "hold", Dir: dir, BootID: o.BootID, Exclusive: true, Step: o.Step,
		Name: recordName, Parse: parseRecordName, Check: checkRecord,
		Unreadable: func(k key) Hold {
			return Hold{Holder: k.holder, Device: k.device, State: StateRestored, Since: o.Now(), Unreadable: true}
		},
	})
}

const nameSeparator = "~"

func recordName(k key) string {
	return strings.Join([]string{string(k.holder.Kind), escape(k.holder.ID), escape(k.device.String())}, nameSeparator)
}

func escape(s string) string { return strings.ReplaceAll(url.PathEscape(s), nameSeparator, "%7E") }

// parseRecordName accepts any kind: holders of a kind that a later version adds hold as well.
func parseRecordName(name string) (key, error) {
	kind, rest, _ := strings.Cut(name, nameSeparator)
	id, ref, _ := strings.Cut(rest, nameSeparator)
	id, err := url.PathUnescape(id)
	if err != nil || kind == "" || id == "" {
		return key{}, fmt.Errorf("%q is not <kind>~<holder>~<device>", name)
	}
	if ref, err = url.PathUnescape(ref); err != nil {
		return key{}, fmt.Errorf("%q is not <kind>~<holder>~<device>: %w", name, err)
	}
	parsed, err := device.ParseRef(ref)
	return key{Holder{Kind: Kind(kind), ID: id}, parsed}, err
}

// checkName returns an error if a record of k could not be read again.
func checkName(k key) error {
	name := recordName(k)
	if parsed, err := parseRecordName(name); err != nil || parsed != k {
		return fmt.Errorf("record name %q does not identify device %#v", name, k.device)
	}
	return nil
}

func checkRecord(k key, h Hold) error {
	if k.holder.Kind != KindClaim && k.holder.Kind != KindPod {
		return fmt.Errorf("unknown kind %q", k.holder.Kind)
	}
	if h.Share.Bytes > h.Share.Of {
		return fmt.Errorf("share of %d of %d bytes", h.Share.Bytes, h.Share.Of)
	}
	switch h.State {
	case StateRestored, StateHeld, StateDraining:
		return nil
	}
	return fmt.Errorf("unknown state %q", h.State)
}
