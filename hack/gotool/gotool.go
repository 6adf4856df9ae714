// SPDX-License-Identifier: Apache-2.0

// Package gotool runs the go command so that an interrupted run leaves nothing behind. It decides nothing about builds.
package gotool

import (
	"context"
	"os"
	"os/exec"
	"syscall"
)

// Command is `go args...` with env (KEY=value) above this process's environment. When ctx ends the go command is killed with
// the compilers and linkers that it runs, which it does not end itself. Its temporary files are below tmp, for the caller to
// remove: killed or interrupted it does not do that either (go 1.26).
func Command(ctx context.Context, tmp string, env []string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(append(os.Environ(), "GOTMPDIR="+tmp), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	return cmd
}
