// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
)

// writeTarball writes an OCI image layout as one tar file, with the manifest.json that older versions of Docker read
// beside the index. The image keeps its digest when it is imported, unlike with Docker's own older format.
func writeTarball(path, ref string, img v1.Image) error {
	temporary := path + ".tmp"
	f, err := os.Create(temporary)
	if err != nil {
		return err
	}
	defer os.Remove(temporary)
	if err := writeArchive(f, ref, img); err != nil {
		f.Close()
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(temporary, path)
}

func writeArchive(out io.Writer, ref string, img v1.Image) error {
	w := &archive{tar: tar.NewWriter(out), seen: map[string]bool{}}
	w.text("oci-layout", `{"imageLayoutVersion":"1.0.0"}`)
	descriptor, err := partial.Descriptor(img)
	if err != nil {
		return fmt.Errorf("describe image: %w", err)
	}
	descriptor.Annotations = map[string]string{
		"io.containerd.image.name":          ref,
		"org.opencontainers.image.ref.name": tagOf(ref),
	}
	cfg, err := img.ConfigFile()
	if err != nil {
		return fmt.Errorf("read image configuration: %w", err)
	}
	descriptor.Platform = cfg.Platform()
	w.json("index.json", v1.IndexManifest{
		SchemaVersion: 2, MediaType: "application/vnd.oci.image.index.v1+json", Manifests: []v1.Descriptor{*descriptor},
	})
	manifest, err := img.RawManifest()
	if err != nil {
		return fmt.Errorf("read manifest: %w", err)
	}
	w.text(blob(descriptor.Digest), string(manifest))
	if err := w.contents(ref, img); err != nil {
		return err
	}
	return w.close()
}

// archive is a tar writer that remembers its first error.
type archive struct {
	tar  *tar.Writer
	seen map[string]bool
	err  error
}

func (w *archive) contents(ref string, img v1.Image) error {
	config, err := img.RawConfigFile()
	if err != nil {
		return fmt.Errorf("read image configuration: %w", err)
	}
	name, err := img.ConfigName()
	if err != nil {
		return fmt.Errorf("digest image configuration: %w", err)
	}
	w.text(blob(name), string(config))
	layers, err := img.Layers()
	if err != nil {
		return fmt.Errorf("list layers: %w", err)
	}
	var paths []string
	for _, layer := range layers {
		digest, err := layer.Digest()
		if err != nil {
			return fmt.Errorf("digest layer: %w", err)
		}
		r, err := layer.Compressed()
		if err != nil {
			return fmt.Errorf("read layer: %w", err)
		}
		data, err := io.ReadAll(r)
		if err != nil {
			return fmt.Errorf("read layer: %w", err)
		}
		paths = append(paths, blob(digest))
		w.text(blob(digest), string(data))
	}
	w.json("manifest.json", []map[string]any{{"Config": blob(name), "RepoTags": []string{ref}, "Layers": paths}})
	return nil
}

func (w *archive) text(name, content string) {
	if w.err != nil || w.seen[name] {
		return
	}
	w.seen[name] = true
	if w.err = w.tar.WriteHeader(header(name, tar.TypeReg, 0o644, int64(len(content)))); w.err == nil {
		_, w.err = io.WriteString(w.tar, content)
	}
}

func (w *archive) json(name string, value any) {
	data, err := json.Marshal(value)
	if err != nil && w.err == nil {
		w.err = err
	}
	w.text(name, string(data))
}

func (w *archive) close() error {
	if w.err != nil {
		return w.err
	}
	return w.tar.Close()
}

func blob(h v1.Hash) string { return "blobs/" + h.Algorithm + "/" + h.Hex }

func tagOf(ref string) string {
	if i := strings.LastIndex(ref, ":"); i > strings.LastIndex(ref, "/") {
		return ref[i+1:]
	}
	return "latest"
}
