// SPDX-License-Identifier: Apache-2.0

// Command test runs the parts of make test or make test-long, which are targets of the Makefile, one after the other. Parts that are joined by
// a plus, as in e2e+unit, run at the same time: some of them mostly wait. It goes on after a part that failed. Whatever happens, it ends
// with what failed and with one line of numbers. It succeeds only if all parts did, all stories were played, and no test was skipped without a
// known reason.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/hack/results"
)

const (
	// resultsDir is where the parts leave results, one file each.
	resultsDir = "bin/results"
	// testsDir has the stories, in directories that are called as the parts that play them.
	testsDir = "test"
	// keptLines is how many of a part's last lines are repeated if it fails and its results do not say why.
	keptLines = 30
	// endPatience is how long an interrupted part may take to remove its clusters.
	endPatience = 12 * time.Minute
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	ok, err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "test:", err)
	}
	if !ok || err != nil {
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) (ok bool, err error) {
	flags := flag.NewFlagSet("test", flag.ContinueOnError)
	tier := flags.String("tier", "test", "the target that has the parts")
	rest := flags.String("rest", "", "what the tier leaves out")
	var shard results.Shard
	flags.Var(&shard, "shard", "`I/N`: the I-th part of N of the stories; all other parts belong to the first")
	if err := flags.Parse(args); err != nil {
		return false, err
	}
	if only := os.Getenv("RUN"); only != "" {
		return false, fmt.Errorf("RUN=%s leaves out stories: make e2e takes it", only)
	}
	s := &session{tier: *tier, shard: shard, start: time.Now(), out: out}
	for _, names := range flags.Args() {
		for i, name := range strings.Split(names, "+") {
			s.parts = append(s.parts, &part{name: name, beside: i > 0})
		}
	}
	fmt.Fprintf(out, "test: %s has: %s\n", s.tier, strings.Join(flags.Args(), " "))
	if *rest != "" {
		fmt.Fprintf(out, "test: it leaves out: %s\n", *rest)
	}
	if shard.String() != "" {
		elsewhere := s.reduce()
		fmt.Fprintf(out, "test: SHARD=%s: a part of the stories; in the first shard only: %s\n", &shard, strings.Join(elsewhere, " "))
	}
	for _, dir := range []string{resultsDir, os.Getenv("DROPIN_RESULTS")} {
		if dir == "" {
			continue
		}
		if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o755)); err != nil {
			return false, fmt.Errorf("empty directory for results: %w", err)
		}
	}
	for from := 0; from < len(s.parts); {
		to := from + 1
		for to < len(s.parts) && s.parts[to].beside {
			to++
		}
		if ctx.Err() == nil {
			s.runTogether(ctx, from, to)
		}
		from = to
	}
	return s.summarize(), nil
}

// runTogether runs some of the parts at the same time.
func (s *session) runTogether(ctx context.Context, from, to int) {
	for i, p := range s.parts[from:to] {
		fmt.Fprintf(s.out, "\ntest: %s (%d of %d)\n", p.name, from+i+1, len(s.parts))
	}
	if to == from+1 {
		s.parts[from].run(ctx, s.out)
		return
	}
	var running sync.WaitGroup
	var mu sync.Mutex
	for _, p := range s.parts[from:to] {
		running.Go(func() {
			lines := &prefixed{mu: &mu, out: s.out, prefix: p.name + " | "}
			p.run(ctx, lines)
			lines.end()
		})
	}
	running.Wait()
}

// prefixed writes whole lines, behind the name of the part that they are from.
type prefixed struct {
	mu     *sync.Mutex
	out    io.Writer
	prefix string
	rest   []byte
}

func (p *prefixed) Write(data []byte) (int, error) {
	p.rest = append(p.rest, data...)
	for {
		line, rest, found := bytes.Cut(p.rest, []byte("\n"))
		if !found {
			return len(data), nil
		}
		p.rest = rest
		p.mu.Lock()
		_, err := fmt.Fprintf(p.out, "%s%s\n", p.prefix, line)
		p.mu.Unlock()
		if err != nil {
			return 0, err
		}
	}
}

// end writes a last line without an end.
func (p *prefixed) end() {
	if len(p.rest) > 0 {
		p.Write([]byte("\n")) //nolint:errcheck // as of all output
	}
}

// session is one run of a tier.
type session struct {
	tier  string
	shard results.Shard
	start time.Time
	parts []*part
	out   io.Writer
}

// everywhere are the parts of each shard.
var everywhere = []string{"deps", "programs", "e2e"}

// reduce removes the parts that belong to the first shard from the others, and returns the parts that only the first has.
func (s *session) reduce() (firstOnly []string) {
	var kept []*part
	beside := false // a part that is kept runs at the same time
	for _, p := range s.parts {
		beside = beside && p.beside
		if !slices.Contains(everywhere, p.name) {
			firstOnly = append(firstOnly, p.name)
			continue
		}
		kept = append(kept, &part{name: p.name, beside: beside})
		beside = true
	}
	if !s.shard.First() {
		s.parts = kept
	}
	return firstOnly
}

// part is a target of the Makefile.
type part struct {
	name string
	// beside is whether it runs at the same time as the part before it.
	beside bool
	ran    bool
	err    error
	took   time.Duration
	last   []string
	rest   string
}

func (p *part) results() (*results.Results, error) { return results.Read(p.file()) }

func (p *part) file() string { return filepath.Join(resultsDir, p.name+".json") }

// stories are the names of the part's stories, as the sources have them: e2e-v1.36.3 plays those of e2e.
func (p *part) stories() []string {
	if of, _, _ := strings.Cut(p.name, "-"); of == "e2e" || of == "contract" {
		return storiesIn(filepath.Join(testsDir, of))
	}
	return nil
}

// Write keeps the last lines.
func (p *part) Write(data []byte) (int, error) {
	lines := strings.SplitAfter(p.rest+string(data), "\n")
	p.rest = lines[len(lines)-1]
	p.last = append(p.last, lines[:len(lines)-1]...)
	p.last = slices.Clone(p.last[max(0, len(p.last)-keptLines):])
	return len(data), nil
}

func (p *part) run(ctx context.Context, out io.Writer) {
	start := time.Now()
	file, err := filepath.Abs(p.file())
	if err != nil {
		p.err = err
		return
	}
	cmd := exec.CommandContext(ctx, "make", "--no-print-directory", p.name)
	cmd.Env = append(os.Environ(), results.Variable+"="+file)
	to := io.MultiWriter(out, p)
	cmd.Stdout, cmd.Stderr = to, to
	// All of its processes are told to end: shells forward no signal. If this program is killed, make is told, which tells its programs. The
	// kernel takes the end of the thread that started it for that.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = endPatience
	p.err = cmd.Run()
	p.ran = true
	p.took = time.Since(start)
}

// summarize prints what the parts have left, and reports whether it is complete and without failure.
func (s *session) summarize() bool {
	ok := true
	wanted, played, skipped, unplayed := 0, 0, 0, 0
	fmt.Fprintln(s.out)
	for _, p := range s.parts {
		r, err := p.results()
		if err != nil {
			names := p.stories()
			if slices.Contains(everywhere, p.name) {
				names = s.shard.Of(names)
			}
			for _, name := range names {
				r.Add(results.Event{Action: results.Want, Test: name})
			}
		}
		done, left, notPlayed := r.Stories()
		wanted, played, skipped, unplayed = wanted+len(r.Wanted), played+done, skipped+left, unplayed+len(notPlayed)
		ok = p.tell(s.out, r, notPlayed) && ok
	}
	took := time.Since(s.start)
	fmt.Fprintf(s.out, "test: part            minutes  result\n")
	for _, p := range s.parts {
		fmt.Fprintf(s.out, "test: %-15s %7.1f  %s\n", p.name, p.took.Minutes(), p.result())
	}
	fmt.Fprintf(s.out, "test: stories=%d played=%d skipped=%d not_played=%d minutes=%.0f\n", wanted, played, skipped, unplayed, took.Minutes())
	return ok && unplayed == 0
}

func (p *part) result() string {
	switch {
	case p.err != nil:
		return "failed: " + p.err.Error()
	case !p.ran:
		return "not run"
	}
	return "ok"
}

// tell prints skips, and why the part failed, if it did.
func (p *part) tell(out io.Writer, r *results.Results, notPlayed []string) bool {
	for _, skip := range r.Skipped {
		fmt.Fprintf(out, "test: %s: skipped: %s: %s\n", p.name, skip.Name, skip.Text)
	}
	for _, surprise := range r.Surprises() {
		fmt.Fprintf(out, "test: %s: no known reason for a skip: %s: %s\n", p.name, surprise.Name, surprise.Text)
		if p.err == nil {
			p.err = errors.New("skips without a known reason")
		}
	}
	if len(notPlayed) > 0 {
		fmt.Fprintf(out, "test: %s: not played: %s\n", p.name, strings.Join(notPlayed, " "))
	}
	if p.err == nil {
		return p.ran
	}
	for _, failure := range r.Failed {
		fmt.Fprintf(out, "test: %s: failed: %s\n%s\n", p.name, failure.Name, failure.Text)
	}
	if len(r.Failed) == 0 {
		fmt.Fprintf(out, "test: %s failed. Its last lines were:\n%s%s\n", p.name, strings.Join(p.last, ""), p.rest)
	}
	return false
}

var declaration = regexp.MustCompile(`(?m)^func (Test\w+)\(\w+ \*testing\.T\)`)

// storiesIn are the names of the stories in the sources, for a run in which hack/cmd/stories could not list them.
func storiesIn(dir string) (names []string) {
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		return nil
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		for _, match := range declaration.FindAllSubmatch(text, -1) {
			names = append(names, string(match[1]))
		}
	}
	slices.Sort(names)
	return names
}
