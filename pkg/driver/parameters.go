// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
)

// checkParameters refuses a result whose parameters cannot be honoured. As in NVIDIA's driver the last matching entry of
// the right kind wins (class entries come before claim entries); an entry of another kind is passed over if it is meant for
// all requests, and an error if it names this request. Unlike there, an entry that names a request also covers its
// subrequests (firstAvailable), as the API says. This version gives out devices whole: what asks for more is refused, naming the
// field.
func checkParameters(allocation *resourceapi.AllocationResult, driverName string, result resourceapi.DeviceRequestAllocationResult, whole bool) error {
	fitting, what := parametersv1beta1.GPU, "a whole GPU"
	if !whole {
		fitting, what = parametersv1beta1.MIGDevice, "a partition"
	}
	var effective error
	for i, entry := range allocation.Devices.Config {
		if entry.Opaque == nil || entry.Opaque.Driver != driverName ||
			len(resourceclaim.ConfigForResult(allocation.Devices.Config[i:i+1], result)) == 0 {
			continue
		}
		root := "config"
		if entry.Source == resourceapi.AllocationConfigSourceClass {
			root = "the device class's config"
		}
		path := field.NewPath(root).Index(i).Child("opaque", "parameters")
		said, wrong := parametersv1beta1.Decode(entry.Opaque.Parameters.Raw, path)
		switch {
		case len(wrong) > 0:
			return wrong.ToAggregate()
		case said.Kind == fitting:
			effective = nil
			if said.Sharing != nil {
				effective = fmt.Errorf("%s: %q is not supported: this version gives out devices whole", path.Child("sharing", "strategy"), said.Sharing.Strategy)
			}
		case len(entry.Requests) > 0:
			return fmt.Errorf("%s: %s is for request %s, which got %s: only %s fits", path.Child("kind"), said.Kind, result.Request, what, fitting)
		}
	}
	return effective
}
