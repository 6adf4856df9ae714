// SPDX-License-Identifier: Apache-2.0

package release

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

//go:embed load.sh
var loadScript []byte

// loadName is the script in the bundle.
const loadName = "load.sh"

// makeBundle packs what a cluster without a registry needs into one file.
func (b build) makeBundle(d Description) error {
	name := "tandem-" + d.Version + "-airgap"
	fmt.Fprintf(b.Progress, "packing %s.tar\n", name)
	dir := filepath.Join(b.work, name)
	for _, part := range []string{layoutDir, d.ChartFile, manifest, licences, description} {
		if err := copyTo(filepath.Join(dir, part), filepath.Join(b.result, part)); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, loadName), loadScript, 0o755); err != nil {
		return fmt.Errorf("write %s: %w", loadName, err)
	}
	if err := b.writeSums(dir, sums); err != nil {
		return err
	}
	return writeTar(filepath.Join(b.result, name+".tar"), dir, name, b.source.time())
}

func copyTo(to, from string) error {
	info, err := os.Stat(from)
	if err != nil {
		return fmt.Errorf("copy into bundle: %w", err)
	}
	if info.IsDir() {
		err = os.CopyFS(to, os.DirFS(from))
	} else if err = os.MkdirAll(filepath.Dir(to), 0o755); err == nil {
		err = os.Link(from, to)
	}
	if err != nil {
		return fmt.Errorf("copy %s into bundle: %w", from, err)
	}
	return nil
}

// writeTar packs the files of dir below prefix, in order and with one time and owner.
func writeTar(to, dir, prefix string, when time.Time) error {
	files, err := regularFiles(dir)
	if err != nil {
		return err
	}
	out, err := os.Create(to)
	if err != nil {
		return fmt.Errorf("write %s: %w", to, err)
	}
	defer out.Close()
	w := tar.NewWriter(out)
	for _, name := range files {
		if err := addFile(w, filepath.Join(dir, name), prefix+"/"+filepath.ToSlash(name), when); err != nil {
			return fmt.Errorf("write %s to %s: %w", name, to, err)
		}
	}
	if err := w.Close(); err != nil {
		return fmt.Errorf("write %s: %w", to, err)
	}
	return out.Close()
}

func addFile(w *tar.Writer, path, name string, when time.Time) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	mode := fs.FileMode(0o644)
	if name[strings.LastIndexByte(name, '/')+1:] == loadName {
		mode = 0o755
	}
	if err := w.WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: name, Mode: int64(mode), Size: info.Size(), ModTime: when, Format: tar.FormatPAX,
	}); err != nil {
		return err
	}
	_, err = io.Copy(w, f)
	return err
}

// writeSums writes the SHA-256 of every file below dir, as sha256sum --check reads it.
func (b build) writeSums(dir, name string) error {
	files, err := regularFiles(dir)
	if err != nil {
		return err
	}
	var text bytes.Buffer
	for _, file := range files {
		sum, err := sumOf(filepath.Join(dir, file))
		if err != nil {
			return fmt.Errorf("sum %s: %w", file, err)
		}
		fmt.Fprintf(&text, "%s  %s\n", sum, filepath.ToSlash(file))
	}
	if err := os.WriteFile(filepath.Join(dir, name), text.Bytes(), 0o644); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

func sumOf(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

func sha256Of(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}
