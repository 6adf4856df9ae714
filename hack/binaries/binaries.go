// SPDX-License-Identifier: Apache-2.0

// Package binaries makes the programs of the one-node cluster available: Kubernetes, etcd, containerd, runc, Helm and a
// pause program built from Go modules, the CNI plugins and network tools from Debian packages; and single tools of other
// modules. Each is built in a throw-away module, so that nothing of it reaches our go.mod, and kept by version in a cache
// outside the checkout. The package starts none of them and builds nothing of this repository.
package binaries

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/tandem-gpu/tandem/hack/progress"
)

// DefaultKubernetes is the Kubernetes version used where none is asked for.
const DefaultKubernetes = "v1.37.2"

// KnownKubernetes lists, oldest first, versions of Kubernetes whose modules can all be had. (Of v1.34.9 some cannot.)
var KnownKubernetes = []string{"v1.34.10", "v1.35.4", "v1.36.3", "v1.37.0", "v1.37.1", "v1.37.2"}

// Versions of everything that is not Kubernetes.
const (
	EtcdVersion       = "v3.7.3"
	ContainerdVersion = "v2.4.2"
	RuncVersion       = "v1.5.2"
)

// cniDir is where Debian's containernetworking-plugins installs.
const cniDir = "/usr/lib/cni"

// Options is what Ensure provides.
type Options struct {
	// Kubernetes are the versions to have, for example "v1.37.1"; empty means DefaultKubernetes.
	Kubernetes []string
	// Cache is the directory that keeps what was built; empty means CacheDir().
	Cache string
	// Progress receives one line for each step and at least one every ten seconds while something builds; nil is silent.
	Progress io.Writer
	// Work gets the packages of shared components, and estimates the remaining time for Progress. It is nil if the caller compiles nothing afterwards.
	Work *progress.Work
	// Planned is called once Work has the packages of all components, before the first is compiled. It may add more. It may be nil.
	Planned func() error
}

// Set has the paths of the programs. All are absolute.
type Set struct {
	// Cache is the directory that holds every path below except CNI.
	Cache string
	// Etcd, Containerd (with its shim and ctr), Runc and Helm are directories with programs.
	Etcd, Containerd, Runc, Helm string
	// Pause is the path of the static pause program.
	Pause string
	// CNI is the directory with the CNI plugins.
	CNI        string
	kubernetes map[string]string
}

// Kubernetes returns the directory with the programs of one Kubernetes version that Ensure was asked for.
func (s *Set) Kubernetes(version string) string { return s.kubernetes[version] }

// Path returns a value for PATH under which a Kubernetes version and everything else of the set is found.
func (s *Set) Path(version string) string {
	path := ""
	for _, dir := range []string{s.Kubernetes(version), s.Etcd, s.Containerd, s.Runc, s.Helm} {
		path += dir + ":"
	}
	return path + "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
}

// CacheDir returns where built programs are kept: $TANDEM_CACHE, else tandem below the user's cache directory.
func CacheDir() (string, error) {
	if dir := os.Getenv("TANDEM_CACHE"); dir != "" {
		return filepath.Abs(dir)
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find a cache directory (set TANDEM_CACHE): %w", err)
	}
	return filepath.Join(dir, "tandem"), nil
}

var versionPattern = regexp.MustCompile(`^v1\.(\d+)\.(\d+)$`)

// ValidKubernetes reports whether a version can be asked for: a release of Kubernetes 1.34 or newer.
func ValidKubernetes(version string) error {
	match := versionPattern.FindStringSubmatch(version)
	if match == nil {
		return fmt.Errorf("kubernetes version %q: want the form v1.37.1", version)
	}
	if len(match[1]) < 2 || match[1] < "34" {
		return fmt.Errorf("kubernetes version %q: older than v1.34", version)
	}
	return nil
}

// Ensure installs the Debian packages that are missing, builds what the cache lacks, and says where everything lies. It
// needs root only where packages are missing. It is idempotent, and safe against other processes doing the same.
func Ensure(ctx context.Context, options Options) (*Set, error) {
	cache := options.Cache
	if cache == "" {
		var err error
		if cache, err = CacheDir(); err != nil {
			return nil, err
		}
	}
	versions := slices.Clone(options.Kubernetes)
	if len(versions) == 0 {
		versions = []string{DefaultKubernetes}
	}
	slices.Sort(versions)
	versions = slices.Compact(versions)
	for _, version := range versions {
		if err := ValidKubernetes(version); err != nil {
			return nil, err
		}
	}
	builder := newBuilder(cache, options.Progress)
	builder.work = cmp.Or(options.Work, builder.work)
	if err := installPackages(ctx, builder.progress); err != nil {
		return nil, err
	}

	set, components := describe(cache, versions)
	if err := builder.planAll(ctx, components); err != nil {
		return nil, err
	}
	if options.Planned != nil {
		if err := options.Planned(); err != nil {
			return nil, err
		}
	}
	for i, component := range components {
		dir, err := builder.ensure(ctx, component, fmt.Sprintf("[%d/%d]", i+1, len(components)))
		if err != nil {
			return nil, err
		}
		component.found(dir)
	}
	return set, nil
}

// errNoDpkg is reported where packages cannot be looked up, so that a missing program is named instead.
var errNoDpkg = errors.New("no dpkg-query on this machine")

// Locate says where Ensure puts the programs of some Kubernetes versions, whether they are there or not. It reads and
// writes nothing.
func Locate(versions []string) (*Set, error) {
	cache, err := CacheDir()
	if err != nil {
		return nil, err
	}
	set, components := describe(cache, versions)
	for _, component := range components {
		component.found(component.dir(cache))
	}
	return set, nil
}

// describe lists the components of a set whose paths their found functions fill in.
func describe(cache string, versions []string) (*Set, []component) {
	set := &Set{Cache: cache, CNI: cniDir, kubernetes: map[string]string{}}
	components := []component{etcd(&set.Etcd), containerd(&set.Containerd), helm(&set.Helm)}
	for _, version := range versions {
		components = append(components, kubernetes(version, func(dir string) { set.kubernetes[version] = dir }))
	}
	components = append(components, runc(&set.Runc), pause(func(dir string) { set.Pause = filepath.Join(dir, "pause") }))
	return set, components
}
