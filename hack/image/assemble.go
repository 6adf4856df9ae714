// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"bytes"
	"cmp"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// created stands for every time in the image: a real one would change the digest of equal inputs.
var created = time.Unix(0, 0).UTC()

// file is one regular file of the image: source on this machine, or content.
type file struct {
	path    string
	source  string
	content string
	mode    int64
}

func (f file) read() ([]byte, error) {
	if f.source == "" {
		return []byte(f.content), nil
	}
	data, err := os.ReadFile(f.source)
	if err != nil {
		return nil, fmt.Errorf("read %s for the image: %w", f.path, err)
	}
	return data, nil
}

func (c contents) assemble() (v1.Image, error) {
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	for _, files := range c.layers {
		layer, err := layerOf(files)
		if err != nil {
			return nil, err
		}
		img, err = mutate.Append(img, mutate.Addendum{
			Layer:   layer,
			History: v1.History{Created: v1.Time{Time: created}, CreatedBy: "hack/image", Comment: summary(files)},
		})
		if err != nil {
			return nil, fmt.Errorf("append layer: %w", err)
		}
	}
	return configure(img, c.options, c.libc, c.pinned)
}

func summary(files []file) string {
	if len(files) == 1 {
		return files[0].path
	}
	return fmt.Sprintf("%s and %d more", files[len(files)-1].path, len(files)-1)
}

// configure sets what runtimes read; without OS and architecture containerd hides the image.
func configure(img v1.Image, o Options, libc string, pinned bool) (v1.Image, error) {
	cfg, err := img.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("read image configuration: %w", err)
	}
	cfg = cfg.DeepCopy()
	cfg.OS, cfg.Architecture = "linux", o.Arch
	cfg.Created = v1.Time{Time: created}
	cfg.Config = v1.Config{
		// The agent writes below kubelet's directories, which belong to root.
		User:       "0:0",
		WorkingDir: "/",
		Env:        []string{"PATH=/usr/bin", "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"},
		Entrypoint: []string{"/usr/bin/kubelet-plugin"},
		Labels: map[string]string{
			"org.opencontainers.image.title":       "tandem",
			"org.opencontainers.image.description": "Kubernetes driver for NVIDIA GPUs: DRA claims and nvidia.com/gpu limits",
			"org.opencontainers.image.licenses":    "Apache-2.0",
			"org.opencontainers.image.source":      "https://github.com/tandem-gpu/tandem",
			"org.opencontainers.image.version":     o.Version,
			"org.opencontainers.image.revision":    o.Commit,
			libcLabel:                              libc,
			pinnedLabel:                            strconv.FormatBool(pinned),
		},
	}
	img, err = mutate.ConfigFile(img, cfg)
	if err != nil {
		return nil, fmt.Errorf("set image configuration: %w", err)
	}
	return img, nil
}

func layerOf(files []file) (v1.Layer, error) {
	data, err := tarOf(files)
	if err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(
		func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil },
		tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
	if err != nil {
		return nil, fmt.Errorf("compress layer: %w", err)
	}
	return layer, nil
}

// tarOf writes files and the directories above them in one fixed order, with one fixed time and owner.
func tarOf(files []file) ([]byte, error) {
	files = slices.Clone(files)
	slices.SortFunc(files, func(a, b file) int { return cmp.Compare(a.path, b.path) })
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	seen := map[string]bool{}
	for _, f := range files {
		for _, dir := range directoriesAbove(f.path) {
			if seen[dir] {
				continue
			}
			seen[dir] = true
			if err := w.WriteHeader(header(dir+"/", tar.TypeDir, 0o755, 0)); err != nil {
				return nil, fmt.Errorf("write layer: %w", err)
			}
		}
		data, err := f.read()
		if err != nil {
			return nil, err
		}
		if err := w.WriteHeader(header(f.path, tar.TypeReg, f.mode, int64(len(data)))); err != nil {
			return nil, fmt.Errorf("write layer: %w", err)
		}
		if _, err := w.Write(data); err != nil {
			return nil, fmt.Errorf("write layer: %w", err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("write layer: %w", err)
	}
	return buf.Bytes(), nil
}

func directoriesAbove(name string) []string {
	var dirs []string
	for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
		dirs = append(dirs, dir)
	}
	slices.Reverse(dirs)
	return dirs
}

func header(name string, kind byte, mode, size int64) *tar.Header {
	return &tar.Header{
		Typeflag: kind, Name: strings.TrimPrefix(name, "/"), Mode: mode, Size: size,
		ModTime: created, Format: tar.FormatPAX,
	}
}
