// SPDX-License-Identifier: Apache-2.0

// Command kubectl-gpu is the kubectl plugin "kubectl gpu": who has which GPU, why a pod waits for one, and a picture of
// a node. It also takes GPUs out of service.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr})
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, streams genericiooptions.IOStreams) error {
	flags := genericclioptions.NewConfigFlags(true)
	p := &plugin{streams: streams, style: styleOf(os.Stdout, os.Getenv), connect: connectWith(flags), kubectl: runKubectl}
	root := p.command()
	flags.AddFlags(root.PersistentFlags())
	root.SetArgs(args)
	return root.ExecuteContext(ctx)
}
