// SPDX-License-Identifier: Apache-2.0

// Package cdi writes the CDI spec files that describe the node's devices to the container runtime, and installs the hook binary
// that they name. It restores its files if another process removes or changes them, and touches no other files. What the files
// contain comes from a Source.
package cdi

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
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
	// NamesFile keeps secret names over restarts and reboots. InUse returns the UUIDs of all devices that are held, and the qualified names
	// that kubelet keeps; nil while they are not known. Run calls it now and then while some devices have two names. Both are required for
	// UseSecretNames.
	NamesFile string
	InUse     func() map[string]bool
	// Interval is how often Run checks the files. Default: 2 s. After a failure Run tries again after half of it, and then less and less
	// often, up to twice the Interval.
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
	// wanted is what the Source answered last and the files do not contain yet; nil if they do.
	wanted *answer
	// absent is why a device without an entry has none, if failed does not say it.
	absent error
	// broken is why the hook or the main file is damaged and cannot be restored. unwritable is why the last new file, or the attempt at one
	// (tryWriting), could not be written.
	broken, unwritable error
	// placeholders are names that get a placeholder device while no device has them.
	placeholders map[string]bool
	partitions   map[string]*deviceFile // by UUID
	// adds counts the calls of Add that had a partition written or found written; added has the number of the last one, by UUID.
	adds    uint64
	added   map[string]uint64
	clients map[string]*deviceFile // by name
	// written are the names in the files, and names those in answers: the files have them first. unsaved is set until NamesFile has written.
	written *names
	unsaved bool
	names   atomic.Pointer[names]
	// kept are the names of GPUs and partitions in kubelet's claim state at the start (AddPlaceholders).
	kept []string
	// lookedFor and lookedAt are about the last call of InUse. Run has them.
	lookedFor *names
	lookedAt  time.Time
	// wantsSecret is what UseSecretNames was called with last.
	wantsSecret atomic.Pointer[bool]

	// known is what Has, Problem and Unwritable answer from.
	known   atomic.Pointer[knowledge]
	changed broadcast.Signal
	// asked is closed once the Source has answered for the first time, or failed to.
	asked chan struct{}
	// woken wakes Run.
	woken chan struct{}
}

// answer is an answer of the Source.
type answer struct {
	Edits
	// adds is the number of calls of Add when the Source was asked. The answer may lack partitions that were added since. UUIDs recur: a
	// partition whose entry existed before may have been made again.
	adds uint64
}

// A CDI device has the name "<vendor>/<class>=<name>". In class the names are UUIDs, or secret (names); clientClass is for client devices.
// Neither may be "claim", the class of NVIDIA's DRA driver: its files may still be in the directory.
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
		partitions:   map[string]*deviceFile{},
		added:        map[string]uint64{},
		clients:      map[string]*deviceFile{},
		written:      &names{},
		absent:       errors.New("its CDI device is not written yet"),
		asked:        make(chan struct{}),
		woken:        make(chan struct{}, 1),
	}
	s.main.path = s.path(class)
	s.names.Store(s.written)
	s.known.Store(&knowledge{absent: s.absent})
	return s
}

const jsonSuffix = ".json"

func (s *Specs) path(name string) string {
	return filepath.Join(s.options.Dir, "tandem-"+vendor+"-"+name+jsonSuffix)
}

// Ensure returns once the spec and the hook are on disk. It fails if one of the devices has no entry. It costs two stats if nothing
// changed, a write if another process removed or changed the files, and a call of the Source only until the first spec is written.
// Idempotent. Prepare calls it before it answers with a qualified name.
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

// repair restores hook and main spec. It returns false until this process has written a spec.
func (s *Specs) repair() (written bool, err error) {
	if !broadcast.Happened(s.asked) {
		return false, nil
	}
	if s.main.intact() && s.options.Hook.intact() {
		return true, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.main.want == nil {
		return false, nil
	}
	defer s.announce()
	return true, s.restore()
}

// restore restores hook and main spec. Under s.mu.
func (s *Specs) restore() error {
	s.broken = s.put(s.main.want, s.main.mode)
	return s.broken
}

func (s *Specs) put(data []byte, mode fs.FileMode) error {
	if err := s.options.Hook.Ensure(); err != nil {
		return err
	}
	return s.main.write(data, mode)
}

// settle writes what the Source answered, restores and renames all files, and tries whether new files can be written again.
func (s *Specs) settle() error {
	used := s.usedNames()
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.setAsked()
	defer s.announce()
	var errs []error
	if s.wanted != nil {
		errs = append(errs, s.apply())
	}
	if s.main.want != nil {
		errs = append(errs, s.restore())
	}
	errs = append(errs, each(s.partitions, (*deviceFile).repair), each(s.clients, (*deviceFile).repair), s.settleNames(used))
	if s.unwritable != nil || s.wanted != nil {
		s.unwritable = s.tryWriting()
	}
	return errors.Join(append(errs, s.unwritable)...)
}

// specSize is about the size of a spec.
const specSize = 16 << 10

// tryWriting returns why no file of the size of a partition's can be written, or the hook that it names. Under s.mu.
func (s *Specs) tryWriting() error {
	if err := s.options.Hook.Ensure(); err != nil {
		return err
	}
	data := s.main.want
	if data == nil {
		data = make([]byte, specSize)
	}
	f := ownedFile{path: s.main.path + ".attempt"} // no name that container runtimes read
	if err := f.replace(io.NewSectionReader(bytes.NewReader(data), 0, int64(len(data))), 0o600, nil); err != nil {
		return err
	}
	return os.Remove(f.path)
}

// Run follows the Source and repairs the files until ctx is done. It logs errors and retries. It returns an error if the directory itself was
// removed from the host: only a new container gets the new one.
func (s *Specs) Run(ctx context.Context) error {
	// It reads all of the hook while the Source is asked. The first write installs the hook as well, and reports its error.
	var installing sync.WaitGroup
	defer installing.Wait()
	installing.Go(func() { _ = s.options.Hook.Ensure() })
	var changed <-chan struct{}
	var err error
	logged, delays := "", s.delays()
	for refresh := true; ; {
		if refresh {
			changed = s.options.Source.Changed()
			err = s.ask(ctx)
		}
		next := s.options.Interval
		if failure := errors.Join(err, s.settle()); failure == nil {
			logged, delays = "", s.delays()
		} else {
			next = delays.Step()
			if failure.Error() != logged && ctx.Err() == nil {
				logged = failure.Error()
				klog.FromContext(ctx).Error(failure, "Cannot update the CDI specs, trying again", "path", s.main.path)
			}
			// A directory without a name exists only as a mount of this process.
			if dir, err := stampOf(s.options.Dir); err == nil && dir.Nlink == 0 {
				return fmt.Errorf("write the CDI specs: the host's directory %s, which this container has mounted, was removed", s.options.Dir)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
			refresh = true
		case <-s.woken:
			refresh = false
		case <-time.After(next):
			refresh = err != nil
		}
	}
}

// delays are those between attempts while the files cannot be written.
func (s *Specs) delays() wait.Backoff {
	return wait.Backoff{Duration: s.options.Interval / 2, Factor: 1.5, Steps: 16, Cap: 2 * s.options.Interval}
}

// refresh asks the Source and writes its answer.
func (s *Specs) refresh(ctx context.Context) error {
	if err := s.ask(ctx); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.setAsked()
	defer s.announce()
	if s.wanted == nil {
		return nil // another caller has written it
	}
	return s.apply()
}

// ask asks the Source for what the files should contain. A second caller waits for the first.
func (s *Specs) ask(ctx context.Context) error {
	select {
	case s.refreshing <- struct{}{}:
		defer func() { <-s.refreshing }()
	case <-ctx.Done():
		return ctx.Err()
	}
	s.mu.Lock()
	err := s.load()
	adds := s.adds
	s.mu.Unlock()
	var edits Edits
	if err == nil {
		edits, err = s.options.Source.ContainerEdits(ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.absent = fmt.Errorf("make container edits: %w", err)
		s.announce()
		return s.absent
	}
	s.wanted = &answer{edits, adds}
	return nil
}

// apply writes the wanted answer, and keeps it if that fails: Run tries again without the Source. Under s.mu.
func (s *Specs) apply() error {
	err := s.tryApply(*s.wanted)
	if err != nil {
		s.absent = err
		return err
	}
	s.absent = errors.New("it has no container edits")
	s.wanted = nil
	return nil
}

func (s *Specs) tryApply(edits answer) error {
	if err := s.removeGone(edits); err != nil {
		return err
	}
	current := slices.DeleteFunc(slices.Clone(s.devices), edits.outdated)
	devices := withLost(s.withoutPartitionFiles(s.withRemade(edits)), s.withoutPartitionFiles(current))
	s.failed = maps.Clone(edits.Failed)
	if err := s.write(edits.Common, devices); err != nil {
		return err
	}
	s.common, s.devices, s.broken = edits.Common, devices, nil
	maps.DeleteFunc(s.added, func(uuid string, _ uint64) bool { return !s.hasEntry(uuid) })
	return each(s.partitions, func(f *deviceFile) error {
		f.common = s.common
		return s.update(f)
	})
}

// each calls do for all files in the order of their names, so that the error of one cause is always the same.
func each(files map[string]*deviceFile, do func(*deviceFile) error) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(files)) {
		errs = append(errs, do(files[name]))
	}
	return errors.Join(errs...)
}

// write writes devices and placeholders to the main spec. Under s.mu.
func (s *Specs) write(common specs.ContainerEdits, devices []specs.Device) error {
	data, err := encode(class, common, s.withPlaceholders(s.written.entries(class, devices)))
	if err != nil {
		return err
	}
	return s.put(data, s.written.mode())
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
	var entries []specs.Device
	if found := readSpec(s.main.path); len(found.Devices) > 0 {
		entries, s.placeholders = splitPlaceholders(found.Devices)
		s.common, s.devices = found.ContainerEdits, devicesOf(entries)
		if err := s.main.adopt(); err != nil {
			return err
		}
	}
	ofPartitions, err := s.loadPartitions()
	if err != nil {
		return err
	}
	s.loadNames(append(entries, ofPartitions...))
	s.loaded = true
	s.announce()
	return nil
}
