// SPDX-License-Identifier: Apache-2.0

package driverroot

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestResolve(t *testing.T) {
	root := t.TempDir()
	write(t, filepath.Join(root, "usr/lib/real"))
	symlink(t, "/usr/lib/real", filepath.Join(root, "etc/absolute"))
	symlink(t, "../usr/lib/real", filepath.Join(root, "etc/relative"))
	symlink(t, "../../../../../usr/lib/real", filepath.Join(root, "etc/above"))
	symlink(t, "usr/lib", filepath.Join(root, "lib"))
	symlink(t, "loop", filepath.Join(root, "loop"))
	for path, want := range map[string]string{
		"/usr/lib/real": "/usr/lib/real", "etc/absolute": "/usr/lib/real", "etc/relative": "/usr/lib/real",
		"etc/above": "/usr/lib/real", "lib/real": "/usr/lib/real", "/": "/", "etc/../lib/real": "/usr/lib/real",
	} {
		if got, err := Resolve(root, path); err != nil || got != want {
			t.Errorf("%s is %q, %v; want %q", path, got, err, want)
		}
	}
	if _, err := Resolve(root, "missing"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
	if _, err := Resolve(root, "loop"); !errors.Is(err, syscall.ELOOP) {
		t.Errorf("loop: %v", err)
	}
}

func TestFind(t *testing.T) {
	root := t.TempDir()
	symlink(t, "/opt/bin", filepath.Join(root, "bin"))
	if _, err := Find(root, "nvidia-smi"); err == nil || !strings.Contains(err.Error(), "usr/local/nvidia/bin below "+root) {
		t.Errorf("nothing there: %v", err)
	}
	write(t, filepath.Join(root, "opt/bin/nvidia-smi"))
	if path, err := Find(root, "nvidia-smi"); err != nil || path != "/opt/bin/nvidia-smi" {
		t.Errorf("found %q, %v", path, err)
	}
}

func write(t *testing.T, path string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o755)); err != nil {
		t.Fatal(err)
	}
}

func symlink(t *testing.T, target, path string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.Symlink(target, path)); err != nil {
		t.Fatal(err)
	}
}
