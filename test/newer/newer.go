// SPDX-License-Identifier: Apache-2.0

// Package newer builds an image of Tandem whose agent is one version ahead of the sources: its records have a field that
// today's agent does not know. Tests upgrade to it and downgrade, so that today's agent reads records of a later version.
package newer

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/image"
)

// ahead is what differs in pkg/ledger/ledger.go.
var ahead = [][2]string{
	{"type Hold struct {", "type Hold struct {\n\tNewer string `json:\"newer\"`"},
}

// Image builds into dir and answers the tarball of an image that is imported under the name ref (image.DefaultRef where empty).
// Progress gets a line a step. Nothing is rebuilt where the sources are those of the tarball already there.
func Image(ctx context.Context, dir, ref string, progress io.Writer) (tarball string, err error) {
	root, err := gotool.Root(ctx)
	if err != nil {
		return "", err
	}
	file, err := overlay(root, dir)
	if err != nil {
		return "", err
	}
	tarball, _, err = image.Build(ctx, image.Options{
		Root: root, Out: filepath.Join(dir, "image"), Version: "newer", Ref: ref, Overlay: file, Progress: progress,
	})
	return tarball, err
}

// overlay writes the changed source into dir, with the file that go build -overlay takes, and answers the latter.
func overlay(root, dir string) (string, error) {
	source := filepath.Join(root, "pkg", "ledger", "ledger.go")
	data, err := os.ReadFile(source)
	if err != nil {
		return "", fmt.Errorf("read what a newer agent has changed: %w", err)
	}
	text := string(data)
	for _, change := range ahead {
		if strings.Count(text, change[0]) != 1 {
			return "", fmt.Errorf("%s does not say %q once", source, change[0])
		}
		text = strings.Replace(text, change[0], change[1], 1)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make directory: %w", err)
	}
	changed, file := filepath.Join(dir, "ledger.go"), filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(changed, []byte(text), 0o644); err != nil {
		return "", fmt.Errorf("write the newer source: %w", err)
	}
	replace, err := json.Marshal(map[string]any{"Replace": map[string]string{source: changed}})
	if err != nil {
		return "", fmt.Errorf("encode overlay: %w", err)
	}
	if err := os.WriteFile(file, replace, 0o644); err != nil {
		return "", fmt.Errorf("write overlay: %w", err)
	}
	return file, nil
}
