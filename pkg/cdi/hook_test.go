// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/tandem-gpu/tandem/pkg/cdi"
)

func binary(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "nvidia-cdi-hook")
	check(t, os.WriteFile(path, []byte(content), 0o755))
	return path
}

func TestHook(t *testing.T) {
	target := filepath.Join(t.TempDir(), "plugins/gpu.nvidia.com/nvidia-cdi-hook")
	damage := map[string]func(t *testing.T){
		"missing":        func(*testing.T) {},
		"removed":        func(t *testing.T) { check(t, os.Remove(target)) },
		"older version":  func(t *testing.T) { check(t, os.WriteFile(target, []byte("old"), 0o755)) },
		"not executable": func(t *testing.T) { check(t, os.Chmod(target, 0o644)) },
		"truncated":      func(t *testing.T) { check(t, os.Truncate(target, 2)) },
	}
	for _, name := range []string{"missing", "removed", "older version", "not executable", "truncated"} {
		damage[name](t)
		hook := cdi.NewHook(binary(t, "the hook"), target)
		check(t, hook.Ensure())
		info, err := os.Stat(target)
		check(t, err)
		data, err := os.ReadFile(target)
		check(t, err)
		if string(data) != "the hook" || info.Mode().Perm() != 0o755 {
			t.Errorf("%s: %q with mode %s", name, data, info.Mode())
		}
		entries, err := os.ReadDir(filepath.Dir(target))
		if err != nil || len(entries) != 1 {
			t.Errorf("%s: directory has %v, %v", name, entries, err)
		}
	}
}

func TestHookIsNotReplacedBySame(t *testing.T) {
	target := filepath.Join(t.TempDir(), "nvidia-cdi-hook")
	check(t, cdi.NewHook(binary(t, "the hook"), target).Ensure())
	before, err := os.Stat(target)
	check(t, err)
	check(t, cdi.NewHook(binary(t, "the hook"), target).Ensure())
	after, err := os.Stat(target)
	check(t, err)
	if !os.SameFile(before, after) {
		t.Error("the same binary was installed again: a new inode")
	}
}

func TestHookWithoutSource(t *testing.T) {
	hook := cdi.NewHook(filepath.Join(t.TempDir(), "missing"), filepath.Join(t.TempDir(), "hook"))
	if err := hook.Ensure(); err == nil {
		t.Error("no error")
	}
	var none *cdi.Hook
	check(t, none.Ensure())
}
