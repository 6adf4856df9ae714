// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/gotool"
)

// shell becomes a command, a shell by default, with kubectl, the kubectl plugin and helm in its PATH and the cluster in its KUBECONFIG.
// It returns only errors.
func shell(ctx context.Context, dir string, command []string) error {
	c, err := open(dir)
	if err != nil {
		return err
	}
	plugin, err := pluginPath(ctx)
	if err != nil {
		return err
	}
	if err := os.Setenv("PATH", filepath.Dir(plugin)+":"+os.Getenv("PATH")); err != nil {
		return fmt.Errorf("set PATH: %w", err)
	}
	if len(command) == 0 {
		fmt.Fprintln(os.Stderr, "kubectl, kubectl gpu and helm reach the demo's cluster in this shell. exit leaves it.")
		command = []string{"bash"}
	}
	cmd, err := c.Command(ctx, command[0], command[1:]...)
	if err != nil {
		return err
	}
	return fmt.Errorf("start %s: %w", command[0], unix.Exec(cmd.Path, cmd.Args, os.Environ()))
}

// open finds the demo's cluster.
func open(dir string) (*cluster.Cluster, error) {
	c, err := cluster.Open(dir, os.Stderr)
	if err != nil {
		return nil, fmt.Errorf("find the demo (make demo starts it): %w", err)
	}
	return c, nil
}

// pluginPath is where demo.sh builds the kubectl plugin.
func pluginPath(ctx context.Context) (string, error) {
	root, err := gotool.Root(ctx)
	return filepath.Join(root, "bin", "kubectl-gpu"), err
}
