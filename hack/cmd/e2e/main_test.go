// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"
	"testing"
)

func TestDeal(t *testing.T) {
	names := []string{"A", "B", "C", "D", "E"}
	for n, want := range map[int]string{1: "A B C D E", 2: "A C E,B D", 7: "A,B,C,D,E"} {
		var hands []string
		for _, hand := range deal(slices.Clone(names), n) {
			hands = append(hands, strings.Join(hand, " "))
		}
		if got := strings.Join(hands, ","); got != want {
			t.Errorf("%d hands: %s, want %s", n, got, want)
		}
	}
}

func TestTally(t *testing.T) {
	var ended tally
	for line := range strings.Lines(`=== RUN   TestOne
--- PASS: TestOne (1.00s)
--- SKIP: TestTwo (0.00s)
--- FAIL: TestThree (2.00s)
    --- FAIL: TestThree/part (1.00s)
FAIL
`) {
		ended.see(strings.TrimSuffix(line, "\n"))
	}
	if ended.passed != 1 || ended.skipped != 1 || !slices.Equal(ended.failed, []string{"TestThree"}) {
		t.Errorf("passed %d, skipped %d, failed %v", ended.passed, ended.skipped, ended.failed)
	}
}
