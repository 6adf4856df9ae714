// SPDX-License-Identifier: Apache-2.0

// Package mutation makes one mistake in the product while it is compiled, in a copy of its sources. So the product itself needs no switch.
// The torture compiles images with mutations, which its oracle must detect. List has those that a test must detect.
package mutation

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Change changes a method, or a function where Receiver is empty.
type Change struct {
	// Dir is the directory of the package, below the root of the checkout.
	Dir, Receiver, Method string
	body                  string
	from, to              string
}

// Replace gives a method another body, which is what stands between the braces. Parameters keep their names. The body may call the old
// method by its name with "Honest" before it.
func Replace(dir, receiver, method, body string) Change {
	return Change{Dir: dir, Receiver: receiver, Method: method, body: body}
}

// Edit replaces a text that the method contains once.
func Edit(dir, receiver, method, from, to string) Change {
	return Change{Dir: dir, Receiver: receiver, Method: method, from: from, to: to}
}

// Overlay writes the changed sources below dir, and returns the file for the flag -overlay of the go command. It changes nothing below
// root. An error means that a change does not fit the sources any more.
func Overlay(root, dir string, changes []Change) (string, error) {
	texts := map[string]string{}
	for _, c := range changes {
		if err := c.apply(root, texts); err != nil {
			return "", err
		}
	}
	replace := map[string]string{}
	for i, path := range slices.Sorted(maps.Keys(texts)) {
		replace[path] = filepath.Join(dir, fmt.Sprintf("overlay-%d.go", i))
		if err := os.WriteFile(replace[path], []byte(texts[path]), 0o644); err != nil {
			return "", fmt.Errorf("write a changed source: %w", err)
		}
	}
	data, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", fmt.Errorf("encode overlay: %w", err)
	}
	file := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(file, data, 0o644); err != nil {
		return "", fmt.Errorf("write overlay: %w", err)
	}
	return file, nil
}

// apply changes the file that has the method. texts are the changed files by path.
func (c Change) apply(root string, texts map[string]string) error {
	paths, err := filepath.Glob(filepath.Join(root, c.Dir, "*.go"))
	if err != nil {
		return fmt.Errorf("list the sources of %s: %w", c.Dir, err)
	}
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		text, changed := texts[path]
		if !changed {
			source, err := os.ReadFile(path)
			if err != nil {
				return fmt.Errorf("read a source of %s: %w", c.Dir, err)
			}
			text = string(source)
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, path, text, parser.SkipObjectResolution)
		if err != nil {
			return fmt.Errorf("parse a source of %s: %w", c.Dir, err)
		}
		for _, declared := range file.Decls {
			if method, ok := declared.(*ast.FuncDecl); ok && c.is(method) {
				texts[path], err = c.rewrite(text, set, method)
				return err
			}
		}
	}
	return fmt.Errorf("%s has no method %s.%s any more", c.Dir, c.Receiver, c.Method)
}

func (c Change) is(method *ast.FuncDecl) bool {
	if method.Name.Name != c.Method || (method.Recv == nil) != (c.Receiver == "") {
		return false
	}
	if method.Recv == nil {
		return true
	}
	receiver := method.Recv.List[0].Type
	if star, ok := receiver.(*ast.StarExpr); ok {
		receiver = star.X
	}
	switch generic := receiver.(type) {
	case *ast.IndexExpr:
		receiver = generic.X
	case *ast.IndexListExpr:
		receiver = generic.X
	}
	name, ok := receiver.(*ast.Ident)
	return ok && name.Name == c.Receiver
}

// rewrite edits the method, or renames it and adds the new one, with the same head, at the end of the file.
func (c Change) rewrite(text string, set *token.FileSet, method *ast.FuncDecl) (string, error) {
	at := func(p token.Pos) int { return set.Position(p).Offset }
	if c.from == "" {
		name := at(method.Name.Pos())
		head := text[at(method.Pos()):at(method.Body.Lbrace)]
		return text[:name] + "Honest" + text[name:] + "\n" + head + "{" + c.body + "}\n", nil
	}
	begin, end := at(method.Pos()), at(method.End())
	if n := strings.Count(text[begin:end], c.from); n != 1 {
		return "", fmt.Errorf("%s.%s of %s has %q %d times, not once", c.Receiver, c.Method, c.Dir, c.from, n)
	}
	return text[:begin] + strings.Replace(text[begin:end], c.from, c.to, 1) + text[end:], nil
}
