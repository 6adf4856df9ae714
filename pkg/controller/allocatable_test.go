// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
)

func TestAllocatable(t *testing.T) {
	limit, claim := v1alpha1.DeviceHolder{Kind: v1alpha1.HolderPod}, v1alpha1.DeviceHolder{Kind: v1alpha1.HolderClaim, UID: "u"}
	replica := v1alpha1.DeviceHolder{Kind: v1alpha1.HolderPod, Shared: true, Memory: 25}
	withdraw := func(s *v1alpha1.GPUNodeStatus, n int) {
		s.Devices[n].ExtendedResourceState = v1alpha1.ExtendedResourceWithdrawn
	}
	for name, c := range map[string]struct {
		change  func(*v1alpha1.GPUNodeStatus)
		claims  []string // devices that claims are allocated to
		want    int64
		unknown bool
	}{
		"all free":                 {want: 8},
		"a claim allocated":        {claims: []string{"gpu-0"}, want: 7},
		"allocated and withdrawn":  {change: func(s *v1alpha1.GPUNodeStatus) { withdraw(s, 0) }, claims: []string{"gpu-0"}, want: 7},
		"two claims on one device": {claims: []string{"gpu-0", "gpu-0"}, want: 7},
		"withdrawn for a fault":    {change: func(s *v1alpha1.GPUNodeStatus) { withdraw(s, 3) }, claims: []string{"gpu-0"}, want: 6},
		"a limit holds it":         {change: func(s *v1alpha1.GPUNodeStatus) { s.Devices[0].Holders = []v1alpha1.DeviceHolder{limit} }, want: 8},
		"a claim is about to lose": {change: func(s *v1alpha1.GPUNodeStatus) { s.Devices[0].Holders = []v1alpha1.DeviceHolder{limit} }, claims: []string{"gpu-0"}, want: 7},
		"a claim is pending eviction": {change: func(s *v1alpha1.GPUNodeStatus) {
			s.Devices[0].Holders, s.Conflicts = []v1alpha1.DeviceHolder{limit}, []v1alpha1.ConflictingClaim{pendingEviction("gpu-0", "gpu-0")}
		}, claims: []string{"gpu-0"}, want: 7},
		"a claim waits for a limit": {change: func(s *v1alpha1.GPUNodeStatus) {
			s.Devices[0].Holders, s.Conflicts = []v1alpha1.DeviceHolder{limit}, []v1alpha1.ConflictingClaim{waiting("gpu-0", "gpu-0")}
		}, claims: []string{"gpu-0"}, want: 8},
		"it waits, and all GPUs are held": {change: func(s *v1alpha1.GPUNodeStatus) {
			for i := range s.Devices {
				s.Devices[i].Holders = []v1alpha1.DeviceHolder{limit}
			}
			s.Conflicts = []v1alpha1.ConflictingClaim{waiting("gpu-0", "gpu-0")}
		}, claims: []string{"gpu-0"}, want: 7},
		"two wait, and one GPU is free": {change: func(s *v1alpha1.GPUNodeStatus) {
			for i := range 7 {
				s.Devices[i].Holders = []v1alpha1.DeviceHolder{limit}
			}
			s.Conflicts = []v1alpha1.ConflictingClaim{waiting("gpu-0", "gpu-0"), waiting("gpu-1", "gpu-1")}
		}, claims: []string{"gpu-0", "gpu-1"}, want: 7},
		"under maintenance, a pod holds it, others are free": {change: func(s *v1alpha1.GPUNodeStatus) {
			s.Devices[0].Holders, s.Devices[0].Maintenance = []v1alpha1.DeviceHolder{limit}, &v1alpha1.DeviceMaintenance{}
		}, want: 8},
		"under maintenance, and all GPUs are held": {change: func(s *v1alpha1.GPUNodeStatus) {
			for i := range s.Devices {
				s.Devices[i].Holders = []v1alpha1.DeviceHolder{limit}
			}
			s.Devices[0].Maintenance = &v1alpha1.DeviceMaintenance{}
		}, want: 7},
		"under maintenance, and its pod has just ended": {change: func(s *v1alpha1.GPUNodeStatus) {
			for i := range 7 {
				s.Devices[i].Holders = []v1alpha1.DeviceHolder{limit}
			}
			s.Devices[7].Maintenance = &v1alpha1.DeviceMaintenance{} // and kubelet still lists it
		}, want: 7},
		"one under maintenance, one tainted, and one GPU is free": {change: func(s *v1alpha1.GPUNodeStatus) {
			for i := range 7 {
				s.Devices[i].Holders = []v1alpha1.DeviceHolder{limit}
			}
			s.Devices[0].Maintenance, s.Devices[1].Taints = &v1alpha1.DeviceMaintenance{}, make([]v1alpha1.DeviceTaint, 1)
		}, want: 7},
		"replicas under maintenance": {change: func(s *v1alpha1.GPUNodeStatus) {
			for i := range 2 {
				s.Devices[i].Sharing = &v1alpha1.DeviceSharing{Memory: 100, Replicas: 4, ReplicaMemory: 25, Allocatable: 4}
				s.Devices[i].Holders = []v1alpha1.DeviceHolder{replica, replica}
			}
			for i := range s.Devices[2:] {
				withdraw(s, i+2)
			}
			s.Devices[0].Maintenance, s.Devices[0].Sharing.Allocatable = &v1alpha1.DeviceMaintenance{}, 2
		}, want: 6},
		"paused, and two are held": {change: func(s *v1alpha1.GPUNodeStatus) {
			for i := range s.Devices {
				if s.Devices[i].UnhealthyReason = device.ReasonPaused; i < 2 {
					s.Devices[i].Holders = []v1alpha1.DeviceHolder{limit}
				} else {
					withdraw(s, i)
				}
			}
		}, want: 0},
		"held and not clean, beside free ones": {change: func(s *v1alpha1.GPUNodeStatus) {
			s.Devices[0].UnhealthyReason, s.Devices[0].Holders = device.ReasonNotClean, []v1alpha1.DeviceHolder{limit}
		}, want: 8},
		"replicas that are not clean, beside a free GPU": {change: func(s *v1alpha1.GPUNodeStatus) {
			for i := range s.Devices[2:] {
				withdraw(s, i+2)
			}
			s.Devices[0] = v1alpha1.DeviceStatus{
				Name: "gpu-0", ExtendedResource: s.Devices[0].ExtendedResource, ExtendedResourceState: v1alpha1.ExtendedResourceAllocatable,
				Holders: []v1alpha1.DeviceHolder{replica, replica}, UnhealthyReason: device.ReasonNotClean,
				Sharing: &v1alpha1.DeviceSharing{Memory: 100, Replicas: 4, ReplicaMemory: 25, Allocatable: 4},
			}
		}, want: 2},
		"tainted replicas, and the others are held": {change: func(s *v1alpha1.GPUNodeStatus) {
			for i := range 2 {
				s.Devices[i].Sharing = &v1alpha1.DeviceSharing{Memory: 100, Replicas: 2, ReplicaMemory: 50, Allocatable: 2}
				s.Devices[i].Holders = []v1alpha1.DeviceHolder{replica, replica}
			}
			for i := range s.Devices[2:] {
				withdraw(s, i+2)
			}
			s.Devices[0].Taints = make([]v1alpha1.DeviceTaint, 1)
		}, want: 2},
		"it has ended":                   {change: func(s *v1alpha1.GPUNodeStatus) { s.Conflicts = []v1alpha1.ConflictingClaim{waiting("gpu-0", "gpu-0")} }, claims: []string{"gpu-0"}, want: 7},
		"prepared, kubelet not yet told": {change: func(s *v1alpha1.GPUNodeStatus) { s.Devices[0].Holders = []v1alpha1.DeviceHolder{claim} }, claims: []string{"gpu-0"}, want: 7},
		"deallocated, kubelet not yet":   {change: func(s *v1alpha1.GPUNodeStatus) { withdraw(s, 0) }, want: 7},
		"a device that is not there":     {claims: []string{"gpu-99"}, want: 8},
		"all":                            {claims: []string{"gpu-0", "gpu-1", "gpu-2", "gpu-3", "gpu-4", "gpu-5", "gpu-6", "gpu-7"}, want: 0},
		"kubelet lists none": {change: func(s *v1alpha1.GPUNodeStatus) {
			for i := range s.Devices {
				withdraw(s, i)
			}
		}, want: 0},
		"kubelet has said nothing": {change: func(s *v1alpha1.GPUNodeStatus) {
			for i := range s.Devices {
				s.Devices[i].ExtendedResourceState = ""
			}
		}, unknown: true},
		"no limits are served":            {change: func(s *v1alpha1.GPUNodeStatus) { s.ExtendedResource = "" }, unknown: true},
		"no devices":                      {change: func(s *v1alpha1.GPUNodeStatus) { s.Devices = nil }, unknown: true},
		"split, one GPU is not for limit": {change: func(s *v1alpha1.GPUNodeStatus) { s.Devices[7].ExtendedResourceState = "" }, want: 7},
	} {
		t.Run(name, func(t *testing.T) {
			node := gpuNode()
			if c.change != nil {
				c.change(&node.Status)
			}
			var claims []v1alpha1.AllocatedClaim
			for _, device := range c.claims {
				claims = append(claims, v1alpha1.AllocatedClaim{UID: types.UID("uid-" + device), Devices: []string{device}})
			}
			got, known := Allocatable(node.Status, claims, testResource)
			if known == c.unknown || !c.unknown && got != c.want {
				t.Errorf("%d, known %t", got, known)
			}
		})
	}
}

// Less at once; more when kubelet lists more than it did, or when the status has had the time to say otherwise.
func TestJudgeAllocatable(t *testing.T) {
	at := func(ms int) time.Time { return time.Unix(0, 0).Add(time.Duration(ms) * time.Millisecond) }
	type step struct {
		ms                    int
		current, want, listed int64
		write                 bool
		wait                  time.Duration
	}
	for name, steps := range map[string][]step{
		"down at once":                   {{0, 8, 7, 8, true, 0}, {1, 7, 6, 8, true, 0}},
		"equal":                          {{0, 8, 8, 8, false, 0}, {5000, 8, 8, 8, false, 0}},
		"up when kubelet lists it again": {{0, 8, 7, 8, true, 0}, {100, 7, 7, 7, false, 0}, {200, 7, 8, 8, true, 0}},
		"up, and nothing was withdrawn":  {{0, 8, 7, 8, true, 0}, {100, 7, 8, 8, false, 1900 * time.Millisecond}, {2000, 7, 8, 8, true, 0}},
		// Kubelet took one back; the status, which says 8 still, is a second late.
		"kubelet knows better":     {{0, 8, 8, 8, false, 0}, {100, 7, 8, 8, false, 2 * time.Second}, {900, 7, 7, 7, false, 0}},
		"kubelet's number is late": {{0, 8, 7, 8, true, 0}, {50, 8, 7, 7, true, 0}, {100, 7, 7, 7, false, 0}},
		// The agent is gone, and its last status says 8 for ever; another one starts.
		"the device plugin is gone": {{0, 8, 8, 8, false, 0}, {100, 0, 8, 8, false, 0}, {60000, 0, 8, 8, false, 0}},
		"our own zero":              {{0, 8, 0, 8, true, 0}, {100, 0, 8, 8, false, 1900 * time.Millisecond}, {2000, 0, 8, 8, true, 0}},
		"all are taken, then one":   {{0, 1, 0, 1, true, 0}, {100, 0, 0, 0, false, 0}, {200, 0, 1, 1, true, 0}},
		"first look at a restarted": {{0, 5, 8, 8, false, 2 * time.Second}, {2000, 5, 8, 8, true, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			var o observed
			for i, s := range steps {
				write, wait := o.judge(at(s.ms), s.current, s.want, s.listed)
				if write != s.write || wait != s.wait {
					t.Errorf("step %d: write %t, wait %v", i, write, wait)
				}
			}
		})
	}
}

func (w *world) allocatable() *allocatable {
	return &allocatable{cluster: w.cluster(), breaker: w.breaker()}
}

func (w *world) offers() string {
	w.t.Helper()
	node := &corev1.Node{}
	w.get("", "node-1", node)
	quantity := node.Status.Allocatable[testResource]
	return quantity.String()
}

func TestAllocatableIsPatchedOnce(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{}, gpuNode(), coreNode("8", "8"), newClaim("a", "gpu-0", "gpu-1"))
	r := w.allocatable()
	w.twice(r, "node-1")
	if got := w.offers(); got != "6" {
		t.Errorf("allocatable %s", got)
	}
	w.want(map[string]int{"patch Node": 1})
	// Kubelet writes what it believes still, and is corrected.
	node := &corev1.Node{}
	w.get("", "node-1", node)
	node.Status.Allocatable = coreNode("8", "8").Status.Allocatable
	if err := w.client.Status().Update(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	w.twice(r, "node-1")
	if got := w.offers(); got != "6" {
		t.Errorf("allocatable %s after kubelet", got)
	}
	w.want(map[string]int{"patch Node": 2})
	// The claim is gone, and kubelet has taken nothing back: after a while the GPUs are offered again.
	if err := w.client.Delete(t.Context(), newClaim("a")); err != nil {
		t.Fatal(err)
	}
	if result := w.twice(r, "node-1"); result.RequeueAfter != 2*time.Second {
		t.Errorf("again after %v", result.RequeueAfter)
	}
	w.clock = w.clock.Add(settle)
	w.twice(r, "node-1")
	if got := w.offers(); got != "8" {
		t.Errorf("allocatable %s after the claim", got)
	}
}

func TestAllocatableNeverAboveCapacity(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{}, gpuNode(), coreNode("5", "6"))
	r := w.allocatable()
	w.twice(r, "node-1")
	w.clock = w.clock.Add(settle)
	w.twice(r, "node-1")
	if got := w.offers(); got != "6" {
		t.Errorf("allocatable %s", got)
	}
}

// An agent that is gone leaves a status behind that says what was; one that starts says that it knows nothing, then what is.
func TestAllocatableOfAnAgentThatIsGone(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{}, gpuNode(), coreNode("0", "8"))
	r := w.allocatable()
	for range 3 {
		w.twice(r, "node-1")
		w.clock = w.clock.Add(time.Minute)
	}
	if got := w.offers(); got != "0" {
		t.Fatalf("allocatable %s without a device plugin", got)
	}
	says := func(limits v1alpha1.ExtendedResourceState) {
		t.Helper()
		gpus := &v1alpha1.GPUNode{}
		w.get("", "node-1", gpus)
		for i := range gpus.Status.Devices {
			gpus.Status.Devices[i].ExtendedResourceState = limits
		}
		if err := w.client.Status().Update(t.Context(), gpus); err != nil {
			t.Fatal(err)
		}
		w.twice(r, "node-1")
	}
	says("")
	if got := w.offers(); got != "0" {
		t.Errorf("allocatable %s before kubelet has listed anything", got)
	}
	says(v1alpha1.ExtendedResourceAllocatable)
	if got := w.offers(); got != "8" {
		t.Errorf("allocatable %s once kubelet lists them", got)
	}
}

func TestAllocatableLeavesOthersAlone(t *testing.T) {
	without := coreNode("8", "8")
	delete(without.Status.Allocatable, testResource)
	for name, objects := range map[string][]client.Object{
		"no limits":        {gpuNode(func(s *v1alpha1.GPUNodeStatus) { s.ExtendedResource = "" }), coreNode("8", "8")},
		"another resource": {gpuNode(func(s *v1alpha1.GPUNodeStatus) { s.ExtendedResource = "example.com/gpu" }), coreNode("8", "8")},
		"not offered":      {gpuNode(), without},
		"no GPUNode":       {coreNode("8", "8")},
		"no node":          {gpuNode()},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, interceptor.Funcs{}, append(objects, newClaim("a", "gpu-0"))...)
			w.twice(w.allocatable(), "node-1")
			w.want(map[string]int{})
		})
	}
}

// A node that stops serving the extended resource offers none at once, and what another plugin offers later stays.
func TestAllocatableOfAnAgentThatRetires(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{}, gpuNode(), coreNode("8", "8"))
	r := w.allocatable()
	w.twice(r, "node-1")
	w.set(func(s *v1alpha1.GPUNodeStatus) { s.Mode, s.ExtendedResource = "ClaimsOnly", "" })
	w.twice(r, "node-1")
	if got := w.offers(); got != "0" {
		t.Errorf("allocatable %s", got)
	}
	node := &corev1.Node{}
	w.get("", "node-1", node)
	node.Status.Allocatable[testResource] = resource.MustParse("4")
	if err := w.client.Status().Update(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	w.twice(r, "node-1")
	if got := w.offers(); got != "4" {
		t.Errorf("the 4 of another plugin became %s", got)
	}
}

// An agent that leaves, as for an upgrade, says that limits are served no more: none is offered from then on, and all are as soon
// as the next agent's kubelet lists them.
func TestAllocatableOfAnAgentThatIsReplaced(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{}, gpuNode(), coreNode("8", "8"))
	r := w.allocatable()
	w.twice(r, "node-1")
	says := func(resource string, limits v1alpha1.ExtendedResourceState) {
		w.set(func(s *v1alpha1.GPUNodeStatus) {
			s.ExtendedResource = resource
			for i := range s.Devices {
				s.Devices[i].ExtendedResourceState = limits
			}
		})
		w.twice(r, "node-1")
	}
	for _, step := range []struct {
		resource string
		limits   v1alpha1.ExtendedResourceState
		want     string
	}{{"", "", "0"}, {testResource, "", "0"}, {testResource, v1alpha1.ExtendedResourceAllocatable, "8"}} {
		says(step.resource, step.limits)
		if got := w.offers(); got != step.want {
			t.Errorf("allocatable %s while the agent serves %q and kubelet has it %q, want %s", got, step.resource, step.limits, step.want)
		}
	}
	w.want(map[string]int{"patch Node": 2})
}

// An agent that was removed has left its status, and another device plugin serves the node.
func TestAllocatableGivesUp(t *testing.T) {
	for name, kubelet := range map[string]string{"more": "8", "fewer": "4"} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, interceptor.Funcs{}, gpuNode(), coreNode(kubelet, "8"), newClaim("a", "gpu-0"))
			r := w.allocatable()
			for range 20 {
				w.twice(r, "node-1")
				w.clock = w.clock.Add(settle)
				w.twice(r, "node-1")
				node := &corev1.Node{}
				w.get("", "node-1", node)
				node.Status.Allocatable[testResource] = resource.MustParse(kubelet)
				if err := w.client.Status().Update(t.Context(), node); err != nil {
					t.Fatal(err)
				}
				w.clock = w.clock.Add(10 * time.Second)
			}
			w.want(map[string]int{"patch Node": 6})
			// An agent that writes is one that lives.
			w.set(func(s *v1alpha1.GPUNodeStatus) { s.ObservedGeneration++ })
			w.twice(r, "node-1")
			w.clock = w.clock.Add(settle)
			w.twice(r, "node-1")
			if got := w.offers(); got != "7" {
				t.Errorf("allocatable %s", got)
			}
		})
	}
}

// The patch is refused when kubelet has written another number meanwhile, and made anew from that.
func TestAllocatablePatchIsGuarded(t *testing.T) {
	raced := false
	w := newWorld(t, interceptor.Funcs{
		SubResourcePatch: func(ctx context.Context, c client.Client, sub string, obj client.Object, patch client.Patch, opts ...client.SubResourcePatchOption) error {
			if !raced {
				raced = true
				node := coreNode("3", "8")
				node.ResourceVersion = ""
				if err := c.Status().Update(ctx, node); err != nil {
					return err
				}
			}
			return c.SubResource(sub).Patch(ctx, obj, patch, opts...)
		},
	}, gpuNode(), coreNode("8", "8"), newClaim("a", "gpu-0"))
	r := w.allocatable()
	_, err := r.Reconcile(t.Context(), requestFor("node-1"))
	// The API server says Invalid, the fake client fails some other way; the number stays in both.
	t.Log(err)
	if got := w.offers(); got != "3" {
		t.Errorf("allocatable %s", got)
	}
	w.clock = w.clock.Add(settle)
	w.twice(r, "node-1")
	w.clock = w.clock.Add(settle)
	w.twice(r, "node-1")
	if got := w.offers(); got != "7" {
		t.Errorf("allocatable %s in the end", got)
	}
}

func TestAllocatablePatch(t *testing.T) {
	changes := []change{{resource: "nvidia.com/gpu", old: resource.MustParse("8"), want: 7}, {resource: "nvidia.com/mig-1g.10gb", old: resource.MustParse("2"), want: 0}}
	patch, err := allocatablePatch(changes).Data(nil)
	const want = `[{"op":"test","path":"/status/allocatable/nvidia.com~1gpu","value":"8"},{"op":"replace","path":"/status/allocatable/nvidia.com~1gpu","value":"7"},` +
		`{"op":"test","path":"/status/allocatable/nvidia.com~1mig-1g.10gb","value":"2"},{"op":"replace","path":"/status/allocatable/nvidia.com~1mig-1g.10gb","value":"0"}]`
	if err != nil || string(patch) != want {
		t.Errorf("%s, %v", patch, err)
	}
}

// A cache that has not seen our own patch yet is no reason for another.
func TestAllocatableWaitsForItsOwnPatch(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{}, gpuNode(), coreNode("8", "8"), newClaim("a", "gpu-0"))
	r := w.allocatable()
	before := &corev1.Node{}
	w.get("", "node-1", before)
	w.once(r, requestFor("node-1").NamespacedName)
	r.client = hasHeard(w, before)
	w.twice(r, "node-1")
	w.want(map[string]int{"patch Node": 1})
}

// partitioned is a node by strategy mixed, of whose GPUs the last two have two partitions each.
func partitioned(s *v1alpha1.GPUNodeStatus) {
	for i := 6; i < 8; i++ {
		s.Devices[i].ExtendedResource, s.Devices[i].ExtendedResourceState = "", ""
		for n := range 2 {
			s.Devices = append(s.Devices, v1alpha1.DeviceStatus{
				Name: fmt.Sprintf("gpu-%d-mig-1g10gb-19-%d", i, n), UUID: fmt.Sprintf("MIG-%d-%d", i, n), Parent: fmt.Sprintf("gpu-%d", i),
				Profile: "1g.10gb", ExtendedResource: partResource, ExtendedResourceState: v1alpha1.ExtendedResourceAllocatable,
			})
		}
	}
}

const partResource = "nvidia.com/mig-1g.10gb"

func TestAllocatableByResource(t *testing.T) {
	for name, c := range map[string]struct {
		claim       []string
		gpus, parts int64
	}{
		"no claim":                              {nil, 6, 4},
		"of a GPU":                              {[]string{"gpu-1"}, 5, 4},
		"of a partition":                        {[]string{"gpu-6-mig-1g10gb-19-1"}, 6, 3},
		"of a GPU with partitions":              {[]string{"gpu-7"}, 6, 2},
		"of a partition of a dynamic GPU":       {[]string{"gpu-1-mig-3g40gb-9-0"}, 5, 4},
		"of GPUs that only begin with its name": {[]string{"gpu-66"}, 6, 4},
	} {
		node := gpuNode(partitioned)
		claims := []v1alpha1.AllocatedClaim{{UID: "u", Devices: c.claim}}
		for resource, want := range map[corev1.ResourceName]int64{testResource: c.gpus, partResource: c.parts} {
			if got, known := Allocatable(node.Status, claims, resource); !known || got != want {
				t.Errorf("%s: %d of %s (%t), want %d", name, got, resource, known, want)
			}
		}
	}
}

// All resources of a node are written at once, and retire at once.
func TestAllocatableOfPartitions(t *testing.T) {
	core := coreNode("6", "6")
	core.Status.Allocatable[partResource], core.Status.Capacity[partResource] = resource.MustParse("4"), resource.MustParse("4")
	w := newWorld(t, interceptor.Funcs{}, gpuNode(partitioned), core, newClaim("a", "gpu-0", "gpu-6-mig-1g10gb-19-0"))
	r := w.allocatable()
	offers := func() string {
		node := &corev1.Node{}
		w.get("", "node-1", node)
		whole, parts := node.Status.Allocatable[testResource], node.Status.Allocatable[partResource]
		return whole.String() + " " + parts.String()
	}
	w.twice(r, "node-1")
	if got := offers(); got != "5 3" {
		t.Errorf("allocatable %s", got)
	}
	w.want(map[string]int{"patch Node": 1})
	w.set(func(s *v1alpha1.GPUNodeStatus) {
		s.ExtendedResource = ""
		for i := range s.Devices {
			s.Devices[i].ExtendedResource, s.Devices[i].ExtendedResourceState = "", ""
		}
	})
	w.twice(r, "node-1")
	if got := offers(); got != "0 0" {
		t.Errorf("allocatable %s after the agent has gone", got)
	}
}

// When the last device of a resource is gone, the controller writes zero once, and then leaves the number to kubelet.
func TestAllocatableOfWhatIsGone(t *testing.T) {
	core := coreNode("6", "6")
	core.Status.Allocatable[partResource], core.Status.Capacity[partResource] = resource.MustParse("4"), resource.MustParse("4")
	w := newWorld(t, interceptor.Funcs{}, gpuNode(partitioned), core)
	r := w.allocatable()
	for _, step := range []struct {
		kubelet string
		change  func(*v1alpha1.GPUNodeStatus)
		want    string
	}{
		{"", func(*v1alpha1.GPUNodeStatus) {}, "6 4"},
		{"", func(s *v1alpha1.GPUNodeStatus) { s.Devices = s.Devices[:8] }, "6 0"},
		{"4", func(*v1alpha1.GPUNodeStatus) {}, "6 4"},
		{"0", partitioned, "6 4"},
		{"", func(s *v1alpha1.GPUNodeStatus) { // All GPUs are partitioned.
			for i := range s.Devices[:6] {
				s.Devices[i].ExtendedResource, s.Devices[i].ExtendedResourceState = "", ""
			}
		}, "0 4"},
	} {
		node := &corev1.Node{}
		if step.kubelet != "" {
			w.get("", "node-1", node)
			node.Status.Allocatable[partResource] = resource.MustParse(step.kubelet)
			if err := w.client.Status().Update(t.Context(), node); err != nil {
				t.Fatal(err)
			}
			w.twice(r, "node-1")
		}
		w.set(step.change)
		w.twice(r, "node-1")
		w.get("", "node-1", node)
		whole, parts := node.Status.Allocatable[testResource], node.Status.Allocatable[partResource]
		if got := whole.String() + " " + parts.String(); got != step.want {
			t.Errorf("allocatable %s, want %s", got, step.want)
		}
	}
}
