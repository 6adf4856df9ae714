// SPDX-License-Identifier: Apache-2.0

package partition

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// Records remember through crashes which partitions were made for claims, or are about to be: one file each, in a directory that
// ends with the boot. What is not recorded is somebody else's. All methods are safe for concurrent use.
type Records struct {
	dir    string
	bootID string

	mu   sync.Mutex
	made map[device.Ref]made
}

// made is what is known of a partition that was made. The name of the file carries its place, so that one that cannot be read
// still says what is ours.
type made struct {
	BootID    string `json:"bootID"`
	ProfileID int    `json:"profileID"`
	// UUID is empty until the partition is complete.
	UUID string `json:"uuid,omitempty"`
	// Unknown is set where nothing but the place is known.
	Unknown bool `json:"unknown,omitempty"`
}

// names reports whether a partition in the recorded place is the recorded one. One whose UUID is not recorded was about to be
// made when the process ended.
func (m made) names(p device.Partition) bool {
	return m.Unknown || m.ProfileID == p.ProfileID && (m.UUID == "" || p.UUID == "" || m.UUID == p.UUID)
}

const temporary = ".tmp-"

// NewRecords does nothing visible: there are none before Load.
func NewRecords(dir, bootID string) *Records {
	return &Records{dir: dir, bootID: bootID, made: map[device.Ref]made{}}
}

// Load reads what an earlier process has left. Called once, before anything is made, by whoever makes sure that no other process
// uses the directory. Records of an earlier boot are removed: the partitions went with it. Problems are files that are not as
// they should be; they are kept, and what they are named after counts as made.
func (r *Records) Load() (problems []error, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := os.MkdirAll(r.dir, 0o700); err != nil {
		return nil, fmt.Errorf("load records of partitions: %w", err)
	}
	entries, err := os.ReadDir(r.dir)
	if err != nil {
		return nil, fmt.Errorf("load records of partitions: %w", err)
	}
	for _, entry := range entries {
		path := filepath.Join(r.dir, entry.Name())
		if strings.HasPrefix(entry.Name(), temporary) {
			if err := os.Remove(path); err != nil {
				return nil, fmt.Errorf("remove unfinished record of a partition: %w", err)
			}
			continue
		}
		ref, err := parseName(entry.Name())
		if err != nil {
			problems = append(problems, err)
			continue
		}
		m, err := read(path)
		switch {
		case err != nil:
			problems = append(problems, fmt.Errorf("read record of partition %s: %w", ref, err))
			m = made{BootID: r.bootID, Unknown: true}
		case m.BootID != r.bootID:
			if err := os.Remove(path); err != nil {
				return nil, fmt.Errorf("remove record of partition %s of an earlier boot: %w", ref, err)
			}
			continue
		}
		r.made[ref] = m
	}
	return problems, nil
}

func read(path string) (made, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return made{}, err
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	var m made
	if err := decoder.Decode(&m); err != nil {
		return made{}, err
	}
	return m, nil
}

func parseName(name string) (device.Ref, error) {
	text, err := url.PathUnescape(name)
	if err != nil {
		return device.Ref{}, fmt.Errorf("record of a partition %q: its name is no place: %w", name, err)
	}
	ref, err := device.ParseRef(text)
	if err != nil {
		return device.Ref{}, fmt.Errorf("record of a partition %q: its name is no place: %w", name, err)
	}
	if ref.Whole() || fileName(ref) != name {
		return device.Ref{}, fmt.Errorf("record of a partition %q: its name is not as this version writes it", name)
	}
	return ref, nil
}

func fileName(ref device.Ref) string { return url.PathEscape(ref.String()) }

// Made reports whether the partition was made for a claim, or is about to be.
func (r *Records) Made(ref device.Ref) bool {
	_, ok := r.get(ref)
	return ok
}

// All returns every recorded place, in no order.
func (r *Records) All() []device.Ref {
	r.mu.Lock()
	defer r.mu.Unlock()
	refs := make([]device.Ref, 0, len(r.made))
	for ref := range r.made {
		refs = append(refs, ref)
	}
	return refs
}

func (r *Records) get(ref device.Ref) (made, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	m, ok := r.made[ref]
	return m, ok
}

// put records that the partition is about to be made, or with a UUID that it is. It is on disk when put returns nil.
func (r *Records) put(p device.Partition) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := made{BootID: r.bootID, ProfileID: p.ProfileID, UUID: p.UUID}
	if r.made[p.Ref] == m {
		return nil
	}
	if err := r.write(p.Ref, m); err != nil {
		return fmt.Errorf("record partition %s: %w", p.Ref, err)
	}
	r.made[p.Ref] = m
	return nil
}

// drop forgets a partition that is gone.
func (r *Records) drop(ref device.Ref) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := os.Remove(filepath.Join(r.dir, fileName(ref))); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove record of partition %s: %w", ref, err)
	}
	delete(r.made, ref)
	return nil
}

// Repair writes anew what was removed from the directory by somebody else. It costs one look at each record.
func (r *Records) Repair() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for ref, m := range r.made {
		if _, err := os.Lstat(filepath.Join(r.dir, fileName(ref))); errors.Is(err, fs.ErrNotExist) {
			if err := r.write(ref, m); err != nil {
				errs = append(errs, fmt.Errorf("record partition %s again: %w", ref, err))
			}
		}
	}
	return errors.Join(errs...)
}

func (r *Records) write(ref device.Ref, m made) error {
	if err := os.MkdirAll(r.dir, 0o700); err != nil {
		return err
	}
	data, err := json.Marshal(m)
	if err != nil {
		return err
	}
	// No fsync: neither the directory nor a partition survives the boot.
	path := filepath.Join(r.dir, temporary+fileName(ref))
	if err := os.WriteFile(path, data, 0o600); err != nil {
		return errors.Join(err, os.Remove(path))
	}
	return os.Rename(path, filepath.Join(r.dir, fileName(ref)))
}
