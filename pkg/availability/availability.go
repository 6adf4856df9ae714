// SPDX-License-Identifier: Apache-2.0

// Package availability answers whether a device can be given to a holder, and if not, why. The ledger, both front-ends, the
// GPUNode status and the controller ask it, so that all of them give the same answer. It is pure: every function is safe for
// concurrent use and depends on its arguments only.
package availability

import (
	"iter"
	"slices"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// Kind is the API through which a holder asked for its device.
type Kind string

const (
	Claim Kind = "claim"
	Pod   Kind = "pod"
)

// Holder identifies who has a device: a claim by its UID, or a pod by the device ID that kubelet allocated to it. The zero
// Holder is one that has no device yet.
type Holder struct {
	Kind Kind
	ID   string
}

// Reason is why a device is not available.
type Reason string

const (
	// Available is the reason of a device that can be given away.
	Available Reason = ""
	// Unhealthy means that no work can run on the device.
	Unhealthy Reason = "Unhealthy"
	// HeldByClaim means that a claim holds the device or hardware that overlaps it.
	HeldByClaim Reason = "HeldByClaim"
	// HeldByPod is the same for a pod with an extended resource.
	HeldByPod Reason = "HeldByPod"
	// Draining means that a claim gave the device up and containers may still use it.
	Draining Reason = "Draining"
	// Allocated means that the scheduler allocated the device to a claim that does not hold it yet.
	Allocated Reason = "Allocated"
	// Maintenance means that an administrator has taken the device out of service. It keeps new holders away and takes nothing from those
	// that have the device or were allocated it, so it is not a Use, and Check never returns it; Node.Reason does.
	Maintenance Reason = "Maintenance"
	// Tainted means that the device has a taint, which claims may tolerate. It takes nothing from holders either.
	Tainted Reason = "Tainted"
)

// ByHolder reports whether only holders make the device unavailable: it is neither unhealthy nor out of service.
func (r Reason) ByHolder() bool { return r != Unhealthy && r != Maintenance && r != Tainted }

// precedence orders reasons where a device has several of them, as the counts in GPUNode report it.
var precedence = []Reason{HeldByClaim, Draining, Allocated, HeldByPod}

// Hardware identifies a device: device.Ref where the hardware is known, Name where only API objects are.
type Hardware[D any] interface {
	comparable
	// Overlaps reports whether both use the same hardware, at least in part.
	Overlaps(D) bool
}

// Use is what a holder has of a device, or asks for.
type Use[D Hardware[D]] struct {
	Holder Holder
	Device D
	// Share is zero for the whole device.
	Share device.Share
	// Reason is why this use makes the device unavailable to other holders. A request needs none.
	Reason Reason
}

// Use returns u, so that functions take a slice of Use like a slice of records that contain one.
func (u Use[D]) Use() Use[D] { return u }

// User is a record of a use, such as a hold of the ledger.
type User[D Hardware[D]] interface{ Use() Use[D] }

// Shares reports whether both uses are shares of the same device that can be added up. Such uses exclude each other only if their sum
// is more than the device has.
func (u Use[D]) Shares(other Use[D]) bool {
	return u.Device == other.Device && u.Share.SameWhole(other.Share)
}

// Excludes reports whether two holders cannot have both uses, whatever is left of the device.
func (u Use[D]) Excludes(other Use[D]) bool {
	return u.Device.Overlaps(other.Device) && !u.Shares(other)
}

// Conflicts returns the uses of other holders that prevent the request: those that exclude it, and the other shares of the device
// if it does not have enough for all. None means that the request can be granted if the device is healthy.
func Conflicts[D Hardware[D], U User[D]](request Use[D], uses iter.Seq[U]) []U {
	var conflicts, sharers []U
	used := request.Share
	for user := range uses {
		use := user.Use()
		switch {
		case use.Holder == request.Holder && use.Holder != Holder{}:
		case request.Shares(use):
			sharers = append(sharers, user)
			used = used.Plus(use.Share)
		case request.Excludes(use):
			conflicts = append(conflicts, user)
		}
	}
	if !used.Fits() {
		return append(conflicts, sharers...)
	}
	return conflicts
}

// Check returns why the request cannot be granted, and Available if it can. Of several reasons it returns the first of Unhealthy,
// HeldByClaim, Draining, Allocated and HeldByPod.
func Check[D Hardware[D], U User[D]](healthy bool, request Use[D], uses iter.Seq[U]) Reason {
	if !healthy {
		return Unhealthy
	}
	conflicts := Conflicts(request, uses)
	for _, reason := range precedence {
		if slices.ContainsFunc(conflicts, func(u U) bool { return u.Use().Reason == reason }) {
			return reason
		}
	}
	return Available
}

// Left returns the share of a device that no use takes, of a whole with so much memory (Of) and so many equal shares (OfCount). A use of
// the whole device, of another whole, or of other hardware that overlaps it, takes all.
func Left[D Hardware[D], U User[D]](d D, whole device.Share, uses iter.Seq[U]) device.Share {
	left := whole.Full()
	for user := range uses {
		switch use := user.Use(); {
		case !use.Device.Overlaps(d):
		case use.Device != d, !use.Share.SameWhole(whole):
			left.Bytes, left.Count = 0, 0
		default:
			left.Bytes -= min(left.Bytes, use.Share.Bytes)
			left.Count -= min(left.Count, use.Share.Count)
		}
	}
	return left
}
