// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/klog/v2"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// addition is the file of one partition that was made on demand. It has what all containers need in it, too: a container that has
// nothing else must find the driver.
type addition struct {
	file  ownedFile
	entry specs.Device
	want  []byte
}

// Add makes an entry for a partition that has just been made, in a file of its own, which is removed when the Source knows the
// partition no more. It is on disk when Add returns. Idempotent.
func (s *Specs) Add(ctx context.Context, p device.Partition) error {
	if err := s.Ensure(ctx); err != nil {
		return err
	}
	s.mu.Lock()
	there := s.known[p.UUID] || s.added[p.UUID] != nil
	s.mu.Unlock()
	if there {
		return nil
	}
	entry, err := s.options.Source.PartitionEdits(ctx, p)
	if err != nil {
		return fmt.Errorf("make container edits of partition %s: %w", p.UUID, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known[p.UUID] {
		return nil // the driver was asked about all devices meanwhile
	}
	if err := s.unvoid(entry.Name); err != nil {
		return err
	}
	a := &addition{entry: entry}
	a.file.path = s.additionPath(entry.Name)
	if err := a.describe(s.kind, s.common); err != nil {
		return err
	}
	s.added[entry.Name] = a
	return nil
}

// describe writes the file if it does not say what it should.
func (a *addition) describe(kind string, common specs.ContainerEdits) error {
	want, err := encode(kind, common, []specs.Device{a.entry})
	if err != nil || bytes.Equal(want, a.want) {
		return err
	}
	if err := a.file.replace(want, 0o644, validate); err != nil {
		return err
	}
	a.want = want
	return nil
}

// describeAdded brings the files of partitions to what containers need in common by now: another driver, another hook. Under
// s.mu.
func (s *Specs) describeAdded() error {
	var errs []error
	for _, a := range s.added {
		errs = append(errs, a.describe(s.kind, s.common))
	}
	return errors.Join(errs...)
}

const additionSuffix = ".json"

func (s *Specs) additionPath(uuid string) string {
	return strings.TrimSuffix(s.file.path, additionSuffix) + "-" + uuid + additionSuffix
}

// loadAdded takes over what an earlier process has written. Under s.mu.
func (s *Specs) loadAdded() error {
	all := ownedFile{path: s.additionPath("*")}
	if err := all.removeTemporaries(); err != nil {
		return err
	}
	paths, err := filepath.Glob(all.path)
	if err != nil {
		return fmt.Errorf("look for the specs of partitions: %w", err)
	}
	for _, path := range paths {
		a := &addition{}
		a.file.path = path
		devices := readDevices(path, s.kind)
		if len(devices) != 1 || s.additionPath(devices[0].Name) != path {
			// Whoever needs it has it written anew. One that cannot be removed must not keep all others waiting.
			if err := os.Remove(path); err != nil {
				klog.Background().Error(err, "The spec of a partition can neither be read nor removed", "path", path)
			}
			continue
		}
		a.entry = devices[0]
		if a.want, err = os.ReadFile(path); err == nil {
			err = a.file.accept()
		}
		if err != nil {
			return fmt.Errorf("read the spec of a partition: %w", err)
		}
		s.added[a.entry.Name] = a
	}
	return nil
}

func (s *Specs) repairAdded() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, a := range s.added {
		errs = append(errs, a.repair())
	}
	return errors.Join(errs...)
}

// repair puts the file back if somebody has removed or changed it.
func (a *addition) repair() error {
	if a.file.intact() {
		return nil
	}
	return a.file.replace(a.want, 0o644, validate)
}

// removeGone removes the files of partitions that are no more. Under s.mu.
func (s *Specs) removeGone(uuids []string, edits Edits) error {
	var errs []error
	for _, uuid := range uuids {
		exists := slices.ContainsFunc(edits.Devices, func(d specs.Device) bool { return d.Name == uuid })
		if exists || edits.Failed[uuid] != nil {
			continue
		}
		if err := os.Remove(s.added[uuid].file.path); err != nil && !os.IsNotExist(err) {
			errs = append(errs, fmt.Errorf("remove the spec of a partition that is gone: %w", err))
			continue
		}
		delete(s.added, uuid)
	}
	return errors.Join(errs...)
}

// notAdded leaves out what has a file of its own: a name that two files define is nobody's. Under s.mu.
func (s *Specs) notAdded(devices []specs.Device) []specs.Device {
	return slices.DeleteFunc(slices.Clone(devices), func(d specs.Device) bool { return s.added[d.Name] != nil })
}
