// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/x509"
	"debug/elf"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

func standin(t *testing.T, arch string) Options {
	t.Helper()
	return Options{
		Arch: arch, Version: "1.2.3", Commit: "0123456789ab", Out: t.TempDir(),
		Package: "./hack/image/testdata/standin", ControllerPackage: "./hack/image/testdata/standin", Progress: testWriter{t},
	}
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimSuffix(string(p), "\n"))
	return len(p), nil
}

// image reads the image back from the OCI layout in a tarball, as an importer would.
func readBack(t *testing.T, tarball string) (v1.Image, v1.Descriptor) {
	t.Helper()
	dir := t.TempDir()
	f, err := os.Open(tarball)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	unpack(t, f, dir)
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	if len(manifest.Manifests) != 1 {
		t.Fatalf("%d images in the tarball", len(manifest.Manifests))
	}
	img, err := index.Image(manifest.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	return img, manifest.Manifests[0]
}

func unpack(t *testing.T, from io.Reader, dir string) {
	t.Helper()
	for r := tar.NewReader(from); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		target := filepath.Join(dir, h.Name)
		if h.Typeflag == tar.TypeDir {
			err = os.MkdirAll(target, 0o755)
		} else {
			err = errors.Join(os.MkdirAll(filepath.Dir(target), 0o755), writeTo(target, r, h.FileInfo().Mode()))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func writeTo(path string, r io.Reader, mode os.FileMode) error {
	data, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	return os.WriteFile(path, data, mode)
}

func rootFS(t *testing.T, img v1.Image) string {
	t.Helper()
	dir := t.TempDir()
	r := mutate.Extract(img)
	defer r.Close()
	unpack(t, r, dir)
	return dir
}

func TestBuild(t *testing.T) {
	for _, arch := range Architectures() {
		t.Run(arch, func(t *testing.T) {
			o := standin(t, arch)
			tarball, digest, err := Build(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			img, descriptor := readBack(t, tarball)
			if err := validate.Image(img); err != nil {
				t.Error(err)
			}
			if got, err := img.Digest(); err != nil || got.String() != digest {
				t.Errorf("digest is %v (%v), reported %s", got, err, digest)
			}
			if got := descriptor.Annotations["io.containerd.image.name"]; got != DefaultRef {
				t.Errorf("imported as %q", got)
			}
			cfg, err := img.ConfigFile()
			if err != nil {
				t.Fatal(err)
			}
			if cfg.OS != "linux" || cfg.Architecture != arch || cfg.Config.Labels["org.opencontainers.image.version"] != "1.2.3" ||
				!strings.Contains(cfg.Config.Labels[libcLabel], "GLIBC") {
				t.Errorf("configuration is %+v", cfg)
			}
			checkDocker(t, tarball)
			root := rootFS(t, img)
			checkLinks(t, root, arch)
			checkPinned(t, root, arch, cfg.Config.Labels)
			for _, want := range []string{
				"etc/ssl/certs/ca-certificates.crt", "licenses/glibc/copyright", "licenses/libgcc/copyright",
				"licenses/" + hookModule + "@" + hookVersion + "/LICENSE", "licenses/go/LICENSE",
			} {
				if info, err := os.Stat(filepath.Join(root, want)); err != nil || info.Size() == 0 {
					t.Errorf("%s: %v", want, err)
				}
			}
			for name, where := range map[string]string{
				"nvidia-cdi-hook": "on the host", "simulated-driver": "in a driver root of its own", "mps-daemon": "beside any driver",
			} {
				if f := open(t, filepath.Join(root, "usr/bin", name)); imports(t, f) != nil {
					t.Errorf("%s, which runs %s, needs %v", name, where, imports(t, f))
				}
			}
			if arch == runtime.GOARCH {
				checkRuns(t, root)
			}
		})
	}
}

// checkLinks finds every library that a program or library in the image names, in the image.
func checkLinks(t *testing.T, root, arch string) {
	t.Helper()
	want := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[arch]
	libraries := filepath.Join(root, "lib", targets[arch].triplet)
	paths := []string{"usr/bin/kubelet-plugin", "usr/bin/controller", "usr/bin/mps-daemon", "usr/bin/simulated-driver", "usr/bin/nvidia-cdi-hook", targets[arch].interpreter}
	entries, err := os.ReadDir(libraries)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		paths = append(paths, path.Join("lib", targets[arch].triplet, e.Name()))
	}
	for _, p := range paths {
		f := open(t, filepath.Join(root, p))
		if f.Machine != want {
			t.Errorf("%s is for %s", p, f.Machine)
		}
		for _, library := range imports(t, f) {
			if library != path.Base(targets[arch].interpreter) && !exists(filepath.Join(libraries, library)) {
				t.Errorf("%s needs %s, which the image lacks", p, library)
			}
		}
	}
	interpreter := open(t, filepath.Join(root, "usr/bin/kubelet-plugin")).Section(".interp")
	data, err := interpreter.Data()
	if err != nil {
		t.Fatal(err)
	}
	if got := string(bytes.TrimRight(data, "\x00")); got != "/"+targets[arch].interpreter {
		t.Errorf("the agent wants the loader %s, the image has /%s", got, targets[arch].interpreter)
	}
}

// checkPinned finds the pinned C library in the image and in what scanners read.
func checkPinned(t *testing.T, root, arch string, labels map[string]string) {
	t.Helper()
	if labels[pinnedLabel] != "true" {
		t.Log("The pinned packages are out of reach: the image has the files of this machine")
		return
	}
	libc := pinned[arch][0]
	if !strings.Contains(labels[libcLabel], libc.version) {
		t.Errorf("the C library is %s, pinned is %s", labels[libcLabel], libc.version)
	}
	for _, p := range pinned[arch] {
		status := string(mustRead(t, filepath.Join(root, StatusDir, p.name)))
		if !strings.Contains(status, "Package: "+p.name+"\n") || !strings.Contains(status, "Version: "+p.version+"\n") {
			t.Errorf("status of %s is %q", p.name, status)
		}
	}
	certificates := mustRead(t, filepath.Join(root, "etc/ssl/certs/ca-certificates.crt"))
	if pool := x509.NewCertPool(); !pool.AppendCertsFromPEM(certificates) {
		t.Error("no certificate can be read")
	}
}

func open(t *testing.T, path string) *elf.File {
	t.Helper()
	f, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func imports(t *testing.T, f *elf.File) []string {
	t.Helper()
	needed, err := f.ImportedLibraries()
	if err != nil {
		t.Fatal(err)
	}
	return needed
}

// checkRuns starts the programs with nothing but the image around them.
func checkRuns(t *testing.T, root string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Log("not root: cannot enter the image")
		return
	}
	inside := func(program string, args ...string) string {
		cmd := exec.Command(program, args...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
		cmd.Dir, cmd.Env = "/", []string{}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%s %v: %v\n%s", program, args, err, out)
		}
		return string(out)
	}
	for _, library := range vendorLibraries {
		if got := inside("/usr/bin/kubelet-plugin", library); got != "standin 1.2.3 (0123456789ab) root\n" {
			t.Errorf("with %s the program says %q", library, got)
		}
	}
	if got := inside("/usr/bin/controller", "libc.so.6"); !strings.HasPrefix(got, "standin ") {
		t.Errorf("the controller says %q", got)
	}
	if got := inside("/usr/bin/mps-daemon", "version"); !strings.Contains(got, "1.2.3 (0123456789ab)") {
		t.Errorf("mps-daemon says %q", got)
	}
	if got := inside("/usr/bin/nvidia-cdi-hook", "--version"); !strings.Contains(got, strings.TrimPrefix(hookVersion, "v")) {
		t.Errorf("nvidia-cdi-hook says %q", got)
	}
}

func TestEqualInputsGiveEqualImages(t *testing.T) {
	first, second := standin(t, runtime.GOARCH), standin(t, runtime.GOARCH)
	tarball1, digest1, err := Build(t.Context(), first)
	if err != nil {
		t.Fatal(err)
	}
	tarball2, digest2, err := Build(t.Context(), second)
	if err != nil {
		t.Fatal(err)
	}
	if digest1 != digest2 {
		t.Errorf("digests %s and %s", digest1, digest2)
	}
	one, two := mustRead(t, tarball1), mustRead(t, tarball2)
	if !bytes.Equal(one, two) {
		t.Error("tarballs differ")
	}
	// The same image once more does not rewrite the tarball.
	before, err := os.Stat(tarball1)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := Build(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	after, err := os.Stat(tarball1)
	if err != nil {
		t.Fatal(err)
	}
	if !os.SameFile(before, after) {
		t.Error("the tarball was written again")
	}
	second.Ref = "docker.io/local/other:tag"
	if _, digest3, err := Build(t.Context(), second); err != nil || digest3 != digest1 {
		t.Errorf("by another name the digest is %s (%v), not %s", digest3, err, digest1)
	}
	if _, descriptor := readBack(t, tarball2); descriptor.Annotations["io.containerd.image.name"] != second.Ref {
		t.Errorf("a new name was not written: %v", descriptor.Annotations)
	}
	second.Version = "1.2.4"
	if _, digest4, err := Build(t.Context(), second); err != nil || digest4 == digest1 {
		t.Errorf("another version has the digest %s (%v)", digest4, err)
	}
}

// checkDocker checks manifest.json, which versions of Docker read that know no OCI layout. Its paths must be entries of the tarball.
func checkDocker(t *testing.T, tarball string) {
	t.Helper()
	dir := t.TempDir()
	unpack(t, bytes.NewReader(mustRead(t, tarball)), dir)
	var manifest []struct {
		Config           string
		RepoTags, Layers []string
	}
	if err := json.Unmarshal(mustRead(t, filepath.Join(dir, "manifest.json")), &manifest); err != nil {
		t.Fatal(err)
	}
	if len(manifest) != 1 || !slices.Equal(manifest[0].RepoTags, []string{DefaultRef}) || len(manifest[0].Layers) != 5 {
		t.Fatalf("manifest.json is %+v", manifest)
	}
	for _, p := range append(manifest[0].Layers, manifest[0].Config) {
		if !exists(filepath.Join(dir, p)) {
			t.Errorf("%s is not in the tarball", p)
		}
	}
}

func TestPush(t *testing.T) {
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	ref := strings.TrimPrefix(server.URL, "http://") + "/gpu/tandem:1.2.3"
	o := standin(t, "")
	o.Version = ""
	digest, err := Push(t.Context(), o, ref)
	if err != nil {
		t.Fatal(err)
	}
	tag, err := name.NewTag(ref)
	if err != nil {
		t.Fatal(err)
	}
	index, err := remote.Index(tag)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := index.Digest(); err != nil || got.String() != digest {
		t.Errorf("the registry has %v (%v), reported %s", got, err, digest)
	}
	if err := validate.Index(index); err != nil {
		t.Error(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	var platforms []string
	for _, m := range manifest.Manifests {
		platforms = append(platforms, m.Platform.String())
	}
	if !slices.Equal(platforms, []string{"linux/amd64", "linux/arm64"}) {
		t.Errorf("pushed %v", platforms)
	}
	o.Version = "1.2.3" // the tag
	if _, local, err := BuildIndex(t.Context(), o); err != nil || local != digest {
		t.Errorf("the layout has %s (%v), the registry %s", local, err, digest)
	}
}

func TestRefusals(t *testing.T) {
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	broken := standin(t, runtime.GOARCH)
	broken.Package = "./hack/image/testdata/missing"
	pushed := standin(t, "")
	pushed.Architectures = []string{runtime.GOARCH}
	for name, c := range map[string]struct {
		run  func() error
		want string
	}{
		"architecture": {func() error {
			_, _, err := Build(t.Context(), standin(t, "riscv64"))
			return err
		}, `architecture "riscv64": must be amd64 or arm64`},
		"package": {func() error {
			_, _, err := Build(t.Context(), broken)
			return err
		}, "compile ./hack/image/testdata/missing"},
		"canceled": {func() error {
			_, _, err := Build(canceled, standin(t, runtime.GOARCH))
			return err
		}, "canceled"},
		"no tag": {func() error {
			_, err := Push(t.Context(), standin(t, ""), "registry.example.com/gpu/tandem")
			return err
		}, `image "registry.example.com/gpu/tandem"`},
		"unreachable": {func() error {
			_, err := Push(t.Context(), pushed, "127.0.0.1:1/gpu/tandem:1")
			return err
		}, "push 127.0.0.1:1/gpu/tandem:1"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := c.run(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

func TestTagOf(t *testing.T) {
	for ref, want := range map[string]string{
		"docker.io/local/tandem:dev": "dev", "localhost:5000/tandem": "latest", "tandem": "latest", "a:1": "1",
	} {
		if got := tagOf(ref); got != want {
			t.Errorf("%s: %s, want %s", ref, got, want)
		}
	}
}

func mustRead(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}
