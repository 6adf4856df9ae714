// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
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

// The driver does not create the nodes of a partition's capabilities: nvidia-modprobe does, where something runs it. Containers need their
// numbers only, which the driver lists.
func TestCapabilitiesWithoutNodes(t *testing.T) {
	for name, test := range map[string]struct{ create, remove, older bool }{
		"with nodes":                  {},
		"without nodes":               {remove: true},
		"the agent creates nodes":     {remove: true, create: true},
		"a driver loaded again since": {older: true},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, "a100x8-mig")
			caps := filepath.Join(m.dir, "driver/dev/nvidia-caps")
			const major = 237
			m.procDevices(t, fmt.Sprint("195 nvidia\n", major, " nvidia-caps\n", m.major(t, "nvidia-uvm"), " nvidia-uvm\n"))
			if test.remove {
				if err := os.RemoveAll(caps); err != nil {
					t.Fatal(err)
				}
			}
			m.options.CreateNodes = test.create
			node := m.open(t)
			p := node.Inventory().GPUs[2].Partitions[1]
			if !p.Health.Healthy() {
				t.Fatalf("health %+v", p.Health)
			}
			edits, err := node.ContainerEdits(t.Context())
			if err != nil || len(edits.Failed) > 0 {
				t.Fatal(err, edits.Failed)
			}
			alone, err := node.PartitionEdits(t.Context(), p)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range append(edits.Devices, alone) {
				if d.Name != p.UUID {
					continue
				}
				var got []string
				for _, n := range d.ContainerEdits.DeviceNodes[1:] {
					got = append(got, fmt.Sprintf("%s %s %d:%d %o", n.Type, n.Path, n.Major, n.Minor, *n.FileMode))
				}
				want := []string{"c /dev/nvidia-caps/nvidia-cap282 237:282 444", "c /dev/nvidia-caps/nvidia-cap284 237:284 444"}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("capabilities (-want +got):\n%s", diff)
				}
			}
			_, err = os.Stat(filepath.Join(caps, "nvidia-cap284"))
			if got, want := err == nil, !test.remove || test.create; got != want {
				t.Errorf("there is a node: %t, want %t", got, want)
			}
		})
	}
}

// A runtime makes the capabilities in containers without a look at the host, also where the host has no node.
func TestRuntimeNeedsNoCapabilityNodes(t *testing.T) {
	m := newMachine(t, "a100x8-mig")
	m.procDevices(t, fmt.Sprint("195 nvidia\n237 nvidia-caps\n", m.major(t, "nvidia-uvm"), " nvidia-uvm\n"))
	node := m.open(t)
	d, err := node.PartitionEdits(t.Context(), node.Inventory().GPUs[2].Partitions[1])
	if err != nil {
		t.Fatal(err)
	}
	edits := cdilib.ContainerEdits{ContainerEdits: &specs.ContainerEdits{DeviceNodes: d.ContainerEdits.DeviceNodes[1:]}}
	container := &oci.Spec{}
	if err := edits.Apply(container); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, d := range container.Linux.Devices {
		got = append(got, fmt.Sprintf("%s %s %d:%d", d.Type, d.Path, d.Major, d.Minor))
	}
	want := []string{"c /dev/nvidia-caps/nvidia-cap282 237:282", "c /dev/nvidia-caps/nvidia-cap284 237:284"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("devices of the container (-want +got):\n%s", diff)
	}
}
