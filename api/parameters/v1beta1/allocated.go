// SPDX-License-Identifier: Apache-2.0

package v1beta1

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
)

// Effective are the parameters that apply to one device of an allocated claim.
type Effective struct {
	// Entry is the index of the allocation's configuration. Devices of one entry are shared together.
	Entry int
	// Path of the parameters in the claim or in its class.
	Path *field.Path
	// Sharing is nil if there are no parameters for the device.
	Sharing *Sharing
}

// Allocated returns the parameters of a result, which is a whole GPU or a partition, or an error if they are invalid. As in NVIDIA's
// driver the last matching entry of the right kind applies; entries of the class come before those of the claim. It does not validate
// the entries that it overrides. It skips an entry of another kind for all requests. An entry of another kind for this request is an
// error, but not one for the whole request of a subrequest (firstAvailable), because it applies to other subrequests. Schedulers from
// 1.37 on drop the names from an entry that names all requests of a claim. It is a pure function. Node and controller call it.
func Allocated(claim *resourceapi.ResourceClaim, driverName string, result resourceapi.DeviceRequestAllocationResult, whole bool) (Effective, error) {
	fitting, what := GPU, "a whole GPU"
	if !whole {
		fitting, what = MIGDevice, "a partition"
	}
	entries := claim.Status.Allocation.Devices.Config
	for i, entry := range slices.Backward(entries) {
		if entry.Opaque == nil || entry.Opaque.Driver != driverName || len(resourceclaim.ConfigForResult(entries[i:i+1], result)) == 0 {
			continue
		}
		path := pathOf(claim, entry)
		parameters, wrong := Decode(entry.Opaque.Parameters.Raw, path)
		switch {
		case len(wrong) > 0:
			return Effective{}, wrong.ToAggregate()
		case parameters.Kind == fitting:
			return Effective{Entry: i, Path: path, Sharing: parameters.Sharing}, nil
		case slices.Contains(entry.Requests, result.Request):
			return Effective{}, fmt.Errorf("%s: %s is for request %s, which got %s: only %s fits", path.Child("kind"), parameters.Kind, result.Request, what, fitting)
		}
	}
	return Effective{}, nil
}

// pathOf returns the path of an entry in its class or claim. The allocation lists the entries of classes before the claim's.
func pathOf(claim *resourceapi.ResourceClaim, entry resourceapi.DeviceAllocationConfiguration) *field.Path {
	if entry.Source == resourceapi.AllocationConfigSourceClass {
		return field.NewPath("the device class's spec", "config", "opaque", "parameters")
	}
	at := slices.IndexFunc(claim.Spec.Devices.Config, func(c resourceapi.DeviceClaimConfiguration) bool {
		return apiequality.Semantic.DeepEqual(c.Opaque, entry.Opaque)
	})
	return field.NewPath("spec", "devices", "config").Index(max(0, at)).Child("opaque", "parameters")
}
