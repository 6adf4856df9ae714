// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/simulated"
)

// simulatedHost makes a machine, and returns the flags with which the agent finds it.
func simulatedHost(t *testing.T, name string) (dir string, flags []string) {
	t.Helper()
	host := t.TempDir()
	dir = filepath.Join(host, "run/nvidia/simulated")
	profile, err := simulated.Load(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := simulated.Materialize(dir, profile, simulated.MaterializeOptions{}); err != nil {
		t.Fatal(err)
	}
	return dir, []string{
		"--host-root=" + host, "--sysfs-root=" + filepath.Join(dir, simulated.SysfsDir),
		"--nvml=simulated:" + filepath.Join(dir, simulated.ProfileFile),
	}
}

func TestInspect(t *testing.T) {
	dir, flags := simulatedHost(t, "l4x4")
	specs := t.TempDir()
	var out bytes.Buffer
	if err := run(t.Context(), append([]string{"inspect", "--cdi=" + specs}, flags...), &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"\nLayout\n", "gpu-3", "DeviceGetHandleByIndex"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the report lacks %q:\n%s", want, out.String())
		}
	}
	spec, err := cdilib.ReadSpec(filepath.Join(specs, cdi.SpecFile), 0)
	if err != nil || len(spec.Devices) != 4 {
		t.Errorf("the spec that was written: %v (%v), want four devices", spec, err)
	}

	if err := simulated.WriteFaults(dir, simulated.Faults{GPUs: []simulated.GPUFaults{{GPU: "2", Lost: true}}}); err != nil {
		t.Fatal(err)
	}
	out.Reset()
	if err := run(t.Context(), append([]string{"inspect", "-o", "json"}, flags...), &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	var report nvml.Report
	if err := json.Unmarshal(out.Bytes(), &report); err != nil {
		t.Fatal(err)
	}
	if report.Format != nvml.ReportFormat || report.Unidentified != 1 || len(report.Calls) == 0 || report.Version == "" {
		t.Errorf("report %+v", report)
	}
}

// The slices of a machine are those that its agent publishes, with the configuration that the agent has (TestTemplateIsWhatIsPublished).
func TestInspectPrintsSlices(t *testing.T) {
	_, flags := simulatedHost(t, "h100x8")
	config := filepath.Join(t.TempDir(), "config.yaml")
	text := "{version: v1, tandem: {devices: [{match: {index: 0}, use: none}, {match: {index: 7}, mig: dynamic}]}}"
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	flags = append(flags, "--config="+config)
	var out bytes.Buffer
	if err := run(t.Context(), append([]string{"inspect", "-o", "slices"}, flags...), &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	devices := map[string]int{}
	for reader := utilyaml.NewYAMLReader(bufio.NewReader(&out)); ; {
		text, err := reader.Read()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		var slice resourceapi.ResourceSlice
		if err := yaml.UnmarshalStrict(text, &slice); err != nil {
			t.Fatal(err)
		}
		devices[slice.Spec.Pool.Name] += len(slice.Spec.Devices)
	}
	if want := map[string]int{"node": 6, "node/gpu-07": 26}; !maps.Equal(devices, want) {
		t.Errorf("devices by pool %v, want %v", devices, want)
	}

	err := run(t.Context(), append([]string{"inspect", "-o", "slices", "--mode=DevicePluginOnly"}, flags...), io.Discard, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "mode DevicePluginOnly publishes no slices") {
		t.Errorf("error %v, want that the mode has none", err)
	}
}

func TestInspectOfANodeWithoutDriver(t *testing.T) {
	var out bytes.Buffer
	args := []string{"inspect", "--host-root=" + t.TempDir(), "--sysfs-root=" + t.TempDir()}
	err := run(t.Context(), args, &out, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "no NVIDIA driver") || !strings.Contains(out.String(), "/run/nvidia/driver") {
		t.Errorf("error %v, output %s; want no driver, and where it was looked for", err, out.String())
	}
	err = run(t.Context(), append(args, "--cdi="+t.TempDir()), io.Discard, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "write CDI spec") {
		t.Errorf("error %v, want that there is no spec to write", err)
	}
}

func TestInspectRefusesWrongFlags(t *testing.T) {
	for name, test := range map[string]struct{ flag, want string }{
		"output":    {"-o=yaml", `-o: "yaml" is not one of text, json, slices`},
		"root":      {"--driver-root=driver", `--driver-root: "driver" is not an absolute path or auto`},
		"directory": {"--cdi=specs", `--cdi: "specs" is not an absolute path`},
	} {
		t.Run(name, func(t *testing.T) {
			err := run(t.Context(), []string{"inspect", test.flag}, io.Discard, io.Discard)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %s", err, test.want)
			}
		})
	}
	// Variables of these names belong to others.
	t.Setenv("O", "nonsense")
	t.Setenv("CDI", "nonsense")
	if err := run(t.Context(), []string{"inspect", "--host-root=" + t.TempDir()}, io.Discard, io.Discard); strings.Contains(err.Error(), "nonsense") {
		t.Error(err)
	}
}

// The command is what an operator attaches to a bug report: it makes no change below the host's root, missing device nodes included.
func TestInspectChangesNothing(t *testing.T) {
	dir, flags := simulatedHost(t, "h100x8-mig")
	for _, node := range []string{"nvidia1", "nvidia-uvm"} {
		if err := os.Remove(filepath.Join(dir, simulated.DriverDir, "dev", node)); err != nil {
			t.Fatal(err)
		}
	}
	host := strings.TrimPrefix(flags[0], "--host-root=")
	state := func() string {
		var all strings.Builder
		err := filepath.WalkDir(host, func(path string, entry os.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := entry.Info()
			if err == nil {
				all.WriteString(path + info.Mode().String() + info.ModTime().String() + "\n")
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return all.String()
	}
	before := state()
	// With the flags of an agent that creates nodes, too.
	if err := run(t.Context(), append([]string{"inspect", "--create-device-nodes"}, flags...), io.Discard, io.Discard); err != nil {
		t.Fatal(err)
	}
	if after := state(); after != before {
		t.Error("inspect changed files below the host's root")
	}
}
