// SPDX-License-Identifier: Apache-2.0

// Package ledger decides who holds which device of the node, for claims and limits alike, refuses double booking, and
// keeps the decision through crashes. It is the only place where the two APIs meet; it knows neither.
package ledger

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Kind is the API through which a holder asked for its device.
type Kind = availability.Kind

const (
	KindClaim = availability.Claim
	KindPod   = availability.Pod
)

// Holder identifies who holds a device. It is comparable.
type Holder struct {
	Kind Kind
	// ID is the UID of a claim, or the device ID that kubelet's device manager allocated to a pod.
	ID string
}

// State of a hold. Released is the absence of the hold.
type State string

const (
	// StateRestored is known from before (a restart, a reboot) and not yet confirmed. It blocks others as Held does.
	StateRestored State = "restored"
	// StateHeld was answered to kubelet.
	StateHeld State = "held"
	// StateDraining was asked to go, but containers may still live. It blocks others, who may wait for it.
	StateDraining State = "draining"
)

// Pod is a pod that uses a hold. Namespace and Name are empty when only the UID is known.
type Pod struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
}

// Hold is one device in the hands of one holder.
type Hold struct {
	Holder Holder
	Device device.Ref
	// Share is what the holder has of the device. Holds with a share of the same device stand beside each other as long as there is
	// memory for all.
	Share device.Share
	State State
	// Since is when the hold was given out, by the clock that stamps files, or when a claim was asked to let go of it. A Prepare
	// repeated for a held claim does not count.
	Since time.Time
	// Resource is the extended resource a limit was asked for by; empty for claims.
	Resource string
	// Namespace and Name are the claim's; empty for limits, and for a claim of which only the UID is known.
	Namespace, Name string
	// Pods use the hold. For a limit: none until kubelet's checkpoint tells, then one.
	Pods []Pod
	// Generation changes whenever the hold is given out again or its pods change; Release, SetState, SetPods and Identify of an
	// older generation do nothing. It means nothing to another process.
	Generation uint64
	// Unreadable marks a hold known only from the name of its record, whose contents could not be read.
	Unreadable bool
}

// Use returns what the hold makes unavailable to other holders, and why.
func (h Hold) Use() availability.Use[device.Ref] {
	use := availability.Use[device.Ref]{Holder: availability.Holder(h.Holder), Device: h.Device, Share: h.Share, Reason: availability.HeldByClaim}
	switch {
	case h.Holder.Kind == KindPod:
		use.Reason = availability.HeldByPod
	case h.Unreadable, h.State == StateDraining:
		use.Reason = availability.Draining
	}
	return use
}

// String describes the holder for a message that only the operator sees (log, error to kubelet).
func (h Hold) String() string {
	switch {
	case h.Unreadable:
		return fmt.Sprintf("an unreadable record of %s %s", h.Holder.Kind, h.Holder.ID)
	case h.Holder.Kind == KindClaim && h.Name != "":
		return fmt.Sprintf("claim %s/%s (%s, %s)", h.Namespace, h.Name, h.Holder.ID, h.State)
	case h.Holder.Kind == KindPod && len(h.Pods) == 1 && h.Pods[0].Name != "":
		return fmt.Sprintf("pod %s/%s by its %s limit (%s)", h.Pods[0].Namespace, h.Pods[0].Name, h.Resource, h.State)
	default:
		return fmt.Sprintf("%s %s (%s)", h.Holder.Kind, h.Holder.ID, h.State)
	}
}

// ClaimRequest asks for every device of a claim, all or none.
type ClaimRequest struct {
	UID             string
	Namespace, Name string
	// Pods that the claim is reserved for.
	Pods []Pod
	// Devices without duplicates and without those of admin access, which hold nothing.
	Devices []device.Ref
	// Shares of those of Devices of which the claim has a part. It has the others whole.
	Shares map[device.Ref]device.Share
	// PodsFirst, where set, lets limits pods go first.
	PodsFirst *PodsFirst
}

// PodRequest asks for what stands behind one device ID of kubelet's device manager.
type PodRequest struct {
	// ID as it was sent in ListAndWatch.
	ID       string
	Resource string
	Device   device.Ref
	Share    device.Share
}

// PodState is what evidence says about the pods of a hold.
type PodState int

const (
	// Running: a pod that uses the hold may have containers, or nothing is known.
	Running PodState = iota
	// Terminating: still running, but its pods are being deleted. Worth waiting for.
	Terminating
	// Orphaned: the API server has no live pod for it any more, yet containers may still run.
	Orphaned
	// Gone: no container that could use it is left.
	Gone
)

// PodStates says whether a hold is still in use. The answer decides within a call from kubelet, so it must come from memory
// and the kernel, never from the network. Uncertainty is Running.
type PodStates interface {
	PodState(Hold) PodState
	// Started reports whether a process of the pods of a limit's hold lives, or may. Kubelet asks for all that a pod gets before
	// it starts anything of it (k8s.io/kubernetes pkg/kubelet/cm/devicemanager, Allocate as an admission handler). One whose
	// checkpoint was lost asks again when a container of a running pod starts anew (GetDeviceRunContainerOptions).
	// The other holds tell whose pod is accounted for, where this one names none.
	Started(h Hold, all []Hold) bool
}

// ErrLocked is returned by Open when another process owns the run directory.
var ErrLocked = errors.New("another process owns the ledger")

// ErrCancelled is returned by ReserveClaim when the same claim was drained (unprepared) while it waited.
var ErrCancelled = errors.New("the claim was unprepared meanwhile")

var errClosed = errors.New("the ledger is closed")

// ConflictError says that devices are in other hands.
type ConflictError struct {
	// Holds that stand in the way, at least one.
	Holds []Hold
}

// Error names every device and its holder.
func (e *ConflictError) Error() string {
	parts := make([]string, len(e.Holds))
	for i, h := range e.Holds {
		if h.Share.Whole() {
			parts[i] = fmt.Sprintf("device %s is held by %s", h.Device, h)
		} else {
			parts[i] = fmt.Sprintf("%s of device %s are held by %s", h.Share, h.Device, h)
		}
	}
	return strings.Join(parts, "; ")
}
