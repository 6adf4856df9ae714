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
	// assumedPods are those that it has bound and not heard of, assumed the claims that it has written and not heard of.
	assumedPods map[string]bool
	assumed     map[string]*claim
	// inFlight are the allocations of claims whose pods are not bound yet.
	inFlight map[string]*resourceapi.AllocationResult
	trying   bool
}

func (s *simulation) startScheduler() {
	sched := &scheduler{
		simulation: s, process: newProcess("scheduler"), assumedPods: map[string]bool{}, assumed: map[string]*claim{},
		inFlight: map[string]*resourceapi.AllocationResult{},
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
		if mine := c.assumed[key]; mine != nil && mine.version <= object.version {
			delete(c.assumed, key)
		}
	case nil:
		delete(c.assumed, key)
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

// place finds a place for a pod and all its claims, or for nothing of it.
func (c *scheduler) place(p *pod) bool {
	if p.limits() && c.allocatable() < p.gpus {
		return false
	}
	var claims, unallocated []*claim
	for _, name := range p.claims {
		k := c.claim(claimKey(name))
		switch {
		case k == nil || k.deleting || k.pod != "" && k.pod != p.uid:
			return false
		case k.allocation != nil:
		case c.inFlight[claimKey(name)] != nil:
			return false
		default:
			unallocated = append(unallocated, k)
		}
		claims = append(claims, k)
	}
	if len(unallocated) > 0 {
		allocations := c.allocate(unallocated)
		if allocations == nil {
			return false
		}
		for i, k := range unallocated {
			c.inFlight[claimKey(k.name)] = allocations[i]
		}
	}
	c.assumedPods[p.uid] = true
	c.bind(p, claims, 0)
	return true
}

// allocatable is how many GPUs the scheduler counts as free for limits.
func (c *scheduler) allocatable() int {
	n, _ := c.seen.cache["node/"].(*nodeObject)
	if n == nil {
		return 0
	}
	free := n.allocatable
	for _, p := range all[*pod](c.seen.cache) {
		if (p.bound || c.assumedPods[p.uid]) && !p.terminal() {
			free -= p.gpus
		}
	}
	return free
}

// claim is the newest version of a claim that the scheduler knows: one that it wrote, or one that it heard of.
func (c *scheduler) claim(key string) *claim {
	if mine := c.assumed[key]; mine != nil {
		return mine
	}
	k, _ := c.seen.cache[key].(*claim)
	return k
}

// allocate asks the scheduler's allocator, by what has been heard of the slice and of claims, and what is in flight.
func (c *scheduler) allocate(claims []*claim) []*resourceapi.AllocationResult {
	published, _ := c.seen.cache["slice/"].(*slice)
	if published == nil {
		return nil
	}
	var taken []*resourceapi.AllocationResult
	for _, key := range sorted(c.seen.cache) {
		if k := c.claim(key); k == nil {
			continue
		} else if k.allocation != nil {
			taken = append(taken, k.allocation)
		} else if c.inFlight[key] != nil {
			taken = append(taken, c.inFlight[key])
		}
	}
	allocations, err := allocate(c.version, published, taken, claims)
	if err != nil {
		c.fail("the allocator refuses %v: %v", claims, err)
	}
	return allocations
}

// bind follows PreBind: it writes the claims, one after the other, and then the binding. done are written already.
func (c *scheduler) bind(p *pod, claims []*claim, done int) {
	if done == len(claims) {
		c.forget(claims)
		c.api.request(c.process, "binds "+p.uid, func() {
			c.bound++
			c.api.updatePod(p.uid, func(changed *pod) { changed.bound = true })
		})
		return
	}
	wanted := claims[done]
	key := claimKey(wanted.name)
	allocation := c.inFlight[key]
	if wanted.allocation != nil {
		allocation = nil
	}
	c.api.request(c.process, "allocates "+wanted.name, func() {
		now, ok := get[*claim](c.api, key)
		if !ok || now.uid != wanted.uid || now.deleting || (now.allocation == nil) != (allocation != nil) {
			c.unreserve(p, claims, done)
			return
		}
		c.api.updateClaim(wanted.name, wanted.uid, func(changed *claim) {
			if allocation != nil {
				changed.allocation = allocation
				if c.podHolds(changed.devices()) {
					c.hit(staleSlice)
				}
			}
			if !slices.Contains(changed.reservedFor, p.uid) {
				changed.reservedFor = append(changed.reservedFor, p.uid)
			}
		})
		c.assumed[key], _ = get[*claim](c.api, key)
		c.bind(p, claims, done+1)
	})
}

// forget ends what is in flight of claims.
func (c *scheduler) forget(claims []*claim) {
	for _, k := range claims {
		if k.allocation == nil {
			delete(c.inFlight, claimKey(k.name))
		}
	}
}

// unreserve follows Unreserve: the pod is not bound, and tried again after that. The claims that were written stay allocated, and not
// reserved for the pod.
func (c *scheduler) unreserve(p *pod, claims []*claim, done int) {
	c.forget(claims)
	again := func() {
		delete(c.assumedPods, p.uid)
		c.trySoon(c.latency())
	}
	if done == 0 {
		again()
		return
	}
	c.hit(reservedInPart)
	c.api.request(c.process, "unreserves the claims of "+p.uid, func() {
		for _, k := range claims[:done] {
			c.api.updateClaim(k.name, k.uid, func(changed *claim) {
				changed.reservedFor = slices.DeleteFunc(changed.reservedFor, func(uid string) bool { return uid == p.uid })
			})
		}
		again()
	})
}
