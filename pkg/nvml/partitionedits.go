// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// PartitionEdits returns the CDI edits of a new partition, besides the common edits: the same as ContainerEdits once the
// inventory contains it. It calls the driver only for a partition with graphics, and then waits for a running scan. It is safe
// for concurrent use; paths are the host's.
func (n *Node) PartitionEdits(ctx context.Context, p gpu.Partition) (specs.Device, error) {
	device, err := n.oneEdits(ctx, p)
	if err != nil {
		return specs.Device{}, fmt.Errorf("container edits of partition %s (%s): %w", p.Name(), p.UUID, err)
	}
	return device, nil
}

func (n *Node) oneEdits(ctx context.Context, p gpu.Partition) (specs.Device, error) {
	if graphics(p) {
		edits, err := n.ContainerEdits(ctx)
		if err != nil {
			return specs.Device{}, err
		}
		for _, d := range edits.Devices {
			if d.Name == p.UUID {
				return d, nil
			}
		}
		return specs.Device{}, errors.Join(errors.New("there are none"), edits.Failed[p.UUID])
	}
	n.mu.Lock()
	devRoot := n.attached.layout.devRoot
	n.mu.Unlock()
	device, err := n.partitionEdits(devRoot, p, specs.Device{}, nil)
	if err != nil {
		return specs.Device{}, err
	}
	spec := &specs.Spec{Devices: []specs.Device{device}}
	if err := n.toHost(devRoot, spec); err != nil {
		return specs.Device{}, fmt.Errorf("turn paths into the host's: %w", err)
	}
	return spec.Devices[0], nil
}

// graphics reports whether a partition can render: only then it gets its GPU's nodes for graphics (nvcdi).
func graphics(p gpu.Partition) bool { return strings.HasSuffix(p.Profile, "+gfx") }

// partitionEdits returns the nodes of the GPU and of the two capabilities. nvcdi v1.20.1 returns the same, but reads the list of
// capabilities below "/" only. parent is what nvcdi returns for the GPU, if anything.
func (n *Node) partitionEdits(devRoot string, p gpu.Partition, parent specs.Device, parentErr error) (specs.Device, error) {
	if !p.Health.Healthy() {
		return specs.Device{}, errors.New(p.Health.Message)
	}
	device := specs.Device{Name: p.UUID}
	nodes := []string{fmt.Sprintf("/dev/nvidia%d", p.Parent), capabilityNode(p.Caps[0]), capabilityNode(p.Caps[1])}
	for _, node := range nodes {
		described, err := describeNode(node, n.options.onHost(path.Join(devRoot, node)))
		if err != nil {
			return specs.Device{}, fmt.Errorf("%s: %w", path.Join(devRoot, node), err)
		}
		device.ContainerEdits.DeviceNodes = append(device.ContainerEdits.DeviceNodes, described)
	}
	if graphics(p) {
		if parentErr != nil {
			return specs.Device{}, parentErr
		}
		addGraphics(&device.ContainerEdits, parent.ContainerEdits)
	}
	return device, nil
}

// describeNode returns the entry of a device node, as nvcdi does.
func describeNode(inContainer, path string) (*specs.DeviceNode, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return nil, unwrapPath(err)
	}
	sys, ok := info.Sys().(*syscall.Stat_t)
	if !ok || info.Mode()&os.ModeCharDevice == 0 {
		return nil, errors.New("is no character device")
	}
	mode := info.Mode().Perm()
	return &specs.DeviceNode{
		Path: inContainer, HostPath: path, Permissions: "rwm", FileMode: &mode,
		Major: int64(unix.Major(uint64(sys.Rdev))), Minor: int64(unix.Minor(uint64(sys.Rdev))),
	}, nil
}

// drmDir has a GPU's nodes for graphics.
const drmDir = "/dev/dri"

// addGraphics copies the nodes for graphics and their hooks. Their paths are changed later, so it copies the values.
func addGraphics(to *specs.ContainerEdits, parent specs.ContainerEdits) {
	for _, node := range parent.DeviceNodes {
		if strings.HasPrefix(node.Path, drmDir+"/") {
			own := *node
			to.DeviceNodes = append(to.DeviceNodes, &own)
		}
	}
	about := func(arg string) bool { return strings.Contains(arg, drmDir) }
	for _, hook := range parent.Hooks {
		if slices.ContainsFunc(hook.Args, about) {
			own := *hook
			own.Args = slices.Clone(hook.Args)
			to.Hooks = append(to.Hooks, &own)
		}
	}
}
