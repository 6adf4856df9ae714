// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// CollectLogs copies every component's log and every container's log into a directory, with what the API server knows
// (nodes, pods, claims, slices, events). It collects what it can and reports what it could not.
func (c *Cluster) CollectLogs(ctx context.Context, dir string) error {
	var problems []error
	for _, machine := range c.machines() {
		to := filepath.Join(dir, machine.name)
		problems = append(problems, copyTree(filepath.Join(machine.dir, "logs"), to),
			copyTree(machine.path("/var/log/pods"), filepath.Join(to, "pods")))
	}
	for file, args := range map[string][]string{
		"objects.yaml": {"get", "nodes,pods,daemonsets,resourceclaims,resourceslices,deviceclasses", "--all-namespaces", "-o", "yaml"},
		"events.txt":   {"get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"},
		"pods.txt":     {"get", "pods", "--all-namespaces", "-o", "wide"},
	} {
		out, err := c.Kubectl(ctx, args...)
		problems = append(problems, err, os.WriteFile(filepath.Join(dir, file), []byte(out), 0o644))
	}
	if err := errors.Join(problems...); err != nil {
		return fmt.Errorf("collect logs: %w", err)
	}
	return nil
}

func copyTree(from, to string) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	return copyEntry(from, to, true)
}
