// SPDX-License-Identifier: Apache-2.0

// Package release makes the files of a release from a commit, and publishes them: the image for all architectures as an OCI
// layout, the chart that pins it by digest, manifests, plugins of kubectl, SBOMs, licences, sums, notes, and a bundle for
// clusters without a registry. Equal commits give equal bytes. It writes no file of the repository, and makes no tag.
package release

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/hack/image"
)

// DefaultRegistry is the registry that a release names when Options.Registry is empty. It does not exist: such a release is
// for tests and rehearsals.
const DefaultRegistry = "registry.example.com/gpu"

// Options says what to release.
type Options struct {
	// Version is v and a semantic version, such as v0.2.0. CHANGELOG.md and Chart.yaml must have it.
	Version string
	// Out is the directory for the results. It must be empty or missing.
	Out string
	// Registry and the path of the repositories in it, without a scheme: the image is Registry/tandem, the chart
	// Registry/charts/tandem. DefaultRegistry when empty.
	Registry string
	// Root is the checkout to release.
	Root string
	// Package and ControllerPackage replace programs of the image in tests, and Architectures those of its index, as image.Options has them.
	Package, ControllerPackage string
	Architectures              []string
	// NoPlugins leaves the plugins of kubectl out, in tests of the image.
	NoPlugins bool
	// AnyToolchain allows another Go release, other compilers and another C library than those that releases are made
	// with. The bytes are then those of this machine only.
	AnyToolchain bool
	// Progress gets one line a step; nil is silence.
	Progress io.Writer
}

// Names of the results in Options.Out.
const (
	layoutDir   = "image"
	manifest    = "install.yaml"
	licences    = "LICENSES.txt"
	sums        = "SHA256SUMS"
	notes       = "RELEASE_NOTES.md"
	description = "release.json"
)

// Description is what release.json says, for Publish and for scripts.
type Description struct {
	// Version is the release without v. Commit is the commit it is made from.
	Version string `json:"version"`
	Commit  string `json:"commit"`
	// Time is when the commit was made.
	Time time.Time `json:"time"`
	// Image is the repository of the image, ImageDigest the digest of its index, Images that of each architecture.
	Image       string            `json:"image"`
	ImageDigest string            `json:"imageDigest"`
	Images      map[string]string `json:"images"`
	// Chart is the repository of the chart, ChartFile the file in this directory.
	Chart     string `json:"chart"`
	ChartFile string `json:"chartFile"`
	// Pinned says that the toolchain is the one that releases are made with.
	Pinned bool `json:"pinned"`
}

// Build makes a release in o.Out and says what it is. It refuses to start where the checkout is not what the version names. A build
// that fails leaves no directory behind.
func Build(ctx context.Context, o Options) (Description, error) {
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	if o.Registry == "" {
		o.Registry = DefaultRegistry
		fmt.Fprintf(o.Progress, "the chart will name %s, which does not exist: set the registry for a release that can be installed\n", o.Registry)
	}
	if err := checkRegistry(o.Registry); err != nil {
		return Description{}, err
	}
	s, err := inspect(ctx, o)
	if err != nil {
		return Description{}, err
	}
	out, err := filepath.Abs(o.Out)
	if err != nil {
		return Description{}, fmt.Errorf("resolve %s: %w", o.Out, err)
	}
	if entries, err := os.ReadDir(out); err == nil && len(entries) > 0 {
		return Description{}, fmt.Errorf("use output directory %s: it is not empty", out)
	}
	if !o.AnyToolchain {
		if err := image.CheckToolchain(ctx, o.Progress); err != nil {
			return Description{}, err
		}
	}
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return Description{}, fmt.Errorf("make output directory: %w", err)
	}
	work, err := os.MkdirTemp(filepath.Dir(out), ".release-")
	if err != nil {
		return Description{}, fmt.Errorf("make work directory: %w", err)
	}
	defer os.RemoveAll(work)
	b := build{Options: o, source: s, work: work, result: filepath.Join(work, "result")}
	d, err := b.run(ctx)
	if err != nil {
		return Description{}, fmt.Errorf("release %s: %w", o.Version, err)
	}
	// Rename replaces an empty directory.
	if err := os.Rename(b.result, out); err != nil {
		return Description{}, fmt.Errorf("move release to %s: %w", out, err)
	}
	fmt.Fprintf(o.Progress, "release %s is in %s\n", o.Version, out)
	return d, nil
}

// build is one run of Build.
type build struct {
	Options
	source source
	// work is removed at the end; result, in it, becomes the output directory.
	work, result string
}

func (b build) run(ctx context.Context) (Description, error) {
	if err := os.MkdirAll(b.result, 0o755); err != nil {
		return Description{}, fmt.Errorf("make result directory: %w", err)
	}
	d := Description{
		Version: b.source.version, Commit: b.source.commit, Time: b.source.time(), Image: b.Registry + "/tandem", Chart: b.Registry + "/charts/tandem",
		ChartFile: "tandem-" + b.source.version + ".tgz", Pinned: !b.AnyToolchain,
	}
	images, err := b.makeImage(ctx, &d)
	if err != nil {
		return Description{}, err
	}
	if err := b.makeChart(ctx, d); err != nil {
		return Description{}, err
	}
	plugins, err := b.makePlugins(ctx)
	if err != nil {
		return Description{}, err
	}
	if err := b.writeSBOMs(d, images); err != nil {
		return Description{}, err
	}
	if err := b.writeLicences(ctx, images, plugins); err != nil {
		return Description{}, err
	}
	if err := b.write(notes, b.releaseNotes(d)); err != nil {
		return Description{}, err
	}
	text, err := json.MarshalIndent(d, "", "  ")
	if err != nil {
		return Description{}, fmt.Errorf("encode %s: %w", description, err)
	}
	if err := b.write(description, string(text)+"\n"); err != nil {
		return Description{}, err
	}
	if err := b.makeBundle(d); err != nil {
		return Description{}, err
	}
	return d, b.writeSums(b.result, sums)
}

// write makes a file of the result.
func (b build) write(name, content string) error {
	if err := os.WriteFile(filepath.Join(b.result, name), []byte(content), 0o644); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// Read returns the description of the release in a directory that Build made.
func Read(dir string) (Description, error) {
	data, err := os.ReadFile(filepath.Join(dir, description))
	if err != nil {
		return Description{}, fmt.Errorf("read release: %w", err)
	}
	var d Description
	if err := json.Unmarshal(data, &d); err != nil {
		return Description{}, fmt.Errorf("read %s of %s: %w", description, dir, err)
	}
	return d, nil
}

func checkRegistry(registry string) error {
	if strings.Contains(registry, "://") || strings.HasSuffix(registry, "/") || strings.ContainsAny(registry, " @\"'") {
		return fmt.Errorf("registry %q: want a host and a path, such as %s", registry, DefaultRegistry)
	}
	return nil
}

// time of everything that has a time: that of the commit, because the clock's would change the bytes.
func (s source) time() time.Time { return time.Unix(s.seconds, 0).UTC() }

// errDirty is reported for a checkout with changes.
var errDirty = errors.New("the checkout has changes that are not committed")
