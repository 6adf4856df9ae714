// SPDX-License-Identifier: Apache-2.0

// Package gotool runs the go command so that an interrupted run leaves nothing behind.
package gotool

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
)

// productModule is the module at the root of the checkout. hack and test are modules of their own.
const productModule = "github.com/tandem-gpu/tandem"

// Root returns the root directory of this checkout. The working directory must be inside it.
func Root(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", productModule).Output()
	if err != nil {
		return "", fmt.Errorf("find the root of the checkout: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// ModuleDir returns the directory of the module that has a package. go list downloads the module where it is missing.
func ModuleDir(ctx context.Context, pkg string) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-f", "{{.Module.Dir}}", pkg).Output()
	if err != nil {
		return "", fmt.Errorf("find the module of %s: %w", pkg, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// Command is `go args...` with env (KEY=value) added to this process's environment. When ctx ends, it kills the go command
// together with the compilers and linkers that it started: the go command does not end them (go 1.26). It also leaves its
// temporary files behind, which is why they are below tmp, for the caller to remove.
func Command(ctx context.Context, tmp string, env []string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(append(os.Environ(), "GOTMPDIR="+tmp), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	return cmd
}

// FixedEnv has Go's defaults for the settings by which a machine's environment would change programs that are distributed.
var FixedEnv = []string{"GOAMD64=v1", "GOARM64=v8.0", "GOEXPERIMENT=", "CGO_CFLAGS=-O2 -g", "CGO_CXXFLAGS=-O2 -g", "CGO_LDFLAGS=-O2 -g"}

// LDFlags are those of a program of this module that is distributed: it has no symbols, and internal/version has version and commit.
func LDFlags(version, commit string, more ...string) string {
	const stamp = productModule + "/internal/version."
	flags := append([]string{"-s", "-w"}, more...)
	return strings.Join(append(flags, "-X", stamp+"Version="+version, "-X", stamp+"Commit="+commit), " ")
}
