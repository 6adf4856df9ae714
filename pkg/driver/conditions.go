// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	applymeta "k8s.io/client-go/applyconfigurations/meta/v1"
	applyresource "k8s.io/client-go/applyconfigurations/resource/v1"
	"k8s.io/client-go/kubernetes"
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
	// ConditionMemoryLimit is true if a memory limit is enforced; the reason says by which component.
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

const (
	conditionsRetry     = time.Second
	conditionsRetryMost = 30 * time.Second
	conditionsTimeout   = 10 * time.Second
)

// conditions writes conditions into the status of claims with shared devices, after kubelet was answered: no pod waits for them.
type conditions struct {
	client kubernetes.Interface
	driver string

	mu      sync.Mutex
	pending map[types.UID]claimConditions
	added   broadcast.Signal
}

// claimConditions are the conditions of one claim.
type claimConditions struct {
	claim   types.NamespacedName
	devices []resourceapi.AllocatedDeviceStatus
}

func newConditions(c Config) *conditions {
	return &conditions{client: c.KubeClient, driver: c.DriverName, pending: map[types.UID]claimConditions{}}
}

// add queues the conditions of a prepared claim, unless its status has them or it shares no device.
func (c *conditions) add(p *preparation) {
	s := claimConditions{claim: types.NamespacedName{Namespace: p.claim.Namespace, Name: p.claim.Name}}
	changed := false
	for _, g := range p.groups {
		if g.sharing.Strategy == "" || g.sharing.Strategy == sharing.Exclusive {
			continue
		}
		for _, i := range g.answers {
			answer := p.answer[i]
			status := resourceapi.AllocatedDeviceStatus{
				Driver: c.driver, Pool: answer.PoolName, Device: answer.DeviceName, ShareID: (*string)(answer.ShareID),
			}
			for _, member := range g.devices {
				if member.Name() == answer.DeviceName {
					status.Conditions = conditionsOf(g, member, p.request.Shares[member.Ref()])
				}
			}
			changed = changed || !hasConditions(p.claim, status)
			s.devices = append(s.devices, status)
		}
	}
	if !changed {
		return
	}
	c.mu.Lock()
	c.pending[p.claim.UID] = s
	c.mu.Unlock()
	c.added.Notify()
}

// hasConditions reports whether the claim's status has these conditions.
func hasConditions(claim *resourceapi.ResourceClaim, want resourceapi.AllocatedDeviceStatus) bool {
	i := slices.IndexFunc(claim.Status.Devices, func(s resourceapi.AllocatedDeviceStatus) bool {
		return s.Driver == want.Driver && s.Pool == want.Pool && s.Device == want.Device && ptr.Equal(s.ShareID, want.ShareID)
	})
	return i >= 0 && !slices.ContainsFunc(want.Conditions, func(w metav1.Condition) bool {
		has := meta.FindStatusCondition(claim.Status.Devices[i].Conditions, w.Type)
		return has == nil || has.Status != w.Status || has.Reason != w.Reason || has.Message != w.Message
	})
}

// conditionsOf returns the conditions of a shared device, of which the claim has a share.
func conditionsOf(g *sharedGroup, d device.Device, share device.Share) []metav1.Condition {
	now := metav1.Now()
	applied := metav1.Condition{
		Type: ConditionSharing, Status: metav1.ConditionTrue, Reason: string(g.sharing.Strategy), LastTransitionTime: now,
	}
	limit := metav1.Condition{Type: ConditionMemoryLimit, Status: metav1.ConditionFalse, LastTransitionTime: now}
	if g.sharing.Strategy == parametersv1beta1.TimeSlicing {
		applied.Message = fmt.Sprintf("processes take turns, time slice %s", cmp.Or(string(g.sharing.Interval), "of the device"))
		limit.Reason, limit.Message = LimitAdvisory, "processes that take turns share the memory without a limit"
		if !share.Whole() {
			limit.Message = fmt.Sprintf("time-slicing does not enforce the claim's %d MiB, nor the shares of other holders", share.Bytes/device.ShareUnit)
		}
		return []metav1.Condition{applied, limit}
	}
	if g.share {
		applied.Message = "processes are clients of the GPU's MPS daemon, together with those of other holders"
		limit.Reason, limit.Message = LimitNone, "the claim has all of the memory"
		if !share.Whole() {
			limit.Status, limit.Reason = metav1.ConditionTrue, LimitedByClient
			const most = "CUDA limits each process to %d MiB by CUDA_MPS_PINNED_DEVICE_MEM_LIMIT in its environment: a process without that variable has no limit"
			limit.Message = fmt.Sprintf(most, share.Bytes/device.ShareUnit)
		}
		return []metav1.Condition{applied, limit}
	}
	applied.Message = "processes are clients of the claim's own MPS daemon"
	settings := sharing.Settings(g.devices, *g.sharing.MPS, "")
	at := slices.Index(settings.Devices, d.UUID())
	if at < 0 || at >= len(settings.PinnedMemoryMiB) || settings.PinnedMemoryMiB[at] == 0 {
		limit.Reason, limit.Message = LimitNone, "no limit was requested"
		return []metav1.Condition{applied, limit}
	}
	limit.Status, limit.Reason = metav1.ConditionTrue, LimitedByDaemon
	// The daemon takes commands through the pipe directory, which is mounted into its clients.
	const most = "the claim's own MPS daemon limits each client to %d MiB, " +
		"which clients that run as root in their container can change"
	limit.Message = fmt.Sprintf(most, settings.PinnedMemoryMiB[at])
	return []metav1.Condition{applied, limit}
}

// run writes queued conditions until ctx is done. The next Prepare queues those that are missing then.
func (c *conditions) run(ctx context.Context) error {
	for wait := conditionsRetry; ; {
		added := c.added.Changed()
		left := c.writeAll(ctx)
		var retry <-chan time.Time
		if left {
			retry = time.After(wait)
			wait = min(2*wait, conditionsRetryMost)
		} else {
			wait = conditionsRetry
		}
		select {
		case <-ctx.Done():
			return nil
		case <-added:
		case <-retry:
		}
	}
}

// writeAll reports whether some conditions have to be retried.
func (c *conditions) writeAll(ctx context.Context) (left bool) {
	c.mu.Lock()
	pending := c.pending
	c.pending = map[types.UID]claimConditions{}
	c.mu.Unlock()
	for uid, s := range pending {
		err := c.write(ctx, uid, s)
		if err == nil || ctx.Err() != nil {
			continue
		}
		logger := klog.FromContext(ctx).WithValues("claim", klog.KRef(s.claim.Namespace, s.claim.Name), "claimUID", uid)
		switch {
		case apierrors.IsNotFound(err), apierrors.IsConflict(err), apierrors.IsInvalid(err):
			logger.V(2).Info("Not writing conditions of a claim that has changed since it was prepared", "reason", err.Error())
		case apierrors.IsForbidden(err):
			logger.Error(err, "Cannot write conditions of a claim's shared devices")
		default:
			left = true
			c.mu.Lock()
			if _, newer := c.pending[uid]; !newer {
				c.pending[uid] = s
			}
			c.mu.Unlock()
		}
	}
	return left
}

func (c *conditions) write(ctx context.Context, uid types.UID, s claimConditions) error {
	ctx, cancel := context.WithTimeout(ctx, conditionsTimeout)
	defer cancel()
	status := applyresource.ResourceClaimStatus()
	for _, d := range s.devices {
		entry := applyresource.AllocatedDeviceStatus().WithDriver(d.Driver).WithPool(d.Pool).WithDevice(d.Device)
		entry.ShareID = d.ShareID
		for _, condition := range d.Conditions {
			entry.WithConditions(applymeta.Condition().WithType(condition.Type).WithStatus(condition.Status).WithReason(condition.Reason).
				WithMessage(condition.Message).WithLastTransitionTime(condition.LastTransitionTime))
		}
		status.WithDevices(entry)
	}
	claim := applyresource.ResourceClaim(s.claim.Name, s.claim.Namespace).WithUID(uid).WithStatus(status)
	options := metav1.ApplyOptions{FieldManager: fieldManager, Force: true}
	_, err := c.client.ResourceV1().ResourceClaims(s.claim.Namespace).ApplyStatus(ctx, claim, options)
	if apierrors.IsInvalid(err) {
		return c.update(ctx, uid, s)
	}
	if err != nil {
		return fmt.Errorf("apply conditions of the devices of claim %s: %w", s.claim, err)
	}
	return nil
}

// update writes the conditions of claims for which the API server refuses server-side apply: apply encodes the allocation's
// opaque parameters again, and other bytes (order of fields, spaces, escapes) count as a change. So do patches and JSON. In
// protobuf, which the client uses, the bytes stay the same.
func (c *conditions) update(ctx context.Context, uid types.UID, s claimConditions) error {
	claims := c.client.ResourceV1().ResourceClaims(s.claim.Namespace)
	claim, err := claims.Get(ctx, s.claim.Name, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("get claim %s: %w", s.claim, err)
	}
	if claim.UID != uid {
		return nil
	}
	for _, d := range s.devices {
		result := resourceapi.DeviceRequestAllocationResult{Driver: d.Driver, Pool: d.Pool, Device: d.Device, ShareID: (*types.UID)(d.ShareID)}
		for _, condition := range d.Conditions {
			setCondition(claim, result, condition)
		}
	}
	switch _, err := claims.UpdateStatus(ctx, claim, metav1.UpdateOptions{FieldManager: fieldManager}); {
	case apierrors.IsConflict(err):
		return fmt.Errorf("update conditions of the devices of claim %s: %w", s.claim, errChanged)
	case err != nil:
		return fmt.Errorf("update conditions of the devices of claim %s: %w", s.claim, err)
	}
	return nil
}

// errChanged means that another process wrote the claim between our GET and PUT. It is retried, unlike a claim with another UID.
var errChanged = errors.New("another process has just changed it")
