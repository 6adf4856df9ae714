// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// keepFiles keeps open files that this process has inherited, such as make's, from the programs that it starts. Go does so with its own.
func keepFiles() error {
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("keep open files from programs of the cluster: %w", err)
	}
	return nil
}

// process identifies a process for good: a number alone may come to mean another one.
type process struct {
	Pid int `json:"pid"`
	// Started is the start time in clock ticks since boot (field 22 of /proc/PID/stat), Boot the boot it belongs to.
	Started uint64 `json:"started"`
	Boot    string `json:"boot"`
}

// errGone means that a process has ended.
var errGone = errors.New("process has ended")

// identify describes a running process so that it can be recognized later.
func identify(pid int) (process, error) {
	now, err := readStat(pid)
	if err != nil {
		return process{}, err
	}
	boot, err := hostBootID()
	if err != nil {
		return process{}, err
	}
	return process{Pid: pid, Started: now.started, Boot: boot}, nil
}

func hostBootID() (string, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read boot ID: %w", err)
	}
	return strings.TrimSpace(string(boot)), nil
}

// stat is what /proc reports about a process.
type stat struct {
	state   byte
	threads uint64
	started uint64
}

func readStat(pid int) (stat, error) {
	line, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return stat{}, fmt.Errorf("process %d: %w", pid, errGone)
	}
	return parseStat(string(line))
}

// parseStat reads /proc/PID/stat; the command name between the parentheses may hold anything (proc(5)).
func parseStat(line string) (stat, error) {
	fields := strings.Fields(line[strings.LastIndexByte(line, ')')+1:])
	if len(fields) < 20 {
		return stat{}, fmt.Errorf("read process state: %d fields", len(fields))
	}
	threads, err := strconv.ParseUint(fields[17], 10, 64)
	if err != nil {
		return stat{}, fmt.Errorf("read number of threads: %w", err)
	}
	started, err := strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		return stat{}, fmt.Errorf("read process start time: %w", err)
	}
	return stat{state: fields[0][0], threads: threads, started: started}, nil
}

// ended reports whether nothing of the process runs any more, though it may not have been collected yet. While other
// threads are still ending, and keep its sockets open, the first one may be a zombie already.
func (s stat) ended() bool { return s.state == 'X' || s.state == 'Z' && s.threads <= 1 }

// alive reports whether this very process still runs.
func (p process) alive() bool {
	if p.Pid == 0 {
		return false
	}
	now, err := readStat(p.Pid)
	if err != nil || now.started != p.Started || now.ended() {
		return false
	}
	boot, err := hostBootID()
	return err == nil && boot == p.Boot
}

// signal sends a signal to this process, and to no other that has got its number since; errGone where it has ended.
func (p process) signal(signal syscall.Signal) error {
	// The handle pins the process: checked after it is taken, the number cannot be reused in between.
	handle, err := os.FindProcess(p.Pid)
	if err != nil {
		return fmt.Errorf("process %d: %w", p.Pid, errGone)
	}
	defer handle.Release()
	if !p.alive() {
		return fmt.Errorf("process %d: %w", p.Pid, errGone)
	}
	if err := handle.Signal(signal); errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("process %d: %w", p.Pid, errGone)
	} else if err != nil {
		return fmt.Errorf("signal process %d: %w", p.Pid, err)
	}
	return nil
}

// wait returns when the process has ended.
func (p process) wait(ctx context.Context) error {
	if err := until(ctx, func() bool { return !p.alive() }); err != nil {
		return fmt.Errorf("wait for process %d to end: %w", p.Pid, err)
	}
	return nil
}

// kill ends the process and waits until it is gone.
func (p process) kill(ctx context.Context) error {
	if err := p.signal(syscall.SIGKILL); err != nil && !errors.Is(err, errGone) {
		return err
	}
	return p.wait(ctx)
}

// pollInterval is how often a condition that cannot be awaited is looked at again.
const pollInterval = 20 * time.Millisecond

// until returns when the condition holds, or with the context's error.
func until(ctx context.Context, holds func() bool) error {
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for !holds() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
	return nil
}
