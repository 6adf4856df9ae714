// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"os"
	"strings"
	"testing"
)

func TestNew(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*Config)
		want   []string // parts of the error, none for success
	}{
		"complete":               {func(*Config) {}, nil},
		"without kubelet's view": {func(c *Config) { c.Kubelet = nil }, nil},
		"empty": {func(c *Config) { *c = Config{} }, []string{
			"resourceName: must be set", "nodeName: must be set", "directory: must be set", "inventory: must be set", "ledger: must be set",
			"specs: must be set", "recorder: must be set", "registerer: must be set",
		}},
		"resource without domain":    {func(c *Config) { c.Resources.GPU = "gpu" }, []string{`resourceName: "gpu" is no extended resource name: it has no domain`}},
		"resource with a space":      {func(c *Config) { c.Resources.GPU = "nvidia.com/g pu" }, []string{`resourceName: "nvidia.com/g pu"`}},
		"unknown strategy":           {func(c *Config) { c.Strategies = []Strategy{StrategyCDI, "magic"} }, []string{"deviceListStrategy[1]: invalid strategy: magic"}},
		"unknown ID strategy":        {func(c *Config) { c.IDStrategy = "name" }, []string{"invalid --device-id-strategy option: name"}},
		"unknown policy":             {func(c *Config) { c.AllocationPolicy = "tight" }, []string{"invalid --shared-devices-allocation-policy option: tight"}},
		"unknown MIG strategy":       {func(c *Config) { c.Resources.Strategy = "both" }, []string{"unknown MIG strategy: both"}},
		"relative directory":         {func(c *Config) { c.Directory = "device-plugins" }, []string{`directory: "device-plugins" is not an absolute path`}},
		"relative device root":       {func(c *Config) { c.DevRoot = "dev" }, []string{`devRoot: "dev" is not an absolute path`}},
		"directory with a long path": {func(c *Config) { c.Directory = "/" + strings.Repeat("x", 90) }, []string{"exceed the 107 bytes"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, release137)
			test.change(&f.config)
			p, err := New(f.config)
			if (err == nil) != (len(test.want) == 0) {
				t.Fatalf("got %v", err)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q is not in %q", want, err)
				}
			}
			if err == nil && p.Ready() == nil {
				t.Error("ready before Run")
			}
			entries, err := os.ReadDir(f.dir)
			if err != nil || len(entries) != 0 {
				t.Errorf("New left %v behind, %v", entries, err)
			}
		})
	}
}
