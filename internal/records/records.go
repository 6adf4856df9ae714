// SPDX-License-Identifier: Apache-2.0

// Package records keeps small facts through crashes of the process, and not of the machine: one file each, in a directory on a
// tmpfs, written whole or not at all before what it tells of is begun. The names carry what matters most, so that one that cannot
// be read still says what is ours.
package records

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
)

// Format says how one kind of records is written.
type Format[K comparable, V any] struct {
	// What is recorded, for messages: "partition".
	What string
	// Name returns the file name of a key. Parse is its inverse and accepts no other names.
	Name  func(K) string
	Parse func(name string) (K, error)
	// Boot of a record that was read. Those of an earlier one are void.
	Boot func(V) string
	// Unreadable is what counts in place of a record that cannot be read.
	Unreadable func(K) V
}

// Store is the records of one kind. All methods are safe for concurrent use.
type Store[K comparable, V any] struct {
	dir, bootID string
	format      Format[K, V]

	mu    sync.Mutex
	known map[K]V
}

// Temporary begins the names of files that are not complete.
const Temporary = ".tmp-"

// New does nothing visible: there are no records before Load.
func New[K comparable, V any](dir, bootID string, format Format[K, V]) *Store[K, V] {
	return &Store[K, V]{dir: dir, bootID: bootID, format: format, known: map[K]V{}}
}

// Load reads the records of an earlier process. Call it once, before any other method, while no other process uses the directory.
// It removes records of an earlier boot. It returns files that it cannot read as problems and keeps them; the keys in their names
// count as recorded.
func (s *Store[K, V]) Load() (problems []error, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return nil, fmt.Errorf("load records of %ss: %w", s.format.What, err)
	}
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, fmt.Errorf("load records of %ss: %w", s.format.What, err)
	}
	for _, entry := range entries {
		path := filepath.Join(s.dir, entry.Name())
		if strings.HasPrefix(entry.Name(), Temporary) {
			if err := os.Remove(path); err != nil {
				return nil, fmt.Errorf("remove unfinished record of a %s: %w", s.format.What, err)
			}
			continue
		}
		key, err := s.parse(entry.Name())
		if err != nil {
			problems = append(problems, err)
			continue
		}
		value, err := read[V](path)
		switch {
		case err != nil:
			problems = append(problems, fmt.Errorf("read record of %s %s: %w", s.format.What, entry.Name(), err))
			value = s.format.Unreadable(key)
		case s.format.Boot(value) != s.bootID:
			if err := os.Remove(path); err != nil {
				return nil, fmt.Errorf("remove record of %s %s of an earlier boot: %w", s.format.What, entry.Name(), err)
			}
			continue
		}
		s.known[key] = value
	}
	return problems, nil
}

func (s *Store[K, V]) parse(name string) (K, error) {
	key, err := s.format.Parse(name)
	if err == nil && s.format.Name(key) != name {
		err = errors.New("its name is not as this version writes it")
	}
	if err != nil {
		return key, fmt.Errorf("record of a %s %q: %w", s.format.What, name, err)
	}
	return key, nil
}

func read[V any](path string) (V, error) {
	var value V
	data, err := os.ReadFile(path)
	if err != nil {
		return value, err
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	err = decoder.Decode(&value)
	return value, err
}

// Get returns a record.
func (s *Store[K, V]) Get(key K) (V, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	value, ok := s.known[key]
	return value, ok
}

// Keys are what there are records of, in no order.
func (s *Store[K, V]) Keys() []K {
	s.mu.Lock()
	defer s.mu.Unlock()
	keys := make([]K, 0, len(s.known))
	for key := range s.known {
		keys = append(keys, key)
	}
	return keys
}

// Put writes a record, in place of the one before. It is on disk when Put returns nil; after an error what was is still known.
func (s *Store[K, V]) Put(key K, value V) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.write(key, value); err != nil {
		return fmt.Errorf("record %s %s: %w", s.format.What, s.format.Name(key), err)
	}
	s.known[key] = value
	return nil
}

// Drop forgets a record. Idempotent.
func (s *Store[K, V]) Drop(key K) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := os.Remove(s.path(key)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove record of %s %s: %w", s.format.What, s.format.Name(key), err)
	}
	delete(s.known, key)
	return nil
}

// Repair restores records that another process removed from the directory. It checks each file.
func (s *Store[K, V]) Repair() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for key, value := range s.known {
		if _, err := os.Lstat(s.path(key)); err == nil {
			continue
		}
		if err := s.write(key, value); err != nil {
			errs = append(errs, fmt.Errorf("record %s %s again: %w", s.format.What, s.format.Name(key), err))
		}
	}
	return errors.Join(errs...)
}

func (s *Store[K, V]) path(key K) string { return filepath.Join(s.dir, s.format.Name(key)) }

func (s *Store[K, V]) write(key K, value V) error {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	data, err := json.Marshal(value)
	if err != nil {
		return err
	}
	// No fsync: neither the directory nor what is recorded survives the boot.
	path := filepath.Join(s.dir, Temporary+s.format.Name(key))
	if err := os.WriteFile(path, data, 0o600); err != nil {
		return errors.Join(err, os.Remove(path))
	}
	return os.Rename(path, s.path(key))
}
