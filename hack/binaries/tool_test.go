// SPDX-License-Identifier: Apache-2.0

package binaries

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestToolTakesWhatTheCacheHas(t *testing.T) {
	t.Setenv("TANDEM_CACHE", t.TempDir())
	t.Setenv("PATH", "") // no go: a build would fail
	source := []byte("package main")
	for path, tool := range map[string]Tool{
		"program/v1.2.3-" + hashOf(source) + "/program":    {Module: "example.com/m", Version: "v1.2.3", Package: "program", Source: source},
		"helm/" + Helm().Version + sharedVariant + "/helm": Helm(),
		"tool/v1.2.3-static-arm64/tool":                    {Module: "example.com/m", Version: "v1.2.3", Package: "example.com/m/cmd/tool", Variant: "-static-arm64"},
	} {
		want := filepath.Join(os.Getenv("TANDEM_CACHE"), path)
		if err := os.MkdirAll(filepath.Dir(want), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(want, []byte("#!/bin/sh\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		var progress bytes.Buffer
		got, err := tool.Ensure(t.Context(), &progress)
		if err != nil || got != want || progress.Len() > 0 {
			t.Errorf("got %s (%v), progress %q", got, err, &progress)
		}
	}
	// The cluster's Helm is the same one.
	set, err := Locate(nil)
	if err != nil || set.Helm != filepath.Join(os.Getenv("TANDEM_CACHE"), "helm", Helm().Version+sharedVariant) {
		t.Errorf("the set has Helm in %s (%v)", set.Helm, err)
	}
}

func TestToolNamesTheModuleThatCannotBeHad(t *testing.T) {
	cache := t.TempDir()
	t.Setenv("TANDEM_CACHE", cache)
	t.Setenv("GOPROXY", "off")
	t.Setenv("GOMODCACHE", filepath.Join(t.TempDir(), "mod"))
	tool := Tool{Module: "example.com/m", Version: "v1.2.3", Package: "example.com/m/cmd/tool", Variant: "-static"}
	_, err := tool.Ensure(t.Context(), nil)
	if err == nil || !strings.Contains(err.Error(), "build tool v1.2.3") || !strings.Contains(err.Error(), "example.com/m v1.2.3") {
		t.Errorf("error is %v", err)
	}
	left, err := os.ReadDir(filepath.Join(cache, "tool"))
	if err != nil || len(left) != 1 || left[0].Name() != ".v1.2.3-static.lock" {
		t.Errorf("left behind: %v (%v)", left, err)
	}
}
