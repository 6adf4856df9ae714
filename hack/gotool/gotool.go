// SPDX-License-Identifier: Apache-2.0

// Package gotool runs the go command so that an interrupted run leaves nothing behind.
package gotool

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/tandem-gpu/tandem/hack/progress"
)

// ProductModule is the module at the root of the checkout. cli, hack and test are modules of their own, below it.
const ProductModule = "github.com/tandem-gpu/tandem"

// Root returns the root directory of this checkout. The working directory must be inside it.
func Root(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", ProductModule).Output()
	if err != nil {
		return "", fmt.Errorf("find the root of the checkout: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// ModuleDir returns the directory of the module that has a package. go list downloads the module where it is missing.
func ModuleDir(ctx context.Context, pkg string) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-f", "{{.Module.Dir}}", pkg).Output()
	if err != nil {
		return "", fmt.Errorf("find the module of %s: %w", pkg, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// Command is `go args...` with env (KEY=value) added to this process's environment. When ctx ends, it kills the go command
// together with the compilers and linkers that it started: the go command does not end them (go 1.26). It also leaves its
// temporary files behind, which is why they are below tmp, for the caller to remove.
func Command(ctx context.Context, tmp string, env []string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(append(os.Environ(), "GOTMPDIR="+tmp), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	return cmd
}

// CompilerFlags are those with which BuildFlags has each package compiled.
const CompilerFlags = "-dwarf=false"

// BuildFlags returns the flags for the programs of a cluster, the demo and the image, with the tags of the program. The build cache reuses a
// package only where the flags are the same. The tag grpcnotrace leaves out gRPC's request tracing, which uses html/template, which calls
// methods by name: the linker would keep every method of every type, and the agent would need twice the memory. -dwarf=false leaves out what
// debuggers need. That takes the compiler a seventh of its time, and most programs are linked without it.
func BuildFlags(tags ...string) []string {
	tags = strings.Fields("grpcnotrace " + strings.Join(tags, " "))
	return []string{"-trimpath", "-buildvcs=false", "-gcflags=all=" + CompilerFlags, "-tags=" + strings.Join(tags, ",")}
}

// ListFormat, given to go list -deps -f, prints what Packages reads.
const ListFormat = "{{.ImportPath}}\t{{len .Deps}}\t{{.Dir}}{{range .GoFiles}}\t{{.}}{{end}}{{range .CgoFiles}}\t{{.}}{{end}}"

// dependencySize is added to the size of a package for each of its dependencies, direct or indirect: each costs as much time as so many bytes
// of source. It was measured with the programs of a cluster.
const dependencySize = 200

// Packages are those listed, with the sizes by which their time to compile can be compared.
func Packages(listed string) []progress.Package {
	var packages []progress.Package
	for line := range strings.Lines(listed) {
		fields := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(fields) < 3 {
			continue
		}
		dependencies, _ := strconv.ParseInt(fields[1], 10, 64)
		p := progress.Package{Name: fields[0], Size: dependencySize * dependencies}
		for _, file := range fields[3:] {
			if info, err := os.Stat(filepath.Join(fields[2], file)); err == nil {
				p.Size += info.Size()
			}
		}
		packages = append(packages, p)
	}
	return packages
}

// FixedEnv has Go's defaults for the settings by which a machine's environment would change programs that are distributed.
var FixedEnv = []string{"GOAMD64=v1", "GOARM64=v8.0", "GOEXPERIMENT=", "CGO_CFLAGS=-O2 -g", "CGO_CXXFLAGS=-O2 -g", "CGO_LDFLAGS=-O2 -g"}

// LDFlags are those of a program of this module that is distributed: it has no symbols, and internal/version has version and commit.
func LDFlags(version, commit string, more ...string) string {
	const stamp = ProductModule + "/internal/version."
	flags := append([]string{"-s", "-w"}, more...)
	return strings.Join(append(flags, "-X", stamp+"Version="+version, "-X", stamp+"Commit="+commit), " ")
}
