// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"cmp"
	"fmt"
	"strings"
	"testing"
	"time"
)

// contended worlds have pods and claims that fight for the GPUs of one node, which is full most of the time. Nothing fails.
var contended = profile{
	name: "contended", peaceful: true, gpus: 8, pace: 400 * time.Millisecond,
	actions: []string{burst, "a finite pod comes", claimPods, claimOwners, podOwners, deletes, ownerGoes},
}

// refusals are why pods fail admission, by words of kubelet's message, and which of the node's views was late.
var refusals = []struct{ words, why string }{
	{"held by claim", "kubelet's list of devices"},
	{"unavailable", "the scheduler's number"},
	{"no healthy devices", "the scheduler's number"},
}

// TestFailedAdmissions counts the pods that fail admission though nothing has failed: the scheduler binds them while news of a claim is
// on its way. The rate follows how long messages take; docs/design/0007-coexistence.md has the figures.
func TestFailedAdmissions(t *testing.T) {
	for _, c := range []struct {
		name   string
		prompt bool
		most   int // of a thousand
	}{{"messages of at most 40 ms", true, 40}, {"one message in 20 takes up to 0.4 s, one in 200 up to 2 s", false, 130}} {
		mix, placed, sum, why := contended, 0, 0, map[string]int{}
		mix.prompt = c.prompt
		for seed := uint64(1); seed <= 12; seed++ {
			o := play(t, seed, stepsOfAWorld, faults{profile: &mix})
			if o.fault != "" {
				t.Fatalf("%s\nworld %d: %s", o.trace, seed, o.fault)
			}
			placed += o.bound
			for message, n := range o.refusals {
				reason := message
				for _, r := range refusals {
					if strings.Contains(message, r.words) {
						reason = r.why
					}
				}
				why[cmp.Or(reason, message)] += n
				sum += n
			}
		}
		rate := 1000 * sum / max(1, placed)
		fmt.Printf("failed-admissions: %s: placed=%d failed=%d per_1000=%d late=%v\n", c.name, placed, sum, rate, why)
		if placed < 300 || rate > c.most {
			t.Errorf("%d of %d pods failed, more than %d of a thousand", sum, placed, c.most)
		}
	}
}
