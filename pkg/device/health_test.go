// SPDX-License-Identifier: Apache-2.0

package device

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
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

var update = flag.Bool("update", false, "rewrite the table of XIDs in the user's page")

// TestXIDTable compares the table of the user's page with XIDs.
func TestXIDTable(t *testing.T) {
	const path, begin, end = "../../docs/user/health.md", "<!-- table -->\n", "<!-- end of table -->"
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(data), begin)
	_, after, ended := strings.Cut(rest, end)
	if !found || !ended {
		t.Fatalf("%s has no table", path)
	}
	var table strings.Builder
	fmt.Fprintf(&table, "Source of meanings and actions: [NVIDIA](%s).\n\n", XIDSource)
	table.WriteString("| XID | class | meaning | NVIDIA's immediate action |\n|---|---|---|---|\n")
	for _, x := range XIDs {
		class := string(x.Class)
		if x.Class == FaultNone {
			class = "–"
		}
		fmt.Fprintf(&table, "| %d | %s | %s | %s |\n", x.Number, class, x.Meaning, x.Action)
	}
	want := before + begin + table.String() + end + after
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if want != string(data) {
		t.Errorf("the table of %s is not that of XIDs: go test ./pkg/device -run XIDTable -update", path)
	}
}

// TestHealthAsText: what String says of a fault leads ParseHealth to the same class and remedy.
func TestHealthAsText(t *testing.T) {
	for text, h := range map[string]Health{
		"":                            {},
		"Lost":                        {Reason: ReasonLost},
		"XID: 79 at noon: fallen off": {Reason: ReasonXID, Message: "XID 79 at noon: fallen off", XID: 79},
		"XID: 48":                     {Reason: ReasonXID, Message: "XID 48", XID: 48},
		"RowRemapFailure: row 3: bad": {Reason: ReasonRowRemapFailure, Message: "row 3: bad"},
	} {
		if h.String() != text {
			t.Errorf("%+v is %q, want %q", h, h.String(), text)
		}
		if got := ParseHealth(text); got.Reason != h.Reason || got.XID != h.XID || got.Class() != h.Class() || got.Remedy("") != h.Remedy("") {
			t.Errorf("%q is %+v, want %+v", text, got, h)
		}
	}
	if h := ParseHealth("XID: XID 79: of an older agent"); h.XID != 79 {
		t.Errorf("XID %d", h.XID)
	}
}

// TestRepair: docs/user/node-repair.md names each reason in the row of its repair.
func TestRepair(t *testing.T) {
	page, err := os.ReadFile("../../docs/user/node-repair.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := map[Repair]string{}
	for line := range strings.Lines(string(page)) {
		if cells := strings.Split(line, "|"); len(cells) == 5 {
			repair := strings.TrimPrefix(strings.Trim(cells[1], " `"), "none")
			rows[Repair(repair)] += cells[3]
		}
	}
	for _, reason := range []string{
		ReasonLost, ReasonMissing, ReasonNoNode, ReasonNotClean, ReasonUnreachable, ReasonResetRequired, ReasonRebootRequired, ReasonDrainP2P,
		ReasonRowRemapFailure, ReasonRowRemapPending, ReasonRetiredPages, ReasonUncorrectableECC, ReasonFabric, ReasonPaused, ReasonNotInjectable,
		ReasonNotRecordable, ReasonNotRead,
	} {
		if repair := (Health{Reason: reason}).Repair(); !strings.Contains(rows[repair], "`"+reason+"`") {
			t.Errorf("%s needs %q, and the page says of it: %s", reason, repair, rows[repair])
		}
	}
	for xid, what := range map[int]string{13: "the class application", 94: "contained", 48: "the classes reset", 79: "the class reboot"} {
		if repair := (Health{Reason: ReasonXID, XID: xid}).Repair(); !strings.Contains(rows[repair], what) {
			t.Errorf("XID %d needs %q, and the page says of it: %s", xid, repair, rows[repair])
		}
	}
	if got := (Health{}).Repair(); got != RepairNone {
		t.Errorf("a healthy GPU needs %s", got)
	}
}

// TestRepairOfSeveralFaults: the worst repair is that of all faults, whichever of them is shown.
func TestRepairOfSeveralFaults(t *testing.T) {
	fault := func(reason string) Health { return Health{Reason: reason} }
	xid := func(n int) Health { return Health{Reason: ReasonXID, XID: n} }
	for name, c := range map[string]struct {
		faults []Health
		shown  string
		want   Repair
	}{
		"none":                           {nil, "", RepairNone},
		"one":                            {[]Health{fault(ReasonLost)}, ReasonLost, RepairReboot},
		"a row and its XID":              {[]Health{fault(ReasonRowRemapFailure), xid(64)}, ReasonXID, RepairReplace},
		"a row and a reset":              {[]Health{fault(ReasonResetRequired), fault(ReasonRowRemapFailure)}, ReasonResetRequired, RepairReplace},
		"a row and a lost GPU":           {[]Health{fault(ReasonRowRemapFailure), fault(ReasonLost)}, ReasonLost, RepairReplace},
		"the fabric and a row":           {[]Health{fault(ReasonFabric), fault(ReasonRowRemapPending)}, ReasonRowRemapPending, RepairReset},
		"peers":                          {[]Health{fault(ReasonDrainP2P)}, ReasonDrainP2P, RepairNone},
		"what is no fault and one":       {[]Health{fault(ReasonNotClean), xid(94)}, ReasonXID, RepairReset},
		"a fault of an application only": {[]Health{xid(13)}, ReasonXID, RepairNone},
	} {
		got := Worst(c.faults...)
		if got.Reason != c.shown || got.Repair() != c.want || Worst(got).Repair() != c.want {
			t.Errorf("%s: %+v needs %q, want %s, which needs %q", name, got, got.Repair(), c.shown, c.want)
		}
	}
}
