// SPDX-License-Identifier: Apache-2.0

package progress

import (
	"fmt"
	"testing"
	"time"
)

func TestWorkEstimatesWhatIsLeft(t *testing.T) {
	now := time.Unix(0, 0)
	w := newWork(30*time.Second, func() time.Time { return now })
	w.Add([]Package{{"cached", 40e6}, {"a", 20e6}, {"b", 60e6}})
	w.Add([]Package{{"b", 60e6}, {"c", 0}})
	for _, step := range []struct{ compiles, want string }{
		{"unknown", "0 %, about 7 min left"}, // at the usual speed
		{"a", "49 %, about 6 min left"},      // half of it took six minutes
		{"c", "96 %, about 30 s left"},
		{"a", "97 %, about 30 s left"},
	} {
		fmt.Fprintln(w, step.compiles)
		if got := w.String(); got != step.want {
			t.Errorf("when %s is compiled: %q, want %q", step.compiles, got, step.want)
		}
		now = now.Add(6 * time.Minute)
	}
}
