// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
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
		if p, err := readProcess(proc, pid); err == nil {
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

// InPods returns those of the processes that are in the cgroup of a pod, living or not, or whose cgroup cannot be read. proc is the host's.
func InPods(proc string, pids []int) (found []int) {
	for _, pid := range pids {
		cgroups, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "cgroup"))
		if err != nil && !ended(err) || podOfProcess(cgroups) != "" {
			found = append(found, pid)
		}
	}
	return found
}

// Users says which living pods may have processes on a GPU.
type Users struct {
	// Holds are those of the node.
	Holds []ledger.Hold
	// Driver is the name of the DRA driver.
	Driver string
	// Namespaces are those of MPS daemons and monitors.
	Namespaces []string
}

// Outsider is a process that uses a GPU and may not.
type Outsider struct {
	// Description names a pod by its UID only, because tenants of other namespaces read it.
	Description string
	// Pod is the namespace and name of a living pod, for administrators; empty for other processes.
	Pod string
}

// Outsiders returns those of the processes that exist and whose pods may not use the GPU: the process is in no pod, or the watch does not
// report its pod as living, or the pod is not one of users. A process of a living pod that is not one of users must not stay: a tenant can
// hand an open device to a second pod of its own, whose process would keep its memory on the next tenant's GPU. proc is the host's, which
// counts processes as the driver does. It is safe for concurrent use.
func (p *Pods) Outsiders(proc, gpu string, pids []int, users Users) (outsiders []Outsider) {
	claims := sync.OnceValues(func() ([]KubeletClaim, error) { return ReadClaimState(p.kubeletDir, users.Driver) })
	for _, pid := range pids {
		if o, outside := p.outsider(proc, gpu, pid, users, claims); outside {
			outsiders = append(outsiders, o)
		}
	}
	return outsiders
}

func (p *Pods) outsider(proc, gpu string, pid int, users Users, claims func() ([]KubeletClaim, error)) (o Outsider, outside bool) {
	cgroups, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "cgroup"))
	switch {
	case ended(err):
		return Outsider{}, false // or proc is that of other processes
	case err != nil:
		return Outsider{Description: fmt.Sprintf("process %d, whose pod is not known: %v", pid, err)}, true
	}
	uid := podOfProcess(cgroups)
	lives, may := uid != "" && p.lives(uid), uid != "" && !p.Synced()
	var why error
	if lives && !may {
		may, why = p.mayUse(uid, gpu, users, claims)
	}
	if may {
		return Outsider{}, false
	}
	read, err := readProcess(proc, pid)
	found := read.String()
	switch {
	case ended(err):
		return Outsider{}, false
	case err != nil:
		found = fmt.Sprintf("process %d", pid)
	}
	switch {
	case uid == "":
		return Outsider{Description: found}, true
	case !lives:
		return Outsider{Description: fmt.Sprintf("%s of pod %s, which has ended", found, uid)}, true
	}
	o.Description = fmt.Sprintf("%s of pod %s, which does not hold the GPU", found, uid)
	if why != nil {
		o.Description += fmt.Sprintf(", unless it has admin access: %v", why)
	}
	pod := p.Name(uid)
	o.Pod = pod.Namespace + "/" + pod.Name
	return o, true
}

// mayUse reports whether a living pod may have a process on a GPU. After an error it is not known.
func (p *Pods) mayUse(uid, gpu string, users Users, claims func() ([]KubeletClaim, error)) (bool, error) {
	holds := func(h ledger.Hold) bool { return h.Device.GPU == gpu && p.mayHold(uid, h, users.Holds) }
	if slices.Contains(users.Namespaces, p.Name(uid).Namespace) || slices.ContainsFunc(users.Holds, holds) {
		return true, nil
	}
	prepared, err := claims()
	return err == nil && hasAdminAccess(uid, prepared, users.Holds), err
}

// mayHold reports whether a hold is a pod's. A hold that names no pod yet may belong to any pod that has fewer devices than it requests.
func (p *Pods) mayHold(uid string, h ledger.Hold, all []ledger.Hold) bool {
	switch {
	case h.Holder.Kind == ledger.KindClaim:
		return p.podsOf(h.Namespace, h.Name, h.Pods)[types.UID(uid)]
	case len(h.Pods) > 0:
		return slices.ContainsFunc(h.Pods, func(pod ledger.Pod) bool { return pod.UID == uid })
	}
	wanting := p.wanting(func(resource string) bool { return resource == h.Resource }, all, func(seenPod) bool { return true })
	return slices.Contains(wanting, uid)
}

// hasAdminAccess reports whether kubelet has prepared a claim for a pod that has more devices than holds: the others have admin access,
// which only users of labelled namespaces can request (KEP-5018).
func hasAdminAccess(uid string, prepared []KubeletClaim, all []ledger.Hold) bool {
	return slices.ContainsFunc(prepared, func(c KubeletClaim) bool {
		devices, held := map[PoolDevice]bool{}, map[device.Ref]bool{}
		for _, d := range c.Devices {
			devices[d] = true
		}
		for _, h := range all {
			if h.Holder.Kind == ledger.KindClaim && h.Holder.ID == c.UID {
				held[h.Device] = true
			}
		}
		return slices.Contains(c.PodUIDs, uid) && len(devices) > len(held)
	})
}

// lives reports whether the watch has reported the pod, and no end of it.
func (p *Pods) lives(uid string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod, known := p.pods[types.UID(uid)]
	return known && !pod.deleted && !podstatus.Ended(pod.Pod)
}

// ended reports whether an error from proc means that the process has ended. After another one, such as EMFILE, it may run.
func ended(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) }

func readProcess(proc string, pid int) (Process, error) {
	stat, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "stat"))
	if err != nil {
		return Process{}, fmt.Errorf("read process %d: %w", pid, err)
	}
	command, state, ok := parseStat(stat)
	if !ok {
		return Process{}, fmt.Errorf("read process %d: unexpected contents %q", pid, stat)
	}
	return Process{pid, command, state}, nil
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
