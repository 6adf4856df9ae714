// SPDX-License-Identifier: Apache-2.0

// Command kubelet-plugin is Tandem's node agent: it serves the GPUs of its node to ResourceClaims and to nvidia.com/gpu
// limits. This package only wires; everything it wires lies below it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"syscall"

	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/stacks"
	"github.com/tandem-gpu/tandem/internal/version"
	"github.com/tandem-gpu/tandem/pkg/agent"
	"github.com/tandem-gpu/tandem/simulated/simnode"
)

func main() {
	err := run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)
	klog.Flush()
	switch {
	case errors.Is(err, flag.ErrHelp):
	case agent.Restarts(err):
		err = restart()
		fallthrough
	case err != nil:
		fmt.Fprintf(os.Stderr, "kubelet-plugin: %v\n", err)
		os.Exit(1)
	}
}

// restart replaces this process by a new one. It returns only on an error. /proc/self/exe would change the name of the process.
func restart() error {
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find the program to restart: %w", err)
	}
	return fmt.Errorf("restart %s: %w", program, syscall.Exec(program, os.Args, os.Environ()))
}

// commands follows the flags in the output of --help.
const commands = `
Other commands:
  kubelet-plugin inspect   show what the agent finds on this node
  kubelet-plugin simulate  create the files of a simulated node
  kubelet-plugin stacks    have the agent of this container log the stacks of its goroutines
  kubelet-plugin version   print the version
`

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) > 0 {
		switch args[0] {
		case "simulate":
			return simnode.Make(args[1:], stderr)
		case "inspect":
			return inspect(ctx, args[1:], stdout, stderr)
		case "stacks":
			return stacks.Request("kubelet-plugin")
		case "version":
			_, err := fmt.Fprintln(stdout, version.String())
			return err
		}
	}
	c, err := config.Load(args, os.LookupEnv, stderr)
	if errors.Is(err, flag.ErrHelp) {
		fmt.Fprint(stderr, commands)
	}
	if err != nil {
		return err
	}
	if err := c.CheckDirectories(); err != nil {
		return err
	}
	logger, err := newLogger(c.Verbosity)
	if err != nil {
		return err
	}
	defer stacks.OnSignal(stderr)()
	ctx, stop := signal.NotifyContext(klog.NewContext(ctx, logger), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// A second signal ends the process at once.
	context.AfterFunc(ctx, stop)
	logger.Info("Starting", "version", version.String(), "config", c)
	a, err := agent.New(agent.Options{
		Config: c, OpenDriver: simnode.Options,
		Reload: func(name string) (config.Chosen, error) { return config.LoadChosen(args, os.LookupEnv, name) },
	})
	if err != nil {
		return err
	}
	return a.Run(ctx)
}

// inspect takes the flags of the agent in whose container it runs, and its own.
func inspect(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	c, err := config.LoadInspect(slices.Concat(agent.Flags("/proc"), args), os.LookupEnv, stderr)
	if err != nil {
		return err
	}
	logger, err := newLogger(c.Verbosity)
	if err != nil {
		return err
	}
	return agent.Inspect(klog.NewContext(ctx, logger), c, simnode.Options, stdout)
}

func newLogger(verbosity int) (klog.Logger, error) {
	if err := new(klog.Level).Set(strconv.Itoa(verbosity)); err != nil { // it sets klog's own level
		return klog.Logger{}, fmt.Errorf("set log verbosity: %w", err)
	}
	return klog.Background(), nil
}
