// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"debug/elf"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"

	"github.com/tandem-gpu/tandem/hack/gotool"
)

// BuildPlugin builds the kubectl plugin, as one static program, and returns its path.
func (s *Story) BuildPlugin() string {
	s.Helper()
	root, err := gotool.Root(s.Ctx)
	if err != nil {
		s.Fatal(err)
	}
	program := filepath.Join(s.TempDir(), "kubectl-gpu")
	cmd := gotool.Command(s.Ctx, s.TempDir(), []string{"CGO_ENABLED=0"}, "build", "-o", program, "./cli/kubectl-gpu")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		s.Fatalf("build the plugin: %v\n%s", err, out)
	}
	file, err := elf.Open(program)
	if err != nil {
		s.Fatalf("read the plugin: %v", err)
	}
	defer file.Close()
	for _, part := range file.Progs {
		if part.Type == elf.PT_INTERP {
			s.Fatal("the plugin is not static")
		}
	}
	return program
}

// KubectlGPU runs kubectl with the plugin of this path, which kubectl finds in its PATH, and returns what it printed. The error has what it
// wrote to standard error.
func (s *Story) KubectlGPU(program string, args ...string) (string, error) {
	cmd, err := s.Cluster.Command(s.Ctx, "sh", append([]string{"-c", `PATH="$0:$PATH" exec kubectl gpu "$@"`, filepath.Dir(program)}, args...)...)
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
