// SPDX-License-Identifier: Apache-2.0

// Command programs provides the programs of a cluster, compiles the demo and what the demo compiles, and reports its progress. It has few
// dependencies, so it is compiled quickly.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/hack/binaries"
	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/progress"
)

// afterwards is how long the demo takes once everything is compiled.
const afterwards = 40 * time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "programs:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	root, err := gotool.Root(ctx)
	if err != nil {
		return err
	}
	tmp, err := os.MkdirTemp("", "programs-")
	if err != nil {
		return fmt.Errorf("make build directory: %w", err)
	}
	defer os.RemoveAll(tmp)
	t := tandem{root: root, tmp: tmp, log: progress.New(os.Stdout), work: progress.NewWork(afterwards)}
	if _, err := binaries.Ensure(ctx, binaries.Options{
		Progress: os.Stdout, Work: t.work, Planned: func() error { return t.plan(ctx) },
	}); err != nil {
		return err
	}
	return t.compile(ctx)
}

// tandem is what is compiled of this checkout.
type tandem struct {
	root, tmp string
	log       *progress.Log
	work      *progress.Work
}

// targets are the demo, the plugin of kubectl, and those programs of the demo's image that are built with cgo. hack/image builds the others,
// without cgo.
var targets = []string{"./test/cmd/demo", "./cli/kubectl-gpu", "./cmd/kubelet-plugin", "./cmd/controller"}

func (t tandem) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := gotool.Command(ctx, t.tmp, []string{"CGO_ENABLED=1"}, append(args, targets...)...)
	cmd.Dir = t.root
	return cmd
}

func (t tandem) plan(ctx context.Context) error {
	cmd := t.command(ctx, append([]string{"list", "-deps", "-f", gotool.ListFormat}, gotool.BuildFlags()...)...)
	var failure progress.Tail
	cmd.Stderr = &failure
	listed, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("list packages of Tandem: %w\n%s", err, &failure)
	}
	t.work.Add(gotool.Packages(string(listed)))
	return nil
}

// compile fills the build cache, and links nothing.
func (t tandem) compile(ctx context.Context) error {
	var output progress.Tail
	stop := t.log.Beat(func() string { return "compiling Tandem; " + t.work.String() })
	defer stop()
	cmd := t.command(ctx, append([]string{"list", "-export", "-v"}, gotool.BuildFlags()...)...)
	to := io.MultiWriter(&output, t.work)
	cmd.Stdout, cmd.Stderr = to, to
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("compile Tandem: %w\n%s", err, &output)
	}
	return nil
}
