// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"

	"k8s.io/klog/v2"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// deviceFile is the spec file of one partition or client device.
type deviceFile struct {
	specFile
	class string
	entry specs.Device
	// common are those of a partition, which its file repeats: a container with no other device needs the driver. Until the Source has
	// answered they are those of the file.
	common specs.ContainerEdits
	// of is the partition that the entry was made for; nil in a file of an earlier process.
	of *device.Partition
}

func newDeviceFile(class, path string) *deviceFile {
	return &deviceFile{specFile: specFile{ownedFile: ownedFile{path: path}}, class: class}
}

// Add writes an entry for a partition that Prepare has just made to a file of its own. The file exists when Add returns, and is
// removed once the Source, asked after Add, no longer reports the partition. Idempotent, and cheap if the partition is the same.
func (s *Specs) Add(ctx context.Context, p device.Partition) error {
	if err := s.Ensure(ctx); err != nil {
		return err
	}
	if s.keep(p) {
		return nil
	}
	entry, err := s.options.Source.PartitionEdits(ctx, p)
	if err != nil {
		return fmt.Errorf("make container edits of partition %s: %w", p.UUID, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.announce()
	if at := slices.IndexFunc(s.devices, func(d specs.Device) bool { return d.Name == p.UUID }); at >= 0 {
		return s.replaceEntry(at, entry) // a refresh found it, now or before it was made again
	}
	if err := s.removePlaceholder(entry); err != nil {
		return err
	}
	f := s.partitions[entry.Name]
	if f == nil {
		f = newDeviceFile(class, s.partitionPath(entry.Name))
	}
	f.entry, f.common, f.of = entry, s.common, &p
	if s.unwritable = s.update(f); s.unwritable != nil {
		f.of = nil
		return s.unwritable
	}
	s.partitions[entry.Name] = f
	s.count(entry.Name)
	return nil
}

// keep reports whether the partition has a file, made for the same device nodes. From then on no earlier answer of the Source removes it.
func (s *Specs) keep(p device.Partition) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.partitions[p.UUID]
	if f == nil || f.of == nil || f.of.Parent != p.Parent || f.of.Caps != p.Caps || f.of.Profile != p.Profile {
		return false
	}
	s.count(p.UUID)
	return f.repair() == nil
}

// count counts a call of Add. Under s.mu.
func (s *Specs) count(uuid string) {
	s.adds++
	s.added[uuid] = s.adds
}

// replaceEntry changes an entry of the main file. Under s.mu.
func (s *Specs) replaceEntry(at int, entry specs.Device) error {
	s.count(entry.Name)
	if reflect.DeepEqual(s.devices[at], entry) {
		return nil
	}
	devices := slices.Clone(s.devices)
	devices[at] = entry
	if s.unwritable = s.write(s.common, devices); s.unwritable != nil {
		return s.unwritable
	}
	s.devices = devices
	return nil
}

// hasEntry reports whether a file has an entry of the device. Under s.mu.
func (s *Specs) hasEntry(uuid string) bool {
	return s.partitions[uuid] != nil || hasName(s.devices, uuid)
}

// update writes the file of a device. Under s.mu.
func (s *Specs) update(f *deviceFile) error {
	data, err := encode(f.class, f.common, s.written.entries(f.class, []specs.Device{f.entry}))
	if err != nil {
		return err
	}
	return f.write(data, s.written.mode())
}

func (s *Specs) partitionPath(uuid string) string { return s.path(class + "-" + uuid) }

// loadPartitions adopts the files that an earlier process wrote, and returns their entries. Under s.mu.
func (s *Specs) loadPartitions() (entries []specs.Device, err error) {
	all := ownedFile{path: s.partitionPath("*")}
	if err := all.removeTemporaries(); err != nil {
		return nil, err
	}
	paths, err := filepath.Glob(all.path)
	if err != nil {
		return nil, fmt.Errorf("list the specs of partitions: %w", err)
	}
	for _, path := range paths {
		found := readSpec(path)
		devices := devicesOf(found.Devices)
		if len(devices) != 1 || s.partitionPath(devices[0].Name) != path {
			// Prepare writes it again if a claim needs it. A file that cannot be removed must not block the other partitions.
			if err := os.Remove(path); err != nil {
				klog.Background().Error(err, "Cannot remove the unreadable spec of a partition", "path", path)
			}
			continue
		}
		f := newDeviceFile(class, path)
		f.entry, f.common = devices[0], found.ContainerEdits
		if err := f.adopt(); err != nil {
			return nil, err
		}
		s.partitions[f.entry.Name] = f
		entries = append(entries, found.Devices...)
	}
	return entries, nil
}

// removeGone removes the files of those partitions that the Source no longer reports, and takes over the entries of the others: the GPU
// may have another number since. Under s.mu.
func (s *Specs) removeGone(edits answer) error {
	var errs []error
	for _, uuid := range slices.Sorted(maps.Keys(s.partitions)) {
		if s.added[uuid] > edits.adds {
			continue // the answer is older
		}
		f := s.partitions[uuid]
		if i := slices.IndexFunc(edits.Devices, func(d specs.Device) bool { return d.Name == uuid }); i >= 0 {
			if !reflect.DeepEqual(f.entry, edits.Devices[i]) {
				f.entry, f.of = edits.Devices[i], nil
			}
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

// withRemade returns what the Source answered, with the entries of the main file that were added since it was asked. Under s.mu.
func (s *Specs) withRemade(edits answer) []specs.Device {
	all := slices.Clone(edits.Devices)
	for _, d := range s.devices {
		if s.added[d.Name] > edits.adds && !hasName(all, d.Name) {
			all = append(all, d)
		}
	}
	return all
}

// withoutPartitionFiles drops the devices that have a file of their own: a runtime rejects a name that two files define. Under s.mu.
func (s *Specs) withoutPartitionFiles(devices []specs.Device) []specs.Device {
	return slices.DeleteFunc(slices.Clone(devices), func(d specs.Device) bool { return s.partitions[d.Name] != nil })
}
