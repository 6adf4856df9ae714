// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/tandem-gpu/tandem/hack/cluster"
)

// TestLookFirst: what a container sees is told by its own processes, and that it sees nothing is not remembered while the runtime
// still makes it, whose hooks enter its file system before it does.
func TestLookFirst(t *testing.T) {
	root := t.TempDir()
	machine := filepath.Join(root, simulatedMachine)
	mknod(t, filepath.Join(machine, "driver/dev/nvidia6"), nvidiaMajor, 6)
	if err := os.WriteFile(filepath.Join(machine, "profile.yaml"), []byte("gpus:\n- {minor: 6, uuid: GPU-g, pci: g}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	const process, other, hook = 11, 12, 13
	in := func(container string, minors ...uint32) *sighting {
		seen := &sighting{container: id(container)}
		for _, minor := range minors {
			seen.devices = append(seen.devices, Device{Number: Number{nvidiaMajor, minor}})
		}
		return seen
	}
	type answer struct {
		seen *sighting
		err  error
	}
	nothing, outside, ended := answer{seen: in("c")}, answer{}, answer{err: fs.ErrNotExist}
	gpu := func() answer { return answer{seen: in("c", 6)} }
	partition := func(uuid string) answer {
		right := Device{Number: Number{236, 66}, Partition: Partition{Instance: "gi7/ci0", GPU: Number{nvidiaMajor, 6}, UUID: uuid}}
		return answer{seen: &sighting{container: id("c"), devices: []Device{right}}}
	}
	failure := errors.New("refused")
	for name, test := range map[string]struct {
		pids  []int
		looks map[int]answer
		// sees is how many devices are seen.
		sees       int
		remembered bool
		err        error
	}{
		"its own process":                {[]int{process}, map[int]answer{process: gpu()}, 1, true, nil},
		"a container without GPUs":       {[]int{process, other}, map[int]answer{process: nothing, other: nothing}, 0, true, nil},
		"on its way":                     {[]int{process}, map[int]answer{process: outside}, 0, false, nil},
		"no pod":                         {nil, nil, 0, false, nil},
		"a hook that ends":               {[]int{process, hook}, map[int]answer{process: outside, hook: nothing}, 0, false, nil},
		"the hook first, then in itself": {[]int{hook, process}, map[int]answer{hook: nothing, process: gpu()}, 1, true, nil},
		"a hook sees the GPU":            {[]int{process, hook}, map[int]answer{process: outside, hook: gpu()}, 1, false, nil},
		"another comes, without GPUs":    {[]int{process, other}, map[int]answer{process: gpu(), other: nothing}, 1, true, nil},
		"one has ended":                  {[]int{other, process}, map[int]answer{other: ended, process: gpu()}, 1, false, nil},
		"one of another container":       {[]int{other, process}, map[int]answer{other: {seen: in("d", 6)}, process: nothing}, 0, false, nil},
		"a partition":                    {[]int{process}, map[int]answer{process: partition("MIG-p")}, 1, true, nil},
		"a partition that is not known":  {[]int{process}, map[int]answer{process: partition("")}, 1, false, nil},
		"a GPU that nothing tells of":    {[]int{process}, map[int]answer{process: {seen: in("c", 7)}}, 1, false, nil},
		"a look that fails":              {[]int{process}, map[int]answer{process: {err: failure}}, 0, false, failure},
	} {
		t.Run(name, func(t *testing.T) {
			l := NewLookout(&cluster.Node{}, map[int]Sharing{6: {Replicas: 4}})
			seen, err := l.lookFirst(root, group{id: id("c")}, test.pids, func(pid int) (*sighting, error) {
				return test.looks[pid].seen, test.looks[pid].err
			})
			if !errors.Is(err, test.err) {
				t.Fatalf("error %v, want %v", err, test.err)
			}
			if got := seen != nil; got != (test.sees > 0) || got && len(seen.devices) != test.sees {
				t.Errorf("sees %+v", seen)
			}
			devices, remembered := l.known[id("c")]
			if remembered != test.remembered || remembered && len(devices) != test.sees {
				t.Errorf("remembered: %t, %+v", remembered, devices)
			}
			if remembered && test.sees > 0 && (devices[0].GPU.UUID != "GPU-g" || devices[0].Whole() && devices[0].GPU.Replicas != 4) {
				t.Errorf("remembered without its GPU: %+v", devices[0])
			}
		})
	}
}
