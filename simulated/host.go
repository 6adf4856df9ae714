// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// host is what a simulated machine takes over from the one that it runs on.
type host struct {
	cpus       []cpu
	memoryKiB  uint64
	freeMajors []uint32
	// devices is the content of proc's list of device numbers.
	devices []byte
}

// cpu is a logical CPU and its place.
type cpu struct{ id, core, socket int }

func readHost(options MaterializeOptions) (host, error) {
	cpus, err := readCPUs(filepath.Join(options.HostSysfs, "devices/system/cpu"))
	if err != nil {
		return host{}, err
	}
	memory, err := readMemory(filepath.Join(options.HostProc, "meminfo"))
	if err != nil {
		return host{}, err
	}
	devices, err := os.ReadFile(filepath.Join(options.HostProc, "devices"))
	if err != nil {
		return host{}, fmt.Errorf("read device numbers in use: %w", err)
	}
	free, err := freeMajors(devices)
	if err != nil {
		return host{}, err
	}
	return host{cpus: cpus, memoryKiB: memory, freeMajors: free, devices: devices}, nil
}

// readCPUs lists the online CPUs so that those of one core and of one socket are together.
func readCPUs(dir string) ([]cpu, error) {
	text, err := os.ReadFile(filepath.Join(dir, "online"))
	if err != nil {
		return nil, fmt.Errorf("read online CPUs: %w", err)
	}
	ids, err := parseList(strings.TrimSpace(string(text)))
	if err != nil {
		return nil, fmt.Errorf("read online CPUs: %w", err)
	}
	var cpus []cpu
	for _, id := range ids {
		topology := filepath.Join(dir, fmt.Sprintf("cpu%d", id), "topology")
		cpus = append(cpus, cpu{
			id:     id,
			core:   readNumber(filepath.Join(topology, "core_id"), id),
			socket: readNumber(filepath.Join(topology, "physical_package_id"), 0),
		})
	}
	slices.SortFunc(cpus, func(a, b cpu) int {
		return cmp.Or(cmp.Compare(a.socket, b.socket), cmp.Compare(a.core, b.core), cmp.Compare(a.id, b.id))
	})
	return cpus, nil
}

// readNumber reads a number where the platform tells it; some virtual machines do not.
func readNumber(path string, fallback int) int {
	text, err := os.ReadFile(path)
	if err != nil {
		return fallback
	}
	number, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return fallback
	}
	return number
}

// parseList reads the kernel's list format, "0-3,8".
func parseList(text string) ([]int, error) {
	var ids []int
	for part := range strings.SplitSeq(text, ",") {
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		first, err := strconv.Atoi(from)
		if err != nil {
			return nil, err
		}
		last, err := strconv.Atoi(to)
		if err != nil {
			return nil, err
		}
		for id := first; id <= last; id++ {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

var totalMemory = regexp.MustCompile(`(?m)^MemTotal:\s+([0-9]+) kB$`)

func readMemory(path string) (uint64, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("read memory size: %w", err)
	}
	found := totalMemory.FindSubmatch(text)
	if found == nil {
		return 0, fmt.Errorf("read memory size: no MemTotal in %s", path)
	}
	return strconv.ParseUint(string(found[1]), 10, 64)
}

// freeMajors lists character device majors that no driver of the host has, of those the kernel hands out to drivers
// that ask for any (511 down to 384, Documentation/admin-guide/devices.txt).
func freeMajors(devices []byte) ([]uint32, error) {
	characters, _, _ := strings.Cut(string(devices), "Block devices:")
	used := map[string]bool{}
	for line := range strings.Lines(characters) {
		if fields := strings.Fields(line); len(fields) == 2 {
			used[fields[0]] = true
		}
	}
	var free []uint32
	for major := uint32(511); major >= 384; major-- {
		if !used[strconv.Itoa(int(major))] {
			free = append(free, major)
		}
	}
	if len(free) < freeMajorsNeeded {
		return nil, fmt.Errorf("read device numbers in use: %d free majors between 384 and 511, want %d", len(free), freeMajorsNeeded)
	}
	return free, nil
}

// divide cuts the CPUs into as many runs as there are NUMA nodes, as even as they go.
func divide(cpus []cpu, nodes int) [][]cpu {
	divided := make([][]cpu, nodes)
	for node := range nodes {
		divided[node] = cpus[node*len(cpus)/nodes : (node+1)*len(cpus)/nodes]
	}
	return divided
}
