// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/evidence"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Restore adds to the ledger what its own records may not know: limits whose pods have a cgroup, by kubelet's device
// checkpoint and pod resources; claims that kubelet's state names, which survive a reboot and must find their devices free.
// It is called once, before either API is registered. A source that cannot be read is logged and skipped: the others and
// the ledger's own records remain.
func (r *Reconciler) Restore(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	checkpoint, err := evidence.ReadDeviceCheckpoint(r.KubeletDir)
	if err != nil {
		logger.Error(err, "Restoring holds without kubelet's device checkpoint")
	}
	claims, err := evidence.ReadClaimState(r.KubeletDir, r.DriverName)
	if err != nil {
		logger.Error(err, "Restoring holds without kubelet's claim state")
	}
	if err := r.restoreLimits(ctx, checkpoint); err != nil {
		return err
	}
	for _, claim := range claims {
		if err := r.restoreClaim(ctx, claim); err != nil {
			return err
		}
	}
	return r.restoreUsed(ctx, checkpoint, claims)
}

func (r *Reconciler) restoreLimits(ctx context.Context, checkpoint evidence.DeviceCheckpoint) error {
	for _, d := range checkpoint.Devices {
		if d.Resource != r.Resource {
			continue
		}
		cgroup, err := r.Cgroups.Pod(d.PodUID)
		if err != nil {
			return fmt.Errorf("restore the hold of pod %s on %s: %w", d.PodUID, d.ID, err)
		}
		if cgroup == evidence.CgroupAbsent {
			continue
		}
		if err := r.expect(ctx, limitHold(d.Resource, d.ID, r.Pods.Name(d.PodUID))); err != nil {
			return err
		}
	}
	return nil
}

func limitHold(resource, id string, pods ...ledger.Pod) ledger.Hold {
	return ledger.Hold{
		Holder: ledger.Holder{Kind: ledger.KindLimit, ID: id}, Device: device.Ref{GPU: id}, Resource: resource, Pods: pods,
	}
}

func (r *Reconciler) restoreClaim(ctx context.Context, claim evidence.KubeletClaim) error {
	devices, err := r.devicesOf(ctx, claim)
	if err != nil {
		return err
	}
	for _, ref := range devices {
		h := ledger.Hold{
			Holder: ledger.Holder{Kind: ledger.KindClaim, ID: claim.UID}, Device: ref,
			Namespace: claim.Namespace, Name: claim.Name,
		}
		for _, uid := range claim.PodUIDs {
			h.Pods = append(h.Pods, r.Pods.Name(uid))
		}
		if err := r.expect(ctx, h); err != nil {
			return err
		}
	}
	return nil
}

// devicesOf asks the API server, which alone knows what was allocated for admin access and so holds nothing. With the API
// server away kubelet's own list counts: no Prepare can come before it is back.
func (r *Reconciler) devicesOf(ctx context.Context, claim evidence.KubeletClaim) ([]device.Ref, error) {
	getCtx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	current, err := r.Claims(claim.Namespace).Get(getCtx, claim.Name, metav1.GetOptions{})
	switch {
	case err == nil && string(current.UID) == claim.UID:
		return r.heldDevices(current), nil
	case err != nil && !apierrors.IsNotFound(err):
		klog.FromContext(ctx).Error(err, "Restoring a claim by kubelet's state alone", "claim", klog.KRef(claim.Namespace, claim.Name))
		return r.resolve(claim.Devices), nil
	}
	for _, uid := range claim.PodUIDs {
		cgroup, err := r.Cgroups.Pod(uid)
		if err != nil {
			return nil, fmt.Errorf("restore the hold of claim %s/%s: %w", claim.Namespace, claim.Name, err)
		}
		if cgroup != evidence.CgroupAbsent {
			return r.resolve(claim.Devices), nil
		}
	}
	return nil, nil
}

// heldDevices are the devices of this node that a claim's allocation holds: all but those of admin access.
func (r *Reconciler) heldDevices(claim *resourceapi.ResourceClaim) []device.Ref {
	if claim.Status.Allocation == nil {
		return nil
	}
	var devices []evidence.PoolDevice
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver == r.DriverName && (result.AdminAccess == nil || !*result.AdminAccess) {
			devices = append(devices, evidence.PoolDevice{Pool: result.Pool, Device: result.Device})
		}
	}
	return r.resolve(devices)
}

func (r *Reconciler) resolve(devices []evidence.PoolDevice) []device.Ref {
	inventory := r.Inventory()
	var refs []device.Ref
	for _, d := range devices {
		if gpu, ok := inventory.ByName(d.Device); ok && d.Pool == r.NodeName {
			refs = append(refs, gpu.Ref())
		}
	}
	return refs
}

// restoreUsed adds what kubelet reports in use and the two checkpoints do not name.
func (r *Reconciler) restoreUsed(ctx context.Context, checkpoint evidence.DeviceCheckpoint, known []evidence.KubeletClaim) error {
	listCtx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	devices, claims, err := r.Resources.List(listCtx, r.Resource, r.DriverName)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Restoring holds without kubelet's pod resources")
		return nil
	}
	for _, d := range devices {
		if slices.ContainsFunc(checkpoint.Devices, func(c evidence.PodDevice) bool { return c.ID == d.ID && c.Resource == d.Resource }) {
			continue
		}
		if err := r.expect(ctx, limitHold(d.Resource, d.ID)); err != nil {
			return err
		}
	}
	for _, used := range claims {
		if slices.ContainsFunc(known, func(c evidence.KubeletClaim) bool { return c.Namespace == used.Namespace && c.Name == used.Claim }) {
			continue
		}
		getCtx, cancel := context.WithTimeout(ctx, callTimeout)
		claim, err := r.Claims(used.Namespace).Get(getCtx, used.Claim, metav1.GetOptions{})
		cancel()
		if err != nil {
			klog.FromContext(ctx).Error(err, "Skipping a claim that kubelet reports in use", "claim", klog.KRef(used.Namespace, used.Claim))
			continue
		}
		found := evidence.KubeletClaim{UID: string(claim.UID), Namespace: used.Namespace, Name: used.Claim}
		for _, consumer := range claim.Status.ReservedFor {
			if consumer.Resource == "pods" {
				found.PodUIDs = append(found.PodUIDs, string(consumer.UID))
			}
		}
		if err := r.restoreClaim(ctx, found); err != nil {
			return err
		}
	}
	return nil
}

// expect reports a device that already has two holders, which is nobody's doing here, and goes on.
func (r *Reconciler) expect(ctx context.Context, h ledger.Hold) error {
	err := r.Ledger.Expect(h)
	var conflict *ledger.ConflictError
	if errors.As(err, &conflict) {
		klog.FromContext(ctx).Error(conflict, "A device was found in two hands", "device", h.Device.String(), "holder", h.String())
		return nil
	}
	if err != nil {
		return fmt.Errorf("restore the hold of %s: %w", h, err)
	}
	return nil
}
