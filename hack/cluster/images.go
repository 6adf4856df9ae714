// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

const (
	// BusyboxImage is imported into every node when the cluster starts, under the name of the public image, so that manifests
	// run here and elsewhere unchanged. Nothing pulls it. Its stop signal is SIGKILL, unlike the public image's: pods end at
	// once. A test that needs a slow end sets a preStop hook or lifecycle.stopSignal.
	BusyboxImage = "docker.io/library/busybox:1.37"

	pauseImage  = "docker.io/local/pause:1"
	busyboxPath = "/usr/bin/busybox"
)

// makeImages writes the images that every node needs and returns their paths.
func (c *Cluster) makeImages(ctx context.Context, pauseProgram string) ([]string, error) {
	dir := filepath.Join(c.config.Dir, "images")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make image directory: %w", err)
	}
	pause, busybox := filepath.Join(dir, "pause.tar"), filepath.Join(dir, "busybox.tar")
	applets, err := hostCommand(ctx, busyboxPath, "--list-full").Output()
	if err != nil {
		return nil, fmt.Errorf("list applets of busybox: %w", err)
	}
	err = writeImage(pause, pauseImage, map[string]string{"pause": pauseProgram}, nil,
		v1.Config{Entrypoint: []string{"/pause"}})
	if err != nil {
		return nil, err
	}
	links := strings.Fields(string(applets))
	return []string{pause, busybox}, writeImage(busybox, BusyboxImage, map[string]string{"bin/busybox": busyboxPath}, links,
		v1.Config{Cmd: []string{"sh"}, Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, StopSignal: "SIGKILL"})
}

// WriteProgramImage writes an image archive for LoadImage. The image contains only one static program of the host, at the path inImage.
// Stories call it for programs whose images they cannot pull. The image's user is not root, because charts require that.
func WriteProgramImage(archive, reference, program, inImage string) error {
	return writeImage(archive, reference, map[string]string{inImage: program}, nil, v1.Config{User: "65534"})
}

// WriteRootImage writes an image archive for LoadImage whose files are the regular files below a directory of the host, all of them
// executable.
func WriteRootImage(archive, reference, dir string) error {
	files := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		below, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		files[below] = path
		return nil
	})
	if err != nil {
		return fmt.Errorf("make image %s: %w", reference, err)
	}
	return writeImage(archive, reference, files, nil, v1.Config{})
}

// writeImage writes an image of one layer. files maps a path in the image to a file of the host; links point to /bin/busybox.
func writeImage(path, reference string, files map[string]string, links []string, config v1.Config) error {
	data, err := layerContent(files, links)
	if err != nil {
		return fmt.Errorf("make image %s: %w", reference, err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil })
	if err != nil {
		return fmt.Errorf("make image %s: %w", reference, err)
	}
	image, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		return fmt.Errorf("make image %s: %w", reference, err)
	}
	described, err := image.ConfigFile()
	if err != nil {
		return fmt.Errorf("make image %s: %w", reference, err)
	}
	described = described.DeepCopy()
	// containerd hides an image without OS and architecture.
	described.OS, described.Architecture, described.Config = "linux", runtime.GOARCH, config
	if image, err = mutate.ConfigFile(image, described); err != nil {
		return fmt.Errorf("make image %s: %w", reference, err)
	}
	tag, err := name.NewTag(reference)
	if err != nil {
		return fmt.Errorf("make image %s: %w", reference, err)
	}
	if err := tarball.WriteToFile(path, tag, image); err != nil {
		return fmt.Errorf("write image %s: %w", reference, err)
	}
	return nil
}

func layerContent(files map[string]string, links []string) ([]byte, error) {
	var content bytes.Buffer
	archive := tar.NewWriter(&content)
	made := map[string]bool{}
	directory := func(dir string, mode int64) error {
		if made[dir] || dir == "." || dir == "/" {
			return nil
		}
		made[dir] = true
		return archive.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: mode})
	}
	for _, dir := range []string{"bin", "sbin", "usr", "usr/bin", "usr/sbin", "etc", "proc", "sys", "dev", "run", "var", "root", "home"} {
		if err := directory(dir, 0o755); err != nil {
			return nil, err
		}
	}
	if err := directory("tmp", 0o1777); err != nil {
		return nil, err
	}
	for inImage, onHost := range files {
		program, err := os.ReadFile(onHost)
		if err != nil {
			return nil, err
		}
		if err := archive.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: inImage, Mode: 0o755, Size: int64(len(program))}); err != nil {
			return nil, err
		}
		if _, err := archive.Write(program); err != nil {
			return nil, err
		}
	}
	for _, link := range links {
		if link == "bin/busybox" {
			continue
		}
		if err := directory(filepath.Dir(link), 0o755); err != nil {
			return nil, err
		}
		if err := archive.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: link, Linkname: "/bin/busybox", Mode: 0o777}); err != nil {
			return nil, err
		}
	}
	for file, text := range map[string]string{
		"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
		"etc/group":  "root:x:0:\nnogroup:x:65534:\n",
	} {
		if _, given := files[file]; given {
			continue
		}
		if err := archive.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: file, Mode: 0o644, Size: int64(len(text))}); err != nil {
			return nil, err
		}
		if _, err := io.WriteString(archive, text); err != nil {
			return nil, err
		}
	}
	return content.Bytes(), archive.Close()
}
