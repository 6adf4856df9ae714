// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"
)

// simulatedMachine is where the chart makes the files of a node's simulated GPUs.
const simulatedMachine = "run/nvidia/simulated"

// gpus are a node's GPUs by device number.
type gpus map[Number]GPU

// find answers a GPU that has at least its minor.
func (g gpus) find(number Number) GPU {
	if gpu, ok := g[number]; ok {
		return gpu
	}
	return GPU{Index: -1, Minor: int(number.Minor), NUMANode: -1}
}

// GPUs answers what the files below the root directory of a node tell of its GPUs, by their minors.
func GPUs(root string) (map[int]GPU, error) {
	known, err := readGPUs(root)
	found := map[int]GPU{}
	for _, gpu := range known {
		found[gpu.Minor] = gpu
	}
	return found, err
}

// readGPUs joins what lies on the node: the device nodes of the driver, the description of the machine, and its sysfs.
func readGPUs(root string) (gpus, error) {
	machine, err := os.OpenRoot(filepath.Join(root, simulatedMachine))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read machine: %w", err)
	}
	defer machine.Close()
	data, err := machine.ReadFile("profile.yaml")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read machine: %w", err)
	}
	described := struct {
		Models map[string]struct{ MemoryMiB int64 }
		GPUs   []struct {
			UUID, PCI, Model string
			Minor            int
		}
	}{}
	if err := yaml.Unmarshal(data, &described); err != nil {
		return nil, fmt.Errorf("read machine: %w", err)
	}
	found := gpus{}
	for _, gpu := range described.GPUs {
		info, err := machine.Lstat(fmt.Sprintf("driver/dev/nvidia%d", gpu.Minor))
		if errors.Is(err, fs.ErrNotExist) {
			// A fault that a test injects.
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read machine: %w", err)
		}
		if number, ok := gpuNumber(info); ok {
			found[number] = GPU{
				UUID: gpu.UUID, PCIBusID: gpu.PCI, Minor: gpu.Minor, NUMANode: numaNode(machine, gpu.PCI),
				Memory: described.Models[gpu.Model].MemoryMiB << 20,
			}
		}
	}
	found.count()
	return found, nil
}

// count numbers the GPUs as the driver does: in the order of their PCI addresses.
func (g gpus) count() {
	order := slices.SortedFunc(maps.Keys(g), func(a, b Number) int { return cmp.Compare(g[a].PCIBusID, g[b].PCIBusID) })
	for i, number := range order {
		gpu := g[number]
		gpu.Index = i
		g[number] = gpu
	}
}

// numaNode is -1 where sysfs does not say.
func numaNode(machine *os.Root, pci string) int {
	link := filepath.Join("sys/bus/pci/devices", pci)
	text, err := machine.ReadFile(filepath.Join(link, "numa_node"))
	if err != nil {
		return -1
	}
	node, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return -1
	}
	return node
}

// gpuNumber answers false for what is not the node of a GPU.
func gpuNumber(info fs.FileInfo) (Number, bool) {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || info.Mode()&fs.ModeCharDevice == 0 {
		return Number{}, false
	}
	number := Number{unix.Major(stat.Rdev), unix.Minor(stat.Rdev)}
	return number, number.Major == nvidiaMajor && number.Minor < firstControl
}
