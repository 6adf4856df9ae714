// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// serving starts kubelet and plugin and returns the client that kubelet uses.
func serving(t *testing.T, change func(*Config)) (*fixture, pluginapi.DevicePluginClient) {
	f := newFixture(t, release137)
	if change != nil {
		change(&f.config)
	}
	f.startKubelet()
	f.start()
	f.await("registration", registrations(1))
	client, err := f.kubelet.Plugin()
	if err != nil {
		t.Fatal(err)
	}
	return f, client
}

func allocation(containers ...[]string) *pluginapi.AllocateRequest {
	request := &pluginapi.AllocateRequest{}
	for _, ids := range containers {
		request.ContainerRequests = append(request.ContainerRequests, &pluginapi.ContainerAllocateRequest{DevicesIds: ids})
	}
	return request
}

func TestOptions(t *testing.T) {
	t.Parallel()
	f, client := serving(t, nil)
	for range 2 {
		got, err := client.GetDevicePluginOptions(context.Background(), &pluginapi.Empty{})
		if err != nil {
			t.Fatal(err)
		}
		want := &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true}
		if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
			t.Error(diff)
		}
	}
	if got := f.kubelet.State().Options; got.GetPreStartRequired() || !got.GetGetPreferredAllocationAvailable() {
		t.Errorf("kubelet was told %v", got)
	}
}

func TestAllocateAnswers(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for _, node := range []string{"nvidiactl", "nvidia-uvm", "nvidia3", "nvidia-caps-imex-channels/channel0"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(root, "dev", node)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, "dev", node), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	spec := func(path string) *pluginapi.DeviceSpec {
		return &pluginapi.DeviceSpec{ContainerPath: path, HostPath: "/run/nvidia/driver" + path, Permissions: "rw"}
	}
	control := []*pluginapi.DeviceSpec{spec("/dev/nvidiactl"), spec("/dev/nvidia-uvm")}
	both := uuid(3) + "," + uuid(1)
	cdi := []*pluginapi.CDIDevice{{Name: "k8s.gpu.nvidia.com/gpu=" + uuid(3)}, {Name: "k8s.gpu.nvidia.com/gpu=" + uuid(1)}}

	for name, test := range map[string]struct {
		change func(*Config)
		want   *pluginapi.ContainerAllocateResponse
	}{
		"default is CDI":           {nil, &pluginapi.ContainerAllocateResponse{CdiDevices: cdi}},
		"CDI ignores device specs": {func(c *Config) { c.PassDeviceSpecs = true }, &pluginapi.ContainerAllocateResponse{CdiDevices: cdi}},
		"annotations": {
			func(c *Config) {
				c.Strategies = []Strategy{StrategyCDIAnnotations}
				c.AnnotationPrefix = "example.com/"
			},
			&pluginapi.ContainerAllocateResponse{Annotations: map[string]string{"example.com/tandem_74e8ff401c345618": cdi[0].Name + "," + cdi[1].Name}},
		},
		"envvar with device specs": {
			func(c *Config) {
				c.Strategies, c.PassDeviceSpecs = []Strategy{StrategyEnvVar}, true
				c.DevRoot = func() (string, string) { return "/run/nvidia/driver", root }
			},
			&pluginapi.ContainerAllocateResponse{
				Envs:    map[string]string{"NVIDIA_VISIBLE_DEVICES": both},
				Devices: append(slices.Clone(control), spec("/dev/nvidia3"), spec("/dev/nvidia1")),
			},
		},
		"envvar by index": {
			func(c *Config) { c.Strategies, c.IndexIDs = []Strategy{StrategyEnvVar}, true },
			&pluginapi.ContainerAllocateResponse{Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": "3,1"}},
		},
		"other devices by envvar": {
			func(c *Config) {
				c.Strategies, c.PassDeviceSpecs = []Strategy{StrategyEnvVar}, true
				c.DevRoot = func() (string, string) { return "/run/nvidia/driver", root }
				c.Env, c.IMEXChannels = map[string]string{"NVIDIA_GDS": "enabled"}, []int{0, 1}
			},
			&pluginapi.ContainerAllocateResponse{
				Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": both, "NVIDIA_GDS": "enabled", "NVIDIA_IMEX_CHANNELS": "0"},
				Devices: append(slices.Clone(control), spec("/dev/nvidia3"), spec("/dev/nvidia1"),
					spec("/dev/nvidia-caps-imex-channels/channel0")),
			},
		},
		"other devices by mounts": {
			func(c *Config) {
				c.Strategies, c.IMEXChannels = []Strategy{StrategyVolumeMounts}, []int{0}
				c.DevRoot = func() (string, string) { return "/", root }
			},
			&pluginapi.ContainerAllocateResponse{
				Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"},
				Mounts: []*pluginapi.Mount{
					{HostPath: "/dev/null", ContainerPath: "/var/run/nvidia-container-devices/" + uuid(3)},
					{HostPath: "/dev/null", ContainerPath: "/var/run/nvidia-container-devices/" + uuid(1)},
					{HostPath: "/dev/null", ContainerPath: "/var/run/nvidia-container-devices/imex/0"},
				},
			},
		},
		"other devices by CDI": {
			func(c *Config) {
				c.Env, c.IMEXChannels = map[string]string{"NVIDIA_GDS": "enabled"}, []int{0}
				c.DevRoot = func() (string, string) { return "/", root }
			},
			&pluginapi.ContainerAllocateResponse{CdiDevices: cdi, Envs: map[string]string{"NVIDIA_GDS": "enabled"}},
		},
		"IMEX channels by envvar and mounts": {
			func(c *Config) {
				c.Strategies, c.IMEXChannels = []Strategy{StrategyEnvVar, StrategyVolumeMounts}, []int{0}
				c.DevRoot = func() (string, string) { return "/", root }
			},
			&pluginapi.ContainerAllocateResponse{
				Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices", "NVIDIA_IMEX_CHANNELS": "0"},
				Mounts: []*pluginapi.Mount{
					{HostPath: "/dev/null", ContainerPath: "/var/run/nvidia-container-devices/" + uuid(3)},
					{HostPath: "/dev/null", ContainerPath: "/var/run/nvidia-container-devices/" + uuid(1)},
					{HostPath: "/dev/null", ContainerPath: "/var/run/nvidia-container-devices/imex/0"},
				},
			},
		},
		"volume mounts win over envvar": {
			func(c *Config) { c.Strategies = []Strategy{StrategyVolumeMounts, StrategyEnvVar, StrategyCDI} },
			&pluginapi.ContainerAllocateResponse{
				Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"},
				Mounts: []*pluginapi.Mount{
					{HostPath: "/dev/null", ContainerPath: "/var/run/nvidia-container-devices/" + uuid(3)},
					{HostPath: "/dev/null", ContainerPath: "/var/run/nvidia-container-devices/" + uuid(1)},
				},
				CdiDevices: cdi,
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, client := serving(t, test.change)
			for range 2 { // init containers and containers share devices by asking again
				got, err := client.Allocate(context.Background(), allocation([]string{uuid(3), uuid(1)}))
				if err != nil {
					t.Fatal(err)
				}
				want := &pluginapi.AllocateResponse{ContainerResponses: []*pluginapi.ContainerAllocateResponse{test.want}}
				if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
					t.Error(diff)
				}
			}
			if holds := f.ledger.Holds(); len(holds) != 2 {
				t.Errorf("ledger has %v", holds)
			}
			if n := f.metric("tandem_allocate_duration_seconds"); n != 2 {
				t.Errorf("%v calls were measured, want 2", n)
			}
		})
	}
}

func TestAllocateSeveralContainers(t *testing.T) {
	t.Parallel()
	f, client := serving(t, nil)
	got, err := client.Allocate(context.Background(), allocation([]string{uuid(2)}, []string{uuid(7), uuid(6)}))
	if err != nil {
		t.Fatal(err)
	}
	if len(got.GetContainerResponses()) != 2 || len(got.GetContainerResponses()[1].GetCdiDevices()) != 2 || len(f.ledger.Holds()) != 3 {
		t.Errorf("got %v with holds %v", got, f.ledger.Holds())
	}
	f.ledger.claim("claim-1", 0)
	if _, err := client.Allocate(context.Background(), allocation([]string{uuid(1)}, []string{uuid(0)})); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("got %v", err)
	}
	if n := len(f.ledger.Holds()); n != 4 {
		t.Errorf("a refused call left %d holds, want the 4 from before", n)
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	f, client := serving(t, nil)
	f.inventory.setHealth(uuid(5), device.Health{Reason: device.ReasonLost, Message: "GPU is lost"})
	f.await("one unhealthy", healthyCount(7))
	const prefix = `invalid allocation request for "nvidia.com/gpu": invalid request: `
	for name, test := range map[string]struct {
		request *pluginapi.AllocateRequest
		code    codes.Code
		message string
	}{
		"no containers":               {allocation(), codes.InvalidArgument, prefix + "no container requests"},
		"no devices":                  {allocation([]string{}), codes.InvalidArgument, prefix + "no device IDs"},
		"no devices in the second":    {allocation([]string{uuid(1)}, nil), codes.InvalidArgument, prefix + "no device IDs"},
		"empty ID":                    {allocation([]string{""}), codes.InvalidArgument, prefix + "empty device ID"},
		"unknown":                     {allocation([]string{"GPU-no"}), codes.NotFound, prefix + "unknown device: GPU-no"},
		"duplicate":                   {allocation([]string{uuid(1), uuid(1)}), codes.InvalidArgument, prefix + "duplicate device: " + uuid(1)},
		"duplicate across containers": {allocation([]string{uuid(1)}, []string{uuid(1)}), codes.InvalidArgument, prefix + "duplicate device: " + uuid(1)},
		"lost":                        {allocation([]string{uuid(1), uuid(5)}), codes.FailedPrecondition, prefix + "unhealthy device: " + uuid(5) + ": Lost: GPU is lost"},
	} {
		t.Run(name, func(t *testing.T) {
			for range 2 {
				_, err := client.Allocate(context.Background(), test.request)
				if status.Code(err) != test.code || status.Convert(err).Message() != test.message {
					t.Errorf("got %v, want %s %q", err, test.code, test.message)
				}
			}
		})
	}
	if holds := f.ledger.Holds(); len(holds) != 0 {
		t.Errorf("refused calls left %v", holds)
	}

	t.Run("no CDI entry", func(t *testing.T) {
		f.specs.lack(uuid(2))
		defer f.specs.lack()
		_, err := client.Allocate(context.Background(), allocation([]string{uuid(2)}))
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), errTest.Error()) {
			t.Errorf("got %v", err)
		}
	})
}

// While no container can be given a device, kubelet hears that no free device is healthy. What a pod holds stays so, and an Allocate of a
// kubelet that has not heard of it yet succeeds: its container waits until the files are back, and a refusal would fail the pod for good.
func TestSpecsThatCannotBeRestored(t *testing.T) {
	t.Parallel()
	f, client := serving(t, nil)
	if _, err := client.Allocate(context.Background(), allocation([]string{uuid(4)})); err != nil {
		t.Fatal(err)
	}
	f.await("all", healthyCount(8))
	f.specs.fail(errTest)
	state := f.await("what a pod holds", healthyCount(1))
	if healthy := state.Healthy(); !slices.Equal(healthy, []string{uuid(4)}) {
		t.Errorf("healthy: %v", healthy)
	}
	if got := f.metric("tandem_device_plugin_devices", "resource=nvidia.com/gpu", "state=unhealthy"); got != 7 {
		t.Errorf("%v devices count as unhealthy", got)
	}
	for _, id := range []string{uuid(4), uuid(5)} {
		if _, err := client.Allocate(context.Background(), allocation([]string{id})); err != nil {
			t.Errorf("allocate %s: %v", id, err)
		}
	}
	f.specs.fail(nil)
	f.await("all again", healthyCount(8))
}

func TestConflicts(t *testing.T) {
	t.Parallel()
	f, client := serving(t, nil)
	if _, err := client.Allocate(context.Background(), allocation([]string{uuid(4)})); err != nil {
		t.Fatal(err)
	}
	f.ledger.amend(uuid(4), func(h ledger.Hold) error {
		return f.ledger.Identify(h, ledger.Pod{UID: "1", Namespace: "secret-namespace", Name: "secret-pod"})
	})
	f.ledger.drain(uuid(4))
	f.ledger.claim("claim-uid-3", 3)
	f.await("both withdrawn", healthyCount(6))
	for id, holder := range map[string]string{
		uuid(3): "(gpu-3) is held by claim claim-uid-3 (held)",
		uuid(4): "(gpu-4) is held by a pod that is gone but whose containers may still run",
	} {
		_, err := client.Allocate(context.Background(), allocation([]string{uuid(1), id}))
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "device "+id+" "+holder) {
			t.Errorf("got %v", err)
		}
		event := f.event()
		if !strings.HasPrefix(event, "Warning PodConflict ") || !strings.Contains(event, id+" "+holder) {
			t.Errorf("recorded %q", event)
		}
		if strings.Contains(event+err.Error(), "secret") {
			t.Errorf("other namespaces' names leak: %q, %v", event, err)
		}
	}
	if got := f.metric("tandem_allocate_conflicts_total"); got != 2 {
		t.Errorf("counted %v conflicts", got)
	}
	if got := f.metric("tandem_device_plugin_devices", "resource=nvidia.com/gpu", "state=withdrawn"); got != 2 {
		t.Errorf("%v devices withdrawn", got)
	}
}

func TestPreferredAllocation(t *testing.T) {
	t.Parallel()
	f, client := serving(t, nil)
	all := []string{}
	for i := range 8 {
		all = append(all, uuid(i))
	}
	for name, test := range map[string]struct {
		held      []int
		available []string
		required  []string
		size      int32
		want      []string
	}{
		"from the other end":           {nil, all, nil, 1, []string{uuid(7)}},
		"within a NUMA node":           {nil, all, nil, 2, []string{uuid(7), uuid(6)}},
		"not what claims hold":         {[]int{7, 5}, all, nil, 2, []string{uuid(6), uuid(4)}},
		"not even for want of others":  {[]int{7}, []string{uuid(7)}, nil, 1, nil},
		"unless kubelet insists":       {[]int{7}, all, []string{uuid(7)}, 2, []string{uuid(7), uuid(6)}},
		"required not among available": {nil, []string{uuid(1)}, []string{uuid(2)}, 2, []string{uuid(2), uuid(1)}},
		"duplicates":                   {nil, []string{uuid(1), uuid(1), uuid(2)}, []string{uuid(1), uuid(1)}, 2, []string{uuid(2), uuid(1)}},
		"unknown IDs fill up last":     {nil, []string{"GPU-a", uuid(1), "GPU-b"}, nil, 2, []string{uuid(1), "GPU-b"}},
		"unknown and required":         {nil, all, []string{"GPU-a"}, 2, []string{"GPU-a", uuid(7)}},
		"too many":                     {nil, []string{uuid(0), uuid(3)}, nil, 5, []string{uuid(3), uuid(0)}},
		"none":                         {nil, all, nil, 0, nil},
		"negative":                     {nil, all, []string{uuid(1), "GPU-a"}, -1, nil},
		"nothing available":            {nil, nil, nil, 3, nil},
	} {
		t.Run(name, func(t *testing.T) {
			if len(test.held) > 0 {
				f.ledger.claim("c", test.held...)
				defer f.ledger.release("c")
			}
			for range 2 {
				got, err := client.GetPreferredAllocation(context.Background(), &pluginapi.PreferredAllocationRequest{
					ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: test.available, MustIncludeDeviceIDs: test.required, AllocationSize: test.size}},
				})
				if err != nil {
					t.Fatal(err)
				}
				if len(got.GetContainerResponses()) != 1 || !slices.Equal(got.GetContainerResponses()[0].GetDeviceIDs(), test.want) {
					t.Errorf("got %v, want %v", got, test.want)
				}
			}
		})
	}
	if got, err := client.GetPreferredAllocation(context.Background(), &pluginapi.PreferredAllocationRequest{}); err != nil || len(got.GetContainerResponses()) != 0 {
		t.Errorf("no containers: got %v, %v", got, err)
	}
}
