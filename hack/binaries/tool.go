// SPDX-License-Identifier: Apache-2.0

package binaries

import (
	"context"
	"fmt"
	"io"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
)

// Tool is the command of a published Go module that is no dependency of ours. It is built statically for this machine, unless
// it is shared or Env says otherwise.
type Tool struct {
	// Module and Version name the module. Package is its main package. If Source is set, Source is the main package and Package is only the
	// program's name.
	Module, Version, Package string
	Source                   []byte
	// Variant follows the version in the cache. It has to differ wherever Tags, LDFlags and Env make the result differ.
	Variant string
	// Tags are build tags, separated by spaces or commas.
	Tags string
	// LDFlags, besides -s -w, and Env (KEY=value) are given to go build.
	LDFlags string
	Env     []string
	shared  bool
}

// Helm is the command line of Helm, which tests, demo and e2e install the chart with.
func Helm() Tool {
	const version = "v4.3.1"
	return Tool{
		Module: "helm.sh/helm/v4", Version: version, Package: "helm.sh/helm/v4/cmd/helm", Variant: sharedVariant, shared: true,
		LDFlags: "-X helm.sh/helm/v4/internal/version.version=" + version,
	}
}

// Prometheus is the server that tests scrape a cluster with. It discovers targets in Kubernetes and nowhere else: the other clouds'
// libraries are most of the build. It has no user interface.
func Prometheus() Tool { return prometheus("prometheus") }

// Promtool checks rules and plays the tests of alerts.
func Promtool() Tool { return prometheus("promtool") }

func prometheus(command string) Tool {
	const module = "github.com/prometheus/prometheus"
	return Tool{Module: module, Version: "v0.316.0", Package: module + "/cmd/" + command, Tags: "remove_all_sd,enable_kubernetes_sd"}
}

func (t Tool) component() component {
	name := path.Base(t.Package)
	main := t.Package
	if t.Source != nil {
		main = "."
		t.Variant += "-" + hashOf(t.Source)
	}
	return component{
		name: name, version: t.Version, variant: t.Variant, module: t.Module, shared: t.shared, source: t.Source,
		packages: []program{{main, []string{name}}}, tags: t.Tags, linkFlags: " " + t.LDFlags, env: t.Env,
	}
}

// Ensure returns the path of the tool, building it first if the cache has none, with its progress on out as Options.Progress has
// it. It installs no packages. It is idempotent, and safe against other processes doing the same.
func (t Tool) Ensure(ctx context.Context, out io.Writer) (string, error) {
	cache, err := CacheDir()
	if err != nil {
		return "", err
	}
	c := t.component()
	dir, err := newBuilder(cache, out).ensure(ctx, c, "[1/1]")
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, c.name), nil
}

// Output ensures the tool, runs it in dir, which is the working directory if empty, and returns its standard output. The error has all
// that it printed.
func (t Tool) Output(ctx context.Context, dir string, args ...string) (string, error) {
	program, err := t.Ensure(ctx, nil)
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	var output, failure strings.Builder
	cmd.Stdout, cmd.Stderr = &output, &failure
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", path.Base(t.Package), args[0], err, strings.TrimSpace(failure.String()+output.String()))
	}
	return output.String(), nil
}
