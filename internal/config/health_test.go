// SPDX-License-Identifier: Apache-2.0

package config

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// The variables mean what they mean to NVIDIA's device plugin (internal/rm/health.go), and enabling an XID works while all are disabled.
func TestHealthChecks(t *testing.T) {
	for name, test := range map[string]struct {
		disable, enable string
		counts, ignored []int
	}{
		"defaults":                  {"", "", []int{48, 79, 94, 9999}, []int{13, 31, 43, 45, 68, 109, 154}},
		"more are ignored":          {"48, 79", "", []int{94}, []int{13, 48, 79}},
		"none count":                {"xids", "", nil, []int{13, 48, 79}},
		"nothing counts":            {"ALL", "", nil, []int{13, 48, 79}},
		"none but one":              {"all", "79", []int{79}, []int{13, 48}},
		"an application's":          {"", "13", []int{13, 48}, []int{31}},
		"all":                       {"", "all", []int{13, 31, 48}, []int{154}},
		"all, by another word":      {"", "xids", []int{13, 31, 48}, []int{154}},
		"one is ignored, all count": {"48", "all", []int{13, 31, 48, 79}, nil},
		"the same":                  {"48", "48", []int{48}, nil},
		"words that mean nothing":   {"48,x,-1,0,99999999999999999999", "y", []int{79}, []int{48}},
		"disabled and enabled, all": {"all", "all", []int{13, 79}, []int{154}},
	} {
		var c Config
		c.readHealthChecks(func(name string) (string, bool) {
			value := map[string]string{"DP_DISABLE_HEALTHCHECKS": test.disable, "DP_ENABLE_HEALTHCHECKS": test.enable}[name]
			return value, value != ""
		})
		for want, xids := range map[bool][]int{true: test.counts, false: test.ignored} {
			for _, xid := range xids {
				if got := c.CountsXID(xid); got != want {
					t.Errorf("%s: XID %d counts: %v", name, xid, got)
				}
			}
		}
	}
}

// NVIDIA's DRA driver has a variable of its own.
func TestXIDsThatTheDRADriverIgnores(t *testing.T) {
	for enabled, want := range map[string]bool{"": false, "48": true} {
		var c Config
		c.readHealthChecks(func(name string) (string, bool) {
			value, set := map[string]string{"ADDITIONAL_XIDS_TO_IGNORE": "63, 48", "DP_ENABLE_HEALTHCHECKS": enabled}[name]
			return value, set
		})
		if c.CountsXID(63) || c.CountsXID(48) != want || !c.CountsXID(79) {
			t.Errorf("enabled %q: 63 counts: %t, 48: %t, 79: %t", enabled, c.CountsXID(63), c.CountsXID(48), c.CountsXID(79))
		}
	}
}

func TestFaultAction(t *testing.T) {
	gpu := device.GPU{UUID: "GPU-1", ProductName: "H100"}
	c := Config{
		Health: HealthRule{Fabric: device.FaultIgnore, Reset: device.FaultResetWhenIdle},
		Devices: []DeviceRule{
			{Match: DeviceMatch{UUID: ptr.To("GPU-1")}, Health: &HealthRule{Reset: device.FaultNoExecute}},
			{Match: DeviceMatch{UUID: ptr.To("GPU-2")}, Health: &HealthRule{Reset: device.FaultIgnore, Memory: device.FaultNoSchedule}},
		},
	}
	nothing := Config{HealthChecks: HealthChecks{Nothing: true, NoXIDs: true, Enabled: []int{13}}, Health: HealthRule{Fabric: device.FaultNoExecute}}
	fault := func(reason string, xid int) device.Health { return device.Health{Reason: reason, XID: xid} }
	for name, test := range map[string]struct {
		config Config
		gpu    string
		fault  device.Health
		want   device.FaultAction
	}{
		"the default":             {c, "GPU-1", fault(device.ReasonRebootRequired, 0), device.FaultNoSchedule},
		"the node's":              {c, "GPU-3", fault(device.ReasonResetRequired, 0), device.FaultResetWhenIdle},
		"the GPU's":               {c, "GPU-1", fault(device.ReasonResetRequired, 0), device.FaultNoExecute},
		"an XID of that class":    {c, "GPU-1", fault(device.ReasonXID, 48), device.FaultNoExecute},
		"an application's XID":    {c, "GPU-1", fault(device.ReasonXID, 13), device.FaultIgnore},
		"fabric":                  {c, "GPU-1", fault(device.ReasonFabric, 0), device.FaultIgnore},
		"a pending remap":         {c, "GPU-1", fault(device.ReasonRowRemapPending, 0), device.FaultIgnore},
		"a pending remap, by GPU": {c, "GPU-2", fault(device.ReasonRowRemapPending, 0), device.FaultNoSchedule},
		"all disabled":            {nothing, "GPU-1", fault(device.ReasonRebootRequired, 0), device.FaultIgnore},
		"all disabled, lost":      {nothing, "GPU-1", fault(device.ReasonLost, 79), device.FaultNoSchedule},
		"all disabled, XID":       {nothing, "GPU-1", fault(device.ReasonXID, 79), device.FaultIgnore},
		"all disabled, enabled":   {nothing, "GPU-1", fault(device.ReasonXID, 13), device.FaultNoSchedule},
		"all disabled, by policy": {nothing, "GPU-1", fault(device.ReasonFabric, 0), device.FaultNoExecute},
	} {
		gpu.UUID = test.gpu
		if got := test.config.FaultAction(gpu, test.fault); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

// Each wrong action is named with its path.
func TestHealthRules(t *testing.T) {
	for text, want := range map[string]string{
		"health: {reset: ResetWhenIdle, lost: NoExecute}":                                    "",
		"health: {reset: Reset}":                                                             `tandem.health.reset: "Reset" is not one of Ignore, NoSchedule, NoExecute, ResetWhenIdle`,
		"health: {lost: Ignore}":                                                             `tandem.health.lost: "Ignore" is not one of NoSchedule, NoExecute`,
		"health: {fabric: ResetWhenIdle}":                                                    "tandem.health.fabric",
		"health: {application: Ignore}":                                                      `unknown field "tandem.health.application"`,
		"devices: [{match: {index: 0}, health: {}}]":                                         "tandem.devices[0].health: has no effect",
		"devices: [{match: {index: 0}, health: {reboot: ResetWhenIdle}}]":                    "tandem.devices[0].health.reboot",
		"devices: [{match: {index: 0}, health: {memory: NoExecute, contained: NoSchedule}}]": "",
	} {
		file := filepath.Join(t.TempDir(), "config.yaml")
		if err := os.WriteFile(file, []byte("version: v1\ntandem: {"+text+"}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Load([]string{"--node-name=n", "--config=" + file}, func(string) (string, bool) { return "", false }, io.Discard)
		switch {
		case want == "" && err != nil:
			t.Errorf("%s: %v", text, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

// The agent reports a wrong file once for each text of its mistakes.
func TestOneFileHasOneTextOfMistakes(t *testing.T) {
	file := []byte("version: v1\ntandem: {health: {fabric: ResetWhenIdle, reboot: ResetWhenIdle, lost: Ignore}}\n")
	texts := map[string]int{}
	for range 100 {
		_, err := CheckFile(file, UnknownKeysError)
		if err == nil {
			t.Fatal("accepted")
		}
		texts[err.Error()]++
	}
	if len(texts) != 1 {
		t.Errorf("one file has several texts: %v", texts)
	}
}
