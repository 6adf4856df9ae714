// SPDX-License-Identifier: Apache-2.0

// Package podstate determines whether the pods of a hold may still run. It reads pod cgroups, kubelet's two checkpoints, its pod
// resources endpoint, and the node's pods from the API server. It changes nothing.
package podstate

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Cgroups finds the cgroups that kubelet creates for pods, below the root of the host's cgroup file system, in any hierarchy of
// version 1 or 2, with the cgroupfs driver (".../kubepods/burstable/pod<UID>") and the systemd driver
// (".../kubepods-burstable-pod<UID with underscores>.slice"). It is safe for concurrent use.
type Cgroups struct {
	root string
	// trust is how long the result of a search for the kubepods directories is used.
	trust time.Duration
	// own is the UID of the agent's pod; empty outside a pod.
	own string

	mu sync.Mutex
	// doubt is why an absent cgroup proves nothing at present.
	doubt    error
	roots    []string // kubepods directories that the last search found
	searched time.Time
}

// NewCgroups searches below root, usually the host's /sys/fs/cgroup. own is the UID of the agent's pod, empty outside a pod. While that pod
// has no cgroup there, neither method answers.
func NewCgroups(root, own string) *Cgroups {
	return &Cgroups{root: filepath.Clean(root), trust: time.Second, own: own}
}

// ErrNoPodCgroups means that kubelet seems to give pods no cgroups of their own, so that no hold of an ended pod ends.
var ErrNoPodCgroups = errors.New("kubelet seems to run with --cgroups-per-qos=false, or the host's cgroup file system is mounted elsewhere: " +
	"set cgroupsPerQOS: true in kubelet's configuration and reboot the node, or correct cgroupRoot of the chart")

// PodCgroup is the state of a pod's cgroup.
type PodCgroup int

const (
	CgroupAbsent PodCgroup = iota // no cgroup of the pod is left
	CgroupEmpty                   // there is one, without a process
	CgroupBusy                    // a process of the pod lives
)

// searchDepth covers <hierarchy>/<kubelet's cgroupRoot, two levels>/<parent slice>/kubepods.
const searchDepth = 5

// Pod returns the state of the pod's cgroup. After an error it is unknown.
func (c *Cgroups) Pod(uid string) (PodCgroup, error) {
	if uid == "" {
		return CgroupBusy, errors.New("look for a pod's cgroup: no UID")
	}
	// If the known directories contain a process of the pod, the pod is busy, and no new search is needed.
	roots := c.lastRoots()
	state, err := podState(roots, uid)
	if len(roots) > 0 && (err != nil || state == CgroupBusy) {
		return CgroupBusy, err
	}
	fresh, err := c.trustedRoots()
	if err != nil {
		return CgroupBusy, err
	}
	if slices.Equal(fresh, roots) {
		return state, nil
	}
	return podState(fresh, uid)
}

// UIDs returns the UIDs of all pods that have a cgroup, sorted.
func (c *Cgroups) UIDs() ([]string, error) {
	roots, err := c.trustedRoots()
	if err != nil {
		return nil, err
	}
	return uidsBelow(roots)
}

func uidsBelow(roots []string) ([]string, error) {
	var uids []string
	for _, root := range roots {
		err := eachPod(root, func(_, uid string) { uids = append(uids, uid) })
		if err != nil {
			return nil, fmt.Errorf("list cgroups of pods: %w", err)
		}
	}
	slices.Sort(uids)
	return slices.Compact(uids), nil
}

func podState(roots []string, uid string) (PodCgroup, error) {
	state, mute := CgroupAbsent, false
	for _, root := range roots {
		var found []string
		err := eachPod(root, func(path, pod string) {
			if pod == uid {
				found = append(found, path)
			}
		})
		if err != nil {
			return CgroupBusy, fmt.Errorf("look for cgroup of pod %s: %w", uid, err)
		}
		for _, dir := range found {
			busy, err := hasProcess(dir)
			if err != nil {
				return CgroupBusy, fmt.Errorf("read cgroup of pod %s: %w", uid, err)
			}
			if busy {
				return CgroupBusy, nil
			}
			state = CgroupEmpty
			mute = mute || missing(filepath.Join(dir, "cgroup.events"))
		}
	}
	if mute && !slices.ContainsFunc(roots, counts) {
		return CgroupBusy, nil
	}
	return state, nil
}

// counts reports whether a kubepods directory belongs to the pids controller of version 1. Only that controller can prove there
// that a cgroup has no process: the other files list only processes of the reader's PID namespace, which is the agent's own
// (Linux, kernel/cgroup/cgroup-v1.c, pidlist_array_load).
func counts(root string) bool { return !missing(filepath.Join(root, "pids.current")) }

// lastRoots are the kubepods directories of the last search, which may lack new ones.
func (c *Cgroups) lastRoots() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.roots
}

// distrust makes each search fail with an error until it is nil.
func (c *Cgroups) distrust(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.doubt = err
}

// trustedRoots is podRoots unless the result proves nothing.
func (c *Cgroups) trustedRoots() ([]string, error) {
	roots, err := c.podRoots()
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil && c.doubt != nil {
		return nil, c.doubt
	}
	return roots, err
}

// podRoots returns the kubepods directories. It repeats the search after a moment, and at once when a directory has vanished:
// kubelet may have restarted with another cgroup driver or root, and a pod must not count as gone because its cgroup moved.
func (c *Cgroups) podRoots() ([]string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.roots) > 0 && time.Since(c.searched) < c.trust && !slices.ContainsFunc(c.roots, missing) {
		return c.roots, nil
	}
	started := time.Now()
	roots, err := search(c.root)
	if err != nil {
		return nil, fmt.Errorf("look for kubelet's pod cgroups: %w", err)
	}
	if len(roots) == 0 {
		return nil, fmt.Errorf("no kubepods cgroup below %s: %w", c.root, ErrNoPodCgroups)
	}
	// What an earlier kubelet made stays.
	if own, err := podState(roots, c.own); c.own != "" && err == nil && own == CgroupAbsent {
		return nil, fmt.Errorf("no cgroup of the agent's pod %s in %s: %w", c.own, strings.Join(roots, ", "), ErrNoPodCgroups)
	}
	c.roots, c.searched = roots, started
	return roots, nil
}

func search(top string) ([]string, error) {
	var roots []string
	err := filepath.WalkDir(top, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist) && path != top, isGone(err):
			return nil
		case err != nil:
			return err
		case !entry.IsDir():
			return nil
		case isPodRoot(entry.Name()):
			roots = append(roots, path)
			return fs.SkipDir
		case strings.Count(strings.TrimPrefix(path, top), "/") >= searchDepth:
			return fs.SkipDir
		}
		return nil
	})
	return roots, err
}

func missing(path string) bool {
	_, err := os.Stat(path)
	return err != nil
}

func isPodRoot(name string) bool {
	return name == "kubepods" || name == "kubepods.slice" || strings.HasSuffix(name, "-kubepods.slice")
}

// eachPod visits the cgroups of pods below a kubepods directory: guaranteed ones in it, others one level down.
func eachPod(root string, visit func(path, uid string)) error {
	entries, err := os.ReadDir(root)
	switch {
	case errors.Is(err, fs.ErrNotExist), isGone(err):
		return nil
	case err != nil:
		return err
	}
	for _, entry := range entries {
		if !entry.IsDir() {
			continue
		}
		path := filepath.Join(root, entry.Name())
		if uid, ok := podOf(entry.Name()); ok {
			visit(path, uid)
		} else if isClass(entry.Name()) {
			if err := eachPod(path, visit); err != nil {
				return err
			}
		}
	}
	return nil
}

// isClass reports whether it is the directory of a QoS class.
func isClass(name string) bool {
	return name == "burstable" || name == "besteffort" ||
		strings.HasSuffix(name, "-burstable.slice") || strings.HasSuffix(name, "-besteffort.slice")
}

// podOf returns the UID in the name of a pod's cgroup. The systemd driver writes an underscore for each dash, and UIDs have no
// underscores (k8s.io/kubernetes pkg/kubelet/cm, NewCgroupName).
func podOf(name string) (uid string, ok bool) {
	if slice, systemd := strings.CutSuffix(name, ".slice"); systemd {
		i := strings.LastIndex(slice, "-pod")
		if i < 0 {
			return "", false
		}
		return strings.ReplaceAll(slice[i+len("-pod"):], "_", "-"), true
	}
	return strings.CutPrefix(name, "pod")
}

// hasProcess reports whether a cgroup or one below it has a process. A cgroup that vanishes meanwhile has none.
func hasProcess(dir string) (bool, error) {
	// Version 2 reports the whole tree, and until the last thread has closed its files (cgroups(7)).
	if events, err := read(dir, "cgroup.events"); err != nil || events != nil {
		return bytes.Contains(events, []byte("populated 1")), err
	}
	busy := false
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist), isGone(err):
			return nil
		case err != nil:
			return err
		case !entry.IsDir():
			return nil
		}
		// In the pids controller's hierarchy pids.current counts all threads, including those of child cgroups and of all users.
		current, err := read(path, "pids.current")
		if err != nil {
			return err
		}
		if count := string(bytes.TrimSpace(current)); count != "" && count != "0" {
			busy = true
			return fs.SkipAll
		}
		// Threads, because cgroup.procs omits a process whose leader has ended before its other threads.
		tasks, err := read(path, "tasks")
		if err != nil {
			return err
		}
		if tasks == nil && !missing(path) {
			return fmt.Errorf("%s is no cgroup", path)
		}
		if len(tasks) > 0 {
			busy = true
			return fs.SkipAll
		}
		return nil
	})
	return busy, err
}

// read returns nil for a missing file.
func read(dir, name string) ([]byte, error) {
	data, err := os.ReadFile(filepath.Join(dir, name))
	switch {
	case errors.Is(err, fs.ErrNotExist), isGone(err):
		return nil, nil
	case err != nil:
		return nil, err
	}
	return data, nil
}

// isGone reports whether a read failed because the cgroup is being removed (cgroups(7): ENODEV).
func isGone(err error) bool { return errors.Is(err, syscall.ENODEV) }
