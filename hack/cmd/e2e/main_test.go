// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestDeal(t *testing.T) {
	const long = "TestPartitionsOnDemand"
	names := []string{"A", "B", "C", long, "D"}
	for n, want := range map[int]string{1: "A B C " + long + " D", 2: long + ",A B C D", 3: long + ",A C,B D", 7: long + ",A,B,C,D"} {
		var hands []string
		for _, hand := range deal(names, n) {
			hands = append(hands, strings.Join(hand, " "))
		}
		if got := strings.Join(hands, ","); got != want {
			t.Errorf("%d hands: %s, want %s", n, got, want)
		}
	}
}

func TestSlowStoriesExist(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("..", "..", "..", stories, "*_test.go"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	var source strings.Builder
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		source.Write(text)
	}
	for name := range slow {
		if !strings.Contains(source.String(), "\nfunc "+name+"(") {
			t.Errorf("%s takes time and is not there", name)
		}
	}
}

func TestSummary(t *testing.T) {
	var ended results
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

// A limit that is too low is higher for a while; another is left alone.
func TestRaise(t *testing.T) {
	path := filepath.Join(t.TempDir(), "limit")
	is := func(want string) {
		t.Helper()
		if got, err := os.ReadFile(path); err != nil || strings.TrimSpace(string(got)) != want {
			t.Errorf("the limit is %q (%v), want %s", got, err, want)
		}
	}
	for before, meanwhile := range map[string]string{"128": "1024", "8192": "8192"} {
		if err := os.WriteFile(path, []byte(before+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		restore, err := raise(path, 1024)
		if err != nil {
			t.Fatal(err)
		}
		is(meanwhile)
		if err := restore(); err != nil {
			t.Error(err)
		}
		is(before)
	}
	for _, bad := range []string{"many", ""} {
		if err := os.WriteFile(path, []byte(bad), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := raise(path, 1024); err == nil {
			t.Errorf("a limit of %q was raised", bad)
		}
		is(bad)
	}
	if _, err := raise(filepath.Join(path, "none"), 1024); err == nil {
		t.Error("a limit that is not there was raised")
	}
}
