// SPDX-License-Identifier: Apache-2.0

// Package simdriver compiles the programs of a simulated driver for tests that run them, and makes a driver root of them.
package simdriver

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/simulated/programs"
)

const pkg = "github.com/tandem-gpu/tandem/cmd/simulated-driver"

// Build compiles the program into a directory of the test, and returns its path.
func Build(t testing.TB) string {
	t.Helper()
	content, err := once()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "simulated-driver")
	if err := os.WriteFile(path, content, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// once compiles at most once a process: the program itself is kept, for there is no end of a process to remove a file at.
var once = sync.OnceValues(func() ([]byte, error) {
	tmp, err := os.MkdirTemp("", "simulated-driver-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp)
	out := filepath.Join(tmp, "simulated-driver")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", out, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOTMPDIR="+tmp)
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); err != nil {
		return nil, err
	}
	return os.ReadFile(out)
})

// Faults of MPSControl, as package programs has them.
const (
	Fail     = programs.FaultFail
	Hang     = programs.FaultHang
	Mute     = programs.FaultMute
	Stubborn = programs.FaultStubborn
)

// MPSControl is the path of nvidia-cuda-mps-control in a driver root.
const MPSControl = "/" + programs.Dir + "/" + programs.MPSControl

// Install puts MPS into a driver root, with the directories that it needs in one that it is chrooted in.
func Install(t testing.TB, root string) {
	t.Helper()
	content, err := once()
	for _, dir := range []string{programs.Dir, "tmp", "dev/shm", filepath.Dir(programs.FaultFile(programs.MPSControl))} {
		err = errors.Join(err, os.MkdirAll(filepath.Join(root, dir), 0o755))
	}
	// A program does not run while a process has it open for writing: one that a test beside this one is about to start would have it.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	for _, name := range []string{programs.MPSControl, programs.MPSServer} {
		err = errors.Join(err, os.WriteFile(filepath.Join(root, programs.Dir, name), content, 0o755))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Fault puts a fault of MPSControl into force: its word, and what it says. An empty one is none.
func Fault(t testing.TB, root, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(root, programs.FaultFile(programs.MPSControl)), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
