// SPDX-License-Identifier: Apache-2.0

package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// Root writes the image's files but its programs into a directory: the C library with its loader, which program needs, and accounts. It is
// the root directory of containers that test hardware. It returns the loader and the directory of the libraries.
func Root(ctx context.Context, arch, program, dir string, progress io.Writer) (loader, libraries string, err error) {
	if err := ensureToolchain(ctx, arch, progress); err != nil {
		return "", "", err
	}
	t, err := targetFor(arch)
	if err != nil {
		return "", "", err
	}
	b, err := chooseBase(ctx, Options{Arch: arch, Progress: progress}, program)
	if err != nil {
		return "", "", err
	}
	files, err := b.collect(arch, program)
	if err != nil {
		return "", "", err
	}
	for _, f := range files {
		data, err := f.read()
		if err != nil {
			return "", "", err
		}
		path := filepath.Join(dir, f.path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, data, os.FileMode(f.mode))); err != nil {
			return "", "", fmt.Errorf("write root directory: %w", err)
		}
	}
	return filepath.Join(dir, t.interpreter), filepath.Join(dir, "lib", t.triplet), nil
}
