// SPDX-License-Identifier: Apache-2.0

// Command scale measures Tandem on a fleet of simulated nodes (test/scale) and prints a table and one line of JSON per figure. It needs root.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/tandem-gpu/tandem/test/figure"
	"github.com/tandem-gpu/tandem/test/scale"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:])
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "scale:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	o := scale.Options{Progress: os.Stderr}
	flags := flag.NewFlagSet("scale", flag.ContinueOnError)
	flags.IntVar(&o.Nodes, "nodes", 0, "`number` of nodes (default 100)")
	flags.IntVar(&o.Rate, "rate", 0, "`pods` created in a second (default 20)")
	flags.DurationVar(&o.Traffic, "traffic", 0, "`time` for which they are created (default 20s)")
	flags.StringVar(&o.Curves, "curves", "", "`directory` for the curves (default: none are drawn)")
	log := flags.String("log", "", "`file` for what the agents log (default: none)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if *log != "" {
		file, err := os.Create(*log)
		if err != nil {
			return fmt.Errorf("write log: %w", err)
		}
		defer file.Close()
		o.Log = file
	}
	figures, err := scale.Run(ctx, o)
	if len(figures) > 0 {
		err = errors.Join(err, figure.Write(os.Stdout, figures))
	}
	return err
}
