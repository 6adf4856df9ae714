// SPDX-License-Identifier: Apache-2.0

package device

import (
	"slices"
	"testing"
)

// The worst fault wins, whatever comes last, and keeps the worst XID.
func TestWorst(t *testing.T) {
	xid := func(n int) Health { return Health{Reason: ReasonXID, XID: n} }
	lost := Health{Reason: ReasonLost}
	for name, test := range map[string]struct {
		faults []Health
		want   Health
	}{
		"none":                        {nil, Health{}},
		"healthy ones":                {[]Health{{}, {}}, Health{}},
		"a later benign XID":          {[]Health{xid(79), xid(94)}, xid(79)},
		"a later fatal XID":           {[]Health{xid(94), xid(79)}, xid(79)},
		"lost, with its XID":          {[]Health{xid(94), lost, xid(79)}, Health{Reason: ReasonLost, XID: 79}},
		"a reset and a reboot":        {[]Health{{Reason: ReasonResetRequired}, {Reason: ReasonRebootRequired}}, Health{Reason: ReasonRebootRequired}},
		"an eviction for a lesser":    {[]Health{{Reason: ReasonFabric, Evict: true}, xid(95)}, Health{Reason: ReasonXID, XID: 95, Evict: true}},
		"memory is worse than fabric": {[]Health{{Reason: ReasonFabric}, {Reason: ReasonRowRemapFailure}}, Health{Reason: ReasonRowRemapFailure}},
	} {
		if got := Worst(test.faults...); got != test.want {
			t.Errorf("%s: %+v, want %+v", name, got, test.want)
		}
	}
}

// The table is sorted, as XIDByNumber needs, and ignores what NVIDIA's device plugin ignores.
func TestXIDs(t *testing.T) {
	var ignored []int
	for i, x := range XIDs {
		if i > 0 && XIDs[i-1].Number >= x.Number {
			t.Errorf("XID %d is out of order", x.Number)
		}
		if x.Class == FaultApplication {
			ignored = append(ignored, x.Number)
		}
		if XIDByNumber(x.Number) != x {
			t.Errorf("XID %d is not found", x.Number)
		}
	}
	if want := []int{13, 31, 43, 45, 68, 109}; !slices.Equal(ignored, want) {
		t.Errorf("ignored: %v, want %v", ignored, want)
	}
	if got := XIDClass(9999); got != FaultReset {
		t.Errorf("an unknown XID has class %q", got)
	}
}
