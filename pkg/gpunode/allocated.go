// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"slices"
	"sync"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// allocated keeps what Allocated has found: it is asked for each time a limit chooses a device, and a node whose GPUs can be
// partitioned has hundreds of names.
type allocated struct {
	mu sync.Mutex
	// inventory and view are the channels of which each is closed when what was found counts no more.
	inventory, view <-chan struct{}
	names           map[string]named
	holds           []ledger.Hold
}

// named is a device that has a name.
type named struct {
	ref    device.Ref
	memory uint64
}

// Allocated returns the devices, or shares of devices, that are allocated to claims by the object's spec, whether or not they are
// prepared yet, as what their claims will hold. It answers as Claims does.
func (o *Object) Allocated() []ledger.Hold {
	a := &o.allocated
	a.mu.Lock()
	defer a.mu.Unlock()
	inventory, view := o.config.Inventory.Changed(), o.view.Changed()
	if a.inventory == inventory && a.view == view {
		return slices.Clone(a.holds)
	}
	claims := o.Claims()
	if len(claims) > 0 && a.inventory != inventory {
		a.names, a.inventory = byName(o.config.Inventory.Inventory()), inventory
	}
	a.holds, a.view = nil, view
	for _, claim := range claims {
		for _, name := range claim.Devices {
			d, known := a.names[name]
			if !known {
				continue
			}
			h := ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: string(claim.UID)}, Device: d.ref}
			for _, share := range claim.Shares {
				if share.Device == name {
					h.Share = device.ShareOf(uint64(max(share.Memory, 0)), d.memory)
				}
			}
			a.holds = append(a.holds, h)
		}
	}
	return slices.Clone(a.holds)
}

// byName has what Inventory.ByName finds, for many questions. Of GPUs with one name between them, the last has it.
func byName(inv device.Inventory) map[string]named {
	names := map[string]named{}
	add := func(partitions []device.Partition) {
		for _, p := range partitions {
			if name := p.Name(); names[name] == (named{}) {
				names[name] = named{p.Ref, p.Capacity.MemoryBytes}
			}
		}
	}
	for _, gpu := range inv.GPUs {
		names[gpu.Name()] = named{gpu.Ref(), gpu.MemoryBytes}
		add(gpu.Partitions)
		if gpu.Dynamic {
			add(gpu.Possible())
		}
	}
	return names
}
