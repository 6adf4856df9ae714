// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/oracle"
)

func discard(t *testing.T) *trace {
	t.Helper()
	trace, err := openTrace(t.TempDir(), io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(trace.close)
	return trace
}

func instance(gpu, start int, uuid string) oracle.Instance {
	return oracle.Instance{GPU: gpu, ID: 7 + start, Profile: 19, Start: start, Size: 1, UUID: uuid}
}

// TestWhoseItIs: other partitions are counted, and a missing one of the administrator is reported; a boot takes everything away.
func TestWhoseItIs(t *testing.T) {
	h := hardware{statistics: &statistics{}, trace: discard(t)}
	first := oracle.Machine{Boot: "one", Enabled: map[int]bool{4: true}, Instances: []oracle.Instance{instance(4, 0, "static"), instance(4, 1, "also")}}
	h.takeStock(first)
	counts := func() string {
		c := h.statistics.now()
		return fmt.Sprint(c.PartitionsMade, c.PartitionsDestroyed)
	}
	for _, step := range []struct {
		boot    string
		there   []oracle.Instance
		touched int
		counts  string
		unlike  string
	}{
		{"one", []oracle.Instance{instance(4, 0, "static"), instance(4, 1, "also"), instance(0, 3, "made")}, 0, "1 0", "there is gpu-0"},
		{"one", []oracle.Instance{instance(4, 0, "static"), instance(4, 1, "also")}, 0, "1 1", ""},
		{"one", []oracle.Instance{instance(4, 0, "static")}, 1, "1 1", "there is no gpu-4"},
		{"one", []oracle.Instance{instance(4, 0, "static"), instance(0, 3, "again")}, 0, "2 1", "there is"},
		{"two", []oracle.Instance{instance(4, 0, "static"), instance(4, 1, "also"), instance(0, 3, "early")}, 0, "3 1", "there is gpu-0"},
		{"two", []oracle.Instance{instance(4, 0, "static"), instance(4, 1, "another")}, 1, "4 2", ""},
		// A GPU instance without a compute instance is being created.
		{"two", []oracle.Instance{instance(4, 0, "static"), instance(4, 1, "another"), instance(0, 2, "")}, 0, "4 2", "there is gpu-0"},
	} {
		touched := h.compare(oracle.Machine{Boot: step.boot, Enabled: first.Enabled, Instances: step.there})
		if unlike := strings.Join(h.unlike(), "; "); len(touched) != step.touched || counts() != step.counts || !strings.Contains(unlike, step.unlike) ||
			step.unlike == "" && unlike != "" {
			t.Errorf("%v: touched %v, counted %s, unlike %q", step.there, touched, counts(), unlike)
		}
	}
	problems := h.ownerless([]place{{4, 1, 1}})
	if len(problems) != 1 || !slices.ContainsFunc(h.unlike(), func(line string) bool { return strings.Contains(line, "gpu-0") }) {
		t.Errorf("ownerless: %v", problems)
	}
	for name := range problems {
		if !isPartition(name) || isPartition("w00001-0") {
			t.Errorf("%q is not told from a pod", name)
		}
	}
}
