// SPDX-License-Identifier: Apache-2.0

package dropin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"

	"github.com/tandem-gpu/tandem/hack/hardware"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/nodelabels"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/recording"
)

const machine = "ACME DGX (rev. 2)"

// gfd builds NVIDIA's GPU Feature Discovery from its module, and returns the program's path.
func gfd(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "gpu-feature-discovery")
	// It may have to download modules.
	var out []byte
	err := retry.OnError(wait.Backoff{Steps: 3, Duration: 5 * time.Second}, func(error) bool { return true }, func() (err error) {
		build := exec.CommandContext(t.Context(), "go", "build", "-mod=readonly", "-o", path, "./cmd/gpu-feature-discovery")
		build.Dir, build.Env = nvidiaDir(t), append(os.Environ(), "GOWORK=off")
		out, err = build.CombinedOutput()
		return err
	})
	if err != nil {
		t.Fatalf("build GPU Feature Discovery: %v\n%s", err, out)
	}
	return path
}

// machineRoot is a simulated machine, and a library in C that answers as its driver.
type machineRoot struct {
	dir, libraries string
	options        nvml.Options
}

func newMachine(ctx context.Context, dir, profile string) (machineRoot, error) {
	p, err := simulated.Load(profile)
	if err != nil {
		return machineRoot{}, err
	}
	p = p.WithIdentity("")
	if err := simulated.Materialize(dir, p, simulated.MaterializeOptions{}); err != nil {
		return machineRoot{}, err
	}
	m := machineRoot{dir: dir, options: hardware.MachineOptions(dir)}
	rec, err := hardware.RecordMachine(ctx, dir)
	if err != nil {
		return machineRoot{}, err
	}
	library, err := m.options.OpenLibrary()
	if err == nil {
		err = addMIGCalls(rec, library)
	}
	if err != nil {
		return machineRoot{}, err
	}
	m.libraries = filepath.Join(dir, "libraries")
	_, err = recording.Library{Version: p.Driver.Version}.Build(ctx, m.libraries, *rec)
	return m, err
}

// addMIGCalls adds the calls that GPU Feature Discovery makes about MIG devices and the agent does not, with the simulation's answers.
func addMIGCalls(r *recording.Recording, library gonvml.Interface) error {
	if ret := library.Init(); ret != gonvml.SUCCESS {
		return ret
	}
	defer library.Shutdown()
	count, ret := library.DeviceGetCount()
	if ret != gonvml.SUCCESS {
		return ret
	}
	add := func(on, method string, value any, args ...int) error {
		values, err := json.Marshal([]any{value})
		arguments, argsErr := json.Marshal(args)
		r.Calls = append(r.Calls, recording.Call{On: on, Method: method, Args: arguments, Values: values})
		return errors.Join(err, argsErr)
	}
	var errs []error
	for i := range count {
		gpu := fmt.Sprintf("gpu%d", i)
		errs = append(errs, add(gpu, "IsMigDeviceHandle", 0))
		handle, ret := library.DeviceGetHandleByIndex(i)
		if ret != gonvml.SUCCESS {
			return ret
		}
		for j := range 7 {
			mig, ret := handle.GetMigDeviceHandleByIndex(j)
			if ret != gonvml.SUCCESS {
				continue
			}
			attributes, ret := mig.GetAttributes()
			if ret != gonvml.SUCCESS {
				return ret
			}
			id, ret := mig.GetGpuInstanceId()
			if ret != gonvml.SUCCESS {
				return ret
			}
			instance, ret := handle.GetGpuInstanceById(id)
			if ret != gonvml.SUCCESS {
				return ret
			}
			for profile := range gonvml.COMPUTE_INSTANCE_PROFILE_COUNT {
				if info, ret := instance.GetComputeInstanceProfileInfo(profile, 0); ret == gonvml.SUCCESS {
					errs = append(errs, add(fmt.Sprintf("%s/gi%d", gpu, id), "GetComputeInstanceProfileInfo", info, profile, 0))
				}
			}
			on := fmt.Sprintf("%s/mig%d", gpu, j)
			errs = append(errs, add(on, "IsMigDeviceHandle", 1), add(on, "GetDeviceHandleFromMigDeviceHandle", gpu), add(on, "GetAttributes", attributes))
		}
	}
	return errors.Join(errs...)
}

// theirLabels runs GPU Feature Discovery on the machine. It finds the machine's PCI devices in a mount namespace of its own.
func (m machineRoot) theirLabels(t *testing.T, program, configFile string) map[string]string {
	t.Helper()
	output := filepath.Join(t.TempDir(), "labels")
	script := fmt.Sprintf("mount --bind %s /sys && exec %s --oneshot --no-timestamp --use-node-feature-api=false --output-file=%s --machine-type-file=%s --config-file=%s",
		filepath.Join(m.dir, simulated.SysfsDir), program, output, filepath.Join(m.dir, "machine"), configFile)
	command := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-c", script)
	command.Env = append(os.Environ(), "LD_LIBRARY_PATH="+m.libraries, "NODE_NAME=n")
	log, err := command.CombinedOutput()
	if bytes.Contains(log, []byte("MPS sharing is not supported for mig devices")) {
		return nil // it gives a node no labels then
	}
	if err != nil {
		t.Fatalf("run GPU Feature Discovery: %v\n%s", err, log)
	}
	text, err := os.ReadFile(output)
	if err != nil {
		t.Fatalf("%v\n%s", err, log)
	}
	labels := map[string]string{}
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		labels[key] = value
	}
	return labels
}

func (m machineRoot) ourLabels(t *testing.T, configFile string) map[string]string {
	t.Helper()
	node := nvml.New(m.options)
	if err := node.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	c, err := config.Load([]string{"--node-name=n", "--config=" + configFile}, func(string) (string, bool) { return "", false }, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	inv := node.Inventory()
	var gpus []device.GPU
	for _, g := range inv.GPUs {
		g.Sharing = c.SharingOf(g)
		gpus = append(gpus, g)
	}
	inv.GPUs = gpus
	return nodelabels.Of(inv, nodelabels.Options{Resources: c.Resources(), Machine: machine})
}

// The labels are those of GPU Feature Discovery, which runs here on the same simulated machines.
func TestLabels(t *testing.T) {
	if out, err := exec.CommandContext(t.Context(), "unshare", "--mount", "true").CombinedOutput(); err != nil {
		t.Skipf("a mount namespace cannot be made, which needs root: %v\n%s", err, out)
	}
	program := gfd(t)
	const replicated = "sharing: {timeSlicing: {%sresources: [{name: nvidia.com/gpu, replicas: 4}, {name: nvidia.com/mig-1g.10gb, replicas: 2}]}}"
	configs := map[string]string{
		"none":   "flags: {migStrategy: none}",
		"single": "flags: {migStrategy: single}",
		"mixed":  "flags: {migStrategy: mixed}",
		"shared": fmt.Sprintf("flags: {migStrategy: mixed}\n"+replicated, ""), "renamed": fmt.Sprintf("flags: {migStrategy: single}\n"+replicated, "renameByDefault: true, "),
		"MPS": "sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}",
	}
	profiles := []string{"h100x8", "h100x8-mig", "a100x8-mig", "l4x4", "t4x4", "gb200x4", "rtxpro6000x4"}
	compared, differ := 0, 0
	for _, profile := range profiles {
		m, err := newMachine(t.Context(), t.TempDir(), profile)
		if err != nil {
			t.Fatalf("%s: %v", profile, err)
		}
		if err := os.WriteFile(filepath.Join(m.dir, "machine"), []byte(machine+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		for name, text := range configs {
			file := filepath.Join(t.TempDir(), "config.yaml")
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			their, our := m.theirLabels(t, program, file), m.ourLabels(t, file)
			if their == nil {
				continue
			}
			compared++
			if diff := cmp.Diff(their, our); diff != "" {
				differ++
				t.Errorf("%s, %s (-GFD's +Tandem's):\n%s", profile, name, diff)
			}
		}
	}
	if want := len(profiles)*len(configs) - 3; compared != want { // MPS on the three machines with MIG
		t.Errorf("%d comparisons, want %d", compared, want)
	}
	t.Logf("machines=%d compared=%d", len(profiles), compared)
	Report(t, "labels_differ=%d", differ)
}
