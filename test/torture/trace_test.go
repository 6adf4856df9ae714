// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"io"
	"strings"
	"testing"
)

// The end of a run repeats the first faults, however many there were.
func TestFindings(t *testing.T) {
	trace, err := openTrace(t.TempDir(), io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	defer trace.close()
	trace.find([]string{"gpu-0 has two owners"})
	for range foundLines {
		trace.find([]string{"pod a is stuck", "pod b is stuck"})
	}
	lines := strings.Split(trace.findings(), "\n  ")
	if len(lines) != foundLines || lines[0] != "gpu-0 has two owners" || lines[2] != "pod b is stuck" {
		t.Errorf("got %d: %q", len(lines), lines)
	}
}
