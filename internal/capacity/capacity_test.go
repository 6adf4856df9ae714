// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/pkg/device"
)

func amounts(pairs ...string) map[resourceapi.QualifiedName]resource.Quantity {
	all := map[resourceapi.QualifiedName]resource.Quantity{}
	for i := 0; i < len(pairs); i += 2 {
		all[resourceapi.QualifiedName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return all
}

func TestConsumed(t *testing.T) {
	exactly := func(asked map[resourceapi.QualifiedName]resource.Quantity) *resourceapi.CapacityRequirements {
		return &resourceapi.CapacityRequirements{Requests: asked}
	}
	claim := &resourceapi.ResourceClaim{}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{
		{Name: "default", Exactly: &resourceapi.ExactDeviceRequest{}},
		{Name: "memory", Exactly: &resourceapi.ExactDeviceRequest{Capacity: exactly(amounts("memory", "4Gi"))}},
		{Name: "either", FirstAvailable: []resourceapi.DeviceSubRequest{{Name: "a"}, {Name: "b", Capacity: exactly(amounts("memory", "4Gi"))}}},
	}
	share := ptr.To(types.UID("share-0"))
	for name, c := range map[string]struct {
		result resourceapi.DeviceRequestAllocationResult
		want   device.Consumed
		shared bool
	}{
		"a GPU that is not shared":        {result: resourceapi.DeviceRequestAllocationResult{Request: "default"}},
		"memory without a share":          {result: resourceapi.DeviceRequestAllocationResult{Request: "memory", ConsumedCapacity: amounts("memory", "4Gi")}},
		"all of the memory by default":    {result: resourceapi.DeviceRequestAllocationResult{Request: "default", ShareID: share, ConsumedCapacity: amounts("memory", "24Gi")}},
		"all of the memory as requested":  {result: resourceapi.DeviceRequestAllocationResult{Request: "memory", ShareID: share, ConsumedCapacity: amounts("memory", "24Gi")}, want: device.Consumed{Memory: 24 << 30}, shared: true},
		"no memory, without a limit":      {result: resourceapi.DeviceRequestAllocationResult{Request: "default", ShareID: share, ConsumedCapacity: amounts("memory", "0")}, shared: true},
		"an equal share by default":       {result: resourceapi.DeviceRequestAllocationResult{Request: "default", ShareID: share, ConsumedCapacity: amounts("memory", "0", "shares", "1")}, want: device.Consumed{Shares: 1}, shared: true},
		"equal shares and memory":         {result: resourceapi.DeviceRequestAllocationResult{Request: "memory", ShareID: share, ConsumedCapacity: amounts("memory", "4Gi", "shares", "2")}, want: device.Consumed{Memory: 4 << 30, Shares: 2}, shared: true},
		"the alternative without amounts": {result: resourceapi.DeviceRequestAllocationResult{Request: "either/a", ShareID: share, ConsumedCapacity: amounts("memory", "24Gi")}},
		"the alternative with memory":     {result: resourceapi.DeviceRequestAllocationResult{Request: "either/b", ShareID: share, ConsumedCapacity: amounts("memory", "4Gi")}, want: device.Consumed{Memory: 4 << 30}, shared: true},
		"other capacities only":           {result: resourceapi.DeviceRequestAllocationResult{Request: "default", ShareID: share, ConsumedCapacity: amounts("decoders", "0")}},
	} {
		if got, shared := Consumed(claim, c.result); got != c.want || shared != c.shared {
			t.Errorf("%s: %+v, shared %t, want %+v, shared %t", name, got, shared, c.want, c.shared)
		}
	}
}
