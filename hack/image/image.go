// SPDX-License-Identifier: Apache-2.0

// Package image builds Tandem's container image without a container engine. It is the only way to build it. The image has
// the programs, nvidia-cdi-hook, and the C library that the agent is linked against: the agent loads the driver's
// libnvidia-ml.so.1 with dlopen, so it cannot be static. C library and certificates are files of Debian packages whose hashes
// this package has, and the label libcLabel names the release. The image has no base image, so no other C library is ever
// involved. The result can be imported (containerd, Docker) or pushed. Equal inputs give the same digest. A build needs a Go
// toolchain and a C compiler for each architecture, and root only to install that compiler.
package image

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/tandem-gpu/tandem/hack/filelock"
	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/progress"
)

// DefaultRef is the name under which the tarball is imported when Options.Ref is empty. It names no registry that
// exists: use it with imagePullPolicy Never.
const DefaultRef = "docker.io/local/tandem:dev"

// Options says what to build. The zero value builds the agent of the module in the working directory for this machine's
// architecture.
type Options struct {
	// Arch is amd64 or arm64 (GOARCH). Push and BuildIndex ignore it.
	Arch string
	// Architectures are those of an index, in its order: Architectures() where nil.
	Architectures []string
	// Version is the release the binary and the image call themselves; "dev" when empty (Push: the tag).
	Version string
	// Commit is the git commit; when empty git is asked, and a tree without git has none.
	Commit string
	// Out is the directory for the results, made if missing; bin/image below Root when empty.
	Out string
	// Ref is the name the image is imported under.
	Ref string
	// Package is the agent's main package, ./cmd/kubelet-plugin when empty; ControllerPackage the controller's,
	// ./cmd/controller.
	Package           string
	ControllerPackage string
	// Root is the module's root directory; the module around the working directory when empty.
	Root string
	// Overlay is a file for go build -overlay, by which a test of the tests replaces sources; none when empty.
	Overlay string
	// Pinned fails where the pinned Debian packages cannot be used, instead of using the files of this machine.
	Pinned bool
	// Progress gets one line a step; nil is silence.
	Progress io.Writer
}

// Build makes the image for one architecture and returns the path of its tarball and the digest of its manifest. The
// tarball is an OCI layout that `ctr images import` and `docker load` take. Nothing is rebuilt or rewritten when the
// inputs are those of the tarball already there. Builds in one directory take turns, also those of other processes.
func Build(ctx context.Context, o Options) (tarball, digest string, err error) {
	if err := o.complete(ctx); err != nil {
		return "", "", err
	}
	unlock, err := lock(ctx, o)
	if err != nil {
		return "", "", err
	}
	defer unlock()
	c, err := collect(ctx, o)
	if err != nil {
		return "", "", err
	}
	return c.save()
}

// lock waits for the turn to build in a directory.
func lock(ctx context.Context, o Options) (unlock func(), err error) {
	start := time.Now()
	stop := progress.Every(progress.Heartbeat, func() {
		fmt.Fprintf(o.Progress, "waiting for another build in %s for %s\n", o.Out, time.Since(start).Round(time.Second))
	})
	defer stop()
	if unlock, err = filelock.Wait(ctx, filepath.Join(o.Out, ".lock")); err != nil {
		return nil, fmt.Errorf("wait for another build in %s: %w", o.Out, err)
	}
	return unlock, nil
}

// contents is what goes into the image of one architecture, layer by layer: what changes least comes first, so that a
// new agent moves one layer only.
type contents struct {
	options Options
	// libc is the release of the C library among the files, as the library itself reports it.
	libc   string
	pinned bool
	layers [][]file
}

// collect compiles and gathers; it compresses nothing yet.
func collect(ctx context.Context, o Options) (contents, error) {
	programs, err := compile(ctx, o)
	if err != nil {
		return contents{}, err
	}
	b, err := chooseBase(ctx, o, programs.Agent, programs.Controller)
	if err != nil {
		return contents{}, err
	}
	files, err := b.collect(o.Arch, programs.Agent)
	if err != nil {
		return contents{}, err
	}
	libc, err := libcRelease(files)
	if err != nil {
		return contents{}, err
	}
	licences, err := licenceFiles(ctx, o, b, programs.Agent, programs.Controller, programs.Daemon, programs.Simulated, programs.Hook)
	if err != nil {
		return contents{}, err
	}
	return contents{options: o, libc: libc, pinned: b.pinned, layers: [][]file{
		files,
		{{path: "usr/bin/nvidia-cdi-hook", source: programs.Hook, mode: 0o755}},
		{
			{path: "usr/bin/mps-daemon", source: programs.Daemon, mode: 0o755},
			{path: "usr/bin/simulated-driver", source: programs.Simulated, mode: 0o755},
		},
		{{path: "usr/bin/controller", source: programs.Controller, mode: 0o755}},
		append(licences, file{path: "usr/bin/kubelet-plugin", source: programs.Agent, mode: 0o755}),
	}}, nil
}

func (c contents) tarball() string {
	return filepath.Join(c.options.Out, "tandem-"+c.options.Arch+".tar")
}

// save writes the tarball unless it is there already.
func (c contents) save() (tarball, digest string, err error) {
	fingerprint, err := c.fingerprint()
	if err != nil {
		return "", "", err
	}
	o := c.options
	if digest, ok := readStamp(c.tarball(), fingerprint); ok {
		fmt.Fprintf(o.Progress, "image %s (%s) unchanged in %s: %s\n", o.Ref, o.Arch, c.tarball(), digest)
		return c.tarball(), digest, nil
	}
	img, err := c.assemble()
	if err != nil {
		return "", "", err
	}
	return c.write(img, fingerprint)
}

func (c contents) write(img v1.Image, fingerprint string) (tarball, digest string, err error) {
	hash, err := img.Digest()
	if err != nil {
		return "", "", fmt.Errorf("digest image: %w", err)
	}
	o := c.options
	if err := writeTarball(c.tarball(), o.Ref, img); err != nil {
		return "", "", fmt.Errorf("write %s: %w", c.tarball(), err)
	}
	if err := writeStamp(c.tarball(), fingerprint, hash.String()); err != nil {
		return "", "", err
	}
	fmt.Fprintf(o.Progress, "image %s (%s) written to %s: %s\n", o.Ref, o.Arch, c.tarball(), hash)
	return c.tarball(), hash.String(), nil
}

func (o *Options) complete(ctx context.Context) error {
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	if o.Arch == "" {
		o.Arch = runtime.GOARCH
	}
	if _, err := targetFor(o.Arch); err != nil {
		return err
	}
	if o.Architectures == nil {
		o.Architectures = Architectures()
	}
	if o.Root == "" {
		root, err := gotool.Root(ctx)
		if err != nil {
			return err
		}
		o.Root = root
	}
	if o.Version == "" {
		o.Version = "dev"
	}
	if o.Commit == "" {
		o.Commit = gitCommit(ctx, o.Root)
	}
	if o.Out == "" {
		o.Out = filepath.Join(o.Root, "bin", "image")
	}
	if o.Ref == "" {
		o.Ref = DefaultRef
	}
	if o.Package == "" {
		o.Package = "./cmd/kubelet-plugin"
	}
	if o.ControllerPackage == "" {
		o.ControllerPackage = "./cmd/controller"
	}
	out, err := filepath.Abs(o.Out)
	if err != nil {
		return fmt.Errorf("resolve %s: %w", o.Out, err)
	}
	o.Out = out
	if err := os.MkdirAll(o.Out, 0o755); err != nil {
		return fmt.Errorf("make output directory: %w", err)
	}
	return nil
}

// gitCommit is empty outside a git checkout: a source archive builds too.
func gitCommit(ctx context.Context, root string) string {
	git := func(args ...string) (string, error) {
		out, err := exec.CommandContext(ctx, "git", append([]string{"--no-optional-locks", "-C", root}, args...)...).Output()
		return strings.TrimSpace(string(out)), err
	}
	commit, err := git("rev-parse", "--short=12", "HEAD")
	if err != nil {
		return ""
	}
	if changes, err := git("status", "--porcelain"); err != nil || changes != "" {
		commit += "-dirty"
	}
	return commit
}
