// SPDX-License-Identifier: Apache-2.0

package image

import (
	"debug/elf"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
)

// libcLabel is the label of the image with the release of the C library that it carries.
const libcLabel = "dev.tandem-gpu.image.libc"

// pinnedLabel is "true" on an image with the pinned Debian packages, "false" on one with the files of a machine.
const pinnedLabel = "dev.tandem-gpu.image.pinned"

// libcBanner is what glibc prints when it is run, such as "GNU C Library (Debian GLIBC 2.36-9+deb12u10) stable release".
var libcBanner = regexp.MustCompile(`GNU C Library \(([^)]+)\)`)

// machineCertificates is where Debian keeps all authorities of a machine.
const machineCertificates = "/etc/ssl/certs/ca-certificates.crt"

// vendorLibraries are what libnvidia-ml.so.1 of any driver may link against, besides what the agent itself needs, and
// libgcc_s.so.1, which glibc loads when a thread is cancelled.
var vendorLibraries = []string{
	"libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "libresolv.so.2", "librt.so.1",
}

const (
	passwd = "root:x:0:0:root:/:/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/sbin/nologin\n"
	group  = "root:x:0:\nnobody:x:65534:\n"
	// Nothing but files and DNS: the image carries no other name service.
	nsswitch = "passwd: files\ngroup: files\nhosts: files dns\n"
)

// collect is everything but the programs: loader, libraries, certificates, accounts.
func (b base) collect(arch, agent string) ([]file, error) {
	t, err := targetFor(arch)
	if err != nil {
		return nil, err
	}
	files := []file{
		{path: "etc/passwd", content: passwd, mode: 0o644},
		{path: "etc/group", content: group, mode: 0o644},
		{path: "etc/nsswitch.conf", content: nsswitch, mode: 0o644},
		{path: "etc/ssl/certs/ca-certificates.crt", source: b.certificates, mode: 0o644},
	}
	files = append(files, b.files...)
	libraries, err := t.closure(b.libraries, agent)
	if err != nil {
		return nil, err
	}
	for _, source := range libraries {
		name := filepath.Base(source)
		path := filepath.Join("lib", t.triplet, name)
		if name == filepath.Base(t.interpreter) {
			path = t.interpreter
		}
		files = append(files, file{path: path, source: source, mode: 0o755})
	}
	return files, nil
}

// closure is the loader, the vendor's needs and the agent's, each followed through its own needs.
func (t target) closure(dirs []string, agent string) ([]string, error) {
	needed, err := importsOf(agent)
	if err != nil {
		return nil, err
	}
	queue := append([]string{filepath.Base(t.interpreter)}, vendorLibraries...)
	queue = append(queue, needed...)
	seen := map[string]bool{}
	var found []string
	for len(queue) > 0 {
		name := queue[0]
		queue = queue[1:]
		if seen[name] {
			continue
		}
		seen[name] = true
		path, err := find(dirs, name)
		if err != nil {
			return nil, err
		}
		needed, err := importsOf(path)
		if err != nil {
			return nil, err
		}
		found = append(found, path)
		queue = append(queue, needed...)
	}
	slices.Sort(found)
	return found, nil
}

func find(dirs []string, name string) (string, error) {
	for _, dir := range dirs {
		if path := filepath.Join(dir, name); exists(path) {
			return path, nil
		}
	}
	return "", fmt.Errorf("find %s: not in %v", name, dirs)
}

func importsOf(path string) ([]string, error) {
	f, err := elf.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	defer f.Close()
	needed, err := f.ImportedLibraries()
	if err != nil {
		return nil, fmt.Errorf("read what %s links against: %w", path, err)
	}
	return needed, nil
}

// libcRelease returns the release of the C library among files.
func libcRelease(files []file) (string, error) {
	for _, f := range files {
		if filepath.Base(f.path) != "libc.so.6" {
			continue
		}
		data, err := f.read()
		if err != nil {
			return "", err
		}
		if banner := libcBanner.FindSubmatch(data); banner != nil {
			return string(banner[1]), nil
		}
		return "", fmt.Errorf("read release of %s: no version in it", f.source)
	}
	return "", errors.New("find libc.so.6 among the files of the image: not there")
}
