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
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// Conditions on a claim's devices that its containers share (status.devices[].conditions).
const (
	// ConditionSharing is true once the device is shared as asked; the reason is the strategy.
	ConditionSharing = "SharingApplied"
	// ConditionMemoryLimit says by its reason who imposes a limit of memory, and is true where somebody does.
	ConditionMemoryLimit = "MemoryLimit"
)

// Reasons of ConditionMemoryLimit.
const (
	// LimitedByDaemon is a limit that the claim's own MPS daemon imposes.
	LimitedByDaemon = "Daemon"
	// LimitedByClient is a limit that each process imposes on itself: CUDA's library does as its environment says.
	LimitedByClient = "Client"
	// LimitAdvisory is no limit: nobody imposes one under time-slicing.
	LimitAdvisory = "Advisory"
	// LimitNone is no limit, since none was asked for.
	LimitNone = "None"
)

// fieldManager of what is said in the status of claims.
const fieldManager = "tandem-agent"

const (
	conditionsRetry     = time.Second
	conditionsRetryMost = 30 * time.Second
	conditionsTimeout   = 10 * time.Second
)

// conditions are what is to be said in the status of claims whose devices are shared. It is written after kubelet was answered:
// no pod waits for it, and a claim that is gone by then is none of its business.
type conditions struct {
	client kubernetes.Interface
	driver string

	mu      sync.Mutex
	pending map[types.UID]statement
	more    chan struct{}
}

// statement is about one claim.
type statement struct {
	claim   types.NamespacedName
	devices []resourceapi.AllocatedDeviceStatus
}

func newConditions(c Config) *conditions {
	return &conditions{client: c.KubeClient, driver: c.DriverName, pending: map[types.UID]statement{}, more: make(chan struct{}, 1)}
}

// say has it written what a claim has got, unless the claim says so already. Nothing is written for claims that share nothing.
func (c *conditions) say(p *preparation) {
	s := statement{claim: types.NamespacedName{Namespace: p.claim.Namespace, Name: p.claim.Name}}
	news := false
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
			news = news || !stated(p.claim, status)
			s.devices = append(s.devices, status)
		}
	}
	if !news {
		return
	}
	c.mu.Lock()
	c.pending[p.claim.UID] = s
	c.mu.Unlock()
	select {
	case c.more <- struct{}{}:
	default: // one is waiting already
	}
}

// stated reports whether the claim's status has all of it.
func stated(claim *resourceapi.ResourceClaim, want resourceapi.AllocatedDeviceStatus) bool {
	i := slices.IndexFunc(claim.Status.Devices, func(s resourceapi.AllocatedDeviceStatus) bool {
		return s.Driver == want.Driver && s.Pool == want.Pool && s.Device == want.Device && ptr.Equal(s.ShareID, want.ShareID)
	})
	return i >= 0 && !slices.ContainsFunc(want.Conditions, func(w metav1.Condition) bool {
		has := meta.FindStatusCondition(claim.Status.Devices[i].Conditions, w.Type)
		return has == nil || has.Status != w.Status || has.Reason != w.Reason || has.Message != w.Message
	})
}

// conditionsOf a device that is shared, of which the claim has a share.
func conditionsOf(g *sharedGroup, d device.Device, share device.Share) []metav1.Condition {
	now := metav1.Now()
	applied := metav1.Condition{
		Type: ConditionSharing, Status: metav1.ConditionTrue, Reason: string(g.sharing.Strategy), LastTransitionTime: now,
	}
	limit := metav1.Condition{Type: ConditionMemoryLimit, Status: metav1.ConditionFalse, LastTransitionTime: now}
	if g.sharing.Strategy == parametersv1beta1.TimeSlicing {
		applied.Message = fmt.Sprintf("processes take turns, time slice %s", cmp.Or(string(g.sharing.Interval), "of the device"))
		limit.Reason, limit.Message = LimitAdvisory, "processes that take turns share the memory, and nobody imposes a limit"
		if !share.Whole() {
			limit.Message = fmt.Sprintf("nobody keeps the claim's processes to their %d MiB, or those of others to theirs", share.Bytes/device.ShareUnit)
		}
		return []metav1.Condition{applied, limit}
	}
	if g.beside {
		applied.Message = "processes are clients of the GPU's MPS daemon, beside those of others"
		limit.Reason, limit.Message = LimitNone, "the claim has all of the memory"
		if !share.Whole() {
			limit.Status, limit.Reason = metav1.ConditionTrue, LimitedByClient
			const most = "each process keeps itself to %d MiB, by CUDA_MPS_PINNED_DEVICE_MEM_LIMIT in its environment: one that is started without has no limit"
			limit.Message = fmt.Sprintf(most, share.Bytes/device.ShareUnit)
		}
		return []metav1.Condition{applied, limit}
	}
	applied.Message = "processes are clients of the claim's own MPS daemon"
	settings := sharing.Settings(g.devices, *g.sharing.MPS, "")
	at := slices.Index(settings.Devices, d.UUID())
	if at < 0 || at >= len(settings.PinnedMemoryMiB) || settings.PinnedMemoryMiB[at] == 0 {
		limit.Reason, limit.Message = LimitNone, "no limit was asked for"
		return []metav1.Condition{applied, limit}
	}
	limit.Status, limit.Reason = metav1.ConditionTrue, LimitedByDaemon
	// The daemon takes commands through the pipe directory, which its clients have.
	const most = "the claim's own MPS daemon gives each client %d MiB at most, " +
		"which clients that run as root in their container can change"
	limit.Message = fmt.Sprintf(most, settings.PinnedMemoryMiB[at])
	return []metav1.Condition{applied, limit}
}

// run writes until ctx is done. What is not written by then is said again with the next Prepare.
func (c *conditions) run(ctx context.Context) error {
	for wait := conditionsRetry; ; {
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
		case <-c.more:
		case <-retry:
		}
	}
}

// writeAll reports whether something is left for another try.
func (c *conditions) writeAll(ctx context.Context) (left bool) {
	c.mu.Lock()
	pending := c.pending
	c.pending = map[types.UID]statement{}
	c.mu.Unlock()
	for uid, s := range pending {
		err := c.write(ctx, uid, s)
		if err == nil || ctx.Err() != nil {
			continue
		}
		logger := klog.FromContext(ctx).WithValues("claim", klog.KRef(s.claim.Namespace, s.claim.Name), "claimUID", uid)
		switch {
		case apierrors.IsNotFound(err), apierrors.IsConflict(err), apierrors.IsInvalid(err):
			logger.V(2).Info("A claim is not any more what it was when its devices were shared", "reason", err.Error())
		case apierrors.IsForbidden(err):
			logger.Error(err, "Cannot say in the claim's status how its devices are shared")
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

func (c *conditions) write(ctx context.Context, uid types.UID, s statement) error {
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

// update is for claims that server-side apply is refused for: it decodes and encodes anew the parameters of the allocation, and the
// data of other drivers, and where that gives other bytes (the order of fields, spaces, escapes) they pass for changed. Patches and JSON
// lose some of these as well. In protobuf, which the client speaks, they go back as they came.
func (c *conditions) update(ctx context.Context, uid types.UID, s statement) error {
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
		return fmt.Errorf("update conditions of the devices of claim %s: %w", s.claim, errOvertaken)
	case err != nil:
		return fmt.Errorf("update conditions of the devices of claim %s: %w", s.claim, err)
	}
	return nil
}

// errOvertaken means that somebody has written a claim between reading and writing it. It is tried again, unlike the conflict of
// a claim that has another UID by now.
var errOvertaken = errors.New("somebody else has just changed it")
