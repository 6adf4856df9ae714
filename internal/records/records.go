// SPDX-License-Identifier: Apache-2.0

// Package records keeps small facts through a crash of the process, but not of the machine: one file for each key, in a directory
// on a tmpfs. The file's name is the key, so a file that is empty or cannot be read still counts as a record of its key.
package records

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// Options of a store of values V under keys K.
type Options[K comparable, V any] struct {
	// What one record is about, for messages: "partition".
	What string
	// Dir is made when it is missing.
	Dir string
	// BootID of the kernel. Load removes records of another boot.
	BootID string
	// Exclusive makes Load lock the directory, so that one process at a time has it open.
	Exclusive bool
	// Name returns the file name of a key. Parse is its inverse and accepts no other names.
	Name  func(K) string
	Parse func(name string) (K, error)
	// Check, where set, returns what is wrong with a value that was read.
	Check func(K, V) error
	// Unreadable returns what counts in place of a record that cannot be read.
	Unreadable func(K) V
	// Step, where set, is called before each change of the disk: tests end the process there (ledger.TestDeathAtEveryStep).
	Step func(string)
}

// Store is the records of one kind. All methods are safe for concurrent use.
type Store[K comparable, V any] struct {
	options Options[K, V]

	mu sync.Mutex
	// dir is the open directory. Files are opened relative to it, so that nothing is written to a directory that another process
	// removed.
	dir     *os.File
	entries map[K]entry[V]
}

type entry[V any] struct {
	value V
	// unreadable is a record whose contents on disk this process cannot read. They stay until they are replaced.
	unreadable bool
	// nameOnly is a record without contents on disk. Flush and Repair write them.
	nameOnly bool
}

// ErrLocked means that another process has the directory open.
var ErrLocked = errors.New("another process has the records open")

// ErrClosed means that the store was closed.
var ErrClosed = errors.New("the records are closed")

// New has no visible effect. Load comes first.
func New[K comparable, V any](o Options[K, V]) *Store[K, V] {
	if o.Step == nil {
		o.Step = func(string) {}
	}
	return &Store[K, V]{options: o, entries: map[K]entry[V]{}}
}

// Load opens the directory and reads the records of an earlier process. Call it once, before any other method. It removes records of
// an earlier boot. It returns files that it cannot read as problems and keeps them; the keys in their names count as recorded. Errors:
// ErrLocked, if the store is Exclusive.
func (s *Store[K, V]) Load() (problems []error, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.open(); err != nil {
		return nil, fmt.Errorf("load records of %ss: %w", s.options.What, err)
	}
	files, err := os.ReadDir(s.options.Dir)
	if err != nil {
		return nil, fmt.Errorf("load records of %ss: %w", s.options.What, err)
	}
	for _, file := range files {
		key, err := s.options.Parse(file.Name())
		if err == nil && s.options.Name(key) != file.Name() {
			err = errors.New("this version writes another name")
		}
		if err != nil {
			problems = append(problems, fmt.Errorf("parse name of %s record %q: %w", s.options.What, file.Name(), err))
			continue
		}
		value, err := s.read(key, file.Name())
		switch {
		case errors.Is(err, errEarlierBoot):
			if err := s.remove(file.Name()); err != nil {
				return nil, fmt.Errorf("remove record of %s %s of an earlier boot: %w", s.options.What, file.Name(), err)
			}
		case err != nil:
			problems = append(problems, fmt.Errorf("read record of %s %s: %w", s.options.What, file.Name(), err))
			s.entries[key] = entry[V]{value: s.options.Unreadable(key), unreadable: true}
		default:
			s.entries[key] = entry[V]{value: value}
		}
	}
	return problems, nil
}

// Close writes what Flush does, if it can, and unlocks the directory. Every later change fails, because another process may have it open.
func (s *Store[K, V]) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dir == nil {
		return nil
	}
	// Without room on the disk the names suffice.
	_ = s.repair(nil)
	err := s.dir.Close()
	s.dir = nil
	return err
}

// Get returns a record.
func (s *Store[K, V]) Get(key K) (V, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ok := s.entries[key]
	return e.value, ok
}

// Keys returns the recorded keys, in no order.
func (s *Store[K, V]) Keys() []K {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.entries))
}

// Put writes a record and replaces the one before. It is on disk when Put returns nil. After an error the record before counts, on disk
// as well.
func (s *Store[K, V]) Put(key K, value V) error {
	return s.wrap("write", key, s.locked(func() error { return s.put(key, value) }))
}

// locked calls change once the directory exists.
func (s *Store[K, V]) locked(change func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.alive(); err != nil {
		return err
	}
	return change()
}

func (s *Store[K, V]) put(key K, value V) error {
	err := s.write(key, value)
	if err == nil {
		s.entries[key] = entry[V]{value: value}
	} else if _, known := s.entries[key]; !known {
		err = errors.Join(err, s.remove(s.options.Name(key)))
	}
	return err
}

// PutName is Put in one system call for a new record, whose contents Flush writes: until then only its key survives the process. It needs
// no room on the disk (ledger.TestFullDisk), and is what Allocate waits for (figure allocate_p50 of make bench).
func (s *Store[K, V]) PutName(key K, value V) error {
	return s.wrap("write", key, s.locked(func() error {
		before, known := s.entries[key]
		if known && !before.nameOnly && !before.unreadable {
			return s.put(key, value)
		}
		if !known {
			if err := s.create(s.options.Name(key)); err != nil {
				return err
			}
		}
		s.entries[key] = entry[V]{value: value, nameOnly: true}
		return nil
	}))
}

// Flush writes the contents that PutName left out.
func (s *Store[K, V]) Flush() error {
	return s.locked(func() error { return s.repair(nil) })
}

// Probe returns why a new record cannot be written: the directory is read-only, or its disk has no inode left. It leaves nothing behind. It
// takes some microseconds. A disk that cannot tell counts as writable.
func (s *Store[K, V]) Probe() error {
	return s.locked(func() error {
		// A file without a name, so that none is left if the process ends.
		fd, err := unix.Openat(int(s.dir.Fd()), ".", unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
		switch {
		case errors.Is(err, unix.EOPNOTSUPP):
			return nil
		case err != nil:
			return fmt.Errorf("create a file in %s: %w", s.options.Dir, err)
		}
		return unix.Close(fd)
	})
}

func (s *Store[K, V]) wrap(verb string, key K, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s record of %s %s: %w", verb, s.options.What, s.options.Name(key), err)
}

// Drop removes a record. It is idempotent.
func (s *Store[K, V]) Drop(key K) error {
	return s.wrap("remove", key, s.locked(func() error {
		err := s.remove(s.options.Name(key))
		if err == nil {
			delete(s.entries, key)
		}
		return err
	}))
}

// Repair writes records that another process removed, and what Flush could not write. It costs one stat for each record.
func (s *Store[K, V]) Repair() error {
	return s.locked(func() error {
		return s.repair(func(key K) bool { return !s.exists(key) })
	})
}

// Removed returns the keys whose records another process has removed, in no order. They stay recorded until Drop. It returns none if the
// whole directory is gone: the next change writes it again. It costs one stat for each record.
func (s *Store[K, V]) Removed() (keys []K) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var stat unix.Stat_t
	if s.dir == nil || unix.Fstat(int(s.dir.Fd()), &stat) != nil || stat.Nlink == 0 {
		return nil
	}
	for key := range s.entries {
		if !s.exists(key) {
			keys = append(keys, key)
		}
	}
	return keys
}

// Path returns the path of a record.
func (s *Store[K, V]) Path(key K) string { return filepath.Join(s.options.Dir, s.options.Name(key)) }

// repair writes the records without contents, and those for which lost is true (nil: none). Of an unreadable record it writes the name.
func (s *Store[K, V]) repair(lost func(K) bool) error {
	var errs []error
	for key, e := range s.entries {
		switch {
		case !e.nameOnly && (lost == nil || !lost(key)):
		case e.unreadable:
			errs = append(errs, s.wrap("write", key, s.create(s.options.Name(key))))
		default:
			err := s.write(key, e.value)
			if err == nil {
				s.entries[key] = entry[V]{value: e.value}
			}
			errs = append(errs, s.wrap("write", key, err))
		}
	}
	return errors.Join(errs...)
}

func (s *Store[K, V]) open() error {
	if err := os.MkdirAll(s.options.Dir, 0o700); err != nil {
		return err
	}
	dir, err := os.Open(s.options.Dir)
	if err != nil {
		return err
	}
	if s.options.Exclusive {
		if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			if errors.Is(err, unix.EWOULDBLOCK) {
				err = ErrLocked
			}
			return errors.Join(fmt.Errorf("lock %s: %w", s.options.Dir, err), dir.Close())
		}
	}
	s.dir = dir
	return nil
}

// alive makes the directory and its records again after another process removed it (TestWipedDirectory). Errors: ErrLocked, if another
// process was faster.
func (s *Store[K, V]) alive() error {
	if s.dir == nil {
		return ErrClosed
	}
	var stat unix.Stat_t
	if err := unix.Fstat(int(s.dir.Fd()), &stat); err != nil || stat.Nlink > 0 {
		return err
	}
	old := s.dir
	if err := s.open(); err != nil {
		return fmt.Errorf("make removed directory again: %w", err)
	}
	return errors.Join(s.repair(func(K) bool { return true }), old.Close())
}

func (s *Store[K, V]) exists(key K) bool {
	var stat unix.Stat_t
	return !errors.Is(unix.Fstatat(int(s.dir.Fd()), s.options.Name(key), &stat, unix.AT_SYMLINK_NOFOLLOW), unix.ENOENT)
}

// page is the unit in which a tmpfs allocates. One write within a page is done or not done when the process ends.
const page = 4096

// write puts the contents into the file of the key. It overwrites an existing file in place, which needs no room on the disk. There is
// no fsync: the directory ends with the boot.
func (s *Store[K, V]) write(key K, value V) error {
	name := s.options.Name(key)
	data, err := s.encode(name, value)
	if err != nil {
		return err
	}
	fd, err := s.openFile(name)
	if err != nil {
		return err
	}
	if len(data) > page {
		// Without it, a full disk could leave a part of the new contents in place of the old ones.
		if err := unix.Fallocate(fd, 0, 0, int64(len(data))); err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
			return errors.Join(err, unix.Close(fd))
		}
	}
	s.options.Step("write")
	n, err := unix.Pwrite(fd, data, 0)
	if err == nil && n < len(data) {
		err = unix.ENOSPC
	}
	return errors.Join(err, unix.Close(fd))
}

// openFile opens the file of a key, and creates it if it is missing. Anything but a file in its place is removed. After another error, such as
// EMFILE, the file may be there.
func (s *Store[K, V]) openFile(name string) (int, error) {
	fd, err := s.openat(name, 0)
	if err == nil {
		return fd, nil
	}
	switch {
	case errors.Is(err, unix.ENOENT):
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENXIO): // a link, a directory, a pipe
		if err := s.remove(name); err != nil {
			return -1, err
		}
	default:
		return -1, err
	}
	s.options.Step("create")
	return s.openat(name, unix.O_CREAT)
}

func (s *Store[K, V]) openat(name string, flags int) (int, error) {
	return unix.Openat(int(s.dir.Fd()), name, unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC|flags, 0o600)
}

// create creates an empty file, unless there is one.
func (s *Store[K, V]) create(name string) error {
	s.options.Step("create")
	if err := unix.Mknodat(int(s.dir.Fd()), name, unix.S_IFREG|0o600, 0); !errors.Is(err, unix.EEXIST) {
		return err
	}
	return nil
}

// remove removes a file. It is no error if there is none.
func (s *Store[K, V]) remove(name string) error {
	s.options.Step("remove")
	err := unix.Unlinkat(int(s.dir.Fd()), name, 0)
	switch {
	case err == nil || errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.EISDIR):
		return os.RemoveAll(filepath.Join(s.options.Dir, name))
	}
	return err
}

// contents of a file. What follows them in the file is left from longer contents.
type contents struct {
	BootID string `json:"bootID"`
	// Checksum of the boot ID, the file's name and the record.
	Checksum uint32          `json:"checksum"`
	Record   json.RawMessage `json:"record"`
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (c contents) sum(name string) uint32 {
	sum := crc32.Checksum([]byte(c.BootID+"\n"+name+"\n"), castagnoli)
	return crc32.Update(sum, castagnoli, c.Record)
}

var errEarlierBoot = errors.New("the record is of an earlier boot")

func (s *Store[K, V]) encode(name string, value V) ([]byte, error) {
	record, err := json.Marshal(value)
	if err != nil {
		return nil, err
	}
	c := contents{BootID: s.options.BootID, Record: record}
	// Not json.Marshal of c, which would format the record a second time: each Allocate waits for this.
	return fmt.Appendf(nil, `{"bootID":%q,"checksum":%d,"record":%s}`+"\n", c.BootID, c.sum(name), record), nil
}

func (s *Store[K, V]) read(key K, name string) (V, error) {
	var value V
	path := filepath.Join(s.options.Dir, name)
	if info, err := os.Lstat(path); err != nil {
		return value, err
	} else if !info.Mode().IsRegular() {
		return value, fmt.Errorf("it is no regular file: %s", info.Mode())
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return value, err
	}
	if len(data) == 0 {
		return value, errors.New("it is empty: the disk was full, or the process ended while it wrote the record")
	}
	var c contents
	if err := json.NewDecoder(bytes.NewReader(data)).Decode(&c); err != nil {
		return value, err
	}
	if sum := c.sum(name); c.Checksum != sum {
		return value, fmt.Errorf("its checksum is %d, its contents have %d", c.Checksum, sum)
	}
	if c.BootID != s.options.BootID {
		return value, errEarlierBoot
	}
	if err := json.Unmarshal(c.Record, &value); err != nil {
		return value, err
	}
	if s.options.Check != nil {
		return value, s.options.Check(key, value)
	}
	return value, nil
}
