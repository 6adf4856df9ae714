// SPDX-License-Identifier: Apache-2.0

package image

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"

	"github.com/tandem-gpu/tandem/hack/apt"
)

// target is the source of one architecture's C compiler and libraries. Names are Debian's.
type target struct {
	// triplet is Debian's multiarch name: of the compiler, and of the directory of the libraries here and in the image.
	triplet string
	// cross ends the names of the packages used on a machine of another architecture.
	cross string
	// interpreter is where programs expect the dynamic loader.
	interpreter string
}

var targets = map[string]target{
	"amd64": {triplet: "x86_64-linux-gnu", cross: "amd64-cross", interpreter: "lib64/ld-linux-x86-64.so.2"},
	"arm64": {triplet: "aarch64-linux-gnu", cross: "arm64-cross", interpreter: "lib/ld-linux-aarch64.so.1"},
}

func targetFor(arch string) (target, error) {
	t, ok := targets[arch]
	if !ok {
		return target{}, fmt.Errorf("architecture %q: must be amd64 or arm64", arch)
	}
	return t, nil
}

func native(arch string) bool { return arch == runtime.GOARCH }

func (t target) compiler(arch string) string {
	if native(arch) {
		return "gcc"
	}
	return t.triplet + "-gcc"
}

func (t target) goEnv(arch string) []string {
	return []string{"GOOS=linux", "GOARCH=" + arch, "CGO_ENABLED=1", "CC=" + t.compiler(arch)}
}

// libraryDirs is where this machine keeps the architecture's shared libraries, in the order they are searched.
func (t target) libraryDirs(arch string) []string {
	if native(arch) {
		return []string{"/lib/" + t.triplet, "/usr/lib/" + t.triplet}
	}
	return []string{"/usr/" + t.triplet + "/lib"}
}

// documentation is where the licence texts of the C library and of libgcc lie on this machine.
func (t target) documentation(arch string) (glibc, gcc string) {
	if native(arch) {
		return "/usr/share/doc/libc6/copyright", "/usr/share/doc/libgcc-s1/copyright"
	}
	return "/usr/share/doc/libc6-" + t.cross + "/copyright",
		"/usr/share/doc/libgcc-s1-" + t.cross + "/copyright"
}

// packages are the Debian packages that provide compiler, libraries and licence texts.
func (t target) packages(arch string) []string {
	if native(arch) {
		return []string{"gcc", "libc6-dev", "libgcc-s1", "ca-certificates"}
	}
	compiler := "gcc-" + strings.ReplaceAll(t.triplet, "_", "-")
	return []string{
		compiler, "libc6-" + t.cross, "libc6-dev-" + t.cross, "libgcc-s1-" + t.cross, "ca-certificates",
	}
}

// missing lists what a build for the architecture needs and this machine lacks.
func (t target) missing(arch string) []string {
	var missing []string
	if _, err := exec.LookPath(t.compiler(arch)); err != nil {
		missing = append(missing, t.compiler(arch))
	}
	glibc, gcc := t.documentation(arch)
	for _, path := range []string{glibc, gcc, machineCertificates} {
		if !exists(path) {
			missing = append(missing, path)
		}
	}
	for _, name := range append([]string{"libc.a"}, vendorLibraries...) {
		if _, err := find(t.libraryDirs(arch), name); err != nil {
			missing = append(missing, name)
		}
	}
	return missing
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// ensureToolchain installs compiler and libraries where apt can; elsewhere the error says what to install.
func ensureToolchain(ctx context.Context, arch string, progress io.Writer) error {
	t, err := targetFor(arch)
	if err != nil {
		return err
	}
	missing := t.missing(arch)
	if len(missing) == 0 {
		return nil
	}
	packages := t.packages(arch)
	what := fmt.Sprintf("building for %s needs %s", arch, strings.Join(missing, ", "))
	if !apt.Available() {
		return fmt.Errorf("%s: install the equivalents of Debian's %s", what, strings.Join(packages, " "))
	}
	fmt.Fprintln(progress, what)
	if err := apt.Install(ctx, progress, func() ([]string, error) {
		if len(t.missing(arch)) == 0 {
			return nil, nil
		}
		return packages, nil
	}); err != nil {
		return err
	}
	if missing := t.missing(arch); len(missing) > 0 {
		return fmt.Errorf("build for %s: still missing after apt-get install: %s", arch, strings.Join(missing, ", "))
	}
	return nil
}
