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
	"runtime"
	"slices"
	"strings"

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

// add keeps newer durations for the next run.
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
		err = os.WriteFile(path+".new", data, 0o644)
	}
	if err == nil {
		err = os.Rename(path+".new", path)
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
)

// carried is how many clusters the machine carries. One cluster keeps about one CPU busy.
func carried() int {
	meminfo, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 1
	}
	return carriedBy(runtime.NumCPU(), string(meminfo))
}

func carriedBy(cpus int, meminfo string) int {
	for line := range strings.Lines(meminfo) {
		var available int
		if _, err := fmt.Sscanf(line, "MemAvailable: %d kB", &available); err == nil {
			return max(1, min(cpus, available/memoryEach, mostClusters))
		}
	}
	return 1
}
