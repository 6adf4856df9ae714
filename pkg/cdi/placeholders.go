// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"maps"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// placeholderEnv is the only edit of a placeholder device. CDI requires one, and every container has this variable anyway.
const placeholderEnv = "NVIDIA_VISIBLE_DEVICES=void"

// AddPlaceholders makes placeholder devices for partitions that no longer exist. kubelet before 1.37 keeps a claim's CDI names over
// a reboot and passes them to the runtime beside those of the next Prepare (kubernetes, pkg/kubelet/cm/dra/claiminfo.go:
// addDevice; resetDevices since 1.37). A partition that was made again has a new name, and the runtime fails a container with
// a name that it cannot find.
//
// names are qualified; names of another kind are ignored, and a name that is a device, or becomes one, is that device. Call it at
// start, before the first Ensure. It has no effect if this boot has a spec already: a device that is lost later must fail its
// containers, and the existing spec lists the placeholders of this boot.
func (s *Specs) AddPlaceholders(names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		vendor, class, device, err := parser.ParseQualifiedName(name)
		if err == nil && vendor == s.options.Vendor && class == s.options.Class && strings.HasPrefix(device, "MIG-") {
			s.placeholders[device] = true
		}
	}
}

// withPlaceholders adds a placeholder device for each name that no device has. Under s.mu.
func (s *Specs) withPlaceholders(devices []specs.Device) []specs.Device {
	all := slices.Clone(devices)
	for _, name := range slices.Sorted(maps.Keys(s.placeholders)) {
		if s.partitions[name] == nil && !slices.ContainsFunc(devices, func(d specs.Device) bool { return d.Name == name }) {
			all = append(all, specs.Device{Name: name, ContainerEdits: specs.ContainerEdits{Env: []string{placeholderEnv}}})
		}
	}
	return all
}

// removePlaceholder makes room for a device of that name. Under s.mu.
func (s *Specs) removePlaceholder(name string) error {
	if !s.placeholders[name] {
		return nil
	}
	delete(s.placeholders, name)
	err := s.write(s.common, s.devices)
	if err != nil {
		s.placeholders[name] = true // the file still has it
	}
	return err
}

// splitPlaceholders separates the devices of an earlier spec from its placeholders.
func splitPlaceholders(found []specs.Device) (devices []specs.Device, placeholders map[string]bool) {
	placeholders = map[string]bool{}
	for _, d := range found {
		if slices.Equal(d.ContainerEdits.Env, []string{placeholderEnv}) && len(d.ContainerEdits.DeviceNodes) == 0 {
			placeholders[d.Name] = true
		} else {
			devices = append(devices, d)
		}
	}
	return devices, placeholders
}
