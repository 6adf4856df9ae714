// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"fmt"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// Counters are amounts by the name of the counter, as a ResourceSlice publishes them for a GPU (KEP-4815, partitionable
// devices). The names are those of NVIDIA's DRA driver: memory (bytes), multiprocessors, copy-engines, decoders, encoders,
// jpeg-engines, ofa-engines, and memory-slice-<i>, of which there is one each. Where those would allow more instances of a
// profile than the GPU holds there is also instances-<profile ID>; no GPU known today needs one.
//
// One sum decides for the scheduler and for us: a set of instances fits a GPU exactly when, counter by counter, what they
// take together is no more than Total.
type Counters map[string]int64

// Total returns the capacity of the GPU, which the whole GPU takes. NVML does not report it, so it is the maximum of each counter
// over all profiles (as in NVIDIA's DRA driver). It has every counter, also with the value zero.
func (g Geometry) Total() Counters {
	c := make(Counters, len(engineNames)+g.slices)
	for i, name := range engineNames {
		c[name] = int64(g.total[i])
	}
	for i := range g.slices {
		c[sliceName(i)] = 1
	}
	for i, p := range g.profiles {
		if g.scarce[i] {
			c[instancesName(p)] = int64(p.Instances)
		}
	}
	return c
}

// Takes returns what the instance takes of Total, without zero counters and without memory slices that the GPU lacks. It does not
// check whether the GPU offers the instance.
func (g Geometry) Takes(i Instance) Counters {
	takes := enginesOf(i.Capacity)
	p, known := g.index(i.ProfileID)
	if known {
		takes = g.takes[p]
	}
	c := make(Counters, len(engineNames)+g.slices)
	for e, name := range engineNames {
		if takes[e] > 0 {
			c[name] = int64(takes[e])
		}
	}
	taken := mask(i.Placement)
	for s := range g.slices {
		if taken&(1<<s) != 0 {
			c[sliceName(s)] = 1
		}
	}
	if known && g.scarce[p] {
		c[instancesName(g.profiles[p])] = 1
	}
	return c
}

// Left returns what the instances leave of Total, at least zero: the scheduler ignores a whole pool with a negative counter. It
// withdraws instances that the scheduler did not allocate, of pods or of an administrator.
func (g Geometry) Left(held []Instance) Counters {
	left := g.Total()
	for _, h := range held {
		for name, n := range g.Takes(h) {
			left[name] = max(left[name]-n, 0)
		}
	}
	return left
}

// Within reports whether no counter is larger than in the other set.
func (c Counters) Within(all Counters) bool {
	for name, n := range c {
		if n > all[name] {
			return false
		}
	}
	return true
}

func sliceName(i int) string { return fmt.Sprintf("memory-slice-%d", i) }

func instancesName(p device.Profile) string { return fmt.Sprintf("instances-%d", p.ID) }
