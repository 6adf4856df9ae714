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

func TestPrinter(t *testing.T) {
	var out strings.Builder
	p := &printer{out: &out}
	a, b := p.labelled("a"), p.labelled("b")
	for _, part := range []struct {
		to   *labelled
		text string
	}{
		{a, "=== RUN   TestOne\n--- PA"},
		{b, "--- SKIP: TestTwo (0.00s)\n"},
		{a, "SS: TestOne (1.00s)\n--- FAIL: TestThree (2.00s)\n    --- FAIL: TestThree/part (1.00s)\nFAI"},
		{b, "PASS\n"},
		{a, "L"},
	} {
		if n, err := part.to.Write([]byte(part.text)); err != nil || n != len(part.text) {
			t.Errorf("wrote %d of %d: %v", n, len(part.text), err)
		}
	}
	a.flush()
	b.flush()
	want := `a | === RUN   TestOne
b | --- SKIP: TestTwo (0.00s)
a | --- PASS: TestOne (1.00s)
a | --- FAIL: TestThree (2.00s)
a |     --- FAIL: TestThree/part (1.00s)
b | PASS
a | FAIL
`
	if out.String() != want {
		t.Errorf("printed\n%swant\n%s", out.String(), want)
	}
	if p.passed != 1 || p.skipped != 1 || !slices.Equal(p.failed, []string{"TestThree"}) {
		t.Errorf("passed %d, skipped %d, failed %v", p.passed, p.skipped, p.failed)
	}
}
