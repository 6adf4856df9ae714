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
	known := map[string]bool{}
	for _, h := range handles {
		for _, m := range simulated(h, declared) {
			known[h.of.Name()+"."+m.Name] = true
		}
	}
	called := calledMethods(t)
	for method, at := range called {
		if !known[method] && !guarded[method] {
			t.Errorf("%s calls %s, which is not simulated", at, method)
		}
	}
	if len(called) < 50 {
		t.Errorf("found calls of %d methods only", len(called))
	}
}

// guarded are methods that are called only if LookupSymbol finds a function, which it does not, and those that are no calls of NVML.
var guarded = map[string]bool{
	"Device.GetGpuFabricInfoV": true, "Interface.ErrorString": true, "Interface.Extensions": true,
	"ExtendedInterface.LookupSymbol": true,
}

// calledMethods returns the methods of go-nvml's interfaces that our programs call, each with one place where it is called. Generated files are
// left out, because they wrap every method.
func calledMethods(t *testing.T) map[string]string {
	t.Helper()
	type pkg struct {
		ImportPath, Dir, Export string
		GoFiles, Deps           []string
	}
	// With the flags of gotool.BuildFlags: the build cache has these packages.
	list := exec.Command("go", "list", "-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false", "-tags=grpcnotrace",
		"-deps", "-export", "-json=ImportPath,Dir,Export,GoFiles,Deps", "./cmd/...")
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
		if slices.Contains(p.Deps, gonvml) {
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
			if f, ok := selection.Obj().(*types.Func); ok && interfaceOf(f) != "" && !strings.HasPrefix(filepath.Base(place.Filename), "zz_generated") {
				called[interfaceOf(f)+"."+f.Name()] = place.String()
			}
		}
	}
	return called
}

// interfaceOf returns the name of go-nvml's interface to which a method belongs; empty for other methods.
func interfaceOf(f *types.Func) string {
	named, ok := f.Signature().Recv().Type().(*types.Named)
	if !ok || !types.IsInterface(named) || named.Obj().Pkg() == nil || named.Obj().Pkg().Path() != gonvml {
		return ""
	}
	return named.Obj().Name()
}
