// SPDX-License-Identifier: Apache-2.0

// Package gobin builds the command of a published Go module once and keeps it in a cache outside the checkout, by
// version. It is for tools that are no dependency of ours (helm, nvidia-cdi-hook): each is built in a throw-away module,
// so nothing of it reaches our go.mod. It builds nothing of this repository.
package gobin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// Binary says what to build and how. The zero values of the optional fields build a static program for this machine.
type Binary struct {
	// Module and Version name the module, Package the main package in it.
	Module, Version, Package string
	// File is where the binary lies below the cache directory. It has to differ whenever the result would.
	File string
	// LDFlags and Env (KEY=value) are given to go build.
	LDFlags string
	Env     []string
}

// Helm is the command line of Helm, which tests, demo and e2e install the chart with.
func Helm() Binary {
	const version = "v4.3.1"
	return Binary{
		Module: "helm.sh/helm/v4", Version: version, Package: "helm.sh/helm/v4/cmd/helm",
		File:    filepath.Join("helm", version, "helm"),
		LDFlags: "-s -w -X helm.sh/helm/v4/internal/version.version=" + version,
		Env:     []string{"CGO_ENABLED=0"},
	}
}

// CacheDir is where built tools are kept: $TANDEM_CACHE itself, or tandem below the user's cache directory
// ($XDG_CACHE_HOME, ~/.cache). It does not make the directory.
func CacheDir() (string, error) {
	if dir := os.Getenv("TANDEM_CACHE"); dir != "" {
		return filepath.Abs(dir)
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the cache directory (set TANDEM_CACHE): %w", err)
	}
	return filepath.Join(dir, "tandem"), nil
}

// Ensure returns the path of the binary, building it first if the cache has none. Progress gets one line when a build
// starts and one when it ends. Safe to call from several processes at once: the last to finish wins with the same result.
func (b Binary) Ensure(ctx context.Context, progress io.Writer) (string, error) {
	cache, err := CacheDir()
	if err != nil {
		return "", err
	}
	path := filepath.Join(cache, b.File)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("look for %s: %w", path, err)
	}
	name, start := filepath.Base(b.File), time.Now()
	fmt.Fprintf(progress, "building %s %s (cached afterwards in %s)\n", name, b.Version, filepath.Dir(path))
	if err := b.build(ctx, path); err != nil {
		return "", fmt.Errorf("build %s %s: %w", name, b.Version, err)
	}
	fmt.Fprintf(progress, "built %s %s in %s\n", name, b.Version, time.Since(start).Round(time.Second))
	return path, nil
}

func (b Binary) build(ctx context.Context, path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	// Beside the result, so that the rename at the end stays on one file system.
	work, err := os.MkdirTemp(filepath.Dir(path), ".build-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)

	mod := fmt.Sprintf("module tandem.invalid/build\n\ngo 1.26.0\n\nrequire %s %s\n", b.Module, b.Version)
	if err := os.WriteFile(filepath.Join(work, "go.mod"), []byte(mod), 0o644); err != nil {
		return err
	}
	out := filepath.Join(work, "out")
	args := []string{"build", "-mod=mod", "-trimpath", "-buildvcs=false", "-ldflags", b.LDFlags, "-o", out, b.Package}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = work
	cmd.Env = append(append(os.Environ(), "GOFLAGS=", "GOWORK=off"), b.Env...)
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, output)
	}
	return os.Rename(out, path)
}
