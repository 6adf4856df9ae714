// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// instance is a compute instance as the machine itself remembers it.
type instance struct {
	gpu, gi, ci                  int
	profile, start, computeStart int
}

// withPartitions puts the partitions that a container may use in the place of their GPUs: with the right to use a part, the GPU's
// own node gives nothing more.
func withPartitions(root string, gpus, rights []Device) ([]Device, error) {
	names, err := capabilities(root)
	if err != nil {
		return nil, err
	}
	instances, err := readInstances(root)
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
		for _, i := range instances {
			if i.gpu == gpu && i.gi == gi && i.ci == ci {
				right.Partition.Published = [2]string{fmt.Sprintf("-%d-%d", i.profile, i.start), fmt.Sprintf("-%d-%d-%d", i.profile, i.start, i.computeStart)}
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

// readInstances reads the machine's own memory.
func readInstances(root string) ([]instance, error) {
	machine := filepath.Join(root, simulatedMachine)
	state := struct {
		GPUs []struct {
			UUID      string
			Instances []struct {
				ID, Profile, Start int
				Compute            []struct{ ID, Start int }
			}
		}
	}{}
	data, err := os.ReadFile(filepath.Join(machine, "mig/state.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		err = json.Unmarshal(data, &state)
	}
	if err != nil {
		return nil, fmt.Errorf("read instances: %w", err)
	}
	gpus, err := readGPUs(root)
	if err != nil {
		return nil, err
	}
	var found []instance
	for _, g := range state.GPUs {
		for _, gpu := range gpus {
			if gpu.UUID != g.UUID {
				continue
			}
			for _, gi := range g.Instances {
				for _, ci := range gi.Compute {
					found = append(found, instance{gpu.Minor, gi.ID, ci.ID, gi.Profile, gi.Start, ci.Start})
				}
			}
		}
	}
	return found, nil
}
