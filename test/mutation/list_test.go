// SPDX-License-Identifier: Apache-2.0

package mutation

import (
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestListApplies: what the mutations change is still there. `make mutations` compiles and plays them.
func TestListApplies(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, m := range List() {
		t.Run(m.Name, func(t *testing.T) {
			if names[m.Name] || m.What == "" || m.Harm == "" || len(m.Changes) == 0 || m.Tier != Test && m.Tier != TestLong {
				t.Errorf("incomplete, or the second of its name: %+v", m)
			}
			names[m.Name] = true
			tests, err := filepath.Glob(filepath.Join(root, m.Package, "*_test.go"))
			if err != nil {
				t.Fatal(err)
			}
			by := func(path string) bool {
				text, err := os.ReadFile(path)
				return err == nil && strings.Contains(string(text), "\nfunc "+m.By+"(t *testing.T)")
			}
			if m.By == "" || !slices.ContainsFunc(tests, by) {
				t.Errorf("%s has no test %q", m.Package, m.By)
			}
			for path, text := range changed(t, root, m.Changes...) {
				if _, err := parser.ParseFile(token.NewFileSet(), path, text, parser.SkipObjectResolution); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
