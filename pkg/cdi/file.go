// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// ownedFile is a file whose content only this process may change. Checking it takes one stat: a file that another process
// replaced, truncated or edited in place has another inode, size, mtime or ctime (ctime cannot be set back).
type ownedFile struct {
	path string
	seen atomic.Pointer[unix.Stat_t]
}

// stampOf returns the stat without access time and blocks, which change by themselves. Not os.Lstat: each Prepare and Allocate waits for
// it.
func stampOf(path string) (s unix.Stat_t, err error) {
	if err := unix.Lstat(path, &s); err != nil {
		return s, &fs.PathError{Op: "lstat", Path: path, Err: err}
	}
	s.Atim, s.Blocks = unix.Timespec{}, 0
	return s, nil
}

// intact reports whether the file on disk is the one that put wrote or found. Safe for concurrent use.
func (f *ownedFile) intact() bool {
	want := f.seen.Load()
	if want == nil {
		return false
	}
	got, err := stampOf(f.path)
	return err == nil && got == *want
}

// put writes data unless the file has exactly that content and mode already. It reads data more than once and does not keep it: to keep
// the 8 MB of the hook binary in memory costs a fifth of the agent's start. check, if not nil, gets the path of the complete new file
// before the rename; its error leaves the old file in place.
func (f *ownedFile) put(data *io.SectionReader, mode fs.FileMode, check func(path string) error) error {
	if f.contains(data, mode) {
		return f.accept()
	}
	return f.replace(data, mode, check)
}

func (f *ownedFile) contains(want *io.SectionReader, mode fs.FileMode) bool {
	info, err := os.Lstat(f.path)
	if err != nil || info.Mode() != mode || info.Size() != want.Size() {
		return false
	}
	file, err := os.Open(f.path)
	if err != nil {
		return false
	}
	defer func() { _ = file.Close() }() // it was only read
	if _, err := want.Seek(0, io.SeekStart); err != nil {
		return false
	}
	const chunk = 64 << 10
	got, expected := make([]byte, chunk), make([]byte, chunk)
	for {
		n, err := io.ReadFull(file, got)
		if n == 0 {
			return errors.Is(err, io.EOF)
		}
		if _, err := io.ReadFull(want, expected[:n]); err != nil || !bytes.Equal(got[:n], expected[:n]) {
			return false
		}
	}
}

func (f *ownedFile) accept() error {
	s, err := stampOf(f.path)
	if err != nil {
		return err
	}
	f.seen.Store(&s)
	return nil
}

func (f *ownedFile) replace(data *io.SectionReader, mode fs.FileMode, check func(path string) error) (err error) {
	if err := os.MkdirAll(filepath.Dir(f.path), 0o755); err != nil {
		return fmt.Errorf("create directory of %s: %w", f.path, err)
	}
	tmp, err := os.OpenFile(f.temporary(), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("create temporary file: %w", err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(tmp.Name())
		}
	}()
	if err := fill(tmp, data, mode); err != nil {
		return fmt.Errorf("fill temporary file: %w", err)
	}
	if check != nil {
		if err := check(tmp.Name()); err != nil {
			return err
		}
	}
	if err := os.Rename(tmp.Name(), f.path); err != nil {
		return fmt.Errorf("replace CDI file: %w", err)
	}
	if f.accept() != nil {
		f.seen.Store(nil) // another process has removed the file already: the next check writes it again
	}
	return nil
}

// fill syncs the file, because a crash right after the rename must not leave an empty file under the final name.
func fill(tmp *os.File, data *io.SectionReader, mode fs.FileMode) error {
	_, err := data.Seek(0, io.SeekStart)
	if err == nil {
		_, err = io.CopyN(tmp, data, data.Size())
	}
	if err == nil {
		err = tmp.Chmod(mode)
	}
	if err == nil {
		err = tmp.Sync()
	}
	return errors.Join(err, tmp.Close())
}

// temporary starts with a dot and does not end in .json or .yaml, so that container runtimes do not read unfinished files. It is always the
// same, so that the error of one cause is, too: only this process writes the file, one call at a time.
func (f *ownedFile) temporary() string {
	return filepath.Join(filepath.Dir(f.path), "."+filepath.Base(f.path)+".tmp")
}

// removeTemporaries deletes what a crash between create and rename left behind.
func (f *ownedFile) removeTemporaries() error {
	// Earlier versions put a number before the suffix.
	leftovers, err := filepath.Glob(strings.TrimSuffix(f.temporary(), "tmp") + "*tmp")
	if err != nil {
		return fmt.Errorf("list temporary files of %s: %w", f.path, err)
	}
	for _, path := range leftovers {
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			return fmt.Errorf("remove temporary file: %w", err)
		}
	}
	return nil
}

// specFile is a CDI spec file with the content that belongs in it.
type specFile struct {
	ownedFile
	want []byte
	mode fs.FileMode
}

// write puts data in the file, and remembers it only if that succeeded: until then repair restores the content before it.
func (f *specFile) write(data []byte, mode fs.FileMode) error {
	if bytes.Equal(f.want, data) && f.mode == mode && f.intact() {
		return nil
	}
	if err := f.put(io.NewSectionReader(bytes.NewReader(data), 0, int64(len(data))), mode, validate); err != nil {
		return err
	}
	f.want, f.mode = data, mode
	return nil
}

// adopt takes over a file that an earlier process wrote.
func (f *specFile) adopt() (err error) {
	if f.want, err = os.ReadFile(f.path); err == nil {
		err = f.accept()
	}
	if err != nil {
		return fmt.Errorf("read the CDI spec of an earlier agent: %w", err)
	}
	f.mode = fs.FileMode(f.seen.Load().Mode).Perm()
	return nil
}

// repair restores a file that another process removed or changed.
func (f *specFile) repair() error {
	if f.intact() {
		return nil
	}
	return f.write(f.want, f.mode)
}

// Hook keeps a copy of the image's hook binary on the host, where the container runtime runs it. A nil Hook does nothing.
type Hook struct {
	source string
	// installing allows one Ensure at a time.
	installing sync.Mutex
	file       ownedFile
}

// NewHook returns a Hook and writes nothing yet. source is the binary in the image. target is where this process sees the
// copy; the spec names the same path on the host.
func NewHook(source, target string) *Hook {
	return &Hook{source: source, file: ownedFile{path: target}}
}

// Ensure installs the binary if it is missing or differs. It renames a complete file into place, so that a container that
// starts at that moment runs the old or the new binary. Idempotent and safe for concurrent use; one stat if nothing changed.
func (h *Hook) Ensure() error {
	if h == nil {
		return nil
	}
	h.installing.Lock()
	defer h.installing.Unlock()
	if h.intact() {
		return nil
	}
	if err := h.file.removeTemporaries(); err != nil {
		return err
	}
	source, err := os.Open(h.source)
	if err != nil {
		return fmt.Errorf("read hook binary: %w", err)
	}
	defer func() { _ = source.Close() }() // it was only read
	info, err := source.Stat()
	if err != nil {
		return fmt.Errorf("read hook binary: %w", err)
	}
	if err := h.file.put(io.NewSectionReader(source, 0, info.Size()), 0o755, nil); err != nil {
		return fmt.Errorf("install hook binary %s: %w", h.file.path, err)
	}
	return nil
}

// intact is safe for concurrent use.
func (h *Hook) intact() bool { return h == nil || h.file.intact() }
