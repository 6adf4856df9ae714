// SPDX-License-Identifier: Apache-2.0

package binaries

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/hack/filelock"
	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/progress"
)

// component is a set of programs built together from one Go module, or from one source file.
type component struct {
	// name, version and variant make up the directory in the cache.
	name, version, variant string
	// module is required at the version, where there is one; packages are its programs, in the order they are built.
	module   string
	packages []program
	// shared components have the same version of each dependency as Tandem, and are built with cgo as Tandem is. So the build cache serves
	// most packages of one program to the others.
	shared bool
	source []byte
	// prepare, where set and the module is Kubernetes, writes sources of the program into work; module is the directory of the module's sources.
	prepare   func(module, work string) error
	tags      string
	linkFlags string
	// env (KEY=value) is given to the go command; CGO_ENABLED=0 is the default of what is not shared.
	env   []string
	found func(dir string)
}

// program is a main package and the names of its program, which are links to one file.
type program struct {
	path  string
	names []string
}

// notInlined are packages that Tandem does not link. They are compiled without inlining, which takes the compiler a quarter less time. All
// other packages are compiled with inlining, because the image has them, too.
var notInlined = []string{
	"k8s.io/kubernetes/...", "k8s.io/apiserver/pkg/admission/...", "k8s.io/apiserver/pkg/audit/...", "k8s.io/apiserver/pkg/endpoints/...",
	"k8s.io/apiserver/pkg/quota/...", "k8s.io/apiserver/pkg/registry/...", "k8s.io/apiserver/pkg/server/...", "k8s.io/apiserver/pkg/storage/...",
	"k8s.io/apiserver/pkg/util/flowcontrol/...", "k8s.io/apiserver/plugin/...", "k8s.io/apiextensions-apiserver/pkg/apiserver/...",
	"k8s.io/apiextensions-apiserver/pkg/registry/...", "k8s.io/kube-aggregator/...", "k8s.io/kubectl/...", "k8s.io/cloud-provider/...",
	"k8s.io/controller-manager/...", "k8s.io/metrics/...", "k8s.io/pod-security-admission/...", "k8s.io/cri-api/...", "github.com/containerd/...",
	"go.etcd.io/etcd/server/...", "helm.sh/helm/...", "github.com/tetratelabs/...", "github.com/fluxcd/...", "github.com/google/cadvisor/...",
	"go.opentelemetry.io/contrib/...", "go.opentelemetry.io/otel/sdk/...", "go.opentelemetry.io/otel/exporters/...", "oras.land/...",
}

// sharedVariant keeps the programs of shared components apart, in the cache, from those that are built without cgo.
const sharedVariant = "-shared"

func into(dir *string) func(string) { return func(found string) { *dir = found } }

func etcd(dir *string) component {
	const module = "go.etcd.io/etcd/server/v3"
	return component{name: "etcd", version: EtcdVersion, variant: sharedVariant, module: module, shared: true,
		packages: []program{{module, []string{"etcd"}}}, found: into(dir)}
}

func containerd(dir *string) component {
	const module = "github.com/containerd/containerd/v2"
	return component{name: "containerd", version: ContainerdVersion, variant: sharedVariant, module: module, shared: true,
		tags:     "no_btrfs no_devmapper no_zfs",
		packages: below(module+"/cmd/", "containerd", "containerd-shim-runc-v2", "ctr"), found: into(dir)}
}

func runc(dir *string) component {
	const module = "github.com/opencontainers/runc"
	return component{name: "runc", version: RuncVersion, module: module, tags: "seccomp", env: []string{"CGO_ENABLED=1"},
		packages: []program{{module, []string{"runc"}}}, found: into(dir)}
}

func helm(dir *string) component {
	c := Helm().component()
	c.found = into(dir)
	return c
}

func kubernetes(version string, found func(string)) component {
	const module, stamp = kubernetesModule, "k8s.io/component-base/version.git"
	servers := []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"}
	minor := strings.Split(version, ".")[1]
	c := component{name: "kubernetes", version: version, module: module, found: found,
		packages: below(module+"/cmd/", append(servers, "kubectl")...),
		linkFlags: fmt.Sprintf(" -X %[1]sVersion=%[2]s -X %[1]sMajor=1 -X %[1]sMinor=%[3]s",
			stamp, version, minor)}
	if version == DefaultKubernetes {
		c.shared, c.source, c.variant = true, kubernetesSource, sharedVariant+"-"+hashOf(kubernetesSource)
		c.packages = append([]program{{".", servers}}, below(module+"/cmd/", "kubectl")...)
	}
	return c
}

// kubernetesSource is the main package of all servers.
//
//go:embed testdata/kubernetes/main.go
var kubernetesSource []byte

//go:embed pause/main.go
var pauseSource []byte

func pause(found func(string)) component {
	return component{name: "pause", version: hashOf(pauseSource), source: pauseSource,
		packages: []program{{".", []string{"pause"}}}, found: found}
}

func hashOf(source []byte) string { return fmt.Sprintf("%x", sha256.Sum256(source))[:12] }

func below(prefix string, names ...string) []program {
	programs := make([]program, len(names))
	for i, name := range names {
		programs[i] = program{prefix + name, []string{name}}
	}
	return programs
}

// builder fills the cache.
type builder struct {
	cache    string
	progress *progress.Log
	work     *progress.Work
	// plans has the modules in which components are built, by the component's directory, where they are known already.
	plans map[string]*plan
}

func newBuilder(cache string, out io.Writer) builder {
	return builder{cache: cache, progress: progress.New(out), work: progress.NewWork(0), plans: map[string]*plan{}}
}

// ensure returns the directory of a component, building it first where the cache has none. A directory in the cache is
// always complete: it is built elsewhere and renamed into place, under a lock that other processes respect.
func (b builder) ensure(ctx context.Context, c component, step string) (string, error) {
	dir := c.dir(b.cache)
	parent, base := filepath.Split(dir)
	if complete(dir, c) {
		return dir, nil
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return "", fmt.Errorf("create cache directory of %s: %w", c.name, err)
	}
	unlock, err := b.lock(ctx, filepath.Join(parent, "."+base+".lock"), c)
	if err != nil {
		return "", err
	}
	defer unlock()
	if complete(dir, c) {
		return dir, nil
	}
	// Left by a run that was killed: the lock is held, so no other process builds here.
	unfinished := "." + base + ".building-"
	if err := removeAll(parent, unfinished+"*"); err != nil {
		return "", err
	}
	work, err := os.MkdirTemp(parent, unfinished)
	if err != nil {
		return "", fmt.Errorf("create build directory of %s: %w", c.name, err)
	}
	defer os.RemoveAll(work)
	made := filepath.Join(work, "out")
	if given, err := b.take(ctx, c, made); err != nil {
		return "", fmt.Errorf("copy %s %s from %s (correct the directory, or unset %s to compile it): %w",
			c.name, c.version, os.Getenv(givenVariable), givenVariable, err)
	} else if !given {
		if err := b.build(ctx, c, work, made, step); err != nil {
			return "", fmt.Errorf("build %s %s: %w", c.name, c.version, err)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return "", fmt.Errorf("remove incomplete %s: %w", dir, err)
	}
	if err := os.Rename(made, dir); err != nil {
		return "", fmt.Errorf("move %s into the cache: %w", c.name, err)
	}
	return dir, nil
}

func (c component) dir(cache string) string { return filepath.Join(cache, c.name, c.version+c.variant) }

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
		for _, name := range program.names {
			if info, err := os.Stat(filepath.Join(dir, name)); err != nil || !info.Mode().IsRegular() {
				return false
			}
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
	if err := os.Mkdir(out, 0o755); err != nil {
		return fmt.Errorf("create work directory: %w", err)
	}
	if planned := b.plans[c.dir(b.cache)]; planned != nil {
		if err := planned.write(work, c); err != nil {
			return err
		}
	} else {
		b.progress.Say("%s %s %s: fetching its Go modules", step, c.name, c.version)
		if _, err := b.plan(ctx, work, c); err != nil {
			return err
		}
	}
	for i, program := range c.packages {
		label := fmt.Sprintf("%s %s %s: building %s (%d/%d)", step, c.name, c.version, strings.Join(program.names, ", "), i+1, len(c.packages))
		if err := b.buildProgram(ctx, c, program, work, out, label); err != nil {
			return err
		}
	}
	return nil
}

func (b builder) buildProgram(ctx context.Context, c component, program program, work, out, label string) error {
	b.progress.Say("%s", label)
	var output progress.Tail
	stop := b.progress.Beat(func() string {
		left := ""
		if c.shared {
			left = "; " + b.work.String()
		}
		return fmt.Sprintf("%s: compiled %d packages%s", label, output.Lines(), left)
	})
	defer stop()
	first := filepath.Join(out, program.names[0])
	args := append([]string{"build", "-v", "-mod=mod", "-ldflags", "-s -w" + c.linkFlags, "-o", first}, gotool.BuildFlags(c.tags)...)
	if c.shared {
		for _, pattern := range notInlined {
			args = append(args, "-gcflags="+pattern+"="+gotool.CompilerFlags+" -l")
		}
	}
	cmd := goTool(ctx, c, work, append(args, program.path)...)
	to := io.MultiWriter(&output, b.work)
	cmd.Stdout, cmd.Stderr = to, to
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", program.path, err, &output)
	}
	for _, name := range program.names[1:] {
		if err := os.Link(first, filepath.Join(out, name)); err != nil {
			return fmt.Errorf("give %s another name: %w", program.names[0], err)
		}
	}
	return nil
}

// download runs a go command that may need the network, and again if it fails. It does not use retry of client-go, which would have to be
// compiled before hack/cmd/programs can report any progress.
func download(ctx context.Context, c component, work string, args ...string) (out string, err error) {
	for try := range 4 {
		if try > 0 {
			select {
			case <-ctx.Done():
			case <-time.After(5 * time.Second):
			}
		}
		if out, err = goCommand(ctx, c, work, args...); err == nil || ctx.Err() != nil {
			break
		}
	}
	return out, err
}

func goTool(ctx context.Context, c component, work string, args ...string) *exec.Cmd {
	cgo := "CGO_ENABLED=0"
	if c.shared {
		cgo = "CGO_ENABLED=1"
	}
	cmd := gotool.Command(ctx, filepath.Join(work, "tmp"), append([]string{cgo, "GOWORK=off", "GOFLAGS="}, c.env...), args...)
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
