// SPDX-License-Identifier: Apache-2.0

package config

import (
	"io"
	"reflect"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/pkg/device"
)

func loadFile(t *testing.T, content string, more ...string) (Config, error) {
	t.Helper()
	return Load(append([]string{"--config", write(t, content), "--node-name=n"}, more...), environment{}.lookup, io.Discard)
}

var sharedGPUs = []device.GPU{
	{UUID: "GPU-a", Index: 0, ProductName: "NVIDIA L4"},
	{UUID: "GPU-b", Index: 1, ProductName: "NVIDIA L4"},
	{UUID: "GPU-c", Index: 2, ProductName: "NVIDIA A30", MIGCapable: true, Partitions: []device.Partition{{UUID: "MIG-c0", Index: 0}, {UUID: "MIG-c1", Index: 1}}},
	{UUID: "GPU-d", Index: 3, ProductName: "NVIDIA A30", MIGCapable: true, Partitions: []device.Partition{{UUID: "MIG-d0", Index: 0, GPUInstance: 3}}},
}

// Each configuration says of four GPUs how they are shared.
func TestSharing(t *testing.T) {
	const gpu = "nvidia.com/gpu"
	replicas := func(resource string, n int, renamed bool) device.Sharing {
		return device.Sharing{Strategy: device.TimeSlicing, Replicas: map[string]device.Replicas{resource: {Count: n, Renamed: renamed}}}
	}
	mps := func(n int) device.Sharing {
		return device.Sharing{Strategy: device.MPS, Replicas: map[string]device.Replicas{"": {Count: n}}}
	}
	partitions := func(count int, of map[string]int) device.Sharing {
		return device.Sharing{Strategy: device.TimeSlicing, Replicas: map[string]device.Replicas{"nvidia.com/mig-1g.6gb": {Count: count, Of: of}}}
	}
	none := device.Sharing{}
	for content, want := range map[string][4]device.Sharing{
		"": {},
		"sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}": {
			replicas(gpu, 4, false), replicas(gpu, 4, false), replicas(gpu, 4, false), replicas(gpu, 4, false),
		},
		"sharing: {timeSlicing: {renameByDefault: true, resources: [{name: gpu, replicas: 2, devices: all}]}}": {
			replicas(gpu, 2, true), replicas(gpu, 2, true), replicas(gpu, 2, true), replicas(gpu, 2, true),
		},
		"sharing: {timeSlicing: {resources: [{name: gpu, rename: gpu.shared, replicas: 2, devices: 3}]}}": {
			replicas(gpu, 2, false), replicas(gpu, 2, false), replicas(gpu, 2, false), none,
		},
		"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: []}]}}": {},
		"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 4, devices: [0]}, {name: nvidia.com/gpu, replicas: 3}]}}": {
			replicas(gpu, 4, false), replicas(gpu, 3, false), replicas(gpu, 3, false), replicas(gpu, 3, false),
		},
		"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}, mps: {failRequestsGreaterThanOne: false, resources: [{name: gpu, replicas: 3}]}}": {
			mps(3), mps(3), mps(3), mps(3),
		},
		`sharing: {timeSlicing: {resources: [{name: mig-1g.6gb, replicas: 2, devices: ["2:1", "MIG-d0", 9]}]}}`: {
			none, none, partitions(0, map[string]int{"MIG-c1": 2}), partitions(0, map[string]int{"MIG-d0": 2}),
		},
		`sharing: {timeSlicing: {resources: [{name: mig-1g.6gb, replicas: 4, devices: ["2:1", MIG-GPU-d/3/0]}, {name: mig-1g.6gb, replicas: 3, devices: [MIG-c0, "02"]}]}}`: {
			none, none, partitions(3, map[string]int{"MIG-c0": 3, "MIG-c1": 4}), partitions(0, map[string]int{"MIG-d0": 4}),
		},
		`sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [1, "2", GPU-d]}]}}`: {
			none, replicas(gpu, 2, false), replicas(gpu, 2, false), replicas(gpu, 2, false),
		},
		`{sharing: {timeSlicing: {resources: [{name: mig-1g.6gb, replicas: 2}]}}, tandem: {devices: [
			{match: {index: 0}, sharing: {strategy: None}}, {match: {uuid: GPU-b}, sharing: {strategy: TimeSlicing, interval: Short, memoryShares: true, replicas: 3}}]}}`: {
			none, {Strategy: device.TimeSlicing, Interval: "Short", Claims: device.ByMemory, Replicas: map[string]device.Replicas{"": {Count: 3}}},
			replicas("nvidia.com/mig-1g.6gb", 2, false), replicas("nvidia.com/mig-1g.6gb", 2, false),
		},
		"tandem: {devices: [{match: {model: NVIDIA L4}, sharing: {strategy: TimeSlicing, memoryShares: true}}]}": {
			{Strategy: device.TimeSlicing, Claims: device.ByMemory}, {Strategy: device.TimeSlicing, Claims: device.ByMemory}, none, none,
		},
		`{sharing: {timeSlicing: {resources: []}, mps: {renameByDefault: true, failRequestsGreaterThanOne: true, resources: [{name: nvidia.com/gpu, replicas: 4, devices: [0]}]}}, tandem: {devices: [
			{match: {index: 1}, sharing: {strategy: MPS, replicas: 2, memoryShares: true, namespaces: [b, a, b]}}, {match: {uuid: GPU-c}, sharing: {strategy: MPS, memoryShares: true}}]}}`: {
			{Strategy: device.MPS, Replicas: map[string]device.Replicas{"": {Count: 4, Renamed: true}}},
			{Strategy: device.MPS, Claims: device.ByMemory, Replicas: map[string]device.Replicas{"": {Count: 2}}, Namespaces: []string{"a", "b"}},
			{Strategy: device.MPS, Claims: device.ByMemory}, none,
		},
		`{sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [3]}]}}, tandem: {devices: [
			{match: {index: 0}, sharing: {strategy: TimeSlicing, shares: 4, replicas: 10}}, {match: {index: 1}, sharing: {strategy: TimeSlicing, unlimited: true}}]}}`: {
			{Strategy: device.TimeSlicing, Claims: device.ByCount, Shares: 4, Replicas: map[string]device.Replicas{"": {Count: 4}}},
			{Strategy: device.TimeSlicing, Claims: device.Unlimited}, none, replicas(gpu, 2, false),
		},
	} {
		c, err := loadFile(t, content)
		if err != nil {
			t.Errorf("%s: %v", content, err)
			continue
		}
		for i, gpu := range sharedGPUs {
			if got := c.SharingOf(gpu); !reflect.DeepEqual(got, want[i]) {
				t.Errorf("%s: GPU %d is shared %+v, want %+v", content, i, got, want[i])
			}
		}
		if err := c.CheckDevices(device.Inventory{GPUs: sharedGPUs}); err != nil {
			t.Errorf("%s: %v", content, err)
		}
	}
}

func TestSharingErrors(t *testing.T) {
	resource := func(text string) string { return "sharing: {timeSlicing: {resources: [{" + text + "}]}}" }
	rule := func(text string) string {
		return "tandem: {devices: [{match: {index: 0}, sharing: {" + text + "}}]}"
	}
	for content, want := range map[string]string{
		"sharing: {timeSlicing: {renameByDefault: true}}":                "sharing.timeSlicing.resources: no resources specified",
		resource("replicas: 2"):                                          "sharing.timeSlicing.resources[0].name: no resource name specified",
		resource("name: nvidia.com/gpu"):                                 "sharing.timeSlicing.resources[0].replicas: no replicas specified",
		resource("name: nvidia.com/gpu, replicas: 1"):                    "sharing.timeSlicing.resources[0].replicas: number of replicas must be >= 2",
		resource("name: nvidia.com/gpu, replicas: -1"):                   "number of replicas must be >= 2",
		resource("name: nvidia.com/gpu, replicas: two"):                  "replicas",
		resource("name: gpu, replicas: 2, rename: a_b"):                  "sharing.timeSlicing.resources[0].rename: incorrect format for resource name 'nvidia.com/a_b'",
		resource("name: gpu, replicas: 2, devices: some"):                "devices set as 'some' but the only valid string input is 'all'",
		resource("name: gpu, replicas: 2, devices: 0"):                   "devices set as '0' but a count of devices must be > 0",
		resource("name: gpu, replicas: 2, devices: {a: b}"):              "devices: unrecognized type for devices spec",
		resource("name: gpu, replicas: 2, devices: [first]"):             `devices[0]: unsupported type for device in devices list: "first"`,
		resource("name: gpu, replicas: 2, devices: [-1]"):                `devices[0]: unsupported type for device in devices list: "-1"`,
		resource("name: gpu, replicas: 2, devices: [1.5]"):               `devices[0]: unsupported type for device in devices list: "1.5"`,
		resource(`name: gpu, replicas: 2, devices: ["0:x"]`):             `devices[0]: unsupported type for device in devices list: "0:x"`,
		resource("name: gpu, replicas: 2, shares: 3"):                    `unknown field "sharing.timeSlicing.resources[0].shares"`,
		"sharing: {mps: {renameByDefault: true}}":                        "sharing.mps.resources: no resources specified",
		"sharing: {mps: {resources: [{name: gpu, replicas: 49}]}}":       "sharing.mps.resources[0].replicas: maximum allowed replicas is 48 with MPS",
		"sharing: {mps: {resources: [{name: mig-1g.6gb, replicas: 2}]}}": "sharing.mps.resources[0].name: sharing using MPS is not supported for MIG devices",
		rule("strategy: Fair, replicas: 2"):                              `tandem.devices[0].sharing.strategy: "Fair" is not one of TimeSlicing, MPS, None`,
		rule("strategy: MPS"):                                            "tandem.devices[0].sharing: has no effect",
		rule("strategy: MPS, replicas: 49"):                              "tandem.devices[0].sharing.replicas: maximum allowed replicas is 48 with MPS",
		rule("strategy: TimeSlicing, replicas: 2, namespaces: [a]"):      "tandem.devices[0].sharing.namespaces: is for strategy MPS",
		rule("strategy: MPS, replicas: 2, namespaces: []"):               "namespaces: the list is empty",
		rule("strategy: MPS, replicas: 2, namespaces: [a, B]"):           `namespaces: "B" is no name of a namespace`,
		rule("strategy: MPS, replicas: 2, namespaces: a"):                "namespaces: ",
		rule("strategy: MPS, replicas: 2, interval: Short"):              "tandem.devices[0].sharing.interval: is for strategy TimeSlicing",
		rule("replicas: 2"):                                              `tandem.devices[0].sharing.strategy: "" is not one of`,
		rule("strategy: TimeSlicing"):                                    "tandem.devices[0].sharing: has no effect",
		rule("strategy: TimeSlicing, replicas: 1"):                       "tandem.devices[0].sharing.replicas: number of replicas must be >= 2",
		rule("strategy: TimeSlicing, replicas: 2, interval: Slow"):       `tandem.devices[0].sharing.interval: "Slow" is not one of Default, Short, Medium, Long`,
		rule("strategy: TimeSlicing, shares: -1"):                        "tandem.devices[0].sharing.shares: must be 1 to 1024, or 0 for none",
		rule("strategy: TimeSlicing, shares: 1025"):                      "tandem.devices[0].sharing.shares: must be 1 to 1024, or 0 for none",
		rule("strategy: TimeSlicing, shares: 4, memoryShares: true"):     "tandem.devices[0].sharing: claims share a GPU in one way",
		rule("strategy: MPS, shares: 4"):                                 "tandem.devices[0].sharing: shares and unlimited are for strategy TimeSlicing",
		rule("strategy: MPS, unlimited: true"):                           "tandem.devices[0].sharing: shares and unlimited are for strategy TimeSlicing",
		rule("strategy: None, replicas: 2"):                              "tandem.devices[0].sharing: strategy None excludes sharing",
		"tandem: {devices: [{match: {index: 2}, mig: dynamic, sharing: {strategy: TimeSlicing, memoryShares: true}}]}": "tandem.devices[0].sharing: conflicts with mig: dynamic",
	} {
		if _, err := loadFile(t, content); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s:\ngot  %v\nwant %s", content, err, want)
		}
	}
}

// What only the node's GPUs can tell.
func TestSharingContradictions(t *testing.T) {
	shared := "sharing: {strategy: TimeSlicing, memoryShares: true}"
	for content, want := range map[string]string{
		"tandem: {devices: [{match: {index: 0}, " + shared + "}, {match: {model: NVIDIA L4}, sharing: {strategy: None}}]}": "set different sharing for GPU GPU-a",
		"tandem: {devices: [{match: {index: 2}, mig: dynamic}, {match: {model: NVIDIA A30}, " + shared + "}]}":             "GPU GPU-c (index 2) cannot be shared and have MIG partitions on demand",
	} {
		c, err := loadFile(t, content)
		if err != nil {
			t.Fatal(err)
		}
		err = c.CheckContradictions(device.Inventory{GPUs: sharedGPUs})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s:\ngot  %v\nwant %s", content, err, want)
		}
		if c.SharingOf(sharedGPUs[0]).Shared() {
			t.Errorf("%s: GPU 0 is shared", content)
		}
	}
}

func TestExcluded(t *testing.T) {
	for _, mode := range []string{"Dual", "ClaimsOnly", "DevicePluginOnly", "Split"} {
		c, err := loadFile(t, "{sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}, tandem: {mode: "+mode+", devices: [{match: {index: 0}, use: none}, {match: {index: 1}, use: limits}]}}")
		if err != nil {
			t.Fatal(err)
		}
		if c.OfferedToClaims(sharedGPUs[0]) || c.OfferedToPods(sharedGPUs[0]) {
			t.Errorf("%s: an excluded GPU is offered", mode)
		}
		if c.SharingOf(sharedGPUs[0]).Shared() || !c.SharingOf(sharedGPUs[1]).Shared() {
			t.Errorf("%s: an excluded GPU is shared, or another is not", mode)
		}
		if !c.OfferedToClaims(sharedGPUs[1]) && !c.OfferedToPods(sharedGPUs[1]) {
			t.Errorf("%s: another GPU is not offered", mode)
		}
	}
	if _, err := loadFile(t, "tandem: {mode: Split, devices: [{match: {index: 0}, use: none}]}"); err == nil {
		t.Error("Split without a use is accepted")
	}
}

// An entry for devices of other nodes has no effect, which is no mistake.
func TestSharingOfDevicesElsewhere(t *testing.T) {
	c, err := loadFile(t, `sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [0]}, {name: mig-1g.6gb, replicas: 2, devices: ["2:0"]}, {name: gpu, replicas: 2, devices: [7, "0:0"]}]}}`)
	if err != nil {
		t.Fatal(err)
	}
	err = c.CheckSharing(device.Inventory{GPUs: sharedGPUs})
	if err == nil || err.Error() != "sharing.timeSlicing.resources[2].devices: nvidia.com/gpu is not shared on this node, because it has none of the devices 7, 0:0" {
		t.Errorf("got %v", err)
	}
	if err := c.CheckDevices(device.Inventory{GPUs: sharedGPUs}); err != nil {
		t.Errorf("is a mistake: %v", err)
	}
}

// The file names resources as the flag does.
func TestSharingOfARenamedResource(t *testing.T) {
	path := write(t, "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}")
	c, err := Load([]string{"--config", path, "--node-name=n", "--resource-name=example.com/gpu"}, environment{}.lookup, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if got := c.SharingOf(sharedGPUs[0]).Replicas["example.com/gpu"].Count; got != 2 {
		t.Errorf("%d replicas, want 2", got)
	}
}

// --consumable-shares applies to the GPUs that no rule matches, with the values of NVIDIA's DRA driver.
func TestConsumableShares(t *testing.T) {
	content := "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [1]}]}}\n" +
		"tandem: {devices: [{match: {index: 0}, sharing: {strategy: None}}]}"
	for value, want := range map[string]device.Sharing{
		"": {}, "disabled": {},
		"memory":    {Strategy: device.TimeSlicing, Claims: device.ByMemory},
		"unlimited": {Strategy: device.TimeSlicing, Claims: device.Unlimited},
		"4":         {Strategy: device.TimeSlicing, Claims: device.ByCount, Shares: 4},
	} {
		c, err := loadFile(t, content, "--consumable-shares="+value)
		if err != nil {
			t.Errorf("%q: %v", value, err)
			continue
		}
		if got := c.SharingOf(sharedGPUs[0]); got.Shared() {
			t.Errorf("%q: a GPU with a rule is shared: %+v", value, got)
		}
		if got := c.SharingOf(sharedGPUs[2]); !reflect.DeepEqual(got, want) {
			t.Errorf("%q: a GPU without a rule is shared %+v, want %+v", value, got, want)
		}
		want.Strategy, want.Replicas = device.TimeSlicing, map[string]device.Replicas{"nvidia.com/gpu": {Count: 2}}
		if got := c.SharingOf(sharedGPUs[1]); !reflect.DeepEqual(got, want) {
			t.Errorf("%q: a GPU with replicas is shared %+v, want %+v", value, got, want)
		}
	}
	for value, want := range map[string]string{
		"some": `--consumable-shares: "some" is not disabled, memory, unlimited or a number from 1 to 1024`,
		"0":    `"0" is not`,
		"04":   `"04" is not`,
		"2000": `"2000" is not`,
	} {
		if _, err := loadFile(t, content, "--consumable-shares="+value); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", value, err, want)
		}
	}
	mps := "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}"
	if _, err := loadFile(t, mps, "--consumable-shares=4"); err == nil || !strings.Contains(err.Error(), "sharing.mps is set") {
		t.Errorf("beside MPS: %v", err)
	}
}
