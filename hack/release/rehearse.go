// SPDX-License-Identifier: Apache-2.0

package release

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// chartVersions are the two lines of Chart.yaml that name the version.
var chartVersions = regexp.MustCompile(`(?m)^(version|appVersion): .*$`)

// Rehearse copies the files of a checkout as they are, committed or not, to dir, which must not exist, and commits there what makes version
// releasable. Tests call it. It changes nothing in root.
func Rehearse(ctx context.Context, root, version, dir string) error {
	listed, err := git(ctx, root, "ls-files", "-co", "--exclude-standard", "-z")
	if err != nil {
		return err
	}
	for name := range strings.SplitSeq(listed, "\x00") {
		if name == "" {
			continue
		}
		if err := copyFile(filepath.Join(dir, name), filepath.Join(root, name)); err != nil {
			return fmt.Errorf("copy %s for a rehearsal: %w", name, err)
		}
	}
	number := strings.TrimPrefix(version, "v")
	for name, change := range map[string]func(string) string{
		"CHANGELOG.md": func(text string) string {
			return strings.Replace(text, "\n## ", "\n## "+number+" - 2026-01-02\n\n- A rehearsal.\n\n## ", 1)
		},
		filepath.Join(chartPath, "Chart.yaml"): func(text string) string {
			return chartVersions.ReplaceAllString(text, "${1}: "+number)
		},
	} {
		path := filepath.Join(dir, name)
		text, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("set version of a rehearsal: %w", err)
		}
		if err := os.WriteFile(path, []byte(change(string(text))), 0o644); err != nil {
			return fmt.Errorf("set version of a rehearsal: %w", err)
		}
	}
	if _, err := git(ctx, dir, "init", "--quiet", "--initial-branch=main"); err != nil {
		return err
	}
	return commitAll(ctx, dir)
}

func commitAll(ctx context.Context, dir string) error {
	if _, err := git(ctx, dir, "add", "--all", "--force"); err != nil {
		return err
	}
	_, err := git(ctx, dir, "-c", "user.name=rehearsal", "-c", "user.email=rehearsal@example.com", "-c", "commit.gpgsign=false",
		"commit", "--quiet", "-m", "rehearsal")
	return err
}

// copyFile leaves out a file that git lists and that was removed.
func copyFile(to, from string) error {
	info, err := os.Lstat(from)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, data, info.Mode().Perm()))
}
