// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated/models"
)

// twin is the hardware as one would describe it without counters: memory slices that are taken or not, a number of instances of
// each profile, and the media engines, which are handed out one by one. Copy engines, multiprocessors and memory go with the
// memory slices there: they are never what runs out.
type twin struct {
	model models.Model
	held  []Instance
}

func (w twin) profile(id int) models.Profile {
	for _, p := range w.model.Profiles {
		if p.ID == id {
			return p
		}
	}
	return models.Profile{}
}

func (w twin) admits(want Instance) bool {
	p := w.profile(want.ProfileID)
	if !slices.Contains(p.Placements, want.Placement) {
		return false
	}
	instances := 1
	media := func(c device.Capacity) [4]int { return [4]int{c.Decoders, c.Encoders, c.JPEGEngines, c.OFAEngines} }
	used := media(p.Capacity)
	for _, h := range w.held {
		for slice := want.Placement.Start; slice < want.Placement.Start+want.Placement.Size; slice++ {
			if slice >= h.Placement.Start && slice < h.Placement.Start+h.Placement.Size {
				return false
			}
		}
		if h.ProfileID == want.ProfileID {
			instances++
		}
		for i, n := range media(w.profile(h.ProfileID).Capacity) {
			used[i] += n
		}
	}
	for i, n := range media(w.model.Total) {
		if used[i] > n {
			return false
		}
	}
	return instances <= p.Instances
}

// compute is the number of compute slices taken: memory slices must have kept it within what there is.
func (w twin) compute() int {
	sum := 0
	for _, h := range w.held {
		sum += w.profile(h.ProfileID).Compute
	}
	return sum
}

// firstFit returns what the scheduler allocates: the first published placement that fits.
func (g Geometry) firstFit(held []Instance, profileID int) (device.Placement, bool) {
	for _, i := range g.Order() {
		if i.ProfileID == profileID && g.Fits(held, i) {
			return i.Placement, true
		}
	}
	return device.Placement{}, false
}

// every place of every profile.
func every(profiles []device.Profile) []Instance {
	var all []Instance
	for _, p := range profiles {
		for _, at := range p.Placements {
			all = append(all, Instance{ProfileID: p.ID, Placement: at})
		}
	}
	return all
}

// TestCountersAdmitWhatTheHardwareDoes goes through every set of partitions that each model admits, and asks of everything that
// could be added to it.
func TestCountersAdmitWhatTheHardwareDoes(t *testing.T) {
	for _, m := range models.All() {
		t.Run(m.Name, func(t *testing.T) {
			g := NewGeometry(m.Offered())
			all := every(m.Offered())
			takes := make([]Counters, len(all))
			for i, want := range all {
				takes[i] = g.Takes(want)
			}
			sets, full := 0, 0
			var extend func(w twin, from int)
			extend = func(w twin, from int) {
				sets++
				if compute := w.compute(); compute > m.ComputeSlices {
					t.Fatalf("%+v takes %d compute slices of %d", w.held, compute, m.ComputeSlices)
				}
				more, left := false, g.Left(w.held)
				for i, want := range all {
					admitted, sum := w.admits(want), takes[i].Within(left)
					if admitted != sum {
						t.Fatalf("%+v beside %+v: the hardware says %t, the counters %t", want, w.held, admitted, sum)
					}
					more = more || admitted
					if admitted && i >= from {
						extend(twin{w.model, append(slices.Clone(w.held), want)}, i+1)
					}
				}
				if !more {
					full++
				}
			}
			extend(twin{model: m}, 0)
			t.Logf("%d sets of partitions, %d of them full", sets, full)
		})
	}
}

// TestRandomly makes and removes partitions and compares with the twin.
func TestRandomly(t *testing.T) {
	for _, m := range models.All() {
		t.Run(m.Name, func(t *testing.T) {
			g, r := NewGeometry(m.Offered()), rand.New(rand.NewPCG(1, 2))
			w := twin{model: m}
			for range 3000 {
				if len(w.held) > 0 && r.IntN(3) == 0 {
					w.held = slices.Delete(w.held, 0, 1)
					continue
				}
				p := m.Profiles[r.IntN(len(m.Profiles))]
				var fitting []device.Placement
				for _, at := range p.Placements {
					if w.admits(Instance{ProfileID: p.ID, Placement: at}) {
						fitting = append(fitting, at)
					}
				}
				at, found := g.firstFit(w.held, p.ID)
				if found != (len(fitting) > 0) || found && !slices.Contains(fitting, at) {
					t.Fatalf("%s beside %+v: chose %v %t of %v", p.Name, w.held, at, found, fitting)
				}
				if found {
					w.held = append(w.held, Instance{ProfileID: p.ID, Placement: at})
				}
			}
		})
	}
}

// TestTotalsOfKnownModels: the counters of a GPU are at most 32, the scheduler's limit, and named as users know them from
// NVIDIA's driver; no known model needs one of ours.
func TestTotalsOfKnownModels(t *testing.T) {
	for _, m := range models.All() {
		g := NewGeometry(m.Offered())
		var want []string
		want = append(want, "copy-engines", "decoders", "encoders", "jpeg-engines", "memory", "multiprocessors", "ofa-engines")
		for i := range m.Slices {
			want = append(want, fmt.Sprint("memory-slice-", i))
		}
		total := g.Total()
		for _, name := range want {
			if _, ok := total[name]; !ok {
				t.Errorf("%s has no counter %s", m.Name, name)
			}
		}
		if len(total) != len(want) {
			t.Errorf("%s has counters %v, want %v", m.Name, total, want)
		}
		largest := m.Profiles[len(m.Profiles)-1].Capacity
		if total["memory"] != int64(largest.MemoryBytes) || total["decoders"] != int64(largest.Decoders) {
			t.Errorf("%s: total %v, the largest profile has %+v", m.Name, total, largest)
		}
	}
}
