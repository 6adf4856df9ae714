// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"maps"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// view is what is known of the object in the API, by the watch and by the answers to our own writes, each ahead of the other
// at times; and what was heard of kubelet.
type view struct {
	mu sync.Mutex
	// synced is set once the API server has listed the object, or that there is none.
	synced bool
	// watched is the object as the watch has it; nil for none.
	watched *v1alpha1.GPUNode
	// latest is the newest known object, which the next write starts from; nil for none.
	latest *v1alpha1.GPUNode
	// gone is the UID of the object that the watch said last to be gone.
	gone types.UID
	// allocatable is what kubelet says, by resource, of those of which it has said anything that counts.
	allocatable map[string][]string
	// ended are claims of the spec that have been found to have let go.
	ended   map[types.UID]bool
	changed chan struct{}
}

func newView() *view { return &view{changed: make(chan struct{})} }

func (v *view) Changed() <-chan struct{} {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.changed
}

// set changes the view and says so.
func (v *view) set(change func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.change(change)
}

// change is set under v.mu.
func (v *view) change(change func()) {
	change()
	close(v.changed)
	v.changed = make(chan struct{})
}

// sync notes that the first list has arrived.
func (v *view) sync() { v.set(func() { v.synced = true }) }

// observe takes what the watch says. It may tell of a time before our last write.
func (v *view) observe(object *v1alpha1.GPUNode) {
	v.set(func() {
		v.believe(v.watched, object)
		v.watched = object
		if v.latest == nil || !older(object, v.latest) {
			v.latest = object
		}
	})
}

// older says whether a was stored before b.
func older(a, b *v1alpha1.GPUNode) bool {
	order, err := resourceversion.CompareResourceVersion(a.ResourceVersion, b.ResourceVersion)
	return err == nil && order < 0
}

// vanish takes from the watch that an object is gone, which may be the one before ours.
func (v *view) vanish(object *v1alpha1.GPUNode) {
	v.set(func() {
		v.gone = object.UID
		if v.watched != nil && v.watched.UID == object.UID {
			v.watched = nil
		}
		if v.latest != nil && v.latest.UID == object.UID {
			v.latest = nil
		}
	})
}

// adopt takes what the API server has answered to us; nil for no object. The watch may know already that it is gone.
func (v *view) adopt(object *v1alpha1.GPUNode) {
	v.set(func() {
		if object == nil || object.UID != v.gone {
			v.latest = object
		}
	})
}

// current returns the object to write to; false while nothing is known.
func (v *view) current() (object *v1alpha1.GPUNode, synced bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.latest, v.synced
}

func (v *view) acknowledge(resource string, ids []string, known bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if before, was := v.allocatable[resource]; was == known && slices.Equal(before, ids) {
		return
	}
	next := maps.Clone(v.allocatable)
	if next == nil {
		next = map[string][]string{}
	}
	delete(next, resource)
	if known {
		next[resource] = ids
	}
	v.change(func() { v.allocatable = next })
}

// kubelet returns the devices that kubelet reports as allocatable, by resource. Callers must not change them.
func (v *view) kubelet() (allocatable map[string][]string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.allocatable
}

// disbelieve replaces the claims of the spec that have let go.
func (v *view) disbelieve(ended map[types.UID]bool) {
	v.mu.Lock()
	same := maps.Equal(v.ended, ended)
	v.mu.Unlock()
	if !same {
		v.set(func() { v.ended = ended })
	}
}

// believe what the spec says anew: a claim that has let go may be allocated again. Under v.mu.
func (v *view) believe(before, now *v1alpha1.GPUNode) {
	find := func(object *v1alpha1.GPUNode, claim types.UID) (v1alpha1.AllocatedClaim, bool) {
		if object == nil {
			return v1alpha1.AllocatedClaim{}, false
		}
		i := slices.IndexFunc(object.Spec.Claims, func(c v1alpha1.AllocatedClaim) bool { return c.UID == claim })
		if i < 0 {
			return v1alpha1.AllocatedClaim{}, false
		}
		return object.Spec.Claims[i], true
	}
	maps.DeleteFunc(v.ended, func(claim types.UID, _ bool) bool {
		known, was := find(before, claim)
		said, is := find(now, claim)
		return !was || !is || !slices.Equal(known.Devices, said.Devices) || !slices.Equal(known.Pools, said.Pools) ||
			!slices.Equal(known.Shares, said.Shares)
	})
}

func (v *view) disbelieved(claim types.UID) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.ended[claim]
}

// acting is the object whose spec the agent acts on: what the watch says, or while it is silent what we made ourselves.
func (v *view) acting() v1alpha1.GPUNode {
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case v.watched != nil:
		return *v.watched
	case v.latest != nil:
		return *v.latest
	default:
		return v1alpha1.GPUNode{}
	}
}
