// SPDX-License-Identifier: Apache-2.0

// Command e2e plays the users' stories of test/e2e on several clusters at once: they wait more than they compute. Each cluster
// has its share of the stories and runs them one after the other; its lines begin with its letter.
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
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/sidebyside"
)

const (
	stories = "./test/e2e"
	program = "bin/hack/e2e.test"
	// keepVariable and logsVariable are those of the stories: one cluster is kept for the next run, and where logs of a failure go.
	keepVariable = "E2E_CLUSTER"
	logsVariable = "E2E_LOGS"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "e2e:", err)
		}
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) (err error) {
	flags := flag.NewFlagSet("e2e", flag.ContinueOnError)
	only := flags.String("run", "", "stories to play (`regexp`; one of a sub-story, with a slash, is played on one cluster)")
	clusters := flags.Int("clusters", 3, "clusters at once")
	timeout := flags.Duration("timeout", 4*time.Hour, "most time for all")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 || *clusters < 1 {
		return fmt.Errorf("want -clusters of 1 or more and no arguments, not %d and %q", *clusters, flags.Args())
	}
	if os.Geteuid() != 0 {
		fmt.Println("e2e: skipped: clusters of one's own need root")
		return nil
	}
	start := time.Now()
	if err := compile(ctx); err != nil {
		return err
	}
	binary, err := filepath.Abs(program)
	if err != nil {
		return err
	}
	restore := func() error { return nil }
	defer func() { err = errors.Join(err, restore()) }()
	var hands []string
	count := 0
	if _, kept := os.LookupEnv(keepVariable); kept || strings.Contains(*only, "/") {
		hands = []string{*only}
	} else {
		names, err := list(ctx, binary, *only)
		if err != nil {
			return err
		}
		count = len(names)
		if *clusters > 1 {
			if restore, err = raise(instancesFile, instancesOfAll); err != nil {
				fmt.Println("e2e: one cluster at once, which takes longer: several have more inotify instances than they may:", err)
				*clusters = 1
			}
		}
		for _, hand := range deal(names, *clusters) {
			hands = append(hands, "^("+strings.Join(hand, "|")+")$")
		}
	}
	if count > 0 {
		fmt.Printf("e2e: %d stories on %d clusters\n", count, len(hands))
	}
	var programs []sidebyside.Program
	for i, hand := range hands {
		letter := string(rune('a' + i))
		programs = append(programs, sidebyside.Program{
			Label: letter, Path: binary, Dir: stories,
			Args: []string{"-test.v", "-test.count=1", "-test.timeout=" + timeout.String(), "-test.run=" + hand},
			Env:  append(os.Environ(), logsVariable+"="+filepath.Join(os.TempDir(), "tandem-e2e-logs-"+letter)),
		})
	}
	var ended results
	err = sidebyside.Run(ctx, os.Stdout, ended.see, programs...)
	fmt.Printf("e2e: %d stories passed, %d failed, %d skipped in %s\n", ended.passed, len(ended.failed), ended.skipped, time.Since(start).Round(time.Second))
	for _, f := range ended.failed {
		fmt.Printf("e2e: failed: %s\n%s", f.name, strings.Join(f.said, ""))
	}
	if played := ended.passed + ended.skipped + len(ended.failed); played < count {
		err = errors.Join(err, fmt.Errorf("%d of %d stories did not end", count-played, count))
	}
	return err
}

func compile(ctx context.Context) error {
	tmp, err := os.MkdirTemp("", "tandem-e2e-build-")
	if err != nil {
		return fmt.Errorf("make build directory: %w", err)
	}
	defer os.RemoveAll(tmp)
	cmd := gotool.Command(ctx, tmp, nil, "test", "-c", "-o", program, stories)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("compile the stories: %w", err)
	}
	return nil
}

// results counts how stories end, and keeps what those said that failed.
type results struct {
	passed, skipped int
	failed          []failure
	// playing are the stories that the clusters play now, by the clusters' labels.
	playing map[string]*story
}

type failure struct {
	name string
	said []string
}

type story struct {
	// said is what the story has logged.
	said []string
	// more is how many lines are kept of its last message.
	more int
}

// saidLines and linesEach are how many lines are kept of a story, and of each message that it logs.
const saidLines, linesEach = 60, 6

// message is the first line of what a test logs.
var message = regexp.MustCompile(`^ +[^ ]+_test\.go:[0-9]+: `)

// see takes a line of go test -v.
func (t *results) see(label, line string) {
	s, ok := t.playing[label]
	if !ok {
		s = &story{}
		if t.playing == nil {
			t.playing = map[string]*story{}
		}
		t.playing[label] = s
	}
	switch {
	case message.MatchString(line):
		s.more = linesEach
	case !strings.HasPrefix(line, "        "):
		s.more = 0
	}
	if s.more > 0 {
		s.more--
		s.said = append(s.said, line+"\n")
		s.said = s.said[max(0, len(s.said)-saidLines):]
	}
	end, ok := strings.CutPrefix(line, "--- ")
	if !ok {
		return
	}
	result, rest, _ := strings.Cut(end, ": ")
	name, _, _ := strings.Cut(rest, " ")
	switch result {
	case "PASS":
		t.passed++
	case "SKIP":
		t.skipped++
	case "FAIL":
		t.failed = append(t.failed, failure{name, s.said})
	}
	delete(t.playing, label)
}

// list are the stories whose names match, in the order of the source.
func list(ctx context.Context, binary, only string) ([]string, error) {
	cmd := exec.CommandContext(ctx, binary, "-test.list="+cmp.Or(only, "."))
	cmd.Dir = stories
	out, err := cmd.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("list the stories: %w: %s", err, out)
	}
	names := strings.Fields(string(out))
	if len(names) == 0 {
		return nil, fmt.Errorf("no story is called %q", only)
	}
	return names, nil
}

// slow are the stories that take longer than most, in seconds, on two cores and with two other clusters beside them. What is wrong
// here costs time only.
var slow = map[string]int{
	"TestPublishedManifests": 600, "TestPartitionsOnDemand": 400, "TestDeleteAndRecreate": 220, "TestInterruptedSharing": 150, "TestAgentKilledOnAFullNode": 150, "TestAgentAwayOnAFullNode": 130,
	"TestMistakesThatSlipThrough": 120, "TestWritesAPod": 110, "TestMPSByPolicy": 95, "TestStaticPartitions": 85, "TestAgentAwayWhilePodsEnd": 80,
	"TestKubeletForgetsRunningPods": 70, "TestModeChangesOnALiveNode": 60, "TestKubectlGPU": 75, "TestKubectlGPUTop": 45, "TestUpgradedAndBack": 60,
}

// usual is how long the others take.
const usual = 20

// deal gives each of n hands its share: the longest first, each to who has least. A hand keeps the order of the source.
func deal(names []string, n int) [][]string {
	seconds := func(name string) int { return cmp.Or(slow[name], usual) }
	longest := slices.Clone(names)
	slices.SortStableFunc(longest, func(a, b string) int { return cmp.Compare(seconds(b), seconds(a)) })
	hands, loads := make([][]string, min(n, len(names))), make([]int, min(n, len(names)))
	for _, name := range longest {
		least := slices.Index(loads, slices.Min(loads))
		hands[least] = append(hands[least], name)
		loads[least] += seconds(name)
	}
	for _, hand := range hands {
		slices.SortFunc(hand, func(a, b string) int { return cmp.Compare(slices.Index(names, a), slices.Index(names, b)) })
	}
	return hands
}
