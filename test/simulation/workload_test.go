// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"fmt"
	"slices"
	"time"
)

// cluster is what else acts: owners that make pods, the claims' controller, and users.
type cluster struct {
	*simulation
	process *process
	// owners by name, with what their pods are like; nil once deleted.
	owners map[string]*pod
	busy   map[string]bool
}

func (s *simulation) startCluster() {
	c := &cluster{simulation: s, process: newProcess("cluster"), owners: map[string]*pod{}, busy: map[string]bool{}}
	s.cluster = c
	s.api.changed = c.lookSoon
}

// once makes one request for a thing at a time.
func (c *cluster) once(what string, do func()) {
	if c.busy[what] {
		return
	}
	c.busy[what] = true
	c.api.request(c.process, what, func() {
		delete(c.busy, what)
		do()
		c.lookSoon()
	})
}

func (c *cluster) lookSoon() {
	if c.busy["look"] {
		return
	}
	c.busy["look"] = true
	c.after(c.process, c.between(0, 60*time.Millisecond), "looks at pods and claims", func() {
		delete(c.busy, "look")
		c.lookAtOwners()
		c.lookAtClaims()
	})
}

// lookAtOwners replaces pods that are gone, going or have ended, and removes those that have ended.
func (c *cluster) lookAtOwners() {
	pods := all[*pod](c.api.objects)
	for _, name := range sorted(c.owners) {
		model := c.owners[name]
		has := slices.ContainsFunc(pods, func(p *pod) bool { return p.owner == name && !p.deleting && !p.terminal() })
		if model != nil && !has {
			c.once("makes a pod for "+name, func() {
				still := slices.ContainsFunc(all[*pod](c.api.objects), func(p *pod) bool { return p.owner == name && !p.deleting && !p.terminal() })
				if c.owners[name] != nil && !still {
					c.create(*model)
				}
			})
		}
	}
	for _, p := range pods {
		if p.terminal() && !p.deleting && p.owner != "" {
			c.once("removes the ended pod "+p.uid, func() { c.remove(p.uid) })
		}
		if p.owner != "" && c.owners[p.owner] == nil && !p.deleting {
			c.once("removes the ownerless pod "+p.uid, func() { c.remove(p.uid) })
		}
	}
}

// lookAtClaims takes reservations of ended pods away, and removes claims with the pods that they were made for.
func (c *cluster) lookAtClaims() {
	for _, k := range all[*claim](c.api.objects) {
		kept := slices.DeleteFunc(slices.Clone(k.reservedFor), func(uid string) bool {
			p, ok := get[*pod](c.api, podKey(uid))
			return !ok || p.terminal()
		})
		owner, alive := get[*pod](c.api, podKey(k.pod))
		named := slices.ContainsFunc(all[*pod](c.api.objects), func(p *pod) bool { return slices.Contains(p.claims, k.name) })
		for _, model := range c.owners {
			named = named || model != nil && slices.Contains(model.claims, k.name)
		}
		over := k.deleting || k.pod == "" && !named || k.pod != "" && (!alive || owner.terminal())
		switch {
		case len(kept) < len(k.reservedFor):
			c.once("takes reservations of "+k.name, func() {
				c.api.updateClaim(k.name, k.uid, func(changed *claim) {
					changed.reservedFor = slices.DeleteFunc(changed.reservedFor, func(uid string) bool { return !slices.Contains(kept, uid) && slices.Contains(k.reservedFor, uid) })
					if len(changed.reservedFor) == 0 {
						changed.allocation = nil
						delete(c.before, k.uid)
					}
				})
			})
		case over && len(k.reservedFor) == 0:
			c.once("removes claim "+k.name, func() {
				if now, ok := get[*claim](c.api, claimKey(k.name)); ok && now.uid == k.uid && len(now.reservedFor) == 0 {
					c.api.put(claimKey(k.name), nil)
				}
			})
		}
	}
}

// create makes a pod like a model, and the claims of its own.
func (c *cluster) create(model pod) {
	model.uid = c.api.uid("pod")
	model.name, model.phase = model.uid, pending
	var own []string
	for i, count := range model.own {
		k := c.newClaim(claim{uid: c.api.uid("claim"), name: fmt.Sprintf("%s-gpu-%d", model.uid, i), count: count, pod: model.uid})
		c.api.put(claimKey(k.name), k)
		own = append(own, k.name)
	}
	if len(model.claims) == 0 || c.chance(2) {
		model.claims = slices.Concat(own, model.claims)
	} else {
		model.claims = slices.Concat(model.claims, own)
	}
	c.api.put(podKey(model.uid), &model)
}

// remove deletes a pod in order: kubelet lets go of it, unless it never had it.
func (c *cluster) remove(uid string) {
	p, ok := get[*pod](c.api, podKey(uid))
	switch {
	case !ok:
	case !p.bound, p.terminal():
		c.api.put(podKey(uid), nil)
	default:
		c.api.updatePod(uid, func(p *pod) { p.deleting = true })
	}
}
