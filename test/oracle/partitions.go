// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Instance is a GPU instance with a compute instance in it, as the machine itself remembers them.
type Instance struct {
	// GPU is the minor of the GPU's device node.
	GPU int
	// ID of the GPU instance; Compute is the ID of the compute instance, -1 of a GPU instance that is empty.
	ID, Compute int
	// Profile is the GPU instance profile ID; Start and Size are memory slices.
	Profile, Start, Size int
	// ComputeStart is the first compute slice.
	ComputeStart int
	// UUID of the MIG device; empty where there is no compute instance.
	UUID string
}

// String is "gpu-3 gi7/ci0 (profile 19, slices 4+1)".
func (i Instance) String() string {
	return fmt.Sprintf("gpu-%d gi%d/ci%d (profile %d, slices %d+%d)", i.GPU, i.ID, i.Compute, i.Profile, i.Start, i.Size)
}

// Machine is what the GPUs of a node remember of MIG.
type Machine struct {
	// Boot tells boots apart: what GPUs remember does not survive one.
	Boot string
	// Enabled has the minors of the GPUs in MIG mode.
	Enabled map[int]bool
	// Instances are those of all GPUs.
	Instances []Instance
}

// ReadMachine reads the machine's own memory, below the root directory of its node. One that remembers nothing has an empty Boot.
func ReadMachine(root string) (Machine, error) {
	state := struct {
		Boot string
		GPUs []struct {
			UUID      string
			Enabled   bool
			Instances []struct {
				ID, Profile, Start, Size int
				Compute                  []struct {
					ID, Start int
					UUID      string
				}
			}
		}
	}{}
	data, err := os.ReadFile(filepath.Join(root, simulatedMachine, "mig/state.json"))
	if gone(err) {
		return Machine{}, nil
	}
	if err == nil {
		err = json.Unmarshal(data, &state)
	}
	if err != nil {
		return Machine{}, fmt.Errorf("read what the GPUs remember: %w", err)
	}
	gpus, err := readGPUs(root)
	if err != nil {
		return Machine{}, err
	}
	minors := map[string]int{}
	for _, gpu := range gpus {
		minors[gpu.UUID] = gpu.Minor
	}
	machine := Machine{Boot: state.Boot, Enabled: map[int]bool{}}
	for _, g := range state.GPUs {
		minor, ok := minors[g.UUID]
		if !ok {
			continue
		}
		if g.Enabled {
			machine.Enabled[minor] = true
		}
		for _, gi := range g.Instances {
			one := Instance{GPU: minor, ID: gi.ID, Compute: -1, Profile: gi.Profile, Start: gi.Start, Size: gi.Size}
			if len(gi.Compute) == 0 {
				machine.Instances = append(machine.Instances, one)
			}
			for _, ci := range gi.Compute {
				one.Compute, one.ComputeStart, one.UUID = ci.ID, ci.Start, ci.UUID
				machine.Instances = append(machine.Instances, one)
			}
		}
	}
	return machine, nil
}

// withPartitions puts the partitions that a container may use in the place of their GPUs: with the right to use a part, the GPU's
// own node gives nothing more.
func withPartitions(root string, gpus, rights []Device) ([]Device, error) {
	names, err := capabilities(root)
	if err != nil {
		return nil, err
	}
	machine, err := ReadMachine(root)
	if err != nil {
		return nil, err
	}
	var partitions []Device
	for _, right := range rights {
		var gpu, gi, ci int
		if n, err := fmt.Sscanf(names[right.Number.Minor], "gpu%d/gi%d/ci%d/access", &gpu, &gi, &ci); n < 3 || err != nil {
			// The GPU instance's own, which comes with each of its compute instances, or the administrator's.
			continue
		}
		right.Partition = Partition{Instance: fmt.Sprintf("gi%d/ci%d", gi, ci), GPU: Number{nvidiaMajor, uint32(gpu)}}
		for _, i := range machine.Instances {
			if i.GPU == gpu && i.ID == gi && i.Compute == ci {
				right.Partition.UUID, right.Partition.Start, right.Partition.Size = i.UUID, i.Start, i.Size
				right.Partition.Published = [2]string{fmt.Sprintf("-%d-%d", i.Profile, i.Start), fmt.Sprintf("-%d-%d-%d", i.Profile, i.Start, i.ComputeStart)}
			}
		}
		partitions = append(partitions, right)
	}
	whole := slices.DeleteFunc(slices.Clone(gpus), func(d Device) bool {
		return slices.ContainsFunc(partitions, func(p Device) bool { return p.Partition.GPU == d.Number })
	})
	return append(whole, partitions...), nil
}

// capabilities are the driver's names of rights, by minor (MIG User Guide, "Device Nodes and Capabilities").
func capabilities(root string) (map[uint32]string, error) {
	data, err := os.ReadFile(filepath.Join(root, simulatedMachine, "proc/driver/nvidia-caps/mig-minors"))
	if err != nil {
		return nil, fmt.Errorf("read capabilities: %w", err)
	}
	names := map[uint32]string{}
	for line := range strings.Lines(string(data)) {
		var name string
		var minor uint32
		if _, err := fmt.Sscan(line, &name, &minor); err != nil {
			return nil, fmt.Errorf("read capabilities: %q: %w", line, err)
		}
		names[minor] = name
	}
	return names, nil
}
