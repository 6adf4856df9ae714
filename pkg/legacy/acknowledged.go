// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"slices"
	"sync"
)

// acknowledged is what kubelet itself calls allocatable: that a list was sent is no proof that kubelet has acted on it.
type acknowledged struct {
	mu      sync.Mutex
	ids     []string
	known   bool
	changed chan struct{}
}

func (a *acknowledged) set(ids []string, known bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.known == known && slices.Equal(a.ids, ids) {
		return
	}
	a.ids, a.known = ids, known
	close(a.changed)
	a.changed = make(chan struct{})
}

// Acknowledged returns the IDs of the devices that kubelet's device manager would hand out by its own account, sorted; false
// while kubelet has not said, and when it is known to have forgotten. Called for whoever tells the cluster. Kubelet is asked
// only from the sending of a list until it has that list.
func (p *Plugin) Acknowledged() (ids []string, known bool) {
	p.acknowledged.mu.Lock()
	defer p.acknowledged.mu.Unlock()
	return p.acknowledged.ids, p.acknowledged.known
}

// AcknowledgedChanged returns a channel that is closed when Acknowledged next changes; take it before.
func (p *Plugin) AcknowledgedChanged() <-chan struct{} {
	p.acknowledged.mu.Lock()
	defer p.acknowledged.mu.Unlock()
	return p.acknowledged.changed
}
