// SPDX-License-Identifier: Apache-2.0

package packing

import (
	"slices"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// occupancy is when each memory slice is free again, and at the end when the optical flow engine is; zero is now. More cannot
// matter later, so the search keeps for each occupancy only the most requests placed.
type occupancy [8 + 1]uint8

const engine = len(occupancy{}) - 1

// optimum tries everything and returns the most requests that can have a place on one GPU. Who may not turn away gives a
// request a place whenever one fits.
func optimum(profiles []device.Profile, requests []request, mayTurnAway bool) int {
	states := map[occupancy]int{{}: 0}
	for now, r := range requests {
		next := make(map[occupancy]int, 2*len(states))
		for o, n := range states {
			for i := range o {
				if int(o[i]) <= now {
					o[i] = 0
				}
			}
			fits := false
			for _, at := range profiles[r.profile].Placements {
				if with, ok := o.with(at, profiles[r.profile].Capacity.OFAEngines > 0, r.ends); ok {
					fits, next[with] = true, max(next[with], n+1)
				}
			}
			if !fits || mayTurnAway {
				next[o] = max(next[o], n)
			}
		}
		// Who must take what fits may be worse off with more room.
		if mayTurnAway {
			next = undominated(next)
		}
		states = next
	}
	most := 0
	for _, n := range states {
		most = max(most, n)
	}
	return most
}

// with is the occupancy with the place taken until the end, and whether it was free.
func (o occupancy) with(at device.Placement, takesEngine bool, ends int) (occupancy, bool) {
	until := uint8(min(ends, 255))
	for i := at.Start; i < at.Start+at.Size; i++ {
		if o[i] != 0 {
			return o, false
		}
		o[i] = until
	}
	if takesEngine {
		if o[engine] != 0 {
			return o, false
		}
		o[engine] = until
	}
	return o, true
}

// undominated drops every occupancy beside which there is one with as many placed where everything is free as early.
func undominated(states map[occupancy]int) map[occupancy]int {
	type state struct {
		occupancy
		n, sum int
	}
	all := make([]state, 0, len(states))
	for o, n := range states {
		s := state{occupancy: o, n: n}
		for _, until := range o {
			s.sum += int(until)
		}
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b state) int {
		if a.n != b.n {
			return b.n - a.n
		}
		return a.sum - b.sum
	})
	kept, result := all[:0], make(map[occupancy]int, len(all))
	for _, s := range all {
		if !slices.ContainsFunc(kept, func(k state) bool { return k.sum <= s.sum && k.within(s.occupancy) }) {
			kept = append(kept, s)
			result[s.occupancy] = s.n
		}
	}
	return result
}

func (o occupancy) within(other occupancy) bool {
	for i := range o {
		if o[i] > other[i] {
			return false
		}
	}
	return true
}
