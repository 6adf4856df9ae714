// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated"
)

// haltingLibrary waits at the last GPU, once, when told to.
type haltingLibrary struct {
	*simulated.Library
	halt          atomic.Bool
	reached, goOn chan struct{}
}

func (l *haltingLibrary) DeviceGetHandleByIndex(index int) (gonvml.Device, gonvml.Return) {
	if index == 3 && l.halt.CompareAndSwap(true, false) {
		close(l.reached)
		<-l.goOn
	}
	return l.Library.DeviceGetHandleByIndex(index)
}

// awaitOthers waits until the scan has read all GPUs before the one at which it waits.
func awaitOthers(t *testing.T, node *Node) {
	t.Helper()
	for t.Context().Err() == nil {
		node.session.mu.Lock()
		users := node.session.users
		node.session.mu.Unlock()
		if users == 2 { // the scan, and its visit of that GPU
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatal("the scan does not read the other GPUs")
}

// A scan that saw the GPU before a change does not bring back what was then.
func TestScanThatIsOvertaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		options := fixture(t, "host-rhel")
		profile := load(t, "a30x4")
		library := &haltingLibrary{Library: simulated.New(profile), reached: make(chan struct{}), goOn: make(chan struct{})}
		options.OpenLibrary = func() (gonvml.Interface, error) { return library, nil }
		node := mustOpen(t, options)
		g := node.Inventory().GPUs[1]
		library.halt.Store(true)
		scanned := make(chan error)
		go func() { scanned <- node.Scan(t.Context()) }()
		<-library.reached
		awaitOthers(t, node)

		whole := g.Profiles[0]
		made, err := node.Create(t.Context(), gpu.Ref{GPU: g.UUID, Placement: whole.Placements[0]}, whole)
		if err != nil {
			t.Fatal(err)
		}
		close(library.goOn)
		if err := <-scanned; err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]gpu.Partition{made}, node.Inventory().GPUs[1].Partitions); diff != "" {
			t.Errorf("(-made +known):\n%s", diff)
		}
	})
}

// Profiles that could not be read after a change are read later, also where a scan was overtaken by the change and has all of
// them.
func TestProfilesAreReadAgainAfterAChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		options := fixture(t, "host-rhel")
		profile := load(t, "h100x8")
		dir := t.TempDir()
		fault := func(calls map[string]simulated.CallFault) {
			t.Helper()
			if err := simulated.WriteFaults(dir, simulated.Faults{GPUs: []simulated.GPUFaults{{GPU: "1", Calls: calls}}}); err != nil {
				t.Fatal(err)
			}
		}
		library := &haltingLibrary{
			Library: simulated.New(profile, simulated.WithDir(dir)), reached: make(chan struct{}), goOn: make(chan struct{}),
		}
		options.OpenLibrary = func() (gonvml.Interface, error) { return library, nil }
		node := mustOpen(t, options)
		g := node.Inventory().GPUs[1]
		library.halt.Store(true)
		scanned := make(chan error)
		go func() { scanned <- node.Scan(t.Context()) }()
		<-library.reached
		awaitOthers(t, node)
		fault(map[string]simulated.CallFault{"GetGpuInstanceProfileInfo": {Return: "ERROR_UNKNOWN", Times: 9}})
		if err := node.EnableMIG(t.Context(), g.UUID); err != nil {
			t.Fatal(err)
		}
		fault(nil)
		close(library.goOn)
		if err := <-scanned; err != nil {
			t.Fatal(err)
		}
		if now := node.Inventory().GPUs[1]; len(now.Profiles) == len(g.Profiles) {
			t.Error("the fault did not strike")
		}
		// Scans leave the GPU alone until the operation has left it, which is a moment after it has answered.
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(lookAgain) {
			if err := node.Scan(t.Context()); err != nil {
				t.Fatal(err)
			}
			diff := cmp.Diff(g.Profiles, node.Inventory().GPUs[1].Profiles)
			if diff == "" {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("(-before +after):\n%s", diff)
			}
		}
	})
}

// A GPU at which an operation hangs is ill, though scans leave it alone at first, and recovers.
func TestOperationThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		options := fixture(t, "host-rhel")
		profile := load(t, "a30x4")
		dir := t.TempDir()
		hang := func(delay time.Duration) {
			t.Helper()
			fault := simulated.CallFault{Delay: simulated.Duration(delay)}
			calls := map[string]simulated.CallFault{"CreateGpuInstanceWithPlacement": fault, "GetMemoryInfo": fault}
			if err := simulated.WriteFaults(dir, simulated.Faults{GPUs: []simulated.GPUFaults{{GPU: "1", Calls: calls}}}); err != nil {
				t.Fatal(err)
			}
		}
		hang(0)
		options.patience = 500 * time.Millisecond
		options.OpenLibrary = func() (gonvml.Interface, error) { return simulated.New(profile, simulated.WithDir(dir)), nil }
		node := mustOpen(t, options)
		g := node.Inventory().GPUs[1]
		hang(time.Hour)
		created := make(chan error)
		go func() {
			_, err := node.Create(t.Context(), gpu.Ref{GPU: g.UUID, Placement: g.Profiles[0].Placements[0]}, g.Profiles[0])
			created <- err
		}()
		until := func(what string, done func(gpu.GPU) bool) {
			t.Helper()
			for !done(node.Inventory().GPUs[1]) {
				time.Sleep(lookAgain)
				if err := node.Scan(t.Context()); err != nil || t.Context().Err() != nil {
					t.Fatalf("%s: never (%v)", what, err)
				}
			}
		}
		until("unreachable", func(g gpu.GPU) bool { return g.Health.Reason == gpu.ReasonUnreachable })
		hang(0)
		if err := <-created; err != nil {
			t.Error(err)
		}
		until("recovered", func(g gpu.GPU) bool { return g.Health.Reason != gpu.ReasonUnreachable && len(g.Partitions) == 1 })
		until("with a healthy partition", func(g gpu.GPU) bool { return g.Partitions[0].Health.Reason != gpu.ReasonUnreachable })
	})
}
