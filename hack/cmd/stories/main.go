// SPDX-License-Identifier: Apache-2.0

// Command stories plays the stories of test/e2e or test/contract on several clusters at once: they wait more than they compute. Each cluster
// takes one story after the other from one queue; its lines begin with its letter. It fails unless all stories were played.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/leftovers"
	"github.com/tandem-gpu/tandem/hack/results"
)

// converter makes events of what the stories' program prints.
const converter = "bin/hack/test2json"

// suite is a package of stories, by its directory: ./test/e2e.
type suite string

// name is what the stories are called in what is printed, and in the names of files.
func (s suite) name() string { return filepath.Base(string(s)) }

// program plays the stories.
func (s suite) program() string { return "bin/hack/" + s.name() + ".test" }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "stories:", err)
		}
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) (err error) {
	flags := flag.NewFlagSet("stories", flag.ContinueOnError)
	of := flags.String("of", "./test/e2e", "`directory` of the stories")
	race := flags.Bool("race", false, "compile the stories with the race detector")
	only := flags.String("run", "", "stories to play (`regexp`; one of a sub-story, with a slash, is played on one cluster)")
	clusters := flags.Int("clusters", 0, "clusters at once; 0 for one for each CPU, and more while the CPUs are idle")
	timeout := flags.Duration("timeout", 4*time.Hour, "most time for all")
	var part results.Shard
	flags.Var(&part, "shard", "`I/N`: the I-th part of N of the stories")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 || *clusters < 0 {
		return fmt.Errorf("want -clusters of 1 or more and no arguments, not %d and %q", *clusters, flags.Args())
	}
	ctx, cancel := context.WithTimeout(ctx, *timeout)
	defer cancel()
	stories := suite(*of)
	if err := stories.compile(ctx, *race); err != nil {
		return err
	}
	names, err := stories.list(ctx, *only)
	if err != nil {
		return err
	}
	if names = part.Of(names); len(names) == 0 {
		return fmt.Errorf("no story is in part %s", &part)
	}
	s, err := newStage(stories, names)
	if err != nil {
		return err
	}
	start := time.Now()
	if os.Geteuid() != 0 {
		err = errors.New("clusters of one's own need root")
	} else {
		err = s.playAll(ctx, names, *only, *clusters)
	}
	err = errors.Join(err, s.summarize(time.Since(start)))
	return errors.Join(err, s.close())
}

// playAll gives the stories to clusters, the longest first: no cluster is to have a long one left at the end.
func (s *stage) playAll(ctx context.Context, names []string, only string, clusters int) (err error) {
	r, err := leftovers.Begin(ctx, os.Stdout)
	if err != nil {
		return err
	}
	defer func() {
		// Not ctx: an interrupted run leaves nothing either.
		endCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Minute)
		defer cancel()
		err = errors.Join(err, r.End(endCtx))
	}()
	first, most := clusters, clusters
	if clusters == 0 {
		most = max(1, s.machine.carried())
		first = min(runtime.NumCPU(), most)
	}
	if _, kept := os.LookupEnv(keepVariable); kept || strings.Contains(only, "/") {
		first, most = 1, 1
	}
	first, most = min(first, len(names)), min(most, len(names))
	if most > 1 {
		if err := r.Raise(instancesOfAll); err != nil {
			s.printf("one cluster at once, which takes longer: several have more inotify instances than they may: %v", err)
			first, most = 1, 1
		}
	}
	took, err := readDurations()
	if err != nil {
		return err
	}
	s.printf("%d stories on %d to %d clusters", len(names), first, most)
	err = s.play(ctx, r, order(names, took), only, first, most)
	return errors.Join(err, took.add(s.took))
}

// summarize repeats failures at the end, where a reader of a long log looks first. It fails if stories were not played, or skipped without
// a known reason.
func (s *stage) summarize(took time.Duration) error {
	r := &s.results
	played, skipped, notPlayed := r.Stories()
	for _, skip := range r.Skipped {
		s.printf("skipped: %s: %s", skip.Name, skip.Text)
	}
	for _, failure := range r.Failed {
		s.printf("failed: %s\n%s", failure.Name, failure.Text)
	}
	s.printf("%d stories, %d played, %d failed, %d skipped, %d not played in %s",
		len(r.Wanted), played, r.FailedStories(), skipped, len(notPlayed), took.Round(time.Second))
	var errs []error
	if len(notPlayed) > 0 {
		errs = append(errs, fmt.Errorf("not played: %s", strings.Join(notPlayed, " ")))
	}
	for _, surprise := range r.Surprises() {
		errs = append(errs, fmt.Errorf("skipped without a known reason (hack/results): %s: %s", surprise.Name, surprise.Text))
	}
	return errors.Join(errs...)
}

// compile makes the programs.
func (s suite) compile(ctx context.Context, race bool) (err error) {
	tmp, err := os.MkdirTemp("", "tandem-"+s.name()+"-build-")
	if err != nil {
		return fmt.Errorf("make directory for the compiler: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	for _, args := range [][]string{
		{"test", "-c", "-race=" + strconv.FormatBool(race), "-o", s.program(), string(s)},
		{"build", "-o", converter, "cmd/test2json"},
	} {
		cmd := gotool.Command(ctx, tmp, nil, args...)
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("compile %s: %w", args[len(args)-1], err)
		}
	}
	return nil
}

// list are the stories whose names match, sorted.
func (s suite) list(ctx context.Context, only string) ([]string, error) {
	binary, err := filepath.Abs(s.program())
	if err != nil {
		return nil, err
	}
	top, _, _ := strings.Cut(only, "/")
	cmd := exec.CommandContext(ctx, binary, "-test.list="+cmp.Or(top, "."))
	cmd.Dir = string(s)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("list the stories: %w: %s", err, out)
	}
	names := strings.Fields(string(out))
	if len(names) == 0 {
		return nil, fmt.Errorf("no story is called %q", only)
	}
	slices.Sort(names)
	return names, nil
}
