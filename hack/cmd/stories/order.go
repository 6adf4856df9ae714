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
