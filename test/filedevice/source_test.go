// SPDX-License-Identifier: Apache-2.0

package filedevice

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/internal/filewatch"
	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/test/nodriver"
)

// properties are the content of a device's file. The name of the file is "<ID>.json".
type properties struct {
	// Number is unique. It is in the name under which the device is published.
	Number   int    `json:"number"`
	Bytes    uint64 `json:"bytes"`
	NUMANode int    `json:"numaNode"`
}

const suffix = ".json"

// containerDir is where a container finds the files of its devices.
const containerDir = "/run/files"

// source finds the devices in a directory. It is all that the agent needs of another kind of device. Files are put into the directory
// by a rename. A file is given to one holder as it is: nothing asks for partitions, sharing or a reset.
type source struct {
	nodriver.Hardware
	dir     string
	changed broadcast.Signal

	mu        sync.Mutex
	inventory device.Inventory
}

// Run follows the directory until ctx is done.
func (s *source) Run(ctx context.Context) error {
	watch := filewatch.New(ctx, filewatch.Options{Dirs: []string{s.dir}, Interval: time.Second})
	defer watch.Close()
	for {
		if err := s.scan(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-watch.C:
		}
	}
}

// scan reads the directory. A device whose file is gone stays in the inventory and is unhealthy: it may have a holder.
func (s *source) scan() error {
	found, err := s.find()
	if err != nil {
		return fmt.Errorf("find devices in %s: %w", s.dir, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, known := range s.inventory.GPUs {
		if !slices.ContainsFunc(found, func(d device.GPU) bool { return d.UUID == known.UUID }) {
			known.Health = device.Health{Reason: device.ReasonMissing, Message: "its file is gone"}
			found = append(found, known)
		}
	}
	slices.SortFunc(found, func(a, b device.GPU) int { return cmp.Compare(a.Minor, b.Minor) })
	if !reflect.DeepEqual(found, s.inventory.GPUs) {
		s.inventory.GPUs = found
		s.changed.Notify()
	}
	return nil
}

func (s *source) find() (found []device.GPU, err error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		id, is := strings.CutSuffix(entry.Name(), suffix)
		if !is {
			continue
		}
		data, err := os.ReadFile(s.path(id))
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, err
		}
		var p properties
		if err := json.Unmarshal(data, &p); err != nil {
			return nil, fmt.Errorf("decode %s: %w", entry.Name(), err)
		}
		found = append(found, device.GPU{
			UUID: id, Index: p.Number, Minor: p.Number, NUMANode: p.NUMANode, MemoryBytes: p.Bytes, ProductName: "File",
		})
	}
	return found, nil
}

func (s *source) path(id string) string { return filepath.Join(s.dir, id+suffix) }

// Inventory implements wiring.Hardware.
func (s *source) Inventory() device.Inventory {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.inventory
}

// Changed implements wiring.Hardware.
func (s *source) Changed() <-chan struct{} { return s.changed.Changed() }

// ContainerEdits implements wiring.Hardware: a container gets the files of its devices as mounts.
func (s *source) ContainerEdits(context.Context) (cdi.Edits, error) {
	edits := cdi.Edits{Failed: map[string]error{}}
	for _, d := range s.Inventory().GPUs {
		if !d.Health.Healthy() {
			edits.Failed[d.UUID] = errors.New(d.Health.Message)
			continue
		}
		edits.Devices = append(edits.Devices, specs.Device{Name: d.UUID, ContainerEdits: specs.ContainerEdits{Mounts: []*specs.Mount{{
			HostPath: s.path(d.UUID), ContainerPath: filepath.Join(containerDir, d.UUID), Options: []string{"bind", "rw"},
		}}}})
	}
	return edits, nil
}

// PartitionEdits implements wiring.Hardware.
func (s *source) PartitionEdits(context.Context, device.Partition) (specs.Device, error) {
	return specs.Device{}, fmt.Errorf("make container edits of a part of a file: %w", errors.ErrUnsupported)
}
