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

// Edits is what the node's GPUs need in a container.
type Edits struct {
	// Common belongs to every container that gets any of the devices: driver files, control nodes, hooks.
	Common specs.ContainerEdits
	// Devices has one entry a GPU, named by UUID. All paths are the host's.
	Devices []specs.Device
	// Failed says, by UUID, why a known GPU has no entry.
	Failed map[string]error
}

// errNoDevices is returned while no GPU of the node has container edits: a CDI spec without devices is invalid.
var errNoDevices = errors.New("no GPU has container edits")

// withLost adds entries of earlier GPUs that are not in devices, because kubelet caches what we answered and a container
// that restarts must still resolve it. An earlier entry whose device nodes belong to another GPU by now is dropped: it
// would hand that GPU to a second owner.
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

// encode writes the spec in the oldest CDI version that can express it, so that old runtimes read it too.
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

// validate reads a file as a container runtime does: strictly, with the CDI library's own checks.
func validate(path string) error {
	if _, err := cdilib.ReadSpec(path, 0); err != nil {
		return fmt.Errorf("validate CDI spec: %w", err)
	}
	return nil
}

// readDevices returns the entries of an earlier spec of this kind, none if the file cannot be used.
func readDevices(path, kind string) []specs.Device {
	spec, err := cdilib.ReadSpec(path, 0)
	if err != nil || spec.Kind != kind {
		return nil
	}
	return spec.Devices
}
