// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/procfs"

	"github.com/tandem-gpu/tandem/hack/leftovers"
	"github.com/tandem-gpu/tandem/hack/queue"
	"github.com/tandem-gpu/tandem/hack/results"
)

const (
	// The stories read these variables: the directory of a cluster that is kept, the one for logs of a failure, and the file of the queue.
	keepVariable  = "E2E_CLUSTER"
	logsVariable  = "STORIES_LOGS"
	queueVariable = "STORIES_QUEUE"
	// endPatience is how long a program may take to remove its cluster when it is interrupted.
	endPatience = 10 * time.Minute
	// keptLines is how many of a program's last lines are repeated if it fails without a failed story.
	keptLines = 20
)

// stage is where the stories are played. Its methods may be called at the same time by several clusters.
type stage struct {
	stories suite
	machine machine
	window  time.Duration
	mu      sync.Mutex
	results results.Results
	// took is how long stories took that passed, in seconds.
	took durations
	// file gets the events, for the summary of make test; it may be nil.
	file *os.File
}

// newStage announces the stories that are to be played.
func newStage(stories suite, names []string) (*stage, error) {
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		return nil, fmt.Errorf("open the proc file system: %w", err)
	}
	s := &stage{stories: stories, machine: machine{proc}, window: idleWindow, took: durations{}}
	if path := os.Getenv(results.Variable); path != "" {
		file, err := os.Create(path)
		if err != nil {
			return nil, fmt.Errorf("write results: %w", err)
		}
		s.file = file
	}
	var errs []error
	for _, name := range names {
		errs = append(errs, s.add(results.Event{Action: results.Want, Package: string(stories), Test: name}))
	}
	return s, errors.Join(errs...)
}

func (s *stage) close() error {
	if s.file == nil {
		return nil
	}
	return s.file.Close()
}

// add takes an event of a test.
func (s *stage) add(e results.Event) error {
	s.results.Add(e)
	if e.Top() && e.Action == "pass" {
		s.took[e.Test] = e.Elapsed
	}
	if s.file == nil {
		return nil
	}
	line, err := json.Marshal(e)
	if err != nil {
		return fmt.Errorf("encode event: %w", err)
	}
	if _, err := s.file.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	return nil
}

// play begins with some clusters, and adds one after each window in which the CPUs were idle, up to most in all. It returns when all have
// ended. ctx limits their time: the limit of package testing would end a program before it has removed its cluster.
func (s *stage) play(ctx context.Context, r *leftovers.Run, names []string, only string, first, most int) error {
	flags := []string{"-test.v=test2json", "-test.count=1", "-test.timeout=0", "-test.run=" + cmp.Or(only, ".")}
	env := append(os.Environ(), r.Env())
	var queued queue.Queue
	if !strings.Contains(only, "/") {
		path := filepath.Join(r.Dir, "queue")
		var err error
		if queued, err = queue.Write(path, names); err != nil {
			return err
		}
		env = append(env, queueVariable+"="+path)
	}
	ended := make(chan error)
	begun, running := 0, 0
	begin := func() {
		label := string(rune('a' + begun))
		begun, running = begun+1, running+1
		cmd := exec.CommandContext(ctx, filepath.Join("..", "..", s.stories.program()), flags...)
		cmd.Dir = string(s.stories)
		cmd.Env = append(env[:len(env):len(env)], logsVariable+"="+filepath.Join(os.TempDir(), "tandem-"+s.stories.name()+"-logs-"+label))
		go func() { ended <- s.playOn(label, cmd) }()
	}
	for range first {
		begin()
	}
	windows := time.NewTicker(s.window)
	defer windows.Stop()
	var errs []error
	for before := s.machine.cpuTimes(); running > 0; {
		select {
		case err := <-ended:
			errs = append(errs, err)
			running--
		case <-windows.C:
			now := s.machine.cpuTimes()
			idle := now.idleSince(before)
			before = now
			// A cluster that has ended has found the queue empty, or is broken. Other programs may have taken the memory meanwhile.
			if ctx.Err() != nil || begun > running || begun >= most || idle <= idleEnough || s.machine.carried() == 0 {
				continue
			}
			if waiting, err := queued.Left(ctx); err != nil {
				errs = append(errs, err)
			} else if waiting > 0 {
				s.printf("one cluster more: the CPUs were idle for %.0f %% of the last %v", 100*idle, s.window)
				begin()
			}
		}
	}
	return errors.Join(errs...)
}

// playOn runs a program that plays stories on one cluster, until it ends.
func (s *stage) playOn(label string, cmd *exec.Cmd) error {
	read, write, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("%s: %w", label, err)
	}
	cmd.Stdout, cmd.Stderr = write, write
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = endPatience
	// The program is told when this one is killed. The kernel takes the end of the thread that started it for that.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	// Not interrupted with the program: it ends with its input. In a process group of its own, a terminal does not interrupt it.
	convert := exec.Command(converter, "-t", "-p", string(s.stories))
	convert.Stdin, convert.Stderr, convert.SysProcAttr = read, os.Stderr, &syscall.SysProcAttr{Setpgid: true}
	events, err := convert.StdoutPipe()
	if err != nil {
		return fmt.Errorf("%s: %w", label, err)
	}
	err = convert.Start()
	read.Close()
	if err != nil {
		write.Close()
		return fmt.Errorf("%s: %w", label, err)
	}
	if err := cmd.Start(); err != nil {
		write.Close()
		return errors.Join(fmt.Errorf("%s: %w", label, err), convert.Wait())
	}
	var last []string
	failed := false
	var errs error
	var decoding sync.WaitGroup
	decoding.Go(func() {
		decodeErr := results.Decode(events, func(e results.Event) {
			failed = failed || e.Action == "fail" && e.Top()
			if e.Action == "output" {
				last = append(last, e.Output)
				last = last[max(0, len(last)-keptLines):]
			}
			errs = errors.Join(errs, s.see(label, e))
		})
		errs = errors.Join(errs, decodeErr)
	})
	err = cmd.Wait()
	// Otherwise the converter takes the story that a killed program played for one that ended like the one before.
	_, writeErr := io.WriteString(write, "\n\x16=== NAME  \n")
	write.Close()
	decoding.Wait()
	err = errors.Join(err, writeErr, convert.Wait(), errs)
	if err == nil {
		return nil
	}
	if !failed {
		fmt.Printf("%s: %v. Its last lines were:\n%s", label, err, strings.Join(last, ""))
	}
	return fmt.Errorf("%s: %w", label, err)
}

// printf prints a line of the run's own.
func (s *stage) printf(format string, args ...any) {
	fmt.Printf("%s: %s\n", s.stories.name(), fmt.Sprintf(format, args...))
}

// see prints what a program says, and adds what it says of a test.
func (s *stage) see(label string, e results.Event) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if line := strings.TrimSuffix(e.Output, "\n"); line != "" {
		fmt.Printf("%s | %s\n", label, line)
	}
	if e.Test == "" {
		return nil
	}
	return s.add(e)
}
