// SPDX-License-Identifier: Apache-2.0

package main

import (
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/hack/queue"
)

// Required stories come first, then the slow ones, then the others, each once.
func TestOrder(t *testing.T) {
	usual := []string{"A", "B", "C", "D", "E"}
	names := append(slices.Clone(usual), "TestDeleteAndRecreate", "TestQuota", "TestPartitionsOnDemand", "TestPublishedManifests")
	orders := map[string]bool{}
	for range 50 {
		got := order(names)
		if want := []string{"TestPublishedManifests", "TestQuota", "TestPartitionsOnDemand", "TestDeleteAndRecreate"}; !slices.Equal(got[:4], want) {
			t.Fatalf("first are %v, want %v", got[:4], want)
		}
		orders[strings.Join(got[4:], " ")] = true
		if slices.Sort(got[4:]); !slices.Equal(got[4:], usual) {
			t.Fatalf("the others are %v", got[4:])
		}
	}
	if len(orders) < 2 {
		t.Errorf("50 times the same order: %v", orders)
	}
}

// After the time, the queue has required stories only. Without a limit, or once all are played, it has what it had.
func TestNoStoryBeginsLate(t *testing.T) {
	names := []string{"TestQuota", "A", "B"}
	running, played := make(chan struct{}), make(chan struct{})
	close(played)
	for _, c := range []struct {
		name      string
		until     int64
		played    <-chan struct{}
		late, has string
	}{
		{"late", 1, running, "A B", "TestQuota"},
		{"no limit", 0, running, "", "TestQuota A B"},
		{"all are played", time.Now().Add(time.Hour).Unix(), played, "", "TestQuota A B"},
	} {
		q, err := queue.Write(filepath.Join(t.TempDir(), "queue"), names)
		if err != nil {
			t.Fatal(err)
		}
		late, err := closeAt(t.Context(), q, c.until, c.played)
		var has []string
		for {
			name, ok, err := q.Take(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			has = append(has, name)
		}
		if strings.Join(late, " ") != c.late || strings.Join(has, " ") != c.has || err != nil {
			t.Errorf("%s: late are %v, the queue has %v (%v)", c.name, late, has, err)
		}
		ended := results{passed: 1, late: late}
		if got, want := ended.missing(len(names)), len(has)-1; got != want {
			t.Errorf("%s: %d are missing, want %d", c.name, got, want)
		}
	}
}

func TestNamedStoriesExist(t *testing.T) {
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
	for _, name := range append(slices.Collect(maps.Keys(slow)), required...) {
		if !strings.Contains(source.String(), "\nfunc "+name+"(") {
			t.Errorf("there is no story %s", name)
		}
	}
}

func TestSummary(t *testing.T) {
	var ended results
	for line := range strings.Lines(`a === RUN   TestOne
a     one_test.go:1: nothing of interest
b === RUN   TestThree
b     three_test.go:7: want
a --- PASS: TestOne (1.00s)
b         nothing
b     three_test.go:8: the dump
b         1
b         2
b         3
b         4
b         5
b         6
b noise
b         of a component
a --- SKIP: TestTwo (0.00s)
b --- FAIL: TestThree (2.00s)
b     --- FAIL: TestThree/part (1.00s)
b FAIL
`) {
		label, line, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		ended.see(label, line)
	}
	want := []failure{{"TestThree", strings.SplitAfter(`    three_test.go:7: want
        nothing
    three_test.go:8: the dump
        1
        2
        3
        4
        5
`, "\n")[:8]}}
	if ended.passed != 1 || ended.skipped != 1 || !reflect.DeepEqual(ended.failed, want) {
		t.Errorf("passed %d, skipped %d, failed %q, want %q", ended.passed, ended.skipped, ended.failed, want)
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
