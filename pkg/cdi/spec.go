// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// Edits are the container edits of a node's devices.
type Edits struct {
	// Common applies to every container with a device: driver files, control nodes, hooks.
	Common specs.ContainerEdits
	// Devices has one entry for each device, named by UUID. All paths are paths of the host.
	Devices []specs.Device
	// Failed explains, by UUID, why a known device has no entry.
	Failed map[string]error
	// Nodes is the path in containers of the GPU's node, by UUID of the devices in Failed, as far as it is known. An earlier entry without
	// that node has another GPU's: the minor numbers have changed.
	Nodes map[string]string
}

// outdated reports whether an earlier entry has the node of another GPU now.
func (e Edits) outdated(d specs.Device) bool {
	node := e.Nodes[d.Name]
	return node != "" && !slices.ContainsFunc(d.ContainerEdits.DeviceNodes, func(n *specs.DeviceNode) bool { return n.Path == node })
}

// SpecFile is the name of the main spec file.
const SpecFile = "tandem-" + vendor + "-" + class + jsonSuffix

// Spec returns the content of the main spec file, for a node without an earlier one. The command inspect calls it. It fails without a
// device.
func (e Edits) Spec() ([]byte, error) { return encode(class, e.Common, withLost(e.Devices, nil)) }

// withLost adds earlier entries that are not in devices: kubelet caches Tandem's answers, and a container that restarts must still
// resolve them. An earlier entry whose device nodes belong to another device now is dropped; it would give that device to a
// second holder.
func withLost(devices, earlier []specs.Device) []specs.Device {
	all := slices.Clone(devices)
	for _, old := range earlier {
		if !slices.ContainsFunc(devices, func(d specs.Device) bool { return d.Name == old.Name || sharesNode(d, old) }) {
			all = append(all, old)
		}
	}
	slices.SortFunc(all, func(a, b specs.Device) int { return strings.Compare(a.Name, b.Name) })
	return all
}

func hasName(devices []specs.Device, name string) bool {
	return slices.ContainsFunc(devices, func(d specs.Device) bool { return d.Name == name })
}

func sharesNode(a, b specs.Device) bool {
	for _, x := range a.ContainerEdits.DeviceNodes {
		for _, y := range b.ContainerEdits.DeviceNodes {
			samePath := cmp.Or(x.HostPath, x.Path) == cmp.Or(y.HostPath, y.Path)
			if samePath || x.Major != 0 && x.Major == y.Major && x.Minor == y.Minor {
				return true
			}
		}
	}
	return false
}

// encode uses the oldest CDI version that can express the spec, so that old runtimes can read it.
func encode(class string, common specs.ContainerEdits, devices []specs.Device) ([]byte, error) {
	if len(devices) == 0 {
		return nil, errors.New("no GPU has container edits") // a CDI spec without devices is invalid
	}
	spec := &specs.Spec{Kind: vendor + "/" + class, ContainerEdits: common, Devices: devices}
	version, err := specs.MinimumRequiredVersion(spec)
	if err != nil {
		return nil, fmt.Errorf("find CDI version: %w", err)
	}
	spec.Version = version
	data, err := json.MarshalIndent(spec, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode CDI spec: %w", err)
	}
	return append(data, '\n'), nil
}

// validate reads a file as strictly as a container runtime does.
func validate(path string) error {
	if _, err := cdilib.ReadSpec(path, 0); err != nil {
		return fmt.Errorf("validate CDI spec: %w", err)
	}
	return nil
}

// readSpec returns the content of an earlier spec of GPUs or partitions, an empty one if the file is unreadable.
func readSpec(path string) specs.Spec {
	spec, err := cdilib.ReadSpec(path, 0)
	if err != nil || spec.GetVendor() != vendor || spec.GetClass() != class {
		return specs.Spec{}
	}
	return *spec.Spec
}

// placeholderEnv is the only edit of a placeholder device. CDI requires one, and every container has this variable anyway.
const placeholderEnv = "NVIDIA_VISIBLE_DEVICES=void"

// AddPlaceholders makes placeholder devices for partitions that no longer exist. kubelet before 1.37 keeps a claim's CDI names over
// a reboot and passes them to the runtime beside those of the next Prepare (kubernetes, pkg/kubelet/cm/dra/claiminfo.go:
// addDevice; resetDevices since 1.37). A partition that was made again has a new name, and the runtime fails a container with
// a name that it cannot find.
//
// names are qualified; those that are no GPU's or partition's are ignored, and a name that is a device, or becomes one, is that device. Load also
// learns from them which kinds of names are in use. Call it at start, before Load and the first Ensure. It adds no placeholder if this boot has
// a spec already: a device that is lost later must fail its containers, and the existing spec lists the placeholders of this boot.
func (s *Specs) AddPlaceholders(names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		of, isDevice := strings.CutPrefix(name, qualifiedPrefix)
		if !isDevice || parser.ValidateDeviceName(of) != nil {
			continue
		}
		s.kept = append(s.kept, of)
		if strings.HasPrefix(of, migPrefix) {
			s.placeholders[of] = true
		}
	}
}

// withPlaceholders adds a placeholder device for each name that no entry has. Under s.mu.
func (s *Specs) withPlaceholders(entries []specs.Device) []specs.Device {
	taken := slices.Clone(entries)
	for _, f := range s.partitions {
		taken = append(taken, s.written.entries(class, []specs.Device{f.entry})...)
	}
	for _, name := range slices.Sorted(maps.Keys(s.placeholders)) {
		if !hasName(taken, name) {
			entries = append(entries, specs.Device{Name: name, ContainerEdits: specs.ContainerEdits{Env: []string{placeholderEnv}}})
		}
	}
	return entries
}

// removePlaceholder makes room for the names of a device. Under s.mu.
func (s *Specs) removePlaceholder(d specs.Device) error {
	before := maps.Clone(s.placeholders)
	for _, entry := range s.written.entries(class, []specs.Device{d}) {
		delete(s.placeholders, entry.Name)
	}
	if len(s.placeholders) == len(before) {
		return nil
	}
	err := s.write(s.common, s.devices)
	if err != nil {
		s.placeholders = before // the file still has it
	}
	return err
}

// splitPlaceholders separates the entries of an earlier spec from its placeholders.
func splitPlaceholders(found []specs.Device) (entries []specs.Device, placeholders map[string]bool) {
	placeholders = map[string]bool{}
	for _, d := range found {
		if slices.Equal(d.ContainerEdits.Env, []string{placeholderEnv}) && len(d.ContainerEdits.DeviceNodes) == 0 {
			placeholders[d.Name] = true
		} else {
			entries = append(entries, d)
		}
	}
	return entries, placeholders
}
