// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bytes"
	"cmp"
	"context"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
)

// licenceName matches the files that a Go module's licence obliges a distributor to pass on.
var licenceName = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice)([.-].*)?$`)

// licenceFiles collects the licence texts of what the image distributes: C library, libgcc, certificates, this project,
// and every Go module that the programs say they were built from.
func licenceFiles(ctx context.Context, o Options, b base, programs ...string) ([]file, error) {
	files := []file{
		{path: "licenses/glibc/copyright", source: b.glibc, mode: 0o644},
		{path: "licenses/libgcc/copyright", source: b.gcc, mode: 0o644},
	}
	root, err := goRoot(ctx)
	if err != nil {
		return nil, err
	}
	for _, optional := range []file{
		{path: "licenses/ca-certificates/copyright", source: b.trust, mode: 0o644},
		{path: "licenses/tandem/LICENSE", source: filepath.Join(o.Root, "LICENSE"), mode: 0o644},
		// The programs contain Go's run time and standard library.
		{path: "licenses/go/LICENSE", source: filepath.Join(root, "LICENSE"), mode: 0o644},
	} {
		if exists(optional.source) {
			files = append(files, optional)
		}
	}
	found, err := moduleLicences(ctx, programs)
	return append(files, found...), err
}

// moduleLicences are those of every Go module that the programs say they were built from.
func moduleLicences(ctx context.Context, programs []string) ([]file, error) {
	modules, err := linkedModules(programs)
	if err != nil {
		return nil, err
	}
	dirs, err := downloadModules(ctx, modules)
	if err != nil {
		return nil, err
	}
	var files []file
	for i, dir := range dirs {
		found, err := licencesIn(dir, modules[i])
		if err != nil {
			return nil, err
		}
		files = append(files, found...)
	}
	return files, nil
}

func goRoot(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return "", fmt.Errorf("find Go's own directory: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// linkedModules are the modules (path@version) in the programs' build information, each once and in order.
func linkedModules(programs []string) ([]string, error) {
	var modules []string
	for _, program := range programs {
		info, err := buildinfo.ReadFile(program)
		if err != nil {
			return nil, fmt.Errorf("read build information: %w", err)
		}
		for _, m := range Modules(info) {
			modules = append(modules, m.Path+"@"+m.Version)
		}
	}
	slices.Sort(modules)
	return slices.Compact(modules), nil
}

// Modules are the published modules that a program was built from, as they were replaced.
func Modules(info *buildinfo.BuildInfo) []*debug.Module {
	var modules []*debug.Module
	// The module of a program of another project is its main module.
	for _, m := range append(info.Deps, &info.Main) {
		m = cmp.Or(m.Replace, m)
		// A module of our own, or one replaced by a directory, has no published version.
		own := m.Path == ownModule || strings.HasPrefix(m.Path, ownModule+"/")
		if !own && m.Version != "" && m.Version != "(devel)" {
			modules = append(modules, m)
		}
	}
	return modules
}

// downloadModules returns the directory of each module in the module cache, where nearly all of them are.
func downloadModules(ctx context.Context, modules []string) ([]string, error) {
	if len(modules) == 0 {
		return nil, nil
	}
	cmd := exec.CommandContext(ctx, "go", append([]string{"mod", "download", "-json"}, modules...)...)
	// Outside the module, so that its go.sum is left alone.
	cmd.Dir = os.TempDir()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("download modules for their licences: %w\n%s%s", err, out, stderr.Bytes())
	}
	dirs := make([]string, 0, len(modules))
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var m struct{ Dir string }
		if err := d.Decode(&m); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("download modules for their licences: %w", err)
		}
		dirs = append(dirs, m.Dir)
	}
	if len(dirs) != len(modules) {
		return nil, fmt.Errorf("download modules for their licences: asked for %d, got %d", len(modules), len(dirs))
	}
	return dirs, nil
}

// licencesIn are the licence files at the root of a module.
func licencesIn(dir, module string) ([]file, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read licence of %s: %w", module, err)
	}
	var files []file
	for _, e := range entries {
		if e.Type().IsRegular() && licenceName.MatchString(e.Name()) {
			files = append(files, file{
				path:   filepath.Join("licenses", module, e.Name()),
				source: filepath.Join(dir, e.Name()),
				mode:   0o644,
			})
		}
	}
	return files, nil
}

// Licences returns the licence texts of the Go modules that programs were built from, by path as the image has them below licenses.
func Licences(ctx context.Context, programs ...string) (map[string][]byte, error) {
	files, err := moduleLicences(ctx, programs)
	if err != nil {
		return nil, err
	}
	texts := map[string][]byte{}
	for _, f := range files {
		data, err := f.read()
		if err != nil {
			return nil, err
		}
		texts[strings.TrimPrefix(f.path, "licenses/")] = data
	}
	return texts, nil
}
