// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
)

// checkParameters refuses a result whose parameters cannot be honoured. As in NVIDIA's driver the last entry of the right kind
// that applies is the one that counts (class entries come before claim entries), and those that it overrides are not judged. One
// of another kind is passed over if it is meant for all requests, and an error if it names this one; where it names the request
// of which this is one choice (firstAvailable) it is for other choices. This version gives out devices whole: what asks for more
// is refused, naming the field. Schedulers from 1.37 on drop the names from an entry that names all requests of a claim.
func checkParameters(claim *resourceapi.ResourceClaim, driverName string, result resourceapi.DeviceRequestAllocationResult, whole bool) error {
	fitting, what := parametersv1beta1.GPU, "a whole GPU"
	if !whole {
		fitting, what = parametersv1beta1.MIGDevice, "a partition"
	}
	entries := claim.Status.Allocation.Devices.Config
	for i, entry := range slices.Backward(entries) {
		if entry.Opaque == nil || entry.Opaque.Driver != driverName || len(resourceclaim.ConfigForResult(entries[i:i+1], result)) == 0 {
			continue
		}
		path := pathOf(claim, entry)
		said, wrong := parametersv1beta1.Decode(entry.Opaque.Parameters.Raw, path)
		switch {
		case len(wrong) > 0:
			return wrong.ToAggregate()
		case said.Kind == fitting && said.Sharing != nil:
			return fmt.Errorf("%s: %q is not supported: this version gives out devices whole", path.Child("sharing", "strategy"), said.Sharing.Strategy)
		case said.Kind == fitting:
			return nil
		case slices.Contains(entry.Requests, result.Request):
			return fmt.Errorf("%s: %s is for request %s, which got %s: only %s fits", path.Child("kind"), said.Kind, result.Request, what, fitting)
		}
	}
	return nil
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
