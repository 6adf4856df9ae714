// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/capacity"
)

// allocatorFeatures are those that a scheduler has by default from Kubernetes 1.36 on, as far as they concern Tandem's devices.
var allocatorFeatures = structured.Features{
	AdminAccess: true, PrioritizedList: true, DeviceTaints: true, ConsumableCapacity: true, PartitionableDevices: true, DeviceBindingAndStatus: true,
}

// classLister is Facts.Classes for the allocator.
type classLister Facts

// List implements structured.DeviceClassLister.
func (l classLister) List() (classes []*resourceapi.DeviceClass, err error) {
	for i := range l.Classes {
		classes = append(classes, &l.Classes[i])
	}
	return classes, nil
}

// Get implements structured.DeviceClassLister.
func (l classLister) Get(name string) (*resourceapi.DeviceClass, error) {
	class, known := Facts(l).class(name)
	if !known {
		return nil, fmt.Errorf("DeviceClass %s does not exist", name)
	}
	return &class, nil
}

// toAllocate returns the claims that the scheduler has to allocate, without the requests of other drivers, whose devices are not read.
func (f Facts) toAllocate(claims []claimOf) (found []*resourceapi.ResourceClaim) {
	for i, of := range claims {
		if of.spec == nil || of.claim != nil && of.claim.Status.Allocation != nil {
			continue
		}
		claim := &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: f.Pod.Namespace, Name: of.name, UID: types.UID(fmt.Sprint("claim ", i))}, Spec: *of.spec.DeepCopy(),
		}
		devices := &claim.Spec.Devices
		devices.Requests = slices.DeleteFunc(devices.Requests, func(r resourceapi.DeviceRequest) bool {
			return !(r.Exactly != nil && f.mayBeOurs(r.Exactly.DeviceClassName)) &&
				!slices.ContainsFunc(r.FirstAvailable, func(s resourceapi.DeviceSubRequest) bool { return f.mayBeOurs(s.DeviceClassName) })
		})
		if len(devices.Requests) == 0 {
			continue
		}
		for j := range devices.Requests {
			defaults(&devices.Requests[j])
		}
		found = append(found, claim)
	}
	return found
}

// defaults sets what the API server sets.
func defaults(r *resourceapi.DeviceRequest) {
	of := func(mode *resourceapi.DeviceAllocationMode, count *int64) {
		if *mode == "" {
			*mode = resourceapi.DeviceAllocationModeExactCount
		}
		if *mode == resourceapi.DeviceAllocationModeExactCount {
			*count = max(1, *count)
		}
	}
	if r.Exactly != nil {
		of(&r.Exactly.AllocationMode, &r.Exactly.Count)
	}
	for i := range r.FirstAvailable {
		of(&r.FirstAvailable[i].AllocationMode, &r.FirstAvailable[i].Count)
	}
}

// forLimits returns the claim that the scheduler makes for extended resources that the node's kubelet does not serve, and nil if there are
// none.
func (s *stock) forLimits(needs []need) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "limits", UID: "limits"}}
	for i, n := range needs {
		if n.resource != "" && !s.ofKubelet(n) {
			claim.Spec.Devices.Requests = append(claim.Spec.Devices.Requests, resourceapi.DeviceRequest{
				Name: fmt.Sprint("request-", i), Exactly: &resourceapi.ExactDeviceRequest{
					DeviceClassName: n.class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: n.count,
				},
			})
		}
	}
	if len(claim.Spec.Devices.Requests) == 0 {
		return nil
	}
	return claim
}

// ofKubelet reports whether kubelet serves what a pod requests by limits, with devices of the node.
func (s *stock) ofKubelet(n need) bool {
	serves := func(d v1alpha1.DeviceStatus) bool { return d.ExtendedResource == n.resource }
	return n.resource != "" && (n.class == "" || slices.ContainsFunc(s.status.Devices, serves))
}

// allocate asks the scheduler's allocator whether the node has devices for claims: now, or as if none had a holder or a fault. An error ends
// the attempt to schedule the pod on any node.
func (s *stock) allocate(ctx context.Context, claims []*resourceapi.ResourceClaim, idle bool) (fits bool, err error) {
	published, state := s.published, s.state
	if idle {
		published, state = s.idle, noAllocations
	}
	allocator, err := structured.NewAllocator(ctx, allocatorFeatures, state(), s.match.classes, published(), s.match.cache)
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, s.match.search, errSearch)
	defer cancel()
	results, err := allocator.Allocate(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: s.nodeName}}, claims)
	if errors.Is(err, structured.ErrFailedAllocationOnNode) {
		return false, nil
	}
	return err == nil && results != nil, err
}

func noAllocations() structured.AllocatedState {
	return structured.AllocatedState{
		AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection(),
	}
}

func (s *stock) published() (found []*resourceapi.ResourceSlice) {
	for i := range s.slices {
		found = append(found, &s.slices[i])
	}
	return found
}

// state is what the scheduler counts as allocated.
func (s *stock) state() structured.AllocatedState {
	state := noAllocations()
	for _, claim := range s.claims {
		for _, c := range s.devices {
			if c.partly || !c.allocatedTo(claim) {
				continue
			}
			id := structured.MakeDeviceID(s.match.driver, c.pool, c.published.Name)
			share, shared := claim.ShareOf(c.published.Name)
			if !shared {
				state.AllocatedDevices.Insert(id)
				continue
			}
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, &claim.UID))
			consumed := map[resourceapi.QualifiedName]resource.Quantity{capacity.Memory: *resource.NewQuantity(share.Memory, resource.BinarySI)}
			if share.Shares > 0 {
				consumed[capacity.Shares] = *resource.NewQuantity(share.Shares, resource.DecimalSI)
			}
			state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, consumed))
		}
	}
	return state
}

// allocatedTo reports whether a claim has the device.
func (c candidate) allocatedTo(claim v1alpha1.AllocatedClaim) bool {
	return slices.Contains(claim.Devices, c.published.Name) && (len(claim.Pools) == 0 || slices.Contains(claim.Pools, c.pool))
}

// idle are slices with all devices of the node as if none had a holder or a fault.
func (s *stock) idle() (found []*resourceapi.ResourceSlice) {
	var pools []string
	devices, counters := map[string][]resourceapi.Device{}, map[string][]resourceapi.CounterSet{}
	for _, c := range s.devices {
		status, known := s.node.Status(c.published.Name)
		if known && status.Excluded {
			continue
		}
		if !slices.Contains(pools, c.pool) {
			pools = append(pools, c.pool)
		}
		devices[c.pool] = append(devices[c.pool], whole(c.published, status))
	}
	for set, full := range s.full {
		of := resourceapi.CounterSet{Name: set.name, Counters: map[string]resourceapi.Counter{}}
		for name, value := range full {
			of.Counters[name] = resourceapi.Counter{Value: *resource.NewQuantity(value, resource.BinarySI)}
		}
		counters[set.pool] = append(counters[set.pool], of)
	}
	add := func(pool string, spec resourceapi.ResourceSliceSpec, of int64) {
		spec.Driver, spec.NodeName, spec.Pool = s.match.driver, &s.nodeName, resourceapi.ResourcePool{Name: pool, Generation: 1, ResourceSliceCount: of}
		found = append(found, &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%04d", len(found))}, Spec: spec})
	}
	for _, pool := range pools {
		of := int64(1)
		if len(counters[pool]) > 0 {
			of = 2
			add(pool, resourceapi.ResourceSliceSpec{SharedCounters: counters[pool]}, of)
		}
		add(pool, resourceapi.ResourceSliceSpec{Devices: devices[pool]}, of)
	}
	return found
}

// whole returns a device without taints and with all of its capacity: what a shared device publishes may be what pods leave of it.
func whole(d resourceapi.Device, status v1alpha1.DeviceStatus) resourceapi.Device {
	d = *d.DeepCopy()
	d.Taints = nil
	if status.Name != d.Name || status.Sharing == nil || !ptr.Deref(d.AllowMultipleAllocations, false) {
		return d
	}
	for name, value := range map[resourceapi.QualifiedName]int64{capacity.Memory: status.Sharing.Memory, capacity.Shares: status.Sharing.Shares} {
		if of, known := d.Capacity[name]; known && value > 0 {
			of.Value = *resource.NewQuantity(value, of.Value.Format)
			d.Capacity[name] = of
		}
	}
	return d
}

// unserved answers for a node that serves no GPU. The scheduler tries the ResourceSlices of the node all the same.
func (n *NodeAnswer) unserved(ctx context.Context, s *stock, claims []*resourceapi.ResourceClaim, needs []need, reason string) {
	n.Fit, n.Reason = FitAgent, reason
	if of := s.forLimits(needs); of != nil {
		claims = append(slices.Clip(claims), of)
	}
	if len(claims) == 0 || len(s.slices) == 0 {
		return
	}
	if _, err := s.allocate(ctx, claims, false); err != nil && !errors.Is(err, errSearch) && s.match.goesOn(ctx) {
		n.fails(ctx, s, needs, err)
	}
}

// fails says that the scheduler fails on the node.
func (n *NodeAnswer) fails(ctx context.Context, s *stock, needs []need, err error) {
	n.Fit, n.Reason, n.failed, n.failure = FitFails, Bounded(OneLine(err.Error()), mostText), err, s.failureOf(ctx, err, needs)
}

// fit answers whether a node has what the pod requests. What the pod's claims can have is for the scheduler's allocator to say. The reason
// comes from Tandem's own count.
func (n *NodeAnswer) fit(ctx context.Context, s *stock, claims []*resourceapi.ResourceClaim, needs []need) {
	short, ever := s.shortages(ctx, needs)
	s.matched = nil
	byKubelet := slices.ContainsFunc(needs, s.ofKubelet)
	limitsShort := slices.ContainsFunc(short, func(of shortage) bool { return s.ofKubelet(of.need) })
	if of := s.forLimits(needs); of != nil {
		claims = append(slices.Clip(claims), of)
	}
	fits, agrees := len(short) == 0, true
	if len(claims) > 0 && !s.unread && s.match.goesOn(ctx) {
		now, err := s.allocate(ctx, claims, false)
		switch {
		case !s.match.goesOn(ctx):
		case errors.Is(err, errSearch) && fits:
			n.Fit, n.Reason = FitUnknown, errSearch.Error()
			return
		case errors.Is(err, errSearch): // the count knows better why there is no solution
		case err != nil && limitsShort: // the scheduler's NodeResourcesFit excludes the node before its DynamicResources looks at devices
		case err != nil:
			n.fails(ctx, s, needs, err)
			return
		case now:
			fits = !byKubelet || fits
		default:
			could, err := s.allocate(ctx, claims, true)
			if errors.Is(err, errSearch) && fits { // the count is known to be wrong here
				n.Fit, n.Reason = FitUnknown, errSearch.Error()
				return
			}
			if err != nil { // or a selector needs an attribute that is not known of a device without a slice
				could = ever
			}
			could = could && (ever || !byKubelet) // the allocator does not know what kubelet serves
			agrees, fits, ever = !fits && could == ever, false, could
		}
	}
	if !s.match.goesOn(ctx) {
		n.unknown(s.match)
		return
	}
	if fits {
		n.Fit, n.Reason = FitRoom, "it has what the pod requests"
		return
	}
	if ever {
		n.Fit = FitFull
	}
	n.stock, n.short = s, short
	if !agrees {
		n.Reason, n.together = s.together(ctx, claims, ever), true
		return
	}
	n.Reason = reasons(short)
}

// together is why a node does not have devices for all claims, although it seems to have them for each request alone.
func (s *stock) together(ctx context.Context, claims []*resourceapi.ResourceClaim, ever bool) string {
	have := map[string]int64{}
	for _, slice := range s.slices {
		have[slice.Spec.Pool.Name]++
	}
	for _, slice := range s.slices {
		pool := slice.Spec.Pool
		if lacks := pool.ResourceSliceCount - have[pool.Name]; lacks > 0 {
			return fmt.Sprintf("its agent is still writing its ResourceSlices: pool %s lacks %d of them", OneLine(pool.Name), lacks)
		}
	}
	what := "its devices do not satisfy all requests at the same time"
	free := slices.Clone(claims)
	var constraints []string
	for i, claim := range claims {
		for _, c := range claim.Spec.Devices.Constraints {
			switch {
			case c.MatchAttribute != nil:
				constraints = append(constraints, "the same "+string(*c.MatchAttribute))
			case c.DistinctAttribute != nil:
				constraints = append(constraints, "different "+string(*c.DistinctAttribute))
			}
		}
		free[i] = claim.DeepCopy()
		free[i].Spec.Devices.Constraints = nil
	}
	if len(constraints) > 0 {
		if fits, err := s.allocate(ctx, free, !ever); err == nil && fits {
			what = "it has no such devices with " + list(constraints, func(text string) string { return text })
		}
	}
	if ever {
		what += " while other holders have some of its devices"
	}
	return Bounded(what, mostText)
}
