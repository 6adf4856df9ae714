// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/simnode"
)

const kubeconfig = `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: c, context: {cluster: c}}]
current-context: c
`

// nodeConfig is a node with directories of its own, a driver that is nowhere, and an API server that is away.
func nodeConfig(t *testing.T) config.Config {
	t.Helper()
	// Short, for the sockets below it.
	dir, err := os.MkdirTemp("", "node")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	c := config.Defaults()
	c.NodeName, c.HTTPEndpoint, c.CDIHook = "node-1", "", "none"
	c.KubeletDir, c.RunDir, c.CDIDir = filepath.Join(dir, "kubelet"), filepath.Join(dir, "run"), filepath.Join(dir, "cdi")
	c.CgroupRoot, c.HostRoot, c.DriverRoot = filepath.Join(dir, "cgroup"), dir, "/absent"
	for _, d := range []string{"kubelet/device-plugins", "kubelet/plugins_registry", "cgroup/kubepods"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// A GPU is there, whether or not a driver is.
	c.SysfsRoot = filepath.Join(dir, "sys")
	function := filepath.Join(c.SysfsRoot, "bus/pci/devices/0000:01:00.0")
	if err := os.MkdirAll(function, 0o755); err != nil {
		t.Fatal(err)
	}
	for file, text := range map[string]string{"vendor": "0x10de", "class": "0x030200"} {
		if err := os.WriteFile(filepath.Join(function, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c.Kubeconfig = filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(c.Kubeconfig, []byte(kubeconfig), 0o600); err != nil {
		t.Fatal(err)
	}
	return c
}

// newAgent returns an agent that opens simulated drivers, and does not follow its file.
func newAgent(c config.Config) (*Agent, error) {
	return New(Options{Config: c, OpenDriver: simnode.Options, Reload: func(string) (config.Chosen, error) { return config.Chosen{Config: c}, nil }})
}

// testAgent is an agent on its way up, with its events.
type testAgent struct {
	*Agent
	t      *testing.T
	events *record.FakeRecorder
	cancel context.CancelFunc
	done   chan error
}

func start(t *testing.T, c config.Config) *testAgent {
	t.Helper()
	return startWith(t, c, nil)
}

// startWith starts an agent of which a claim already has a GPU, where client is not nil.
func startWith(t *testing.T, c config.Config, client kubernetes.Interface) *testAgent {
	t.Helper()
	a, err := newAgent(c)
	if err != nil {
		t.Fatal(err)
	}
	if a.status.Ready() == nil {
		t.Error("ready before it runs")
	}
	if client != nil {
		a.client = client
		hold(t, c, a.bootID, ledger.ClaimRequest{UID: "c1", Namespace: "apps", Name: "one", Devices: []device.Ref{{GPU: "GPU-0"}}})
	}
	return runAgent(t, a)
}

func runAgent(t *testing.T, a *Agent) *testAgent {
	t.Helper()
	events := record.NewFakeRecorder(100)
	a.recorder = events
	if a.times.maintenanceWait == defaultTimes.maintenanceWait {
		a.times.maintenanceWait = time.Millisecond // most tests have no API server with GPUNodes
	}
	ctx, cancel := context.WithCancel(t.Context())
	running := &testAgent{Agent: a, t: t, events: events, cancel: cancel, done: make(chan error, 1)}
	go func() { running.done <- a.Run(ctx) }()
	return running
}

// await waits until readiness names a reason.
func (a *testAgent) await(reason string) {
	a.t.Helper()
	ticker := time.NewTicker(time.Millisecond)
	defer ticker.Stop()
	for deadline := time.Now().Add(time.Minute); ; <-ticker.C {
		err := a.status.Ready()
		if err == nil {
			a.t.Fatalf("ready, though %q was to come", reason)
		}
		if strings.Contains(err.Error(), reason) {
			return
		}
		if time.Now().After(deadline) {
			a.t.Fatalf("not ready because of %v, want %q", err, reason)
		}
	}
}

func (a *testAgent) wantEvent(reason string) {
	a.t.Helper()
	select {
	case event := <-a.events.Events:
		if !strings.Contains(event, reason) {
			a.t.Errorf("event is %q, want %s", event, reason)
		}
	case <-time.After(time.Minute):
		a.t.Errorf("no event %s", reason)
	}
}

// stop checks that being stopped is no error and leaves nothing running.
func (a *testAgent) stop() {
	a.t.Helper()
	a.cancel()
	select {
	case err := <-a.done:
		if err != nil {
			a.t.Errorf("stopped: got %v", err)
		}
	case <-time.After(time.Minute):
		a.t.Fatal("does not stop")
	}
	var left string
	for range 200 {
		if left = ownGoroutines(); left == "" {
			return
		}
		time.Sleep(10 * time.Millisecond) // those that were told to end take a moment
	}
	a.t.Errorf("still running:\n%s", left)
}

// ownGoroutines are those that run our code or what it started, apart from tests.
func ownGoroutines() string {
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	var own []string
	for stack := range strings.SplitSeq(string(stacks), "\n\n") {
		ours := strings.Contains(stack, "tandem-gpu/tandem/") || strings.Contains(stack, "client-go") || strings.Contains(stack, "google.golang.org/grpc")
		if ours && !strings.Contains(stack, "testing.tRunner") {
			own = append(own, stack)
		}
	}
	return strings.Join(own, "\n\n")
}

func TestWaitsForDriver(t *testing.T) {
	for _, root := range []string{"/absent", "/a-file", "/unreadable"} {
		t.Run(root, func(t *testing.T) {
			c := nodeConfig(t)
			c.DriverRoot = root
			if err := os.WriteFile(filepath.Join(c.HostRoot, "a-file"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink("unreadable", filepath.Join(c.HostRoot, "unreadable")); err != nil {
				t.Fatal(err)
			}
			a := start(t, c)
			a.await("driver: no NVIDIA driver")
			a.wantEvent("NoDriver")
			a.stop()
		})
	}
}

// The agent of a node without a GPU is ready and writes no event, so that it delays no rollout.
func TestNodeWithoutAGPUIsReady(t *testing.T) {
	c := nodeConfig(t)
	if err := os.RemoveAll(filepath.Join(c.SysfsRoot, "bus/pci/devices")); err != nil {
		t.Fatal(err)
	}
	a := start(t, c)
	await(t, "readiness", func() bool { return a.status.Ready() == nil })
	a.stop()
	if len(a.events.Events) > 0 {
		t.Errorf("event: %s", <-a.events.Events)
	}
}

func TestWaitsForLock(t *testing.T) {
	c := nodeConfig(t)
	other, err := ledger.Open(t.Context(), ledger.Options{Dir: c.RunDir, BootID: "boot", PodStates: anything{}})
	if err != nil {
		t.Fatal(err)
	}
	a := start(t, c)
	a.await("ledger: open ledger")
	a.wantEvent("LedgerLocked")
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	a.await("driver: no NVIDIA driver")
	a.stop()
	if other, err = ledger.Open(t.Context(), ledger.Options{Dir: c.RunDir, BootID: "boot", PodStates: anything{}}); err != nil {
		t.Fatalf("the lock was kept: %v", err)
	}
	a = start(t, c)
	a.await("ledger: open ledger")
	a.stop()
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
}

type anything struct{}

func (anything) Started(ledger.Hold, []ledger.Hold) bool { return false }
func (anything) Reuses(ledger.Hold) bool                 { return true }
func (anything) PodState(ledger.Hold) ledger.PodState    { return ledger.Running }

// simulatedMachine gives the node of c four simulated GPUs, and returns the directory of the machine.
func simulatedMachine(t *testing.T, c *config.Config) string {
	t.Helper()
	profile, err := simulated.Load("l4x4")
	if err != nil {
		t.Fatal(err)
	}
	machine := filepath.Join(c.HostRoot, "machine")
	if err := simulated.Materialize(machine, profile, simulated.MaterializeOptions{Seed: c.NodeName}); err != nil {
		if errors.Is(err, os.ErrPermission) {
			t.Skip("making device nodes takes root")
		}
		t.Fatal(err)
	}
	c.NVML, c.DriverRoot, c.SysfsRoot = "simulated:l4x4", "/machine/driver", filepath.Join(machine, "sys")
	return machine
}

// setAbsent removes the first GPUs of a machine, and gives it all others.
func setAbsent(t *testing.T, machine string, gpus int) {
	t.Helper()
	var faults simulated.Faults
	for gpu := range gpus {
		faults.GPUs = append(faults.GPUs, simulated.GPUFaults{GPU: strconv.Itoa(gpu), Absent: true})
	}
	if err := simulated.WriteFaults(machine, faults); err != nil {
		t.Fatal(err)
	}
}

// A driver without GPUs: nothing is registered until there is one.
func TestWaitsForGPU(t *testing.T) {
	c := nodeConfig(t)
	machine := simulatedMachine(t, &c)
	setAbsent(t, machine, 4)
	a := start(t, c)
	a.await("finds no GPU")
	a.wantEvent("NoGPU")
	for _, dir := range []string{"plugins_registry", "device-plugins"} {
		if entries, err := os.ReadDir(filepath.Join(c.KubeletDir, dir)); err != nil || len(entries) > 0 {
			t.Errorf("%s has %v, %v", dir, entries, err)
		}
	}
	setAbsent(t, machine, 0)
	// Then only the API server is missing.
	a.await("claims: the API server has not listed this node's pods yet\nlimits: the API server")
	await(t, "a CDI spec", func() bool {
		entries, _ := os.ReadDir(c.CDIDir)
		return len(entries) > 0
	})
	a.stop()
}

// TestStatusAddressInUse: a permanent failure ends the agent with that error.
func TestStatusAddressInUse(t *testing.T) {
	c := nodeConfig(t)
	c.HTTPEndpoint = "256.0.0.1:0"
	a := start(t, c)
	if err := <-a.done; err == nil || !strings.Contains(err.Error(), "serve status") {
		t.Errorf("got %v", err)
	}
}
