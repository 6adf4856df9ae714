// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"slices"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/mig"
)

// place is where a GPU is published.
type place int

const (
	inNodePool place = iota
	// inOwnPool has counters, by which its devices exclude each other.
	inOwnPool
	// nowhere: claims have devices from a pool of its own, which cannot be published as it was.
	nowhere
)

// place decides where the GPU is published, and remembers it; possible says whether it can be in a pool of its own. It goes where
// claims have got something of it, if that is known: the scheduler knows an allocated device by pool and name, and gives its
// counters out again when it goes. Where that is not known, or claims have it from both, a GPU that is pinned stays where it is.
func (o *Offer) place(g device.GPU, from origin, pinned, possible bool) place {
	if o.own == nil {
		o.own = map[string]bool{}
	}
	own := possible && g.Dynamic && (g.MIGEnabled || mig.Switchable(g))
	before, known := o.own[g.Name()]
	switch {
	case from.own != from.node:
		own = from.own
	case known && pinned:
		own = before
	}
	o.own[g.Name()] = own
	switch {
	case !own:
		return inNodePool
	case !possible:
		return nowhere
	}
	return inOwnPool
}

// remembered returns the GPU with the profiles that it had, where this look at it has found none, or fewer while claims have
// something of it: a profile that could not be read a moment ago is no reason to drop what is allocated.
func (o *Offer) remembered(g device.GPU, pinned bool) device.GPU {
	if o.profiles == nil {
		o.profiles = map[string][]device.Profile{}
	}
	known := o.profiles[g.UUID]
	fewer := slices.ContainsFunc(known, func(p device.Profile) bool {
		return !slices.ContainsFunc(g.Profiles, func(q device.Profile) bool { return q.ID == p.ID })
	})
	if len(g.Profiles) == 0 || pinned && fewer {
		g.Profiles = known
		return g
	}
	o.profiles[g.UUID] = g.Profiles
	return g
}

// origin says from which of the two pools something was allocated: both, for a GPU of which claims have several things, and none
// where that is not known.
type origin struct{ node, own bool }

func (a origin) or(b origin) origin { return origin{node: a.node || b.node, own: a.own || b.own} }

func (o *Offer) origin(pool string) origin {
	return origin{node: pool == o.NodeName, own: pool != o.NodeName}
}

// originIn is where a claim has devices of a GPU from.
func (o *Offer) originIn(claim v1alpha1.AllocatedClaim, g device.GPU) origin {
	if slices.Contains(claim.Pools, device.OwnPool(o.NodeName, g)) {
		return origin{own: true}
	}
	return origin{node: slices.Contains(claim.Pools, o.NodeName)}
}

// originOf is where the claim that holds the device has it from, as far as the hold tells.
func originOf(held device.Ref, g device.GPU) origin {
	return origin{own: slices.ContainsFunc(g.Partitions, func(p device.Partition) bool { return p.Made && p.Ref == held })}
}

// origins says by the names of GPUs where claims have something of them from. One that is not among them has no claim, nor had
// one until a moment ago. What is allocated counts also where nothing by that name is there any more.
func (o *Offer) origins(gpus []device.GPU, holds []ledger.Hold, claims []v1alpha1.AllocatedClaim) map[string]origin {
	origins := map[string]origin{}
	for _, g := range gpus {
		for _, h := range holds {
			if h.Holder.Kind == ledger.KindClaim && h.Device.GPU == g.UUID {
				origins[g.Name()] = origins[g.Name()].or(originOf(h.Device, g))
			}
		}
		for _, c := range claims {
			if slices.ContainsFunc(c.Devices, func(name string) bool { return device.GPUName(name) == g.Name() }) {
				origins[g.Name()] = origins[g.Name()].or(o.originIn(c, g))
			}
		}
	}
	return origins
}
