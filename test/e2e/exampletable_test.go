// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// otherValues are examples that need no values and are applied only with some, and why.
var otherValues = map[string]string{"implicit-resource.yaml": "the story compares it with limits that the scheduler turns into claims"}

// exampleRow is a file of examples/README.md and its values. valueSource is a file of values, or a value.
var (
	exampleRow  = regexp.MustCompile(`(?m)^\| \[([a-z-]+\.yaml)\].*\| ([^|]+) \|$`)
	valueSource = regexp.MustCompile("\\(([a-z-]+\\.values\\.yaml)\\)|`([^`]+=[^`]+)`")
)

// TestExamplesSayWhatTheyNeed: for each example there is a story with exactly the values that examples/README.md names.
func TestExamplesSayWhatTheyNeed(t *testing.T) {
	examples := filepath.Join("..", "..", "examples")
	readme, err := os.ReadFile(filepath.Join(examples, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(examples, "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	stories := storiesOfExamples(t)
	rows := map[string]string{}
	for _, row := range exampleRow.FindAllStringSubmatch(string(readme), -1) {
		rows[row[1]] = row[2]
	}
	for _, path := range files {
		file := filepath.Base(path)
		values, listed := rows[file]
		if strings.HasSuffix(file, ".values.yaml") || otherValues[file] != "" && values == "none" {
			continue
		}
		if !listed {
			t.Errorf("examples/README.md has no values of %s", file)
		}
		want := ""
		if found := valueSource.FindStringSubmatch(values); found != nil {
			want = found[1] + found[2]
		} else if !strings.HasPrefix(values, "none") {
			t.Errorf("the values of %s are %q", file, values)
		}
		if !slices.ContainsFunc(stories[file], func(story string) bool {
			g := groupOf(story)
			return want == "" && g == usualGroup || want != "" && (g.example == want || slices.Contains(g.values, want))
		}) {
			t.Errorf("no story applies %s with the values %q; there are %v", file, values, stories[file])
		}
	}
}

// storiesOfExamples returns the stories that apply each example, by the names in their sources and in those of the functions that they use.
func storiesOfExamples(t *testing.T) map[string][]string {
	t.Helper()
	paths, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	uses, applies := map[string][]string{}, map[string][]string{}
	for _, path := range paths {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			function, is := d.(*ast.FuncDecl)
			if !is {
				continue
			}
			name := function.Name.Name
			ast.Inspect(function.Body, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.Ident:
					uses[name] = append(uses[name], n.Name)
				case *ast.BasicLit:
					// Some stories append the suffix to several names.
					if text, err := strconv.Unquote(n.Value); err == nil && n.Kind == token.STRING {
						applies[name] = append(applies[name], strings.TrimSuffix(text, ".yaml")+".yaml")
					}
				}
				return true
			})
		}
	}
	stories := map[string][]string{}
	for name := range uses {
		if !strings.HasPrefix(name, "Test") {
			continue
		}
		seen := map[string]bool{name: true}
		for todo := []string{name}; len(todo) > 0; todo = todo[1:] {
			for _, file := range applies[todo[0]] {
				stories[file] = append(stories[file], name)
			}
			for _, used := range uses[todo[0]] {
				if !seen[used] && len(uses[used]) > 0 && !strings.HasPrefix(used, "Test") {
					seen[used] = true
					todo = append(todo, used)
				}
			}
		}
	}
	return stories
}
