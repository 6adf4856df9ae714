// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// Outsider reports whether a process exists and is in no pod that the watch reports as living, and describes it. proc is the host's
// proc file system, which counts processes as the driver does. It is safe for concurrent use.
func (p *Pods) Outsider(proc string, pid int) (description string, outside bool) {
	dir := filepath.Join(proc, strconv.Itoa(pid))
	cgroups, err := os.ReadFile(filepath.Join(dir, "cgroup"))
	if err != nil {
		return "", false // it has ended, or proc is that of other processes
	}
	uid := podOfProcess(string(cgroups))
	if uid != "" && p.lives(uid) {
		return "", false
	}
	description = fmt.Sprintf("process %d", pid)
	if name, err := os.ReadFile(filepath.Join(dir, "comm")); err == nil {
		description += fmt.Sprintf(" (%s)", strings.ToValidUTF8(strings.TrimSpace(string(name)), "?"))
	}
	if uid != "" {
		description += fmt.Sprintf(" of pod %s, which has ended", uid)
	}
	return description, true
}

// lives reports whether the watch has reported the pod, and no end of it.
func (p *Pods) lives(uid string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod, known := p.pods[types.UID(uid)]
	return known && !pod.deleted && !isTerminal(pod.Pod)
}

// podOfProcess returns the UID of the pod in /proc/<pid>/cgroup (cgroups(7)); empty if none of the cgroups is a pod's. Each line ends in a
// path, relative to the reader's cgroup namespace.
func podOfProcess(cgroups string) string {
	for line := range strings.Lines(cgroups) {
		path := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(path) < 3 {
			continue
		}
		for name := range strings.SplitSeq(path[2], "/") {
			if uid, ok := podOf(name); ok && isUID(uid) {
				return uid
			}
		}
	}
	return ""
}

// isUID reports whether it is the UID of a pod: a UUID, or the hash of a static pod's manifest (k8s.io/kubernetes pkg/kubelet/config,
// applyDefaults).
func isUID(name string) bool {
	return (len(name) == 32 || len(name) == 36) && strings.Trim(name, "0123456789abcdef-") == ""
}
