// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// fakeSharing returns why some GPUs are not available. The others have a daemon each if that is the policy.
type fakeSharing struct {
	*observable[map[string]error]
	asked *atomic.Int64
}

func newFakeSharing() fakeSharing {
	return fakeSharing{newObservable[map[string]error](nil), &atomic.Int64{}}
}

func (f fakeSharing) Client(d device.Device, share device.Share) (*sharing.Client, error) {
	f.asked.Add(1)
	if err := f.get()[d.GPU.UUID]; err != nil {
		return nil, err
	}
	if d.Sharing().Strategy != device.MPS {
		return nil, nil
	}
	dir := "/run/tandem/mps/" + d.Name()
	return &sharing.Client{
		Env:    map[string]string{"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": fmt.Sprint("0=", share.Bytes>>20, "M")},
		Mounts: map[string]string{"/tmp/nvidia-mps": dir + "/pipe", "/dev/shm": dir + "/shm"},
	}, nil
}

var errNotReady = errors.New("device gpu-0: MPS daemon gpu-0-abcd is not ready")

// unready says of which GPUs.
func (f fakeSharing) unready(gpus ...int) {
	f.set(func(map[string]error) map[string]error {
		of := map[string]error{}
		for _, gpu := range gpus {
			of[uuid(gpu)] = errNotReady
		}
		return of
	})
}

// byMPS are GPUs of which the first are shared by MPS, with so many replicas.
func byMPS(gpus, first, replicas int) device.Inventory {
	inv := shared(gpus, first, device.Replicas{Count: replicas})
	for i := range first {
		inv.GPUs[i].Sharing.Strategy = device.MPS
	}
	return inv
}

func replicaOf(gpu, n int) string { return device.ReplicaID(uuid(gpu), n) }

// A device that is not available now is not offered, replicas and whole GPUs alike, but stays with the pod that holds it.
func TestUnreadyIsNotOffered(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		unready []int
		held    string
		away    []string
	}{
		"all are ready":          {nil, "", nil},
		"a daemon is not ready":  {[]int{0}, "", []string{replicaOf(0, 0), replicaOf(0, 1)}},
		"a limit has a replica":  {[]int{0}, replicaOf(0, 1), []string{replicaOf(0, 0)}},
		"a whole GPU is not yet": {[]int{2}, "", []string{uuid(2)}},
		"a limit has a GPU":      {[]int{1, 2}, uuid(2), []string{replicaOf(1, 0), replicaOf(1, 1)}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, release137)
			f.inventory.set(func(device.Inventory) device.Inventory { return byMPS(3, 2, 2) })
			daemons := newFakeSharing()
			daemons.unready(test.unready...)
			f.config.Sharing = daemons
			want := map[string]string{uuid(2): pluginapi.Healthy}
			for _, id := range []string{replicaOf(0, 0), replicaOf(0, 1), replicaOf(1, 0), replicaOf(1, 1)} {
				want[id] = pluginapi.Healthy
			}
			for _, id := range test.away {
				want[id] = pluginapi.Unhealthy
			}
			if test.held != "" {
				ref := device.Ref{GPU: device.HardwareUUID(test.held)}
				share := device.Replica(24*gib, 2)
				if test.held == ref.GPU {
					share = device.Share{}
				}
				request := ledger.PodRequest{ID: test.held, Resource: "nvidia.com/gpu", Device: ref, Share: share}
				if err := f.ledger.ReservePod([]ledger.PodRequest{request}); err != nil {
					t.Fatal(err)
				}
			}
			p, err := New(f.config)
			if err != nil {
				t.Fatal(err)
			}
			lists, _ := p.Refresh(time.Now())
			if diff := cmp.Diff(want, health(lists["nvidia.com/gpu"])); diff != "" {
				t.Error(diff)
			}
			// Kubelet's list may be older.
			available := make([]string, 0, len(want))
			for id := range maps.Keys(want) {
				available = append(available, id)
			}
			chosen := p.Preferred("nvidia.com/gpu", &pluginapi.PreferredAllocationRequest{
				ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: available, AllocationSize: 5}},
			}).ContainerResponses[0].DeviceIDs
			for _, id := range chosen {
				if want[id] != pluginapi.Healthy {
					t.Errorf("%s is preferred", id)
				}
			}
		})
	}
}

// kubelet gets a new list when daemons start and stop, although nothing else changes. No GPU counts as unhealthy meanwhile.
func TestListFollowsDaemons(t *testing.T) {
	t.Parallel()
	daemons := newFakeSharing()
	f, _ := serving(t, func(c *Config) {
		c.Inventory.(fakeInventory).set(func(device.Inventory) device.Inventory { return byMPS(3, 2, 4) })
		c.Sharing = daemons
	})
	f.await("all", healthyCount(9))
	daemons.unready(0)
	f.await("the replicas of a GPU to go", healthyCount(5))
	for state, want := range map[string]float64{"withdrawn": 4, "unhealthy": 0} {
		if n := f.metric("tandem_device_plugin_devices", "resource=nvidia.com/gpu", "state="+state); n != want {
			t.Errorf("%v are %s, want %v", n, state, want)
		}
	}
	daemons.unready()
	f.await("their return", healthyCount(9))
}

// A new list costs one question for each device, however many replicas it has.
func TestDaemonsAreAskedForOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.inventory.set(func(device.Inventory) device.Inventory { return byMPS(8, 8, 48) })
	daemons := newFakeSharing()
	f.config.Sharing = daemons
	p, err := New(f.config)
	if err != nil {
		t.Fatal(err)
	}
	if p.Refresh(time.Now()); daemons.asked.Load() != 8 {
		t.Errorf("asked %d times about 8 GPUs", daemons.asked.Load())
	}
}

func TestAllocateOfDaemons(t *testing.T) {
	t.Parallel()
	id := replicaOf(0, 3)
	cdi := []*pluginapi.CDIDevice{{Name: "k8s.gpu.nvidia.com/gpu=" + uuid(0)}}
	mounts := []*pluginapi.Mount{
		{HostPath: "/run/tandem/mps/gpu-0/shm", ContainerPath: "/dev/shm"},
		{HostPath: "/run/tandem/mps/gpu-0/pipe", ContainerPath: "/tmp/nvidia-mps"},
	}
	env := func(visible string) map[string]string {
		env := map[string]string{"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=6144M"}
		if visible != "" {
			env["NVIDIA_VISIBLE_DEVICES"] = visible
		}
		return env
	}
	const listed = "/var/run/nvidia-container-devices"
	inPlaceOf := []*pluginapi.Mount{{HostPath: "/dev/null", ContainerPath: listed + "/" + uuid(0)}, mounts[0], mounts[1]}
	for name, test := range map[string]struct {
		strategies []Strategy
		want       *pluginapi.ContainerAllocateResponse
	}{
		"CDI": {[]Strategy{StrategyCDI}, &pluginapi.ContainerAllocateResponse{CdiDevices: cdi, Envs: env(""), Mounts: mounts}},
		"annotations": {[]Strategy{StrategyCDIAnnotations}, &pluginapi.ContainerAllocateResponse{
			Annotations: map[string]string{(&Plugin{config: Config{AnnotationPrefix: "cdi.k8s.io/"}}).annotationKey(cdi[0].Name): cdi[0].Name},
			Envs:        env(""), Mounts: mounts,
		}},
		"envvar":        {[]Strategy{StrategyEnvVar}, &pluginapi.ContainerAllocateResponse{Envs: env(uuid(0)), Mounts: mounts}},
		"volume mounts": {[]Strategy{StrategyVolumeMounts}, &pluginapi.ContainerAllocateResponse{Envs: env(listed), Mounts: inPlaceOf}},
		"all of them": {[]Strategy{StrategyEnvVar, StrategyVolumeMounts, StrategyCDI}, &pluginapi.ContainerAllocateResponse{
			CdiDevices: cdi, Envs: env(listed), Mounts: inPlaceOf,
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, client := serving(t, func(c *Config) {
				c.Inventory.(fakeInventory).set(func(device.Inventory) device.Inventory { return byMPS(2, 1, 4) })
				c.Sharing, c.Strategies = newFakeSharing(), test.strategies
			})
			for range 2 { // an init container, and the next one
				got, err := client.Allocate(t.Context(), allocation([]string{id}))
				if err != nil {
					t.Fatal(err)
				}
				want := &pluginapi.AllocateResponse{ContainerResponses: []*pluginapi.ContainerAllocateResponse{test.want}}
				if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
					t.Error(diff)
				}
			}
			// A container with a GPU of its own is no client of a daemon, beside a container that is.
			got, err := client.Allocate(t.Context(), allocation([]string{uuid(1)}, []string{replicaOf(0, 2)}))
			if err != nil {
				t.Fatal(err)
			}
			alone, other := got.GetContainerResponses()[0], got.GetContainerResponses()[1]
			if alone.GetEnvs()["CUDA_MPS_PIPE_DIRECTORY"] != "" || strings.Contains(fmt.Sprint(alone.GetMounts()), "shm") {
				t.Errorf("answered %v", alone)
			}
			if diff := cmp.Diff(test.want.GetMounts(), other.GetMounts(), protocmp.Transform()); diff != "" {
				t.Error(diff)
			}
			if holds := f.ledger.Holds(); len(holds) != 3 {
				t.Errorf("ledger has %v", holds)
			}
		})
	}
}

func TestRefusalsOfDaemons(t *testing.T) {
	t.Parallel()
	daemons := newFakeSharing()
	var hooked *aroundReserving
	f, client := serving(t, func(c *Config) {
		c.Inventory.(fakeInventory).set(func(device.Inventory) device.Inventory { return byMPS(4, 2, 4) })
		hooked = &aroundReserving{book: c.Ledger.(*book)}
		c.Sharing, c.Ledger = daemons, hooked
	})
	f.await("all", healthyCount(10))
	daemons.unready(0, 3)
	hooked.before = func() { t.Error("something was reserved for a moment") }
	const tooMany = `invalid allocation request for "nvidia.com/gpu": invalid request: maximum request size for shared resources is 1; found `
	unready := "allocate nvidia.com/gpu: " + errNotReady.Error()
	for name, test := range map[string]struct {
		containers [][]string
		code       codes.Code
		message    string
	}{
		"a daemon that is not ready":       {[][]string{{replicaOf(0, 0)}}, codes.Unavailable, unready},
		"for the second container":         {[][]string{{replicaOf(1, 0)}, {replicaOf(0, 0)}}, codes.Unavailable, unready},
		"a whole GPU still has a daemon":   {[][]string{{uuid(2), uuid(3)}}, codes.Unavailable, unready},
		"two clients of one daemon":        {[][]string{{replicaOf(1, 0), replicaOf(1, 1)}}, codes.InvalidArgument, tooMany + "2"},
		"two daemons":                      {[][]string{{replicaOf(0, 0), replicaOf(1, 0), replicaOf(1, 1)}}, codes.InvalidArgument, tooMany + "3"},
		"a client with a GPU of its own":   {[][]string{{uuid(2), replicaOf(1, 0)}}, codes.InvalidArgument, tooMany + "2"},
		"only the second asks for so much": {[][]string{{uuid(2)}, {replicaOf(1, 0), replicaOf(1, 1)}}, codes.InvalidArgument, tooMany + "2"},
	} {
		t.Run(name, func(t *testing.T) {
			for range 2 {
				_, err := client.Allocate(t.Context(), allocation(test.containers...))
				if status.Code(err) != test.code || status.Convert(err).Message() != test.message {
					t.Errorf("got %v, want %s %q", err, test.code, test.message)
				}
			}
		})
	}
	if holds := f.ledger.Holds(); len(holds) != 0 {
		t.Errorf("refused calls left %v", holds)
	}
	hooked.before = nil
	if _, err := client.Allocate(t.Context(), allocation([]string{replicaOf(1, 0)}, []string{replicaOf(1, 1)})); err != nil {
		t.Errorf("a client for each of two containers: %v", err)
	}
}

// aroundReserving does something just before the next reservation, and something just after it.
type aroundReserving struct {
	*book
	before, after func()
}

func (a *aroundReserving) ReservePod(requests []ledger.PodRequest) error {
	before, after := a.before, a.after
	a.before, a.after = nil, nil
	if before != nil {
		before()
	}
	err := a.book.ReservePod(requests)
	if after != nil {
		after()
	}
	return err
}

// A daemon that ends after it was looked at refuses the container. What was reserved by then is the reconciler's.
func TestDaemonEndsWhileAllocating(t *testing.T) {
	t.Parallel()
	daemons := newFakeSharing()
	var hooked *aroundReserving
	f, client := serving(t, func(c *Config) {
		c.Inventory.(fakeInventory).set(func(device.Inventory) device.Inventory { return byMPS(2, 1, 4) })
		hooked = &aroundReserving{book: c.Ledger.(*book)}
		c.Sharing, c.Ledger = daemons, hooked
	})
	f.await("all", healthyCount(5))
	hooked.after = func() { daemons.unready(0) }
	_, err := client.Allocate(t.Context(), allocation([]string{replicaOf(0, 0)}, []string{replicaOf(0, 1)}))
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), errNotReady.Error()) {
		t.Errorf("got %v", err)
	}
	if holds := f.ledger.Holds(); len(holds) != 2 {
		t.Errorf("held: %v", holds)
	}
}

// GPUs that only claims share by MPS are not for limits, whatever the MIG strategy, and the event says so.
func TestGPUsThatClaimsShareByMPS(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.inventory.set(func(device.Inventory) device.Inventory {
		inv := byMPS(2, 1, 4)
		inv.GPUs[0].Sharing.Replicas = nil
		return inv
	})
	f.config.Sharing = newFakeSharing()
	f.startKubelet()
	f.start()
	f.await("the other", healthyCount(1))
	want := "Warning DevicesExcluded No extended resource offers gpu-0 (" + uuid(0) + "): it is shared by MPS among claims only: it has no replicas"
	if event := f.event(); event != want {
		t.Errorf("recorded %q, want %q", event, want)
	}
}
