// SPDX-License-Identifier: Apache-2.0

package release

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/mod/semver"
	"sigs.k8s.io/yaml"
)

// source is the checkout of a release.
type source struct {
	// version has no v.
	version string
	commit  string
	// seconds is when the commit was made.
	seconds int64
	// changes is the section of the version in CHANGELOG.md, without its heading.
	changes string
}

var chartPath = filepath.Join("deployments", "helm", "tandem")

// inspect refuses a checkout that is not the version's.
func inspect(ctx context.Context, o Options) (source, error) {
	if !semver.IsValid(o.Version) || semver.Canonical(o.Version) != o.Version {
		return source{}, fmt.Errorf("version %q: want the form v0.2.0 or v0.2.0-rc.1", o.Version)
	}
	s := source{version: strings.TrimPrefix(o.Version, "v")}
	changes, err := git(ctx, o.Root, "status", "--porcelain")
	if err != nil {
		return source{}, err
	}
	if changes != "" {
		return source{}, fmt.Errorf("release %s: %w:\n%s", o.Version, errDirty, changes)
	}
	line, err := git(ctx, o.Root, "log", "-1", "--format=%H %ct")
	if err != nil {
		return source{}, err
	}
	commit, seconds, _ := strings.Cut(line, " ")
	// As long as hack/image has it.
	s.commit = commit[:12]
	if s.seconds, err = strconv.ParseInt(seconds, 10, 64); err != nil {
		return source{}, fmt.Errorf("read time of commit %s: %w", s.commit, err)
	}
	changelog, err := os.ReadFile(filepath.Join(o.Root, "CHANGELOG.md"))
	if err != nil {
		return source{}, fmt.Errorf("read changelog: %w", err)
	}
	if s.changes, err = section(string(changelog), s.version); err != nil {
		return source{}, err
	}
	return s, checkChart(o.Root, s.version)
}

// section returns what a changelog says about a version: the text below "## VERSION", which a date may follow.
func section(changelog, version string) (string, error) {
	heading := regexp.MustCompile(`^## \[?` + regexp.QuoteMeta(version) + `\]?( .*)?$`)
	var lines []string
	found := false
	for line := range strings.Lines(changelog) {
		text := strings.TrimRight(line, "\r\n")
		if strings.HasPrefix(text, "## ") {
			if found {
				break
			}
			found = heading.MatchString(text)
			continue
		}
		if found {
			lines = append(lines, text)
		}
	}
	if !found {
		return "", fmt.Errorf("find changes of %[1]s: CHANGELOG.md has no section \"## %[1]s\"", version)
	}
	changes := strings.TrimSpace(strings.Join(lines, "\n"))
	if changes == "" {
		return "", fmt.Errorf("find changes of %s: its section in CHANGELOG.md is empty", version)
	}
	return changes, nil
}

// checkChart: the chart of the checkout has the version, so that the tag and the released chart agree.
func checkChart(root, version string) error {
	path := filepath.Join(root, chartPath, "Chart.yaml")
	data, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read chart: %w", err)
	}
	var chart struct{ Version, AppVersion string }
	if err := yaml.Unmarshal(data, &chart); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	if chart.Version != version || chart.AppVersion != version {
		return fmt.Errorf("check chart: Chart.yaml has version %q and appVersion %q, want %q", chart.Version, chart.AppVersion, version)
	}
	return nil
}

func git(ctx context.Context, root string, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, "git", append([]string{"--no-optional-locks", "-C", root}, args...)...).Output()
	if err != nil {
		var failed *exec.ExitError
		if errors.As(err, &failed) {
			return "", fmt.Errorf("git %s in %s: %w: %s", args[0], root, err, strings.TrimSpace(string(failed.Stderr)))
		}
		return "", fmt.Errorf("git %s in %s: %w", args[0], root, err)
	}
	return strings.TrimSpace(string(out)), nil
}
