// SPDX-License-Identifier: Apache-2.0

// Command kubectl-gpu is the kubectl plugin "kubectl gpu": who has which GPU, why a pod waits for one, and a picture of
// a node. It also takes GPUs out of service, and moves nodes from NVIDIA's software to Tandem.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/tandem-gpu/tandem/internal/terminal"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr})
	stop()
	if err != nil {
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, streams genericiooptions.IOStreams) error {
	flags := genericclioptions.NewConfigFlags(true)
	p := &plugin{
		streams: streams, style: styleOf(os.Stdout, os.Getenv), errors: styleOf(os.Stderr, os.Getenv), connect: connectWith(flags), kubectl: runKubectl,
	}
	root := p.command()
	flags.AddFlags(root.PersistentFlags())
	return p.execute(ctx, root, args)
}

// execute runs a command line and prints its error, which may contain text from the cluster.
func (p *plugin) execute(ctx context.Context, root *cobra.Command, args []string) error {
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err != nil {
		fmt.Fprint(p.streams.ErrOut, terminal.Lines(fmt.Sprintf("error: %v\n", err), !p.errors.UTF8))
	}
	return err
}
