// SPDX-License-Identifier: Apache-2.0

// Command bench measures the agent (test/bench) and prints a table and one line of JSON a figure. It needs root.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/tandem-gpu/tandem/test/bench"
	"github.com/tandem-gpu/tandem/test/figure"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:])
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	o := bench.Options{Progress: os.Stderr}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.StringVar(&o.Agent, "agent", "", "`path` of the agent to measure (default: compile it as for the image)")
	flags.StringVar(&o.Against, "against", "", "`path` of another agent, or of a directory with its source, to compare with call by call")
	flags.IntVar(&o.Calls, "calls", 0, "least `number` of calls of each kind (default 320)")
	flags.IntVar(&o.Starts, "starts", 0, "`number` of starts (default 12)")
	flags.DurationVar(&o.Idle, "idle", 0, "`time` before idle memory is read (default 3m)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	figures, err := bench.Run(ctx, o)
	if len(figures) > 0 {
		err = errors.Join(figure.Write(os.Stdout, figures), err)
	}
	return err
}
