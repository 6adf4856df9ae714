// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"k8s.io/klog/v2"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// partitionFile is the spec file of one partition. It repeats the common edits: a container with no other device needs the driver.
type partitionFile struct {
	specFile
	entry specs.Device
}

// Add writes an entry for a partition that Prepare has just made to a file of its own. The file exists when Add returns, and is
// removed once the Source no longer reports the partition. Idempotent.
func (s *Specs) Add(ctx context.Context, p device.Partition) error {
	if err := s.Ensure(ctx); err != nil {
		return err
	}
	if s.Has(p.UUID) {
		return nil
	}
	entry, err := s.options.Source.PartitionEdits(ctx, p)
	if err != nil {
		return fmt.Errorf("make container edits of partition %s: %w", p.UUID, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.announce()
	if hasName(s.devices, p.UUID) {
		return nil // a refresh found it meanwhile
	}
	if err := s.removePlaceholder(entry.Name); err != nil {
		return err
	}
	f := &partitionFile{specFile: specFile{ownedFile: ownedFile{path: s.partitionPath(entry.Name)}}, entry: entry}
	if s.unwritable = f.update(s.common); s.unwritable != nil {
		return s.unwritable
	}
	s.partitions[entry.Name] = f
	return nil
}

// update writes the file with these common edits, which change with the driver and the hook.
func (f *partitionFile) update(common specs.ContainerEdits) error {
	data, err := encode(class, common, []specs.Device{f.entry})
	if err != nil {
		return err
	}
	return f.write(data)
}

func (s *Specs) partitionPath(uuid string) string { return s.path(class + "-" + uuid) }

// loadPartitions adopts the files that an earlier process wrote. Under s.mu.
func (s *Specs) loadPartitions() error {
	all := ownedFile{path: s.partitionPath("*")}
	if err := all.removeTemporaries(); err != nil {
		return err
	}
	paths, err := filepath.Glob(all.path)
	if err != nil {
		return fmt.Errorf("list the specs of partitions: %w", err)
	}
	for _, path := range paths {
		devices := readDevices(path)
		if len(devices) != 1 || s.partitionPath(devices[0].Name) != path {
			// Prepare writes it again if a claim needs it. A file that cannot be removed must not block the other partitions.
			if err := os.Remove(path); err != nil {
				klog.Background().Error(err, "Cannot remove the unreadable spec of a partition", "path", path)
			}
			continue
		}
		f := &partitionFile{specFile: specFile{ownedFile: ownedFile{path: path}}, entry: devices[0]}
		if err := f.adopt(); err != nil {
			return err
		}
		s.partitions[f.entry.Name] = f
	}
	return nil
}

// removeGone removes the files of those partitions that the Source no longer reports, and takes over the entries of the others: the GPU
// may have another number since. Under s.mu.
func (s *Specs) removeGone(uuids []string, edits Edits) error {
	var errs []error
	for _, uuid := range uuids {
		f := s.partitions[uuid]
		if i := slices.IndexFunc(edits.Devices, func(d specs.Device) bool { return d.Name == uuid }); i >= 0 {
			f.entry = edits.Devices[i]
			continue
		}
		if edits.Failed[uuid] != nil && !edits.outdated(f.entry) {
			continue
		}
		if err := os.Remove(f.path); err != nil && !os.IsNotExist(err) {
			errs = append(errs, fmt.Errorf("remove the spec of partition %s, which is gone: %w", uuid, err))
			continue
		}
		delete(s.partitions, uuid)
	}
	return errors.Join(errs...)
}

// withoutPartitionFiles drops the devices that have a file of their own: a runtime rejects a name that two files define. Under s.mu.
func (s *Specs) withoutPartitionFiles(devices []specs.Device) []specs.Device {
	return slices.DeleteFunc(slices.Clone(devices), func(d specs.Device) bool { return s.partitions[d.Name] != nil })
}
