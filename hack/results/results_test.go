// SPDX-License-Identifier: Apache-2.0

package results

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func read(t *testing.T, lines string) *Results {
	t.Helper()
	path := filepath.Join(t.TempDir(), "results.json")
	if err := os.WriteFile(path, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := Read(path)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func out(t *testing.T, test, line string) string {
	t.Helper()
	event, err := json.Marshal(Event{Action: "output", Package: "p", Test: test, Output: line + "\n"})
	if err != nil {
		t.Fatal(err)
	}
	return string(event) + "\n"
}

// A story that did not end was not played, also if the process was killed while it wrote.
func TestStories(t *testing.T) {
	r := read(t, `{"Action":"want","Test":"TestA"}
{"Action":"want","Test":"TestB"}
{"Action":"want","Test":"TestC"}
{"Action":"want","Test":"TestD"}
go: downloading a module
{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"run","Package":"p","Test":"TestA/TestD"}
{"Action":"pass","Package":"p","Test":"TestA/TestD"}
{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"skip","Package":"p","Test":"TestB"}
{"Action":"run","Package":"p","Test":"TestC"}
{"Action":"pass","Package":"p","Tes`)
	played, skipped, notPlayed := r.Stories()
	if played != 1 || skipped != 1 || !slices.Equal(notPlayed, []string{"TestC", "TestD"}) {
		t.Errorf("played %d, skipped %d, not played %v", played, skipped, notPlayed)
	}
}

// A failure says what the test has logged, without the state of the cluster that it prints.
func TestFailures(t *testing.T) {
	r := read(t, `{"Action":"run","Package":"p","Test":"TestA"}`+"\n"+
		out(t, "TestA", "=== RUN   TestA")+out(t, "TestA", "    a_test.go:7: want")+out(t, "TestA", "        nothing")+
		out(t, "TestA", "    a_test.go:8: the dump")+strings.Repeat(out(t, "TestA", "        1"), 20)+out(t, "TestA/part", "    a_test.go:9: bad")+
		out(t, "TestA", "--- FAIL: TestA (1.00s)")+
		`{"Action":"fail","Package":"p","Test":"TestA/part"}
{"Action":"fail","Package":"p","Test":"TestA"}
{"Action":"fail","Package":"p"}
{"ImportPath":"q","Action":"build-output","Output":"q.go:1:1: expected 'package'\n"}
{"ImportPath":"q","Action":"build-fail"}
{"Action":"fail","Package":"q","FailedBuild":"q"}
`)
	want := []Said{
		{"TestA/part", "    a_test.go:9: bad"},
		{"TestA", "    a_test.go:7: want\n        nothing\n    a_test.go:8: the dump" + strings.Repeat("\n        1", 5)},
		{"q", "q.go:1:1: expected 'package'"},
	}
	if !reflect.DeepEqual(r.Failed, want) {
		t.Errorf("failed: %q, want %q", r.Failed, want)
	}
}

// Of a crash the first lines are kept, of many messages the last.
func TestLongLogs(t *testing.T) {
	var l log
	for _, line := range slices.Concat([]string{"panic: first"}, slices.Repeat([]string{"goroutine"}, 1000), []string{"last"}) {
		l.add(line)
	}
	lines := strings.Split(l.String(), "\n")
	if len(lines) != headLines+tailLines || lines[0] != "panic: first" || lines[len(lines)-1] != "last" {
		t.Errorf("%d lines, from %q to %q", len(lines), lines[0], lines[len(lines)-1])
	}
}

// What failed is not lost among what describes a cluster.
func TestStateIsLeftOut(t *testing.T) {
	l := &log{}
	for _, line := range []string{
		"    a_test.go:1: waited 4m0s", "    b_test.go:2: " + StateBegins, "    b_test.go:3: kubectl get pods", "        pod/a",
		"    b_test.go:4: " + StateEnds, "    a_test.go:5: claim is left",
	} {
		l.add(line)
	}
	if got, want := l.String(), "    a_test.go:1: waited 4m0s\n    a_test.go:5: claim is left"; got != want {
		t.Errorf("kept %q, want %q", got, want)
	}
}

// A skip that says nothing, or that a program of make deps or root's rights would have avoided, is a surprise.
func TestSurprises(t *testing.T) {
	skip := func(test, reason string) string {
		return out(t, test, "    a_test.go:1: said before") + out(t, test, "    a_test.go:2: "+reason) + `{"Action":"skip","Package":"p","Test":"` + test + `"}` + "\n"
	}
	r := read(t, skip("TestHardware", "no hardware to test: no library")+skip("TestOld", "this API server drops consumable capacity (Kubernetes 1.36)")+
		skip("TestKueue", "compiling Kueue takes minutes the first time; to play the story, run KUEUE=1 make e2e RUN=TestKueue")+
		skip("TestMount", "mounting needs root")+skip("TestPage", "there is no chromium: make deps installs it on Debian")+
		`{"Action":"skip","Package":"p","Test":"TestMute"}
{"Action":"pass","Package":"p"}
{"Action":"output","Package":"idle","Output":"intruder: skipped: an API server of one's own needs root\n"}
{"Action":"pass","Package":"idle"}
{"Action":"skip","Package":"none"}
{"Action":"run","Package":"busy","Test":"TestA"}
{"Action":"pass","Package":"busy"}
`)
	want := []Said{
		{"TestMount", "mounting needs root"}, {"TestPage", "there is no chromium: make deps installs it on Debian"}, {"TestMute", ""},
		{"p", "no test of the package ran"}, {"idle", "no test of the package ran"},
	}
	if got := r.Surprises(); !reflect.DeepEqual(got, want) {
		t.Errorf("surprises: %q, want %q", got, want)
	}
}

func TestNoResults(t *testing.T) {
	if _, err := Read(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("results that are not there were read")
	}
}

// The parts of a list have each name once.
func TestShard(t *testing.T) {
	names := []string{"A", "B", "C", "D", "E"}
	var got []string
	for _, text := range []string{"1/3", "2/3", "3/3"} {
		var s Shard
		if err := s.Set(text); err != nil {
			t.Fatal(err)
		}
		if s.String() != text || s.First() != (text == "1/3") {
			t.Errorf("%s is %s, first: %t", text, &s, s.First())
		}
		got = append(got, s.Of(names)...)
	}
	if slices.Sort(got); !slices.Equal(got, names) {
		t.Errorf("the parts have %v", got)
	}
	var whole Shard
	if err := whole.Set(""); err != nil || !slices.Equal(whole.Of(names), names) || !whole.First() {
		t.Errorf("the whole is %v (%v)", whole.Of(names), err)
	}
	for _, bad := range []string{"0/3", "4/3", "1", "1/3/5", "a/b", "-1/3"} {
		if err := new(Shard).Set(bad); err == nil {
			t.Errorf("%q is a part", bad)
		}
	}
}
