// SPDX-License-Identifier: Apache-2.0

package filedevice

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/dynamic-resource-allocation/cel"
)

// TestDiscoveryIsASeam: both APIs serve files as they serve GPUs, and one ledger gives each file one owner.
func TestDiscoveryIsASeam(t *testing.T) {
	files := map[string]properties{
		"file-a": {Number: 0, Bytes: 1 << 10, NUMANode: 0},
		"file-b": {Number: 1, Bytes: 2 << 10, NUMANode: 0},
		"file-c": {Number: 2, Bytes: 4 << 10, NUMANode: 1},
	}
	n := startNode(t, files)
	n.await("file-a file-b file-c", "file-a file-b file-c")
	for id, p := range files {
		n.wantSelected(id, fmt.Sprintf(
			`device.driver == %[1]q && device.attributes[%[1]q].uuid == %[2]q && device.attributes["resource.kubernetes.io"].numaNode == %[3]d &&
			device.capacity[%[1]q].memory.compareTo(quantity("%[4]d")) == 0`, driverName, id, p.NUMANode, p.Bytes))
	}
	for _, d := range n.list() {
		if nodes := d.GetTopology().GetNodes(); len(nodes) != 1 || nodes[0].GetID() != int64(files[d.GetID()].NUMANode) {
			t.Errorf("limits have %s on NUMA nodes %v, want %d", d.GetID(), nodes, files[d.GetID()].NUMANode)
		}
	}

	// A claim takes a file. The scheduler counts it, so the slices stay as they are.
	train := n.claim("train", "gpu-0")
	names, err := n.prepare(train)
	check(t, err)
	n.wantFile(names, "file-a")
	n.await("file-a file-b file-c", "!file-a file-b file-c")

	// A limit takes another one.
	names, err = n.allocate("file-b")
	check(t, err)
	n.wantFile(names, "file-b")
	n.await("file-a file-b!held-by-pod=true file-c", "!file-a file-b file-c")

	// Each has one owner.
	if names, err := n.allocate("file-a"); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "held by claim uid-train") {
		t.Errorf("Allocate of the claim's file: %v, %v", names, err)
	}
	late := n.claim("late", "gpu-1")
	if names, err := n.prepare(late); err == nil || !strings.Contains(err.Error(), "gpu-1 (file-b) is held by a pod by its resource limits") {
		t.Errorf("Prepare of a file that a pod has: %v, %v", names, err)
	}
	n.unprepare(late)

	// A file disappears and comes back.
	n.remove("file-c")
	n.await("file-a file-b!held-by-pod=true file-c!unhealthy=Missing", "!file-a file-b !file-c")
	n.put("file-c", files["file-c"])
	n.await("file-a file-b!held-by-pod=true file-c", "!file-a file-b file-c")

	// What the claim gives back is for both.
	n.unprepare(train)
	n.await("file-a file-b!held-by-pod=true file-c", "file-a file-b file-c")
	next := n.claim("next", "gpu-0")
	names, err = n.prepare(next)
	check(t, err)
	n.wantFile(names, "file-a")
	n.unprepare(next)
	names, err = n.allocate("file-a")
	check(t, err)
	n.wantFile(names, "file-a")
}

// wantSelected fails the test unless the scheduler selects this device only by a selector of a claim.
func (n *node) wantSelected(id, selector string) {
	n.t.Helper()
	compiled := cel.GetCompiler(cel.Features{}).CompileCELExpression(selector, cel.Options{})
	if compiled.Error != nil {
		n.t.Fatal(compiled.Error)
	}
	var selected []string
	for _, d := range n.devices() {
		matches, _, err := compiled.DeviceMatches(n.t.Context(), cel.Device{Driver: driverName, Attributes: d.Attributes, Capacity: d.Capacity})
		check(n.t, err)
		if matches {
			selected = append(selected, *d.Attributes["uuid"].StringValue)
		}
	}
	if !slices.Equal(selected, []string{id}) {
		n.t.Errorf("%s selects %v, want %s", selector, selected, id)
	}
}

// TestNothingOfNVIDIAIsLinked: the front-ends, the ledger and the CDI specs do not depend on how devices are found.
func TestNothingOfNVIDIAIsLinked(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-test", ".").Output()
	check(t, err)
	for path := range strings.Lines(string(out)) {
		for _, prefix := range []string{"github.com/NVIDIA/", "github.com/tandem-gpu/tandem/pkg/nvml", "github.com/tandem-gpu/tandem/simulated"} {
			if strings.HasPrefix(path, prefix) {
				t.Errorf("this package links %s", strings.TrimSpace(path))
			}
		}
	}
}
