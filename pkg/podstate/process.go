// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/internal/podstatus"
)

// Process is a process of the host.
type Process struct {
	PID int
	// Command is the kernel's short name of it, State its state: D is a sleep that no signal ends (proc_pid_stat(5)).
	Command, State string
}

// String returns "process 4711 (python3, state D)".
func (p Process) String() string {
	return fmt.Sprintf("process %d (%s, state %s)", p.PID, p.Command, p.State)
}

// Processes returns the processes of a pod below the host's proc, those in state D first. The agent has its own PID namespace, so the
// files of a cgroup do not name them. It reads one file of each process of the host: call it rarely. It is safe for concurrent use.
func Processes(proc, uid string) ([]Process, error) {
	directories, err := os.ReadDir(proc)
	if err != nil {
		return nil, fmt.Errorf("list processes of pod %s: %w", uid, err)
	}
	var found []Process
	for _, d := range directories {
		pid, err := strconv.Atoi(d.Name())
		if err != nil {
			continue
		}
		// It may have ended meanwhile.
		cgroups, err := os.ReadFile(filepath.Join(proc, d.Name(), "cgroup"))
		if err != nil || podOfProcess(cgroups) != uid {
			continue
		}
		if p, ok := readProcess(proc, pid); ok {
			found = append(found, p)
		}
	}
	rank := func(p Process) int {
		if p.State == "D" {
			return 0
		}
		return 1
	}
	slices.SortFunc(found, func(a, b Process) int { return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.PID, b.PID)) })
	return found, nil
}

// Outsider reports whether a process exists and is in no pod that the watch reports as living, and describes it. proc is the host's, which
// counts processes as the driver does. It is safe for concurrent use.
func (p *Pods) Outsider(proc string, pid int) (description string, outside bool) {
	cgroups, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "cgroup"))
	if err != nil {
		return "", false // it has ended, or proc is that of other processes
	}
	uid := podOfProcess(cgroups)
	if uid != "" && (!p.Synced() || p.lives(uid)) {
		return "", false
	}
	found, ok := readProcess(proc, pid)
	if !ok {
		return "", false
	}
	if uid == "" {
		return found.String(), true
	}
	return fmt.Sprintf("%s of pod %s, which has ended", found, uid), true
}

// lives reports whether the watch has reported the pod, and no end of it.
func (p *Pods) lives(uid string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod, known := p.pods[types.UID(uid)]
	return known && !pod.deleted && !podstatus.Ended(pod.Pod)
}

func readProcess(proc string, pid int) (p Process, ok bool) {
	stat, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "stat"))
	if err != nil {
		return Process{}, false // it has ended
	}
	command, state, ok := parseStat(stat)
	return Process{pid, command, state}, ok
}

// podOfProcess returns the pod of a process from its list of cgroups. The first pod in a path is meant: a pod may name cgroups below
// its own as it likes.
func podOfProcess(cgroups []byte) string {
	for line := range strings.Lines(string(cgroups)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		for name := range strings.SplitSeq(fields[len(fields)-1], "/") {
			if uid, ok := podOf(name); ok && isUID(uid) {
				return uid
			}
		}
	}
	return ""
}

// isUID reports whether it can be the UID of a pod, which has no dot: "podman-17.scope" is no pod's cgroup.
func isUID(name string) bool { return name != "" && !strings.Contains(name, ".") }

// parseStat reads "4711 (python3) D ...". A process chooses its name itself.
func parseStat(stat []byte) (command, state string, ok bool) {
	open, end := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
	if open < 0 || end < open || len(stat) < end+3 {
		return "", "", false
	}
	command = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) || r == unicode.ReplacementChar {
			return '?'
		}
		return r
	}, string(stat[open+1:end]))
	return command, string(stat[end+2 : end+3]), true
}
