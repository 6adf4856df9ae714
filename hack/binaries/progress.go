// SPDX-License-Identifier: Apache-2.0

package binaries

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// heartbeat is how often something long says that it is still at work.
const heartbeat = 10 * time.Second

// progress writes one line a step. It is safe for concurrent use.
type progress struct {
	mu    sync.Mutex
	out   io.Writer
	start time.Time
}

func newProgress(out io.Writer) *progress {
	if out == nil {
		out = io.Discard
	}
	return &progress{out: out, start: time.Now()}
}

func (p *progress) say(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintf(p.out, "%6.1fs  %s\n", time.Since(p.start).Seconds(), fmt.Sprintf(format, args...))
}

// beat calls describe and prints its answer every heartbeat, until the returned function is called.
func (p *progress) beat(describe func() string) (stop func()) {
	done := make(chan struct{})
	var running sync.WaitGroup
	running.Go(func() {
		ticker := time.NewTicker(heartbeat)
		defer ticker.Stop()
		for {
			select {
			case <-done:
				return
			case <-ticker.C:
				p.say("%s", describe())
			}
		}
	})
	return func() { close(done); running.Wait() }
}
