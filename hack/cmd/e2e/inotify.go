// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

const (
	// instancesFile bounds the inotify instances of all processes of a user, 128 by default (inotify(7)). It belongs
	// to the machine as a whole, namespaces or not.
	instancesFile = "/proc/sys/fs/inotify/max_user_instances"
	// instancesOfAll is enough for several clusters: each has some 40, of kubelets, containerds, API server and agents.
	instancesOfAll = 1024
)

// raise makes the number in a file as large as this if it is smaller, until restore is called. Another run that finds it large enough
// loses it with the first that ends.
func raise(path string, least int) (restore func() error, err error) {
	nothing := func() error { return nil }
	text, err := os.ReadFile(path)
	if err != nil {
		return nothing, fmt.Errorf("read limit: %w", err)
	}
	before := strings.TrimSpace(string(text))
	number, err := strconv.Atoi(before)
	if err != nil {
		return nothing, fmt.Errorf("read limit %s: %w", path, err)
	}
	if number >= least {
		return nothing, nil
	}
	set := func(value string) error {
		if err := os.WriteFile(path, []byte(value+"\n"), 0o644); err != nil {
			return fmt.Errorf("set limit %s to %s: %w", path, value, err)
		}
		return nil
	}
	if err := set(strconv.Itoa(least)); err != nil {
		return nothing, err
	}
	fmt.Printf("e2e: %s is %d meanwhile (%s before)\n", path, least, before)
	return func() error {
		if now, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(now)) != strconv.Itoa(least) {
			return nil // another process has changed it meanwhile
		}
		return set(before)
	}, nil
}
