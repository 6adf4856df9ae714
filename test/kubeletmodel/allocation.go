// SPDX-License-Identifier: Apache-2.0

package kubeletmodel

import (
	"maps"
	"slices"
)

// Container requests devices of one resource; of none where Count is zero.
type Container struct {
	Name, Resource string
	Count          int
	// Init containers run before the others. A Sidecar is one that goes on.
	Init, Sidecar bool
}

// Ask is a call from kubelet to a plugin.
type Ask struct {
	Endpoint *Endpoint
	// Preferred is set for GetPreferredAllocation, with Available, MustInclude and Size; otherwise it is Allocate, with IDs.
	Preferred                   bool
	Available, MustInclude, IDs []string
	Size                        int
}

// Allocation is what kubelet does for one container of a pod at its admission, up to its next call to a plugin.
type Allocation struct {
	// Ask is the call that kubelet waits for; nil where Done is set. The caller answers it with Answer.
	Ask  *Ask
	Done bool
	// Err is why the admission failed.
	Err error

	manager   *Manager
	uid       string
	container Container
	// taken are devices that this allocation has marked as allocated, available those that it may still choose.
	taken, available set
	missing          int
}

// Allocate begins the admission of a container. kubelet admits one container at a time, init containers first.
func (m *Manager) Allocate(uid string, c Container) *Allocation {
	if m.reusablePod != uid {
		m.reusablePod, m.reusable = uid, map[string]set{}
	}
	a := &Allocation{manager: m, uid: uid, container: c}
	switch {
	case c.Count == 0, m.healthy[c.Resource] == nil && m.allocated[c.Resource] == nil:
		a.end(nil) // no resource of a device plugin
	default:
		m.Update()
		a.choose()
	}
	return a
}

// Start begins the start of a container of an admitted pod. Where its devices are no longer known, kubelet allocates again.
func (m *Manager) Start(uid string, c Container) *Allocation {
	a := &Allocation{manager: m, uid: uid, container: c}
	switch {
	case c.Count == 0, m.healthy[c.Resource] == nil && m.allocated[c.Resource] == nil:
		a.Done = true
	case m.endpoints[c.Resource] == nil:
		a.Done, a.Err = true, ErrNoEndpoint
	case !m.Active(uid), m.pods[uid][c.Name][c.Resource] != nil:
		a.Done = true
	default:
		return m.Allocate(uid, c)
	}
	return a
}

// choose is devicesToAllocate up to the call of GetPreferredAllocation.
func (a *Allocation) choose() {
	m, resource := a.manager, a.container.Resource
	had, has := m.pods[a.uid][a.container.Name][resource]
	a.missing = a.container.Count
	if has {
		if a.missing -= len(had); a.missing != 0 {
			a.end(ErrChanged)
			return
		}
	}
	healthy, registered := m.healthy[resource]
	switch {
	case !m.SourcesReady() && m.Ran(a.uid, a.container.Name):
		a.end(nil)
		return
	case !registered:
		a.end(ErrUnregistered)
		return
	case len(healthy) == 0:
		a.end(ErrUnhealthy)
		return
	case len(setOf(had...).without(healthy)) > 0:
		a.end(ErrLostHealth)
		return
	case a.missing == 0:
		a.end(nil)
		return
	}
	a.taken = set{}
	if a.take(m.reusable[resource]) {
		a.ask()
		return
	}
	a.available = healthy.without(m.allocated[resource])
	if len(a.available) < a.missing {
		a.end(ErrTooFew)
		return
	}
	switch e := m.endpoints[resource]; {
	case e == nil:
		a.end(ErrNoEndpoint)
	case e.Stopped && e.Preferred:
		a.end(ErrStopped)
	case !e.Preferred:
		a.prefer(nil)
	default:
		all := maps.Clone(a.available)
		maps.Copy(all, a.taken)
		a.Ask = &Ask{Endpoint: e, Preferred: true, Available: all.sorted(), MustInclude: a.taken.sorted(), Size: a.container.Count}
	}
}

// prefer takes what the plugin prefers, then anything.
func (a *Allocation) prefer(ids []string) {
	preferred := set{}
	for _, id := range ids {
		if a.available[id] {
			preferred[id] = true
		}
	}
	if a.take(preferred) || a.take(a.available) {
		a.ask()
		return
	}
	a.end(ErrTooFew)
}

// take marks devices as allocated, as many as are missing, and reports whether none is missing any more.
func (a *Allocation) take(from set) bool {
	allocated := a.manager.allocated
	if allocated[a.container.Resource] == nil {
		allocated[a.container.Resource] = set{}
	}
	ids := from.without(a.taken).sorted()
	if len(ids) > a.missing {
		ids = a.manager.Choose(ids, a.missing)
	}
	for _, id := range ids {
		allocated[a.container.Resource][id], a.taken[id] = true, true
	}
	a.missing -= len(ids)
	return a.missing == 0
}

// ask calls Allocate.
func (a *Allocation) ask() {
	m := a.manager
	switch e := m.endpoints[a.container.Resource]; {
	case e == nil:
		a.fail(ErrNoPlugin)
	case e.Stopped:
		a.fail(ErrStopped)
	default:
		a.Ask = &Ask{Endpoint: e, IDs: a.taken.sorted()}
	}
}

// Answer continues with a plugin's answer: the IDs that it prefers, or an error of the call.
func (a *Allocation) Answer(ids []string, err error) {
	asked := a.Ask
	a.Ask = nil
	switch {
	case asked.Preferred && err != nil:
		a.end(err)
	case asked.Preferred:
		a.prefer(ids)
	case err != nil:
		a.fail(err)
	default:
		a.insert()
	}
}

// fail ends an allocation whose Allocate failed: only what pods have is allocated.
func (a *Allocation) fail(err error) {
	a.manager.allocated = a.manager.pods.devices()
	a.end(err)
}

func (a *Allocation) insert() {
	m := a.manager
	if m.pods[a.uid] == nil {
		m.pods[a.uid] = map[string]ByResource{}
	}
	if m.pods[a.uid][a.container.Name] == nil {
		m.pods[a.uid][a.container.Name] = ByResource{}
	}
	m.pods[a.uid][a.container.Name][a.container.Resource] = a.taken.sorted()
	m.write()
	a.end(nil)
}

// end ends the allocation. Later containers may use the devices of an init container, unless that is a sidecar.
func (a *Allocation) end(err error) {
	a.Done, a.Err = true, err
	if err != nil {
		return
	}
	m := a.manager
	for resource, ids := range m.pods[a.uid][a.container.Name] {
		if m.reusable[resource] == nil {
			m.reusable[resource] = set{}
		}
		if a.container.Init && !a.container.Sidecar {
			maps.Copy(m.reusable[resource], setOf(ids...))
		} else {
			m.reusable[resource] = m.reusable[resource].without(setOf(slices.Clone(ids)...))
		}
	}
}
