// SPDX-License-Identifier: Apache-2.0

package figure

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Memory is what a process has resident, in MiB: now, at most so far, and of what is resident now the anonymous part and that of files.
type Memory struct{ Resident, Peak, Anonymous, Files float64 }

// ReadMemory reads the memory of a process that runs.
func ReadMemory(pid int) (Memory, error) { return ReadMemoryIn(fmt.Sprintf("/proc/%d", pid)) }

// ReadMemoryIn reads the memory of a process that runs from its directory in a proc file system (proc(5), status).
func ReadMemoryIn(dir string) (Memory, error) {
	data, err := os.ReadFile(filepath.Join(dir, "status"))
	if err != nil {
		return Memory{}, fmt.Errorf("read memory of process %s: %w", dir, err)
	}
	m, err := parseMemory(string(data))
	if err != nil {
		return Memory{}, fmt.Errorf("read memory of process %s: %w", dir, err)
	}
	return m, nil
}

func parseMemory(status string) (Memory, error) {
	var m Memory
	into := map[string]*float64{"VmRSS": &m.Resident, "VmHWM": &m.Peak, "RssAnon": &m.Anonymous, "RssFile": &m.Files}
	found := 0
	for line := range strings.Lines(status) {
		name, value, _ := strings.Cut(line, ":")
		if into[name] == nil {
			continue
		}
		kilobytes, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 64)
		if err != nil {
			return Memory{}, fmt.Errorf("%s: %w", name, err)
		}
		*into[name] = kilobytes / 1024
		found++
	}
	if found != len(into) {
		return Memory{}, errors.New("VmRSS, VmHWM, RssAnon or RssFile is missing")
	}
	return m, nil
}
