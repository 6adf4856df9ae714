// SPDX-License-Identifier: Apache-2.0

// The slices of a node that does not exist yet, for autoscalers.

package driver

import (
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// Template returns the ResourceSlices that a new node with these GPUs publishes: all are healthy, none has a holder, dynamic ones have no
// partition, and the API server keeps all fields of a slice, as Kubernetes does from 1.36 on. The slices have no owner. offered and strict
// are as in Config. The command inspect prints them for cluster autoscalers.
func Template(driverName, nodeName string, inv device.Inventory, offered func(device.GPU) bool, strict bool) []resourceapi.ResourceSlice {
	inv.GPUs = slices.Clone(inv.GPUs)
	for i := range inv.GPUs {
		g := &inv.GPUs[i]
		g.Health, g.Partitions = device.Health{}, slices.Clone(g.Partitions)
		if g.Dynamic {
			g.Partitions = nil
		}
		for j := range g.Partitions {
			g.Partitions[j].Health = device.Health{}
		}
	}
	offer := Offer{NodeName: nodeName, Offered: offered, Strict: strict}
	pools, _ := offer.Pools(Facts{
		Inventory: inv, Kept: Capabilities{Taints: true, BindingConditions: true, Counters: true, Shares: true},
	})
	var objects []resourceapi.ResourceSlice
	for _, name := range slices.Sorted(maps.Keys(pools)) {
		objects = append(objects, objectsOf(driverName, nodeName, name, pools[name])...)
	}
	for i := range objects {
		objects[i].TypeMeta = metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceSlice"}
	}
	return objects
}
