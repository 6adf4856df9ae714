// SPDX-License-Identifier: Apache-2.0

package config

import (
	"io"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// fourGPUs are two of each model.
var fourGPUs = device.Inventory{GPUs: []device.GPU{
	{UUID: "GPU-a", Index: 0, ProductName: "NVIDIA L4"}, {UUID: "GPU-b", Index: 1, ProductName: "NVIDIA L4"},
	{UUID: "GPU-c", Index: 2, ProductName: "NVIDIA L40S"}, {UUID: "GPU-d", Index: 3, ProductName: "NVIDIA L40S"},
}}

func load(t *testing.T, content string, args ...string) Config {
	t.Helper()
	c, err := Load(append([]string{"--config", write(t, content), "--node-name=n"}, args...), environment{}.lookup, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestOffered(t *testing.T) {
	const rules = "devices: [{match: {uuid: GPU-a}, use: limits}, {match: {index: 1}, use: limits}, {match: {model: NVIDIA L40S}, use: claims}]"
	tests := []struct{ tandem, claims, limits string }{
		{"", "abcd", "abcd"},
		{"mode: Dual, " + rules, "abcd", "abcd"},
		{"mode: ClaimsOnly", "abcd", ""},
		{"mode: DevicePluginOnly, " + rules, "", "abcd"},
		{"mode: Split, " + rules, "cd", "ab"},
		{"mode: Split, devices: [{match: {index: 3}, use: limits}]", "abc", "d"},
		{"mode: Split, devices: [{match: {index: 3}, use: limits}, {match: {model: NVIDIA L4}, mig: dynamic}]", "abc", "d"},
		{"mode: Split, devices: [{match: {model: NVIDIA L4}, use: limits}, {match: {index: 0}, use: claims}]", "cd", "b"},
	}
	for _, test := range tests {
		c := load(t, "tandem: {"+test.tandem+"}")
		var claims, limits string
		for _, gpu := range fourGPUs.GPUs {
			if c.OfferedToClaims(gpu) {
				claims += strings.TrimPrefix(gpu.UUID, "GPU-")
			}
			if c.OfferedToPods(gpu) {
				limits += strings.TrimPrefix(gpu.UUID, "GPU-")
			}
		}
		if claims != test.claims || limits != test.limits {
			t.Errorf("{%s}: claims get %q, limits %q; want %q, %q", test.tandem, claims, limits, test.claims, test.limits)
		}
	}
}

func TestCheckDevices(t *testing.T) {
	tests := []struct {
		name, tandem   string
		want           []string
		contradictions bool
	}{
		{"right", "mode: Split, devices: [{match: {index: 0}, use: limits}, {match: {uuid: GPU-a}, use: limits}]", nil, false},
		{"another mode", "mode: Dual, devices: [{match: {index: 9}, use: limits}]", nil, false},
		{"MIG alone for another model", "mode: Split, devices: [{match: {index: 0}, use: limits}, {match: {model: A30}, mig: dynamic}]", nil, false},
		{"contradiction about MIG", "devices: [{match: {model: NVIDIA L40S}, mig: dynamic}, {match: {index: 2}, use: limits}, {match: {uuid: GPU-d}, mig: static}]",
			[]string{`tandem.devices[0] (model "NVIDIA L40S") and tandem.devices[2] (uuid GPU-d) set both static and dynamic MIG for GPU GPU-d (index 3)`}, true},
		{"no such GPU", "mode: Split, devices: [{match: {index: 0}, use: limits}, {match: {index: 4}, use: claims}, {match: {model: L4}, use: claims}]",
			[]string{"tandem.devices[1].match: no GPU of this node has index 4", `tandem.devices[2].match: no GPU of this node has model "L4"`}, false},
		{"contradiction", "mode: Split, devices: [{match: {model: NVIDIA L40S}, use: limits}, {match: {uuid: GPU-d}, use: claims}]",
			[]string{`tandem.devices[0] (model "NVIDIA L40S") and tandem.devices[1] (uuid GPU-d) set different uses for GPU GPU-d (index 3)`}, true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			c := load(t, "tandem: {"+test.tandem+"}")
			err := c.CheckDevices(fourGPUs)
			if (err != nil) != (test.want != nil) {
				t.Errorf("got %v", err)
			}
			for _, want := range test.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("%q is missing in %v", want, err)
				}
			}
			if err := c.CheckContradictions(fourGPUs); (err != nil) != test.contradictions {
				t.Errorf("contradictions: got %v", err)
			}
		})
	}
}

// TestModePrecedence: file, environment, flag, label, each above the one before.
func TestModePrecedence(t *testing.T) {
	path := write(t, "tandem: {mode: ClaimsOnly, devices: [{match: {index: 0}, use: limits}]}")
	loaded := func(env environment, args ...string) Config {
		t.Helper()
		c, err := Load(append(args, "--node-name=n", "--config="+path), env.lookup, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	if got := loaded(nil).Mode; got != ModeClaimsOnly {
		t.Errorf("file: %s", got)
	}
	if got := loaded(environment{"MODE": "DevicePluginOnly"}).Mode; got != ModeDevicePluginOnly {
		t.Errorf("environment: %s", got)
	}
	c := loaded(environment{"MODE": "DevicePluginOnly"}, "--mode=Dual")
	if c.Mode != ModeDual {
		t.Errorf("flag: %s", c.Mode)
	}
	for _, mode := range Modes {
		if got, err := c.ForNode(string(mode), true); err != nil || got.Mode != mode || got.Equal(c) != (mode == ModeDual) {
			t.Errorf("label %s: got %s, %v", mode, got.Mode, err)
		}
	}
	if got, err := c.ForNode("", false); err != nil || !got.Equal(c) {
		t.Errorf("without a label: %+v, %v", got, err)
	}
	c.Devices = nil
	for label, want := range map[string]string{"": `"" is not one of`, "dual": `tandem-gpu.dev/mode=dual`, "Split": "tandem.devices: is required by mode Split"} {
		if _, err := c.ForNode(label, true); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("label %q: got %v, want %s", label, err, want)
		}
	}
}

// Rules without an effect are reported once each.
func TestCheckEffect(t *testing.T) {
	for tandem, want := range map[string]string{
		"": "",
		"devices: [{match: {index: 0}, mig: dynamic}, {match: {index: 1}, mig: static}]": "",
		"devices: [{match: {model: A30}, mig: static}]":                                  `tandem.devices[0].match: no GPU of this node has model "A30"`,
		"devices: [{match: {model: A30}, mig: dynamic}]":                                 `tandem.devices[0].match: no GPU of this node has model "A30"`,
		"devices: [{match: {index: 0}, use: none}, {match: {index: 9}, use: none}]":      "tandem.devices[1].match: no GPU of this node has index 9",
		"devices: [{match: {index: 9}, sharing: {strategy: TimeSlicing, replicas: 2}}]":  "tandem.devices[0].match: no GPU of this node has index 9",
		"devices: [{match: {index: 1}, mig: dynamic}]":                                   "tandem.devices[0].mig: index 1 of this node has no MIG (NVIDIA L4)",
		"mode: Split, devices: [{match: {index: 9}, use: limits, mig: dynamic}]":         "",
	} {
		c := load(t, "tandem: {"+tandem+"}")
		gpus := device.Inventory{GPUs: []device.GPU{{Index: 0, MIGCapable: true}, {Index: 1, ProductName: "NVIDIA L4"}}}
		got := ""
		if err := c.CheckEffect(gpus); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("{%s}: %q, want %q", tandem, got, want)
		}
	}
}

func TestDynamic(t *testing.T) {
	for tandem, want := range map[string]string{
		"": "",
		"devices: [{match: {model: NVIDIA L40S}, mig: dynamic}]":                                                             "cd",
		"mode: DevicePluginOnly, devices: [{match: {index: 0}, mig: dynamic, use: limits}]":                                  "a",
		"devices: [{match: {uuid: GPU-a}, mig: static}, {match: {uuid: GPU-c}, mig: dynamic}]":                               "c",
		"devices: [{match: {model: NVIDIA L4}, mig: dynamic}, {match: {index: 1}, mig: static}]":                             "a",
		"devices: [{match: {index: 0}, mig: dynamic}, {match: {index: 0}, mig: dynamic}, {match: {index: 9}, mig: dynamic}]": "a",
	} {
		c := load(t, "tandem: {"+tandem+"}")
		got := ""
		for _, gpu := range fourGPUs.GPUs {
			if c.Dynamic(gpu) {
				t.Errorf("{%s}: %s cannot be partitioned", tandem, gpu.UUID)
			}
			gpu.MIGCapable = true
			if c.Dynamic(gpu) {
				got += strings.TrimPrefix(gpu.UUID, "GPU-")
			}
		}
		if got != want {
			t.Errorf("{%s}: dynamic are %q, want %q", tandem, got, want)
		}
	}
}
