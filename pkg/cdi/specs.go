// SPDX-License-Identifier: Apache-2.0

// Package cdi writes the CDI spec files that describe the node's devices to the container runtime, and installs the hook binary
// that they name. It restores files that another process removes or changes, and touches no file of others. What the files
// contain comes from a Source.
package cdi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Source provides the content of the spec files.
type Source interface {
	// ContainerEdits is called when the inventory changed, never while a pod waits. After an error the spec stays unchanged.
	ContainerEdits(ctx context.Context) (Edits, error)
	// PartitionEdits returns the entry of a new partition, named by its UUID. It is called while a pod waits.
	PartitionEdits(ctx context.Context, p device.Partition) (specs.Device, error)
	// Changed returns a channel that is closed when ContainerEdits may answer differently. It is taken before the call.
	Changed() <-chan struct{}
}

// Options of a Specs.
type Options struct {
	// Dir is the absolute path of the CDI directory in this process. It is created when missing. Dir and Source are required.
	Dir    string
	Source Source
	// Hook is installed before the spec that names it. Optional.
	Hook *Hook
	// Interval is how often Run checks the files. Default: 2 s.
	Interval time.Duration
}

// Specs maintains one spec file for the devices of the Source, one file for each partition that Prepare made (Add), and one for each
// client device (WriteClientDevice). Partitions have their own files because a pod waits while they are written. All methods are
// safe for concurrent use.
type Specs struct {
	options Options

	// refreshing admits one caller of the Source at a time. It is a channel so that a waiting Prepare can give up.
	refreshing chan struct{}

	mu sync.Mutex
	// main is the file of the devices that the Source reports. Its intact method needs no lock.
	main    specFile
	common  specs.ContainerEdits
	devices []specs.Device
	failed  map[string]error // by UUID
	loaded  bool
	// placeholders are names that get a placeholder device while no device has them.
	placeholders map[string]bool
	partitions   map[string]*partitionFile // by UUID
	clients      map[string]*specFile      // by name

	// names are the entries of the files, for Has.
	names   atomic.Pointer[map[string]bool]
	changed broadcast.Signal
}

// A CDI device has the name "<vendor>/<class>=<name>". In class the names are UUIDs; clientClass is for client devices. Neither may be
// "claim", the class of NVIDIA's DRA driver: its files may still be in the directory.
const (
	vendor      = "k8s.gpu.nvidia.com"
	class       = "gpu"
	clientClass = "sharing"
)

// New touches no file.
func New(options Options) *Specs {
	options.Interval = cmp.Or(options.Interval, 2*time.Second)
	s := &Specs{
		options:      options,
		refreshing:   make(chan struct{}, 1),
		placeholders: map[string]bool{},
		partitions:   map[string]*partitionFile{},
		clients:      map[string]*specFile{},
	}
	s.main.path = s.path(class)
	s.names.Store(&map[string]bool{})
	return s
}

const jsonSuffix = ".json"

func (s *Specs) path(name string) string {
	return filepath.Join(s.options.Dir, "tandem-"+vendor+"-"+name+jsonSuffix)
}

// QualifiedName is the name of a GPU or partition that a container runtime gets.
func (s *Specs) QualifiedName(uuid string) string { return parser.QualifiedName(vendor, class, uuid) }

// Has reports whether the files have an entry for a device. It does not wait, also while a file is written to a slow disk. Ensure finds
// the entry unless the device has gone since. The device plugin calls Has before it offers a new partition.
func (s *Specs) Has(uuid string) bool { return (*s.names.Load())[uuid] }

// announce updates what Has answers. Under s.mu.
func (s *Specs) announce() {
	names := map[string]bool{}
	for _, d := range s.devices {
		names[d.Name] = true
	}
	for uuid := range s.partitions {
		names[uuid] = true
	}
	if !maps.Equal(names, *s.names.Load()) {
		s.names.Store(&names)
		s.changed.Notify()
	}
}

// Changed returns a channel that is closed when Has may answer differently. Take it before you call Has.
func (s *Specs) Changed() <-chan struct{} { return s.changed.Changed() }

// Ensure returns once the spec and the hook are on disk. It fails if one of the devices has no entry. It costs two stats if nothing
// changed, a write if another process removed or changed the files, and a call of the Source only until the first spec is written.
// Idempotent. Both front-ends call it before they answer with a qualified name.
func (s *Specs) Ensure(ctx context.Context, uuids ...string) error {
	written, err := s.repair()
	if !written && err == nil {
		err = s.refresh(ctx)
	}
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, uuid := range uuids {
		switch {
		case s.partitions[uuid] != nil:
			errs = append(errs, s.partitions[uuid].repair())
		case hasName(s.devices, uuid):
		case s.failed[uuid] != nil:
			errs = append(errs, fmt.Errorf("make container edits of device %s: %w", uuid, s.failed[uuid]))
		default:
			errs = append(errs, fmt.Errorf("device %s has no container edits", uuid))
		}
	}
	return errors.Join(errs...)
}

// repair restores hook and main spec. It returns false while there is no spec to restore.
func (s *Specs) repair() (written bool, err error) {
	if s.main.intact() && s.options.Hook.intact() {
		return true, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.main.want == nil {
		return false, nil
	}
	return true, s.put(s.main.want)
}

func (s *Specs) put(data []byte) error {
	if err := s.options.Hook.Ensure(); err != nil {
		return err
	}
	return s.main.write(data)
}

// repairOthers restores the files of partitions and client devices.
func (s *Specs) repairOthers() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, f := range s.partitions {
		errs = append(errs, f.repair())
	}
	for _, f := range s.clients {
		errs = append(errs, f.repair())
	}
	return errors.Join(errs...)
}

// Run follows the Source and repairs the files until ctx is done. It logs errors and retries at the next interval.
func (s *Specs) Run(ctx context.Context) error {
	ticker := time.NewTicker(s.options.Interval)
	defer ticker.Stop()
	var changed <-chan struct{}
	var err error
	logged := ""
	for refresh := true; ; {
		if refresh {
			changed = s.options.Source.Changed()
			err = s.refresh(ctx)
		}
		_, repairErr := s.repair()
		switch failure := errors.Join(err, repairErr, s.repairOthers()); {
		case failure == nil:
			logged = ""
		case failure.Error() != logged && ctx.Err() == nil:
			logged = failure.Error()
			klog.FromContext(ctx).Error(failure, "Cannot update the CDI specs", "path", s.main.path)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
			refresh = true
		case <-ticker.C:
			refresh = err != nil
		}
	}
}

// refresh asks the Source and writes its answer. A second caller waits for the first.
func (s *Specs) refresh(ctx context.Context) error {
	select {
	case s.refreshing <- struct{}{}:
		defer func() { <-s.refreshing }()
	case <-ctx.Done():
		return ctx.Err()
	}
	s.mu.Lock()
	err := s.load()
	before := slices.Collect(maps.Keys(s.partitions))
	s.mu.Unlock()
	if err != nil {
		return err
	}
	edits, err := s.options.Source.ContainerEdits(ctx)
	if err != nil {
		return fmt.Errorf("make container edits: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.announce()
	// Only partitions from before the call can be gone: the answer may lack those that Add wrote meanwhile.
	if err := s.removeGone(before, edits); err != nil {
		return err
	}
	devices := withLost(s.withoutPartitionFiles(edits.Devices), s.withoutPartitionFiles(s.devices))
	s.failed = maps.Clone(edits.Failed)
	if err := s.write(edits.Common, devices); err != nil {
		return err
	}
	s.common, s.devices = edits.Common, devices
	var errs []error
	for _, f := range s.partitions {
		errs = append(errs, f.update(s.common))
	}
	return errors.Join(errs...)
}

// write writes devices and placeholders to the main spec. Under s.mu.
func (s *Specs) write(common specs.ContainerEdits, devices []specs.Device) error {
	data, err := encode(class, common, s.withPlaceholders(devices))
	if err != nil {
		return err
	}
	return s.put(data)
}

// Load adopts the files of an earlier process, of which Has reports the devices until Run or Ensure has updated them. Idempotent. Call it
// before Has answers for the first time; Ensure does it otherwise.
func (s *Specs) Load() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.load()
}

// load is Load, under s.mu.
func (s *Specs) load() error {
	if s.loaded {
		return nil
	}
	if err := s.main.removeTemporaries(); err != nil {
		return err
	}
	if found := readDevices(s.main.path); len(found) > 0 {
		s.devices, s.placeholders = splitPlaceholders(found)
	}
	if err := s.loadPartitions(); err != nil {
		return err
	}
	s.loaded = true
	s.announce()
	return nil
}
