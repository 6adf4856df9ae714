// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"sigs.k8s.io/yaml"
)

func TestIdentitiesAreStableAndDistinct(t *testing.T) {
	seen := map[string]string{}
	for _, name := range Names() {
		p, err := Load(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, seed := range []string{"", "n1", "n2"} {
			machine, again := p.WithIdentity(seed), p.WithIdentity(seed)
			for i, g := range machine.GPUs {
				if other, taken := seen[g.UUID]; taken {
					t.Errorf("%s of %s %q is that of %s too", g.UUID, name, seed, other)
				}
				seen[g.UUID] = name + " " + seed
				if !uuidForm.MatchString(g.UUID) || again.GPUs[i].UUID != g.UUID {
					t.Errorf("UUID %q, then %q", g.UUID, again.GPUs[i].UUID)
				}
			}
		}
		if p.GPUs[0].UUID != "" {
			t.Errorf("%s: WithIdentity changed the profile it was called on", name)
		}
	}
	// What one version materializes the next must find again, so the derivation is fixed.
	p, err := Load("h100x8")
	if err != nil {
		t.Fatal(err)
	}
	if got := p.WithIdentity("n1").GPUs[0].UUID; got != "GPU-5b80dac2-4672-432d-80e3-b730a675d1eb" {
		t.Errorf("first UUID of h100x8 on n1 = %s", got)
	}
}

func TestMinorsKeepClearOfControlDevices(t *testing.T) {
	p, err := Load("bench256")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[int]bool{}
	for _, g := range p.WithIdentity("").GPUs {
		if seen[*g.Minor] || *g.Minor == minorCtl || *g.Minor == minorModeset {
			t.Errorf("minor %d is taken", *g.Minor)
		}
		seen[*g.Minor] = true
	}
}

func TestProfileFileReadsAsItWasWritten(t *testing.T) {
	p, err := Load("mixed")
	if err != nil {
		t.Fatal(err)
	}
	data, err := yaml.Marshal(p.WithIdentity("n1"))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), ProfileFile)
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	read, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	want, got := New(p, WithSeed("n1")), New(read)
	want.Init()
	got.Init()
	for i := range p.GPUs {
		for _, ask := range []func(nvml.Device) (string, nvml.Return){nvml.Device.GetUUID, nvml.Device.GetName} {
			a, _ := ask(handle(t, want, i))
			b, _ := ask(handle(t, got, i))
			if a != b {
				t.Errorf("GPU %d: %q from the profile, %q from its file", i, a, b)
			}
		}
	}
}

func TestLoadErrors(t *testing.T) {
	if _, err := Load("h100x9"); !errors.Is(err, ErrNoProfile) || !strings.Contains(err.Error(), "h100x8") {
		t.Errorf("unknown name: %v", err)
	}
	if _, err := Load("../profiles/h100x8"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
}

func TestProfileErrorsNameTheField(t *testing.T) {
	valid, err := os.ReadFile("profiles/mixed.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ from, to, want string }{
		{"name: mixed", "name: mixed\nsockets: 2", `unknown field "sockets"`},
		{"ecc: true", "eec: true", `unknown field "models.h100-sxm-80gb.eec"`},
		{"name: mixed", "name: Mixed Machine", "name: "},
		{"version: 580.95.05", "version: newest", "driver.version: "},
		{"numaNodes: 2", "numaNodes: 0", "numaNodes: "},
		{"brand: NVIDIA", "brand: ACME", "models.h100-sxm-80gb.brand: "},
		{"architecture: Hopper", "architecture: Fermi", "models.h100-sxm-80gb.architecture: "},
		{`"0000:1b:00.0", root`, `"1b:00", root`, "gpus[0].pci: "},
		{`"0000:1c:00.0", root`, `"0000:1b:00.0", root`, "gpus[1]: address 0000:1b:00.0 is that of gpus[0]"},
		{"minor: 3", "minor: 2", "gpus[1]: minor 2 is that of gpus[0]"},
		{"minor: 3", "minor: 255", "gpus[1].minor: "},
		{"model: l4,", "model: l5,", `gpus[4].model: "l5"`},
		{"numaNode: -1", "numaNode: 2", "gpus[5].numaNode: "},
		{"minor: 0}", "minor: 0, migEnabled: true}", "gpus[4].migEnabled: "},
		{"mig: H100-80GB", "mig: H100-85GB", "models.h100-sxm-80gb.mig: "},
		{"minor: 2}", "minor: 2, partitions: [{profile: 1g.10gb, start: 0}]}", "gpus[0].partitions: MIG is not enabled"},
		{"minor: 2}", "minor: 2, migEnabled: true, partitions: [{profile: 9g.10gb, start: 0}]}", "gpus[0].partitions: [0].profile: "},
		{"minor: 2}", "minor: 2, migEnabled: true, partitions: [{profile: 3g.40gb, start: 3}]}", "gpus[0].partitions: [0].start: "},
		{"minor: 2}", "minor: 2, migEnabled: true, partitions: [{profile: 3g.40gb, start: 4, compute: [2, 2]}]}", "gpus[0].partitions: [0].compute[1]: "},
		{"minor: 0}", "minor: 0, uuid: GPU-1}", "gpus[4].uuid: "},
		{`"0000:17:01.0"]`, `"0000:17:01.0", "0000:15:01.0"]`, "gpus[1].bridges[3]: bridge 0000:15:01.0 is beneath"},
		{"gpus: [0, 1]", "gpus: [0, 2]", "nvlink[1].gpus[0]: link of GPU  2"},
		{"gpus: [0, 1]", "gpus: [0, 4]", "nvlink[0].gpus[1]: GPU 4 has no NVLink"},
		{"gpus: [0, 1]", "gpus: [0, 17]", "nvlink[0].gpus[1]: there is no GPU 17"},
		{"pairLinks: 18", "pairLinks: 19", "nvlink[0].pairLinks: "},
		{"pairLinks: 18", "switches: [x]", "nvlink[0].switches[0]: "},
		{"numaNodes: 2", "numaNodes: 2\nnumaNodes: 2", "numaNodes"},
	} {
		t.Run(test.to, func(t *testing.T) {
			text := strings.Replace(string(valid), test.from, test.to, 1)
			if text == string(valid) {
				t.Fatalf("the profile has no %q", test.from)
			}
			_, err := Parse([]byte(text))
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v lacks %q", err, test.want)
			}
		})
	}
}

func TestNamesAreThoseOfTheFiles(t *testing.T) {
	for _, name := range Names() {
		if p, err := Load(name); err != nil || p.Name != name {
			t.Errorf("%s: name %q, %v", name, p.Name, err)
		}
	}
	if !slices.Contains(Names(), "bench256") {
		t.Error("no bench256")
	}
}
