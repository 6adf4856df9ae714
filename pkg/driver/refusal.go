// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Reasons of events on claims.
const (
	reasonDeviceHeld        = "DeviceHeld"
	reasonPendingEviction   = "ClaimPendingEviction"
	reasonDeviceUnhealthy   = "DeviceUnhealthy"
	reasonUnknownDevice     = "UnknownDevice"
	reasonInvalidParameters = "InvalidParameters"
	reasonForeignPartition  = "ForeignPartition"
	reasonNotMade           = "PartitionNotMade"
	reasonNotShared         = "SharingNotApplied"
	reasonDaemonNotReady    = "DaemonNotReady"
)

// refusal is an error that the claim's owner should hear of as an event.
type refusal struct{ reason, message string }

func (r *refusal) Error() string { return r.message }

func refuse(reason, format string, args ...any) error {
	return &refusal{reason: reason, message: fmt.Sprintf(format, args...)}
}

// refuseParameters is what the author of parameters hears, once.
func refuseParameters(request string, err error) error {
	return refuse(reasonInvalidParameters, "request %s: %v: retrying does not help, correct the claim or its class and create the claim anew", request, err)
}

// describeConflict says which published device is in whose hands, as far as the claim's namespace may know.
func describeConflict(conflict *ledger.ConflictError, p *preparation) string {
	parts := make([]string, 0, len(conflict.Holds))
	for _, h := range conflict.Holds {
		part := fmt.Sprintf("device %s is held by %s", p.nameOf(h.Device), describeHolder(h, p.claim.Namespace))
		if !slices.Contains(parts, part) {
			parts = append(parts, part)
		}
	}
	return strings.Join(parts, "; ")
}

// nameOf gives the published name next to the UUID, where the answer has it.
func (p *preparation) nameOf(ref device.Ref) string {
	if name, ok := p.names[ref]; ok {
		return fmt.Sprintf("%s (%s)", name, ref)
	}
	for _, wanted := range p.request.Devices {
		if wanted.Overlaps(ref) {
			return fmt.Sprintf("%s, of which %s takes a part,", ref, p.names[wanted])
		}
	}
	return ref.String()
}

// describeHolder names the holder inside its own namespace only.
func describeHolder(h ledger.Hold, namespace string) string {
	leaving := ""
	if h.State == ledger.StateDraining {
		leaving = ", which is going away"
	}
	switch {
	case h.Holder.Kind == ledger.KindClaim && h.Namespace == "":
		return "a claim" + leaving
	case h.Holder.Kind == ledger.KindClaim && h.Namespace != namespace:
		return "a claim in another namespace" + leaving
	case h.Holder.Kind == ledger.KindClaim:
		return fmt.Sprintf("claim %s/%s%s", h.Namespace, h.Name, leaving)
	case len(h.Pods) == 0 || h.Pods[0].Namespace == "":
		return "a pod by its resource limits" + leaving
	case h.Pods[0].Namespace != namespace:
		return "a pod in another namespace by its resource limits" + leaving
	default:
		return fmt.Sprintf("pod %s/%s by its %s limit%s", h.Pods[0].Namespace, h.Pods[0].Name, h.Resource, leaving)
	}
}
