// SPDX-License-Identifier: Apache-2.0

package progress

import (
	"bytes"
	"fmt"
	"sync"
	"time"
)

// usualSpeed is the assumed speed of the compiler on two cores, in bytes of source per second. Every estimate counts it as if it had been
// measured for the time settles, so its weight falls while the run goes on.
const (
	usualSpeed = 300e3
	settles    = 20 * time.Second
)

// Package is a package to compile. Size is the cost of that, in bytes of source.
type Package struct {
	Name string
	Size int64
}

// Work estimates the remaining time from the packages that are still to be compiled. It is safe for concurrent use.
type Work struct {
	mu    sync.Mutex
	clock func() time.Time
	start time.Time
	after time.Duration
	// index is the place of each package in the order in which they are compiled, and sums has the size of all up to each place.
	index   map[string]int
	sums    []int64
	reached int
}

// NewWork starts the clock. The steps after the last compilation take the time after.
func NewWork(after time.Duration) *Work { return newWork(after, time.Now) }

func newWork(after time.Duration, clock func() time.Time) *Work {
	return &Work{clock: clock, start: clock(), after: after, index: map[string]int{}, sums: []int64{0}}
}

// Add appends packages, in the order in which they are compiled. One that several programs have counts once.
func (w *Work) Add(packages []Package) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range packages {
		if _, known := w.index[p.Name]; !known {
			w.index[p.Name] = len(w.sums)
			w.sums = append(w.sums, w.sums[len(w.sums)-1]+p.Size)
		}
	}
}

// Write takes the output of go build -v, in whole lines: the name of each package that is being compiled. All packages before it in the order
// count as done: they were compiled, or the build cache had them.
func (w *Work) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for line := range bytes.Lines(p) {
		w.reached = max(w.reached, w.index[string(bytes.TrimSpace(line))])
	}
	return len(p), nil
}

// String returns, for example, "43 %, about 7 min left".
func (w *Work) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	passed, done, total := w.clock().Sub(w.start), w.sums[w.reached], w.sums[len(w.sums)-1]
	speed := (float64(done) + usualSpeed*settles.Seconds()) / (passed + settles).Seconds()
	left := time.Duration(float64(total-done)/speed*float64(time.Second)) + w.after
	percent := 100 * passed.Seconds() / max(1, (passed+left).Seconds())
	if left < time.Minute {
		return fmt.Sprintf("%.0f %%, about %.0f s left", percent, left.Seconds())
	}
	return fmt.Sprintf("%.0f %%, about %.0f min left", percent, left.Minutes())
}
