// SPDX-License-Identifier: Apache-2.0

package release

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/match"
	"github.com/google/go-containerregistry/pkg/v1/mutate"

	"github.com/tandem-gpu/tandem/hack/image"
)

// archImage is the image of one architecture, with the files in it by path.
type archImage struct {
	arch   string
	digest v1.Hash
	files  map[string][]byte
}

// makeImage builds the image and writes it to layoutDir under the name by which the chart pins it.
func (b build) makeImage(ctx context.Context, d *Description) ([]archImage, error) {
	dir, digest, err := image.BuildIndex(ctx, image.Options{
		Version: b.source.version, Commit: b.source.commit, Root: b.Root, Out: filepath.Join(b.work, "image"), Pinned: !b.AnyToolchain,
		Ref: d.Image + ":" + d.Version, Package: b.Package, ControllerPackage: b.ControllerPackage, Architectures: b.Architectures,
		Progress: b.Progress,
	})
	if err != nil {
		return nil, err
	}
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, fmt.Errorf("read image: %w", err)
	}
	d.ImageDigest, d.Images = digest, map[string]string{}
	path, err := layout.Write(filepath.Join(b.result, layoutDir), empty.Index)
	if err != nil {
		return nil, fmt.Errorf("write image: %w", err)
	}
	// containerd imports the image under this name, which is how the chart and the manifest name it.
	if err := path.AppendIndex(index, layout.WithAnnotations(map[string]string{
		"io.containerd.image.name":          d.Image + "@" + digest,
		"org.opencontainers.image.ref.name": d.Version,
	})); err != nil {
		return nil, fmt.Errorf("write image: %w", err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return nil, fmt.Errorf("read image: %w", err)
	}
	var images []archImage
	for _, m := range manifest.Manifests {
		img, err := index.Image(m.Digest)
		if err != nil {
			return nil, fmt.Errorf("read image for %s: %w", m.Platform, err)
		}
		files, err := filesOf(img)
		if err != nil {
			return nil, fmt.Errorf("read image for %s: %w", m.Platform, err)
		}
		d.Images[m.Platform.Architecture] = m.Digest.String()
		images = append(images, archImage{arch: m.Platform.Architecture, digest: m.Digest, files: files})
	}
	return images, nil
}

func filesOf(img v1.Image) (map[string][]byte, error) {
	r := mutate.Extract(img)
	defer r.Close()
	files := map[string][]byte{}
	for t := tar.NewReader(r); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return files, nil
		}
		if err != nil {
			return nil, err
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		if files[path.Clean(h.Name)], err = io.ReadAll(t); err != nil {
			return nil, err
		}
	}
}

// openLayout returns the image of a release.
func openLayout(dir string, d Description) (v1.ImageIndex, error) {
	outer, err := layout.ImageIndexFromPath(filepath.Join(dir, layoutDir))
	if err != nil {
		return nil, fmt.Errorf("read image of the release: %w", err)
	}
	digest, err := v1.NewHash(d.ImageDigest)
	if err != nil {
		return nil, fmt.Errorf("read digest of the release: %w", err)
	}
	manifest, err := outer.IndexManifest()
	if err != nil {
		return nil, fmt.Errorf("read image of the release: %w", err)
	}
	for _, m := range manifest.Manifests {
		if match.Digests(digest)(m) {
			return outer.ImageIndex(digest)
		}
	}
	return nil, fmt.Errorf("find image %s of the release: %s has others", digest, layoutDir)
}

// writeLicences writes the licences of everything that is distributed: those in the images, and those of the plugins.
func (b build) writeLicences(ctx context.Context, images []archImage, plugins []string) error {
	texts := map[string][]byte{}
	for _, img := range images {
		for name, data := range img.files {
			if inside, ok := strings.CutPrefix(name, "licenses/"); ok {
				texts[inside] = data
			}
		}
	}
	more, err := image.Licences(ctx, plugins...)
	if err != nil {
		return err
	}
	for name, data := range more {
		texts[name] = data
	}
	var all strings.Builder
	fmt.Fprintf(&all, "Licences of Tandem %s and of everything that its image and its programs contain.\n", b.source.version)
	for _, name := range sortedKeys(texts) {
		fmt.Fprintf(&all, "\n%s\n%s\n\n%s\n", strings.Repeat("=", 100), name, strings.TrimSpace(string(texts[name])))
	}
	return b.write(licences, all.String())
}

// regularFiles returns the paths of all files below dir, relative to it, in order.
func regularFiles(dir string) ([]string, error) {
	var found []string
	err := filepath.WalkDir(dir, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		found = append(found, name)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list files of %s: %w", dir, err)
	}
	return found, nil
}
