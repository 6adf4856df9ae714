// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"slices"
	"strings"
	"time"
)

// scheduler places pods by its caches: pods with limits by the node's allocatable, claims first-fit by the slices.
type scheduler struct {
	*simulation
	process *process
	seen    *watch
	// assumed are its own decisions that it has not heard of yet.
	assumedPods   map[string]bool
	assumedClaims map[string][]string
	trying        bool
}

func (s *simulation) startScheduler() {
	sched := &scheduler{simulation: s, process: newProcess("scheduler"), assumedPods: map[string]bool{}, assumedClaims: map[string][]string{}}
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
		delete(c.assumedClaims, key)
	case nil:
		delete(c.assumedClaims, key)
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
	devices := wanted.devices
	if len(devices) == 0 {
		if c.assumedClaims[claimKey(p.claim)] != nil {
			return false
		}
		devices = c.firstFit(wanted)
		if devices == nil {
			return false
		}
	}
	c.assumedPods[p.uid] = true
	c.assumedClaims[claimKey(p.claim)] = devices
	c.api.request(c.process, "allocates "+wanted.name, func() {
		forget := func() {
			delete(c.assumedPods, p.uid)
			delete(c.assumedClaims, claimKey(p.claim))
		}
		now, ok := get[*claim](c.api, claimKey(p.claim))
		if !ok || now.uid != wanted.uid || now.deleting || !slices.Equal(now.devices, wanted.devices) {
			forget()
			return
		}
		c.api.updateClaim(wanted.name, wanted.uid, func(changed *claim) {
			if len(changed.devices) == 0 && c.podHolds(devices) {
				c.hit(staleSlice)
			}
			changed.devices, changed.consumed = devices, nil
			for _, d := range devices {
				changed.consumed = append(changed.consumed, c.consumes(changed, d))
			}
			if !slices.Contains(changed.reservedFor, p.uid) {
				changed.reservedFor = append(changed.reservedFor, p.uid)
			}
		})
		c.bind(p)
	})
	return true
}

func (c *scheduler) firstFit(wanted *claim) []string {
	s, _ := c.seen.cache["slice/"].(*slice)
	if s == nil {
		return nil
	}
	// A GPU is taken, or so much of it, by the keys of claims.
	taken := map[string]map[string]int{}
	take := func(key string, other *claim, devices []string) {
		for _, d := range devices {
			if taken[d] == nil {
				taken[d] = map[string]int{}
			}
			taken[d][key] = c.consumes(other, d)
		}
	}
	for _, key := range sorted(c.seen.cache) {
		if other, ok := c.seen.cache[key].(*claim); ok {
			take(key, other, other.devices)
			take(key, other, c.assumedClaims[key])
		}
	}
	var found []string
	for _, offered := range s.offered {
		d, left := gpuOf(offered), mibOf(offered)
		fits := len(taken[d]) == 0
		if left > 0 {
			for _, consumed := range taken[d] {
				left -= consumed
			}
			fits = c.consumes(wanted, d) <= left
		}
		if len(found) < wanted.count && fits {
			found = append(found, d)
		}
	}
	if len(found) < wanted.count {
		return nil
	}
	return found
}

func (c *scheduler) bind(p *pod) {
	c.api.request(c.process, "binds "+p.uid, func() {
		c.bound++
		c.api.updatePod(p.uid, func(changed *pod) { changed.bound = true })
	})
}
