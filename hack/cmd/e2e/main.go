// SPDX-License-Identifier: Apache-2.0

// Command e2e plays the users' stories of test/e2e on several clusters at once: they wait more than they compute. Each cluster
// takes one story after the other from one queue; its lines begin with its letter.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/queue"
	"github.com/tandem-gpu/tandem/hack/sidebyside"
)

const (
	stories = "./test/e2e"
	program = "bin/hack/e2e.test"
	// The stories read these variables: the directory of a cluster that is kept, the one for logs of a failure, and the file of the queue.
	keepVariable  = "E2E_CLUSTER"
	logsVariable  = "E2E_LOGS"
	queueVariable = "E2E_QUEUE"
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
	until := flags.Int64("until", 0, "begin only required stories after this `time`, in seconds since 1970 (0: no limit; not with a kept cluster)")
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
	tmp, err := os.MkdirTemp("", "tandem-e2e-run-")
	if err != nil {
		return fmt.Errorf("make directory for the run: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	start := time.Now()
	ctx, cancel := context.WithTimeout(ctx, *timeout)
	defer cancel()
	binary, err := compile(ctx, tmp)
	if err != nil {
		return err
	}
	var ended results
	if _, kept := os.LookupEnv(keepVariable); kept || strings.Contains(*only, "/") {
		err = play(ctx, &ended, binary, 1, "-test.run="+*only)
	} else {
		err = playAll(ctx, &ended, filepath.Join(tmp, "queue"), binary, *only, *clusters, *until)
	}
	fmt.Printf("e2e: %d stories passed, %d failed, %d skipped, %d not played in %s\n",
		ended.passed, len(ended.failed), ended.skipped, len(ended.late), time.Since(start).Round(time.Second))
	for _, f := range ended.failed {
		fmt.Printf("e2e: failed: %s\n%s", f.name, strings.Join(f.said, ""))
	}
	if len(ended.late) > 0 {
		fmt.Printf("e2e: no time for these stories, which make e2e RUN=NAME plays: %s\n", strings.Join(ended.late, " "))
	}
	return err
}

// playAll plays the stories that match from a queue, in the file path. It fails if a story did not end, unless closeAt removed it.
func playAll(ctx context.Context, ended *results, path, binary, only string, clusters int, until int64) (err error) {
	names, err := list(ctx, binary, only)
	if err != nil {
		return err
	}
	if clusters > 1 {
		restore, raiseErr := raise(instancesFile, instancesOfAll)
		if raiseErr != nil {
			fmt.Println("e2e: one cluster at once, which takes longer: several have more inotify instances than they may:", raiseErr)
			clusters = 1
		}
		defer func() { err = errors.Join(err, restore()) }()
	}
	q, err := queue.Write(path, order(names))
	if err != nil {
		return err
	}
	clusters = min(clusters, len(names))
	fmt.Printf("e2e: %d stories on %d clusters\n", len(names), clusters)
	played := make(chan struct{})
	var closing errgroup.Group
	closing.Go(func() (err error) {
		ended.late, err = closeAt(ctx, q, until, played)
		return err
	})
	err = play(ctx, ended, binary, clusters, "-test.run=.", queueVariable+"="+path)
	close(played)
	err = errors.Join(err, closing.Wait())
	if missing := ended.missing(len(names)); missing > 0 {
		err = errors.Join(err, fmt.Errorf("%d of %d stories did not end", missing, len(names)))
	}
	return err
}

// closeAt waits for a time, removes the stories that are not required from the queue, and returns them. It removes none if the time is
// zero, or if all stories are played before.
func closeAt(ctx context.Context, q queue.Queue, until int64, played <-chan struct{}) ([]string, error) {
	if until == 0 {
		return nil, nil
	}
	select {
	case <-played:
		return nil, nil
	case <-time.After(time.Until(time.Unix(until, 0))):
		return q.Keep(ctx, required...)
	}
}

// play runs the program of the stories on so many clusters. ctx limits its time: the limit of package testing would end a program
// before it has removed its cluster.
func play(ctx context.Context, ended *results, binary string, clusters int, run string, env ...string) error {
	var programs []sidebyside.Program
	for i := range clusters {
		letter := string(rune('a' + i))
		programs = append(programs, sidebyside.Program{
			Label: letter, Path: binary, Dir: stories,
			Args: []string{"-test.v", "-test.count=1", "-test.timeout=0", run},
			Env:  append(append(os.Environ(), env...), logsVariable+"="+filepath.Join(os.TempDir(), "tandem-e2e-logs-"+letter)),
		})
	}
	return sidebyside.Run(ctx, os.Stdout, ended.see, programs...)
}

// compile answers the path of the program that plays the stories.
func compile(ctx context.Context, tmp string) (string, error) {
	binary, err := filepath.Abs(program)
	if err != nil {
		return "", err
	}
	cmd := gotool.Command(ctx, tmp, nil, "test", "-c", "-o", binary, stories)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("compile the stories: %w", err)
	}
	return binary, nil
}

// results counts how stories end, and keeps what those said that failed.
type results struct {
	passed, skipped int
	failed          []failure
	// late are the stories for which there was no time.
	late []string
	// playing are the stories that the clusters play now, by the clusters' labels.
	playing map[string]*story
}

// missing is how many of so many stories have neither ended nor been left out.
func (t *results) missing(of int) int { return of - len(t.late) - t.passed - t.skipped - len(t.failed) }

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
	"TestPartitionsOnDemand": 750, "TestPublishedManifests": 590, "TestRelease": 300, "TestMPSByPolicy": 260, "TestInterruptedSharing": 230,
	"TestWritesAPod":  230,
	"TestNodeFeature": 230, "TestMistakesThatSlipThrough": 220, "TestUpgradedAndBack": 140, "TestModeChangesOnALiveNode": 130,
	"TestStaticPartitions": 130, "TestDeleteAndRecreate": 120, "TestSharesOfClaims": 120, "TestSingleStrategy": 120, "TestMIGManager": 110,
	"TestNodeLabels": 110, "TestAgentKilledOnAFullNode": 110, "TestWrongConfiguration": 110, "TestFaultEndsByAReset": 110,
	"TestAgentAwayOnAFullNode": 110, "TestDrainGPUs": 100, "TestLimitsByClaims": 100, "TestFromNVIDIAsDevicePlugin": 100,
	"TestEditedConfiguration": 95, "TestKubectlGPU": 95, "TestMPSNamespaces": 95,
}

// required are the stories whose results make dropin-end adds up (test/dropin, Report).
var required = []string{"TestPublishedManifests", "TestQuota"}

// order is the one in which the stories are played: those that are required, those that take longest, so that no cluster has a long one
// left at the end, and the others in a new order each time, so that a run without time for all leaves others out than the last one.
func order(names []string) []string {
	names = slices.Clone(names)
	rand.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	slices.SortStableFunc(names, func(a, b string) int {
		if a, b := slices.Contains(required, a), slices.Contains(required, b); a != b {
			if a {
				return -1
			}
			return 1
		}
		return cmp.Compare(slow[b], slow[a])
	})
	return names
}
