// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"fmt"
	"os"
	"path"
	"strings"
)

// ProcDir is a proc with the driver's list of capabilities, at driver/nvidia-caps/mig-minors as on a real machine.
const ProcDir = "proc"

// Minors of the capability devices: two for the GPU's administrator, then for each GPU and each of its GPU instances one, and
// one for each compute instance that it could have (MIG User Guide, "Device Nodes and Capabilities").
const (
	capConfig   = 1
	capMonitor  = 2
	capFirst    = 3
	capInstance = 1 + 8
	capGPU      = migInstances * capInstance
)

// capability is a right to use something, and the minor of the device that stands for it.
type capability struct {
	name  string
	minor int
}

// capabilities are those of a GPU by the number in /dev/nvidia<number>, for each GPU instance ID and as many compute instances
// as fit one with that ID. A real driver makes the nodes with the instances; here all of them are there from the start, so
// that a library without the right to make nodes can make instances.
func (g geometry) capabilities(gpu int) []capability {
	var all []capability
	for id, computes := 0, g.Slices; computes > 0; computes /= 2 {
		for range g.Slices / computes {
			minor := capFirst + gpu*capGPU + id*capInstance
			all = append(all, capability{fmt.Sprintf("gpu%d/gi%d/access", gpu, id), minor})
			for c := range computes {
				all = append(all, capability{fmt.Sprintf("gpu%d/gi%d/ci%d/access", gpu, id, c), minor + 1 + c})
			}
			id++
		}
	}
	return all
}

// capabilityFiles are the list of all capabilities and their device nodes; none for a machine without MIG.
func capabilityFiles(p Profile, node func(name string, mode os.FileMode, minor uint32) file) []file {
	var all []file
	var minors strings.Builder
	add := func(c capability, mode os.FileMode) {
		fmt.Fprintf(&minors, "%s %d\n", c.name, c.minor)
		all = append(all, node(fmt.Sprintf("nvidia-caps/nvidia-cap%d", c.minor), mode, uint32(c.minor)))
	}
	for _, g := range p.GPUs {
		model := p.Models[g.Model]
		if model.MIG == "" {
			continue
		}
		if all == nil {
			add(capability{"config", capConfig}, 0o400)
			add(capability{"monitor", capMonitor}, 0o444)
		}
		for _, c := range geometryOf(model).capabilities(*g.Minor) {
			add(c, 0o444)
		}
	}
	if all == nil {
		return nil
	}
	return append(all, file{path: path.Join(ProcDir, "driver/nvidia-caps/mig-minors"), content: []byte(minors.String()), mode: 0o444})
}
