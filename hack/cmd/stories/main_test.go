// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/procfs"

	"github.com/tandem-gpu/tandem/hack/leftovers"
	"github.com/tandem-gpu/tandem/hack/results"
)

const stories suite = "./test/e2e"

// checkout is a directory with a program in the place of the stories. It is run once for each cluster, with the queue.
func checkout(t *testing.T, convert, script string) (resultsFile string) {
	t.Helper()
	dir := t.TempDir()
	for _, sub := range []string{string(stories), filepath.Dir(stories.program()), "tmp"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(convert, filepath.Join(dir, converter)); err != nil {
		t.Fatal(err)
	}
	// The functions print what package testing prints with -test.v=test2json.
	const functions = `
run() { printf '\x16=== RUN   %s\n' "$1"; }
end() { printf '\x16--- %s: %s (1.50s)\n\x16PASS\n' "$1" "$2"; }
`
	if err := os.WriteFile(filepath.Join(dir, stories.program()), []byte("#!/bin/bash"+functions+script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir)
	t.Setenv("TMPDIR", filepath.Join(dir, "tmp"))
	t.Setenv("TANDEM_CACHE", dir)
	resultsFile = filepath.Join(dir, "results")
	t.Setenv(results.Variable, resultsFile)
	return resultsFile
}

func buildConverter(t *testing.T) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "test2json")
	if out, err := exec.Command("go", "build", "-o", path, "cmd/test2json").CombinedOutput(); err != nil {
		t.Fatalf("build test2json: %v\n%s", err, out)
	}
	return path
}

// A run succeeds only if all stories have ended, each well or with a known reason for a skip. The file of results says the same.
func TestRunsThatFail(t *testing.T) {
	convert := buildConverter(t)
	for _, c := range []struct {
		name, script, err         string
		played, skipped, unplayed int
	}{
		{"all", `for n in $(cat "$STORIES_QUEUE"); do run $n; end PASS $n; done`, "", 5, 0, 0},
		{"two of five", `for n in TestA TestC; do run $n; end PASS $n; done`, "not played: TestB TestD TestE", 2, 0, 3},
		{"none", `:`, "not played: TestA TestB TestC TestD TestE", 0, 0, 5},
		{"killed", `for n in TestA TestB TestC TestD TestE; do run $n; [ $n = TestE ] && kill -KILL $$; end PASS $n; done`, "signal: killed", 4, 0, 1},
		{"a failure", `for n in TestA TestB TestC TestD TestE; do run $n; [ $n = TestC ] && echo '    c_test.go:1: bad' && end FAIL $n || end PASS $n; done; exit 1`,
			"a: exit status 1", 5, 0, 0},
		{"a skip", `for n in TestA TestB TestC TestD TestE; do run $n; [ $n = TestC ] && echo '    c_test.go:1: no time' && end SKIP $n || end PASS $n; done`,
			"known reason (hack/results): TestC: no time", 4, 1, 0},
		{"a known skip", `for n in TestA TestB TestC TestD TestE; do run $n; [ $n = TestC ] && echo '    c_test.go:1: to play it, run KUEUE=1 make' && end SKIP $n ||
			end PASS $n; done`, "", 4, 1, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			file := checkout(t, convert, c.script)
			names := []string{"TestA", "TestB", "TestC", "TestD", "TestE"}
			s, err := newStage(stories, names)
			if err != nil {
				t.Fatal(err)
			}
			err = s.playAll(t.Context(), names, "", 1)
			if sum := s.summarize(0); err == nil {
				err = sum
			} else if sum != nil {
				t.Log("summary:", sum)
			}
			if c.err == "" && err != nil || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
				t.Errorf("error %v, want %q", err, c.err)
			}
			if err := s.close(); err != nil {
				t.Error(err)
			}
			r, err := results.Read(file)
			if err != nil {
				t.Fatal(err)
			}
			played, skipped, notPlayed := r.Stories()
			if !slices.Equal(r.Wanted, names) || played != c.played || skipped != c.skipped || len(notPlayed) != c.unplayed {
				t.Errorf("wanted %v, played %d, skipped %d, not played %v", r.Wanted, played, skipped, notPlayed)
			}
			if c.name == "a failure" && (len(r.Failed) != 1 || r.Failed[0].Text != "    c_test.go:1: bad") {
				t.Errorf("failed: %q", r.Failed)
			}
		})
	}
}

// A cluster is added while the CPUs are idle and stories are left. Each program says in a file that it was started.
func TestClustersAreAdded(t *testing.T) {
	convert := buildConverter(t)
	const idle = `
echo >> $PROC/started
ticks=1000
idle() { ticks=$((ticks + 1000)); printf 'cpu  1 0 1 %d 0 0 0 0 0 0\n' $ticks > $PROC/new && mv $PROC/new $PROC/stat; sleep 0.02; }
clusters() { wc -l < $PROC/started; }
`
	for _, c := range []struct {
		name, script string
		clusters     int
	}{
		{"a story is left", `[ $(clusters) = 2 ] && run TestB && end PASS TestB && exit
			for i in $(seq 500); do [ $(clusters) = 2 ] && break; idle; done; run TestA; end PASS TestA`, 2},
		{"none is left", `> $STORIES_QUEUE; for i in $(seq 20); do idle; done; for n in TestA TestB; do run $n; end PASS $n; done`, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			checkout(t, convert, idle+c.script)
			names := []string{"TestA", "TestB"}
			s, err := newStage(stories, names)
			if err != nil {
				t.Fatal(err)
			}
			proc := t.TempDir()
			t.Setenv("PROC", proc)
			s.machine, s.window = machineIn(t, proc, "MemAvailable:   12000000 kB\n", "cpu  1 0 1 1000 0 0 0 0 0 0\n"), 20*time.Millisecond
			r, err := leftovers.Begin(t.Context(), io.Discard)
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(s.play(t.Context(), r, names, "", 1, 2), s.summarize(0), s.close(), r.End(t.Context())); err != nil {
				t.Error(err)
			}
			started, err := os.ReadFile(filepath.Join(proc, "started"))
			if got := strings.Count(string(started), "\n"); got != c.clusters || err != nil {
				t.Errorf("%d clusters (%v), want %d", got, err, c.clusters)
			}
		})
	}
}

// The stories with unknown durations come first, then the slow ones; equal ones come in any order.
func TestOrder(t *testing.T) {
	usual := []string{"A", "B", "C", "D", "E"}
	took := durations{"TestSlow": 700, "TestSlower": 800}
	for _, name := range usual {
		took[name] = 40
	}
	names := append(slices.Clone(usual), "TestSlow", "TestNew", "TestSlower")
	orders := map[string]bool{}
	for range 50 {
		got := order(names, took)
		if want := []string{"TestNew", "TestSlower", "TestSlow"}; !slices.Equal(got[:3], want) {
			t.Fatalf("first are %v, want %v", got[:3], want)
		}
		orders[strings.Join(got[3:], " ")] = true
		if slices.Sort(got[3:]); !slices.Equal(got[3:], usual) {
			t.Fatalf("the others are %v", got[3:])
		}
	}
	if len(orders) < 2 {
		t.Errorf("50 times the same order: %v", orders)
	}
}

// The next run knows how long stories took, of this run and of earlier ones.
func TestDurations(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TANDEM_CACHE", dir)
	for _, newer := range []durations{{"A": 1, "B": 2}, {"B": 3}} {
		took, err := readDurations()
		if err != nil {
			t.Fatal(err)
		}
		if err := took.add(newer); err != nil {
			t.Fatal(err)
		}
	}
	if took, err := readDurations(); err != nil || len(took) != 2 || took["A"] != 1 || took["B"] != 3 {
		t.Errorf("durations %v (%v)", took, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "stories.json"), []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	if took, err := readDurations(); err != nil || len(took) != 0 {
		t.Errorf("of a damaged file: %v (%v)", took, err)
	}
}

// machineIn has these files, in a directory for /proc.
func machineIn(t *testing.T, dir, meminfo, stat string) machine {
	t.Helper()
	for name, text := range map[string]string{"meminfo": meminfo, "stat": stat} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	proc, err := procfs.NewFS(dir)
	if err != nil {
		t.Fatal(err)
	}
	return machine{proc}
}

func TestCarried(t *testing.T) {
	for meminfo, want := range map[string]int{
		"MemTotal:       16000000 kB\nMemAvailable:   12000000 kB\n": 5,
		"MemAvailable:   500000 kB\n":                                0,
		"MemAvailable:   500000000 kB\n":                             8,
		"":                                                           0,
	} {
		if got := machineIn(t, t.TempDir(), meminfo, "").carried(); got != want {
			t.Errorf("%q carries %d clusters, want %d", meminfo, got, want)
		}
	}
}

func TestIdle(t *testing.T) {
	times := func(stat string) cpuTimes { return machineIn(t, t.TempDir(), "", stat).cpuTimes() }
	earlier := times("cpu  10000 0 5000 80000 4000 0 1000 0 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
	later := times("cpu  14000 0 7000 82000 6000 0 1000 0 90000 0\n") // a guest's time is part of the user's
	if idle := later.idleSince(earlier); idle != 0.2 {
		t.Errorf("idle for %v of the time, want 0.2", idle)
	}
	if idle := times("").idleSince(earlier); idle != 0 {
		t.Errorf("idle for %v of no time", idle)
	}
	if idle := later.idleSince(times("")); idle != 0 {
		t.Errorf("idle for %v of a time whose beginning is not known", idle)
	}
}
