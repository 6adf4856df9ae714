// SPDX-License-Identifier: Apache-2.0

// Step 1 of Prepare: what a claim was allocated, and what the answer is.

package driver

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/internal/capacity"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// preparation is the state of one claim during a Prepare call.
type preparation struct {
	claim   *resourceapi.ResourceClaim
	request ledger.ClaimRequest
	answer  []kubeletplugin.Device
	// onDemand are the devices that have to be created after they were reserved.
	onDemand []onDemand
	// names are the published names of the devices in request. consumed is what the scheduler allocated of those that the claim shares.
	names       map[device.Ref]string
	consumed    map[device.Ref]device.Consumed
	reservation ledger.Reservation
	err         error
	// visible are the UUIDs of the devices in the answer, by index.
	visible map[int]string
	groups  []*sharedGroup
	// keepOnError keeps the reservation after an error: the claim's MPS daemon is still starting, and kubelet's retry finds it.
	keepOnError bool
}

// onDemand is a partition, or a dynamic GPU as a whole, for one entry of the answer.
type onDemand struct {
	entry  int
	device device.Device
	// err says why it could not be created.
	err error
}

// sharedGroup is the devices of a claim that one entry of its parameters is about, or one device of which the claim has a share.
type sharedGroup struct {
	// key is the index of the parameters, or the name of the device of which the claim has a share.
	key     string
	path    *field.Path
	request string
	sharing parametersv1beta1.Sharing
	// devices have no UUID before they are created.
	devices []device.Device
	// answers are the indexes of the devices in the claim's answer.
	answers []int
	// share is true if the claim has a share of the device. The node's policy sets how its holders share it.
	share         bool
	clientDevices []string
	err           error
}

func (g *sharedGroup) has(ref device.Ref) bool {
	return slices.ContainsFunc(g.devices, func(d device.Device) bool { return d.Ref() == ref })
}

func (p *preparation) sharingClaim() sharing.Claim {
	return sharing.Claim{UID: p.request.UID, Namespace: p.request.Namespace, Name: p.request.Name}
}

// plan translates the claim's allocation. It has no effect.
func (d *Driver) plan(ctx context.Context, claim *resourceapi.ResourceClaim, inv device.Inventory, podsFirst *ledger.PodsFirst) *preparation {
	p := &preparation{
		claim: claim, names: map[device.Ref]string{}, consumed: map[device.Ref]device.Consumed{}, visible: map[int]string{},
		request: ledger.ClaimRequest{
			UID: string(claim.UID), Namespace: claim.Namespace, Name: claim.Name, PodsFirst: podsFirst, Shares: map[device.Ref]device.Share{},
		},
	}
	for _, consumer := range claim.Status.ReservedFor {
		if consumer.APIGroup == "" && consumer.Resource == "pods" {
			p.request.Pods = append(p.request.Pods, ledger.Pod{UID: string(consumer.UID), Namespace: claim.Namespace, Name: consumer.Name})
		}
	}
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != d.DriverName {
			continue
		}
		if p.err = d.planResult(ctx, p, result, inv); p.err != nil {
			return p
		}
	}
	p.err = p.checkGroups()
	return p
}

// planResult plans one device that the scheduler allocated: what containers see of it, and, without admin access, what the claim has of it.
func (d *Driver) planResult(ctx context.Context, p *preparation, result resourceapi.DeviceRequestAllocationResult, inv device.Inventory) error {
	admin := ptr.Deref(result.AdminAccess, false)
	found, demanded, err := d.resolve(result, inv, admin)
	if err != nil {
		return err
	}
	parameters, err := parametersv1beta1.Allocated(p.claim, d.DriverName, result, found.Whole())
	if err != nil {
		return refuseParameters(result.Request, err)
	}
	entry := len(p.answer)
	p.answer = append(p.answer, kubeletplugin.Device{
		Requests: []string{result.Request}, PoolName: result.Pool, DeviceName: result.Device, ShareID: result.ShareID,
	})
	if admin {
		d.planMonitored(ctx, p, entry, result, found)
		return nil
	}
	if err := d.checkUsable(p, result, found); err != nil {
		return err
	}
	if demanded {
		p.onDemand = append(p.onDemand, onDemand{entry: entry, device: found})
	} else if err := d.checkThere(ctx, p, result, found); err != nil {
		return err
	} else {
		d.show(p, entry, found)
	}
	return d.planShare(p, result, found, parameters)
}

// planMonitored shows a device to a claim with admin access, which reserves nothing. One unhealthy GPU, which cannot be injected, must not keep
// a monitor from seeing the healthy ones.
func (d *Driver) planMonitored(ctx context.Context, p *preparation, entry int, result resourceapi.DeviceRequestAllocationResult, found device.Device) {
	switch health := found.Health(); {
	case !health.Healthy():
		ref := found.Ref()
		d.Recorder.Eventf(p.claim, corev1.EventTypeWarning, reasonDeviceUnhealthy, "device %s (%s) is not visible to the claim: it is unhealthy (%s: %s)", result.Device, ref, health.Reason, health.Message)
		klog.FromContext(ctx).Info("Excluding an unhealthy device from a claim with admin access", "claim", klog.KObj(p.claim), "device", ref.String(), "reason", health.Reason)
	case found.UUID() == "": // a partition that does not exist
	default:
		d.show(p, entry, found)
	}
}

// checkThere refuses an administrator's partition that was removed since the last scan: containers of a prepared claim would never start. A claim
// that has the partition already is not refused, and the inventory is believed if the driver does not say.
func (d *Driver) checkThere(ctx context.Context, p *preparation, result resourceapi.DeviceRequestAllocationResult, found device.Device) error {
	if found.Whole() || d.has(p.claim, found.Ref()) {
		return nil
	}
	there, err := d.Partitions.Exists(ctx, found.Partition)
	switch {
	case err != nil:
		klog.FromContext(ctx).Error(err, "Cannot tell whether a partition still exists; preparing its claim", "claim", klog.KObj(p.claim), "partition", found.Ref().String())
	case !there:
		return refuseUnusable(reasonUnknownDevice, result.Device, found.Ref(), false, "device %s (%s) for request %s was removed", result.Device, found.Ref(), result.Request)
	}
	return nil
}

// checkUsable refuses a device that this node cannot give to the claim now.
func (d *Driver) checkUsable(p *preparation, result resourceapi.DeviceRequestAllocationResult, found device.Device) error {
	ref, health := found.Ref(), found.Health()
	if !health.Healthy() && d.has(p.claim, ref) {
		// Otherwise the claim's containers cannot start again after kubelet did. ensureSpecs finds out whether they can be given the device.
		health = found.HealthForHolder()
	}
	switch {
	case !health.Healthy():
		return refuseUnusable(reasonDeviceUnhealthy, result.Device, ref, false, "device %s (%s) for request %s is unhealthy (%s: %s)", result.Device, ref, result.Request, health.Reason, health.Message)
	case found.Whole() && found.GPU.MIGEnabled && !found.GPU.Dynamic:
		return refuseUnusable(reasonUnknownDevice, result.Device, ref, false, "device %s (%s) for request %s is in MIG mode now and cannot be used as a whole", result.Device, ref, result.Request)
	}
	return nil
}

// planShare adds the device to the claim's request, whole or in part, and to the group with its sharing settings.
func (d *Driver) planShare(p *preparation, result resourceapi.DeviceRequestAllocationResult, found device.Device, parameters parametersv1beta1.Effective) error {
	consumed, shared := capacity.Consumed(p.claim, result)
	share := device.Share{}
	if shared {
		share = found.Share(consumed)
	}
	if shared && share.Whole() {
		share = d.allMemory(p.claim, found.Ref())
	}
	p.addDevice(found, result.Device, consumed, shared)
	asked, policy := parameters.Sharing, found.Sharing()
	switch {
	case share.Whole() && asked == nil:
	case share.Whole():
		p.addToGroup(sharedGroup{key: fmt.Sprint(parameters.Entry), path: parameters.Path, request: result.Request, sharing: *asked}, found)
	// A claim that has its share keeps it if the policy changes: otherwise its containers cannot start again after kubelet did.
	case asked != nil && !d.has(p.claim, found.Ref()) && !agrees(*asked, policy):
		return refuseParameters(result.Request, fmt.Errorf("%s: the claim has a share of device %s (%s) and requests other settings than "+
			"the node's policy (%s). All holders of a shared device have the settings of the policy: leave out sharing, or request these settings",
			parameters.Path.Child("sharing"), found.Name(), share, describeSettings(policy)))
	default:
		p.addToGroup(sharedGroup{
			key: found.Name(), request: result.Request, share: true, sharing: parametersv1beta1.Sharing{
				Strategy: parametersv1beta1.Strategy(policy.Strategy), Interval: parametersv1beta1.Interval(policy.Interval),
			},
		}, found)
	}
	return nil
}

// agrees reports whether a claim requests the settings that all holders of a device have by the policy.
func agrees(asked parametersv1beta1.Sharing, policy device.Sharing) bool {
	if string(asked.Strategy) != string(policy.Strategy) {
		return false
	}
	if mps := asked.MPS; mps != nil {
		return mps.ActiveThreadPercentage == nil && mps.PinnedMemoryLimit == nil && len(mps.PerDevicePinnedMemoryLimit) == 0 && !mps.MultiUser
	}
	// A partition has no interval.
	return asked.Interval == "" || string(asked.Interval) == cmp.Or(policy.Interval, string(parametersv1beta1.IntervalDefault))
}

func describeSettings(policy device.Sharing) string {
	switch policy.Strategy {
	case "":
		return "none"
	case device.MPS:
		return fmt.Sprintf("strategy %s without mpsConfig", policy.Strategy)
	}
	return fmt.Sprintf("strategy %s with interval %s", policy.Strategy, cmp.Or(policy.Interval, string(parametersv1beta1.IntervalDefault)))
}

// allMemory returns the share of all the device's memory that a claim still holds by an earlier policy, beside claims without memory. It returns
// the whole device if the claim holds no such share. The ledger lets the claim keep the share, so the claim's settings are not applied.
func (d *Driver) allMemory(claim *resourceapi.ResourceClaim, ref device.Ref) device.Share {
	if h, has := d.holdOf(claim, ref); has && h.Share.AllMemory() {
		return h.Share
	}
	return device.Share{}
}

// has reports whether a claim holds the device.
func (d *Driver) has(claim *resourceapi.ResourceClaim, ref device.Ref) bool {
	_, has := d.holdOf(claim, ref)
	return has
}

// holdOf returns the hold of a claim on the device that does not drain.
func (d *Driver) holdOf(claim *resourceapi.ResourceClaim, ref device.Ref) (hold ledger.Hold, has bool) {
	holds := d.Ledger.Holds()
	i := slices.IndexFunc(holds, func(h ledger.Hold) bool {
		return h.Holder == ledger.Holder{Kind: ledger.KindClaim, ID: string(claim.UID)} && h.Device == ref && h.State != ledger.StateDraining
	})
	if i < 0 {
		return ledger.Hold{}, false
	}
	return holds[i], true
}

// resolve returns the device of a result, or refuses a result that this node cannot serve. A dynamic GPU as a whole, and a
// partition in a GPU pool, is created on demand, unless it is an unmanaged partition.
func (d *Driver) resolve(
	result resourceapi.DeviceRequestAllocationResult, inv device.Inventory, admin bool,
) (found device.Device, demanded bool, err error) {
	if device.NodeOfPool(result.Pool) != d.NodeName {
		return device.Device{}, false, refuse(reasonUnknownDevice, "request %s got device %s of pool %s, but this node serves pool %s only: delete the pod and its claim to have it allocated again", result.Request, result.Device, result.Pool, d.NodeName)
	}
	found, ok := inv.ByName(result.Device)
	demanded = found.Whole() && found.GPU.Dynamic ||
		result.Pool != d.NodeName && (found.UUID() == "" || found.Whole() || found.Partition.Made)
	if !ok && len(inv.GPUs) == 0 {
		return device.Device{}, false, fmt.Errorf("look up device %s of pool %s for request %s: the node has no NVIDIA driver now, or the driver finds no GPU", result.Device, result.Pool, result.Request)
	}
	if !ok || found.UUID() == "" && !demanded {
		return device.Device{}, false, refuseUnusable(reasonUnknownDevice, result.Device, device.Ref{GPU: result.Device}, admin,
			"device %s of pool %s for request %s does not exist on this node (removed, or renumbered by a reboot)", result.Device, result.Pool, result.Request)
	}
	return found, demanded, nil
}

// addDevice adds a device, or a further share of it, to the request.
func (p *preparation) addDevice(d device.Device, name string, consumed device.Consumed, shared bool) {
	ref := d.Ref()
	if !slices.Contains(p.request.Devices, ref) {
		p.request.Devices = append(p.request.Devices, ref)
		p.names[ref] = name
	} else if _, shares := p.request.Shares[ref]; !shares {
		return
	}
	if !shared {
		delete(p.request.Shares, ref)
		return
	}
	p.consumed[ref] = p.consumed[ref].Plus(consumed)
	p.request.Shares[ref] = d.Share(p.consumed[ref])
}

// show gives containers the device, with its attributes, as an entry of the answer. ensureSpecs adds its CDI name.
func (d *Driver) show(p *preparation, entry int, shown device.Device) {
	p.visible[entry] = shown.UUID()
	if d.MetadataDir == "" {
		return
	}
	attributes := map[string]resourceapi.DeviceAttribute{}
	for name, value := range publishedDevice(shown).Attributes {
		attributes[string(name)] = value
	}
	p.answer[entry].Metadata = &kubeletplugin.DeviceMetadata{Attributes: attributes}
}

// addToGroup adds the last device of the answer to the group with that key, which is g if there is none yet.
func (p *preparation) addToGroup(g sharedGroup, d device.Device) {
	i := slices.IndexFunc(p.groups, func(known *sharedGroup) bool { return known.key == g.key })
	if i < 0 {
		i = len(p.groups)
		p.groups = append(p.groups, &g)
	}
	group := p.groups[i]
	if !group.has(d.Ref()) {
		group.devices = append(group.devices, d)
	}
	group.answers = append(group.answers, len(p.answer)-1)
}

// addImplicitGroups adds the devices that no parameters are about: those with settings of an earlier Prepare, which are
// reverted, and whole GPUs that the node shares by MPS, whose daemon ends.
func (d *Driver) addImplicitGroups(p *preparation) {
	for _, ref := range p.request.Devices {
		if slices.ContainsFunc(p.groups, func(g *sharedGroup) bool { return g.has(ref) }) {
			continue
		}
		// The snapshot of planning does not have the partitions that this call has created.
		found, ok := d.Inventory.Inventory().ByRef(ref)
		g := &sharedGroup{devices: []device.Device{found}}
		switch {
		case !ok:
			continue
		case found.Whole() && d.Policy.ByDaemon(found.GPU):
			g.sharing.Strategy = sharing.Exclusive
		case !d.Sharing.Applied(p.request.UID, ref):
			continue
		}
		p.groups = append(p.groups, g)
	}
}

// checkGroups refuses settings that the devices do not support, and a request with a share of a GPU with an MPS daemon and another
// device: a client sees its daemon's GPU only.
func (p *preparation) checkGroups() error {
	for _, g := range p.groups {
		if wrong := sharing.Check(g.devices, g.sharing, g.path.Child("sharing")); len(wrong) > 0 {
			return refuseParameters(g.request, wrong.ToAggregate())
		}
		if !g.share || g.sharing.Strategy != parametersv1beta1.MPSStrategy {
			continue
		}
		for _, i := range g.answers {
			shared := p.answer[i]
			for _, other := range p.answer {
				if other.Requests[0] == shared.Requests[0] && other.DeviceName != shared.DeviceName {
					return refuse(reasonNotShared, "request %s got a share of device %s, which is shared by MPS, and device %s, but a client of an MPS daemon sees only that daemon's GPU: "+
						"request one device in each request, and refer each container to one of them", shared.Requests[0], shared.DeviceName, other.DeviceName)
				}
			}
		}
	}
	return nil
}

// podSlots returns the devices and shares that pods can get, by resource.
func (d *Driver) podSlots(inv device.Inventory) map[string][]ledger.Slot {
	gpus := slices.DeleteFunc(slices.Clone(inv.GPUs), func(g device.GPU) bool { return !d.OfferedToPods(g) })
	offers, _ := d.Limits.Offers(gpus)
	slots := map[string][]ledger.Slot{}
	for _, o := range offers {
		if o.Device.Health().Healthy() {
			slots[o.Resource] = append(slots[o.Resource], ledger.Slot{Device: o.Device.Ref(), Share: o.Share})
		}
	}
	return slots
}
