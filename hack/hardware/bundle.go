// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// MostBytes is the largest bundle: what can be carried to a machine.
const MostBytes = 64 << 20

// Bundle packs the programs into an archive whose top directory is tandem-hardware. It fails if the archive is too large.
func (p Programs) Bundle(path string) (size int64, err error) {
	file, err := os.Create(path)
	if err != nil {
		return 0, err
	}
	zip, err := gzip.NewWriterLevel(file, gzip.BestCompression)
	if err != nil {
		return 0, errors.Join(err, file.Close())
	}
	archive := tar.NewWriter(zip)
	err = errors.Join(p.pack(archive), archive.Close(), zip.Close(), file.Close())
	if err != nil {
		return 0, fmt.Errorf("write %s: %w", path, err)
	}
	info, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	if info.Size() > MostBytes {
		return info.Size(), fmt.Errorf("%s has %d bytes, which is more than %d", path, info.Size(), MostBytes)
	}
	return info.Size(), nil
}

func (p Programs) pack(archive *tar.Writer) error {
	return filepath.WalkDir(p.Dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		below, err := filepath.Rel(p.Dir, path)
		if err != nil {
			return err
		}
		if below == "out" {
			return fs.SkipDir // what an earlier run has recorded
		}
		if below == "kubectl-gpu" {
			return nil // only TestCluster uses it, which needs a checkout
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		header, err := tar.FileInfoHeader(info, "")
		if err != nil {
			return err
		}
		header.Name, header.Uid, header.Gid, header.Uname, header.Gname = filepath.Join("tandem-hardware", below), 0, 0, "", ""
		if err := archive.WriteHeader(header); err != nil || !info.Mode().IsRegular() {
			return err
		}
		file, err := os.Open(path)
		if err != nil {
			return err
		}
		defer file.Close()
		_, err = io.Copy(archive, file)
		return err
	})
}
