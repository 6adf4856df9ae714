// SPDX-License-Identifier: Apache-2.0

package release

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx"
	"github.com/spdx/tools-golang/spdxlib"

	"github.com/tandem-gpu/tandem/hack/binaries"
	"github.com/tandem-gpu/tandem/hack/gotool"
)

// testVersion is no version that CHANGELOG.md will have.
const testVersion = "v0.98.7-test.1"

type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimSuffix(string(p), "\n"))
	return len(p), nil
}

// checkout makes a checkout in which testVersion can be released, with the files as they are here, committed or not.
func checkout(t *testing.T) string {
	t.Helper()
	root, err := gotool.Root(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(root, ".git")); err != nil {
		t.Skip("no git history here: a release is made from a commit")
	}
	dir := filepath.Join(t.TempDir(), "checkout")
	if err := Rehearse(t.Context(), root, testVersion, dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

func commit(t *testing.T, dir string) {
	t.Helper()
	if err := commitAll(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
}

func edit(t *testing.T, path string, change func(string) string) {
	t.Helper()
	before := mustRead(t, path)
	after := change(before)
	if before == after {
		t.Fatalf("nothing to change in %s", path)
	}
	if err := os.WriteFile(path, []byte(after), 0o644); err != nil {
		t.Fatal(err)
	}
}

func mustRead(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// options build stand-ins for agent and controller, which take minutes to link.
func options(t *testing.T, root string) Options {
	t.Helper()
	const standin = "./hack/image/testdata/standin"
	return Options{
		Version: testVersion, Root: root, Out: filepath.Join(t.TempDir(), "release"), Package: standin, ControllerPackage: standin,
		AnyToolchain: true, Progress: testWriter{t},
	}
}

// TestRelease makes a release twice, looks at it, and publishes it to a registry in this process.
func TestRelease(t *testing.T) {
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	root := checkout(t)
	// A small plugin in place of the real one.
	pluginDir := filepath.Join(root, "cli", plugin)
	if err := errors.Join(os.RemoveAll(pluginDir), os.MkdirAll(pluginDir, 0o755), os.WriteFile(filepath.Join(pluginDir, "main.go"),
		[]byte("// Command kubectl-gpu is a stand-in.\npackage main\n\nimport \"github.com/tandem-gpu/tandem/internal/version\"\n\nfunc main() { println(version.String()) }\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	commit(t, root)
	o := options(t, root)
	o.Registry = strings.TrimPrefix(server.URL, "http://") + "/gpu"
	d, err := Check(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Run("files", func(t *testing.T) { checkFiles(t, o, d) })
	t.Run("sums", func(t *testing.T) { checkSums(t, o.Out) })
	t.Run("pinned", func(t *testing.T) { checkManifest(t, o, d) })
	t.Run("sbom", func(t *testing.T) { checkSBOMs(t, o, d) })
	t.Run("bundle", func(t *testing.T) { checkBundle(t, o, d) })
	t.Run("published", func(t *testing.T) { checkPublished(t, o, d) })
}

func checkFiles(t *testing.T, o Options, d Description) {
	want := []string{
		"LICENSES.txt", "RELEASE_NOTES.md", "SHA256SUMS", "image", "install.yaml",
		"kubectl-gpu-darwin-amd64", "kubectl-gpu-darwin-arm64", "kubectl-gpu-linux-amd64", "kubectl-gpu-linux-arm64",
		"kubectl-gpu-windows-amd64.exe", "kubectl-gpu-windows-arm64.exe", "release.json",
		"tandem-0.98.7-test.1-airgap.tar", "tandem-0.98.7-test.1-linux-amd64.spdx.json", "tandem-0.98.7-test.1-linux-arm64.spdx.json",
		"tandem-0.98.7-test.1.tgz",
	}
	entries, err := os.ReadDir(o.Out)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if !slices.Equal(got, want) {
		t.Errorf("release has %q, want %q", got, want)
	}
	if read, err := Read(o.Out); err != nil || read.ImageDigest != d.ImageDigest || read.Images["arm64"] == "" || read.Images["arm64"] == read.Images["amd64"] {
		t.Errorf("release.json has %+v (%v), built %+v", read, err, d)
	}
	text := mustRead(t, filepath.Join(o.Out, notes))
	if !strings.Contains(text, "- A rehearsal.") || strings.Contains(text, "Unreleased") || !strings.Contains(text, d.ImageDigest) {
		t.Errorf("release notes are %q", text)
	}
	text = mustRead(t, filepath.Join(o.Out, licences))
	for _, part := range []string{"Apache License", "\nglibc/copyright\n", "\ngo/LICENSE\n", "\ngithub.com/NVIDIA/nvidia-container-toolkit@"} {
		if !strings.Contains(text, part) {
			t.Errorf("%q is not in %s", part, licences)
		}
	}
	out, err := exec.Command(filepath.Join(o.Out, "kubectl-gpu-linux-"+runtime.GOARCH)).CombinedOutput()
	if err != nil || strings.TrimSpace(string(out)) != d.Version+" ("+d.Commit+")" {
		t.Errorf("the plugin says %q (%v)", out, err)
	}
}

func checkSums(t *testing.T, dir string) {
	t.Helper()
	cmd := exec.Command("sha256sum", "--check", "--quiet", "--strict", sums)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	listed := strings.Count(mustRead(t, filepath.Join(dir, sums)), "\n")
	if files, err := regularFiles(dir); err != nil || listed != len(files)-1 {
		t.Errorf("%s lists %d of %d files (%v)", sums, listed, len(files)-1, err)
	}
}

// Every image that the manifest names is the one that was built.
func checkManifest(t *testing.T, o Options, d Description) {
	text := mustRead(t, filepath.Join(o.Out, manifest))
	images := 0
	for line := range strings.Lines(text) {
		if image, ok := strings.CutPrefix(strings.TrimSpace(line), "image: "); ok {
			images++
			if strings.Trim(image, `"`) != d.Image+"@"+d.ImageDigest {
				t.Errorf("the manifest has the image %s", image)
			}
		}
	}
	if images < 2 || !strings.Contains(text, "kind: DaemonSet") || !strings.Contains(text, "kind: Namespace\n") || strings.Contains(text, "helm.sh/hook") {
		t.Errorf("the manifest has %d images", images)
	}
}

func checkSBOMs(t *testing.T, o Options, d Description) {
	for arch, digest := range d.Images {
		f, err := os.Open(filepath.Join(o.Out, sbomName(d, arch)))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		var document spdx.Document
		if err := spdxjson.ReadInto(f, &document); err != nil {
			t.Fatal(err)
		}
		if err := spdxlib.ValidateDocument(&document); err != nil {
			t.Error(err)
		}
		found := map[string]*spdx.Package{}
		for _, p := range document.Packages {
			found[p.PackageName] = p
		}
		for _, name := range []string{"kubelet-plugin", "controller", "mps-daemon", "simulated-driver", "nvidia-cdi-hook", "stdlib"} {
			if found[name] == nil {
				t.Errorf("%s: no %s", arch, name)
			}
		}
		if p := found["tandem"]; p == nil || "sha256:"+p.PackageChecksums[0].Value != digest {
			t.Errorf("%s: image is %+v", arch, p)
		}
		if p := found["github.com/NVIDIA/nvidia-container-toolkit"]; p == nil || p.PackageLicenseDeclared != "Apache-2.0" || !strings.HasPrefix(p.PackageComment, "go.sum: h1:") {
			t.Errorf("%s: the hook's module is %+v", arch, p)
		}
		if p := found["libc6"]; p == nil {
			t.Logf("%s: no libc6: the image has the files of this machine", arch)
		} else if !strings.Contains(p.PackageExternalReferences[0].Locator, "arch="+arch) || strings.Contains(p.PackageExternalReferences[0].Locator, "+") {
			t.Errorf("%s: libc6 is %+v", arch, p.PackageExternalReferences[0])
		}
	}
}

// checkBundle unpacks the bundle and lets its script check it, and import and push with stand-ins for ctr, crane and helm.
func checkBundle(t *testing.T, o Options, d Description) {
	dir := t.TempDir()
	f, err := os.Open(filepath.Join(o.Out, "tandem-"+d.Version+"-airgap.tar"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		var data bytes.Buffer
		if _, err := io.Copy(&data, r); err != nil {
			t.Fatal(err)
		}
		to := filepath.Join(dir, h.Name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, data.Bytes(), h.FileInfo().Mode())); err != nil {
			t.Fatal(err)
		}
	}
	bundle := filepath.Join(dir, "tandem-"+d.Version+"-airgap")
	checkSums(t, bundle)
	// Each stand-in says how it was called, and ctr lists the archive that it gets.
	bin := filepath.Join(dir, "bin")
	for name, body := range map[string]string{"ctr": `echo ctr "$@"; tar -tf -`, "crane": `echo crane "$@"`, "helm": `echo helm "$@"`} {
		if err := errors.Join(os.MkdirAll(bin, 0o755), os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+body+"\n"), 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	load := func(args ...string) (string, error) {
		cmd := exec.Command(filepath.Join(bundle, loadName), args...)
		cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := load("import"); err != nil || !strings.Contains(out, "ctr --namespace=k8s.io images import -\n") ||
		!strings.Contains(out, "index.json") || !strings.Contains(out, strings.TrimPrefix(d.ImageDigest, "sha256:")) {
		t.Errorf("import says %q (%v)", out, err)
	}
	if out, err := load("push", "registry.example.com/mirror"); err != nil ||
		!strings.Contains(out, "crane push image registry.example.com/mirror/tandem:"+d.Version+"\n") ||
		!strings.Contains(out, "helm push "+d.ChartFile+" oci://registry.example.com/mirror/charts\n") ||
		!strings.Contains(out, "registry.example.com/mirror/tandem@"+d.ImageDigest) {
		t.Errorf("push says %q (%v)", out, err)
	}
	if out, err := load("push"); err == nil || !strings.Contains(out, "usage:") {
		t.Errorf("push without a registry says %q (%v)", out, err)
	}
	edit(t, filepath.Join(bundle, manifest), func(text string) string { return text + "\n" })
	if out, err := load("import"); err == nil || strings.Contains(out, "ctr") {
		t.Errorf("with a changed file import says %q (%v)", out, err)
	}
}

// checkPublished takes image and chart from the registry again.
func checkPublished(t *testing.T, o Options, d Description) {
	published, err := Publish(t.Context(), o.Out, o.Progress)
	if err != nil {
		t.Fatal(err)
	}
	// Another time of the file, as after a download, gives the same chart.
	if err := os.Chtimes(filepath.Join(o.Out, d.ChartFile), time.Now(), time.Now()); err != nil {
		t.Fatal(err)
	}
	if again, err := Publish(t.Context(), o.Out, o.Progress); err != nil || again != published {
		t.Errorf("published again as %+v (%v), first %+v", again, err, published)
	}
	reference, err := name.NewDigest(published.Image)
	if err != nil {
		t.Fatal(err)
	}
	index, err := remote.Index(reference)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(index); err != nil {
		t.Error(err)
	}
	if digest, err := index.Digest(); err != nil || digest.String() != d.ImageDigest {
		t.Errorf("the registry has %s (%v), released %s", digest, err, d.ImageDigest)
	}

	pulled := t.TempDir()
	if _, err := binaries.Helm().Output(t.Context(), pulled, "pull", "oci://"+d.Chart, "--version", d.Version, "--plain-http"); err != nil {
		t.Fatal(err)
	}
	if mustRead(t, filepath.Join(pulled, d.ChartFile)) != mustRead(t, filepath.Join(o.Out, d.ChartFile)) {
		t.Error("the chart in the registry is another one")
	}
	rendered, err := binaries.Helm().Output(t.Context(), pulled, "template", "tandem", "oci://"+d.Chart, "--version", d.Version, "--plain-http",
		"--namespace", namespace, "--no-hooks")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasSuffix(mustRead(t, filepath.Join(o.Out, manifest)), rendered) {
		t.Error("the chart in the registry gives another manifest")
	}

	// Another build under the same version must not replace this one.
	if err := remote.Tag(reference.Tag(d.Version), mustDescriptor(t, d)); err != nil {
		t.Fatal(err)
	}
	if _, err := Publish(t.Context(), o.Out, o.Progress); err == nil || !strings.Contains(err.Error(), "the registry has "+d.Images["amd64"]) {
		t.Errorf("over another image: %v", err)
	}
}

// mustDescriptor is the image for amd64 alone, as the registry has it.
func mustDescriptor(t *testing.T, d Description) *remote.Descriptor {
	t.Helper()
	reference, err := name.NewDigest(d.Image + "@" + d.Images["amd64"])
	if err != nil {
		t.Fatal(err)
	}
	descriptor, err := remote.Get(reference)
	if err != nil {
		t.Fatal(err)
	}
	return descriptor
}

func TestRefusals(t *testing.T) {
	root := checkout(t)
	for name, c := range map[string]struct {
		change func(t *testing.T, o *Options)
		want   string
	}{
		"no v":          {func(_ *testing.T, o *Options) { o.Version = "0.1.0" }, `version "0.1.0": want the form v0.2.0`},
		"short":         {func(_ *testing.T, o *Options) { o.Version = "v1.2" }, `version "v1.2": want the form`},
		"build":         {func(_ *testing.T, o *Options) { o.Version = "v1.2.3+4" }, `version "v1.2.3+4": want the form`},
		"not in log":    {func(_ *testing.T, o *Options) { o.Version = "v0.97.0" }, `CHANGELOG.md has no section "## 0.97.0"`},
		"registry":      {func(_ *testing.T, o *Options) { o.Registry = "oci://registry.example.com" }, `registry "oci://registry.example.com": want a host`},
		"output exists": {func(t *testing.T, o *Options) { o.Out = root }, "is not empty"},
		"no checkout":   {func(t *testing.T, o *Options) { o.Root = t.TempDir() }, "git status in"},
	} {
		t.Run(name, func(t *testing.T) {
			o := options(t, root)
			c.change(t, &o)
			refused(t, o, c.want)
		})
	}
	t.Run("chart", func(t *testing.T) {
		edit(t, filepath.Join(root, chartPath, "Chart.yaml"), func(text string) string {
			return strings.Replace(text, "version: 0.98.7-test.1", "version: 0.98.6", 1)
		})
		o := options(t, root)
		refused(t, o, "release "+testVersion+": "+errDirty.Error()+":\nM deployments/helm/tandem/Chart.yaml")
		commit(t, root)
		refused(t, o, `Chart.yaml has version "0.98.6" and appVersion "0.98.7-test.1", want "0.98.7-test.1"`)
	})
}

func refused(t *testing.T, o Options, want string) {
	t.Helper()
	if _, err := Build(t.Context(), o); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %q", err, want)
	}
	if entries, err := os.ReadDir(filepath.Dir(o.Out)); err == nil && o.Out != o.Root && len(entries) > 0 {
		t.Errorf("left %v behind", entries)
	}
}

func TestSection(t *testing.T) {
	const changelog = "# Changelog\n\nText.\n\n## Unreleased\n\n- new\n\n## 0.2.0 - 2026-01-02\n\n### Added\n\n- two\n\n## [0.1.0]\n\n- one\n\n## 0.0.1\n\n"
	for version, want := range map[string]string{"0.2.0": "### Added\n\n- two", "0.1.0": "- one"} {
		if got, err := section(changelog, version); err != nil || got != want {
			t.Errorf("%s: %q (%v)", version, got, err)
		}
	}
	for version, want := range map[string]string{"0.2": "no section", "0.0.1": "is empty", "0.3.0": "no section"} {
		if got, err := section(changelog, version); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %q (%v)", version, got, err)
		}
	}
}

// The values of this checkout begin as pin expects.
func TestPin(t *testing.T) {
	root, err := gotool.Root(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	values := mustRead(t, filepath.Join(root, chartPath, "values.yaml"))
	got, err := pin(values, "registry.example.com/gpu/tandem", "sha256:0123")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(got, "\n  repository: registry.example.com/gpu/tandem\n") || !strings.Contains(got, "\n  digest: sha256:0123\n  pullPolicy:") {
		t.Errorf("values begin with %q", got[:400])
	}
	if _, err := pin("image: {}\n", "a", "b"); err == nil || !strings.Contains(err.Error(), "pin image a") {
		t.Errorf("other values: %v", err)
	}
}

func TestLicenceOf(t *testing.T) {
	for text, want := range map[string]string{
		"Apache License\n   Version 2.0, January 2004":                                                                            "Apache-2.0",
		"Redistributions in binary form must reproduce the above\ncopyright notice":                                               "BSD-2-Clause",
		"Redistributions in binary form must reproduce the above\ncopyright notice. Neither the name of Google":                   "BSD-3-Clause",
		"Permission is hereby granted, free of charge, to any person obtaining a copy\n Apache License Version 2.0, January 2004": "Apache-2.0 MIT",
		"All rights reserved.": "",
	} {
		if got := strings.Join(licenceOf(text), " "); got != want {
			t.Errorf("%q is under %q, want %q", text, got, want)
		}
	}
}

func TestCompareFindsDifferences(t *testing.T) {
	one, two := t.TempDir(), t.TempDir()
	for path, text := range map[string]string{
		one + "/same": "a", two + "/same": "a", one + "/other": "a", two + "/other": "b", one + "/first": "a", two + "/second": "a",
	} {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := compare(one, two)
	if want := []string{"first is in the first only", "other differs", "second is in the second only"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v (%v), want %v", got, err, want)
	}
}

func TestCanceled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	o := options(t, checkout(t))
	cancel()
	if _, err := Build(ctx, o); err == nil {
		t.Error("a canceled build succeeded")
	}
	if entries, err := os.ReadDir(filepath.Dir(o.Out)); err == nil && len(entries) > 0 {
		t.Errorf("left %v behind", entries)
	}
}
