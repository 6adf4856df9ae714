// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

// gpuClass and migClass are NVIDIA's DeviceClasses (deviceclass-gpu.yaml and deviceclass-mig.yaml in its chart).
const (
	gpuClass = "gpu.nvidia.com"
	migClass = "mig.nvidia.com"
)

type deviceClasses map[string]*resourceapi.DeviceClass

func (c deviceClasses) List() ([]*resourceapi.DeviceClass, error) { return nil, nil }

func (c deviceClasses) Get(name string) (*resourceapi.DeviceClass, error) {
	if class, ok := c[name]; ok {
		return class, nil
	}
	return nil, fmt.Errorf("no class %s", name)
}

var classes = deviceClasses{gpuClass: classOf(gpuClass, "gpu"), migClass: classOf(migClass, "mig")}

func classOf(name, kind string) *resourceapi.DeviceClass {
	expression := fmt.Sprintf("device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == '%s'", kind)
	return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.DeviceClassSpec{Selectors: celSelector(expression)}}
}

func celSelector(expression string) []resourceapi.DeviceSelector {
	return []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}
}

// features are those that a scheduler of that version has by default, as far as they concern this driver. They select one of the
// allocators of the package, as in the scheduler.
func features(version int) structured.Features {
	newer := version >= firstShares
	return structured.Features{
		AdminAccess: true, PrioritizedList: true,
		DeviceTaints: newer, ConsumableCapacity: newer, PartitionableDevices: newer, DeviceBindingAndStatus: newer,
	}
}

// compiled are the selectors of classes. The cache gives each world the same answers.
var compiled = cel.NewCache(10, cel.Features{EnableConsumableCapacity: true})

var theNode = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}

// allocate asks the scheduler's allocator for the devices of claims; nil where they do not all get some. taken are the allocations of
// other claims.
func allocate(version int, published *slice, taken []*resourceapi.AllocationResult, claims []*claim) ([]*resourceapi.AllocationResult, error) {
	state := structured.AllocatedState{
		AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection(),
	}
	for _, allocation := range taken {
		count(state, allocation)
	}
	allocator, err := structured.NewAllocator(context.Background(), features(version), state, classes,
		published.slices, compiled)
	if err != nil {
		return nil, fmt.Errorf("make the allocator: %w", err)
	}
	var objects []*resourceapi.ResourceClaim
	for _, k := range claims {
		objects = append(objects, resourceClaim(k))
	}
	results, err := allocator.Allocate(context.Background(), theNode, objects)
	if err != nil || results == nil {
		return nil, err
	}
	var allocations []*resourceapi.AllocationResult
	for i := range results {
		for j := range results[i].Devices.Results {
			if result := &results[i].Devices.Results[j]; result.ShareID != nil {
				// The allocator's is random.
				result.ShareID = ptr.To(types.UID(fmt.Sprintf("share-%s-%d", claims[i].uid, j)))
			}
		}
		allocations = append(allocations, &results[i])
	}
	return allocations, nil
}

// count follows foreachAllocatedDevice of the scheduler's plugin.
func count(state structured.AllocatedState, allocation *resourceapi.AllocationResult) {
	for _, result := range allocation.Devices.Results {
		id := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
		if result.ShareID == nil {
			state.AllocatedDevices.Insert(id)
			continue
		}
		state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, result.ShareID))
		state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, result.ConsumedCapacity))
	}
}
