// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"

	"github.com/tandem-gpu/tandem/hack/binaries"
	"github.com/tandem-gpu/tandem/hack/filelock"
)

// debianPackage is a package of Debian 12 of which the image has files. The sum is that of Debian's signed index.
type debianPackage struct{ name, version, arch, sha256 string }

// pinned are the packages of each architecture. gcc-12-base has the licence of libgcc. docs/dev/release.md says how to move to newer ones.
var pinned = map[string][]debianPackage{
	"amd64": {
		{"libc6", "2.36-9+deb12u14", "amd64", "ba4f88f73dbc3ae9055f3c20f4523bfdbaf1ad13ff95e258924f77d20b4fbedf"},
		{"libgcc-s1", "12.2.0-14+deb12u1", "amd64", "3016e62cb4b7cd8038822870601f5ed131befe942774d0f745622cc77d8a88f7"},
		{"gcc-12-base", "12.2.0-14+deb12u1", "amd64", "1896a2aacf4ad681ff5eacc24a5b0ca4d5d9c9b9c9e4b6de5197bc1e116ea619"},
		pinnedCertificates,
	},
	"arm64": {
		{"libc6", "2.36-9+deb12u14", "arm64", "01f4330719fd4f65580e16ea5a0527f372fca750e8f588d26deaf09f2d3b1cf4"},
		{"libgcc-s1", "12.2.0-14+deb12u1", "arm64", "576926b283613db80168ddf76380a3bd877602778cf0d226caa7bfbfa71eacf3"},
		{"gcc-12-base", "12.2.0-14+deb12u1", "arm64", "674cf6cba6d432bd200c45fe866c1652c7a53523cc2e7a613e05bc4abf7b5440"},
		pinnedCertificates,
	},
}

var pinnedCertificates = debianPackage{
	"ca-certificates", "20250419~deb12u2", "all", "b9f76b5271a7ac373fd5e7e1b5b826a71ddd702b42a0d104955ecb1acfffc94b",
}

// sources are the directories of the pool of each package in a pool.
var sources = map[string]string{
	"libc6": "main/g/glibc", "libgcc-s1": "main/g/gcc-12", "gcc-12-base": "main/g/gcc-12", "ca-certificates": "main/c/ca-certificates",
}

// pools returns where to look for packages; tests replace it.
var pools = aptPools

// aptPools returns the pools of the repositories that apt uses here. They have the packages of every architecture. A repository drops a
// version when a newer one is out; one of Debian's snapshots keeps it.
func aptPools(ctx context.Context) ([]string, error) {
	cmd := exec.CommandContext(ctx, "apt-get", "indextargets", "--no-release-info", "--format", "$(REPO_URI)", "Created-By: Packages")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list apt's repositories: %w\n%s", err, stderr.Bytes())
	}
	var all []string
	for _, repository := range slices.Compact(slices.Sorted(strings.FieldsSeq(string(out)))) {
		repository = strings.TrimSuffix(repository, "/")
		// Debian keeps its security updates in a directory of their own.
		all = append(all, repository+"/pool/", repository+"/pool/updates/")
	}
	return all, nil
}

func (p debianPackage) file() string { return p.name + "_" + p.version + "_" + p.arch + ".deb" }

// osRelease tells scanners whose packages var/lib/dpkg/status.d lists.
const osRelease = `PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"
NAME="Debian GNU/Linux"
VERSION_ID="12"
VERSION_CODENAME=bookworm
ID=debian
`

// StatusDir has one file for each Debian package of the image, where scanners look in images that dpkg did not install.
const StatusDir = "var/lib/dpkg/status.d"

// pinnedBase returns the base of the pinned packages, from the cache after the first time. It is safe against other processes.
func pinnedBase(ctx context.Context, arch string, progress io.Writer) (base, error) {
	packages, ok := pinned[arch]
	if !ok {
		return base{}, fmt.Errorf("find pinned packages of %s: there are none", arch)
	}
	cache, err := binaries.CacheDir()
	if err != nil {
		return base{}, err
	}
	cache = filepath.Join(cache, "debian")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return base{}, fmt.Errorf("make cache of Debian packages: %w", err)
	}
	unlock, err := filelock.Wait(ctx, filepath.Join(cache, ".lock"))
	if err != nil {
		return base{}, fmt.Errorf("wait for the cache of Debian packages: %w", err)
	}
	defer unlock()
	// Another list of packages is another directory: nothing of an older one is left in it.
	sum := sha256.New()
	for _, p := range packages {
		fmt.Fprintln(sum, p)
	}
	dir := filepath.Join(cache, arch+"-"+hex.EncodeToString(sum.Sum(nil))[:16])
	if !exists(dir) {
		if err := unpackPinned(ctx, packages, cache, dir, progress); err != nil {
			return base{}, err
		}
	}
	b := base{
		pinned:       true,
		libraries:    []string{filepath.Join(dir, "lib", targets[arch].triplet)},
		certificates: filepath.Join(dir, "ca-certificates.crt"),
		glibc:        filepath.Join(dir, "usr/share/doc/libc6/copyright"),
		gcc:          filepath.Join(dir, "usr/share/doc/gcc-12-base/copyright"),
		trust:        filepath.Join(dir, "usr/share/doc/ca-certificates/copyright"),
		files:        []file{{path: "etc/os-release", content: osRelease, mode: 0o644}},
	}
	for _, p := range packages {
		b.files = append(b.files, file{path: path.Join(StatusDir, p.name), source: filepath.Join(dir, StatusDir, p.name), mode: 0o644})
	}
	return b, nil
}

func unpackPinned(ctx context.Context, packages []debianPackage, cache, dir string, progress io.Writer) error {
	work, err := os.MkdirTemp(cache, ".unpacking-")
	if err != nil {
		return fmt.Errorf("make directory for Debian packages: %w", err)
	}
	defer os.RemoveAll(work)
	root := filepath.Join(work, "root")
	from, err := pools(ctx)
	if err != nil {
		return err
	}
	for _, p := range packages {
		archive := filepath.Join(work, p.file())
		fmt.Fprintf(progress, "fetching %s\n", p.file())
		if err := fetch(ctx, p, from, archive); err != nil {
			return err
		}
		if err := unpackPackage(ctx, p, archive, root); err != nil {
			return fmt.Errorf("unpack %s: %w", p.file(), err)
		}
	}
	if err := bundleCertificates(root); err != nil {
		return err
	}
	if err := os.Rename(root, dir); err != nil {
		return fmt.Errorf("move Debian packages into the cache: %w", err)
	}
	return nil
}

// fetch takes the package from the first pool whose file has the pinned sum.
func fetch(ctx context.Context, p debianPackage, from []string, to string) error {
	var failed []error
	for _, pool := range from {
		data, err := get(ctx, pool+sources[p.name]+"/"+p.file())
		if err != nil {
			failed = append(failed, err)
			continue
		}
		if sum := sha256.Sum256(data); hex.EncodeToString(sum[:]) != p.sha256 {
			failed = append(failed, fmt.Errorf("get %s from %s: SHA-256 is %x, not %s", p.file(), pool, sum, p.sha256))
			continue
		}
		if err := os.WriteFile(to, data, 0o644); err != nil {
			return fmt.Errorf("write %s: %w", p.file(), err)
		}
		return nil
	}
	return fmt.Errorf("fetch %s: %w", p.file(), errors.Join(failed...))
}

// largestPackage bounds what a repository may send.
const largestPackage = 64 << 20

var client = &http.Client{Timeout: 3 * time.Minute, Transport: &http.Transport{
	Proxy: http.ProxyFromEnvironment, DialContext: (&net.Dialer{Timeout: 10 * time.Second}).DialContext, TLSHandshakeTimeout: 10 * time.Second,
}}

// errRefused is a server's answer that it will give again.
var errRefused = errors.New("refused")

// get downloads url. If the server fails, or is not reached, it tries again.
func get(ctx context.Context, url string) (data []byte, err error) {
	again := func(err error) bool { return ctx.Err() == nil && !errors.Is(err, errRefused) }
	err = retry.OnError(wait.Backoff{Steps: 3, Duration: 2 * time.Second}, again, func() (err error) {
		data, err = getOnce(ctx, url)
		return err
	})
	return data, err
}

func getOnce(ctx context.Context, url string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, fmt.Errorf("get %s: %w", url, err)
	}
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	switch {
	case response.StatusCode >= http.StatusInternalServerError, response.StatusCode == http.StatusTooManyRequests:
		return nil, fmt.Errorf("get %s: %s", url, response.Status)
	case response.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("get %s: %w: %s", url, errRefused, response.Status)
	}
	data, err := io.ReadAll(io.LimitReader(response.Body, largestPackage))
	if err != nil {
		return nil, fmt.Errorf("get %s: %w", url, err)
	}
	return data, nil
}

// unpackPackage writes the regular files of a package below root, and its description to StatusDir.
func unpackPackage(ctx context.Context, p debianPackage, archive, root string) error {
	control, err := dpkgDeb(ctx, "--field", archive)
	if err != nil {
		return err
	}
	if err := write(filepath.Join(root, StatusDir, p.name), control, 0o644); err != nil {
		return err
	}
	data, err := dpkgDeb(ctx, "--fsys-tarfile", archive)
	if err != nil {
		return err
	}
	for r := tar.NewReader(bytes.NewReader(data)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read files: %w", err)
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		content, err := io.ReadAll(r)
		if err != nil {
			return fmt.Errorf("read %s: %w", h.Name, err)
		}
		// The rooted path keeps the file below root, whatever it is called.
		if err := write(filepath.Join(root, path.Clean("/"+h.Name)), content, h.FileInfo().Mode().Perm()); err != nil {
			return err
		}
	}
}

func write(to string, data []byte, mode os.FileMode) error {
	if err := errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, data, mode)); err != nil {
		return fmt.Errorf("write %s: %w", to, err)
	}
	return nil
}

func dpkgDeb(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "dpkg-deb", args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("dpkg-deb %s: %w\n%s", args[0], err, stderr.Bytes())
	}
	return out, nil
}

// bundleCertificates does what update-ca-certificates does when the package is installed: one file of all authorities.
func bundleCertificates(root string) error {
	found, err := filepath.Glob(filepath.Join(root, "usr/share/ca-certificates/mozilla/*.crt"))
	if err != nil {
		return fmt.Errorf("list certificates: %w", err)
	}
	if len(found) == 0 {
		return errors.New("list certificates: the package has none")
	}
	slices.Sort(found)
	var bundle strings.Builder
	for _, name := range found {
		data, err := os.ReadFile(name)
		if err != nil {
			return fmt.Errorf("read certificate: %w", err)
		}
		bundle.WriteString(strings.TrimRight(string(data), "\n") + "\n")
	}
	return write(filepath.Join(root, "ca-certificates.crt"), []byte(bundle.String()), 0o644)
}
