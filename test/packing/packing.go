// SPDX-License-Identifier: Apache-2.0

// Package packing measures how many requests for partitions find a place, by who chooses it: the scheduler, which takes the first
// that fits in the order in which a driver publishes them; an allocator that knows all future requests.
// Requests come and go, and a partition is never moved.
package packing

import (
	"cmp"
	"math/rand/v2"
	"slices"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/mig"
	"github.com/tandem-gpu/tandem/simulated/models"
)

// Result counts requests.
type Result struct {
	// Requests is how many there were.
	Requests int
	// ByName is how many first-fit places in the order of NVIDIA's driver, Ordered in the order of ours.
	ByName, Ordered int
	// Foreseen is how many could be placed by who knows the future and takes whatever fits, Optimum by who may also turn
	// away what would fit, to keep the room for others. Zero for a node.
	Foreseen, Optimum int
}

// Share is n in per cent of the requests.
func (r Result) Share(n int) float64 { return 100 * float64(n) / float64(max(r.Requests, 1)) }

// GPU plays random sequences of 32 requests on one GPU of the model. All profiles but the whole GPU's are equally likely, and
// together they ask for about what the GPU has. The optimum is exact for models where memory slices and the one optical flow
// engine are all that runs out, which is all but those with "+me.all".
func GPU(m models.Model, sequences int, seed uint64) Result {
	profiles, g := m.Offered(), mig.NewGeometry(m.Offered())
	choosers := []chooser{firstFit(g, byName(profiles)), firstFit(g, g.Order())}
	var r Result
	random := rand.New(rand.NewPCG(seed, 0))
	for range sequences {
		requests := sequence(random, profiles, 32, 1, 0, 1)
		r.Requests += len(requests)
		r.count(profiles, requests, 1, choosers)
		r.Foreseen += optimum(profiles, requests, false)
		r.Optimum += optimum(profiles, requests, true)
	}
	return r
}

// Node plays random sequences of 300 requests on a node of eight GPUs. One in ten is for a whole GPU; together they ask for
// load times what the node has. GPUs are tried in order.
func Node(m models.Model, load float64, sequences int, seed uint64) Result {
	const gpus = 8
	profiles, g := m.Offered(), mig.NewGeometry(m.Offered())
	choosers := []chooser{firstFit(g, byName(profiles)), firstFit(g, g.Order())}
	var r Result
	random := rand.New(rand.NewPCG(seed, 0))
	for range sequences {
		requests := sequence(random, profiles, 300, gpus, 0.1, load)
		r.Requests += len(requests)
		r.count(profiles, requests, gpus, choosers)
	}
	return r
}

func (r *Result) count(profiles []device.Profile, requests []request, gpus int, choosers []chooser) {
	for i, n := range []*int{&r.ByName, &r.Ordered} {
		*n += placed(profiles, requests, gpus, choosers[i])
	}
}

// request is for an instance of a profile. It comes at the time of its index and is over at the time ends.
type request struct{ profile, ends int }

// sequence makes n requests that ask for load times what the GPUs have; the last profile is the whole GPU's.
func sequence(random *rand.Rand, profiles []device.Profile, n, gpus int, whole, load float64) []request {
	last := len(profiles) - 1
	size := func(i int) float64 { return float64(profiles[i].Placements[0].Size) }
	mean := whole * size(last)
	for i := range last {
		mean += (1 - whole) * size(i) / float64(last)
	}
	lasts := load * float64(gpus) * size(last) / mean
	requests := make([]request, n)
	for i := range requests {
		requests[i] = request{profile: random.IntN(last), ends: i + 1 + int(random.ExpFloat64()*lasts)}
		if random.Float64() < whole {
			requests[i].profile = last
		}
	}
	return requests
}

// chooser chooses the place of an instance on a GPU beside those held.
type chooser func(held []mig.Instance, profileID int) (device.Placement, bool)

// firstFit is the scheduler's: the first published device that matches and fits.
func firstFit(g mig.Geometry, published []mig.Instance) chooser {
	takes := map[mig.Instance]mig.Counters{}
	for _, d := range published {
		takes[d] = g.Takes(d)
	}
	return func(held []mig.Instance, profileID int) (device.Placement, bool) {
		left := g.Left(held)
		for _, d := range published {
			if d.ProfileID == profileID && takes[d].Within(left) {
				return d.Placement, true
			}
		}
		return device.Placement{}, false
	}
}

// byName is the order of NVIDIA's DRA driver: by the names of the devices.
func byName(profiles []device.Profile) []mig.Instance {
	var all []mig.Instance
	names := map[mig.Instance]string{}
	for _, p := range profiles {
		for _, at := range p.Placements {
			i := mig.Instance{ProfileID: p.ID, Placement: at}
			all, names[i] = append(all, i), device.PartitionName(0, p.Name, p.ID, at)
		}
	}
	slices.SortFunc(all, func(a, b mig.Instance) int { return cmp.Compare(names[a], names[b]) })
	return all
}

// placed counts the requests that get a place on one of the GPUs, which are tried in order.
func placed(profiles []device.Profile, requests []request, gpus int, choose chooser) int {
	type live struct {
		mig.Instance
		gpu, ends int
	}
	var all []live
	count := 0
	for now, r := range requests {
		all = slices.DeleteFunc(all, func(l live) bool { return l.ends <= now })
		held := make([][]mig.Instance, gpus)
		for _, l := range all {
			held[l.gpu] = append(held[l.gpu], l.Instance)
		}
		id := profiles[r.profile].ID
		for gpu := range gpus {
			if at, ok := choose(held[gpu], id); ok {
				all = append(all, live{mig.Instance{ProfileID: id, Placement: at}, gpu, r.ends})
				count++
				break
			}
		}
	}
	return count
}
