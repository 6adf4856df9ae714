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

// Said is what the parameters of an allocated claim say about a device.
type Said struct {
	// Entry of the allocation's configuration in which it is said. Devices of one entry are shared together.
	Entry int
	// Path is where its author finds it.
	Path *field.Path
	// Sharing is nil where nothing is said.
	Sharing *Sharing
}

// Allocated returns what counts for a result, which is a whole GPU or a partition, and refuses what is wrong. As in NVIDIA's driver
// the last entry of the right kind that applies is the one that counts (class entries come before claim entries), and those that it
// overrides are not judged. One of another kind is passed over if it is meant for all requests, and an error if it names this one;
// where it names the request of which this is one choice (firstAvailable) it is for other choices. Schedulers from 1.37 on drop the
// names from an entry that names all requests of a claim. It is a pure function; the node and the controller ask.
func Allocated(claim *resourceapi.ResourceClaim, driverName string, result resourceapi.DeviceRequestAllocationResult, whole bool) (Said, error) {
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
			return Said{}, wrong.ToAggregate()
		case parameters.Kind == fitting:
			return Said{Entry: i, Path: path, Sharing: parameters.Sharing}, nil
		case slices.Contains(entry.Requests, result.Request):
			return Said{}, fmt.Errorf("%s: %s is for request %s, which got %s: only %s fits", path.Child("kind"), parameters.Kind, result.Request, what, fitting)
		}
	}
	return Said{}, nil
}

// pathOf is where the author of an entry finds it. The allocation has those of all classes in one list, and after them the
// claim's.
func pathOf(claim *resourceapi.ResourceClaim, entry resourceapi.DeviceAllocationConfiguration) *field.Path {
	if entry.Source == resourceapi.AllocationConfigSourceClass {
		return field.NewPath("the device class's spec", "config", "opaque", "parameters")
	}
	at := slices.IndexFunc(claim.Spec.Devices.Config, func(c resourceapi.DeviceClaimConfiguration) bool {
		return apiequality.Semantic.DeepEqual(c.Opaque, entry.Opaque)
	})
	return field.NewPath("spec", "devices", "config").Index(max(0, at)).Child("opaque", "parameters")
}
