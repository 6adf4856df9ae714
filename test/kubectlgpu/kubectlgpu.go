// SPDX-License-Identifier: Apache-2.0

// Package kubectlgpu builds the kubectl plugin for tests on a cluster, and runs it as users do.
package kubectlgpu

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/gotool"
)

// Build writes the plugin into dir and returns its path. A plugin that is not one static program is an error.
func Build(ctx context.Context, dir string) (string, error) {
	root, err := gotool.Root(ctx)
	if err != nil {
		return "", err
	}
	program := filepath.Join(dir, "kubectl-gpu")
	cmd := gotool.Command(ctx, dir, []string{"CGO_ENABLED=0"}, "build", "-o", program, "./cmd/kubectl-gpu")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the plugin: %w\n%s", err, out)
	}
	file, err := elf.Open(program)
	if err != nil {
		return "", fmt.Errorf("read the plugin: %w", err)
	}
	defer file.Close()
	for _, part := range file.Progs {
		if part.Type == elf.PT_INTERP {
			return "", errors.New("the plugin is not static")
		}
	}
	return program, nil
}

// Run runs kubectl with the plugin of this path, which kubectl finds in its PATH, and returns what it printed. The error has what it wrote to
// standard error.
func Run(ctx context.Context, c *cluster.Cluster, program string, args ...string) (string, error) {
	cmd, err := c.Command(ctx, "sh", append([]string{"-c", `PATH="$0:$PATH" exec kubectl gpu "$@"`, filepath.Dir(program)}, args...)...)
	if err != nil {
		return "", err
	}
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = fmt.Errorf("kubectl gpu %v: %w: %s", args, err, exit.Stderr)
	}
	return string(out), err
}
