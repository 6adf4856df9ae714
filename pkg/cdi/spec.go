// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
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
}

// errNoDevices is returned while no GPU has container edits: a CDI spec without devices is invalid.
var errNoDevices = errors.New("no GPU has container edits")

// withLost adds earlier entries that are not in devices: kubelet caches our answers, and a container that restarts must still
// resolve them. An earlier entry whose device nodes belong to another device now is dropped; it would give that device to a
// second holder.
func withLost(devices, earlier []specs.Device) []specs.Device {
	all := slices.Clone(devices)
	for _, old := range earlier {
		taken := slices.ContainsFunc(devices, func(d specs.Device) bool {
			return d.Name == old.Name || sharesNode(d, old)
		})
		if !taken {
			all = append(all, old)
		}
	}
	slices.SortFunc(all, func(a, b specs.Device) int { return strings.Compare(a.Name, b.Name) })
	return all
}

func sharesNode(a, b specs.Device) bool {
	for _, x := range a.ContainerEdits.DeviceNodes {
		for _, y := range b.ContainerEdits.DeviceNodes {
			if hostPath(x) == hostPath(y) || x.Major != 0 && x.Major == y.Major && x.Minor == y.Minor {
				return true
			}
		}
	}
	return false
}

func hostPath(n *specs.DeviceNode) string {
	if n.HostPath != "" {
		return n.HostPath
	}
	return n.Path
}

// encode uses the oldest CDI version that can express the spec, so that old runtimes can read it.
func encode(kind string, common specs.ContainerEdits, devices []specs.Device) ([]byte, error) {
	if len(devices) == 0 {
		return nil, errNoDevices
	}
	spec := &specs.Spec{Kind: kind, ContainerEdits: common, Devices: devices}
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

// readDevices returns the entries of an earlier spec of this kind, none if the file is unreadable.
func readDevices(path, kind string) []specs.Device {
	spec, err := cdilib.ReadSpec(path, 0)
	if err != nil || spec.Kind != kind {
		return nil
	}
	return spec.Devices
}
