// SPDX-License-Identifier: Apache-2.0

package binaries

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/hack/gotool"
)

// Packages that both Tandem and a cluster's programs link have one version, so that the first demo compiles them once. To correct a
// difference, update go.mod, or that of cli, hack or test. No package of Tandem is in notInlined.
func TestOneVersionOfEachPackage(t *testing.T) {
	work := t.TempDir()
	_, components := describe(work, []string{DefaultKubernetes})
	var tags, paths []string
	for _, c := range components {
		if !c.shared {
			continue
		}
		tags = append(tags, c.tags)
		for _, program := range c.packages {
			paths = append(paths, program.path)
		}
		if err := c.writeSource(work); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(work, "tmp"), 0o755); err != nil {
		t.Fatal(err)
	}
	shared := component{name: "shared", shared: true}
	if err := prepare(t.Context(), shared, work); err != nil {
		t.Fatal(err)
	}
	root, err := gotool.Root(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	const format = "{{with .Module}}{{$.ImportPath}} {{.Version}}{{end}}"
	versions := func(cmd *exec.Cmd, paths ...string) map[string]string {
		cmd.Args = append(append(cmd.Args, gotool.BuildFlags(tags...)...), paths...)
		cmd.Stderr = t.Output()
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %v", cmd, err)
		}
		found := map[string]string{}
		for line := range strings.Lines(string(out)) {
			if path, version, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
				found[path] = version
			}
		}
		return found
	}
	cluster := versions(goTool(t.Context(), shared, work, "list", "-mod=mod", "-deps", "-f", format), paths...)
	tandem := gotool.Command(t.Context(), filepath.Join(work, "tmp"), nil, "list", "-deps", "-f", format)
	tandem.Dir = root
	matches := func(pattern, path string) bool {
		return strings.HasPrefix(path+"/", strings.TrimSuffix(pattern, "..."))
	}
	for _, pattern := range notInlined {
		if !slices.ContainsFunc(slices.Collect(maps.Keys(cluster)), func(path string) bool { return matches(pattern, path) }) {
			t.Errorf("a cluster's programs have no package of %s: remove it from notInlined", pattern)
		}
	}
	compared := 0
	for path, version := range versions(tandem, "./cmd/...", "./cli/kubectl-gpu", "./test/cmd/demo", "./hack/cmd/stories") {
		theirs := cluster[path]
		if theirs != "" && theirs != version {
			t.Errorf("%s has version %s in a cluster's programs and %s in Tandem: update it in go.mod", path, theirs, version)
		}
		if theirs != "" {
			compared++
		}
		for _, pattern := range notInlined {
			if matches(pattern, path) {
				t.Errorf("%s is compiled twice, with inlining for Tandem and without it for a cluster: remove %s from notInlined", path, pattern)
			}
		}
	}
	if compared < 100 {
		t.Errorf("compared %d packages only", compared)
	}
}
