// SPDX-License-Identifier: Apache-2.0

package mutation

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// changed returns the sources that an overlay replaces, by the path of the original.
func changed(t *testing.T, root string, changes ...Change) map[string]string {
	t.Helper()
	file, err := Overlay(root, t.TempDir(), changes)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var overlay struct{ Replace map[string]string }
	if err := json.Unmarshal(data, &overlay); err != nil {
		t.Fatal(err)
	}
	for path, by := range overlay.Replace {
		text, err := os.ReadFile(by)
		if err != nil {
			t.Fatal(err)
		}
		overlay.Replace[path] = string(text)
	}
	return overlay.Replace
}

const sourceText = `package p

type store[K comparable, V any] struct{}

func (s *store[K, V]) put(k K) error { return nil }

func put() error { return one(one(nil)) }

func one(err error) error { return err }
`

func TestChanges(t *testing.T) {
	root := t.TempDir()
	path := filepath.Join(root, "p", "p.go")
	if err := errors.Join(os.Mkdir(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(sourceText), 0o644)); err != nil {
		t.Fatal(err)
	}
	found := changed(t, root, Edit("p", "store", "put", "return nil", "panic(k)"), Replace("p", "", "one", " return Honestone(nil) "))
	want := strings.NewReplacer("{ return nil }", "{ panic(k) }", "func one", "func Honestone").Replace(sourceText) +
		"\nfunc one(err error) error { return Honestone(nil) }\n"
	if found[path] != want {
		t.Errorf("found %s\nwant %s", found[path], want)
	}
	for what, c := range map[string]Change{
		"a method that is gone":      Replace("p", "store", "one", ""),
		"a text that is gone":        Edit("p", "store", "put", "return err", ""),
		"a text that is there twice": Edit("p", "", "put", "one(", ""),
	} {
		if file, err := Overlay(root, t.TempDir(), []Change{c}); err == nil {
			t.Errorf("%s was changed: %s", what, file)
		}
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != sourceText {
		t.Errorf("the source itself is changed: %v\n%s", err, text)
	}
}
