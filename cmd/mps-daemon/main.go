// SPDX-License-Identifier: Apache-2.0

// Command mps-daemon runs one MPS control daemon of the driver, and is the probe command of its pod. The controller creates the pod.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/version"
	"github.com/tandem-gpu/tandem/pkg/mps"
)

func main() {
	err := run(context.Background(), os.Args[1:], os.Stdout)
	klog.Flush()
	if err != nil {
		fmt.Fprintf(os.Stderr, "mps-daemon: %v\n", err)
		os.Exit(1)
	}
}

var errUsage = errors.New("usage: mps-daemon run | ready | live | version")

func run(ctx context.Context, args []string, stdout io.Writer) error {
	if len(args) != 1 {
		return errUsage
	}
	if args[0] == "version" {
		_, err := fmt.Fprintln(stdout, version.String())
		return err
	}
	d, err := mps.FromEnvironment()
	if err != nil {
		return err
	}
	switch args[0] {
	case "run":
		ctx, stop := signal.NotifyContext(klog.NewContext(ctx, klog.Background()), os.Interrupt, syscall.SIGTERM)
		defer stop()
		return d.Run(ctx)
	case "ready":
		return d.Ready()
	case "live":
		return d.Answers(ctx)
	}
	return errUsage
}
