// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

const cgroupRoot = "/sys/fs/cgroup"

// hierarchy is one cgroup file system of the host.
type hierarchy struct {
	// dir is its mount point; options mount it again (v1: its controllers or name; v2: empty).
	dir, options string
	v2           bool
}

// hierarchies lists the host's cgroup file systems below /sys/fs/cgroup: all v1 ones, or the one v2 at its root. The v2
// one that a hybrid host has beside v1 carries no controller and is left out.
func hierarchies() ([]hierarchy, error) {
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("list cgroup file systems: %w", err)
	}
	defer file.Close()
	var lines []string
	scanner := bufio.NewScanner(file)
	for scanner.Scan() {
		lines = append(lines, scanner.Text())
	}
	if err := scanner.Err(); err != nil {
		return nil, fmt.Errorf("list cgroup file systems: %w", err)
	}
	found := parseHierarchies(lines)
	if len(found) == 0 {
		return nil, errors.New("list cgroup file systems: none below " + cgroupRoot)
	}
	return found, nil
}

// parseHierarchies reads lines of mountinfo (proc(5)).
func parseHierarchies(mountinfo []string) []hierarchy {
	var found []hierarchy
	seen := map[string]bool{}
	for _, line := range mountinfo {
		mount, source, ok := strings.Cut(line, " - ")
		before, after := strings.Fields(mount), strings.Fields(source)
		if !ok || len(before) < 5 || len(after) < 3 || seen[before[4]] {
			continue
		}
		dir := before[4]
		switch {
		case after[0] == "cgroup2" && dir == cgroupRoot:
			return []hierarchy{{dir: dir, v2: true}}
		case after[0] == "cgroup" && filepath.Dir(dir) == cgroupRoot:
			seen[dir] = true
			found = append(found, hierarchy{dir: dir, options: v1Options(after[2])})
		}
	}
	return found
}

// v1Options keeps of the mount options those that say which hierarchy it is.
func v1Options(options string) string {
	var kept []string
	for option := range strings.SplitSeq(options, ",") {
		switch option {
		case "rw", "ro", "relatime", "xattr", "clone_children", "noprefix":
			continue
		}
		if strings.HasPrefix(option, "release_agent=") {
			continue
		}
		if strings.HasPrefix(option, "name=") {
			kept = append(kept, "none")
		}
		kept = append(kept, option)
	}
	return strings.Join(kept, ",")
}

// makeCgroup makes a machine's cgroup in every hierarchy, with all CPUs and memory nodes of the host. It is idempotent.
func makeCgroup(name string) error {
	found, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range found {
		dir := filepath.Join(h.dir, name)
		if h.v2 {
			if err := delegate(h.dir); err != nil {
				return err
			}
		}
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("make cgroup: %w", err)
		}
		if h.v2 {
			continue
		}
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			value, err := os.ReadFile(filepath.Join(h.dir, file))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return fmt.Errorf("read cgroup setting: %w", err)
			}
			if err := os.WriteFile(filepath.Join(dir, file), value, 0o644); err != nil {
				return fmt.Errorf("set up cgroup: %w", err)
			}
		}
		// Without it each group made below starts with no CPU and takes no process.
		clone := filepath.Join(dir, "cgroup.clone_children")
		if err := os.WriteFile(clone, []byte("1"), 0o644); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("set up cgroup: %w", err)
		}
	}
	return nil
}

// delegate makes the controllers that kubelet needs available to the groups below a v2 group.
func delegate(dir string) error {
	has, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return fmt.Errorf("read cgroup controllers: %w", err)
	}
	control := filepath.Join(dir, "cgroup.subtree_control")
	delegated, err := os.ReadFile(control)
	if err != nil {
		return fmt.Errorf("read delegated cgroup controllers: %w", err)
	}
	for _, controller := range []string{"cpuset", "cpu", "io", "memory", "pids", "hugetlb"} {
		if !slices.Contains(strings.Fields(string(has)), controller) || slices.Contains(strings.Fields(string(delegated)), controller) {
			continue
		}
		if err := os.WriteFile(control, []byte("+"+controller), 0o644); err != nil {
			return fmt.Errorf("delegate cgroup controller %s: %w", controller, err)
		}
	}
	return nil
}

// removeCgroup removes a machine's cgroup with all below it, once its processes have left. It is idempotent.
func removeCgroup(ctx context.Context, name string) error {
	found, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range found {
		dir := filepath.Join(h.dir, name)
		var last error
		// A process that has ended still counts for a moment.
		err := until(ctx, func() bool {
			last = removeGroups(dir)
			return last == nil
		})
		if err != nil {
			return fmt.Errorf("remove cgroup: %w", errors.Join(last, err))
		}
	}
	return nil
}

// removeGroups removes a directory of cgroups from the leaves up: only directories can be removed there.
func removeGroups(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if entry.IsDir() {
			if err := removeGroups(filepath.Join(dir, entry.Name())); err != nil {
				return err
			}
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
