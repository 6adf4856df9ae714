// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// Source says what belongs in the spec.
type Source interface {
	// ContainerEdits is called when the inventory changed, never while a pod waits. An error leaves the spec as it is.
	ContainerEdits(ctx context.Context) (Edits, error)
	// PartitionEdits is the entry of a partition that has just been made, named by its UUID. It is called while a pod waits.
	PartitionEdits(ctx context.Context, p device.Partition) (specs.Device, error)
	// Changed returns a channel that is closed when ContainerEdits may answer differently. It is taken before the call.
	Changed() <-chan struct{}
}

// Options of a Specs.
type Options struct {
	// Dir is the CDI directory as this process sees it; it is created when missing.
	Dir string
	// Vendor and Class make up the kind, "<vendor>/<class>".
	Vendor, Class string
	Source        Source
	// Hook is installed together with the spec that names it. Optional.
	Hook *Hook
	// Interval is how often Run looks whether the files are still as they should be. Default: 2 s.
	Interval time.Duration
}

// Specs keeps the spec file, and one beside it for each partition that was made on demand: those come and go while a pod waits,
// and the file of all devices is not written anew for each. So does what containers need beside devices (Describe). All methods are
// safe for concurrent use.
type Specs struct {
	options Options
	kind    string
	file    ownedFile

	// refreshing admits one caller of the Source at a time; a channel, so that a waiting Prepare can give up.
	refreshing chan struct{}

	mu      sync.Mutex
	want    []byte
	common  specs.ContainerEdits
	devices []specs.Device
	known   map[string]bool
	failed  map[string]error
	loaded  bool
	// voided are names of devices that are no more, for which there are entries all the same.
	voided map[string]bool
	// added are the partitions with a file of their own, by UUID.
	added map[string]*addition
	// extras are what Describe has made, by name.
	extras map[string]*extra

	entries entries
}

// New prepares a Specs and touches nothing.
func New(options Options) (*Specs, error) {
	if err := parser.ValidateVendorName(options.Vendor); err != nil {
		return nil, fmt.Errorf("CDI vendor: %w", err)
	}
	if err := parser.ValidateClassName(options.Class); err != nil {
		return nil, fmt.Errorf("CDI class: %w", err)
	}
	if options.Class == extraClass {
		return nil, fmt.Errorf("CDI class %q: it is for what is no device", options.Class)
	}
	if !filepath.IsAbs(options.Dir) {
		return nil, fmt.Errorf("CDI directory %q: not an absolute path", options.Dir)
	}
	if options.Source == nil {
		return nil, errors.New("CDI specs need a source")
	}
	if options.Interval <= 0 {
		options.Interval = 2 * time.Second
	}
	s := &Specs{
		options:    options,
		kind:       options.Vendor + "/" + options.Class,
		refreshing: make(chan struct{}, 1),
		voided:     map[string]bool{},
		added:      map[string]*addition{},
		extras:     map[string]*extra{},
		entries:    entries{changed: make(chan struct{})},
	}
	s.file.path = filepath.Join(options.Dir, "tandem-"+options.Vendor+"-"+options.Class+".json")
	return s, nil
}

// QualifiedName is what a container runtime is told: "<vendor>/<class>=<uuid>".
func (s *Specs) QualifiedName(uuid string) string {
	return parser.QualifiedName(s.options.Vendor, s.options.Class, uuid)
}

// Path is the spec file.
func (s *Specs) Path() string { return s.file.path }

// Ensure returns when the spec and the hook are on disk as they should be; it is an error if one of the given devices has
// no entry. That costs two stats when all is well, a write when somebody removed or changed the files, and one call of the
// Source only while there has not been a spec yet. Idempotent; front-ends call it before they answer with a qualified name.
func (s *Specs) Ensure(ctx context.Context, uuids ...string) error {
	written, err := s.repair()
	if !written && err == nil {
		err = s.refresh(ctx)
	}
	if err != nil {
		return err
	}
	return s.check(uuids)
}

func (s *Specs) check(uuids []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, uuid := range uuids {
		switch {
		case s.added[uuid] != nil:
			errs = append(errs, s.added[uuid].repair())
		case s.known[uuid]:
		case s.failed[uuid] != nil:
			errs = append(errs, fmt.Errorf("make container edits of device %s: %w", uuid, s.failed[uuid]))
		default:
			errs = append(errs, fmt.Errorf("device %s has no container edits", uuid))
		}
	}
	return errors.Join(errs...)
}

// repair puts back what is known to belong on disk. It returns false while nothing is.
func (s *Specs) repair() (written bool, err error) {
	if s.file.intact() && s.options.Hook.intact() {
		return true, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.want == nil {
		return false, nil
	}
	return true, s.put(s.want)
}

// Run follows the Source and repairs the files until ctx is done. It logs what goes wrong and tries again: a node whose
// CDI directory cannot be written now may be well in a minute.
func (s *Specs) Run(ctx context.Context) error {
	ticker := time.NewTicker(s.options.Interval)
	defer ticker.Stop()
	said := ""
	for {
		changed := s.options.Source.Changed()
		err := s.refresh(ctx)
		said = s.log(ctx, said, err)
		for wait := true; wait; {
			select {
			case <-ctx.Done():
				return nil
			case <-changed:
				wait = false
			case <-ticker.C:
				_, repairErr := s.repair()
				said = s.log(ctx, said, errors.Join(err, repairErr, s.repairAdded(), s.repairExtras()))
				// A Source that failed is asked again; what it said before is kept on disk meanwhile.
				wait = err == nil
			}
		}
	}
}

// log reports an error when it is another than the last.
func (s *Specs) log(ctx context.Context, said string, err error) string {
	if err == nil || ctx.Err() != nil {
		return ""
	}
	if err.Error() != said {
		klog.FromContext(ctx).Error(err, "Keeping the CDI spec", "path", s.file.path)
	}
	return err.Error()
}

// refresh asks the Source and writes what it says. A caller that finds somebody else at it waits for the result.
func (s *Specs) refresh(ctx context.Context) error {
	select {
	case s.refreshing <- struct{}{}:
		defer func() { <-s.refreshing }()
	case <-ctx.Done():
		return ctx.Err()
	}
	s.mu.Lock()
	err := s.load()
	before := slices.Collect(maps.Keys(s.added))
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
	// One that was added meanwhile may be unknown to these edits.
	if err := s.removeGone(before, edits); err != nil {
		return err
	}
	devices := withLost(s.notAdded(edits.Devices), s.notAdded(s.devices))
	s.failed = maps.Clone(edits.Failed)
	// Only what could be written and read is remembered: the spec before it stays the one to repair from.
	if err := s.write(edits.Common, devices); err != nil {
		return err
	}
	s.common, s.devices, s.known = edits.Common, devices, make(map[string]bool, len(devices))
	for _, d := range devices {
		s.known[d.Name] = true
	}
	s.announce()
	return s.describeAdded()
}

// write brings the files to say this, beside what gives nothing. Under s.mu.
func (s *Specs) write(common specs.ContainerEdits, devices []specs.Device) error {
	want, err := encode(s.kind, common, s.withVoid(devices))
	if err != nil {
		return err
	}
	if err := s.put(want); err != nil {
		return err
	}
	s.want = want
	return nil
}

// load takes over, once, what an earlier run of the agent left.
func (s *Specs) load() error {
	if s.loaded {
		return nil
	}
	if err := s.file.removeTemporaries(); err != nil {
		return err
	}
	if found := readDevices(s.file.path, s.kind); len(found) > 0 {
		s.devices, s.voided = split(found)
	}
	if err := s.loadAdded(); err != nil {
		return err
	}
	s.loaded = true
	return nil
}

// put brings the files on disk to what is wanted.
func (s *Specs) put(want []byte) error {
	if err := s.options.Hook.Ensure(); err != nil {
		return err
	}
	if s.sameOnDisk(want) {
		return s.file.accept()
	}
	return s.file.replace(want, 0o644, validate)
}

func (s *Specs) sameOnDisk(want []byte) bool {
	info, err := os.Lstat(s.file.path)
	if err != nil || !info.Mode().IsRegular() || info.Mode().Perm() != 0o644 {
		return false
	}
	data, err := os.ReadFile(s.file.path)
	return err == nil && bytes.Equal(data, want)
}
