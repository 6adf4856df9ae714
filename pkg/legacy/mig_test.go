// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

const (
	oneSlice = "nvidia.com/mig-1g.10gb"
	half     = "nvidia.com/mig-3g.40gb"
)

// part is partition MIG-<gpu>-<start>.
func part(gpu, start int, profile string) device.Partition {
	size := 1
	if strings.HasPrefix(profile, "3g") {
		size = 4
	}
	return device.Partition{
		UUID: fmt.Sprintf("MIG-%d-%d", gpu, start), Parent: gpu, Profile: profile, Index: start,
		Ref:  device.Ref{GPU: uuid(gpu), Placement: device.Placement{Start: start, Size: size}},
		Caps: [2]int{100*gpu + start, 100*gpu + start + 50},
	}
}

// cut sets the partitions of a GPU.
func (f fakeInventory) cut(gpu int, dynamic bool, parts ...device.Partition) {
	f.set(func(inv device.Inventory) device.Inventory {
		inv.GPUs = slices.Clone(inv.GPUs)
		g := &inv.GPUs[gpu]
		g.MIGCapable, g.MIGEnabled, g.Dynamic, g.Partitions = true, len(parts) > 0, dynamic, parts
		return inv
	})
}

// partitioned is a node of 4 GPUs of which 2 and 3 have partitions.
func partitioned(t *testing.T, strategy device.MIGStrategy, change func(*fixture)) *fixture {
	t.Helper()
	f := newFixture(t, release137)
	f.inventory.set(func(device.Inventory) device.Inventory { return islands(4, 2, 0) })
	f.inventory.cut(2, false, part(2, 0, "1g.10gb"), part(2, 1, "1g.10gb"), part(2, 4, "3g.40gb"))
	f.inventory.cut(3, false, part(3, 0, "1g.10gb"), part(3, 6, "1g.10gb"))
	f.config.Resources.Strategy = strategy
	if change != nil {
		change(f)
	}
	f.startKubelet()
	return f
}

// lists waits until kubelet has exactly these resources with these healthy devices: "gpu=GPU-0,GPU-1".
func (f *fixture) lists(want ...string) kubeletState {
	f.Helper()
	described := func(s kubeletState) []string {
		var lists []string
		for resource := range s.Of {
			ids := strings.Join(s.HealthyOf(resource), ",")
			ids = strings.NewReplacer("GPU-0000000", "", "-0000-0000-0000-000000000000", "", "MIG-", "").Replace(ids)
			lists = append(lists, strings.TrimPrefix(resource, "nvidia.com/")+"="+ids)
		}
		slices.Sort(lists)
		return lists
	}
	slices.Sort(want)
	var last []string
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	state, err := f.kubelet.Await(ctx, func(s kubeletState) bool { last = described(s); return slices.Equal(last, want) })
	if err != nil {
		f.Fatalf("kubelet has %q, want %q", last, want)
	}
	return state
}

func (f *fixture) plugin(resource string) pluginapi.DevicePluginClient {
	f.Helper()
	client, err := f.kubelet.PluginOf(resource)
	if err != nil {
		f.Fatal(err)
	}
	return client
}

func (f *fixture) claimRef(uid string, ref device.Ref) {
	f.Helper()
	if _, err := f.ledger.ReserveClaim(context.Background(), ledger.ClaimRequest{UID: uid, Devices: []device.Ref{ref}}); err != nil {
		f.Fatal(err)
	}
}

// Each strategy against kubelet, with what it leaves out.
func TestStrategies(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		strategy device.MIGStrategy
		want     []string
		excluded string
	}{
		{device.MIGStrategyNone, []string{"gpu=0,1,2,3"}, ""},
		{device.MIGStrategyMixed, []string{"gpu=0,1", "mig-1g.10gb=2-0,2-1,3-0,3-6", "mig-3g.40gb=2-4"}, ""},
		{device.MIGStrategySingle, []string{"gpu=0,1"}, "all devices on the node must be configured with the same migEnabled value"},
	} {
		t.Run(string(tt.strategy), func(t *testing.T) {
			t.Parallel()
			f := partitioned(t, tt.strategy, nil)
			p, _ := f.start()
			f.lists(tt.want...)
			f.awaitReady(p, "")
			if tt.excluded == "" {
				return
			}
			if event := f.event(); !strings.Contains(event, "DevicesExcluded") || !strings.Contains(event, tt.excluded) || !strings.Contains(event, "MIG-2-0") {
				t.Errorf("recorded %q", event)
			}
			if n := f.metric("tandem_device_plugin_devices_excluded"); n != 5 {
				t.Errorf("%v devices are left out by the metric", n)
			}
		})
	}
}

// A partition that is unlike the others is left out and told of, and the others are served.
func TestBadPartitionIsLeftOut(t *testing.T) {
	t.Parallel()
	f := partitioned(t, device.MIGStrategySingle, func(f *fixture) {
		for gpu := range 4 {
			f.inventory.cut(gpu, false, part(gpu, 0, "1g.10gb"), part(gpu, 1, "1g.10gb"))
		}
		f.inventory.cut(1, false, part(1, 0, "1g.10gb"), part(1, 4, "3g.40gb"))
	})
	f.start()
	f.lists("gpu=0-0,0-1,1-0,2-0,2-1,3-0,3-1")
	if event := f.event(); !strings.Contains(event, "gpu-1-mig-3g40gb") || !strings.Contains(event, "more than one MIG device type present on node") {
		t.Errorf("recorded %q", event)
	}
	// It is put right, without a restart.
	f.inventory.cut(1, false, part(1, 0, "1g.10gb"), part(1, 1, "1g.10gb"))
	f.lists("gpu=0-0,0-1,1-0,1-1,2-0,2-1,3-0,3-1")
	for f.metric("tandem_device_plugin_devices_excluded") != 0 {
		time.Sleep(time.Millisecond)
	}
}

func TestAllocatePartitions(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "dev"), 0o755); err != nil {
		t.Fatal(err)
	}
	spec := func(path string) *pluginapi.DeviceSpec {
		return &pluginapi.DeviceSpec{ContainerPath: path, HostPath: path, Permissions: "rw"}
	}
	for name, test := range map[string]struct {
		change func(*Config)
		want   *pluginapi.ContainerAllocateResponse
	}{
		"CDI": {nil, &pluginapi.ContainerAllocateResponse{CdiDevices: []*pluginapi.CDIDevice{
			{Name: "k8s.gpu.nvidia.com/gpu=MIG-2-1"}, {Name: "k8s.gpu.nvidia.com/gpu=MIG-2-0"},
		}}},
		"envvar with device nodes": {
			func(c *Config) {
				c.Strategies, c.PassDeviceSpecs = []Strategy{StrategyEnvVar}, true
				c.DevRoot = func() (string, string) { return "/", root }
			},
			&pluginapi.ContainerAllocateResponse{
				Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": "MIG-2-1,MIG-2-0"},
				Devices: []*pluginapi.DeviceSpec{
					spec("/dev/nvidia2"), spec("/dev/nvidia-caps/nvidia-cap201"), spec("/dev/nvidia-caps/nvidia-cap251"),
					spec("/dev/nvidia-caps/nvidia-cap200"), spec("/dev/nvidia-caps/nvidia-cap250"),
				},
			},
		},
		"envvar by index": {
			func(c *Config) { c.Strategies, c.IndexIDs = []Strategy{StrategyEnvVar}, true },
			&pluginapi.ContainerAllocateResponse{Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": "2:1,2:0"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := partitioned(t, device.MIGStrategyMixed, func(f *fixture) {
				if test.change != nil {
					test.change(&f.config)
				}
			})
			f.start()
			f.lists("gpu=0,1", "mig-1g.10gb=2-0,2-1,3-0,3-6", "mig-3g.40gb=2-4")
			for range 2 {
				got, err := f.plugin(oneSlice).Allocate(context.Background(), allocation([]string{"MIG-2-1", "MIG-2-0"}))
				if err != nil {
					t.Fatal(err)
				}
				want := &pluginapi.AllocateResponse{ContainerResponses: []*pluginapi.ContainerAllocateResponse{test.want}}
				if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
					t.Error(diff)
				}
			}
			for _, h := range f.ledger.Holds() {
				if h.Resource != oneSlice || h.Device.Whole() {
					t.Errorf("holds %+v", h)
				}
			}
			if n := len(f.ledger.Holds()); n != 2 {
				t.Errorf("%d holds", n)
			}
			// An ID is known to its own resource alone.
			for range 2 {
				for resource, id := range map[string]string{half: "MIG-3-0", kubeletGPU: "MIG-3-0", oneSlice: uuid(0)} {
					if _, err := f.plugin(resource).Allocate(context.Background(), allocation([]string{id})); status.Code(err) != codes.NotFound {
						t.Errorf("%s of %s: %v", id, resource, err)
					}
				}
			}
		})
	}
}

// Partitions come and go while the agent runs, and with them resources.
func TestPartitionsComeAndGo(t *testing.T) {
	t.Parallel()
	eachRelease(t, func(t *testing.T, release kubeletRelease) {
		f := newFixture(t, release)
		f.inventory.set(func(device.Inventory) device.Inventory { return islands(4, 2, 0) })
		f.config.Resources.Strategy = device.MIGStrategyMixed
		f.startKubelet()
		p, _ := f.start(func(times *times) { times.retireAfter = time.Hour })
		f.lists("gpu=0,1,2,3")
		f.inventory.cut(3, false, part(3, 0, "1g.10gb"), part(3, 4, "3g.40gb"))
		f.lists("gpu=0,1,2", "mig-1g.10gb=3-0", "mig-3g.40gb=3-4")
		if _, err := f.plugin(oneSlice).Allocate(context.Background(), allocation([]string{"MIG-3-0"})); err != nil {
			t.Fatal(err)
		}
		// Kubelet looks up what pods have without checking that it is there.
		f.inventory.cut(3, false, part(3, 5, "1g.10gb"), part(3, 6, "1g.10gb"))
		state := f.lists("gpu=0,1,2", "mig-1g.10gb=3-5,3-6", "mig-3g.40gb=")
		if ids := len(state.Of[oneSlice]) + len(state.Of[half]) + len(state.Of[kubeletGPU]); ids != 3+1+4 {
			t.Errorf("%d IDs are listed: %v", ids, state.Of)
		}
		for _, resource := range []string{oneSlice, half} {
			if n := f.metric("tandem_device_plugin_devices", "resource="+resource, "state=unhealthy"); n != 0 {
				t.Errorf("%v partitions of %s that were removed count as unhealthy", n, resource)
			}
		}
		if _, err := f.plugin(half).Allocate(context.Background(), allocation([]string{"MIG-3-4"})); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("what is gone was allocated: %v", err)
		}
		f.kubelet.Kill()
		f.startKubelet()
		f.lists("gpu=0,1,2", "mig-1g.10gb=3-5,3-6", "mig-3g.40gb=")
		f.awaitReady(p, "")
	})
}

// A device that no pod holds and that no longer exists leaves the list after a while, and a resource without devices is not
// served.
func TestRetirement(t *testing.T) {
	t.Parallel()
	f := partitioned(t, device.MIGStrategyMixed, nil)
	_, stop := f.start(func(times *times) { times.retireAfter = 300 * time.Millisecond })
	f.lists("gpu=0,1", "mig-1g.10gb=2-0,2-1,3-0,3-6", "mig-3g.40gb=2-4")
	if _, err := f.plugin(oneSlice).Allocate(context.Background(), allocation([]string{"MIG-2-0"})); err != nil {
		t.Fatal(err)
	}
	f.inventory.cut(2, false)
	state := f.await("only what a limit has left of the GPU", func(s kubeletState) bool {
		return len(s.Of[oneSlice]) == 3 && len(s.Of[kubeletGPU]) == 3 && len(s.Connected) == 2
	})
	if i := slices.IndexFunc(state.Of[oneSlice], func(d *pluginapi.Device) bool { return d.GetID() == "MIG-2-0" }); i < 0 || state.Of[oneSlice][i].GetHealth() == pluginapi.Healthy {
		t.Errorf("lists %v", state.Of[oneSlice])
	}
	f.ledger.release("MIG-2-0")
	f.await("nothing left of the GPU", func(s kubeletState) bool { return len(s.Of[oneSlice]) == 2 })
	f.inventory.cut(2, false, part(2, 4, "3g.40gb"))
	f.await("the resource to return", func(s kubeletState) bool { return len(s.HealthyOf(half)) == 1 && len(s.Connected) == 3 })
	stop()
	if left, err := sockets(f.dir); err != nil || len(left) != 1 {
		t.Errorf("left %v", left)
	}
}

// A device is withdrawn while another holder has hardware that overlaps it.
func TestOverlap(t *testing.T) {
	t.Parallel()
	whole := func(gpu int) device.Ref { return device.Ref{GPU: uuid(gpu)} }
	t.Run("claims of partitions against limits of GPUs", func(t *testing.T) {
		t.Parallel()
		f := partitioned(t, device.MIGStrategyNone, nil)
		f.start()
		f.lists("gpu=0,1,2,3")
		f.claimRef("c", part(2, 1, "1g.10gb").Ref)
		f.lists("gpu=0,1,3")
		for range 2 {
			if _, err := f.plugin(kubeletGPU).Allocate(context.Background(), allocation([]string{uuid(2)})); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "gpu-2-mig-1g10gb") {
				t.Errorf("got %v", err)
			}
		}
		if _, err := f.plugin(kubeletGPU).Allocate(context.Background(), allocation([]string{uuid(3)})); err != nil {
			t.Fatal(err)
		}
		if _, err := f.ledger.ReserveClaim(canceled(), ledger.ClaimRequest{UID: "late", Devices: []device.Ref{part(3, 0, "1g.10gb").Ref}}); err == nil {
			t.Error("a claim has a partition of a GPU that a limit has")
		}
		f.ledger.release("c")
		f.lists("gpu=0,1,2,3")
	})
	t.Run("claims of GPUs and partitions against limits of partitions", func(t *testing.T) {
		t.Parallel()
		claims := allocations{newObservable[[]device.Ref](nil)}
		f := partitioned(t, device.MIGStrategyMixed, func(f *fixture) { f.config.Allocations = claims })
		f.start()
		f.lists("gpu=0,1", "mig-1g.10gb=2-0,2-1,3-0,3-6", "mig-3g.40gb=2-4")
		f.claimRef("c", whole(2))
		f.claimRef("d", part(3, 6, "1g.10gb").Ref)
		f.lists("gpu=0,1", "mig-1g.10gb=3-0", "mig-3g.40gb=")
		if _, err := f.plugin(half).Allocate(context.Background(), allocation([]string{"MIG-2-4"})); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("got %v", err)
		}
		f.ledger.release("c")
		f.lists("gpu=0,1", "mig-1g.10gb=2-0,2-1,3-0", "mig-3g.40gb=2-4")
		// What claims are only allocated is withdrawn as well.
		claims.set(func([]device.Ref) []device.Ref { return []device.Ref{part(2, 4, "3g.40gb").Ref} })
		f.lists("gpu=0,1", "mig-1g.10gb=2-0,2-1,3-0", "mig-3g.40gb=")
	})
	t.Run("a dynamic GPU", func(t *testing.T) {
		t.Parallel()
		f := partitioned(t, device.MIGStrategyMixed, func(f *fixture) {
			f.inventory.cut(2, true)
			f.inventory.cut(3, true)
		})
		p, _ := f.start()
		f.lists("gpu=0,1,2,3")
		made := part(3, 0, "1g.10gb")
		made.Made = true
		f.claimRef("c", made.Ref)
		f.lists("gpu=0,1,2")
		f.inventory.cut(3, true, made)
		for len(p.lists.devices(kubeletGPU).items[3].GPU.Partitions) == 0 {
			time.Sleep(time.Millisecond)
		}
		f.ledger.release("c")
		if _, err := f.plugin(kubeletGPU).Allocate(context.Background(), allocation([]string{uuid(3)})); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("a GPU in MIG mode was allocated: %v", err)
		}
		state := f.lists("gpu=0,1,2")
		if len(state.Of) != 1 || len(state.Devices) != 4 {
			t.Errorf("lists %v", state.Of)
		}
		f.inventory.cut(3, true)
		f.lists("gpu=0,1,2,3")
	})
}

func canceled() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// Devices that pods hold by a resource that is no longer served stay in kubelet's account of that resource, and in no other.
func TestChangeOfStrategy(t *testing.T) {
	t.Parallel()
	f := partitioned(t, device.MIGStrategySingle, func(f *fixture) {
		for gpu := range 4 {
			f.inventory.cut(gpu, false, part(gpu, 0, "1g.10gb"))
		}
		if err := f.ledger.ReservePod([]ledger.PodRequest{{ID: "MIG-1-0", Resource: oneSlice, Device: part(1, 0, "1g.10gb").Ref}}); err != nil {
			f.Fatal(err)
		}
	})
	f.start()
	f.lists("gpu=0-0,2-0,3-0", "mig-1g.10gb=1-0")
	for range 2 {
		if _, err := f.plugin(kubeletGPU).Allocate(context.Background(), allocation([]string{"MIG-1-0"})); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("got %v", err)
		}
	}
	f.ledger.release("MIG-1-0")
	f.lists("gpu=0-0,1-0,2-0,3-0", "mig-1g.10gb=")
}

func TestPreferredPartitions(t *testing.T) {
	t.Parallel()
	for packed, tests := range map[bool]map[int32]string{
		false: {1: "3-6", 2: "3-6 2-1", 3: "3-6 2-1 3-0", 9: "3-6 2-1 3-0 2-0"},
		true:  {1: "2-1", 2: "2-1 2-0", 3: "2-1 2-0 3-6"},
	} {
		f := partitioned(t, device.MIGStrategyMixed, func(f *fixture) { f.config.Packed = packed })
		p, _ := f.start()
		f.lists("gpu=0,1", "mig-1g.10gb=2-0,2-1,3-0,3-6", "mig-3g.40gb=2-4")
		f.claimRef("c", part(2, 4, "3g.40gb").Ref)
		all := []string{"MIG-2-0", "MIG-2-1", "MIG-3-0", "MIG-3-6"}
		for size, want := range tests {
			for range 2 {
				got := p.Preferred(oneSlice, &pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
					{AvailableDeviceIDs: all, AllocationSize: size},
				}})
				ids := strings.ReplaceAll(strings.Join(got.GetContainerResponses()[0].GetDeviceIDs(), " "), "MIG-", "")
				if ids != want {
					t.Errorf("packed %v, %d: %s, want %s", packed, size, ids, want)
				}
			}
		}
		got := p.Preferred(oneSlice, &pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
			{AvailableDeviceIDs: all, MustIncludeDeviceIDs: []string{"MIG-3-0"}, AllocationSize: 2},
		}})
		if ids := got.GetContainerResponses()[0].GetDeviceIDs(); len(ids) != 2 || ids[0] != "MIG-3-0" {
			t.Errorf("packed %v: %v", packed, ids)
		}
	}
}

// A GPU or partition is offered once the runtime can be told of it. What a limit has already does not wait.
func TestPartitionsWithoutACDIEntry(t *testing.T) {
	t.Parallel()
	for strategy, want := range map[Strategy][]string{
		StrategyCDI:    {"gpu=1", "mig-1g.10gb=2-1,3-0,3-6"},
		StrategyEnvVar: {"gpu=0,1", "mig-1g.10gb=2-0,2-1,3-0,3-6"},
	} {
		f := partitioned(t, device.MIGStrategyMixed, func(f *fixture) {
			f.config.Strategies = []Strategy{strategy}
			f.specs.lack(uuid(0), "MIG-2-0", "MIG-3-0")
			if err := f.ledger.ReservePod([]ledger.PodRequest{{ID: "MIG-3-0", Resource: oneSlice, Device: part(3, 0, "1g.10gb").Ref}}); err != nil {
				t.Fatal(err)
			}
		})
		f.start()
		f.lists(append(want, "mig-3g.40gb=2-4")...)
		f.specs.lack()
		f.lists("gpu=0,1", "mig-1g.10gb=2-0,2-1,3-0,3-6", "mig-3g.40gb=2-4")
	}
}

// Another plugin that serves partitions of our GPUs stands in the way, whatever its strategy.
func TestForeignPartitions(t *testing.T) {
	t.Parallel()
	f := partitioned(t, device.MIGStrategyNone, nil)
	p, _ := f.start()
	f.lists("gpu=0,1,2,3")
	for ids, want := range map[string]int{"MIG-2-1": 1, "MIG-2-1::3": 1, "MIG-" + uuid(1) + "/7/0": 1, "MIG-9-9": 0} {
		if got := p.ours([]string{ids}); len(got) != want {
			t.Errorf("%s: %v", ids, got)
		}
	}
}
