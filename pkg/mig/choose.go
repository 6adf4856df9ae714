// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"cmp"
	"math/bits"
	"slices"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// Choose is the place for an instance of the profile beside those held, and whether there is one. Of the places that fit it is
// the one that leaves the most room: all places that could be used afterwards, of any profile, counted with their size. That
// keeps large holes whole: a 1g goes to the last memory slices, where a 4g never could, and not into the middle of a free half.
// Of equal places it is the first. It is for places that we choose; where the scheduler does, Order is what we have.
func (g Geometry) Choose(held []Instance, profileID int) (device.Placement, bool) {
	i, known := g.index(profileID)
	if !known {
		return device.Placement{}, false
	}
	u := g.usage(held)
	if !g.hasRoom(u, i) {
		return device.Placement{}, false
	}
	return g.choose(u.with(i, g.takes[i]), i)
}

// choose is Choose with the engines already counted in u.
func (g Geometry) choose(u usage, i int) (best device.Placement, found bool) {
	most := 0
	for _, at := range g.profiles[i].Placements {
		if u.slices&mask(at) != 0 {
			continue
		}
		if room := g.room(u, u.slices|mask(at)); !found || room > most {
			best, most, found = at, room, true
		}
	}
	return best, found
}

// room returns the sum of the sizes of all usable placements, with these memory slices taken and the engines in u.
func (g Geometry) room(u usage, taken uint32) int {
	sum := 0
	for i, p := range g.profiles {
		if !g.hasRoom(u, i) {
			continue
		}
		for _, at := range p.Placements {
			if m := mask(at); taken&m == 0 {
				sum += bits.OnesCount32(m)
			}
		}
	}
	return sum
}

func (u usage) with(i int, takes engines) usage {
	u.engines = u.engines.plus(takes)
	u.instances = slices.Clone(u.instances)
	u.instances[i]++
	return u
}

// Order returns every placement of every profile in the order in which to publish them: the scheduler takes the first one that
// matches a request and fits. Small profiles come first, so that a request that several satisfy gets the smallest. The placements
// of a profile are in the order in which Choose fills an empty GPU with it, which makes first-fit almost as good as Choose. GPUs
// should be published in ascending order, each with all of its placements.
func (g Geometry) Order() []Instance {
	byNeed := make([]int, len(g.profiles))
	for i := range byNeed {
		byNeed[i] = i
	}
	slices.SortStableFunc(byNeed, func(a, b int) int {
		return cmp.Or(
			g.profiles[a].Placements[0].Size-g.profiles[b].Placements[0].Size,
			slices.Compare(g.takes[a][1:], g.takes[b][1:]),
		)
	})
	var order []Instance
	for _, i := range byNeed {
		// Engines do not count here: if a GPU holds one instance of a profile, the second placement is for a GPU on which the
		// first is not free.
		u, left := usage{instances: make([]int, len(g.profiles))}, slices.Clone(g.profiles[i].Placements)
		for len(left) > 0 {
			at, found := g.choose(u, i)
			if !found {
				at = left[0]
			}
			u.slices |= mask(at)
			left = slices.DeleteFunc(left, func(p device.Placement) bool { return p == at })
			order = append(order, Instance{ProfileID: g.profiles[i].ID, Placement: at})
		}
	}
	return order
}
