// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const gonvml = "github.com/NVIDIA/go-nvml/pkg/nvml"

// The handles embed go-nvml's interfaces, which are nil there. A method that is not simulated would panic, so our programs must not call one.
func TestEveryCalledMethodIsSimulated(t *testing.T) {
	declared, err := declaredMethods("../..")
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{"ErrorString": true, "Extensions": true}
	for _, h := range handles {
		for _, m := range simulated(h, declared) {
			known[m.Name] = true
		}
	}
	for method, at := range calledMethods(t) {
		if !known[method] {
			t.Errorf("%s calls %s, which is not simulated", at, method)
		}
	}
}

// calledMethods returns the methods of go-nvml's interfaces that our programs call, each with one place where it is called. Generated files are
// left out, because they wrap every method.
func calledMethods(t *testing.T) map[string]string {
	t.Helper()
	type pkg struct {
		ImportPath, Dir, Export string
		GoFiles, Imports        []string
	}
	// With the flags of gotool.BuildFlags: the build cache has these packages.
	list := exec.Command("go", "list", "-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false", "-tags=grpcnotrace",
		"-deps", "-export", "-json=ImportPath,Dir,Export,GoFiles,Imports", "./cmd/...")
	list.Dir = "../../.."
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	exports := map[string]string{}
	var users []pkg
	for decoder := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		exports[p.ImportPath] = p.Export
		if slices.Contains(p.Imports, gonvml) {
			users = append(users, p)
		}
	}
	files := token.NewFileSet()
	imports := importer.ForCompiler(files, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })
	called := map[string]string{}
	for _, p := range users {
		var sources []*ast.File
		for _, name := range p.GoFiles {
			source, err := parser.ParseFile(files, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			sources = append(sources, source)
		}
		info := types.Info{Selections: map[*ast.SelectorExpr]*types.Selection{}}
		config := types.Config{Importer: imports, FakeImportC: true}
		if _, err := config.Check(p.ImportPath, files, sources, &info); err != nil {
			t.Fatal(err)
		}
		for at, selection := range info.Selections {
			place := files.Position(at.Pos())
			if f, ok := selection.Obj().(*types.Func); ok && ofInterface(f) && !strings.HasPrefix(filepath.Base(place.Filename), "zz_generated") {
				called[f.Name()] = place.String()
			}
		}
	}
	return called
}

// ofInterface tells whether a method belongs to an interface and answers with NVML's return code.
func ofInterface(f *types.Func) bool {
	results := f.Signature().Results()
	if !types.IsInterface(f.Signature().Recv().Type()) || results.Len() == 0 {
		return false
	}
	last, ok := types.Unalias(results.At(results.Len() - 1).Type()).(*types.Named)
	return ok && last.Obj().Name() == "Return" && last.Obj().Pkg().Path() == gonvml
}
