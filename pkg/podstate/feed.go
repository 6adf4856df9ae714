// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Observe takes what an informer would hand on: a pod that was added or updated (after), replaced by one of the same name or
// deleted (before). Run does so by itself: this is for simulations, which have pods of their own and do not call Run.
func (p *Pods) Observe(before, after *corev1.Pod) {
	if before != nil && (after == nil || before.UID != after.UID) {
		p.forget(before)
	}
	if after != nil {
		p.store(trimmed(after))
	}
}

// Listed says that everything there was at a moment has been observed. For simulations, as Observe.
func (p *Pods) Listed(at time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.synced = at
	p.announce()
}
