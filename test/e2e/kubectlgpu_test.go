// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"debug/elf"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/hack/gotool"
)

// buildPlugin returns the path of the plugin, which is one static program.
func (s *story) buildPlugin() string {
	s.Helper()
	root, err := gotool.Root(s.ctx)
	if err != nil {
		s.Fatal(err)
	}
	dir := s.TempDir()
	program := filepath.Join(dir, "kubectl-gpu")
	cmd := gotool.Command(s.ctx, dir, []string{"CGO_ENABLED=0"}, "build", "-o", program, "./cmd/kubectl-gpu")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		s.Fatalf("build the plugin: %v\n%s", err, out)
	}
	file, err := elf.Open(program)
	if err != nil {
		s.Fatal(err)
	}
	defer file.Close()
	for _, part := range file.Progs {
		if part.Type == elf.PT_INTERP {
			s.Error("the plugin is not static")
		}
	}
	return program
}

// kubectlGPU runs the plugin as kubectl does: kubectl finds it in its PATH.
func (s *story) kubectlGPU(program string, args ...string) (string, error) {
	s.Helper()
	path := filepath.Dir(program)
	cmd, err := theCluster.Command(s.ctx, "sh", append([]string{"-c", `PATH="$0:$PATH" exec kubectl gpu "$@"`, path}, args...)...)
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

// TestKubectlGPUInspect: inspect runs in the agent's container, through kubelet.
func TestKubectlGPUInspect(t *testing.T) {
	s := begin(t)
	report, err := s.kubectlGPU(s.buildPlugin(), "inspect", gpuNode)
	if err != nil || !strings.Contains(report, "what the agent finds on this node") || !strings.Contains(report, "Calls of NVML") {
		t.Errorf("inspect: %v\n%s", err, report)
	}
}
