// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"testing"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/nvml/simulated"
)

// haltingLibrary waits at the last GPU, once, when told to.
type haltingLibrary struct {
	*simulated.Library
	halt          bool
	reached, goOn chan struct{}
}

func (l *haltingLibrary) DeviceGetHandleByIndex(index int) (gonvml.Device, gonvml.Return) {
	if l.halt && index == 3 {
		l.halt = false
		close(l.reached)
		<-l.goOn
	}
	return l.Library.DeviceGetHandleByIndex(index)
}

// A scan that saw the GPU before a change does not bring back what was then.
func TestScanThatIsOvertaken(t *testing.T) {
	options := fixture(t, "host-rhel")
	profile, err := simulated.Load("a30x4")
	if err != nil {
		t.Fatal(err)
	}
	library := &haltingLibrary{Library: simulated.New(profile), reached: make(chan struct{}), goOn: make(chan struct{})}
	options.open = func(layout) (gonvml.Interface, error) { return library, nil }
	node, err := Open(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	g := node.Inventory().GPUs[1]
	library.halt = true
	scanned := make(chan error)
	go func() { scanned <- node.Scan(t.Context()) }()
	<-library.reached

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
}
