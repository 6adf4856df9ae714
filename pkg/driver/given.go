// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// given is what of one GPU claims have.
type given struct {
	// profiles has what the scheduler has given to claims, and of partitions the profile ID: a place alone does not tell it.
	profiles map[device.Ref]int
	// origins says of the same where they have it from, as far as that is known.
	origins map[device.Ref]origin
	// shared is what of the same claims have a part of.
	shared map[device.Ref]bool
	// counted is how much memory of it the scheduler counts of a claim that has a part.
	counted map[what]uint64
}

// givenOut says by UUID what claims have of each GPU, from the ledger and from what the scheduler was seen to allocate.
func (o *Offer) givenOut(
	gpus []device.GPU, shaped map[string]*gpuShape, holds []ledger.Hold, claims []v1alpha1.AllocatedClaim,
) map[string]given {
	all := map[string]given{}
	byName, byUUID := map[string]device.GPU{}, map[string]device.GPU{}
	for _, g := range gpus {
		all[g.UUID] = given{
			profiles: map[device.Ref]int{}, origins: map[device.Ref]origin{}, shared: map[device.Ref]bool{}, counted: map[what]uint64{},
		}
		byName[g.Name()], byUUID[g.UUID] = g, g
	}
	add := func(g device.GPU, ref device.Ref, profileID int, from origin) {
		of := all[g.UUID]
		if _, known := of.profiles[ref]; !known || profileID != noProfile {
			of.profiles[ref] = profileID
		}
		of.origins[ref] = of.origins[ref].or(from)
	}
	for _, h := range holds {
		if g, known := byUUID[h.Device.GPU]; known && h.Holder.Kind == ledger.KindClaim && h.State != ledger.StateDraining && !h.Unreadable {
			add(g, h.Device, noProfile, originOf(h.Device, g))
			all[g.UUID].shared[h.Device] = all[g.UUID].shared[h.Device] || !h.Share.Whole()
		}
	}
	for _, c := range claims {
		for _, name := range c.Devices {
			g, known := byName[device.GPUName(name)]
			if !known {
				continue
			}
			if p, known := partitionNamed(name, g, shaped[g.Name()]); known {
				add(g, p.Ref, p.ProfileID, o.originIn(c, g))
				for _, share := range c.Shares {
					if share.Device == name {
						all[g.UUID].shared[p.Ref] = true
						at := what{p.Ref, ledger.Holder{Kind: ledger.KindClaim, ID: string(c.UID)}}
						all[g.UUID].counted[at] = uint64(max(share.Memory, 0))
					}
				}
			}
		}
	}
	return all
}

// partitionNamed is the partition of the GPU by that name, there or possible; the whole GPU is one without profile.
func partitionNamed(name string, g device.GPU, shape *gpuShape) (device.Partition, bool) {
	if name == g.Name() {
		return device.Partition{Ref: g.Ref(), ProfileID: noProfile}, true
	}
	for _, p := range g.Partitions {
		if p.Name() == name {
			return p, true
		}
	}
	if shape == nil {
		return device.Partition{}, false
	}
	p, known := shape.possible[name]
	return p, known
}

// elsewhere reports whether a claim has ref from the pool where the GPU is not published: the scheduler does not see there that
// it is given out.
func (g given) elsewhere(ref device.Ref, inOwnPool bool) bool {
	from := g.origins[ref]
	if inOwnPool {
		return from.node && !from.own
	}
	return from.own && !from.node
}

// blocks reports whether what claims have keeps ref from being given out in the node's pool: another device that overlaps it, or
// itself from the GPU's own pool.
func (g given) blocks(ref device.Ref) bool {
	return g.elsewhere(ref, false) || overlapsAnother(g.profiles, ref)
}

// overlapsAnother reports whether there is something else that overlaps ref: a part of it, or what it is a part of.
func overlapsAnother(devices map[device.Ref]int, ref device.Ref) bool {
	for other := range devices {
		if other != ref && other.Overlaps(ref) {
			return true
		}
	}
	return false
}
