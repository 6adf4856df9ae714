// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

func TestGraphicsOfAPartition(t *testing.T) {
	parent := specsOf("/dev/nvidia0", "/dev/dri/card1", "/dev/dri/renderD128")
	edits := specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidia0"}, {Path: "/dev/nvidia-caps/nvidia-cap3"}}}
	addGraphics(&edits, parent)
	var got []string
	for _, n := range edits.DeviceNodes {
		got = append(got, n.Path)
	}
	want := []string{"/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap3", "/dev/dri/card1", "/dev/dri/renderD128"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
	if len(edits.Hooks) != 1 || edits.Hooks[0].Args[1] != "create-symlinks" || edits.Hooks[0] == parent.Hooks[0] {
		t.Errorf("hooks %v", edits.Hooks)
	}
}

func specsOf(nodes ...string) specs.ContainerEdits {
	edits := specs.ContainerEdits{Hooks: []*specs.Hook{
		{Args: []string{"nvidia-cdi-hook", "create-symlinks", "--link", "../card1::/dev/dri/by-path/pci-0000:07:00.0-card"}},
		{Args: []string{"nvidia-cdi-hook", "apply-cuda-memory-limits", "--gpu-id", "GPU-1"}},
	}}
	for _, n := range nodes {
		edits.DeviceNodes = append(edits.DeviceNodes, &specs.DeviceNode{Path: n})
	}
	return edits
}
