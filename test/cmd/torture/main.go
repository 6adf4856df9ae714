// SPDX-License-Identifier: Apache-2.0

// Command torture attacks Tandem on a real one-node cluster of its own (test/torture). `torture selftest` proves that it would
// find what is broken, `torture down` removes what an interrupted run has left.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/hack/binaries"
	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/test/torture"
)

const usage = `usage: torture [-ops N] [-seed S] [-mig | -sharing] [-kubernetes V] [-budget 15m] [flags]    needs root
       torture -resume [-budget 15m] [-dir DIR]       go on where a run was interrupted
       torture -plan [-ops N] [-seed S]               print what a seed does, and do nothing
       torture selftest [-only NAME] [flags]          with Tandem mutated, faults must be found
       torture down [-dir DIR]                        remove the cluster of an interrupted run
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		if !errors.Is(err, flag.ErrHelp) && !errors.Is(err, errSaid) {
			fmt.Fprintln(os.Stderr, "torture:", err)
		}
		os.Exit(1)
	}
}

// errSaid is a failure that was told already: the last line belongs to the figures.
var errSaid = errors.New("failed")

// settings are the flags.
type settings struct {
	dir                string
	state              torture.State
	budget             time.Duration
	resume, keep, plan bool
	only               string
}

func run(ctx context.Context, args []string) error {
	verb := ""
	if len(args) > 0 && (args[0] == "selftest" || args[0] == "down") {
		verb, args = args[0], args[1:]
	}
	s, err := parse(args)
	if err != nil {
		return err
	}
	if s.plan {
		return printPlan(s.state)
	}
	if os.Geteuid() != 0 {
		return errors.New("needs root, for namespaces, mounts and device nodes: run it as root or with sudo")
	}
	unlock, err := torture.Lock(s.dir)
	if err != nil {
		return err
	}
	defer unlock()
	switch verb {
	case "down":
		return torture.Remove(ctx, s.dir)
	case "selftest":
		return selftest(ctx, s)
	}
	return attack(ctx, s)
}

func parse(args []string) (settings, error) {
	var s settings
	flags := flag.NewFlagSet("torture", flag.ContinueOnError)
	flags.Usage = func() { fmt.Fprint(os.Stderr, usage); flags.PrintDefaults() }
	flags.IntVar(&s.state.Ops, "ops", 1000, "operations")
	flags.Uint64Var(&s.state.Seed, "seed", 0, "seed of the plan; 0 draws one")
	flags.IntVar(&s.state.RoundSize, "round", 100, "operations between two quiet points")
	flags.IntVar(&s.state.InFlight, "in-flight", 6, "operations in flight at once")
	flags.StringVar(&s.state.Kubernetes, "kubernetes", binaries.DefaultKubernetes, "Kubernetes version")
	flags.BoolVar(&s.state.MIG, "mig", false, "on a machine with partitions")
	flags.BoolVar(&s.state.Sharing, "sharing", false, "with GPUs that several may have at once")
	flags.DurationVar(&s.budget, "budget", 0, "end well, at a quiet point, after this time at most, from when the cluster is up; 0 is no limit")
	flags.StringVar(&s.dir, "dir", filepath.Join(os.TempDir(), "tandem-torture"), "directory of cluster, state, trace and evidence")
	flags.BoolVar(&s.resume, "resume", false, "go on with the interrupted run in the directory")
	flags.BoolVar(&s.keep, "keep", false, "leave the cluster running at the end")
	flags.BoolVar(&s.plan, "plan", false, "print the operations and end")
	flags.StringVar(&s.only, "only", "", "selftest: the mutation to play")
	if err := flags.Parse(args); err != nil {
		return s, err
	}
	if flags.NArg() > 0 {
		return s, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if s.state.Ops < 1 || s.state.RoundSize < 1 || s.state.InFlight < 1 {
		return s, errors.New("-ops, -round and -in-flight must be positive")
	}
	if s.state.MIG && s.state.Sharing {
		return s, errors.New("-mig and -sharing exclude each other")
	}
	if s.state.Sharing && !torture.Shares(s.state.Kubernetes) {
		return s, fmt.Errorf("-sharing: Kubernetes %s shares no GPU out to claims, 1.36 is the first that does", s.state.Kubernetes)
	}
	if s.state.Seed == 0 {
		s.state.Seed = torture.DrawSeed(func() uint64 { return 1 + rand.Uint64N(1_000_000_000) }, mixOf(s.state))
	}
	return s, nil
}

func printPlan(state torture.State) error {
	for number := 0; number*state.RoundSize < state.Ops; number++ {
		for _, op := range torture.PlanRound(state.Seed, number, state.RoundSize, mixOf(state)).Ops {
			if op.Index < state.Ops {
				fmt.Println(op)
			}
		}
	}
	return nil
}

func mixOf(state torture.State) torture.Mix {
	if state.MIG {
		return torture.Usual().WithMIG()
	}
	if state.Sharing {
		return torture.Usual().WithSharing()
	}
	return torture.Usual()
}

// attack runs, or goes on with, one run. Interrupted, it leaves the cluster for another that resumes.
func attack(ctx context.Context, s settings) error {
	options := torture.Options{Dir: s.dir, State: s.state, Newer: torture.Newer, Out: os.Stdout}
	if s.resume {
		state, err := torture.ReadState(s.dir)
		if err != nil {
			return err
		}
		options.State = state
	}
	state := options.State
	options.Mix = mixOf(state)
	fmt.Printf("torture: seed=%d ops=%d kubernetes=%s in %s\n", state.Seed, state.Ops, state.Kubernetes, s.dir)
	c, err := start(ctx, s, state)
	if err != nil {
		return fmt.Errorf("start the cluster (`make torture-down` removes it): %w", err)
	}
	if s.budget > 0 {
		options.Deadline = time.Now().Add(s.budget)
	}
	counters, podState := torture.Run(ctx, c, options)
	clean := context.WithoutCancel(ctx)
	failed := podState != nil
	if failed && ctx.Err() == nil {
		to, err := torture.CollectLogs(clean, c, s.dir)
		fmt.Println("torture: logs were copied to", to)
		podState = errors.Join(podState, err)
	}
	over := !failed || errors.Is(podState, torture.ErrFaults) || errors.Is(podState, torture.ErrNothingTested)
	switch {
	case !over:
		fmt.Printf("torture: cut short; the cluster was left as it is: make torture RESUME=1 DIR=%s goes on, make torture-down DIR=%s removes it\n", s.dir, s.dir)
	case !s.keep:
		podState = errors.Join(podState, torture.Remove(clean, s.dir))
	}
	if podState != nil {
		fmt.Println("torture: failed:", podState)
		podState = errSaid
	}
	fmt.Println("torture:", counters.HealLine())
	fmt.Println("torture:", counters.DrainLine())
	fmt.Println(counters.Line(state.Seed))
	return podState
}

// start makes or finds the cluster, and writes down what is to be done on it: whatever interrupts, another run goes on.
func start(ctx context.Context, s settings, state torture.State) (*cluster.Cluster, error) {
	var c *cluster.Cluster
	var err error
	if s.resume {
		c, err = torture.Reopen(ctx, s.dir, state, os.Stdout)
	} else {
		c, err = torture.Fresh(ctx, s.dir, state, "", os.Stdout)
	}
	return c, errors.Join(err, state.Write(s.dir))
}

func selftest(ctx context.Context, s settings) error {
	mutations := torture.Mutations()
	if s.only != "" {
		mutations = slices.DeleteFunc(mutations, func(mutation torture.Mutation) bool { return mutation.Name != s.only })
	}
	fmt.Printf("selftest: seed=%d kubernetes=%s in %s\n", s.state.Seed, s.state.Kubernetes, s.dir)
	return torture.Selftest(ctx, s.dir, s.state, mutations, os.Stdout)
}
