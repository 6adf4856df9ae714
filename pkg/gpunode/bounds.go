// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"slices"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/regarding"
)

// bounded returns the status without what exceeds the bounds of the API, with the number of omitted entries. The API server would refuse
// the whole status otherwise. It changes the holders of devices and the elements of conflicts, which Status has made.
func bounded(status v1alpha1.GPUNodeStatus) v1alpha1.GPUNodeStatus {
	var omitted int
	status.Devices = slices.Clone(cut(status.Devices, v1alpha1.MaxDevices, &omitted))
	status.Conflicts = cut(status.Conflicts, v1alpha1.MaxConflicts, &omitted)
	status.Daemons = cut(status.Daemons, v1alpha1.MaxDaemons, &omitted)
	status.UnknownDaemons = cut(status.UnknownDaemons, v1alpha1.MaxDaemons, &omitted)
	status.Waiting = regarding.Shorten(status.Waiting, v1alpha1.MaxReason)
	status.Holders = regarding.Shorten(status.Holders, v1alpha1.MaxLine)
	most := mostTaints(status.Devices)
	for i := range status.Devices {
		d := &status.Devices[i]
		d.UnhealthyReason = regarding.Shorten(d.UnhealthyReason, v1alpha1.MaxReason)
		d.Taints = cut(d.Taints, most, new(int)) // not omitted: the spec has the others
		d.Holders = cut(d.Holders, v1alpha1.MaxHolders, &omitted)
		for j := range d.Holders {
			d.Holders[j].Pods = cut(d.Holders[j].Pods, v1alpha1.MaxPods, &omitted)
		}
	}
	for i := range status.Conflicts {
		c := &status.Conflicts[i]
		c.Message = regarding.Shorten(c.Message, v1alpha1.MaxMessage)
		c.Pods = cut(c.Pods, v1alpha1.MaxPods, &omitted)
	}
	status.Omitted = int32(omitted)
	return status
}

// mostTaints returns how many taints each device may have, the worst ones. One is enough to withdraw it.
func mostTaints(devices []v1alpha1.DeviceStatus) int {
	for most := v1alpha1.MaxDeviceTaints; most > 1; most-- {
		all := 0
		for _, d := range devices {
			all += min(len(d.Taints), most)
		}
		if all <= v1alpha1.MaxAllTaints {
			return most
		}
	}
	return 1
}

// cut returns at most so many entries of a list and counts the others.
func cut[T any](list []T, most int, omitted *int) []T {
	if len(list) <= most {
		return list
	}
	*omitted += len(list) - most
	return list[:most:most]
}
