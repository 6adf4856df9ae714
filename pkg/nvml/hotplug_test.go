// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/simulated"
)

// awaitGPUs waits until so many GPUs are healthy.
func awaitGPUs(t *testing.T, node *nvml.Node, want int) {
	t.Helper()
	limit := time.After(30 * time.Second)
	for {
		changed := node.Changed()
		healthy := 0
		for _, g := range node.Inventory().GPUs {
			if g.Health.Healthy() {
				healthy++
			}
		}
		if healthy == want {
			return
		}
		select {
		case <-changed:
		case <-limit:
			t.Fatalf("%d healthy GPUs, want %d: %v", healthy, want, healths(node.Inventory()))
		}
	}
}

func healths(inventory device.Inventory) (all []device.Health) {
	for _, g := range inventory.GPUs {
		all = append(all, g.Health)
	}
	return all
}

// A GPU that is plugged in while the agent runs is found, and one that was removed works again, also where the agent keeps its session: GPU 0
// loses its state without one, or its events are read.
func TestHotPlug(t *testing.T) {
	for _, name := range []string{"session for each scan", "session kept", "events read"} {
		t.Run(name, func(t *testing.T) {
			persistenceOff := name == "session kept"
			m := newMachine(t, "l4x4")
			m.options.Interval = 100 * time.Millisecond
			m.options.OpenKernelLog = func() (io.ReadCloser, error) { return nil, errors.New("there is none") }
			zero, absent := simulated.GPUFaults{GPU: "0", PersistenceOff: persistenceOff}, simulated.GPUFaults{GPU: "3", Absent: true}
			m.fault(t, zero, absent)
			node := m.open(t)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 2)
			go func() { done <- node.Run(ctx) }()
			if name == "events read" {
				// An XID of each GPU says that all are read.
				var once sync.Once
				read, all := map[string]bool{}, make(chan struct{})
				go func() {
					done <- node.WatchXIDs(ctx, func(e device.XIDEvent) {
						if read[e.PCI] = true; len(read) == 3 {
							once.Do(func() { close(all) })
						}
					})
				}()
				for reading := true; reading; {
					for _, index := range []string{"0", "1", "2"} {
						if err := simulated.RaiseXID(m.dir, simulated.Event{GPU: index, XID: 13}); err != nil {
							t.Fatal(err)
						}
					}
					select {
					case <-all:
						reading = false
					case <-time.After(50 * time.Millisecond):
					}
				}
			} else {
				done <- nil
			}
			awaitGPUs(t, node, 3)
			m.fault(t, zero)
			awaitGPUs(t, node, 4)

			// The kernel removes the GPU, and finds it again: the link in sysfs is another one.
			m.fault(t, zero, absent)
			awaitGPUs(t, node, 3)
			last := node.Inventory().GPUs[3]
			link := filepath.Join(m.dir, simulated.SysfsDir, "bus/pci/drivers/nvidia", last.PCIBusID)
			target, err := os.Readlink(link)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Remove(link); err != nil {
				t.Fatal(err)
			}
			m.fault(t, zero)
			if err := os.Symlink(target, link); err != nil {
				t.Fatal(err)
			}
			awaitGPUs(t, node, 4)
			cancel()
			if err := errors.Join(<-done, <-done); err != nil {
				t.Error(err)
			}
		})
	}
}
