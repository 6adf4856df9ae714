// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

func claimHolds(name string, state v1alpha1.HoldState, devices ...int) func(*v1alpha1.GPUNodeStatus) {
	return func(s *v1alpha1.GPUNodeStatus) {
		for _, n := range devices {
			s.Devices[n].Holders = append(s.Devices[n].Holders, v1alpha1.DeviceHolder{Kind: v1alpha1.HolderClaim, State: state, UID: types.UID("uid-" + name)})
		}
	}
}

func podHolds(n int) func(*v1alpha1.GPUNodeStatus) {
	return func(s *v1alpha1.GPUNodeStatus) {
		s.Devices[n].Holders = append(s.Devices[n].Holders, v1alpha1.DeviceHolder{Kind: v1alpha1.HolderPod, State: v1alpha1.HoldHeld})
	}
}

func waiting(name string, devices ...string) v1alpha1.ConflictingClaim {
	l := pendingEviction(name, devices...)
	l.PendingEviction = false
	return l
}

func TestRetrys(t *testing.T) {
	type change = func(*v1alpha1.GPUNodeStatus)
	for name, c := range map[string]struct {
		status  []change
		claims  []string // a claim of that name, allocated gpu-0 and gpu-1
		waiting []types.UID
		want    string
		patient time.Duration
	}{
		"nothing":                          {},
		"in conflict, device free":         {status: []change{losing(waiting("a", "gpu-0"))}, want: "a"},
		"in conflict, device its own":      {status: []change{losing(waiting("a", "gpu-0")), claimHolds("a", v1alpha1.HoldHeld, 0)}, want: "a"},
		"in conflict, device taken":        {status: []change{losing(waiting("a", "gpu-0")), podHolds(0)}},
		"in conflict, one of two taken":    {status: []change{losing(waiting("a", "gpu-0", "gpu-1")), podHolds(1)}},
		"in conflict, device draining":     {status: []change{losing(waiting("a", "gpu-0")), claimHolds("b", v1alpha1.HoldDraining, 0)}},
		"in conflict, device unhealthy":    {status: []change{losing(waiting("a", "gpu-0")), func(s *v1alpha1.GPUNodeStatus) { s.Devices[0].UnhealthyReason = "lost" }}},
		"in conflict, device unknown":      {status: []change{losing(waiting("a", "gpu-99"))}},
		"pending eviction, device free":    {status: []change{losing(pendingEviction("a", "gpu-0"))}, claims: []string{"a"}},
		"expected after a reboot":          {status: []change{claimHolds("a", v1alpha1.HoldRestored, 0, 1)}, claims: []string{"a"}, want: "a", patient: restoredWait},
		"half of it prepared":              {status: []change{claimHolds("a", v1alpha1.HoldRestored, 0), claimHolds("a", v1alpha1.HoldHeld, 1)}, claims: []string{"a"}},
		"prepared":                         {status: []change{claimHolds("a", v1alpha1.HoldHeld, 0, 1)}, claims: []string{"a"}},
		"draining":                         {status: []change{claimHolds("a", v1alpha1.HoldDraining, 0, 1)}, claims: []string{"a"}},
		"prepared, a pod waits":            {status: []change{claimHolds("a", v1alpha1.HoldHeld, 0, 1)}, claims: []string{"a"}, waiting: []types.UID{"p"}, want: "a", patient: ordinaryWait},
		"draining, a pod waits":            {status: []change{claimHolds("a", v1alpha1.HoldDraining, 0, 1)}, claims: []string{"a"}, waiting: []types.UID{"p"}, want: "a", patient: ordinaryWait},
		"pending eviction, a pod waits":    {status: []change{losing(pendingEviction("a", "gpu-0")), claimHolds("a", v1alpha1.HoldHeld, 0, 1)}, claims: []string{"a"}, waiting: []types.UID{"p"}},
		"allocated, not requested":         {claims: []string{"a"}, want: "a", patient: ordinaryWait},
		"allocated, one of two held by it": {status: []change{claimHolds("a", v1alpha1.HoldRestored, 0)}, claims: []string{"a"}, want: "a", patient: ordinaryWait},
		"allocated, taken":                 {status: []change{podHolds(1)}, claims: []string{"a"}},
	} {
		t.Run(name, func(t *testing.T) {
			claims := []v1alpha1.AllocatedClaim{{UID: "uid-admin", Namespace: "ns", Name: "admin"}}
			for _, claim := range c.claims {
				claims = append(claims, v1alpha1.AllocatedClaim{UID: types.UID("uid-" + claim), Namespace: "ns", Name: claim, Devices: []string{"gpu-0", "gpu-1"}})
			}
			var want []Retry
			if c.want != "" {
				want = []Retry{{UID: types.UID("uid-" + c.want), Namespace: "ns", Name: c.want, WaitBudget: c.patient}}
			}
			for _, pod := range c.waiting {
				for i := range want {
					want[i].Pod = pod
				}
			}
			if diff := cmp.Diff(want, Retries(gpuNode(c.status...).Status, claims, map[types.UID][]types.UID{"uid-a": c.waiting})); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestRetrysOfPartitions: what overlaps a device is in its way, and a partition that is still to be made is judged by its GPU.
func TestRetrysOfPartitions(t *testing.T) {
	const made, unmade = "gpu-6-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-0"
	type change = func(*v1alpha1.GPUNodeStatus)
	fault := func(n int) change { return func(s *v1alpha1.GPUNodeStatus) { s.Devices[n].UnhealthyReason = "lost" } }
	for name, c := range map[string]struct {
		status  []change
		device  string
		want    bool
		patient time.Duration
		own     bool // The claim holds it, and has not lost it.
	}{
		"made, free":                    {device: made, want: true, patient: ordinaryWait},
		"made, expected":                {status: []change{claimHolds("a", v1alpha1.HoldRestored, 8)}, device: made, want: true, patient: restoredWait, own: true},
		"made, its GPU taken":           {status: []change{podHolds(6)}, device: made},
		"made, the one beside taken":    {status: []change{podHolds(9)}, device: made, want: true, patient: ordinaryWait},
		"made, taken":                   {status: []change{podHolds(8)}, device: made},
		"a GPU, a part of it taken":     {status: []change{podHolds(8)}, device: "gpu-6"},
		"a GPU, a part of it draining":  {status: []change{claimHolds("b", v1alpha1.HoldDraining, 9)}, device: "gpu-6"},
		"to be made, not requested":     {device: unmade, want: true, patient: ordinaryWait},
		"to be made, being made":        {status: []change{claimHolds("a", v1alpha1.HoldHeld, 0)}, device: unmade, own: true},
		"to be made, expected":          {status: []change{claimHolds("a", v1alpha1.HoldRestored, 0)}, device: unmade, want: true, patient: restoredWait, own: true},
		"to be made beside another":     {status: []change{claimHolds("a", v1alpha1.HoldRestored, 0), claimHolds("beside", v1alpha1.HoldRestored, 0)}, device: unmade, want: true, patient: restoredWait, own: true},
		"to be made beside one made":    {status: []change{claimHolds("beside", v1alpha1.HoldHeld, 0)}, device: unmade, want: true, patient: ordinaryWait},
		"to be made, the GPU a claim's": {status: []change{claimHolds("whole", v1alpha1.HoldHeld, 0)}, device: unmade},
		"to be made, a claim moved on":  {status: []change{claimHolds("moved", v1alpha1.HoldDraining, 0)}, device: unmade},
		"a GPU, its claim moved on":     {status: []change{claimHolds("moved", v1alpha1.HoldDraining, 0)}, device: "gpu-0"},
		"made, its claim moved beside":  {status: []change{claimHolds("shifted", v1alpha1.HoldDraining, 8)}, device: made},
		"to be made, a claim unknown":   {status: []change{claimHolds("b", v1alpha1.HoldHeld, 0)}, device: unmade},
		"to be made, its GPU taken":     {status: []change{podHolds(0)}, device: unmade},
		"to be made, its GPU unhealthy": {status: []change{fault(0)}, device: unmade},
		"to be made, its GPU unknown":   {device: "gpu-99-mig-1g10gb-19-0"},
	} {
		status := gpuNode(append([]change{partitioned}, c.status...)...).Status
		retry := Retry{UID: "uid-a", Namespace: "ns", Name: "a", WaitBudget: c.patient, Unsure: c.device == unmade}
		var want []Retry
		if c.want {
			want = []Retry{retry}
		}
		others := []v1alpha1.AllocatedClaim{
			{UID: "uid-beside", Namespace: "ns", Name: "beside", Devices: []string{"gpu-0-mig-1g10gb-19-1"}},
			{UID: "uid-whole", Namespace: "ns", Name: "whole", Devices: []string{"gpu-0"}},
			{UID: "uid-moved", Namespace: "ns", Name: "moved", Devices: []string{"gpu-1"}},
			{UID: "uid-shifted", Namespace: "ns", Name: "shifted", Devices: []string{"gpu-6-mig-1g10gb-19-1"}},
		}
		retries := func(claims ...v1alpha1.AllocatedClaim) []Retry {
			return slices.DeleteFunc(Retries(status, append(claims, others...), nil), func(n Retry) bool { return n.UID != "uid-a" })
		}
		claims := v1alpha1.AllocatedClaim{UID: "uid-a", Namespace: "ns", Name: "a", Devices: []string{c.device}}
		if diff := cmp.Diff(want, retries(claims), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s, allocated: %s", name, diff)
		}
		if c.own {
			continue
		}
		for i := range want {
			want[i].WaitBudget = 0
		}
		losing(waiting("a", c.device))(&status)
		if diff := cmp.Diff(want, retries(), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s, in conflict: %s", name, diff)
		}
	}
}

// TestRetrysInVain: whether there is room for a partition is not known, and kubelet is not told for ever.
func TestRetrysInVain(t *testing.T) {
	clock := time.Unix(0, 0)
	n := &retrier{cluster: cluster{now: func() time.Time { return clock }}, nodes: map[string]schedule{}}
	for unsure, want := range map[bool]int{true: 5, false: 15} {
		retries := 0
		for range 20 * 60 {
			due, _ := n.due("node-1", []Retry{{UID: "a", Unsure: unsure}})
			retries += len(due)
			clock = clock.Add(time.Second)
		}
		if retries < want || unsure && retries > want {
			t.Errorf("unsure %t: %d retries in 20 minutes, want %d", unsure, retries, want)
		}
		n.due("node-1", nil)
	}
}

func TestRetryable(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*corev1.Pod)
		want   bool
	}{
		"creating":           {creating, true},
		"between two starts": {started, true}, // as after a reboot
		"running":            {running, false},
		"going":              {deleting, false},
		"ended":              {func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }, false},
		"not bound":          {func(p *corev1.Pod) { p.Spec.NodeName = "" }, false},
		"bound elsewhere":    {func(p *corev1.Pod) { p.Spec.NodeName = "node-2" }, false},
		"an init runs": {func(p *corev1.Pod) {
			running(p)
			p.Status.InitContainerStatuses, p.Status.ContainerStatuses = p.Status.ContainerStatuses, nil
		}, false},
		"Running in name only": {func(p *corev1.Pod) { started(p); p.Status.Phase = corev1.PodRunning }, true},
	} {
		if got := Retryable(newPod("a", c.change), "node-1"); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func sandbox(status corev1.ConditionStatus) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: corev1.PodReadyToStartContainers, Status: status})
	}
}

func TestUnstarted(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*corev1.Pod)
		want   bool
	}{
		"creating":             {creating, true},
		"no sandbox":           {sandbox(corev1.ConditionFalse), true},
		"its image is pulled":  {sandbox(corev1.ConditionTrue), false},
		"between two starts":   {started, false},
		"an init has run":      {initialised, false},
		"no word from kubelet": {func(*corev1.Pod) {}, true},
	} {
		if got := Unstarted(newPod("a", c.change)); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func (w *world) retrier() *retrier {
	return &retrier{cluster: w.cluster(), nodes: map[string]schedule{}}
}

func (w *world) retry(name string) string {
	w.t.Helper()
	pod := &corev1.Pod{}
	w.get("ns", name, pod)
	return pod.Annotations[RetryAnnotation]
}

func TestRetryAnnotatesOnceInAWhile(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{}, gpuNode(losing(waiting("a", "gpu-0"))), newClaim("a", "gpu-0"), newPod("a", creating))
	n := w.retrier()
	if result := w.twice(n, "node-1"); result.RequeueAfter != 5*time.Second {
		t.Errorf("again after %v", result.RequeueAfter)
	}
	w.want(map[string]int{"patch Pod": 1})
	if at := w.retry("pod-a"); at != "2026-01-01T00:00:00Z" {
		t.Errorf("annotation %q", at)
	}
	var writes []int
	for range 60 {
		w.clock = w.clock.Add(5 * time.Second)
		w.twice(n, "node-1")
		writes = append(writes, w.writes["patch Pod"])
	}
	// After 0, 5, 15, 35, 75, 155 and 235 seconds.
	if first, last := writes[0], writes[len(writes)-1]; first != 2 || last != 7 {
		t.Errorf("%d writes after 5 s, %d after 300 s", first, last)
	}
	// It is prepared at last, its pod runs, and it is forgotten.
	pod := newPod("a", running)
	if err := w.client.Status().Patch(t.Context(), pod, client.MergeFrom(newPod("a"))); err != nil {
		t.Fatal(err)
	}
	w.set(func(s *v1alpha1.GPUNodeStatus) { s.Conflicts = nil; claimHolds("a", v1alpha1.HoldHeld, 0)(s) })
	if result := w.twice(n, "node-1"); result.RequeueAfter != 0 || len(n.nodes) != 0 {
		t.Errorf("again after %v, remembers %v", result.RequeueAfter, n.nodes)
	}
}

// The claims of other nodes, which a stolen token of an agent may report, cost no request.
func TestRetryIgnoresForgedConflicts(t *testing.T) {
	elsewhere := newClaim("a", "gpu-0")
	elsewhere.Status.Allocation.Devices.Results[0].Pool = "node-2"
	w := newWorld(t, interceptor.Funcs{}, gpuNode(losing(waiting("a", "gpu-0"))), elsewhere, newPod("a", creating))
	n, reads := w.retrier(), 0
	n.live = w.live(&reads)
	w.twice(n, "node-1")
	if w.want(map[string]int{}); reads > 0 {
		t.Errorf("%d reads", reads)
	}
}

// saying adds parameters for a driver to what a claim is allocated.
func saying(driver, raw string, requests ...string) func(*resourceapi.ResourceClaim) {
	return func(c *resourceapi.ResourceClaim) {
		c.Status.Allocation.Devices.Config = append(c.Status.Allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{
			Source: resourceapi.AllocationConfigSourceClaim, Requests: requests,
			DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
				Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(raw)},
			}},
		})
	}
}

const (
	rightGPU = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"}`
	rightMIG = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig"}`
	misspelt = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","shearing":{}}`
)

func TestRefused(t *testing.T) {
	type change = func(*resourceapi.ResourceClaim)
	for name, c := range map[string]struct {
		device string
		change []change
		want   bool
	}{
		"nothing is said":              {device: "gpu-0"},
		"right":                        {device: "gpu-0", change: []change{saying(testDriver, rightGPU)}},
		"misspelt":                     {device: "gpu-0", change: []change{saying(testDriver, misspelt)}, want: true},
		"another driver's":             {device: "gpu-0", change: []change{saying("nic.example.com", misspelt)}},
		"for another request":          {device: "gpu-0", change: []change{saying(testDriver, misspelt, "other")}},
		"overridden":                   {device: "gpu-0", change: []change{saying(testDriver, misspelt), saying(testDriver, rightGPU)}},
		"for a partition, it is one":   {device: "gpu-0-mig-1g10gb-19-0", change: []change{saying(testDriver, rightMIG, "r")}},
		"for a partition, it is a GPU": {device: "gpu-0", change: []change{saying(testDriver, rightMIG, "r")}, want: true},
		"for a GPU, it is a partition": {device: "gpu-0-mig-1g10gb-19-0", change: []change{saying(testDriver, rightGPU, "r")}, want: true},
		"not allocated":                {change: []change{func(c *resourceapi.ResourceClaim) { c.Status.Allocation = nil }}},
		"of another driver's devices": {device: "gpu-0", change: []change{saying(testDriver, misspelt), func(c *resourceapi.ResourceClaim) {
			c.Status.Allocation.Devices.Results[0].Driver = "nic.example.com"
		}}},
	} {
		claim := newClaim("a", c.device)
		claim.Status.Allocation.Devices.Results[0].Request = "r"
		for _, change := range c.change {
			change(claim)
		}
		if got := Refused(claim, testDriver); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// TestRetrySparesRefusedClaims: what a node refuses for its parameters it refuses again, and with it all that the pod has.
func TestRetrySparesRefusedClaims(t *testing.T) {
	for name, c := range map[string]struct {
		own, beside string
		retried     bool
	}{
		"right":        {rightGPU, rightGPU, true},
		"wrong":        {misspelt, rightGPU, false},
		"wrong beside": {rightGPU, misspelt, false},
	} {
		t.Run(name, func(t *testing.T) {
			own, beside := newClaim("a", "gpu-0"), newClaim("made-for-a", "gpu-1")
			saying(testDriver, c.own)(own)
			saying(testDriver, c.beside)(beside)
			beside.Status.ReservedFor = own.Status.ReservedFor
			pod := newPod("a", creating, func(p *corev1.Pod) {
				p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "x", ResourceClaimName: ptr.To("a")}, {Name: "y", ResourceClaimTemplateName: ptr.To("t")}}
				p.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "y", ResourceClaimName: ptr.To("made-for-a")}}
			})
			w := newWorld(t, interceptor.Funcs{}, gpuNode(), own, beside, pod)
			for n := w.retrier(); w.clock.Before(time.Date(2026, 1, 1, 0, 5, 0, 0, time.UTC)); w.clock = w.clock.Add(5 * time.Second) {
				w.twice(n, "node-1")
			}
			if got := w.writes["patch Pod"]; (got > 0) != c.retried {
				t.Errorf("%d retries in 5 minutes", got)
			}
		})
	}
}

func TestRetryHasPatience(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{}, gpuNode(claimHolds("a", v1alpha1.HoldRestored, 0)), newClaim("a", "gpu-0"), newPod("a", started))
	n := w.retrier()
	if result := w.twice(n, "node-1"); result.RequeueAfter != 3*time.Second {
		t.Errorf("again after %v", result.RequeueAfter)
	}
	w.want(map[string]int{})
	w.clock = w.clock.Add(3 * time.Second)
	w.twice(n, "node-1")
	w.want(map[string]int{"patch Pod": 1})
}

// TestRetryOnePodOfAPreparedClaim: the claim runs in one pod and another one waits, which was refused or never answered.
func TestRetryOnePodOfAPreparedClaim(t *testing.T) {
	shared := newClaim("a", "gpu-0")
	shared.Status.ReservedFor = append(shared.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "pod-b", UID: "uid-pod-b"})
	w := newWorld(t, interceptor.Funcs{}, gpuNode(claimHolds("a", v1alpha1.HoldHeld, 0)), shared, newPod("a", running), newPod("b", creating))
	n := w.retrier()
	if result := w.twice(n, "node-1"); result.RequeueAfter != 5*time.Second {
		t.Errorf("again after %v", result.RequeueAfter)
	}
	w.want(map[string]int{})
	w.clock = w.clock.Add(5 * time.Second)
	w.twice(n, "node-1")
	w.want(map[string]int{"patch Pod": 1})
	if w.retry("pod-a") != "" || w.retry("pod-b") == "" {
		t.Errorf("annotations %q of the one that runs, %q of the one that waits", w.retry("pod-a"), w.retry("pod-b"))
	}
	var result reconcile.Result
	for range 60 {
		w.clock = w.clock.Add(5 * time.Second)
		result = w.twice(n, "node-1")
	}
	// After 5, 10, 20, 40 and 80 seconds, and then no more.
	w.want(map[string]int{"patch Pod": 5})
	if result.RequeueAfter != 0 {
		t.Errorf("again after %v", result.RequeueAfter)
	}
}

func TestRetryOfAPreparedClaimSparesWhoGoesOn(t *testing.T) {
	for name, change := range map[string]func(*corev1.Pod){
		"its image is pulled": sandbox(corev1.ConditionTrue),
		"going":               deleting,
		"bound elsewhere":     func(p *corev1.Pod) { p.Spec.NodeName = "node-2" },
		"another of its name": func(p *corev1.Pod) { p.UID = "new" },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, interceptor.Funcs{}, gpuNode(claimHolds("a", v1alpha1.HoldHeld, 0)), newClaim("a", "gpu-0"), newPod("a", creating, change))
			n := w.retrier()
			w.twice(n, "node-1")
			w.clock = w.clock.Add(ordinaryWait)
			w.twice(n, "node-1")
			w.want(map[string]int{})
		})
	}
}

func TestRetryHearsOfPods(t *testing.T) {
	withClaim := func(p *corev1.Pod) { p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu"}} }
	unbound := func(p *corev1.Pod) { p.Spec.NodeName = "" }
	if got := nodeOfPod(t.Context(), newPod("a")); len(got) != 0 {
		t.Errorf("a pod without claims: %v", got)
	}
	if got := nodeOfPod(t.Context(), newPod("a", withClaim)); len(got) != 1 || got[0].Name != "node-1" {
		t.Errorf("a pod with a claim: %v", got)
	}
	if got := nodeOfPod(t.Context(), newPod("a", withClaim, unbound)); len(got) != 0 {
		t.Errorf("a pod that is not bound: %v", got)
	}
	if !bindingChanged.Update(event.UpdateEvent{ObjectOld: newPod("a", unbound), ObjectNew: newPod("a")}) || !bindingChanged.Create(event.CreateEvent{Object: newPod("a")}) {
		t.Error("a pod that is bound is not heard of")
	}
	if bindingChanged.Update(event.UpdateEvent{ObjectOld: newPod("a"), ObjectNew: newPod("a")}) {
		t.Error("a pod that was bound before is heard of")
	}
}

func TestRetryLeavesOthersAlone(t *testing.T) {
	another := newClaim("a", "gpu-0")
	another.UID = "new"
	for name, objects := range map[string][]client.Object{
		"running":              {newClaim("a", "gpu-0"), newPod("a", running)},
		"another of that name": {newClaim("a", "gpu-0"), newPod("a", func(p *corev1.Pod) { p.UID = "new" })},
		"pod gone":             {newClaim("a", "gpu-0")},
		"claim gone":           {newPod("a")},
		"another claim":        {another, newPod("a")},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, interceptor.Funcs{}, append(objects, gpuNode(losing(waiting("a", "gpu-0"))))...)
			w.twice(w.retrier(), "node-1")
			w.want(map[string]int{})
		})
	}
}

func TestRetryAndTheAPIServer(t *testing.T) {
	pods := corev1.Resource("pods")
	for name, c := range map[string]struct {
		answer error
		failed bool
	}{
		"the pod was replaced": {apierrors.NewConflict(pods, "pod-a", nil), false},
		"the pod is gone":      {apierrors.NewNotFound(pods, "pod-a"), false},
		"refused":              {apierrors.NewForbidden(pods, "pod-a", nil), true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, interceptor.Funcs{
				Patch: func(context.Context, client.WithWatch, client.Object, client.Patch, ...client.PatchOption) error {
					return c.answer
				},
			}, gpuNode(losing(waiting("a", "gpu-0"))), newClaim("a", "gpu-0"), newPod("a", creating))
			if _, err := w.retrier().Reconcile(t.Context(), requestFor("node-1")); (err != nil) != c.failed {
				t.Error(err)
			}
		})
	}
}
