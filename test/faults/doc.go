// SPDX-License-Identifier: Apache-2.0

// Package faults breaks things on a node of a test cluster: processes that cannot be killed, full file systems, directories that become
// read-only, and device plugins of other vendors. The end-to-end stories and the torture use it. Each fault returns a function that
// ends it, or has one that ends whatever an interrupted run has left.
package faults

import (
	"context"
	"errors"
	"fmt"
	"os/exec"

	"github.com/tandem-gpu/tandem/hack/cluster"
)

// run runs a command on a node and returns what it prints.
func run(ctx context.Context, node *cluster.Node, name string, args ...string) (string, error) {
	cmd, err := node.Command(ctx, name, args...)
	if err != nil {
		return "", err
	}
	out, err := cmd.Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return string(out), fmt.Errorf("%s on %s: %w: %s", name, node.Name(), err, exit.Stderr)
	}
	if err != nil {
		return string(out), fmt.Errorf("%s on %s: %w", name, node.Name(), err)
	}
	return string(out), nil
}
