// SPDX-License-Identifier: Apache-2.0

// Package tandem has no code: its tests check the rules that hold for the whole repository.
package tandem

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/tandem-gpu/tandem"

// layers are the product's packages from the bottom up. A package imports only packages of lower layers. The two front-ends
// share a layer, so they do not import each other.
var layers = [][]string{
	{"pkg/device", "internal/version", "internal/records", "internal/driverroot", "internal/broadcast", "internal/keylock", "internal/regarding", "internal/fileclock", "internal/filewatch", "internal/owner", "internal/podstatus", "internal/stacks", "internal/terminal", "cli/workloads", "api", "deployments/helm"},
	{"pkg/availability", "pkg/mig", "pkg/mps", "pkg/nodelabels", "internal/capacity", "internal/config", "internal/runtimes", "internal/status"},
	{"pkg/ledger", "pkg/cdi", "pkg/partition"},
	{"pkg/podstate", "pkg/health", "pkg/webhook", "pkg/sharing", "pkg/handover", "cli/explain"},
	{"pkg/reconcile", "pkg/driver", "pkg/legacy", "pkg/gpunode", "pkg/controller", "cli/migrate", "cli/overview"},
	{"pkg/nvml", "pkg/wiring", "cli/drain", "cli/doctor", "cli/page"},
	{"pkg/agent", "simulated"},
	{"cmd", "cli/kubectl-gpu"},
}

// doors are modules that only some packages may import, and why.
var doors = []struct {
	prefix   string
	allowed  []string
	why      string
	testsMay bool
}{
	{"github.com/NVIDIA/", []string{"pkg/nvml", "simulated", "test/dropin"}, "pkg/nvml is the one door to the NVIDIA driver", false},
	{module + "/pkg/nvml", []string{"pkg/nvml", "pkg/agent", "simulated/simnode", "cmd", "hack", "test"}, "front-ends declare the small interface they need", false},
	{module + "/simulated", []string{"simulated", "cmd", "hack", "test"}, "only commands, tools and tests use the simulated hardware", true},
	{"k8s.io/", []string{"api", "pkg/driver", "pkg/legacy", "pkg/podstate", "pkg/health", "pkg/reconcile", "pkg/gpunode", "pkg/controller", "pkg/webhook", "pkg/nvml", "simulated", "pkg/cdi", "pkg/ledger", "pkg/mps", "pkg/sharing", "pkg/handover", "pkg/nodelabels", "pkg/wiring", "pkg/agent", "internal", "cmd", "cli", "hack", "test", "deployments"},
		"pkg/device and pkg/mig are values over the standard library", false},
	{"github.com/spf13/cobra", []string{"cli/kubectl-gpu"}, "only the kubectl plugin links it; cli/overview has what other views need", false},
	{"k8s.io/cli-runtime", []string{"cli/kubectl-gpu"}, "only the kubectl plugin links it; cli/overview has what other views need", false},
	{module + "/cli", []string{"cli", "test"}, "cli is a module of its own: the product's go.mod lists what the product needs", false},
	{module + "/hack", []string{"hack", "test"}, "hack is a module of its own: the product's go.mod lists what the product needs", false},
	{module + "/test", []string{"test"}, "tests use the tools of hack, and no tool uses tests; their commands are in test/cmd", false},
}

func TestImportsOnlyGoDown(t *testing.T) {
	for _, f := range sources(t) {
		if f.test || f.layer() < 0 {
			continue
		}
		for _, imported := range f.imports() {
			path, ours := strings.CutPrefix(imported, module+"/")
			if !ours || entryOf(path) != "" && entryOf(path) == entryOf(f.pkg) {
				continue
			}
			if layer := layerOf(path); layer < 0 {
				t.Errorf("%s imports %s, which is in no layer of this test", f.path, path)
			} else if layer >= f.layer() {
				t.Errorf("%s (%s) imports %s, which is not below it", f.path, f.pkg, path)
			}
		}
	}
}

func TestOnlyTheDoorsAreUsed(t *testing.T) {
	for _, f := range sources(t) {
		for _, imported := range f.imports() {
			for _, door := range doors {
				if !strings.HasPrefix(imported, door.prefix) || f.test && door.testsMay {
					continue
				}
				if !slices.ContainsFunc(door.allowed, func(p string) bool { return f.pkg == p || strings.HasPrefix(f.pkg, p+"/") }) {
					t.Errorf("%s imports %s: %s", f.path, imported, door.why)
				}
			}
		}
	}
}

func TestEveryPackageHasOneComment(t *testing.T) {
	comments := map[string][]string{}
	for _, f := range sources(t) {
		if f.test {
			continue
		}
		comments[f.pkg] = append(comments[f.pkg], nil...)
		if f.file.Doc != nil && strings.TrimSpace(f.file.Doc.Text()) != "" {
			comments[f.pkg] = append(comments[f.pkg], f.path)
		}
	}
	for pkg, files := range comments {
		if len(files) != 1 {
			t.Errorf("package %s has %d package comments, in %v", pkg, len(files), files)
		}
	}
}

func TestEveryFileNamesItsLicence(t *testing.T) {
	for _, f := range sources(t) {
		if f.generated {
			continue
		}
		if !strings.HasPrefix(f.text, "// SPDX-License-Identifier: Apache-2.0\n") {
			t.Errorf("%s does not begin with its SPDX line", f.path)
		}
	}
}

// TestOnlyMainExits: only main ends the process, and nothing panics on purpose.
func TestOnlyMainExits(t *testing.T) {
	for _, f := range sources(t) {
		if f.test || f.file.Name.Name == "main" || f.layer() < 0 {
			continue
		}
		ast.Inspect(f.file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			switch name := callee(call); name {
			case "panic", "os.Exit", "log.Fatal", "log.Fatalf", "klog.Fatal", "klog.Fatalf", "klog.FlushAndExit":
				t.Errorf("%s calls %s", f.path, name)
			}
			return true
		})
	}
}

// TestOneWiring: only pkg/wiring connects the components of a node. With a second wiring tests would prove another agent than the one that ships.
func TestOneWiring(t *testing.T) {
	constructors := map[string]string{
		"driver.New": "pkg/driver", "legacy.New": "pkg/legacy", "reconcile.New": "pkg/reconcile", "handover.New": "pkg/handover", "health.New": "pkg/health",
	}
	found := map[string]bool{}
	for _, f := range sources(t) {
		imports := f.imports()
		ast.Inspect(f.file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			name := callee(call)
			pkg, is := constructors[name]
			if !is || f.pkg == pkg || !slices.Contains(imports, module+"/"+pkg) {
				return true
			}
			found[name] = found[name] || f.pkg == "pkg/wiring"
			if f.pkg != "pkg/wiring" {
				t.Errorf("%s calls %s: take the component from pkg/wiring", f.path, name)
			}
			return true
		})
	}
	for name := range constructors {
		if !found[name] {
			t.Errorf("pkg/wiring does not call %s", name)
		}
	}
}

// TestAgentCallsNoMethodsByName: with text/template or reflection over methods in the agent the linker must keep every method
// of every type it knows, Kubernetes' whole client among them, and the agent takes twice the memory.
func TestAgentCallsNoMethodsByName(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-tags", "grpcnotrace", "./cmd/kubelet-plugin").Output()
	if err != nil {
		t.Fatal(err)
	}
	for path := range strings.Lines(string(out)) {
		if path = strings.TrimSpace(path); path == "text/template" || path == "html/template" {
			t.Errorf("the agent links %s", path)
		}
	}
	for _, f := range sources(t) {
		if f.test || f.layer() < 0 || f.file.Name.Name == "main" || !slices.Contains(f.imports(), "reflect") {
			continue
		}
		for _, call := range []string{".MethodByName(", ".Method(", ".Methods()"} {
			if strings.Contains(f.text, call) {
				t.Errorf("%s uses reflection over methods: %s", f.path, call)
			}
		}
	}
}

// TestModulesAgree: product and plugin are built from the same versions in the workspace as alone. `go work sync` repairs it.
func TestModulesAgree(t *testing.T) {
	for dir, packages := range map[string]string{".": "./cmd/...", "cli": "./..."} {
		list := func(env string) string {
			cmd := exec.Command("go", "-C", dir, "list", "-deps", "-f", "{{with .Module}}{{.Path}} {{if not .Replace}}{{.Version}}{{end}}{{end}}", packages)
			cmd.Env = append(os.Environ(), env)
			out, err := cmd.Output()
			if err != nil {
				t.Fatal(env, err)
			}
			return string(out)
		}
		if alone, together := list("GOWORK=off"), list("GOWORK="); alone != together {
			t.Errorf("go.work selects other versions than go.mod of %s:\n%s\n%s", dir, alone, together)
		}
	}
}

func callee(call *ast.CallExpr) string {
	switch f := call.Fun.(type) {
	case *ast.Ident:
		return f.Name
	case *ast.SelectorExpr:
		if x, ok := f.X.(*ast.Ident); ok {
			return x.Name + "." + f.Sel.Name
		}
	}
	return ""
}

// TestNamedTestsExist: comments and documents name the tests that defend what they describe.
func TestNamedTestsExist(t *testing.T) {
	exist, namedIn := map[string]bool{}, map[string]string{}
	name := regexp.MustCompile(`\b(Test|Benchmark|Fuzz)[A-Z]\w+`)
	note := func(path, text string) {
		for _, found := range name.FindAllString(text, -1) {
			namedIn[found] = path
		}
	}
	for _, f := range sources(t) {
		for _, declaration := range f.file.Decls {
			if function, ok := declaration.(*ast.FuncDecl); ok && function.Recv == nil {
				exist[function.Name.Name] = true
			}
		}
		for _, comment := range f.file.Comments {
			note(f.path, comment.Text())
		}
	}
	documents, err := filepath.Glob("*.md")
	if err != nil {
		t.Fatal(err)
	}
	if err := filepath.WalkDir("docs", func(path string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(path, ".md") {
			documents = append(documents, path)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	for _, path := range documents {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		note(path, string(text))
	}
	for found, path := range namedIn {
		if !exist[found] {
			t.Errorf("%s names %s, which does not exist", path, found)
		}
	}
	if len(namedIn) < 100 {
		t.Errorf("only %d names were found", len(namedIn))
	}
}

func TestNoGrabBags(t *testing.T) {
	banned := []string{"common", "util", "utils", "helper", "helpers", "types", "manager", "consts", "base"}
	for _, f := range sources(t) {
		if slices.Contains(banned, filepath.Base(f.pkg)) {
			t.Errorf("the name of package %s does not say what it does", f.pkg)
		}
	}
}

type source struct {
	path, pkg, text string
	test, generated bool
	file            *ast.File
}

func (s source) layer() int { return layerOf(s.pkg) }

func (s source) imports() []string {
	var paths []string
	for _, spec := range s.file.Imports {
		paths = append(paths, strings.Trim(spec.Path.Value, `"`))
	}
	return paths
}

func layerOf(pkg string) int {
	entry := entryOf(pkg)
	return slices.IndexFunc(layers, func(layer []string) bool { return entry != "" && slices.Contains(layer, entry) })
}

// entryOf returns the entry of layers that pkg belongs to, or "" for a package in no layer.
func entryOf(pkg string) string {
	for _, layer := range layers {
		for _, entry := range layer {
			if pkg == entry || strings.HasPrefix(pkg, entry+"/") {
				return entry
			}
		}
	}
	return ""
}

func sources(t *testing.T) []source {
	t.Helper()
	var found []source
	files := token.NewFileSet()
	err := filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if name := entry.Name(); path != "." && (strings.HasPrefix(name, ".") || name == "testdata" || name == "bin") {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		parsed, err := parser.ParseFile(files, path, text, parser.ParseComments)
		if err != nil {
			return err
		}
		pkg := filepath.Dir(path)
		if pkg == "." {
			pkg = ""
		}
		found = append(found, source{
			path: path, pkg: pkg, text: string(text), file: parsed, test: strings.HasSuffix(path, "_test.go"), generated: ast.IsGenerated(parsed),
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(found) == 0 {
		t.Fatal("no source files found")
	}
	return found
}

// hack/unit.sh leaves tests out by name and plays them again in some packages. A test of the same name in another package would be lost.
func TestComputingTests(t *testing.T) {
	script, err := os.ReadFile("hack/unit.sh")
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile(`computing='\^\(([A-Za-z|]+)\)\$'`).FindSubmatch(script)
	packages := regexp.MustCompile(`of=\(([a-z./ ]+)\)`).FindSubmatch(script)
	if names == nil || packages == nil {
		t.Fatal("hack/unit.sh does not list them")
	}
	places := map[string][]string{}
	for _, f := range sources(t) {
		for _, declared := range f.file.Decls {
			if function, ok := declared.(*ast.FuncDecl); ok && f.test && function.Recv == nil && f.pkg != "test/e2e" {
				places[function.Name.Name] = append(places[function.Name.Name], "./"+f.pkg)
			}
		}
	}
	for _, name := range strings.Split(string(names[1]), "|") {
		if at := places[name]; len(at) != 1 || !slices.Contains(strings.Fields(string(packages[1])), at[0]) {
			t.Errorf("%s is in %v, and hack/unit.sh plays it in %s", name, at, packages[1])
		}
	}
}
