// SPDX-License-Identifier: Apache-2.0

// Package mig is the geometry of MIG (Multi-Instance GPU): which partitions fit beside each other on a GPU, what each of them
// takes of it, where to put the next one, and in which order to publish the places. It is pure: values in, values out, nothing
// kept, and every function may be called concurrently.
//
// A GPU in MIG mode is cut twice. GPU instances take memory slices: a profile says how many (A100 and Hopper have eight, A30
// four) and its placements say where they may start. Inside a GPU instance, compute instances take compute slices and share
// everything else. A partition is a compute instance; almost always it has its GPU instance to itself.
//
// Two GPU instances exclude each other when their memory slices overlap. Besides that the GPU runs out of what they take:
// there is one optical flow engine for all "+me" partitions, so one of them is all there can be, and a "+me.all" partition
// takes every media engine. A profile says how many of it the GPU holds at most.
//
// The functions work on the profiles that the driver of a GPU offers (device.Profile). Tables of GPU models are in
// simulated/models: the product has none.
package mig

import (
	"cmp"
	"math"
	"slices"
	"strconv"
	"strings"

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

// Fits reports whether the instance can be created beside those held: its profile has the placement, and it takes no more of each
// counter than they leave. The held ones may be anything, also more than the GPU has. Tests and simulations call it.
func (g Geometry) Fits(held []Instance, want Instance) bool {
	i, known := g.index(want.ProfileID)
	return known && slices.Contains(g.profiles[i].Placements, want.Placement) && g.Takes(want).Within(g.Left(held))
}

// Order returns every placement of every profile in the order in which to publish them: the scheduler takes the first one that
// matches a request and fits. Small profiles come first, so that a request that several satisfy gets the smallest. Each profile
// begins with the placement that leaves the most room, which keeps large holes whole: a 1g goes to the last memory slices, where a
// 4g never fits. GPUs should be published in ascending order, each with all of its placements.
func (g Geometry) Order() []Instance {
	bySize := make([]int, len(g.profiles))
	for i := range bySize {
		bySize[i] = i
	}
	slices.SortStableFunc(bySize, func(a, b int) int {
		return cmp.Or(
			g.profiles[a].Placements[0].Size-g.profiles[b].Placements[0].Size,
			slices.Compare(g.takes[a][1:], g.takes[b][1:]),
		)
	})
	var order []Instance
	for _, i := range bySize {
		taken := uint32(0)
		for left := slices.Clone(g.profiles[i].Placements); len(left) > 0; {
			// Engines do not count here: if a GPU holds one instance of a profile, the second placement is for a GPU on which the
			// first is not free.
			best, most := 0, -1
			for n, at := range left {
				if room := g.room(taken | mask(at)); taken&mask(at) == 0 && room > most {
					best, most = n, room
				}
			}
			taken |= mask(left[best])
			order = append(order, Instance{ProfileID: g.profiles[i].ID, Placement: left[best]})
			left = slices.Delete(left, best, best+1)
		}
	}
	return order
}

// room returns the sum of the sizes of all placements, of any profile, beside these memory slices.
func (g Geometry) room(taken uint32) int {
	sum := 0
	for _, p := range g.profiles {
		for _, at := range p.Placements {
			if taken&mask(at) == 0 {
				sum += at.Size
			}
		}
	}
	return sum
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

func (e engines) max(other engines) engines {
	for i := range e {
		e[i] = max(e[i], other[i])
	}
	return e
}

// Switchable reports whether the GPU's MIG mode can be switched without a reset of the GPU: from Hopper on, compute capability
// 9.0 (MIG user guide, "Enable MIG Mode"). Ampere has to be reset, which ends all its users.
func Switchable(g device.GPU) bool {
	major, _, _ := strings.Cut(g.ComputeCapability, ".")
	n, err := strconv.Atoi(major)
	return err == nil && g.MIGCapable && n >= 9
}
