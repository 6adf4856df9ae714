// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// checkout is a directory with three stories and a Makefile whose parts are commands.
func checkout(t *testing.T, parts map[string]string) {
	t.Helper()
	dir := t.TempDir()
	var makefile strings.Builder
	for name, command := range parts {
		makefile.WriteString(".PHONY: " + name + "\n" + name + ":\n\t@" + command + "\n")
	}
	stories := "package e2e\n\nfunc TestMain(m *testing.M) {}\n\nfunc TestA(t *testing.T) {}\n\nfunc TestB(t *testing.T) {}\n\nfunc TestC(t *testing.T) {}\n"
	for name, text := range map[string]string{"Makefile": makefile.String(), filepath.Join(testsDir, "e2e", "a_test.go"): stories} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	t.Setenv("RUN", "")
	t.Setenv("DROPIN_RESULTS", filepath.Join(dir, "bin", "dropin"))
	t.Setenv("MAKEFLAGS", "")
}

// events is a command that leaves events, one a word, action:test.
func events(words string) string {
	return `for e in ` + words + `; do echo "{\"Action\":\"$${e%:*}\",\"Package\":\"p\",\"Test\":\"$${e#*:}\"}"; done >"$$TEST_RESULTS"`
}

const wanted = "want:TestA want:TestB want:TestC run:TestA "

// The run ends with one line of numbers, and succeeds only if it left out nothing.
func TestSummary(t *testing.T) {
	all := events(wanted + "pass:TestA pass:TestB pass:TestC")
	for _, c := range []struct {
		name      string
		parts     map[string]string
		args      string
		ok        bool
		last, has string
	}{
		{"all", map[string]string{"verify": "echo fine", "e2e": all}, "verify e2e", true, "stories=3 played=3 skipped=0 not_played=0", "verify              0.0  ok"},
		{"one not played", map[string]string{"e2e": events(wanted + "pass:TestA pass:TestC")}, "e2e", false,
			"stories=3 played=2 skipped=0 not_played=1", "test: e2e: not played: TestB"},
		{"killed", map[string]string{"e2e": events(wanted+"pass:TestA") + "; kill -KILL $$$$"}, "e2e", false,
			"stories=3 played=1 skipped=0 not_played=2", "test: e2e: not played: TestB TestC"},
		{"a skip without reason", map[string]string{"e2e": events(wanted + "pass:TestA pass:TestB skip:TestC")}, "e2e", false,
			"stories=3 played=2 skipped=1 not_played=0", "no known reason for a skip: TestC"},
		{"a skip of another part", map[string]string{"unit": events("run:TestU skip:TestU pass:"), "e2e": all}, "unit e2e", false,
			"stories=3 played=3 skipped=0 not_played=0", "unit                0.0  failed: skips without a known reason"},
		{"a part without tests", map[string]string{"intruder": events("pass:"), "e2e": all}, "intruder e2e", false,
			"stories=3 played=3 skipped=0 not_played=0", "p: no test of the package ran"},
		{"two at the same time", map[string]string{"unit": "touch u; until [ -e c ]; do sleep 0.01; done", "contract": "touch c; until [ -e u ]; do sleep 0.01; done; printf half", "e2e": all},
			"unit+contract e2e", true, "stories=3 played=3 skipped=0 not_played=0", "contract | half\n"},
		{"one of two fails", map[string]string{"unit": "exit 1", "contract": "echo fine", "e2e": all}, "unit+contract e2e", false,
			"stories=3 played=3 skipped=0 not_played=0", "contract            0.0  ok"},
		{"a part that fails", map[string]string{"verify": "echo a.go:1: bad; exit 1", "e2e": all}, "verify e2e", false,
			"stories=3 played=3 skipped=0 not_played=0", "test: verify failed. Its last lines were:\na.go:1: bad\n"},
		{"stories that do not compile", map[string]string{"e2e": "exit 1"}, "e2e", false, "stories=3 played=0 skipped=0 not_played=3", "not played: TestA TestB TestC"},
		{"no such part", map[string]string{"e2e": all}, "lint e2e", false, "stories=3 played=3 skipped=0 not_played=0", "No rule to make target 'lint'"},
		{"the first shard", map[string]string{"verify": "echo fine", "e2e": all}, "-shard 1/2 verify e2e", true, "stories=3 played=3 skipped=0 not_played=0", "verify (1 of 2)"},
		{"another shard", map[string]string{"verify": "exit 1", "e2e": all}, "-shard 2/2 verify e2e", true,
			"stories=3 played=3 skipped=0 not_played=0", "in the first shard only: verify\n"},
		{"another shard of parts at the same time", map[string]string{"programs": "sleep 0.1; touch made", "unit": "exit 1", "e2e": "[ -e made ] && " + all}, "-shard 2/2 programs unit+e2e", true,
			"stories=3 played=3 skipped=0 not_played=0", "in the first shard only: unit\n"},
		{"another shard that does not compile", map[string]string{"e2e": "exit 1"}, "-shard 2/2 e2e", false, "stories=1 played=0 skipped=0 not_played=1", "not played: TestB\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			checkout(t, c.parts)
			var out strings.Builder
			ok, err := run(t.Context(), strings.Fields("-rest lint "+c.args), &out)
			if err != nil || ok != c.ok {
				t.Errorf("ok is %t (%v)", ok, err)
			}
			if !regexp.MustCompile(`\ntest: `+c.last+` minutes=0\n$`).MatchString(out.String()) || !strings.Contains(out.String(), c.has) ||
				!strings.Contains(out.String(), "it leaves out: lint\n") {
				t.Errorf("printed\n%swithout %q or %q", out.String(), c.has, c.last)
			}
		})
	}
}

// An interrupted run tells the part to end, and says what it has not done.
func TestInterrupted(t *testing.T) {
	checkout(t, map[string]string{
		"verify": `trap 'echo cleaned; exit 1' TERM; echo began; while :; do sleep 0.01; done`,
		"e2e":    events(wanted),
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out strings.Builder
	ok, err := run(ctx, []string{"verify", "e2e"}, &watched{&out, "began", cancel})
	if err != nil || ok {
		t.Errorf("ok is %t (%v)", ok, err)
	}
	for _, want := range []string{"cleaned\n", "e2e                 0.0  not run\n", "stories=3 played=0 skipped=0 not_played=3 minutes=0\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("printed\n%swithout %q", out.String(), want)
		}
	}
}

// A part that was not even begun is missing.
func TestInterruptedBeforeAPart(t *testing.T) {
	checkout(t, map[string]string{"verify": "exit 0"})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out strings.Builder
	ok, err := run(ctx, []string{"-rest", "lint", "verify"}, &watched{&out, "leaves out", cancel})
	if err != nil || ok || !strings.Contains(out.String(), "verify              0.0  not run\n") {
		t.Errorf("ok is %t (%v), printed\n%s", ok, err, &out)
	}
}

// watched calls saw when it has a word.
type watched struct {
	*strings.Builder
	word string
	saw  func()
}

func (w *watched) Write(data []byte) (int, error) {
	if strings.Contains(string(data), w.word) {
		w.saw()
	}
	return w.Builder.Write(data)
}

// A part of the stories is no proof of a change.
func TestRunOfSomeStories(t *testing.T) {
	checkout(t, map[string]string{"e2e": "exit 0"})
	t.Setenv("RUN", "TestA")
	if ok, err := run(t.Context(), []string{"e2e"}, &strings.Builder{}); ok || err == nil {
		t.Errorf("ok is %t (%v)", ok, err)
	}
}
