// SPDX-License-Identifier: Apache-2.0

package gobin

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestEnsureTakesWhatTheCacheHas(t *testing.T) {
	t.Setenv("TANDEM_CACHE", t.TempDir())
	t.Setenv("PATH", "") // no go: a build would fail
	b := Helm()
	want := filepath.Join(os.Getenv("TANDEM_CACHE"), "helm", b.Version, "helm")
	if err := os.MkdirAll(filepath.Dir(want), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(want, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	var progress bytes.Buffer
	got, err := b.Ensure(t.Context(), &progress)
	if err != nil || got != want || progress.Len() > 0 {
		t.Errorf("got %s (%v), progress %q", got, err, &progress)
	}
}

// A build that fails says why and leaves nothing that the next one would take for a result.
func TestEnsureFailsCleanly(t *testing.T) {
	cache := t.TempDir()
	t.Setenv("TANDEM_CACHE", cache)
	t.Setenv("GOPROXY", "off")
	t.Setenv("GOMODCACHE", filepath.Join(t.TempDir(), "mod"))
	var progress bytes.Buffer
	b := Binary{Module: "example.com/m", Version: "v1.2.3", Package: "example.com/m/cmd/tool", File: "tool/v1.2.3/tool"}
	_, err := b.Ensure(t.Context(), &progress)
	if err == nil || !strings.Contains(err.Error(), "build tool v1.2.3") || !strings.Contains(err.Error(), "example.com/m") {
		t.Errorf("error is %v", err)
	}
	if !strings.Contains(progress.String(), "building tool v1.2.3") {
		t.Errorf("progress is %q", &progress)
	}
	left, err := os.ReadDir(filepath.Join(cache, "tool", "v1.2.3"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v (%v)", left, err)
	}
}

func TestCacheDir(t *testing.T) {
	home := t.TempDir()
	for name, c := range map[string]struct{ cache, xdg, want string }{
		"set":     {"/c", "/x", "/c"},
		"xdg":     {"", "/x", "/x/tandem"},
		"default": {"", "", filepath.Join(home, ".cache", "tandem")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("TANDEM_CACHE", c.cache)
			t.Setenv("XDG_CACHE_HOME", c.xdg)
			t.Setenv("HOME", home)
			if got, err := CacheDir(); err != nil || got != c.want {
				t.Errorf("got %s (%v), want %s", got, err, c.want)
			}
		})
	}
}
