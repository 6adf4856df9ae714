// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// outOfService are devices that a test takes out of service, by UUID.
type outOfService struct{ *observable[map[string]bool] }

func (m outOfService) Allocated() []ledger.Hold { return nil }

func (m outOfService) OutOfService() func(device.Device) string {
	uuids := m.get()
	return func(d device.Device) string {
		if uuids[d.UUID()] {
			return "it has the taint fan=broken:NoSchedule of DeviceTaintRule fans"
		}
		return ""
	}
}

func (m outOfService) put(gpus ...int) {
	m.set(func(map[string]bool) map[string]bool {
		uuids := map[string]bool{}
		for _, i := range gpus {
			uuids[uuid(i)] = true
		}
		return uuids
	})
}

// A GPU out of service is not offered, stays with the pod that holds it, and goes to no other pod: also not where kubelet has an older
// list, and preferably not at all.
func TestOutOfService(t *testing.T) {
	t.Parallel()
	m := outOfService{newObservable[map[string]bool](nil)}
	f, client := serving(t, func(c *Config) { c.Allocations = m })
	f.await("all devices", healthyCount(8))
	if _, err := client.Allocate(context.Background(), allocation([]string{uuid(3)})); err != nil {
		t.Fatal(err)
	}
	m.put(3, 5)
	f.withdrawn(5) // a pod holds GPU 3, and keeps it
	preferred, err := client.GetPreferredAllocation(context.Background(), &pluginapi.PreferredAllocationRequest{
		ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: []string{uuid(5), uuid(2)}, AllocationSize: 2}},
	})
	if err != nil || !slices.Equal(preferred.GetContainerResponses()[0].GetDeviceIDs(), []string{uuid(2), uuid(5)}) {
		t.Errorf("preferred %v, %v", preferred, err)
	}
	_, err = client.Allocate(context.Background(), allocation([]string{uuid(5)}))
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "a GPU is out of service") ||
		!strings.Contains(err.Error(), "fan=broken:NoSchedule of DeviceTaintRule fans") {
		t.Errorf("a pod got it: %v", err)
	}
	f.ledger.release(uuid(3))
	f.withdrawn(3, 5)
	m.put(5)
	f.withdrawn(5)
	if _, err := client.Allocate(context.Background(), allocation([]string{uuid(3)})); err != nil {
		t.Errorf("once it is in service again: %v", err)
	}
}

// The replicas of a GPU follow it. Those that pods hold stay.
func TestReplicasOutOfService(t *testing.T) {
	t.Parallel()
	f, p := sharingNode(t, shared(2, 2, device.Replicas{Count: 4}))
	m := outOfService{newObservable(map[string]bool{uuid(0): true})}
	p.config.Allocations = m
	gpu := f.inventory.get().GPUs[0]
	if err := f.ledger.ReservePod([]ledger.PodRequest{{
		ID: device.ReplicaID(gpu.UUID, 1), Resource: "nvidia.com/gpu", Device: gpu.Ref(), Share: device.Replica(24*gib, 4),
	}}); err != nil {
		t.Fatal(err)
	}
	lists, _ := p.Refresh(time.Now())
	healthy := map[string]int{}
	for id, state := range health(lists["nvidia.com/gpu"]) {
		if state == pluginapi.Healthy {
			healthy[device.HardwareUUID(id)]++
		}
	}
	if want := map[string]int{uuid(0): 1, uuid(1): 4}; !maps.Equal(healthy, want) {
		t.Errorf("healthy replicas %v, want %v", healthy, want)
	}
}
