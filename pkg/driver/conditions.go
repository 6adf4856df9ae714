// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// Conditions on shared devices of a claim (status.devices[].conditions).
const (
	// ConditionSharing is true once the sharing settings are applied; the reason is the strategy.
	ConditionSharing = "SharingApplied"
	// ConditionMemoryLimit is true if a memory limit is enforced. The reason names what enforces it: the claim's own MPS "Daemon", or
	// CUDA's library in each "Client". Of a limit that is not enforced it is "Advisory"; without a limit it is "None".
	ConditionMemoryLimit = "MemoryLimit"
)

// fieldManager owns the conditions that the agent writes.
const fieldManager = "tandem-agent"

// claimStatus is the conditions of a claim's devices that have to be written.
type claimStatus struct {
	uid             types.UID
	namespace, name string
	devices         []resourceapi.AllocatedDeviceStatus
}

// addConditions queues the conditions of a prepared claim, if it shares a device. They are written after kubelet was answered: no pod
// waits for them. The next Prepare queues those that are missing then.
func (d *Driver) addConditions(p *preparation) {
	s := claimStatus{uid: p.claim.UID, namespace: p.claim.Namespace, name: p.claim.Name}
	for _, g := range p.groups {
		if g.sharing.Strategy == "" || g.sharing.Strategy == sharing.Exclusive {
			continue
		}
		for _, i := range g.answers {
			answer := p.answer[i]
			status := resourceapi.AllocatedDeviceStatus{
				Driver: d.DriverName, Pool: answer.PoolName, Device: answer.DeviceName, ShareID: (*string)(answer.ShareID),
			}
			for _, member := range g.devices {
				if member.Name() == answer.DeviceName {
					status.Conditions = conditionsOf(g, member, p.request.Shares[member.Ref()])
				}
			}
			s.devices = append(s.devices, status)
		}
	}
	if len(s.devices) > 0 {
		select {
		case d.statuses <- s:
		default: // the API server has not answered for long
		}
	}
}

// conditionsOf returns the conditions of a shared device, of which the claim has a share.
func conditionsOf(g *sharedGroup, d device.Device, share device.Share) []metav1.Condition {
	applied := metav1.Condition{Type: ConditionSharing, Status: metav1.ConditionTrue, Reason: string(g.sharing.Strategy)}
	limit := metav1.Condition{Type: ConditionMemoryLimit, Status: metav1.ConditionFalse}
	switch {
	case g.sharing.Strategy == parametersv1beta1.TimeSlicing:
		applied.Message = fmt.Sprintf("processes take turns, time slice %s", cmp.Or(string(g.sharing.Interval), "of the device"))
		limit.Reason, limit.Message = "Advisory", "processes that take turns share the memory without a limit"
		if !share.Whole() {
			limit.Message = fmt.Sprintf("time-slicing does not enforce the claim's %d MiB, nor the shares of other holders", share.Bytes/device.ShareUnit)
		}
	case g.share:
		applied.Message = "processes are clients of the GPU's MPS daemon, together with those of other holders"
		limit.Reason, limit.Message = "None", "the claim has all of the memory"
		if !share.Whole() {
			limit.Status, limit.Reason = metav1.ConditionTrue, "Client"
			limit.Message = fmt.Sprintf("CUDA limits each process to %d MiB by CUDA_MPS_PINNED_DEVICE_MEM_LIMIT in its environment: "+
				"a process without that variable has no limit", share.Bytes/device.ShareUnit)
		}
	default:
		applied.Message = "processes are clients of the claim's own MPS daemon"
		limit.Reason, limit.Message = "None", "no limit was requested"
		settings := sharing.Settings(g.devices, *g.sharing.MPS, "")
		at := slices.Index(settings.Devices, d.UUID())
		if at >= 0 && at < len(settings.PinnedMemoryMiB) && settings.PinnedMemoryMiB[at] > 0 {
			limit.Status, limit.Reason = metav1.ConditionTrue, "Daemon"
			// The daemon takes commands through the pipe directory, which is mounted into its clients.
			limit.Message = fmt.Sprintf("the claim's own MPS daemon limits each client to %d MiB, "+
				"which clients that run as root in their container can change", settings.PinnedMemoryMiB[at])
		}
	}
	return []metav1.Condition{applied, limit}
}

// writeConditions writes queued conditions until ctx is done.
func (d *Driver) writeConditions(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for {
		select {
		case <-ctx.Done():
			return group.Wait()
		case s := <-d.statuses:
			group.Go(func() error {
				d.writeClaimConditions(ctx, s)
				return nil
			})
		}
	}
}

func (d *Driver) writeClaimConditions(ctx context.Context, s claimStatus) {
	logger := klog.FromContext(ctx).WithValues("claim", klog.KRef(s.namespace, s.name), "claimUID", s.uid)
	retry(ctx, logger, "Cannot write conditions of a claim's shared devices", func() error {
		err := d.updateStatus(ctx, s)
		switch {
		case apierrors.IsInvalid(err):
			logger.V(2).Info("Not writing conditions of a claim that has changed since it was prepared", "reason", err.Error())
			return nil
		case apierrors.IsForbidden(err):
			logger.Error(err, "Not writing conditions of a claim's shared devices")
			return nil
		}
		return err
	})
}

// getClaim returns nil for a claim that does not exist any more, or that another one has replaced.
func (d *Driver) getClaim(ctx context.Context, s claimStatus) (*resourceapi.ResourceClaim, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	claim, err := d.KubeClient.ResourceV1().ResourceClaims(s.namespace).Get(ctx, s.name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("get claim %s/%s: %w", s.namespace, s.name, err)
	case claim.UID != s.uid:
		return nil, nil
	}
	return claim, nil
}

// updateStatus reads a claim, sets the conditions, and writes it if they changed. It does nothing if the claim is gone.
//
// It does not use server-side apply, patches or JSON: those encode the allocation's opaque parameters again, and the API server
// refuses other bytes (order of fields, spaces, escapes) as a change. In protobuf, which the client uses, the bytes stay the same
// (TestClaimStatusBesideOddParameters).
func (d *Driver) updateStatus(ctx context.Context, s claimStatus) error {
	if len(s.devices) == 0 {
		return nil
	}
	claim, err := d.getClaim(ctx, s)
	if claim == nil || err != nil {
		return err
	}
	changed := false
	for _, entry := range s.devices {
		known := statusOf(claim, entry)
		if known == nil {
			claim.Status.Devices = append(claim.Status.Devices, resourceapi.AllocatedDeviceStatus{
				Driver: entry.Driver, Pool: entry.Pool, Device: entry.Device, ShareID: entry.ShareID,
			})
			known = &claim.Status.Devices[len(claim.Status.Devices)-1]
		}
		for _, condition := range entry.Conditions {
			changed = meta.SetStatusCondition(&known.Conditions, condition) || changed
		}
	}
	if !changed {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	options := metav1.UpdateOptions{FieldManager: fieldManager}
	if _, err := d.KubeClient.ResourceV1().ResourceClaims(s.namespace).UpdateStatus(ctx, claim, options); err != nil {
		return fmt.Errorf("update the conditions of claim %s/%s: %w", s.namespace, s.name, err)
	}
	return nil
}

// statusOf returns the claim's status entry for a device, or nil.
func statusOf(claim *resourceapi.ResourceClaim, d resourceapi.AllocatedDeviceStatus) *resourceapi.AllocatedDeviceStatus {
	for i, s := range claim.Status.Devices {
		if s.Driver == d.Driver && s.Pool == d.Pool && s.Device == d.Device && ptr.Equal(s.ShareID, d.ShareID) {
			return &claim.Status.Devices[i]
		}
	}
	return nil
}
