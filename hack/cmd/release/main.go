// SPDX-License-Identifier: Apache-2.0

// Command release makes the files of a release (build), makes them twice and compares (check), or pushes image and chart of a release that
// it made (push). It prints names with digests to standard output.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/release"
)

const usage = `usage: release build -version vX.Y.Z [-out DIR] [-registry HOST/PATH] [flags]
       release check -version vX.Y.Z [-out DIR] [-registry HOST/PATH] [flags]
       release push -out DIR
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "release:", err)
		}
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	verbs := map[string]func(context.Context, release.Options) error{"build": build, "check": check, "push": push}
	if len(args) == 0 || verbs[args[0]] == nil {
		fmt.Fprint(os.Stderr, usage)
		return flag.ErrHelp
	}
	o := release.Options{Progress: os.Stderr}
	flags := flag.NewFlagSet("release "+args[0], flag.ContinueOnError)
	flags.StringVar(&o.Version, "version", "", "version with v, such as v0.2.0; CHANGELOG.md and Chart.yaml must have it")
	flags.StringVar(&o.Out, "out", "", "directory of the release (default bin/release/VERSION)")
	flags.StringVar(&o.Registry, "registry", "", "host and path of the image and the chart (default "+release.DefaultRegistry+")")
	flags.BoolVar(&o.AnyToolchain, "any-toolchain", false, "build with the Go, compilers and C library that are here: for rehearsals")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if args[0] != "push" && o.Version == "" {
		return errors.New("-version is not set: say what to release, for example `make release VERSION=v0.2.0`")
	}
	root, err := gotool.Root(ctx)
	if err != nil {
		return err
	}
	o.Root = root
	if o.Out == "" && args[0] == "push" {
		return errors.New("-out is not set: say which release to push")
	}
	if o.Out == "" {
		o.Out = filepath.Join(root, "bin", "release", o.Version)
	}
	return verbs[args[0]](ctx, o)
}

func build(ctx context.Context, o release.Options) error { return report(release.Build(ctx, o)) }

func check(ctx context.Context, o release.Options) error { return report(release.Check(ctx, o)) }

func report(d release.Description, err error) error {
	if err != nil {
		return err
	}
	fmt.Println("image", d.Image+"@"+d.ImageDigest)
	return nil
}

func push(ctx context.Context, o release.Options) error {
	published, err := release.Publish(ctx, o.Out, o.Progress)
	if err != nil {
		return err
	}
	fmt.Println("image", published.Image)
	fmt.Println("chart", published.Chart)
	return nil
}
