// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/driver"
)

// meanings are those of all attributes and capacities.
var meanings = map[string]string{
	"type":                            "`gpu` for a whole GPU, `mig` for a partition",
	"productName":                     "model, as `nvidia-smi` has it",
	"brand":                           "brand, as NVML has it",
	"architecture":                    "`Turing`, `Ampere`, `Ada Lovelace`, `Hopper`, `Blackwell` and so on",
	"cudaComputeCapability":           "compute capability of the GPU",
	"driverVersion":                   "version of the driver, without leading zeros: 535.54.03 is `535.54.3`",
	"cudaDriverVersion":               "newest CUDA version that the driver supports",
	"addressingMode":                  "`HMM`, `ATS` or `None`",
	"index":                           "NVML's index of the GPU, which can change with a reboot",
	"minor":                           "number N in `/dev/nvidiaN`, and in the name of the device",
	"uuid":                            "UUID of the GPU or of the partition",
	"parentUUID":                      "UUID of the partition's GPU",
	"profile":                         "profile of the partition",
	"eccEnabled":                      "whether ECC is enabled; false if the driver does not report it",
	"nvlinkDomain":                    "has the same value for GPUs of a node that NVLink connects. Use it in `matchAttribute`",
	"fabricClique":                    "cluster UUID and clique of a multi-node NVLink fabric",
	"resource.kubernetes.io/pciBusID": "PCI address of the GPU",
	"resource.kubernetes.io/pcieRoot": "PCIe root complex of the GPU. Use it in `matchAttribute`, also with devices of other drivers",
	"resource.kubernetes.io/numaNode": "NUMA node of the GPU",
	"memory":                          "memory. Of a shared GPU, without what pods with limits have of it",
	"multiprocessors":                 "streaming multiprocessors",
	"copyEngines":                     "copy engines",
	"decoders":                        "video decoders",
	"encoders":                        "video encoders",
	"jpegEngines":                     "JPEG engines",
	"ofaEngines":                      "optical flow accelerators",
	"memorySlice<n>":                  "1 for each memory slice that the partition occupies",
	"shares":                          "equal shares of a GPU with `sharing.shares`, without those that pods with limits have",
}

// memorySlice are the capacities of a partition's place, of which there is one for each slice.
var memorySlice = regexp.MustCompile(`^memorySlice\d+$`)

// guard is true for devices that have an attribute.
const guard = `has(device.attributes["gpu.nvidia.com"].nvlinkDomain)`

// Kinds of devices with attributes of their own.
const (
	wholeGPU = "GPUs"
	static   = "partitions of an administrator"
	onDemand = "partitions on demand"
)

// deviceKinds are in the order of the page.
var deviceKinds = []string{wholeGPU, static, onDemand}

// claimSharing is in the order of the page: how claims share a GPU, its setting in the node configuration, and what a claim requests.
var claimSharing = []struct {
	claims                       device.ClaimShares
	setting, request, withoutAny string
}{
	{"", "", "", "the GPU"},
	{device.ByMemory, "memoryShares: true", "memory: 10Gi", "all of the memory"},
	{device.ByCount, "shares: 4", "shares: 2", "one share"},
	{device.Unlimited, "unlimited: true", "memory: 10Gi", "a part without an amount of memory"},
}

// published returns a device of each kind, and of each kind of sharing, as the agent publishes it.
func published() (kinds map[string]resourceapi.Device, shared map[device.ClaimShares]resourceapi.Device, err error) {
	gpu := func(minor int) device.GPU {
		return device.GPU{
			UUID: fmt.Sprintf("GPU-b196311b-9b65-409e-8dac-b7a507e9%04d", minor), Index: minor, Minor: minor, NUMANode: 0,
			PCIBusID: fmt.Sprintf("0000:1%d:00.0", minor), PCIeRoot: "pci0000:10", ProductName: "NVIDIA H100 80GB HBM3", Brand: "Nvidia",
			Architecture: "Hopper", ComputeCapability: "9.0", DriverVersion: "580.95.05", CUDADriverVersion: "13.0", AddressingMode: "HMM",
			ECCEnabled: ptr.To(true), MemoryBytes: 80 << 30, NVLinkDomain: "nvl-0", FabricClique: "4b8a1e8e-4b43-4a5e-8d0e-5f7f3f1c2d9a.1",
		}
	}
	half := device.Capacity{MemoryBytes: 40 << 30, Multiprocessors: 60, CopyEngines: 3, Decoders: 3, JPEGEngines: 3}
	place := device.Placement{Start: 0, Size: 4}
	cut, dynamic := gpu(1), gpu(2)
	cut.MIGCapable, cut.MIGEnabled = true, true
	cut.Partitions = []device.Partition{{
		UUID: "MIG-2f0d8c1e-6a3b-5c47-9e21-0d6b7a8c9e10", Parent: 1, Profile: "3g.40gb", ProfileID: 9, Capacity: half,
		Ref: device.Ref{GPU: cut.UUID, Placement: place},
	}}
	dynamic.MIGCapable, dynamic.MIGEnabled, dynamic.Dynamic = true, true, true
	dynamic.Profiles = []device.Profile{{ID: 9, Name: "3g.40gb", Compute: 3, Placements: []device.Placement{place}, Instances: 1, Capacity: half}}
	inventory := device.Inventory{GPUs: []device.GPU{gpu(0), cut, dynamic}}
	for _, s := range claimSharing {
		g := gpu(len(inventory.GPUs))
		if s.claims != "" {
			g.Sharing = device.Sharing{Strategy: device.TimeSlicing, Claims: s.claims}
		}
		if s.claims == device.ByCount {
			g.Sharing.Shares = 4
		}
		inventory.GPUs = append(inventory.GPUs, g)
	}
	pools, _ := (&driver.Offer{NodeName: "node-1"}).Pools(driver.Facts{
		Inventory: inventory, Kept: driver.Capabilities{Taints: true, Counters: true, Shares: true},
	})
	devices := map[string]resourceapi.Device{}
	for _, pool := range pools {
		for _, slice := range pool.Slices {
			for _, d := range slice.Devices {
				devices[d.Name] = d
			}
		}
	}
	find := func(name string) (d resourceapi.Device) {
		d, found := devices[name]
		if !found {
			err = fmt.Errorf("the agent does not publish %s, but %v", name, slices.Sorted(maps.Keys(devices)))
		}
		return d
	}
	kinds = map[string]resourceapi.Device{wholeGPU: find("gpu-0"), static: find("gpu-1-mig-3g40gb-9-0"), onDemand: find("gpu-2-mig-3g40gb-9-0")}
	shared = map[device.ClaimShares]resourceapi.Device{}
	for i, s := range claimSharing {
		shared[s.claims] = find(inventory.GPUs[3+i].Name())
	}
	return kinds, shared, err
}

// property is an attribute or a capacity: where it is, and what a selector of a claim compares it with.
type property struct {
	kind, selector string
	on             []string
}

// properties returns those of all kinds of devices, by name.
func properties(kinds map[string]resourceapi.Device, shared resourceapi.Device) (attributes, capacities map[string]*property) {
	attributes, capacities = map[string]*property{}, map[string]*property{}
	add := func(to map[string]*property, name string, p property, on string) {
		if memorySlice.MatchString(name) {
			name = "memorySlice<n>"
		}
		if to[name] == nil {
			to[name] = &p
		}
		if !slices.Contains(to[name].on, on) {
			to[name].on = append(to[name].on, on)
		}
	}
	for _, kind := range deviceKinds {
		d := kinds[kind]
		for _, name := range slices.Sorted(maps.Keys(d.Attributes)) {
			add(attributes, string(name), attributeOf(string(name), d.Attributes[name]), kind)
		}
		for _, name := range slices.Sorted(maps.Keys(d.Capacity)) {
			add(capacities, string(name), capacityOf(string(name), d.Capacity[name]), kind)
		}
	}
	add(capacities, "shares", capacityOf("shares", shared.Capacity["shares"]), "shared GPUs")
	return attributes, capacities
}

// domain returns the domain by which a selector finds a name, and the name in it.
func domain(name string) (in, rest string) {
	in, rest, found := strings.Cut(name, "/")
	if !found {
		return "gpu.nvidia.com", name
	}
	return in, rest
}

func attributeOf(name string, a resourceapi.DeviceAttribute) property {
	in, rest := domain(name)
	value := fmt.Sprintf("device.attributes[%q].%s", in, rest)
	switch {
	case a.StringValue != nil:
		return property{kind: "string", selector: fmt.Sprintf("%s == %q", value, *a.StringValue)}
	case a.IntValue != nil:
		return property{kind: "integer", selector: fmt.Sprintf("%s == %d", value, *a.IntValue)}
	case a.BoolValue != nil:
		return property{kind: "boolean", selector: value}
	default:
		return property{kind: "version", selector: fmt.Sprintf("%s.compareTo(semver(%q)) >= 0", value, ptr.Deref(a.VersionValue, ""))}
	}
}

func capacityOf(name string, c resourceapi.DeviceCapacity) property {
	in, rest := domain(name)
	return property{kind: "quantity", selector: fmt.Sprintf("device.capacity[%q].%s.compareTo(quantity(%q)) >= 0", in, rest, c.Value.String())}
}

// attributesPage has a row for each attribute and capacity, and for each way in which claims share a GPU.
func attributesPage(string) (string, error) {
	kinds, shared, err := published()
	if err != nil {
		return "", err
	}
	attributes, capacities := properties(kinds, shared[device.ByCount])
	text := header("Attributes and capacities of devices", "what pkg/driver publishes of an example, and hack/reference/attributes.go",
		"A claim selects devices by these attributes and capacities: `selectors: [{cel: {expression: …}}]`. The expressions below are true for "+
			"an H100, or for half of one. Names without a domain are in the domain of the driver, `gpu.nvidia.com` unless the chart's `driverName` "+
			"is another one. A device has no attribute for what its driver does not report. A selector that reads such an attribute fails, and the "+
			"scheduler then tries no other node: test for it first, `"+guard+" && …`. `kubectl get resourceslices -o yaml` shows the values of "+
			"your nodes, and [examples](../../examples/README.md) has claims.")
	for _, part := range []struct {
		title string
		of    map[string]*property
	}{{"Attributes", attributes}, {"Capacities", capacities}} {
		t := newTable("name", "type", "of", "meaning", "example")
		for _, name := range slices.Sorted(maps.Keys(part.of)) {
			if meanings[name] == "" {
				return "", fmt.Errorf("%s has no meaning: add it to hack/reference/attributes.go", name)
			}
			p := part.of[name]
			of := strings.Join(p.on, ", ")
			if slices.Equal(p.on, deviceKinds) {
				of = "all"
			}
			t.row(code(name), p.kind, of, prose(meanings[name]), code(p.selector))
		}
		text += "\n## " + part.title + "\n\n" + t.String()
	}
	text += "\nWith the chart value `partitionUUIDs`, a partition on demand has a `uuid` while it exists.\n"
	for name := range meanings {
		if attributes[name] == nil && capacities[name] == nil {
			return "", fmt.Errorf("%s has a meaning, and no device has it", name)
		}
	}
	t := newTable("`sharing` in the node configuration", "several claims", "capacity: total, without a request, least, step", "a claim can request", "without a request it gets")
	for _, s := range claimSharing {
		d := shared[s.claims]
		several := "no"
		if ptr.Deref(d.AllowMultipleAllocations, false) {
			several = "yes"
		}
		var policies []string
		for _, name := range slices.Sorted(maps.Keys(d.Capacity)) {
			policies = append(policies, policy(string(name), d.Capacity[name]))
		}
		t.row(cmp.Or(code(s.setting), "none"), several, strings.Join(policies, "<br>"), cmp.Or(code(s.request), "–"), s.withoutAny)
	}
	return text + "\n## Shared GPUs\n\n" + wrap("The node configuration, or the chart value `consumableShares`, decides how claims [share](../user/sharing.md) "+
		"a GPU (Kubernetes 1.36). The strategy, `TimeSlicing` or `MPS`, makes no difference here. Replicas for limits are not in ResourceSlices. "+
		"Partitions of an administrator are shared like their GPU. The devices have the attributes above. A claim requests an amount by "+
		"`capacity: {requests: {memory: 10Gi}}` in its request, without a domain.") + "\n\n" + t.String(), nil
}

// policy describes a capacity by its request policy.
func policy(name string, c resourceapi.DeviceCapacity) string {
	text := code(name) + ": " + c.Value.String()
	if p := c.RequestPolicy; p != nil && p.Default != nil {
		text += ", " + p.Default.String()
		if p.ValidRange != nil && p.ValidRange.Min != nil && p.ValidRange.Step != nil {
			text += ", " + p.ValidRange.Min.String() + ", " + p.ValidRange.Step.String()
		}
	}
	return text
}
