// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// source is a Go file of the product. Its package is the directory, "pkg/driver".
type source struct {
	pkg, path string
	file      *ast.File
}

// sources are the files of the product's programs and packages, without tests, in the order of their paths.
func sources(root string) ([]source, error) {
	var found []source
	for _, top := range []string{"api", "cmd", "internal", "pkg"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments|parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			name, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			found = append(found, source{pkg: filepath.Dir(name), path: name, file: file})
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return found, nil
}

// component is the program that runs a package.
func component(pkg string) string {
	switch {
	case slices.Contains([]string{"pkg/controller", "pkg/webhook", "cmd/controller"}, pkg):
		return "controller"
	default:
		return "agent"
	}
}

// text returns the string that an expression of literals and + makes.
func text(e ast.Expr) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		if e.Kind == token.STRING {
			s, err := strconv.Unquote(e.Value)
			return s, err == nil
		}
	case *ast.BinaryExpr:
		if e.Op == token.ADD {
			left, ok := text(e.X)
			right, alsoOK := text(e.Y)
			return left + right, ok && alsoOK
		}
	case *ast.ParenExpr:
		return text(e.X)
	}
	return "", false
}

// literals calls use for each string literal of a file, except import paths and tags.
func literals(file *ast.File, use func(string)) {
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ImportSpec:
			return false
		case *ast.Field:
			return n.Tag == nil
		case *ast.BasicLit:
			if s, ok := text(n); ok {
				use(s)
			}
		}
		return true
	})
}
