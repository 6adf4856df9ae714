// SPDX-License-Identifier: Apache-2.0

// Command demo shows Tandem at work on a machine without a GPU: it starts a real Kubernetes cluster of one node with eight
// simulated H100s, installs the chart with Helm, applies examples/, and prints who got which GPU as the containers see it.
// `demo down` removes everything. It needs root, and tests nothing that the tests do not test.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"golang.org/x/sync/errgroup"

	"github.com/tandem-gpu/tandem/hack/binaries"
	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/image"
	"github.com/tandem-gpu/tandem/hack/install"
)

const usage = `usage: demo [-dir DIR] [-kubernetes VERSION] [-record PATH]    start a cluster, install Tandem, show who gets which GPU; needs root
       demo [-dir DIR] shell [COMMAND ...]                       a shell with kubectl, kubectl gpu and helm, or one command in it
       demo [-dir DIR] ui                                        serve the page of kubectl gpu ui at an address of this machine
       demo [-dir DIR] down                                      remove everything of it
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "demo:", err)
		}
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.Usage = func() { fmt.Fprint(os.Stderr, usage) }
	cache, err := binaries.CacheDir()
	if err != nil {
		return err
	}
	dir := flags.String("dir", filepath.Join(cache, "clusters", "demo"), "directory of the cluster")
	version := flags.String("kubernetes", binaries.DefaultKubernetes, "Kubernetes version")
	record := flags.String("record", "", "also write what is printed to `PATH`.cast, for asciinema, and PATH.svg")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("needs root, for namespaces, mounts and device nodes: run it as root or with sudo")
	}
	// Without the lock: they may run while demo or down does.
	switch {
	case flags.NArg() == 1 && flags.Arg(0) == "ui":
		return ui(ctx, *dir)
	case flags.Arg(0) == "shell":
		return shell(ctx, *dir, flags.Args()[1:])
	}
	unlock, err := lock(*dir)
	if err != nil {
		return err
	}
	defer unlock()
	switch {
	case flags.NArg() == 0:
		return showTo(ctx, *record, cache, func(out io.Writer) error { return show(ctx, out, *dir, *version) })
	case flags.NArg() == 1 && flags.Arg(0) == "down":
		return down(ctx, *dir, os.Stderr)
	}
	flags.Usage()
	return flag.ErrHelp
}

// down is idempotent. It takes the logs of a failure, too.
func down(ctx context.Context, dir string, progress io.Writer) error {
	if err := os.RemoveAll(dir + "-logs"); err != nil {
		return fmt.Errorf("remove logs: %w", err)
	}
	c, err := cluster.Open(dir, progress)
	if errors.Is(err, cluster.ErrNoCluster) {
		return nil
	}
	if err != nil {
		return err
	}
	return c.Stop(ctx)
}

// showTo gives show the standard output, and records what it writes if record is a path.
func showTo(ctx context.Context, record, cache string, show func(io.Writer) error) error {
	if record == "" {
		return show(os.Stdout)
	}
	root, err := gotool.Root(ctx)
	if err != nil {
		return err
	}
	recorded := newRecording(root, cache)
	if err := show(io.MultiWriter(os.Stdout, recorded)); err != nil {
		return err
	}
	return recorded.save(record)
}

// show runs the demo. An error leaves the cluster as it is, to be looked into.
func show(ctx context.Context, out io.Writer, dir, version string) error {
	steps := newSteps(out, 7)
	c, err := prepare(ctx, steps, dir, version)
	if err == nil {
		err = present(ctx, c, steps, out)
	}
	if err != nil && c != nil {
		fmt.Fprintln(os.Stderr, "The cluster was left as it is, to be looked into; make demo-down removes it.")
		if ctx.Err() == nil {
			err = errors.Join(err, keepLogs(ctx, c, dir+"-logs"))
		}
	}
	return err
}

func present(ctx context.Context, c *cluster.Cluster, steps *steps, out io.Writer) error {
	d, err := newDemo(ctx, c, steps, out)
	if err != nil {
		return err
	}
	if err := d.partition(ctx); err != nil {
		return err
	}
	return d.run(ctx)
}

// keepLogs copies what can be had; a cluster that did not come up lacks some.
func keepLogs(ctx context.Context, c *cluster.Cluster, dir string) error {
	err := c.CollectLogs(ctx, dir)
	fmt.Fprintln(os.Stderr, "Logs were copied to", dir)
	return err
}

// prepare answers a cluster with Tandem on it. Beside an error it answers the cluster, too, once there may be one.
func prepare(ctx context.Context, steps *steps, dir, version string) (*cluster.Cluster, error) {
	steps.next("programs: Kubernetes %s and what it needs (built once, minutes; then cached)", version)
	if _, err := binaries.Ensure(ctx, binaries.Options{Kubernetes: []string{version}, Progress: steps}); err != nil {
		return nil, err
	}
	steps.next("cluster: one node; beside it, Tandem's image")
	if err := down(ctx, dir, steps); err != nil {
		return nil, fmt.Errorf("remove the demo before: %w", err)
	}
	c, err := cluster.New(cluster.Config{Dir: dir, KubernetesVersion: version, Progress: steps})
	if err != nil {
		return nil, err
	}
	var tarball string
	group, building := errgroup.WithContext(ctx)
	group.Go(func() error { return c.Start(building) })
	group.Go(func() (err error) {
		tarball, _, err = image.Build(building, image.Options{Progress: steps})
		return err
	})
	if err := group.Wait(); err != nil {
		return c, err
	}
	steps.next("Tandem: helm install with eight simulated H100s")
	root, err := gotool.Root(ctx)
	if err != nil {
		return c, err
	}
	return c, install.Tandem(ctx, c, install.Options{
		Profile: install.DefaultProfile, Image: tarball, Progress: steps, ValuesFiles: []string{filepath.Join(root, "examples", partitionValues)},
	})
}
