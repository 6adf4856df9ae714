// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// nodesOf are the nodes of a CDI device as "<path in the container> <path on the host> <minor> <mode>".
func nodesOf(d specs.Device) []string {
	var all []string
	for _, n := range d.ContainerEdits.DeviceNodes {
		all = append(all, fmt.Sprintf("%s %s %d %o", n.Path, n.HostPath, n.Minor, *n.FileMode))
	}
	return all
}

func TestPartitionEdits(t *testing.T) {
	m := newMachine(t, "a100x8-mig")
	node := m.open(t)
	edits, err := node.ContainerEdits(t.Context())
	if err != nil || len(edits.Failed) > 0 {
		t.Fatal(err, edits.Failed)
	}
	byUUID := map[string]specs.Device{}
	for _, d := range edits.Devices {
		byUUID[d.Name] = d
	}
	if got, want := len(edits.Devices), 8+4+2+3+2+7; got != want {
		t.Errorf("%d devices, want %d", got, want)
	}
	gpus := node.Inventory().GPUs
	// The second compute instance of what two of them share; the minors are those of the MIG User Guide's numbering.
	p := gpus[2].Partitions[1]
	want := []string{
		"/dev/nvidia2 /run/nvidia/simulated/driver/dev/nvidia2 2 666",
		"/dev/nvidia-caps/nvidia-cap282 /run/nvidia/simulated/driver/dev/nvidia-caps/nvidia-cap282 282 444",
		"/dev/nvidia-caps/nvidia-cap284 /run/nvidia/simulated/driver/dev/nvidia-caps/nvidia-cap284 284 444",
	}
	if diff := cmp.Diff(want, nodesOf(byUUID[p.UUID])); diff != "" {
		t.Errorf("%s (-want +got):\n%s", p.Name(), diff)
	}
	for _, g := range gpus {
		for _, p := range g.Partitions {
			alone, err := node.PartitionEdits(t.Context(), p)
			if err != nil {
				t.Errorf("%s: %v", p.Name(), err)
			}
			if diff := cmp.Diff(byUUID[p.UUID], alone); diff != "" {
				t.Errorf("%s by itself (-all +alone):\n%s", p.Name(), diff)
			}
			if hooks := alone.ContainerEdits.Hooks; len(hooks) > 0 {
				t.Errorf("%s: hooks %v", p.Name(), hooks)
			}
		}
	}
}

// Whether a GPU has nodes for graphics, nvcdi looks up in the real sysfs: this one has none.
func TestPartitionEditsWithGraphics(t *testing.T) {
	node := newMachine(t, "a100x8-mig").open(t)
	p := node.Inventory().GPUs[1].Partitions[0]
	want, err := node.PartitionEdits(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	p.Profile += "+gfx"
	got, err := node.PartitionEdits(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestPartitionEditsFail(t *testing.T) {
	m := newMachine(t, "a100x8-mig")
	node := m.open(t)
	p := node.Inventory().GPUs[1].Partitions[0]
	if err := os.Remove(filepath.Join(m.dir, "driver/dev/nvidia1")); err != nil {
		t.Fatal(err)
	}
	_, err := node.PartitionEdits(t.Context(), p)
	if err == nil || !strings.Contains(err.Error(), "/driver/dev/nvidia1") || !strings.Contains(err.Error(), p.Name()) {
		t.Errorf("without the GPU's node: %v", err)
	}
	p.Health = device.Health{Reason: device.ReasonLost, Message: "gone"}
	if _, err := node.PartitionEdits(t.Context(), p); err == nil || !strings.Contains(err.Error(), "gone") {
		t.Errorf("unhealthy: %v", err)
	}
}
