// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
)

// pod is a pod as the API server stores it. A stored pod is immutable.
type pod struct {
	uid, name string
	// gpus are asked for by a limit.
	gpus int
	// own has for each claim that is made for the pod how many GPUs it asks for.
	own []int
	// claims are the names of the pod's claims in its order. The model of an owner's pods names only those that they share.
	claims []string
	// owner makes another when this one is gone; empty for a bare pod.
	owner string
	// init means that an init container uses the GPUs first; finite that the pod ends by itself.
	init, finite bool

	bound, deleting, admitted, started bool
	phase                              string
	retry                              string
}

const (
	pending   = "Pending"
	running   = "Running"
	succeeded = "Succeeded"
	failed    = "Failed"
)

func (p *pod) limits() bool   { return p.gpus > 0 }
func (p *pod) terminal() bool { return p.phase == succeeded || p.phase == failed }

// sharesClaim reports whether another pod has one of the claims.
func (p *pod) sharesClaim(other *pod) bool {
	return slices.ContainsFunc(p.claims, func(name string) bool { return slices.Contains(other.claims, name) })
}

// claim is a ResourceClaim with one request.
type claim struct {
	uid, name string
	count     int
	// pod is the UID of the pod that it was made for; empty for a shared claim.
	pod string
	// asks is the amount of each GPU that it requests; zero for no amount.
	asks amount
	// profile is that of the partitions that it requests; empty for whole GPUs.
	profile string
	// ownDaemon is set where its parameters ask for an MPS daemon for its pods.
	ownDaemon bool
	// allocation is the scheduler's answer; nil for none.
	allocation  *resourceapi.AllocationResult
	reservedFor []string // UIDs
	deleting    bool
	// version grows with each change.
	version int
	// object is the claim as an API object, once one was asked for (resourceClaim).
	object *resourceapi.ResourceClaim
}

// devices are the names of the devices that it is allocated.
func (c *claim) devices() []string {
	if c.allocation == nil {
		return nil
	}
	var names []string
	for _, result := range c.allocation.Devices.Results {
		names = append(names, result.Device)
	}
	return names
}

// String is for the trace.
func (c *claim) String() string {
	return fmt.Sprintf("%s of %q for %d %s of %d MiB and %d shares has %v, reserved for %v, deleting %v", c.uid, c.pod, c.count, c.profile, c.asks.mib, c.asks.shares, c.devices(), c.reservedFor, c.deleting)
}

// slice is all ResourceSlices of the node. They have the devices as the product publishes them.
type slice struct{ slices []*resourceapi.ResourceSlice }

func (s *slice) devices() (devices []resourceapi.Device) {
	for _, one := range s.slices {
		devices = append(devices, one.Spec.Devices...)
	}
	return devices
}

// String lists the devices: shared ones with the amount that is left, withdrawn ones in parentheses.
func (s *slice) String() string {
	var devices []string
	for _, d := range s.devices() {
		name := d.Name
		if d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations {
			memory, shares := d.Capacity["memory"].Value, d.Capacity["shares"].Value
			left := int(shares.Value())
			name = part(name, amount{mib: int(memory.Value() >> 20), shares: left, of: left})
		}
		for _, taint := range d.Taints {
			name = fmt.Sprintf("(%s: %s)", name, taint.Key)
		}
		devices = append(devices, name)
	}
	return strings.Join(devices, " ")
}

// nodeObject is the Node.
type nodeObject struct{ allocatable, capacity int }

// api is the API server with everything in it. Requests are answered at once: how long they take is up to who asks.
type api struct {
	*schedule
	process *process
	down    bool
	objects map[string]any
	watches []*watch
	// changed is told of every change.
	changed func()
	serial  int
}

var errAway = errors.New("the API server is away")

func newAPI(s *schedule) *api {
	return &api{schedule: s, process: newProcess("api"), objects: map[string]any{}, changed: func() {}}
}

// uid makes the next name.
func (a *api) uid(kind string) string {
	a.serial++
	return fmt.Sprintf("%s-%d", kind, a.serial)
}

func podKey(uid string) string    { return "pod/" + uid }
func claimKey(name string) string { return "claim/" + name }

func get[T any](a *api, key string) (T, bool) {
	object, ok := a.objects[key].(T)
	return object, ok
}

// all objects of one type, by key.
func all[T any](objects map[string]any) []T {
	var found []T
	for _, key := range sorted(objects) {
		if object, ok := objects[key].(T); ok {
			found = append(found, object)
		}
	}
	return found
}

// put stores an object; nil removes it.
func (a *api) put(key string, object any) {
	if object == nil {
		delete(a.objects, key)
	} else {
		a.objects[key] = object
	}
	a.changed()
	for _, w := range a.watches {
		if !w.process.over && !w.broken && w.wants(key) {
			w.queue = append(w.queue, key)
			w.versions = append(w.versions, object)
			w.deliverSoon()
		}
	}
}

func (a *api) updatePod(uid string, change func(*pod)) bool {
	p, ok := get[*pod](a, podKey(uid))
	if ok {
		changed := *p
		change(&changed)
		if !reflect.DeepEqual(&changed, p) {
			a.put(podKey(uid), &changed)
		}
	}
	return ok
}

func (a *api) updateClaim(name, uid string, change func(*claim)) bool {
	c, ok := get[*claim](a, claimKey(name))
	if !ok || c.uid != uid {
		return false
	}
	changed := *c
	changed.reservedFor, changed.object = slices.Clone(c.reservedFor), nil
	changed.version++
	change(&changed)
	a.put(claimKey(name), &changed)
	return true
}

// watch hands changes on, late and in order.
type watch struct {
	*api
	process *process
	// prefixes of the keys, separated by blanks.
	prefixes string
	handle   func(key string, before, after any)
	listed   func()
	// cache is what the watcher has seen.
	cache    map[string]any
	queue    []string
	versions []any
	// broken until the next list.
	broken, delivering bool
}

// watch lists what begins with one of the prefixes and then hands on every change of it.
func (a *api) watch(l *process, prefixes string, handle func(key string, before, after any), listed func()) *watch {
	w := &watch{api: a, process: l, prefixes: prefixes, handle: handle, listed: listed, cache: map[string]any{}, broken: true}
	a.watches = slices.DeleteFunc(a.watches, func(w *watch) bool { return w.process.over })
	a.watches = append(a.watches, w)
	w.list()
	return w
}

func (w *watch) wants(key string) bool {
	for prefix := range strings.FieldsSeq(w.prefixes) {
		if strings.HasPrefix(key, prefix) {
			return true
		}
	}
	return false
}

func (w *watch) list() {
	w.after(w.process, w.latency(), "lists "+w.prefixes, func() {
		if w.down {
			w.after(w.process, time.Second, "lists again", w.list)
			return
		}
		w.broken, w.queue, w.versions = false, nil, nil
		seen := map[string]bool{}
		for _, key := range sorted(w.objects) {
			if w.wants(key) {
				seen[key] = true
				w.see(key, w.objects[key])
			}
		}
		for _, key := range sorted(w.cache) {
			if !seen[key] {
				w.see(key, nil)
			}
		}
		if w.listed != nil {
			w.listed()
		}
	})
}

func (w *watch) see(key string, object any) {
	before := w.cache[key]
	if object == nil {
		delete(w.cache, key)
	} else {
		w.cache[key] = object
	}
	if before != object {
		w.handle(key, before, object)
	}
}

func (w *watch) deliverSoon() {
	if w.delivering {
		return
	}
	w.delivering = true
	w.after(w.process, w.latency(), "hears of "+w.queue[0], func() {
		w.delivering = false
		if w.broken || len(w.queue) == 0 {
			return
		}
		key, object := w.queue[0], w.versions[0]
		w.queue, w.versions = w.queue[1:], w.versions[1:]
		w.see(key, object)
		if len(w.queue) > 0 {
			w.deliverSoon()
		}
	})
}

// stop ends the API server for a while. What it has stored stays; every watch breaks.
func (a *api) stop(length time.Duration) {
	if a.down {
		return
	}
	a.down = true
	for _, w := range a.watches {
		w.broken, w.queue, w.versions = true, nil, nil
	}
	a.after(a.process, length, "returns", func() {
		a.down = false
		for _, w := range a.watches {
			if !w.process.over {
				w.list()
			}
		}
	})
}

// request runs in a life after the time that a request takes, and again while the API server is away, until it is done.
func (a *api) request(l *process, name string, do func()) {
	a.after(l, a.latency(), name, func() {
		if a.down {
			a.after(l, a.between(500*time.Millisecond, 2*time.Second), name+" (away)", func() { a.request(l, name, do) })
			return
		}
		do()
	})
}
