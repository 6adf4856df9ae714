// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"testing"
	"time"
)

// Scans that are cheap come once a second, dear ones up to an interval apart. One dear scan among cheap ones is of other work.
func TestPacer(t *testing.T) {
	var p pacer
	const interval = 4 * time.Second
	for i, c := range []struct{ cost, want time.Duration }{
		{time.Millisecond, time.Second}, {100 * time.Millisecond, time.Second}, {100 * time.Millisecond, time.Second},
		{8 * time.Millisecond, time.Second}, {8 * time.Millisecond, 2 * time.Second}, {100 * time.Millisecond, 2 * time.Second},
		{100 * time.Millisecond, 2 * time.Second}, {100 * time.Millisecond, 2 * time.Second}, {100 * time.Millisecond, interval},
		{0, time.Second},
	} {
		if got := p.wait(c.cost, interval); got != c.want {
			t.Errorf("scan %d of %v: %v, want %v", i, c.cost, got, c.want)
		}
	}
	before := cpuTime()
	for cpuTime() == before {
		continue
	}
	if took := cpuTime() - before; took > time.Minute {
		t.Errorf("CPU time of %v", took)
	}
}
