// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/hack/binaries"
)

// durations are how long stories took when they passed last, in seconds.
type durations map[string]float64

func durationsFile() (string, error) {
	cache, err := binaries.CacheDir()
	return filepath.Join(cache, "stories.json"), err
}

// readDurations are those of earlier runs on this machine. A file that cannot be decoded counts as none: it costs time only.
func readDurations() (durations, error) {
	took := durations{}
	path, err := durationsFile()
	if err != nil {
		return took, err
	}
	data, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return took, fmt.Errorf("read durations: %w", err)
	}
	if json.Unmarshal(data, &took) != nil {
		return durations{}, nil
	}
	return took, nil
}

// add keeps newer durations for the next run. Runs at the same time may lose those of each other.
func (d durations) add(newer durations) error {
	maps.Copy(d, newer)
	path, err := durationsFile()
	if err != nil {
		return err
	}
	data, err := json.Marshal(d)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o755)
	}
	if err == nil {
		next := fmt.Sprintf("%s.%d", path, os.Getpid())
		err = os.WriteFile(next, data, 0o644)
		if err == nil {
			err = os.Rename(next, path)
		}
	}
	if err != nil {
		return fmt.Errorf("keep durations: %w", err)
	}
	return nil
}

// order is the one in which the stories are played: those without a known duration, then the longest first. Equal ones are in a new order
// each time, so that no story comes to need another one.
func order(names []string, took durations) []string {
	names = slices.Clone(names)
	rand.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	of := func(name string) float64 {
		if seconds, known := took[name]; known {
			return seconds
		}
		return math.Inf(1)
	}
	slices.SortStableFunc(names, func(a, b string) int { return cmp.Compare(of(b), of(a)) })
	return names
}

const (
	// memoryEach is what a cluster needs, in KiB.
	memoryEach = 2 << 20
	// instancesOfAll are inotify instances for mostClusters: each has some 40, of kubelets, containerds, API server and agents.
	instancesOfAll, mostClusters = 1024, 8
	// A machine whose CPUs were idle for this share of the window carries one cluster more.
	idleWindow, idleEnough = 45 * time.Second, 0.5
)

// carried is how many clusters more the memory of the machine carries now; zero if it cannot be read.
func carried() int {
	meminfo, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	return carriedBy(string(meminfo))
}

func carriedBy(meminfo string) int {
	for line := range strings.Lines(meminfo) {
		var available int
		if _, err := fmt.Sscanf(line, "MemAvailable: %d kB", &available); err == nil {
			return min(available/memoryEach, mostClusters)
		}
	}
	return 0
}

// cpuTimes are the ticks that the CPUs have been idle, and all their ticks.
type cpuTimes struct{ idle, all float64 }

// readTimes returns those since the machine started; zeros where /proc/stat cannot be read.
func readTimes() cpuTimes {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return cpuTimes{}
	}
	return timesIn(string(stat))
}

// timesIn takes the first line of /proc/stat (proc_stat(5)): user, nice, system, idle, iowait, irq, softirq, steal.
func timesIn(stat string) (t cpuTimes) {
	line, _, _ := strings.Cut(stat, "\n")
	for i, field := range strings.Fields(strings.TrimPrefix(line, "cpu ")) {
		ticks, err := strconv.ParseFloat(field, 64)
		if err != nil || i > 7 {
			return t
		}
		if t.all += ticks; i == 3 {
			t.idle = ticks
		}
	}
	return t
}

// idleSince is the share of the time after earlier in which the CPUs were idle; zero if either could not be read.
func (t cpuTimes) idleSince(earlier cpuTimes) float64 {
	if t.all <= earlier.all || earlier.all == 0 {
		return 0
	}
	return (t.idle - earlier.idle) / (t.all - earlier.all)
}
