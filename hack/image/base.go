// SPDX-License-Identifier: Apache-2.0

package image

import (
	"cmp"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"runtime"
	"slices"
	"strings"
)

// base is the source of the image's files other than programs.
type base struct {
	// pinned says that the files are the same wherever the image is built.
	pinned bool
	// libraries are the directories of the shared libraries, in the order they are searched.
	libraries []string
	// certificates is the file of all authorities.
	certificates string
	// glibc, gcc and trust are the licences of the C library, of libgcc and of the certificates. trust may be missing.
	glibc, gcc, trust string
	// files are more files of the image.
	files []file
}

// chooseBase returns the pinned base, or what this machine has where the pinned one cannot be used and o allows that.
func chooseBase(ctx context.Context, o Options, programs ...string) (base, error) {
	b, err := pinnedBase(ctx, o.Arch, o.Progress)
	if err == nil {
		err = b.serves(programs)
	}
	if err == nil || o.Pinned || ctx.Err() != nil {
		return b, err
	}
	fmt.Fprintf(o.Progress, "the image gets this machine's C library and certificates: %v\n", err)
	return machineBase(o.Arch), nil
}

// serves reports a program that needs a newer C library than the base has: it was linked on a newer machine, and would not start.
func (b base) serves(programs []string) error {
	for _, program := range programs {
		f, err := elf.Open(program)
		if err != nil {
			return fmt.Errorf("read %s: %w", program, err)
		}
		defer f.Close()
		needs, err := f.DynamicVersionNeeds()
		// A static program has none.
		if err != nil && !errors.Is(err, elf.ErrNoSymbols) {
			return fmt.Errorf("read what %s needs: %w", program, err)
		}
		for _, need := range needs {
			has, err := b.versionsOf(need.Name)
			if err != nil {
				return err
			}
			for _, version := range need.Needs {
				if !has[version.Dep] {
					return fmt.Errorf("use the pinned C library: %s was linked with a newer one: it needs %s of %s", program, version.Dep, need.Name)
				}
			}
		}
	}
	return nil
}

// versionsOf are the versions of symbols that a library of the base has.
func (b base) versionsOf(library string) (map[string]bool, error) {
	path, err := find(b.libraries, library)
	if err != nil {
		return nil, err
	}
	f, err := elf.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	defer f.Close()
	versions, err := f.DynamicVersions()
	if err != nil {
		return nil, fmt.Errorf("read versions of %s: %w", path, err)
	}
	has := map[string]bool{}
	for _, version := range versions {
		has[version.Name] = true
	}
	return has, nil
}

func machineBase(arch string) base {
	t := targets[arch]
	glibc, gcc := t.documentation(arch)
	return base{
		libraries: t.libraryDirs(arch), certificates: machineCertificates,
		glibc: glibc, gcc: gcc, trust: "/usr/share/doc/ca-certificates/copyright",
	}
}

// GoRelease is the Go release that images are released with. It decides the programs' bytes and how layers are compressed.
const GoRelease = "go1.26.8"

// toolchain are the Debian packages that decide the bytes of the programs with C code, on an amd64 machine.
var toolchain = map[string]string{
	"gcc": "4:12.2.0-3", "gcc-12": "12.2.0-14+deb12u1", "libgcc-12-dev": "12.2.0-14+deb12u1", "libc6-dev": "2.36-9+deb12u14",
	"binutils-x86-64-linux-gnu": "2.40-2",
	"gcc-aarch64-linux-gnu":     "4:12.2.0-3", "gcc-12-aarch64-linux-gnu": "12.2.0-14cross1", "libgcc-12-dev-arm64-cross": "12.2.0-14cross1",
	"libc6-dev-arm64-cross": "2.36-8cross1", "binutils-aarch64-linux-gnu": "2.40-2",
}

// CheckToolchain installs the compilers where they are missing, and reports how they and Go differ from those that images are released
// with. A release calls it, because other ones give other bytes.
func CheckToolchain(ctx context.Context, progress io.Writer) error {
	if runtime.GOARCH != "amd64" {
		return fmt.Errorf("check toolchain: a release is built on amd64, this machine is %s", runtime.GOARCH)
	}
	if runtime.Version() != GoRelease {
		return fmt.Errorf("check toolchain: Go is %s, a release is built with %s", runtime.Version(), GoRelease)
	}
	for _, arch := range Architectures() {
		if err := ensureToolchain(ctx, arch, progress); err != nil {
			return err
		}
	}
	out, err := exec.CommandContext(ctx, "dpkg-query", "-W", "-f", "${Package} ${Version} ${db:Status-Status}\n").Output()
	if err != nil {
		return fmt.Errorf("list installed Debian packages: %w", err)
	}
	found := map[string]string{}
	for line := range strings.Lines(string(out)) {
		if fields := strings.Fields(line); len(fields) == 3 && fields[2] == "installed" {
			found[fields[0]] = fields[1]
		}
	}
	return compareToolchain(found)
}

func compareToolchain(found map[string]string) error {
	var differences []string
	for name, want := range toolchain {
		if found[name] != want {
			differences = append(differences, fmt.Sprintf("%s is %s, not %s", name, cmp.Or(found[name], "missing"), want))
		}
	}
	if len(differences) > 0 {
		return fmt.Errorf("check toolchain: a release is built with the packages that hack/image pins: %s", strings.Join(slices.Sorted(slices.Values(differences)), ", "))
	}
	return nil
}
