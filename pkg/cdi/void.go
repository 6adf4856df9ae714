// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"slices"

	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// voidEnv is what a container gets from an entry that gives nothing. An entry must have something, and this it has anyway.
const voidEnv = "NVIDIA_VISIBLE_DEVICES=void"

// Void makes entries that give nothing for names that kubelet remembers of devices that are no more. A kubelet older than 1.37
// keeps, over a reboot, what it was answered for a claim, and hands it to the runtime beside what it is answered afterwards
// (kubernetes, pkg/kubelet/cm/dra/claiminfo.go: addDevice, and resetDevices since 1.37); a partition that was made again has
// another name, and the runtime starts no container with a name that it cannot find. Names are as in QualifiedName, those of
// other kinds are passed over, and one that is a device, or becomes one, is that device. It is called at start, before the first
// Ensure.
func (s *Specs) Void(names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		vendor, class, device, err := parser.ParseQualifiedName(name)
		if err == nil && vendor == s.options.Vendor && class == s.options.Class {
			s.voided = append(s.voided, device)
		}
	}
	slices.Sort(s.voided)
	s.voided = slices.Compact(s.voided)
}

// withVoid adds the entries that give nothing, for the names that no device has. Under s.mu.
func (s *Specs) withVoid(devices []specs.Device) []specs.Device {
	all := slices.Clone(devices)
	for _, name := range s.voided {
		if s.added[name] == nil && !slices.ContainsFunc(devices, func(d specs.Device) bool { return d.Name == name }) {
			all = append(all, specs.Device{Name: name, ContainerEdits: specs.ContainerEdits{Env: []string{voidEnv}}})
		}
	}
	return all
}

// unvoid takes the entry that gives nothing away from a name that is a device again. Under s.mu.
func (s *Specs) unvoid(name string) error {
	at, found := slices.BinarySearch(s.voided, name)
	if !found {
		return nil
	}
	s.voided = slices.Delete(s.voided, at, at+1)
	want, err := encode(s.kind, s.common, s.withVoid(s.devices))
	if err != nil {
		return err
	}
	if err := s.put(want); err != nil {
		return err
	}
	s.want = want
	return nil
}

// isVoid tells an entry that gives nothing from that of a device.
func isVoid(d specs.Device) bool {
	return slices.Equal(d.ContainerEdits.Env, []string{voidEnv}) && len(d.ContainerEdits.DeviceNodes) == 0
}
