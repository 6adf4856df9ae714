// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

const (
	// kubeletPatience is kubelet's deadline for NodePrepareResources (pkg/kubelet/cm/dra/plugin).
	kubeletPatience = 45 * time.Second
	// answerMargin is what is left of the deadline for the answer to arrive: kubelet must learn why, not that time ran out.
	answerMargin = 3 * time.Second
	// podsFirstBudget is how long a call lets limits pods go first.
	podsFirstBudget = 2 * time.Second
)

// preparation is one claim of a call on its way.
type preparation struct {
	claim   *resourceapi.ResourceClaim
	request ledger.ClaimRequest
	answer  []kubeletplugin.Device
	// demands are what has to be made once it is reserved.
	demands []demand
	// names maps the devices in request to the names under which they are published.
	names map[device.Ref]string
	// taken is what the ledger gave this call.
	taken ledger.Taken
	err   error
	// visible are the UUIDs of the devices that the answer names and that are there.
	visible []string
	// groups are the devices that the claim's containers share, by how they do.
	groups []*sharedGroup
	// begun is set where what was begun for the claim goes on, and so it keeps what it has taken.
	begun bool
}

// demand is a partition, or a dynamic GPU as a whole, for one entry of the answer.
type demand struct {
	entry  int
	device device.Device
}

// prepareClaims answers one NodePrepareResources call, all claims of one pod: every device of it or none. The pod cannot
// start with less, and half of it would keep others waiting.
func (d *Driver) prepareClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) map[types.UID]kubeletplugin.PrepareResult {
	ctx, cancel := callContext(ctx)
	defer cancel()
	inv := d.Inventory.Inventory()
	preparations := make([]*preparation, len(claims))
	ok := true
	yield := &ledger.PodsFirst{Slots: d.podSlots(inv), WaitBudget: podsFirstBudget}
	for i, claim := range claims {
		preparations[i] = d.plan(ctx, claim, inv)
		preparations[i].request.PodsFirst = yield
		ok = ok && preparations[i].err == nil
	}
	if ok {
		d.waitForPods(ctx, preparations)
		ok = d.reserve(ctx, preparations)
		d.metrics.countPodsFirst(podsFirstBudget - yield.WaitBudget)
	}
	if !ok {
		d.undo(ctx, preparations)
	}
	return d.results(ctx, preparations, ok)
}

// waitForPods makes sure that the limits pods that go first are known: kubelet may have heard of them, and of this call's pod, before
// us.
func (d *Driver) waitForPods(ctx context.Context, preparations []*preparation) {
	ctx, cancel := context.WithTimeout(ctx, podsFirstBudget)
	defer cancel()
	for _, p := range preparations {
		if len(p.request.Devices) > 0 {
			d.Pods.WaitForPods(ctx, p.request)
		}
	}
}

// podSlots are the devices, and shares of devices, that limits may use, by resource.
func (d *Driver) podSlots(inv device.Inventory) map[string][]ledger.Slot {
	gpus := inv.GPUs
	if d.OfferedToPods != nil {
		gpus = slices.DeleteFunc(slices.Clone(gpus), func(g device.GPU) bool { return !d.OfferedToPods(g) })
	}
	offers, _ := d.Limits.Offers(gpus)
	slots := map[string][]ledger.Slot{}
	for _, o := range offers {
		if o.Device.Health().Healthy() {
			slots[o.Resource] = append(slots[o.Resource], ledger.Slot{Device: o.Device.Ref(), Share: o.Share})
		}
	}
	return slots
}

// callContext ends early enough for the answer to reach kubelet.
func callContext(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithTimeout(ctx, kubeletPatience-answerMargin)
	}
	margin := min(answerMargin, time.Until(deadline)/2)
	return context.WithDeadline(ctx, deadline.Add(-margin))
}

// plan translates the allocation without touching anything.
func (d *Driver) plan(ctx context.Context, claim *resourceapi.ResourceClaim, inv device.Inventory) *preparation {
	p := &preparation{
		claim: claim,
		names: map[device.Ref]string{},
		request: ledger.ClaimRequest{
			UID: string(claim.UID), Namespace: claim.Namespace, Name: claim.Name, Pods: podsOf(claim),
		},
	}
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != d.DriverName {
			continue
		}
		if p.err = d.planResult(ctx, p, result, inv); p.err != nil {
			return p
		}
	}
	p.err = cmp.Or(p.checkGroups(), p.checkDaemons())
	return p
}

func (d *Driver) planResult(ctx context.Context, p *preparation, result resourceapi.DeviceRequestAllocationResult, inv device.Inventory) error {
	found, onDemand, err := d.resolve(result, inv)
	if err != nil {
		return err
	}
	parameters, err := parametersv1beta1.Allocated(p.claim, d.DriverName, result, found.Whole())
	if err != nil {
		return refuseParameters(result.Request, err)
	}
	admin := ptr.Deref(result.AdminAccess, false)
	prepared := kubeletplugin.Device{
		Requests: []string{result.Request}, PoolName: result.Pool, DeviceName: result.Device, ShareID: result.ShareID,
	}
	ref, health := found.Ref(), found.Health()
	switch {
	case !health.Healthy() && admin:
		// A monitor of all GPUs must not go blind on the good ones because of a bad one, which cannot be injected.
		d.Recorder.Eventf(p.claim, corev1.EventTypeWarning, reasonDeviceUnhealthy, "device %s (%s) is not visible to the claim: it is unhealthy (%s: %s)", result.Device, ref, health.Reason, health.Message)
		klog.FromContext(ctx).Info("Leaving an unhealthy device out of a claim with admin access", "claim", klog.KObj(p.claim), "device", ref.String(), "reason", health.Reason)
	case !health.Healthy():
		return refuse(reasonDeviceUnhealthy, "device %s (%s) for request %s is unhealthy (%s: %s): delete the pod to have it placed on another device", result.Device, ref, result.Request, health.Reason, health.Message)
	case found.Whole() && found.GPU.MIGEnabled && !found.GPU.Dynamic && !admin:
		return refuse(reasonUnknownDevice, "device %s (%s) for request %s is in MIG mode by now and cannot be given out as a whole: delete the pod and its claim to have it allocated anew", result.Device, ref, result.Request)
	case onDemand && !admin:
		p.demands = append(p.demands, demand{len(p.answer), found})
	case found.UUID() == "":
		// Admin access looks at what others have, and nobody has this partition.
	default:
		d.show(p, &prepared, found.UUID())
	}
	p.answer = append(p.answer, prepared)
	// Admin access looks at devices that others hold, and holds nothing itself.
	if admin {
		return nil
	}
	share := shareOf(p.claim, result, found)
	p.ask(ref, result.Device, share)
	switch {
	case parameters.Sharing != nil:
		return p.group(parameters, result.Request, found, share)
	case !share.Whole():
		p.stand(result.Request, found)
	}
	return nil
}

// ask adds a device, or some more of it, to what is to be reserved.
func (p *preparation) ask(ref device.Ref, name string, share device.Share) {
	if slices.Contains(p.request.Devices, ref) {
		share = plus(p.request.Shares[ref], share)
	} else {
		p.request.Devices = append(p.request.Devices, ref)
		p.names[ref] = name
	}
	if !share.Whole() && p.request.Shares == nil {
		p.request.Shares = map[device.Ref]device.Share{}
	}
	if p.request.Shares != nil {
		p.request.Shares[ref] = share
	}
}

// show puts a device into the container.
func (d *Driver) show(p *preparation, prepared *kubeletplugin.Device, uuid string) {
	prepared.CDIDeviceIDs = []string{d.Specs.QualifiedName(uuid)}
	p.visible = append(p.visible, uuid)
}

// resolve finds the device that a result names, and refuses what this node cannot give as asked. A dynamic GPU as a whole, and
// what is in a pool of its GPU's own, is had on demand, unless it is a partition that exists without us.
func (d *Driver) resolve(result resourceapi.DeviceRequestAllocationResult, inv device.Inventory) (found device.Device, onDemand bool, err error) {
	if device.NodeOfPool(result.Pool) != d.NodeName {
		return device.Device{}, false, refuse(reasonUnknownDevice, "request %s got device %s of pool %s, but this node serves pool %s only: delete the pod and its claim to have it allocated anew", result.Request, result.Device, result.Pool, d.NodeName)
	}
	found, ok := inv.ByName(result.Device)
	onDemand = found.Whole() && found.GPU.Dynamic ||
		result.Pool != d.NodeName && (found.UUID() == "" || found.Whole() || found.Partition.Made)
	if !ok && len(inv.GPUs) == 0 {
		return device.Device{}, false, fmt.Errorf("device %s of pool %s for request %s is not there: the node has no NVIDIA driver at the moment, or it finds no GPU", result.Device, result.Pool, result.Request)
	}
	if !ok || found.UUID() == "" && !onDemand {
		return device.Device{}, false, refuse(reasonUnknownDevice, "device %s of pool %s for request %s does not exist on this node (removed, or renumbered by a reboot): delete the pod and its claim to have it allocated anew", result.Device, result.Pool, result.Request)
	}
	return found, onDemand, nil
}

// podsOf says which pods the claim is reserved for.
func podsOf(claim *resourceapi.ResourceClaim) []ledger.Pod {
	var pods []ledger.Pod
	for _, consumer := range claim.Status.ReservedFor {
		if consumer.APIGroup == "" && consumer.Resource == "pods" {
			pods = append(pods, ledger.Pod{UID: string(consumer.UID), Namespace: claim.Namespace, Name: consumer.Name})
		}
	}
	return pods
}

// reserve takes the devices of every claim and makes sure that what will be answered exists. It stops at the first failure.
func (d *Driver) reserve(ctx context.Context, preparations []*preparation) bool {
	for _, p := range preparations {
		if len(p.request.Devices) == 0 {
			continue
		}
		taken, err := d.Ledger.ReserveClaim(ctx, p.request)
		p.taken = taken
		if err != nil {
			p.err = d.explain(ctx, p, err)
			return false
		}
	}
	var visible []string
	for _, p := range preparations {
		if p.err = d.meetDemands(ctx, p); p.err != nil {
			return false
		}
		visible = append(visible, p.visible...)
	}
	if !d.share(ctx, preparations) {
		return false
	}
	if err := d.Specs.Ensure(ctx, visible...); err != nil {
		for _, p := range preparations {
			p.err = fmt.Errorf("make CDI specs available: %w", err)
		}
		return false
	}
	return true
}

// undo gives back what this call took. What a claim held before stays, and so does what a call for another pod with the same
// claim has been told meanwhile that it has.
func (d *Driver) undo(ctx context.Context, preparations []*preparation) {
	for _, p := range preparations {
		d.giveBack(ctx, p)
	}
}

func (d *Driver) giveBack(ctx context.Context, p *preparation) {
	if p.begun {
		return
	}
	if err := d.Ledger.GiveBack(p.request.UID, p.taken); err != nil {
		// kubelet retries or unprepares: either settles the hold.
		klog.FromContext(ctx).Error(err, "Cannot give back the devices of a claim that was not prepared", "claim", klog.KObj(p.claim), "claimUID", p.claim.UID)
	}
}

// results has an entry for each claim. After a failure every claim of the call gets an error: kubelet must not take one for
// prepared that was given back.
func (d *Driver) results(ctx context.Context, preparations []*preparation, ok bool) map[types.UID]kubeletplugin.PrepareResult {
	results := make(map[types.UID]kubeletplugin.PrepareResult, len(preparations))
	failed := ""
	for _, p := range preparations {
		if p.err != nil && failed == "" {
			failed = klog.KObj(p.claim).String()
		}
	}
	for _, p := range preparations {
		switch {
		case ok:
			results[p.claim.UID] = kubeletplugin.PrepareResult{Devices: p.answer}
			d.conditions.say(p)
		case p.err == nil:
			results[p.claim.UID] = kubeletplugin.PrepareResult{Err: fmt.Errorf("prepare claim %s: not prepared because claim %s of the same pod was not", klog.KObj(p.claim), failed)}
		default:
			var refused *refusal
			if errors.As(p.err, &refused) {
				d.Recorder.Event(p.claim, corev1.EventTypeWarning, refused.reason, refused.message)
			}
			results[p.claim.UID] = kubeletplugin.PrepareResult{Err: fmt.Errorf("prepare claim %s: %w", klog.KObj(p.claim), p.err)}
		}
	}
	return results
}

// unprepareClaims answers one NodeUnprepareResources call. The ledger lets go as soon as no container can use the devices;
// kubelet is answered at once.
func (d *Driver) unprepareClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) map[types.UID]error {
	results := make(map[types.UID]error, len(claims))
	for _, claim := range claims {
		if err := d.Ledger.DrainClaim(ctx, string(claim.UID)); err != nil {
			results[claim.UID] = fmt.Errorf("unprepare claim %s: %w", claim.NamespacedName, err)
			continue
		}
		results[claim.UID] = nil
	}
	return results
}
