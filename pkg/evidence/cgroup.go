// SPDX-License-Identifier: Apache-2.0

// Package evidence reads what the kernel, kubelet and the API server know about who still runs on the node: pod cgroups,
// kubelet's two checkpoints, its pod resources endpoint, and the node's pods. It judges single holds and changes nothing.
package evidence

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
)

// Cgroups finds the cgroups that kubelet makes for pods, below the root of the host's cgroup file system, in any hierarchy
// of version 1 or 2, with the cgroupfs driver (".../kubepods/burstable/pod<UID>") and the systemd driver
// (".../kubepods-burstable-pod<UID with underscores>.slice").
type Cgroups struct {
	root string

	mu    sync.Mutex
	roots []string // kubepods directories found so far
}

// NewCgroups looks below root, usually /sys/fs/cgroup of the host.
func NewCgroups(root string) *Cgroups { return &Cgroups{root: root} }

// PodCgroup is what the kernel says of a pod.
type PodCgroup int

const (
	CgroupAbsent PodCgroup = iota // no cgroup of the pod is left
	CgroupEmpty                   // there is one, without a process
	CgroupBusy                    // a process of the pod lives
)

// searchDepth covers <hierarchy>/<kubelet's cgroupRoot, two levels>/<parent slice>/kubepods.
const searchDepth = 5

// Pod reports on the pod of that UID. An error means that nothing is known.
func (c *Cgroups) Pod(uid string) (PodCgroup, error) {
	roots, err := c.podRoots()
	if err != nil {
		return CgroupBusy, err
	}
	state := CgroupAbsent
	for _, root := range roots {
		found, err := podDirectories(root, uid)
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
		}
	}
	return state, nil
}

// podRoots are the kubepods directories. They are looked for once, and again when one of them has vanished.
func (c *Cgroups) podRoots() ([]string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.roots) > 0 && !slices.ContainsFunc(c.roots, missing) {
		return c.roots, nil
	}
	c.roots = nil
	err := filepath.WalkDir(c.root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist) && path != c.root:
			return nil
		case err != nil:
			return err
		case !entry.IsDir():
			return nil
		case isPodRoot(entry.Name()):
			c.roots = append(c.roots, path)
			return fs.SkipDir
		case strings.Count(strings.TrimPrefix(path, c.root), "/") >= searchDepth:
			return fs.SkipDir
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look for kubelet's pod cgroups: %w", err)
	}
	if len(c.roots) == 0 {
		return nil, fmt.Errorf("no kubepods cgroup below %s: is the host's cgroup file system mounted there?", c.root)
	}
	return c.roots, nil
}

func missing(path string) bool {
	_, err := os.Stat(path)
	return err != nil
}

func isPodRoot(name string) bool {
	return name == "kubepods" || name == "kubepods.slice" || strings.HasSuffix(name, "-kubepods.slice")
}

func podDirectories(root, uid string) ([]string, error) {
	entries, err := readDirectory(root)
	if err != nil {
		return nil, err
	}
	var found []string
	for _, name := range entries {
		path := filepath.Join(root, name)
		switch {
		case isPod(name, uid):
			found = append(found, path)
		case strings.Contains(name, "burstable") || strings.Contains(name, "besteffort"):
			if strings.Contains(name, "pod") && !strings.HasSuffix(name, "burstable.slice") && !strings.HasSuffix(name, "besteffort.slice") {
				continue // another pod's slice
			}
			names, err := readDirectory(path)
			if err != nil {
				return nil, err
			}
			for _, name := range names {
				if isPod(name, uid) {
					found = append(found, filepath.Join(path, name))
				}
			}
		}
	}
	return found, nil
}

func isPod(name, uid string) bool {
	return name == "pod"+uid || strings.HasSuffix(name, "-pod"+strings.ReplaceAll(uid, "-", "_")+".slice")
}

func readDirectory(path string) ([]string, error) {
	entries, err := os.ReadDir(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var names []string
	for _, entry := range entries {
		if entry.IsDir() {
			names = append(names, entry.Name())
		}
	}
	return names, nil
}

// hasProcess looks for a process in a cgroup and those below it. A directory that vanishes meanwhile has none.
func hasProcess(dir string) (bool, error) {
	busy := false
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if !entry.IsDir() {
			return nil
		}
		processes, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		switch {
		case errors.Is(err, fs.ErrNotExist) || isGone(err):
			return nil
		case err != nil:
			return err
		case len(processes) > 0:
			busy = true
			return fs.SkipAll
		}
		return nil
	})
	return busy, err
}

// isGone recognises a read from a cgroup that is being removed (cgroups(7): ENODEV).
func isGone(err error) bool { return errors.Is(err, syscall.ENODEV) }
