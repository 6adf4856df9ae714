// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/availability"
)

// Every write of the status pays for one interval. So many may be paid for later: a node that was quiet says at once what
// changes. The last is for bad news, which costs a limits pod its life for every 30 ms that the scheduler does not hear it. More
// of them would make good news late: the controller takes a status for two seconds old at most.
const (
	aheadOrdinary = 2
	aheadUrgent   = 3
)

// Pace keeps the writes of a status to one an interval in the mean. The zero value has nothing to pay. For the agent and for
// simulations; not safe for concurrent use.
type Pace struct {
	Interval time.Duration
	paid     time.Time
}

// Due is when the next write may be made.
func (p *Pace) Due(urgent bool) time.Time {
	ahead := aheadOrdinary
	if urgent {
		ahead = aheadUrgent
	}
	return p.paid.Add(-time.Duration(ahead) * p.Interval)
}

// Took notes a write that was made.
func (p *Pace) Took(now time.Time) { p.paid = latest(p.paid, now).Add(p.Interval) }

// Urgent reports whether limits can have a device by the status that was written, and cannot by the one that is to be, or it is
// gone, and no claim is the reason: of claims the controller knows by itself. It is a pure function.
func Urgent(written, status v1alpha1.GPUNodeStatus) bool {
	had := map[string]bool{}
	for _, d := range written.Devices {
		had[d.UUID] = d.ExtendedResourceState == v1alpha1.ExtendedResourceAllocatable
	}
	now := map[string]v1alpha1.DeviceStatus{}
	for _, d := range status.Devices {
		now[d.UUID] = d
	}
	for uuid, had := range had {
		d, there := now[uuid]
		if had && (!there || d.ExtendedResourceState == v1alpha1.ExtendedResourceWithdrawn && !claimed(status, d)) {
			return true
		}
	}
	return false
}

// claimed reports whether a claim holds the device, or hardware that overlaps it.
func claimed(status v1alpha1.GPUNodeStatus, d v1alpha1.DeviceStatus) bool {
	request := availability.Use[availability.Name]{Device: availability.StatusName(d)}
	reason := availability.Check(true, request, slices.Values(availability.NewNode(status, nil).Held))
	return reason == availability.HeldByClaim || reason == availability.Draining
}
