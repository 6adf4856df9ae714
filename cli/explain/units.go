// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"slices"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/availability"
)

// takeUnits takes devices and replicas of an extended resource.
func (s *stock) takeUnits(n need, most int64) (got int64, not []blocked) {
	for _, d := range s.status.Devices {
		if d.ExtendedResource != n.resource || d.Excluded {
			continue
		}
		if s.taken[d.Name] {
			continue
		}
		free, why := s.unitsOf(d)
		free -= s.units[d.Name]
		if why.device != "" {
			not = append(not, why)
		}
		if free <= 0 {
			continue
		}
		takes := min(free, most-got)
		s.units[d.Name] += takes
		if takes > 0 && (d.Sharing == nil || d.Sharing.Replicas == 0) {
			s.taken[d.Name] = true
			s.use(availability.StatusName(d))
		}
		if got += takes; got >= most {
			break
		}
	}
	return got, not
}

// unitsOf returns how many units of its extended resource a device has left, and why it has fewer than all.
func (s *stock) unitsOf(d v1alpha1.DeviceStatus) (free int64, why blocked) {
	if s.empty {
		if replicated(d) {
			return int64(d.Sharing.Replicas), blocked{}
		}
		return 1, blocked{}
	}
	if why, out := whyOutUntolerated(d.Name, d); out {
		return 0, why
	}
	if replicated(d) {
		left := replicasLeft(d)
		if left < d.Sharing.Replicas {
			why = blocked{d.Name, availability.HeldByPod, fmt.Sprintf("%d of %d replicas left", left, d.Sharing.Replicas)}
		}
		return int64(left), why
	}
	reason := availability.Check(true, use{Device: availability.StatusName(d)}, slices.Values(s.uses))
	withdrawn := d.ExtendedResourceState == v1alpha1.ExtendedResourceWithdrawn || d.ExtendedResourceState == "" && s.unoffered(d.ExtendedResource)
	if reason == availability.Available && withdrawn {
		return 0, blocked{d.Name, availability.Draining, "not offered to pods yet"}
	}
	if reason != availability.Available {
		return 0, blocked{d.Name, reason, ""}
	}
	return 1, blocked{}
}
