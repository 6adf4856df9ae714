// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"maps"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// voidEnv is what a container gets from an entry that gives nothing. An entry must have something, and this it has anyway.
const voidEnv = "NVIDIA_VISIBLE_DEVICES=void"

// Void makes entries that give nothing for names that kubelet remembers of partitions that are no more. A kubelet older than 1.37
// keeps, over a reboot, what it was answered for a claim, and hands it to the runtime beside what it is answered afterwards
// (kubernetes, pkg/kubelet/cm/dra/claiminfo.go: addDevice, and resetDevices since 1.37); a partition that was made again has another
// name, and the runtime starts no container with a name that it cannot find.
//
// Names are as in QualifiedName; others are passed over, and one that is a device, or becomes one, is that device. It is called at
// start, before the first Ensure. It counts where this boot has no spec yet: a device that is lost later is missed by whoever had
// it, and a spec that is there says which were lost before.
func (s *Specs) AddPlaceholders(names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		vendor, class, device, err := parser.ParseQualifiedName(name)
		if err == nil && vendor == s.options.Vendor && class == s.options.Class && strings.HasPrefix(device, "MIG-") {
			s.voided[device] = true
		}
	}
}

// withVoid adds the entries that give nothing, for the names that no device has. Under s.mu.
func (s *Specs) withVoid(devices []specs.Device) []specs.Device {
	all := slices.Clone(devices)
	for _, name := range slices.Sorted(maps.Keys(s.voided)) {
		if s.added[name] == nil && !slices.ContainsFunc(devices, func(d specs.Device) bool { return d.Name == name }) {
			all = append(all, specs.Device{Name: name, ContainerEdits: specs.ContainerEdits{Env: []string{voidEnv}}})
		}
	}
	return all
}

// unvoid takes the entry that gives nothing away from a name that is a device again. Under s.mu.
func (s *Specs) unvoid(name string) error {
	if !s.voided[name] {
		return nil
	}
	delete(s.voided, name)
	err := s.write(s.common, s.devices)
	if err != nil {
		// The file has it still.
		s.voided[name] = true
	}
	return err
}

// split tells devices from the names of entries that give nothing.
func split(found []specs.Device) (devices []specs.Device, voided map[string]bool) {
	voided = map[string]bool{}
	for _, d := range found {
		if slices.Equal(d.ContainerEdits.Env, []string{voidEnv}) && len(d.ContainerEdits.DeviceNodes) == 0 {
			voided[d.Name] = true
		} else {
			devices = append(devices, d)
		}
	}
	return devices, voided
}
