// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/golden"
	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// withExtras adds the devices of other drivers to a fixture, below a root.
func withExtras(t *testing.T, options Options, root string) {
	t.Helper()
	for i, path := range []string{
		"/dev/nvidia-fs0", "/dev/nvidia-fs1", "/dev/gdrdrv", "/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm",
		"/dev/nvidia-caps-imex-channels/channel0", "/dev/nvidia-caps-imex-channels/channel1",
	} {
		makeNode(t, filepath.Join(options.HostRoot, root), path, 500-uint32(i), 0)
	}
}

func TestExtras(t *testing.T) {
	// The toolkit looks for programs where PATH says, and for data where XDG_DATA_DIRS says.
	t.Setenv("PATH", "/usr/sbin:/usr/bin")
	t.Setenv("XDG_DATA_DIRS", "")
	tests := map[string]struct {
		layout string
		// at is the root with the devices, empty for a machine without.
		at      string
		options Extras
		// nodes and mounts are those beyond a container's without extras.
		nodes, mounts []string
		err           string
	}{
		"none asked for": {layout: "host-rhel", at: "/"},
		"GDS": {
			layout: "host-rhel", at: "/", options: Extras{GDS: true},
			nodes: []string{"/dev/nvidia-fs0", "/dev/nvidia-fs1"}, mounts: []string{"/etc/cufile.json", "/run/udev"},
		},
		"GDRCopy": {layout: "host-rhel", at: "/", options: Extras{GDRCopy: true}, nodes: []string{"/dev/gdrdrv"}},
		"MOFED": {
			layout: "host-rhel", at: "/", options: Extras{MOFED: true}, nodes: []string{"/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0"},
		},
		"IMEX": {
			layout: "host-rhel", at: "/", options: Extras{IMEXChannels: []int{0}, IMEXRequired: true},
			nodes: []string{"/dev/nvidia-caps-imex-channels/channel0"},
		},
		"all, below the driver root": {
			layout: "gpu-operator", at: "/run/nvidia/driver", options: Extras{GDS: true, GDRCopy: true, MOFED: true, IMEXChannels: []int{0}},
			nodes: []string{
				"/dev/gdrdrv", "/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0", "/dev/nvidia-caps-imex-channels/channel0",
				"/dev/nvidia-fs0", "/dev/nvidia-fs1",
			},
			mounts: []string{"/etc/cufile.json", "/run/udev"},
		},
		"those of the host beside a driver container": {
			layout: "gpu-operator", at: "/", options: Extras{GDRCopy: true, MOFED: true},
			nodes: []string{"/dev/gdrdrv", "/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0"},
		},
		"asked for and not there": {
			layout: "host-rhel", options: Extras{GDS: true, GDRCopy: true, MOFED: true, IMEXChannels: []int{0}},
		},
		"required and not there": {
			layout: "host-rhel", options: Extras{IMEXChannels: []int{0}, IMEXRequired: true},
			err: "requested IMEX channel channel0 does not exist",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			options := fixture(t, test.layout)
			root := layouts[test.layout].driverRoot
			writeFile(t, filepath.Join(options.HostRoot, root, "etc/cufile.json"), "{}")
			if err := os.MkdirAll(filepath.Join(options.HostRoot, root, "run/udev"), 0o755); err != nil {
				t.Fatal(err)
			}
			if test.at != "" {
				withExtras(t, options, test.at)
			}
			_, plain := contentsOf(t, options)
			options.Extras = test.options
			if test.err != "" {
				node := mustOpen(t, options)
				if _, err := node.ContainerEdits(t.Context()); err == nil || !strings.Contains(err.Error(), test.err) {
					t.Errorf("error %v, want %q", err, test.err)
				}
				return
			}
			spec, with := contentsOf(t, options)
			if strings.HasPrefix(name, "all") {
				golden.Compare(t, "testdata/cdi/extras.json", spec)
			}
			nodes := slices.DeleteFunc(with[0], func(path string) bool { return slices.Contains(plain[0], path) })
			mounts := slices.DeleteFunc(with[1], func(path string) bool { return slices.Contains(plain[1], path) })
			if diff := cmp.Diff(test.nodes, nodes, emptyIsNil); diff != "" {
				t.Errorf("nodes (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(test.mounts, mounts, emptyIsNil); diff != "" {
				t.Errorf("mounts (-want +got):\n%s", diff)
			}
		})
	}
}

var emptyIsNil = cmp.Transformer("list", func(list []string) []string { return append([]string{}, list...) })

// contentsOf returns the paths in containers of the common nodes and mounts. The host's paths must be those of the host.
func contentsOf(t *testing.T, options Options) (spec []byte, all [2][]string) {
	t.Helper()
	node := mustOpen(t, options)
	edits := mustEdit(t, node)
	if spec = encodeSpec(t, edits.Common, edits.Devices); strings.Contains(string(spec), options.HostRoot) {
		t.Errorf("the agent's view of the host's root is in the spec:\n%s", spec)
	}
	for _, d := range edits.Common.DeviceNodes {
		all[0] = append(all[0], d.Path)
	}
	for _, m := range edits.Common.Mounts {
		all[1] = append(all[1], m.ContainerPath)
	}
	slices.Sort(all[0])
	slices.Sort(all[1])
	return spec, all
}

// Another driver may be loaded, and its nodes created, long after the agent started.
func TestExtrasThatComeLater(t *testing.T) {
	options := fixture(t, "host-rhel")
	options.Extras = Extras{GDRCopy: true, MOFED: true}
	node := mustOpen(t, options)
	changed := node.Changed()
	makeNode(t, options.HostRoot, "/dev/infiniband/uverbs0", 231, 192)
	if err := node.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	select {
	case <-changed:
	default:
		t.Error("the CDI spec would not be written anew")
	}
}

// Without a channel that is required no GPU is offered, whichever way containers get it. With it, all are.
func TestRequiredIMEXChannel(t *testing.T) {
	options := fixture(t, "host-rhel")
	options.Extras = Extras{IMEXChannels: []int{0}, IMEXRequired: true}
	node := mustOpen(t, options)
	for _, g := range node.Inventory().GPUs {
		if g.Health.Reason != gpu.ReasonNotInjectable || g.Health.Message != "requested IMEX channel channel0 does not exist" || !readable(g) {
			t.Errorf("without it: health %+v", g.Health)
		}
	}
	makeNode(t, options.HostRoot, imexChannel(0), 500, 0)
	if err := node.ScanHealth(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, g := range node.Inventory().GPUs {
		if !g.Health.Healthy() {
			t.Errorf("with it: health %+v", g.Health)
		}
	}
	options.Extras.IMEXRequired = false
	options.Extras.IMEXChannels = []int{1}
	if g := mustOpen(t, options).Inventory().GPUs[0]; !g.Health.Healthy() {
		t.Errorf("without one that is not required: health %+v", g.Health)
	}
}
