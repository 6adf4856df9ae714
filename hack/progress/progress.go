// SPDX-License-Identifier: Apache-2.0

// Package progress reports the steps of a long run with the time since its start.
package progress

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
)

// Heartbeat is how often a long operation logs that it is still working.
const Heartbeat = 10 * time.Second

// Log writes one line a step, with the time since New. It is safe for concurrent use.
type Log struct {
	mu    sync.Mutex
	out   io.Writer
	start time.Time
}

// New starts the clock. A nil out is silent.
func New(out io.Writer) *Log {
	if out == nil {
		out = io.Discard
	}
	return &Log{out: out, start: time.Now()}
}

// Say writes one line.
func (l *Log) Say(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintf(l.out, "%6.1fs  %s\n", time.Since(l.start).Seconds(), fmt.Sprintf(format, args...))
}

// Write takes whole lines of programs and packages that report in their own words.
func (l *Log) Write(p []byte) (int, error) {
	for line := range strings.Lines(string(p)) {
		l.Say("%s", strings.TrimRight(line, "\n"))
	}
	return len(p), nil
}

// Beat logs the result of describe every Heartbeat until the returned function is called.
func (l *Log) Beat(describe func() string) (stop func()) {
	return Every(Heartbeat, func() { l.Say("%s", describe()) })
}

// Every calls say once an interval until the returned function is called, which waits for a call under way.
func Every(interval time.Duration, say func()) (stop func()) {
	done := make(chan struct{})
	var running sync.WaitGroup
	running.Go(func() {
		ticker := time.NewTicker(interval)
		defer ticker.Stop()
		for {
			select {
			case <-done:
				return
			case <-ticker.C:
				say()
			}
		}
	})
	return func() { close(done); running.Wait() }
}
