// SPDX-License-Identifier: Apache-2.0

package records

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

type fact struct {
	Boot string `json:"boot"`
	Text string `json:"text,omitempty"`
}

func open(t *testing.T, dir, boot string) (*Store[string, fact], []error) {
	t.Helper()
	s := New(dir, boot, Format[string, fact]{
		What: "fact", Name: func(k string) string { return "f-" + k },
		Parse: func(name string) (string, error) {
			if key, ok := strings.CutPrefix(strings.ToLower(name), "f-"); ok {
				return key, nil
			}
			return "", errors.New("no fact")
		},
		Boot:       func(f fact) string { return f.Boot },
		Unreadable: func(string) fact { return fact{Boot: boot, Text: "unknown"} },
	})
	problems, err := s.Load()
	check(t, err)
	return s, problems
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func all(s *Store[string, fact]) map[string]string {
	found := map[string]string{}
	for _, key := range s.Keys() {
		f, _ := s.Get(key)
		found[key] = f.Text
	}
	return found
}

func TestStore(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "below", "facts")
	s, _ := open(t, dir, "one")
	check(t, s.Put("a", fact{"one", "first"}))
	check(t, s.Put("a", fact{"one", "second"}))
	check(t, s.Put("b", fact{Boot: "one"}))
	check(t, s.Put("c", fact{Boot: "one"}))
	for range 2 {
		check(t, s.Drop("c"))
	}
	for name, text := range map[string]string{
		"f-torn": `{"boot":"one","te`, "f-newer": `{"boot":"one","more":1}`, "f-old": `{"boot":"zero"}`, "F-b": `{"boot":"one"}`, "other": "", Temporary + "x": "",
	} {
		check(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	again, problems := open(t, dir, "one")
	if want := map[string]string{"a": "second", "b": "", "torn": "unknown", "newer": "unknown"}; !maps.Equal(all(again), want) {
		t.Errorf("found %v, want %v", all(again), want)
	}
	if len(problems) != 4 {
		t.Errorf("problems %v", problems)
	}
	for _, gone := range []string{"f-old", Temporary + "x"} {
		if _, err := os.Stat(filepath.Join(dir, gone)); !os.IsNotExist(err) {
			t.Errorf("%s is still there", gone)
		}
	}

	// What is wiped is written anew; what is there is left alone.
	check(t, os.RemoveAll(dir))
	check(t, again.Repair())
	wiped, problems := open(t, dir, "one")
	if !maps.Equal(all(wiped), all(again)) || len(problems) > 0 {
		t.Errorf("repaired are %v, %v", all(wiped), problems)
	}
	if next, _ := open(t, dir, "two"); len(next.Keys()) > 0 {
		t.Errorf("a record outlived its boot: %v", next.Keys())
	}

	// A disk that takes nothing: what was before is still known.
	check(t, os.RemoveAll(dir))
	check(t, os.WriteFile(dir, nil, 0o600))
	if err := again.Put("a", fact{"one", "third"}); err == nil || !strings.Contains(err.Error(), "record fact f-a") {
		t.Errorf("written into nothing: %v", err)
	}
	if f, ok := again.Get("a"); !ok || f.Text != "second" || again.Repair() == nil {
		t.Errorf("known is %v", f)
	}
	if !slices.Contains(again.Keys(), "torn") {
		t.Error("forgotten")
	}
}
