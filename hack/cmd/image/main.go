// SPDX-License-Identifier: Apache-2.0

// Command image builds Tandem's container image without a container engine, or builds and pushes it for all
// architectures. `image build` writes a tarball to import, `image push` wants -image registry/repository:tag.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/tandem-gpu/tandem/hack/image"
)

const usage = `usage: image build [-arch amd64|arm64|all] [-ref NAME:TAG] [flags]
       image push -image REGISTRY/REPOSITORY:TAG [flags]
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "image:", err)
		}
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 || (args[0] != "build" && args[0] != "push") {
		fmt.Fprint(os.Stderr, usage)
		return flag.ErrHelp
	}
	o := image.Options{Progress: os.Stderr}
	flags := flag.NewFlagSet("image "+args[0], flag.ContinueOnError)
	flags.StringVar(&o.Arch, "arch", "", "amd64, arm64, or all (default: this machine's)")
	flags.StringVar(&o.Version, "version", "", "version the binary reports (default dev; push: the tag)")
	flags.StringVar(&o.Out, "out", "", "directory for the results (default bin/image)")
	flags.StringVar(&o.Ref, "ref", "", "name the tarball is imported under (default "+image.DefaultRef+")")
	flags.StringVar(&o.Package, "package", "", "main package of the agent (default ./cmd/kubelet-plugin)")
	anyBase := flags.Bool("any-base", false, "without access to Debian's packages, take this machine's C library and certificates")
	ref := flags.String("image", "", "push: registry/repository:tag to push to")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	o.Pinned = !*anyBase
	switch {
	case args[0] == "push" && *ref == "":
		return errors.New("-image is not set: say where to push, for example `make image-push " +
			"IMAGE=registry.example.com/gpu/tandem:0.1.0`")
	case args[0] == "push":
		o.Arch = ""
		return push(ctx, o, *ref)
	case o.Arch == "all":
		o.Arch = ""
		return report(image.BuildIndex(ctx, o))
	default:
		return report(image.Build(ctx, o))
	}
}

func push(ctx context.Context, o image.Options, ref string) error {
	digest, err := image.Push(ctx, o, ref)
	return report(ref, digest, err)
}

// report writes the result to standard output, where scripts read it; progress goes to standard error.
func report(what, digest string, err error) error {
	if err != nil {
		return err
	}
	fmt.Println(what, digest)
	return nil
}
