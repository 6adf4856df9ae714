// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// Conditions on shared devices of a claim (status.devices[].conditions).
const (
	// ConditionSharing is true once the sharing settings are applied; the reason is the strategy.
	ConditionSharing = "SharingApplied"
	// ConditionMemoryLimit is true if a memory limit is enforced. The reason names the component that enforces it.
	ConditionMemoryLimit = "MemoryLimit"
)

// Reasons of ConditionMemoryLimit.
const (
	// LimitedByDaemon: the claim's own MPS daemon enforces the limit.
	LimitedByDaemon = "Daemon"
	// LimitedByClient: CUDA's library in each process enforces the limit in its environment.
	LimitedByClient = "Client"
	// LimitAdvisory: time-slicing enforces no limit.
	LimitAdvisory = "Advisory"
	// LimitNone: no limit was requested.
	LimitNone = "None"
)

// fieldManager owns the conditions that the agent writes.
const fieldManager = "tandem-agent"

// statusTimeout bounds one read or write of a claim.
const statusTimeout = 10 * time.Second

// conditions are those of prepared claims with shared devices that have to be written. They are written after kubelet was
// answered: no pod waits for them.
type conditions struct {
	mu      sync.Mutex
	pending map[types.UID]claimConditions
	added   broadcast.Signal
}

// claimConditions are the conditions of one claim.
type claimConditions struct {
	claim   types.NamespacedName
	devices []resourceapi.AllocatedDeviceStatus
}

// addConditions queues the conditions of a prepared claim, if it shares a device.
func (d *Driver) addConditions(p *preparation) {
	s := claimConditions{claim: types.NamespacedName{Namespace: p.claim.Namespace, Name: p.claim.Name}}
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
	if len(s.devices) == 0 {
		return
	}
	d.conditions.mu.Lock()
	d.conditions.pending[p.claim.UID] = s
	d.conditions.mu.Unlock()
	d.conditions.added.Notify()
}

// conditionsOf returns the conditions of a shared device, of which the claim has a share.
func conditionsOf(g *sharedGroup, d device.Device, share device.Share) []metav1.Condition {
	applied := metav1.Condition{Type: ConditionSharing, Status: metav1.ConditionTrue, Reason: string(g.sharing.Strategy)}
	limit := metav1.Condition{Type: ConditionMemoryLimit, Status: metav1.ConditionFalse}
	switch {
	case g.sharing.Strategy == parametersv1beta1.TimeSlicing:
		applied.Message = fmt.Sprintf("processes take turns, time slice %s", cmp.Or(string(g.sharing.Interval), "of the device"))
		limit.Reason, limit.Message = LimitAdvisory, "processes that take turns share the memory without a limit"
		if !share.Whole() {
			limit.Message = fmt.Sprintf("time-slicing does not enforce the claim's %d MiB, nor the shares of other holders", share.Bytes/device.ShareUnit)
		}
	case g.share:
		applied.Message = "processes are clients of the GPU's MPS daemon, together with those of other holders"
		limit.Reason, limit.Message = LimitNone, "the claim has all of the memory"
		if !share.Whole() {
			limit.Status, limit.Reason = metav1.ConditionTrue, LimitedByClient
			limit.Message = fmt.Sprintf("CUDA limits each process to %d MiB by CUDA_MPS_PINNED_DEVICE_MEM_LIMIT in its environment: "+
				"a process without that variable has no limit", share.Bytes/device.ShareUnit)
		}
	default:
		applied.Message = "processes are clients of the claim's own MPS daemon"
		limit.Reason, limit.Message = LimitNone, "no limit was requested"
		settings := sharing.Settings(g.devices, *g.sharing.MPS, "")
		at := slices.Index(settings.Devices, d.UUID())
		if at >= 0 && at < len(settings.PinnedMemoryMiB) && settings.PinnedMemoryMiB[at] > 0 {
			limit.Status, limit.Reason = metav1.ConditionTrue, LimitedByDaemon
			// The daemon takes commands through the pipe directory, which is mounted into its clients.
			limit.Message = fmt.Sprintf("the claim's own MPS daemon limits each client to %d MiB, "+
				"which clients that run as root in their container can change", settings.PinnedMemoryMiB[at])
		}
	}
	return []metav1.Condition{applied, limit}
}

// writeConditions writes queued conditions until ctx is done. The next Prepare queues those that are missing then.
func (d *Driver) writeConditions(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for ctx.Err() == nil {
		added := d.conditions.added.Changed()
		d.conditions.mu.Lock()
		pending := maps.Clone(d.conditions.pending)
		clear(d.conditions.pending)
		d.conditions.mu.Unlock()
		for uid, s := range pending {
			group.Go(func() error {
				d.writeClaimConditions(ctx, uid, s)
				return nil
			})
		}
		select {
		case <-ctx.Done():
		case <-added:
		}
	}
	return group.Wait()
}

func (d *Driver) writeClaimConditions(ctx context.Context, uid types.UID, s claimConditions) {
	logger := klog.FromContext(ctx).WithValues("claim", klog.KRef(s.claim.Namespace, s.claim.Name), "claimUID", uid)
	retry(ctx, logger, "Cannot write conditions of a claim's shared devices", func() error {
		err := d.updateStatus(ctx, s.claim, uid, func(claim *resourceapi.ResourceClaim) (changed bool) {
			for _, shared := range s.devices {
				for _, condition := range shared.Conditions {
					changed = setCondition(claim, shared, condition) || changed
				}
			}
			return changed
		})
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
func (d *Driver) getClaim(ctx context.Context, name types.NamespacedName, uid types.UID) (*resourceapi.ResourceClaim, error) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	claim, err := d.KubeClient.ResourceV1().ResourceClaims(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("get claim %s: %w", name, err)
	case claim.UID != uid:
		return nil, nil
	}
	return claim, nil
}

// updateStatus reads a claim, changes its status, and writes it if change returns true. It does nothing if the claim is gone.
//
// It does not use server-side apply, patches or JSON: those encode the allocation's opaque parameters again, and the API server
// refuses other bytes (order of fields, spaces, escapes) as a change. In protobuf, which the client uses, the bytes stay the same
// (TestClaimStatusBesideOddParameters).
func (d *Driver) updateStatus(ctx context.Context, name types.NamespacedName, uid types.UID, change func(*resourceapi.ResourceClaim) bool) error {
	claim, err := d.getClaim(ctx, name, uid)
	if claim == nil || err != nil || !change(claim) {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	options := metav1.UpdateOptions{FieldManager: fieldManager}
	if _, err := d.KubeClient.ResourceV1().ResourceClaims(name.Namespace).UpdateStatus(ctx, claim, options); err != nil {
		return fmt.Errorf("update the conditions of claim %s: %w", name, err)
	}
	return nil
}

// setCondition sets a condition of the device, and reports whether that changed the claim.
func setCondition(claim *resourceapi.ResourceClaim, d resourceapi.AllocatedDeviceStatus, condition metav1.Condition) (changed bool) {
	known := statusOf(claim, d)
	if known == nil {
		claim.Status.Devices = append(claim.Status.Devices, resourceapi.AllocatedDeviceStatus{
			Driver: d.Driver, Pool: d.Pool, Device: d.Device, ShareID: d.ShareID,
		})
		known = &claim.Status.Devices[len(claim.Status.Devices)-1]
	}
	return meta.SetStatusCondition(&known.Conditions, condition)
}

// statusOf returns the claim's status entry for a device, or nil.
func statusOf(claim *resourceapi.ResourceClaim, d resourceapi.AllocatedDeviceStatus) *resourceapi.AllocatedDeviceStatus {
	i := slices.IndexFunc(claim.Status.Devices, func(s resourceapi.AllocatedDeviceStatus) bool {
		return s.Driver == d.Driver && s.Pool == d.Pool && s.Device == d.Device && ptr.Equal(s.ShareID, d.ShareID)
	})
	if i < 0 {
		return nil
	}
	return &claim.Status.Devices[i]
}
