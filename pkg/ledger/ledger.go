// SPDX-License-Identifier: Apache-2.0

// Package ledger decides who holds which device of the node, for claims and pods alike. It never gives a device two owners, and its
// decisions survive crashes. It is independent of both APIs.
package ledger

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/records"
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
	// StateRestored is known from kubelet's state, or from a record that cannot be read, and is not confirmed yet. A readable record keeps
	// its state. It blocks other holders as StateHeld does.
	StateRestored State = "restored"
	// StateHeld was answered to kubelet.
	StateHeld State = "held"
	// StateDraining is to end once no container can use the device. It blocks other holders, which may wait for it.
	StateDraining State = "draining"
)

// Pod is a pod that uses a hold. Namespace and Name are empty when only the UID is known.
type Pod struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
}

// Hold is the record that a holder has a device. The JSON is the record on disk, whose name contains Holder and Device.
type Hold struct {
	Holder Holder     `json:"-"`
	Device device.Ref `json:"-"`
	// Share is the holder's share of the device. The device can have other holders while there is memory for all shares.
	Share device.Share `json:"share,omitzero"`
	State State        `json:"state"`
	// Since is when the hold was taken, by the clock that stamps files, or when it began to drain. A Prepare repeated for a held claim
	// does not change it.
	Since time.Time `json:"since"`
	// Began is the same moment by this process's monotonic clock, which setting the time does not change. Compare it with other moments of
	// this process, and Since with the stamps of files. It is zero for a hold that Expect has restored, whose age is not known.
	Began time.Time `json:"-"`
	// Resource is the extended resource that a pod requested; empty for claims.
	Resource string `json:"resource,omitempty"`
	// Namespace and Name are the claim's; empty for pods, and for a claim of which only the UID is known.
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	// Pods use the hold. A pod's hold has none until kubelet's checkpoint names the pod.
	Pods []Pod `json:"pods,omitempty"`
	// Generation changes when the hold is taken again or its pods change; Release, SetState, SetPods and Identify of an older
	// generation do nothing. It has no meaning for another process.
	Generation uint64 `json:"generation"`
	// taken is the generation that the last ReserveClaim gave it; zero after a restart, and for a pod's hold. A change of its pods does
	// not change it.
	taken uint64
	// Unreadable marks a hold of which only the record's name is known.
	Unreadable bool `json:"-"`
	// Deserted marks the hold of a claim whose pods are all gone from the API server: the scheduler believes its device free, and
	// kubelet cannot unprepare it, because a process does not end. SetDeserted sets it.
	Deserted bool `json:"-"`
	// Contested marks the hold of a claim because of which another claim was refused. ReserveClaim sets it, and removes it when
	// it confirms the hold. SetCounted removes it as well.
	Contested bool `json:"-"`
	// WaitsFor describes what keeps the hold of a holder that has ended, for the operator, and WaitsSince is since when. SetWait sets
	// both.
	WaitsFor   string    `json:"-"`
	WaitsSince time.Time `json:"-"`
}

// Overdue reports whether the scheduler does not count a claim's hold that is not draining. Such a device must not be offered,
// or the scheduler chooses it again and again. It does not change who has the device.
func (h Hold) Overdue() bool { return h.Deserted || h.Contested }

// Use returns what the hold makes unavailable to other holders, and why.
func (h Hold) Use() availability.Use[device.Ref] {
	use := availability.Use[device.Ref]{Holder: availability.Holder(h.Holder), Device: h.Device, Share: h.Share, Reason: availability.HeldByClaim}
	switch {
	case h.Holder.Kind == KindPod:
		use.Reason = availability.HeldByPod
	case h.Unreadable, h.State == StateDraining, h.Overdue():
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
	// Shares of those Devices that the claim shares, also where its share is all of the device. A device without an entry is the claim's alone.
	Shares map[device.Ref]device.Share
	// PodsFirst, where set, makes the claim wait for pods that kubelet is about to admit.
	PodsFirst *PodsFirst
}

// PodRequest asks for the device, or the share, of one device ID of kubelet's device manager.
type PodRequest struct {
	// ID as ListAndWatch sent it.
	ID       string
	Resource string
	Device   device.Ref
	Share    device.Share
	// OutOfService is why only a pod that has the device already gets it, and another one ErrWithdrawn. Empty: any pod gets it.
	OutOfService string
}

// ErrWithdrawn says that a device is given to no new holder.
var ErrWithdrawn = errors.New("the device is given to no new holder")

// PodState is the state of the pods of a hold.
type PodState int

const (
	// Running pods may have containers. An unknown state counts as Running.
	Running PodState = iota
	// Terminating pods still run but are being deleted.
	Terminating
	// Orphaned pods are gone from the API server, but containers may still run.
	Orphaned
	// Gone pods have no container left that could use the device.
	Gone
)

// PodStates returns whether a hold is in use. A call from kubelet waits for the answer, so it must come from memory and the kernel,
// never from the network.
type PodStates interface {
	PodState(Hold) PodState
	// Started reports whether a process of the pod of a pod's hold runs, or may run. kubelet allocates all devices of a pod before it
	// starts a container (k8s.io/kubernetes pkg/kubelet/cm/devicemanager, Allocate as an admission handler). A kubelet that lost its
	// checkpoint allocates again when a container of a running pod restarts (GetDeviceRunContainerOptions). all contains every hold;
	// if h names no pod, those that name one exclude their pods.
	Started(h Hold, all []Hold) bool
	// Reuses reports whether the pod of a pod's hold may request its device ID again: kubelet is in the middle of the pod's admission, and
	// a later container takes over the device of an init container. If the pod watch has not reported the pod, or its end, Reuses waits
	// for it, a second at most. It also returns true for a hold that names no pod and that kubelet gave to none.
	Reuses(h Hold) bool
}

// ErrLocked is returned by Open when another process has the ledger open.
var ErrLocked = records.ErrLocked

// ErrCancelled is returned by ReserveClaim when the claim was unprepared while the call waited.
var ErrCancelled = errors.New("the claim was unprepared meanwhile")

// ConflictError means that other holders have requested devices.
type ConflictError struct {
	// Holds that conflict with the request, at least one.
	Holds []Hold
	// Generation was the latest of all holds when ReserveClaim found the conflict.
	Generation uint64
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
