// SPDX-License-Identifier: Apache-2.0

package nodelabels

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// test/dropin compares the labels with those of GPU Feature Discovery. This test has the cases that it does not handle, or handles wrongly.
func TestLabels(t *testing.T) {
	h100 := device.GPU{
		UUID: "GPU-a", ProductName: "NVIDIA H100 80GB HBM3", MemoryBytes: 80 << 30, ComputeCapability: "9.0", CUDADriverVersion: "13.0",
		MIGCapable: true, PCIClass: device.PCIClass3D,
	}
	with := func(change func(*device.GPU)) device.GPU {
		g := h100
		change(&g)
		return g
	}
	part := func(profile string, made bool) device.Partition {
		return device.Partition{UUID: "MIG-" + profile, Profile: profile, Made: made, Capacity: device.Capacity{MemoryBytes: 10 << 30, Multiprocessors: 16}}
	}
	partitioned := func(parts ...device.Partition) device.GPU {
		return with(func(g *device.GPU) { g.MIGEnabled, g.Partitions = true, parts })
	}
	single, mixed := device.MIGStrategySingle, device.MIGStrategyMixed
	for name, test := range map[string]struct {
		gpus     []device.GPU
		strategy device.MIGStrategy
		want     map[string]string // "-" for no such label
	}{
		"no GPU": {},
		"whole":  {gpus: []device.GPU{h100, h100}, want: map[string]string{"gpu.count": "2", "gpu.replicas": "1", "gpu.mode": "compute", "mig.strategy": "-", "gpu.family": "hopper"}},
		"the commonest of two models": {
			gpus: []device.GPU{with(func(g *device.GPU) { g.ProductName = "NVIDIA L4" }), h100, h100},
			want: map[string]string{"gpu.product": "NVIDIA-H100-80GB-HBM3", "gpu.count": "2"},
		},
		"two classes":          {gpus: []device.GPU{h100, with(func(g *device.GPU) { g.PCIClass = device.PCIClassVGA })}, want: map[string]string{"gpu.mode": "unknown"}},
		"graphics":             {gpus: []device.GPU{with(func(g *device.GPU) { g.PCIClass = device.PCIClassVGA })}, want: map[string]string{"gpu.mode": "graphics"}},
		"no class":             {gpus: []device.GPU{with(func(g *device.GPU) { g.PCIClass = 0 })}, want: map[string]string{"gpu.mode": "unknown"}},
		"two cliques":          {gpus: []device.GPU{with(func(g *device.GPU) { g.FabricClique = "c.1" }), with(func(g *device.GPU) { g.FabricClique = "c.2" })}, want: map[string]string{"gpu.clique": "-"}},
		"a clique":             {gpus: []device.GPU{h100, with(func(g *device.GPU) { g.FabricClique = "c.1" })}, want: map[string]string{"gpu.clique": "c.1"}},
		"unknown architecture": {gpus: []device.GPU{with(func(g *device.GPU) { g.ComputeCapability = "11.0" })}, want: map[string]string{"gpu.family": "undefined", "gpu.compute.major": "11"}},
		"no architecture":      {gpus: []device.GPU{with(func(g *device.GPU) { g.ComputeCapability = "" })}, want: map[string]string{"gpu.family": "-"}},
		"whole GPUs before the commonest": {
			gpus: []device.GPU{partitioned(part("1g.10gb", false)), partitioned(part("1g.10gb", false)), with(func(g *device.GPU) { g.ProductName = "NVIDIA L4" })},
			want: map[string]string{"gpu.product": "NVIDIA-L4", "gpu.count": "1", "gpu.replicas": "1"},
		},
		"a whole GPU beside one in MIG mode": {gpus: []device.GPU{partitioned(), h100}, want: map[string]string{"gpu.count": "2", "gpu.replicas": "1"}},
		"long name of a partition": {
			gpus: []device.GPU{with(func(g *device.GPU) {
				g.MIGEnabled, g.Partitions, g.ProductName = true, []device.Partition{part("1g.24gb", false)}, "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
			})}, strategy: mixed,
			want: map[string]string{"mig-1g.24gb.product": "NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstation-Edi-MIG-1g.24gb"},
		},
		"long name": {
			gpus: []device.GPU{with(func(g *device.GPU) { g.ProductName = "NVIDIA " + strings.Repeat("long ", 11) + "- x" })},
			want: map[string]string{"gpu.product": strings.TrimSuffix("NVIDIA-"+strings.Repeat("long-", 11), "-")},
		},
		"single": {
			gpus: []device.GPU{partitioned(part("1g.10gb", false))}, strategy: single,
			want: map[string]string{"gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", "gpu.count": "1", "gpu.memory": "10240", "gpu.slices.gi": "1", "gpu.slices.ci": "1"},
		},
		"part of an instance": {
			gpus: []device.GPU{partitioned(part("2c.3g.40gb", false))}, strategy: mixed,
			want: map[string]string{"mig-2c.3g.40gb.slices.gi": "3", "mig-2c.3g.40gb.slices.ci": "2", "gpu.replicas": "0"},
		},
		"an unknown profile": {
			gpus: []device.GPU{partitioned(part(device.UnknownProfile, false), part("1g.10gb", false))}, strategy: mixed,
			want: map[string]string{"mig-unknown.count": "-", "mig-1g.10gb.count": "1"},
		},
		"an unknown profile in single": {
			gpus: []device.GPU{partitioned(part(device.UnknownProfile, false), part("1g.10gb", false))}, strategy: single,
			want: map[string]string{"gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", "gpu.count": "1"},
		},
		"two profiles in single": {
			gpus: []device.GPU{partitioned(part("1g.10gb", false), part("2g.20gb", false))}, strategy: single,
			want: map[string]string{"gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-INVALID", "gpu.count": "0", "gpu.memory": "0", "gpu.sharing-strategy": ""},
		},
		"a whole GPU in single":  {gpus: []device.GPU{h100, partitioned(part("1g.10gb", false))}, strategy: single, want: map[string]string{"gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-INVALID"}},
		"an empty GPU in single": {gpus: []device.GPU{partitioned(), partitioned(part("1g.10gb", false))}, strategy: single, want: map[string]string{"gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-INVALID"}},
		"partitions for claims": {
			gpus: []device.GPU{with(func(g *device.GPU) {
				g.MIGEnabled, g.Dynamic, g.Partitions = true, true, []device.Partition{part("1g.10gb", true)}
			})}, strategy: single,
			want: map[string]string{"gpu.product": "NVIDIA-H100-80GB-HBM3", "gpu.count": "1", "gpu.replicas": "1", "mig.strategy": "single"},
		},
		"shared in part": {
			gpus: []device.GPU{partitioned(part("1g.10gb", false))}, strategy: mixed,
			want: map[string]string{"mig-1g.10gb.replicas": "1", "mig-1g.10gb.sharing-strategy": "none"},
		},
		"MPS": {
			gpus: []device.GPU{with(func(g *device.GPU) {
				g.Sharing = device.Sharing{Strategy: device.MPS, Replicas: map[string]device.Replicas{"": {Count: 4}}}
			})},
			want: map[string]string{"mps.capable": "true", "gpu.replicas": "4", "gpu.sharing-strategy": "mps", "gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED"},
		},
	} {
		got := Of(device.Inventory{DriverVersion: "580.95.05", GPUs: test.gpus}, Options{Resources: device.Resources{GPU: "nvidia.com/gpu", Strategy: test.strategy}})
		for key, want := range test.want {
			value, found := got[Prefix+key]
			if !found {
				value = "-"
			}
			if value != want {
				t.Errorf("%s: %s is %q, want %q", name, key, value, want)
			}
		}
		if len(test.gpus) == 0 && len(got) > 0 {
			t.Errorf("%s: %v", name, got)
		}
		for key, value := range got {
			if wrong := append(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)...); len(wrong) > 0 {
				t.Errorf("%s: %s=%s: %v", name, key, value, wrong)
			}
		}
	}
}

// The keys of MIGStrategySingle are those of GPUs, whatever the resource is called.
func TestNamesOfResources(t *testing.T) {
	gpu := device.GPU{UUID: "GPU-a", ProductName: "NVIDIA H100", MIGEnabled: true, Partitions: []device.Partition{{UUID: "MIG-a", Profile: "1g.10gb"}}}
	got := Of(device.Inventory{GPUs: []device.GPU{gpu}}, Options{Resources: device.Resources{GPU: "example.com/card", Strategy: device.MIGStrategySingle}})
	if got[Prefix+"gpu.product"] != "NVIDIA-H100-MIG-1g.10gb" || got[Prefix+"gpu.replicas"] != "1" {
		t.Errorf("labels %v", got)
	}
}

func TestMachineAndTimestamp(t *testing.T) {
	inv := device.Inventory{DriverVersion: "580.95.05", GPUs: []device.GPU{{UUID: "GPU-a", ProductName: "NVIDIA L4"}}}
	for machine, want := range map[string]string{"": "unknown", " DGX H100 (2)\n": "DGX-H100-2", "To Be Filled By O.E.M.": "To-Be-Filled-By-O.E.M", "-": ""} {
		if got := Of(inv, Options{Machine: machine})[Prefix+"gpu.machine"]; got != want {
			t.Errorf("machine %q: %q, want %q", machine, got, want)
		}
	}
	if got := Of(inv, Options{Timestamp: time.Unix(1700000000, 0)})[Prefix+"gfd.timestamp"]; got != "1700000000" {
		t.Errorf("timestamp %q", got)
	}
	if _, found := Of(inv, Options{})[Prefix+"gfd.timestamp"]; found {
		t.Error("a timestamp without a time")
	}
}
