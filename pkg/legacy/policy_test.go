// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/mps"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// obeying is hardware without failures, and CDI devices that these tests do not need.
type obeying struct{}

func (obeying) ComputeMode(context.Context, string) (device.ComputeMode, error) {
	return device.ComputeModeDefault, nil
}

func (obeying) SetComputeMode(context.Context, string, device.ComputeMode) (device.ComputeMode, error) {
	return device.ComputeModeDefault, nil
}

func (obeying) SetTimeSlice(context.Context, string, int) error { return nil }
func (obeying) WriteClientDevice(name string, _ specs.ContainerEdits) (string, error) {
	return name, nil
}
func (obeying) RemoveClientDevices(string) error       { return nil }
func (obeying) ClientDevices(string) ([]string, error) { return nil, nil }
func (obeying) RetainClientDevices([]string) error     { return nil }

// supervise is a daemon's supervisor until the test ends, the function returned is called, or it is not wanted any more.
func supervise(t *testing.T, runDir string, d sharing.Daemon) (kill func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	work.Go(func() {
		h, err := mps.Hold(ctx, mps.Dir(runDir, d.Name))
		if err != nil {
			t.Error(err)
			return
		}
		if err := h.Publish(mps.Ready{Pod: "pod", Hash: d.Settings.Hash()}); err != nil {
			t.Error(err)
		}
		_ = h.Await(ctx)
		if err := h.Release(); err != nil {
			t.Error(err)
		}
	})
	kill = func() { cancel(); work.Wait() }
	t.Cleanup(kill)
	return kill
}

// idle tells of no process.
type idle struct{}

func (idle) Busy(ledger.Hold) bool { return false }

// The list and Allocate with the real policy: a daemon starts, dies, starts again, and ends when its GPU has no holder.
func TestWithThePolicy(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	node := func(strategy device.SharingStrategy) {
		f.inventory.set(func(device.Inventory) device.Inventory {
			inv := byMPS(2, 1, 4)
			inv.GPUs[0].Sharing = device.Sharing{Strategy: strategy, Replicas: inv.GPUs[0].Sharing.Replicas}
			inv.GPUs[0].ComputeCapability = "9.0"
			return inv
		})
	}
	node(device.MPS)
	runDir := t.TempDir()
	records := sharing.NewRecords(filepath.Join(runDir, "sharing"), "boot")
	if _, err := records.Load(); err != nil {
		t.Fatal(err)
	}
	manager := sharing.NewManager(sharing.Options{Records: records, RunDir: runDir, DriverRoot: "/", Hardware: obeying{}, Specs: obeying{}})
	policy := sharing.NewPolicy(manager, f.inventory, f.ledger, idle{})
	f.config.Sharing = policy
	f.startKubelet()
	f.start()
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = policy.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })

	daemons := func(want int) []sharing.Daemon {
		t.Helper()
		for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
			if all := manager.Daemons(); len(all) == want {
				return all
			} else if time.Now().After(deadline) {
				t.Fatalf("wanted are %v, not %d", all, want)
			}
		}
	}
	wanted := daemons(1)[0]
	f.await("the GPU that is not shared", healthyCount(1))
	kill := supervise(t, runDir, wanted)
	f.await("the replicas", healthyCount(5))
	client := f.plugin("nvidia.com/gpu")
	first := replicaOf(0, 0)
	got, err := client.Allocate(t.Context(), allocation([]string{first}))
	if err != nil {
		t.Fatal(err)
	}
	if env, mounts := got.GetContainerResponses()[0].GetEnvs(), got.GetContainerResponses()[0].GetMounts(); len(mounts) != 2 ||
		env["CUDA_MPS_PIPE_DIRECTORY"] != mps.ClientPipeDir || mounts[1].GetHostPath() != filepath.Join(mps.Dir(runDir, wanted.Name), mps.PipeDir) {
		t.Errorf("answered %v and %v", env, mounts)
	}
	refused := func(id string) {
		t.Helper()
		if _, err := client.Allocate(t.Context(), allocation([]string{id})); status.Code(err) != codes.Unavailable {
			t.Errorf("got %v", err)
		}
	}
	kill()
	f.await("all but one replica to go", healthyCount(2))
	refused(replicaOf(0, 1))
	supervise(t, runDir, wanted)
	f.await("their return", healthyCount(5))

	// What has been given out goes on by the daemon that it has, and the others wait.
	node(device.TimeSlicing)
	f.await("all but one replica to go", healthyCount(2))
	refused(replicaOf(0, 1))
	f.ledger.release(first)
	daemons(0)
	f.await("replicas without a daemon", healthyCount(5))
	got, err = client.Allocate(t.Context(), allocation([]string{first, replicaOf(0, 2)}))
	if err != nil || len(got.GetContainerResponses()[0].GetEnvs()) != 0 {
		t.Errorf("answered %v: %v", got, err)
	}
}
