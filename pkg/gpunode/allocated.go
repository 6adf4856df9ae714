// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"slices"
	"sync"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// allocated keeps what Allocated has found: it is asked for each time a limit chooses a device, and a node whose GPUs can be
// partitioned has hundreds of names.
type allocated struct {
	mu sync.Mutex
	// inventory and view are the channels of which each is closed when what was found counts no more.
	inventory, view <-chan struct{}
	names           map[string]device.Ref
	refs            []device.Ref
}

// Allocated returns the devices that are allocated to claims by the object's spec, whether or not they are prepared yet. It
// answers as Claims does.
func (o *Object) Allocated() []device.Ref {
	a := &o.allocated
	a.mu.Lock()
	defer a.mu.Unlock()
	inventory, view := o.config.Inventory.Changed(), o.view.Changed()
	if a.inventory == inventory && a.view == view {
		return slices.Clone(a.refs)
	}
	claims := o.Claims()
	if len(claims) > 0 && a.inventory != inventory {
		a.names, a.inventory = refsByName(o.config.Inventory.Inventory()), inventory
	}
	a.refs, a.view = nil, view
	for _, claim := range claims {
		for _, name := range claim.Devices {
			if ref, known := a.names[name]; known {
				a.refs = append(a.refs, ref)
			}
		}
	}
	return slices.Clone(a.refs)
}

// refsByName has what Inventory.ByName finds, for many questions. Of GPUs with one name between them, the last has it.
func refsByName(inv device.Inventory) map[string]device.Ref {
	names := map[string]device.Ref{}
	add := func(partitions []device.Partition) {
		for _, p := range partitions {
			if name := p.Name(); names[name] == (device.Ref{}) {
				names[name] = p.Ref
			}
		}
	}
	for _, gpu := range inv.GPUs {
		names[gpu.Name()] = gpu.Ref()
		add(gpu.Partitions)
		if gpu.Dynamic {
			add(gpu.Possible())
		}
	}
	return names
}
