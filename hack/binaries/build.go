// SPDX-License-Identifier: Apache-2.0

package binaries

import (
	"cmp"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"

	"github.com/tandem-gpu/tandem/hack/filelock"
	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/progress"
)

// component is a set of programs built together from one Go module, or from one source file.
type component struct {
	// name and version make up the directory in the cache.
	name, version string
	// module is required at moduleVersion, or at version where that is empty; packages are its programs, in the order they are
	// built.
	module, moduleVersion string
	packages              []program
	// stagingReplace makes the module's own k8s.io/* requirements resolvable, as kubernetes needs it.
	stagingReplace bool
	source         []byte
	// prepare, where set, writes sources of the program into work; module is the directory of the module's sources.
	prepare   func(module, work string) error
	tags      string
	linkFlags string
	// env (KEY=value) is given to the go command; CGO_ENABLED=0 is the default.
	env   []string
	found func(dir string)
}

type program struct{ name, path string }

func into(dir *string) func(string) { return func(found string) { *dir = found } }

func etcd(dir *string) component {
	const module = "go.etcd.io/etcd/server/v3"
	return component{name: "etcd", version: EtcdVersion, module: module, packages: []program{{"etcd", module}}, found: into(dir)}
}

func containerd(dir *string) component {
	const module = "github.com/containerd/containerd/v2"
	return component{name: "containerd", version: ContainerdVersion, module: module, tags: "no_btrfs no_devmapper no_zfs",
		packages: below(module+"/cmd/", "containerd", "containerd-shim-runc-v2", "ctr"), found: into(dir)}
}

func runc(dir *string) component {
	const module = "github.com/opencontainers/runc"
	return component{name: "runc", version: RuncVersion, module: module, tags: "seccomp", env: []string{"CGO_ENABLED=1"},
		packages: []program{{"runc", module}}, found: into(dir)}
}

func helm(dir *string) component {
	c := Helm().component()
	c.found = into(dir)
	return c
}

func kubernetes(version string, found func(string)) component {
	const module, stamp = "k8s.io/kubernetes", "k8s.io/component-base/version.git"
	minor := strings.Split(version, ".")[1]
	return component{name: "kubernetes", version: version, module: module, stagingReplace: true, found: found,
		packages: below(module+"/cmd/", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"),
		linkFlags: fmt.Sprintf(" -X %[1]sVersion=%[2]s -X %[1]sMajor=1 -X %[1]sMinor=%[3]s",
			stamp, version, minor)}
}

//go:embed pause/main.go
var pauseSource []byte

func pause(found func(string)) component {
	return component{name: "pause", version: fmt.Sprintf("%x", sha256.Sum256(pauseSource))[:12], source: pauseSource,
		packages: []program{{"pause", "."}}, found: found}
}

func below(prefix string, names ...string) []program {
	programs := make([]program, len(names))
	for i, name := range names {
		programs[i] = program{name, prefix + name}
	}
	return programs
}

// builder fills the cache.
type builder struct {
	cache    string
	progress *progress.Log
}

// ensure returns the directory of a component, building it first where the cache has none. A directory in the cache is
// always complete: it is built elsewhere and renamed into place, under a lock that other processes respect.
func (b builder) ensure(ctx context.Context, c component, step string) (string, error) {
	parent := filepath.Join(b.cache, c.name)
	dir := filepath.Join(parent, c.version)
	if complete(dir, c) {
		return dir, nil
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return "", fmt.Errorf("create cache directory of %s: %w", c.name, err)
	}
	unlock, err := b.lock(ctx, filepath.Join(parent, "."+c.version+".lock"), c)
	if err != nil {
		return "", err
	}
	defer unlock()
	if complete(dir, c) {
		return dir, nil
	}
	// Left by a run that was killed: the lock is held, so no other process builds here.
	unfinished := "." + c.version + ".building-"
	if err := removeAll(parent, unfinished+"*"); err != nil {
		return "", err
	}
	work, err := os.MkdirTemp(parent, unfinished)
	if err != nil {
		return "", fmt.Errorf("create build directory of %s: %w", c.name, err)
	}
	defer os.RemoveAll(work)
	made := filepath.Join(work, "out")
	if err := b.build(ctx, c, work, made, step); err != nil {
		return "", fmt.Errorf("build %s %s: %w", c.name, c.version, err)
	}
	if err := os.RemoveAll(dir); err != nil {
		return "", fmt.Errorf("remove incomplete %s: %w", dir, err)
	}
	if err := os.Rename(made, dir); err != nil {
		return "", fmt.Errorf("move %s into the cache: %w", c.name, err)
	}
	return dir, nil
}

func removeAll(dir, pattern string) error {
	found, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil {
		return fmt.Errorf("look for %s: %w", pattern, err)
	}
	for _, path := range found {
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("remove %s: %w", path, err)
		}
	}
	return nil
}

func complete(dir string, c component) bool {
	for _, program := range c.packages {
		if info, err := os.Stat(filepath.Join(dir, program.name)); err != nil || !info.Mode().IsRegular() {
			return false
		}
	}
	return true
}

// lock waits for the component's lock file, so that two runs never build the same thing twice.
func (b builder) lock(ctx context.Context, path string, c component) (unlock func(), err error) {
	stop := b.progress.Beat(func() string { return fmt.Sprintf("waiting for another run that builds %s %s", c.name, c.version) })
	defer stop()
	return filelock.Wait(ctx, path)
}

// build makes the directory out, in work, which also takes the go command's temporary files.
func (b builder) build(ctx context.Context, c component, work, out, step string) error {
	for _, dir := range []string{out, filepath.Join(work, "tmp")} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return fmt.Errorf("create work directory: %w", err)
		}
	}
	b.progress.Say("%s %s %s: fetching", step, c.name, c.version)
	if err := prepareModule(ctx, c, work); err != nil {
		return err
	}
	// All of them at once, so that a module that cannot be had is found before minutes are spent on another program.
	if err := b.fetch(ctx, c, work, step); err != nil {
		return err
	}
	for i, program := range c.packages {
		label := fmt.Sprintf("%s %s %s: building %s (%d/%d)", step, c.name, c.version, program.name, i+1, len(c.packages))
		if err := b.buildProgram(ctx, c, program, work, out, label); err != nil {
			return err
		}
	}
	return nil
}

func (b builder) fetch(ctx context.Context, c component, work, step string) error {
	stop := b.progress.Beat(func() string { return fmt.Sprintf("%s %s %s: still fetching modules", step, c.name, c.version) })
	defer stop()
	list := []string{"list", "-mod=mod", "-deps", "-tags", c.tags, "-f", "{{.ImportPath}}"}
	for _, program := range c.packages {
		list = append(list, program.path)
	}
	_, err := download(ctx, c, work, list...)
	return err
}

func (b builder) buildProgram(ctx context.Context, c component, program program, work, out, label string) error {
	start := time.Now()
	b.progress.Say("%s", label)
	packages, err := goCommand(ctx, c, work, "list", "-mod=mod", "-deps", "-tags", c.tags, "-f", "{{.ImportPath}}", program.path)
	if err != nil {
		return err
	}
	total := strings.Count(packages, "\n")
	var output progress.Tail
	stop := b.progress.Beat(func() string {
		return fmt.Sprintf("%s: compiled %d of at most %d packages in %s", label, output.Lines(), total, time.Since(start).Round(time.Second))
	})
	defer stop()
	cmd := goTool(ctx, c, work, "build", "-v", "-mod=mod", "-trimpath", "-buildvcs=false", "-tags", c.tags,
		"-ldflags", "-s -w"+c.linkFlags, "-o", filepath.Join(out, program.name), program.path)
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", program.path, err, &output)
	}
	return nil
}

// prepareModule writes a small module that requires the component's, or is the component.
func prepareModule(ctx context.Context, c component, work string) error {
	goVersion := strings.TrimPrefix(runtime.Version(), "go")
	if fields := strings.SplitN(goVersion, ".", 3); len(fields) >= 2 {
		goVersion = fields[0] + "." + fields[1]
	}
	gomod := fmt.Sprintf("module local/%s\n\ngo %s\n", c.name, goVersion)
	if c.source != nil {
		if err := os.WriteFile(filepath.Join(work, "main.go"), c.source, 0o644); err != nil {
			return fmt.Errorf("write source: %w", err)
		}
	}
	if c.module != "" {
		gomod += fmt.Sprintf("\nrequire %s %s\n", c.module, cmp.Or(c.moduleVersion, c.version))
	}
	if c.stagingReplace {
		// A module of its own already now: the cache may lie in another one.
		if err := os.WriteFile(filepath.Join(work, "go.mod"), []byte("module local/"+c.name+"\n"), 0o644); err != nil {
			return fmt.Errorf("write go.mod: %w", err)
		}
		replaces, module, err := stagingReplaces(ctx, c, work)
		if err != nil {
			return err
		}
		gomod += replaces
		if c.prepare != nil {
			if err := c.prepare(module, work); err != nil {
				return err
			}
		}
	}
	if err := os.WriteFile(filepath.Join(work, "go.mod"), []byte(gomod), 0o644); err != nil {
		return fmt.Errorf("write go.mod: %w", err)
	}
	return nil
}

// stagingReplaces answers the replace lines that k8s.io/kubernetes needs when it is a dependency: its go.mod requires
// its staging modules as v0.0.0 and replaces them by directories, which only the main module may do. dir has its sources.
func stagingReplaces(ctx context.Context, c component, work string) (replaces, dir string, err error) {
	version := cmp.Or(c.moduleVersion, c.version)
	out, err := download(ctx, c, work, "mod", "download", "-json", c.module+"@"+version)
	if err != nil {
		return "", "", err
	}
	var module struct{ GoMod, Dir string }
	if err := json.Unmarshal([]byte(out), &module); err != nil {
		return "", "", fmt.Errorf("read answer of go mod download %s: %w", c.module, err)
	}
	gomod, err := os.ReadFile(module.GoMod)
	if err != nil {
		return "", "", fmt.Errorf("read go.mod of %s: %w", c.module, err)
	}
	return replaceLines(string(gomod), "v0."+strings.TrimPrefix(version, "v1.")), module.Dir, nil
}

func replaceLines(gomod, version string) string {
	var replaces strings.Builder
	for line := range strings.Lines(gomod) {
		fields := strings.Fields(line)
		if len(fields) >= 2 && strings.HasPrefix(fields[0], "k8s.io/") && fields[1] == "v0.0.0" {
			fmt.Fprintf(&replaces, "replace %[1]s => %[1]s %[2]s\n", fields[0], version)
		}
	}
	return replaces.String()
}

// download runs a go command that may need the network, and again if it fails.
func download(ctx context.Context, c component, work string, args ...string) (out string, err error) {
	err = retry.OnError(wait.Backoff{Steps: 4, Duration: 5 * time.Second}, func(error) bool { return ctx.Err() == nil }, func() (err error) {
		out, err = goCommand(ctx, c, work, args...)
		return err
	})
	return out, err
}

func goTool(ctx context.Context, c component, work string, args ...string) *exec.Cmd {
	env := append([]string{"CGO_ENABLED=0", "GOWORK=off", "GOFLAGS="}, c.env...)
	cmd := gotool.Command(ctx, filepath.Join(work, "tmp"), env, args...)
	cmd.Dir = work
	return cmd
}

func goCommand(ctx context.Context, c component, work string, args ...string) (string, error) {
	cmd := goTool(ctx, c, work, args...)
	var stderr progress.Tail
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("go %s: %w\n%s", strings.Join(args[:min(2, len(args))], " "), err, &stderr)
	}
	return string(out), nil
}
