// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"regexp"
	"strings"
	"sync"
	"time"
)

// steps tells how far the demo is: a headline a step, and below it what goes on, all by one clock. It is safe for
// concurrent use.
type steps struct {
	mu    sync.Mutex
	out   io.Writer
	start time.Time
	at    int
	of    int
}

func newSteps(out io.Writer, of int) *steps { return &steps{out: out, start: time.Now(), of: of} }

func (s *steps) next(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at++
	fmt.Fprintf(s.out, "%6.1fs [%d/%d] %s\n", time.Since(s.start).Seconds(), s.at, s.of, fmt.Sprintf(format, args...))
}

func (s *steps) say(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.out, "%6.1fs       %s\n", time.Since(s.start).Seconds(), fmt.Sprintf(format, args...))
}

// otherClocks are the times that other packages put before what they report.
var otherClocks = regexp.MustCompile(`^(?: *[0-9]+\.[0-9]s {2})+`)

// Write takes what other packages report, in whole lines.
func (s *steps) Write(p []byte) (int, error) {
	for line := range strings.Lines(string(p)) {
		s.say("%s", otherClocks.ReplaceAllString(strings.TrimRight(line, "\n"), ""))
	}
	return len(p), nil
}
