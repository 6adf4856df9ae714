// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// These tests ask the scheduler's own allocator what our slices mean.

type classes map[string]*resourceapi.DeviceClass

func (c classes) List() ([]*resourceapi.DeviceClass, error) { return nil, nil }

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	if class, ok := c[name]; ok {
		return class, nil
	}
	return nil, fmt.Errorf("no class %s", name)
}

// nvidiaClasses are NVIDIA's (deviceclass-gpu.yaml and deviceclass-mig.yaml in its chart).
var nvidiaClasses = classes{"gpu.nvidia.com": classOf("gpu"), "mig.nvidia.com": classOf("mig")}

func classOf(kind string) *resourceapi.DeviceClass {
	return &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: kind + ".nvidia.com"},
		Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == '" + kind + "'",
		}}}},
	}
}

func asPublished(inv device.Inventory, withdrawn []withdrawal, taints bool) []*resourceapi.ResourceSlice {
	built, _, _ := buildSlices(inv, withdrawn, taints)
	published := make([]*resourceapi.ResourceSlice, len(built))
	for i, slice := range built {
		published[i] = &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%05x-gpu.nvidia.com-node1-x", i)},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: "gpu.nvidia.com", NodeName: ptr.To(testNode), Devices: slice.Devices,
				Pool: resourceapi.ResourcePool{Name: testNode, Generation: 1, ResourceSliceCount: int64(len(built))},
			},
		}
	}
	return published
}

func TestSchedulersViewOfOurSlices(t *testing.T) {
	exactly := func(count int64, selectors ...string) resourceapi.DeviceRequest {
		request := resourceapi.DeviceRequest{Name: "gpus", Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: "gpu.nvidia.com", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count,
		}}
		for _, s := range selectors {
			request.Exactly.Selectors = append(request.Exactly.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: s}})
		}
		return request
	}
	matching := func(attribute string) []resourceapi.DeviceConstraint {
		return []resourceapi.DeviceConstraint{{MatchAttribute: ptr.To(resourceapi.FullyQualifiedName(attribute))}}
	}
	tolerant := exactly(1)
	tolerant.Exactly.Tolerations = []resourceapi.DeviceToleration{{Operator: resourceapi.DeviceTolerationOpExists}}
	firstTwo := []withdrawal{heldByPod(0), lost(1)}
	// GB10 reports neither memory nor ECC.
	odd := machine(8)
	odd.GPUs[0].MemoryBytes, odd.GPUs[0].ECCEnabled = 0, nil
	tests := map[string]struct {
		inv         device.Inventory
		withdrawn   []withdrawal
		omit        bool
		allocated   []string
		request     resourceapi.DeviceRequest
		constraints []resourceapi.DeviceConstraint
		want        []string
	}{
		"first fit is ascending":                  {inv: machine(8), request: exactly(3), want: []string{"gpu-0", "gpu-1", "gpu-2"}},
		"ascending over slices":                   {inv: machine(256), request: exactly(1, "device.attributes['gpu.nvidia.com'].minor >= 66"), want: []string{"gpu-66"}},
		"a GPU that reports no memory and no ECC": {inv: odd, request: exactly(1, "device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('40Gi')) >= 0", "device.attributes['gpu.nvidia.com'].eccEnabled"), want: []string{"gpu-1"}},
		"by attribute":                            {inv: machine(8), request: exactly(1, "device.attributes['gpu.nvidia.com'].productName.startsWith('NVIDIA H100') && device.attributes['gpu.nvidia.com'].eccEnabled && device.attributes['resource.kubernetes.io'].numaNode == 1"), want: []string{"gpu-4"}},
		"by version":                              {inv: machine(8), request: exactly(1, "device.attributes['gpu.nvidia.com'].cudaComputeCapability.isGreaterThan(semver('8.9.0')) && device.attributes['gpu.nvidia.com'].driverVersion.isLessThan(semver('581.0.0'))"), want: []string{"gpu-0"}},
		"by version, none":                        {inv: machine(8), request: exactly(1, "device.attributes['gpu.nvidia.com'].cudaComputeCapability.isGreaterThan(semver('10.0.0'))")},
		"by memory":                               {inv: machine(8), request: exactly(1, "device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('80Gi')) >= 0"), want: []string{"gpu-0"}},
		"the smallest that is enough":             {inv: mixedMachine(), request: exactly(1), want: []string{"gpu-2"}},
		"the next where the smallest are gone":    {inv: mixedMachine(), allocated: []string{"gpu-2", "gpu-3"}, request: exactly(1), want: []string{"gpu-0"}},
		"by UUID":                                 {inv: machine(8), request: exactly(1, "device.attributes['gpu.nvidia.com'].uuid == '"+uuidOf(5)+"'"), want: []string{"gpu-5"}},
		"by PCI address":                          {inv: machine(8), request: exactly(1, "device.attributes['resource.kubernetes.io'].pciBusID == '0000:13:00.0'"), want: []string{"gpu-3"}},
		"pair on one NVLink domain":               {inv: machine(8), allocated: []string{"gpu-0", "gpu-1", "gpu-2"}, request: exactly(2), constraints: matching("gpu.nvidia.com/nvlinkDomain"), want: []string{"gpu-4", "gpu-5"}},
		"no NVLink, no pair":                      {inv: l4x4(), request: exactly(2), constraints: matching("gpu.nvidia.com/nvlinkDomain")},
		"four on one NUMA node":                   {inv: machine(8), allocated: []string{"gpu-1"}, request: exactly(4), constraints: matching("resource.kubernetes.io/numaNode"), want: []string{"gpu-4", "gpu-5", "gpu-6", "gpu-7"}},
		"five on one NUMA node":                   {inv: machine(8), request: exactly(5), constraints: matching("resource.kubernetes.io/numaNode")},
		"pair below one PCIe root":                {inv: machine(8), allocated: []string{"gpu-0"}, request: exactly(2), constraints: matching("resource.kubernetes.io/pcieRoot"), want: []string{"gpu-2", "gpu-3"}},
		"withdrawn by taint":                      {inv: machine(8), withdrawn: firstTwo, request: exactly(1), want: []string{"gpu-2"}},
		"withdrawn by omission":                   {inv: machine(8), withdrawn: firstTwo, omit: true, request: exactly(1), want: []string{"gpu-2"}},
		"more than is left":                       {inv: machine(8), withdrawn: firstTwo, request: exactly(7)},
		"a wildcard toleration ignores it":        {inv: machine(8), withdrawn: firstTwo, request: tolerant, want: []string{"gpu-0"}},
		"unusable GPUs do not stop other GPUs":    {inv: unusableMachine(), withdrawn: []withdrawal{lost(1)}, request: exactly(3), want: []string{"gpu-6", "gpu-0", "gpu-7"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			taken := sets.New[structured.DeviceID]()
			for _, d := range test.allocated {
				taken.Insert(structured.MakeDeviceID("gpu.nvidia.com", testNode, d))
			}
			features := structured.Features{DeviceTaints: true, AdminAccess: true, PrioritizedList: true}
			allocator, err := structured.NewAllocator(t.Context(), features, structured.AllocatedState{AllocatedDevices: taken}, nvidiaClasses,
				asPublished(test.inv, test.withdrawn, !test.omit), cel.NewCache(100, cel.Features{}))
			if err != nil {
				t.Fatal(err)
			}
			claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "team-a", UID: "c"}}
			claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{test.request}
			claim.Spec.Devices.Constraints = test.constraints
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: testNode}}
			results, err := allocator.Allocate(t.Context(), node, []*resourceapi.ResourceClaim{claim})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, result := range results {
				for _, d := range result.Devices.Results {
					got = append(got, d.Device)
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// allocateAll returns the devices that the scheduler gives to claims for one GPU each, one after the other.
func allocateAll(t *testing.T, published []*resourceapi.ResourceSlice, claims int) (devices []string) {
	t.Helper()
	taken := sets.New[structured.DeviceID]()
	for i := range claims {
		allocator, err := structured.NewAllocator(t.Context(), structured.Features{DeviceTaints: true}, structured.AllocatedState{AllocatedDevices: taken},
			nvidiaClasses, published, cel.NewCache(100, cel.Features{}))
		if err != nil {
			t.Fatal(err)
		}
		claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(i), Namespace: "team-a", UID: types.UID(fmt.Sprint(i))}}
		claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpus", Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: "gpu.nvidia.com", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
		}}}
		results, err := allocator.Allocate(t.Context(), newNode("node"), []*resourceapi.ResourceClaim{claim})
		if err != nil {
			t.Fatal(err)
		}
		for _, result := range results {
			for _, d := range result.Devices.Results {
				taken.Insert(structured.MakeDeviceID(d.Driver, d.Pool, d.Device))
				devices = append(devices, d.Device)
			}
		}
	}
	return devices
}
