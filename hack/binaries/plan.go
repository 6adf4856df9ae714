// SPDX-License-Identifier: Apache-2.0

package binaries

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/version"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/semver"

	"github.com/tandem-gpu/tandem/hack/gotool"
)

// plan is the module in which components are built: go.mod and go.sum.
type plan struct{ mod, sum []byte }

func (p *plan) write(work string, c component) error {
	return errors.Join(
		os.MkdirAll(filepath.Join(work, "tmp"), 0o755),
		os.WriteFile(filepath.Join(work, "go.mod"), p.mod, 0o644),
		os.WriteFile(filepath.Join(work, "go.sum"), p.sum, 0o644),
		c.writeSource(work),
	)
}

func (c component) writeSource(work string) error {
	if c.source == nil {
		return nil
	}
	return os.WriteFile(filepath.Join(work, "main.go"), c.source, 0o644)
}

// planAll plans the components that the cache lacks. Shared components have one module together. A module that cannot be downloaded is found
// here, before minutes are spent on compiling.
func (b builder) planAll(ctx context.Context, components []component) error {
	groups := map[string][]component{}
	var order []string
	for _, c := range components {
		if c.module == "" || complete(c.dir(b.cache), c) || given(c) {
			continue
		}
		group := c.dir("")
		if c.shared {
			group = sharedVariant
		}
		if groups[group] == nil {
			order = append(order, group)
		}
		groups[group] = append(groups[group], c)
	}
	if len(groups) == 0 {
		return nil
	}
	for _, name := range order {
		if err := b.planGroup(ctx, groups[name]); err != nil {
			return err
		}
	}
	return nil
}

func (b builder) planGroup(ctx context.Context, group []component) error {
	var names []string
	for _, c := range group {
		names = append(names, c.name+" "+c.version)
	}
	what := "the Go modules of " + strings.Join(names, ", ")
	b.progress.Say("fetching %s", what)
	stop := b.progress.Beat(func() string { return "still fetching " + what })
	defer stop()
	work, err := os.MkdirTemp("", "plan-")
	if err != nil {
		return fmt.Errorf("create directory to plan in: %w", err)
	}
	defer os.RemoveAll(work)
	planned, err := b.plan(ctx, work, group...)
	if err != nil {
		return fmt.Errorf("plan the build with %s: %w", what, err)
	}
	for _, c := range group {
		b.plans[c.dir(b.cache)] = planned
	}
	return nil
}

// plan prepares a module for components that are built in the same way, and lists the packages that have to be compiled for them.
func (b builder) plan(ctx context.Context, work string, group ...component) (*plan, error) {
	if err := os.MkdirAll(filepath.Join(work, "tmp"), 0o755); err != nil {
		return nil, fmt.Errorf("create work directory: %w", err)
	}
	var tags, paths []string
	links := map[string]bool{}
	for _, c := range group {
		tags = append(tags, c.tags)
		if err := c.writeSource(work); err != nil {
			return nil, fmt.Errorf("write source: %w", err)
		}
		for _, program := range c.packages {
			paths = append(paths, program.path)
			links[program.path] = true
		}
	}
	if err := prepare(ctx, group[0], work); err != nil {
		return nil, err
	}
	args := append([]string{"list", "-mod=mod", "-deps", "-f", gotool.ListFormat}, gotool.BuildFlags(tags...)...)
	listed, err := download(ctx, group[0], work, append(args, paths...)...)
	if err != nil {
		return nil, err
	}
	packages := gotool.Packages(listed)
	for i, p := range packages {
		if links[p.Name] || strings.HasPrefix(p.Name, "local/") {
			packages[i].Size += linkSize
		}
	}
	if group[0].shared {
		b.work.Add(packages)
	}
	mod, err := os.ReadFile(filepath.Join(work, "go.mod"))
	if err != nil {
		return nil, fmt.Errorf("read go.mod: %w", err)
	}
	sum, err := os.ReadFile(filepath.Join(work, "go.sum"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read go.sum: %w", err)
	}
	return &plan{mod, sum}, nil
}

// linkSize is the cost of linking a program, in bytes of source that the compiler compiles in the same time.
const linkSize = 1e6

// prepare writes a small module that requires the component's, or is the component.
func prepare(ctx context.Context, c component, work string) error {
	start := fmt.Sprintf("module local/%s\n\ngo %s\n\n", c.name, strings.TrimPrefix(version.Lang(runtime.Version()), "go"))
	// Before the first go command: it would use the go.mod of a module that contains the cache.
	if err := os.WriteFile(filepath.Join(work, "go.mod"), []byte(start), 0o644); err != nil {
		return fmt.Errorf("write go.mod: %w", err)
	}
	dependencies, err := requirements(ctx, c, work)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(work, "go.mod"), []byte(start+dependencies), 0o644); err != nil {
		return fmt.Errorf("write go.mod: %w", err)
	}
	return nil
}

// requirements are the require and replace lines of go.mod.
func requirements(ctx context.Context, c component, work string) (string, error) {
	versions := map[string]string{}
	if c.module != "" {
		versions[c.module] = c.version
	}
	if c.shared {
		if err := sharedVersions(ctx, versions); err != nil {
			return "", err
		}
	}
	var replaces string
	if kubernetes := versions[kubernetesModule]; kubernetes != "" {
		module, err := downloadKubernetes(ctx, c, work, kubernetes)
		if err != nil {
			return "", err
		}
		staging, err := stagingVersions(module.GoMod, kubernetes)
		if err != nil {
			return "", err
		}
		for _, path := range slices.Sorted(maps.Keys(staging)) {
			replaces += fmt.Sprintf("replace %[1]s => %[1]s %[2]s\n", path, staging[path])
			if c.shared {
				versions[path] = staging[path]
			}
		}
		if c.prepare != nil {
			if err := c.prepare(module.Dir, work); err != nil {
				return "", err
			}
		}
	}
	var requires string
	for _, path := range slices.Sorted(maps.Keys(versions)) {
		requires += fmt.Sprintf("require %s %s\n", path, versions[path])
	}
	return requires + replaces, nil
}

// sharedVersions adds the modules of all shared components, and what Tandem's own modules require, each at the newest version of these.
func sharedVersions(ctx context.Context, versions map[string]string) error {
	_, components := describe("", []string{DefaultKubernetes})
	for _, c := range components {
		if c.shared {
			versions[c.module] = c.version
		}
	}
	root, err := gotool.Root(ctx)
	if err != nil {
		return err
	}
	for _, dir := range []string{"", "cli", "hack", "test"} {
		path := filepath.Join(root, dir, "go.mod")
		data, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("read dependencies of Tandem: %w", err)
		}
		file, err := modfile.Parse(path, data, nil)
		if err != nil {
			return fmt.Errorf("read dependencies of Tandem: %w", err)
		}
		for _, required := range file.Require {
			own := strings.HasPrefix(required.Mod.Path, gotool.ProductModule)
			if path := required.Mod.Path; !own && semver.Compare(required.Mod.Version, versions[path]) > 0 {
				versions[path] = required.Mod.Version
			}
		}
	}
	return nil
}

const kubernetesModule = "k8s.io/kubernetes"

// stagingVersions are the versions that k8s.io/kubernetes needs when it is a dependency: its go.mod requires its staging modules as v0.0.0
// and replaces them by directories, which only the main module may do.
func stagingVersions(gomod, version string) (map[string]string, error) {
	data, err := os.ReadFile(gomod)
	if err != nil {
		return nil, fmt.Errorf("read go.mod of Kubernetes %s: %w", version, err)
	}
	file, err := modfile.Parse(gomod, data, nil)
	if err != nil {
		return nil, fmt.Errorf("read go.mod of Kubernetes %s: %w", version, err)
	}
	staging := map[string]string{}
	for _, required := range file.Require {
		if required.Mod.Version == "v0.0.0" && strings.HasPrefix(required.Mod.Path, "k8s.io/") {
			staging[required.Mod.Path] = "v0." + strings.TrimPrefix(version, "v1.")
		}
	}
	return staging, nil
}

type downloaded struct{ GoMod, Dir string }

func downloadKubernetes(ctx context.Context, c component, work, version string) (downloaded, error) {
	var module downloaded
	out, err := download(ctx, c, work, "mod", "download", "-json", kubernetesModule+"@"+version)
	if err != nil {
		return downloaded{}, err
	}
	if err := json.Unmarshal([]byte(out), &module); err != nil {
		return downloaded{}, fmt.Errorf("read answer of go mod download %s: %w", kubernetesModule, err)
	}
	return module, nil
}
