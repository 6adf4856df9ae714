// SPDX-License-Identifier: Apache-2.0

package legacy

import "sync"

// inFlight counts calls or connections, and lets callers wait until there is none. The zero value is ready to use.
type inFlight struct {
	mu    sync.Mutex
	count int
	none  chan struct{}
}

// enter counts one call until the returned function is called, which is idempotent.
func (t *inFlight) enter() (leave func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.count++
	return sync.OnceFunc(t.leave)
}

func (t *inFlight) leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.count--
	if t.count == 0 && t.none != nil {
		close(t.none)
		t.none = nil
	}
}

// empty returns a channel that is closed once no call is in progress.
func (t *inFlight) empty() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.count == 0 {
		closed := make(chan struct{})
		close(closed)
		return closed
	}
	if t.none == nil {
		t.none = make(chan struct{})
	}
	return t.none
}
