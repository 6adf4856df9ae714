// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"cmp"
	"math"
	"slices"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// maxSlices bounds the memory slices of a GPU: a set of counters holds 32 (resource.k8s.io), seven of which count other things.
// No GPU has more than eight.
const maxSlices = 24

// Instance is an existing or possible GPU instance: a profile at a placement.
type Instance struct {
	// ProfileID is as in device.Profile.ID.
	ProfileID int
	Placement device.Placement
	// Capacity is used if the GPU does not offer the profile, because another tool created the partition with a newer driver.
	// Otherwise it is ignored.
	Capacity device.Capacity
}

// Geometry computes what fits on one GPU. It is made from the profiles of the GPU's driver and is immutable. It ignores invalid
// profiles: the second one of an ID, one without instances, and placements outside the GPU. So invalid input makes fewer
// partitions fit, and nothing panics.
type Geometry struct {
	profiles []device.Profile
	// takes is what an instance of each profile takes, apart from memory slices.
	takes []engines
	total engines
	// slices is the number of memory slices.
	slices int
	// scarce are the profiles of which the GPU allows fewer than memory slices and engines do.
	scarce []bool
}

// NewGeometry makes a Geometry. The profiles are copied.
func NewGeometry(profiles []device.Profile) Geometry {
	var g Geometry
	for _, p := range profiles {
		p.Placements = slices.DeleteFunc(slices.Clone(p.Placements), func(at device.Placement) bool {
			return at.Start < 0 || at.Size <= 0 || at.Size > maxSlices || at.Start > maxSlices-at.Size
		})
		slices.SortFunc(p.Placements, func(a, b device.Placement) int {
			return cmp.Or(a.Start-b.Start, a.Size-b.Size)
		})
		p.Placements = slices.Compact(p.Placements)
		if _, known := g.index(p.ID); known || p.Instances <= 0 || len(p.Placements) == 0 {
			continue
		}
		g.profiles = append(g.profiles, p)
		takes := enginesOf(p.Capacity)
		g.takes = append(g.takes, takes)
		g.total = g.total.max(takes)
		for _, at := range p.Placements {
			g.slices = max(g.slices, at.Start+at.Size)
		}
	}
	for i, p := range g.profiles {
		g.scarce = append(g.scarce, p.Instances < g.atMost(i))
	}
	return g
}

// Profiles returns the valid profiles, in the given order, with ascending placements.
func (g Geometry) Profiles() []device.Profile { return slices.Clone(g.profiles) }

// Slices returns the number of memory slices, which is the highest end of a placement.
func (g Geometry) Slices() int { return g.slices }

// Fits reports whether the instance can be created beside those held: its profile has the placement, and it takes no more of each
// counter than they leave (see Counters). The held ones may be anything, also more than the GPU has.
func (g Geometry) Fits(held []Instance, want Instance) bool {
	i, known := g.index(want.ProfileID)
	if !known || !slices.Contains(g.profiles[i].Placements, want.Placement) {
		return false
	}
	u := g.usage(held)
	return u.slices&mask(want.Placement) == 0 && g.hasRoom(u, i)
}

// usage is what several instances take.
type usage struct {
	slices  uint32
	engines engines
	// instances is the number of each profile.
	instances []int
}

func (g Geometry) usage(held []Instance) usage {
	u := usage{instances: make([]int, len(g.profiles))}
	for _, h := range held {
		u.slices |= mask(h.Placement)
		if i, known := g.index(h.ProfileID); known {
			u.engines = u.engines.plus(g.takes[i])
			u.instances[i]++
		} else {
			u.engines = u.engines.plus(enginesOf(h.Capacity))
		}
	}
	return u
}

// hasRoom reports whether engines and instances suffice for one more of the profile, at any placement.
func (g Geometry) hasRoom(u usage, i int) bool {
	if g.scarce[i] && u.instances[i] >= g.profiles[i].Instances {
		return false
	}
	for e, takes := range g.takes[i] {
		if takes > 0 && (u.engines[e] > g.total[e] || takes > g.total[e]-u.engines[e]) {
			return false
		}
	}
	return true
}

func (g Geometry) index(profileID int) (int, bool) {
	i := slices.IndexFunc(g.profiles, func(p device.Profile) bool { return p.ID == profileID })
	return i, i >= 0
}

// atMost returns how many instances of the profile the memory slices and engines of an empty GPU allow.
func (g Geometry) atMost(i int) int {
	// The placement that ends first, then the next one beside it: no other choice gives more.
	byEnd := slices.Clone(g.profiles[i].Placements)
	slices.SortStableFunc(byEnd, func(a, b device.Placement) int { return a.Start + a.Size - b.Start - b.Size })
	count, end := 0, 0
	for _, at := range byEnd {
		if at.Start >= end {
			count, end = count+1, at.Start+at.Size
		}
	}
	for e, takes := range g.takes[i] {
		if takes > 0 {
			count = int(min(uint64(count), g.total[e]/takes))
		}
	}
	return count
}

// mask returns a bit for each memory slice of the placement; none for one that begins outside the GPU.
func mask(at device.Placement) uint32 {
	if at.Start < 0 || at.Start >= maxSlices || at.Size <= 0 {
		return 0
	}
	return 1<<(at.Start+min(at.Size, maxSlices-at.Start)) - 1<<at.Start
}

// engines is what instances take apart from memory slices, in the order of engineNames.
type engines [7]uint64

var engineNames = [len(engines{})]string{
	"memory", "multiprocessors", "copy-engines", "decoders", "encoders", "jpeg-engines", "ofa-engines",
}

func enginesOf(c device.Capacity) engines {
	e := engines{min(c.MemoryBytes, math.MaxInt64)}
	for i, n := range []int{c.Multiprocessors, c.CopyEngines, c.Decoders, c.Encoders, c.JPEGEngines, c.OFAEngines} {
		e[i+1] = uint64(max(n, 0))
	}
	return e
}

// plus adds without wrapping around.
func (e engines) plus(other engines) engines {
	for i := range e {
		if e[i] += other[i]; e[i] < other[i] {
			e[i] = ^uint64(0)
		}
	}
	return e
}

func (e engines) max(other engines) engines {
	for i := range e {
		e[i] = max(e[i], other[i])
	}
	return e
}
