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

// Total is what the GPU has, and what the whole GPU takes when it is handed out undivided: NVML does not report it, so it is
// the most that any profile has of each (which is what NVIDIA's DRA driver publishes). Every counter is there, also a zero one.
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

// Takes is what the instance takes of Total; counters of which it takes nothing are absent. Memory slices that the GPU does not
// have are not counted. It does not ask whether the GPU offers the instance.
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

// Left is what the instances leave of Total, nothing below zero: the scheduler gives up on a whole pool where a counter is
// negative. Instances that are not the scheduler's (of limits, or made by an administrator) are withdrawn with it.
func (g Geometry) Left(held []Instance) Counters {
	left := g.Total()
	for _, h := range held {
		for name, n := range g.Takes(h) {
			left[name] = max(left[name]-n, 0)
		}
	}
	return left
}

func sliceName(i int) string { return fmt.Sprintf("memory-slice-%d", i) }

func instancesName(p device.Profile) string { return fmt.Sprintf("instances-%d", p.ID) }
