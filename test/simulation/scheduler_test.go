// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
)

// scheduler places pods by its caches: pods with limits by the node's allocatable, claims by its allocator.
type scheduler struct {
	*simulation
	process *process
	seen    *watch
	// assumedPods and inFlight are its own decisions that it has not heard of yet.
	assumedPods map[string]bool
	inFlight    map[string]*resourceapi.AllocationResult
	trying      bool
}

func (s *simulation) startScheduler() {
	sched := &scheduler{
		simulation: s, process: newProcess("scheduler"), assumedPods: map[string]bool{}, inFlight: map[string]*resourceapi.AllocationResult{},
	}
	s.scheduler = sched
	sched.seen = s.api.watch(sched.process, "pod/ claim/ node/ slice/", sched.changed, func() { sched.trySoon(s.latency()) })
}

func (c *scheduler) changed(key string, _, after any) {
	switch object := after.(type) {
	case *pod:
		if object.bound {
			delete(c.assumedPods, object.uid)
		}
	case *claim:
		delete(c.inFlight, key)
	case nil:
		delete(c.inFlight, key)
		delete(c.assumedPods, strings.TrimPrefix(key, "pod/"))
	}
	c.trySoon(c.latency())
}

func (c *scheduler) trySoon(delay time.Duration) {
	if c.trying || !c.somethingPending() {
		return
	}
	c.trying = true
	c.after(c.process, delay, "looks for pods to place", func() {
		c.trying = false
		for _, p := range all[*pod](c.seen.cache) {
			if p.bound || p.deleting || p.terminal() || c.assumedPods[p.uid] {
				continue
			}
			if c.place(p) {
				c.trySoon(c.between(0, 5*time.Millisecond))
				return
			}
		}
	})
}

func (c *scheduler) somethingPending() bool {
	for _, p := range all[*pod](c.seen.cache) {
		if !p.bound && !p.terminal() {
			return true
		}
	}
	return false
}

func (c *scheduler) place(p *pod) bool {
	if p.limits() {
		n, _ := c.seen.cache["node/"].(*nodeObject)
		if n == nil {
			return false
		}
		free := n.allocatable
		for _, other := range all[*pod](c.seen.cache) {
			if (other.bound || c.assumedPods[other.uid]) && !other.terminal() && other.limits() {
				free -= other.gpus
			}
		}
		if free < p.gpus {
			return false
		}
		c.assumedPods[p.uid] = true
		c.bind(p)
		return true
	}
	return c.placeClaim(p)
}

func (c *scheduler) placeClaim(p *pod) bool {
	wanted, ok := c.seen.cache[claimKey(p.claim)].(*claim)
	if !ok || wanted.deleting || !p.shared && wanted.pod != p.uid {
		return false
	}
	allocation := wanted.allocation
	if allocation == nil {
		if c.inFlight[claimKey(p.claim)] != nil {
			return false
		}
		if allocation = c.allocate(wanted); allocation == nil {
			return false
		}
	}
	c.assumedPods[p.uid] = true
	c.inFlight[claimKey(p.claim)] = allocation
	c.api.request(c.process, "allocates "+wanted.name, func() {
		forget := func() {
			delete(c.assumedPods, p.uid)
			delete(c.inFlight, claimKey(p.claim))
		}
		now, ok := get[*claim](c.api, claimKey(p.claim))
		if !ok || now.uid != wanted.uid || now.deleting || now.allocation != wanted.allocation {
			forget()
			return
		}
		c.api.updateClaim(wanted.name, wanted.uid, func(changed *claim) {
			if changed.allocation == nil {
				changed.allocation = allocation
				if c.podHolds(changed.devices()) {
					c.hit(staleSlice)
				}
			}
			if !slices.Contains(changed.reservedFor, p.uid) {
				changed.reservedFor = append(changed.reservedFor, p.uid)
			}
		})
		c.bind(p)
	})
	return true
}

// allocate asks the scheduler's allocator, by what has been heard of the slice and of claims, and what is in flight.
func (c *scheduler) allocate(wanted *claim) *resourceapi.AllocationResult {
	published, _ := c.seen.cache["slice/"].(*slice)
	if published == nil {
		return nil
	}
	var taken []*resourceapi.AllocationResult
	for _, key := range sorted(c.seen.cache) {
		if other, ok := c.seen.cache[key].(*claim); ok && other.allocation != nil {
			taken = append(taken, other.allocation)
		} else if ok && c.inFlight[key] != nil {
			taken = append(taken, c.inFlight[key])
		}
	}
	allocations, err := allocate(c.version, published, taken, []*claim{wanted})
	if err != nil {
		c.fail("the allocator refuses claim %s: %v", wanted.uid, err)
	}
	if allocations == nil {
		return nil
	}
	return allocations[0]
}

func (c *scheduler) bind(p *pod) {
	c.api.request(c.process, "binds "+p.uid, func() {
		c.bound++
		c.api.updatePod(p.uid, func(changed *pod) { changed.bound = true })
	})
}
