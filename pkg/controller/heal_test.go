// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/owner"
)

func pendingEviction(name string, devices ...string) v1alpha1.ConflictingClaim {
	return v1alpha1.ConflictingClaim{
		UID: types.UID("uid-" + name), Namespace: "ns", Name: name, Devices: devices, PendingEviction: true,
		Pods: []types.UID{types.UID("uid-pod-" + name), "uid-pod-b"}, Message: "GPU " + strings.Join(devices, ", ") + " is held by a pod",
		Since: metav1.NewMicroTime(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)),
	}
}

func running(pod *corev1.Pod) {
	pod.Status.Phase = corev1.PodRunning
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{ContainerID: "containerd://1", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
}

func bare(pod *corev1.Pod) { pod.OwnerReferences = nil }

func byWorkflow(pod *corev1.Pod) {
	of := &pod.OwnerReferences[0]
	of.APIVersion, of.Kind, of.Name = "argoproj.io/v1alpha1", "Workflow", "wf"
}

func safeToEvict(pod *corev1.Pod) { pod.Annotations = map[string]string{owner.SafeToEvict: "true"} }

func deleting(pod *corev1.Pod) {
	pod.DeletionTimestamp, pod.Finalizers = &metav1.Time{Time: time.Unix(1, 0)}, []string{"example.com/finalizer"}
}

func started(pod *corev1.Pod) {
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{
		State:                corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}},
		LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 1}},
	}}
}

func initialised(pod *corev1.Pod) {
	pod.Status.InitContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}}}
}

func creating(pod *corev1.Pod) {
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}}}}
}

func TestPlanEviction(t *testing.T) {
	also := func(name string) func(*resourceapi.ResourceClaim) {
		return func(c *resourceapi.ResourceClaim) {
			c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "pod-" + name, UID: types.UID("uid-pod-" + name)})
		}
	}
	for name, c := range map[string]struct {
		claim    func(*resourceapi.ResourceClaim)
		conflict func(*v1alpha1.ConflictingClaim)
		pods     []*corev1.Pod
		evict    string
		refused  string
	}{
		"waiting":                      {pods: []*corev1.Pod{newPod("a")}, evict: "pod-a"},
		"creating":                     {pods: []*corev1.Pod{newPod("a", creating)}, evict: "pod-a"},
		"running":                      {pods: []*corev1.Pod{newPod("a", running)}, refused: "has started"},
		"between two starts":           {pods: []*corev1.Pod{newPod("a", started)}, refused: "has started"},
		"init container done":          {pods: []*corev1.Pod{newPod("a", initialised)}, refused: "has started"},
		"bare":                         {pods: []*corev1.Pod{newPod("a", bare)}, refused: "has no owner"},
		"a step of a workflow":         {pods: []*corev1.Pod{newPod("a", byWorkflow)}, refused: "belongs to Workflow wf"},
		"a step that is safe to evict": {pods: []*corev1.Pod{newPod("a", byWorkflow, safeToEvict)}, evict: "pod-a"},
		"bare, and says it is safe":    {pods: []*corev1.Pod{newPod("a", bare, safeToEvict)}, refused: "has no owner"},
		"shared with a step":           {claim: also("b"), pods: []*corev1.Pod{newPod("a"), newPod("b", byWorkflow)}, refused: "pod pod-b belongs to"},
		"owned, not by its controller": {pods: []*corev1.Pod{newPod("a", func(p *corev1.Pod) { p.OwnerReferences[0].Controller = nil })}, refused: "has no owner"},
		"going":                        {pods: []*corev1.Pod{newPod("a", deleting)}},
		"ended":                        {pods: []*corev1.Pod{newPod("a", func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed })}},
		"gone":                         {},
		"another of that name":         {pods: []*corev1.Pod{newPod("a", func(p *corev1.Pod) { p.UID = "new" })}},
		"another claim":                {claim: func(c *resourceapi.ResourceClaim) { c.UID = "new" }, pods: []*corev1.Pod{newPod("a")}},
		"deallocated":                  {claim: func(c *resourceapi.ResourceClaim) { c.Status.Allocation = nil }, pods: []*corev1.Pod{newPod("a")}},
		"not pending eviction":         {conflict: func(l *v1alpha1.ConflictingClaim) { l.PendingEviction = false }, pods: []*corev1.Pod{newPod("a")}},
		"reserved by no pod":           {claim: func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor[0].Resource = "things" }, pods: []*corev1.Pod{newPod("a")}, refused: "is not a pod"},
		"not reserved":                 {claim: func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = nil }, pods: []*corev1.Pod{newPod("a")}},
		"a pod that only names it":     {pods: []*corev1.Pod{newPod("a"), newPod("x")}, evict: "pod-a"},
		"shared":                       {claim: also("b"), pods: []*corev1.Pod{newPod("a"), newPod("b")}, evict: "pod-a pod-b"},
		"shared with one that runs":    {claim: also("b"), pods: []*corev1.Pod{newPod("a"), newPod("b", running)}, refused: "pod pod-b has started"},
		"shared with a bare one":       {claim: also("b"), pods: []*corev1.Pod{newPod("a"), newPod("b", bare)}, refused: "pod pod-b has no owner"},
		"shared with a later pod":      {claim: also("c"), pods: []*corev1.Pod{newPod("a"), newPod("c")}, refused: "pod pod-c reserved the claim after"},
		"shared, one is going":         {claim: also("b"), pods: []*corev1.Pod{newPod("a"), newPod("b", deleting)}, evict: "pod-a"},
	} {
		t.Run(name, func(t *testing.T) {
			claim, conflict := newClaim("a", "gpu-0"), pendingEviction("a", "gpu-0")
			if c.claim != nil {
				c.claim(claim)
			}
			if c.conflict != nil {
				c.conflict(&conflict)
			}
			got := PlanEviction(v1alpha1.GPUNodeStatus{Conflicts: []v1alpha1.ConflictingClaim{conflict}}, claim, c.pods, testDriver, "node-1")
			var names []string
			for _, pod := range got.Evict {
				names = append(names, pod.Name)
			}
			if evict := strings.Join(names, " "); evict != c.evict || !strings.Contains(got.Refused, c.refused) || (c.refused == "") != (got.Refused == "") {
				t.Errorf("evict %q, refused %q", evict, got.Refused)
			}
		})
	}
}

func (w *world) healer() *healer {
	return &healer{cluster: w.cluster(), evictions: newEvictions(w.now), turns: map[string]turn{}}
}

func losing(conflicts ...v1alpha1.ConflictingClaim) func(*v1alpha1.GPUNodeStatus) {
	return func(s *v1alpha1.GPUNodeStatus) { s.Conflicts = conflicts }
}

func TestHealEvicts(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{}, gpuNode(losing(pendingEviction("a", "gpu-0"))), newClaim("a", "gpu-0"), newPod("a"))
	h := w.healer()
	if result := w.twice(h, "node-1"); result.RequeueAfter != 2*time.Second { // kubelet tries again only after 60 s
		t.Errorf("again after %v", result.RequeueAfter)
	}
	w.want(map[string]int{"eviction pod-a": 1})
	for range 2 {
		if e := w.event(); !strings.HasPrefix(e, "Normal EvictedAfterConflict Pod pod-a was evicted") || !strings.Contains(e, "held by a pod") {
			t.Errorf("event %q", e)
		}
	}
}

func TestHealLeavesOthersAlone(t *testing.T) {
	waiting := pendingEviction("a", "gpu-0")
	waiting.PendingEviction = false
	elsewhere := newClaim("a", "gpu-0")
	elsewhere.Status.Allocation.Devices.Results[0].Pool = "node-2"
	for name, objects := range map[string][]client.Object{
		"a device that is gone": {gpuNode(losing(pendingEviction("a", "gpu-9"))), newClaim("a", "gpu-0"), newPod("a")},
		"allocated anew":        {gpuNode(losing(pendingEviction("a", "gpu-1"))), newClaim("a", "gpu-0"), newPod("a")},
		"allocated elsewhere":   {gpuNode(losing(pendingEviction("a", "gpu-0"))), elsewhere, newPod("a")},
		"a conflict that waits": {gpuNode(losing(waiting)), newClaim("a", "gpu-0"), newPod("a")},
		"no conflict":           {gpuNode(), newClaim("a", "gpu-0"), newPod("a")},
		"running":               {gpuNode(losing(pendingEviction("a", "gpu-0"))), newClaim("a", "gpu-0"), newPod("a", running)},
		"claim gone":            {gpuNode(losing(pendingEviction("a", "gpu-0"))), newPod("a")},
		"no GPUNode":            {newClaim("a", "gpu-0"), newPod("a")},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, interceptor.Funcs{}, objects...)
			w.twice(w.healer(), "node-1")
			w.want(map[string]int{})
			if e := w.event(); e != "" {
				t.Errorf("event %s", e)
			}
		})
	}
}

// A restarted agent has no conflicts, and the cache may report that late.
func TestHealLooksAtTheNodeAgain(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{}, gpuNode(losing(pendingEviction("a", "gpu-0"))), newClaim("a", "gpu-0"), newPod("a"))
	h := w.healer()
	h.client = hasHeard(w, w.gpuNode())
	waits := pendingEviction("a", "gpu-0")
	waits.PendingEviction = false
	for name, now := range map[string]func(*v1alpha1.GPUNodeStatus){"forgotten": losing(), "expired": losing(waits)} {
		w.set(now)
		w.twice(h, "node-1")
		if w.want(map[string]int{}); t.Failed() {
			t.Fatal(name)
		}
	}
	w.set(losing(pendingEviction("a", "gpu-0")))
	w.twice(h, "node-1")
	w.want(map[string]int{"eviction pod-a": 1})
}

func TestHealCountsWhatCannotBeMoved(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{}, gpuNode(losing(pendingEviction("a", "gpu-0"), pendingEviction("b", "gpu-1"))),
		newClaim("a", "gpu-0"), newPod("a", running), newClaim("b", "gpu-1"), newPod("b"))
	h := w.healer()
	gauge := func() float64 {
		var m dto.Metric
		if err := w.metrics.notMovable.WithLabelValues("node-1").Write(&m); err != nil {
			t.Fatal(err)
		}
		return m.GetGauge().GetValue()
	}
	w.twice(h, "node-1")
	w.want(map[string]int{"eviction pod-b": 1}) // one claim that cannot be moved holds up no other
	if gauge() != 1 {
		t.Errorf("%v not movable", gauge())
	}
	w.set(func(s *v1alpha1.GPUNodeStatus) { s.Conflicts = nil })
	w.twice(h, "node-1")
	if gauge() != 0 {
		t.Errorf("%v not movable in the end", gauge())
	}
}

// live counts the objects that are read past the cache.
func (w *world) live(reads *int) client.Reader {
	return interceptor.NewClient(w.client, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, into client.Object, opts ...client.GetOption) error {
			*reads++
			return c.Get(ctx, key, into, opts...)
		},
	})
}

// besides adds an honest node with one claim in conflict, beside node-1.
func (w *world) besides() {
	w.t.Helper()
	honest := gpuNode(losing(pendingEviction("honest", "gpu-0")))
	honest.Name, honest.UID = "node-2", "uid-node-2"
	claim := newClaim("honest", "gpu-0")
	claim.Status.Allocation.Devices.Results[0].Pool = "node-2"
	for _, o := range []client.Object{honest, claim, newPod("honest", func(p *corev1.Pod) { p.Spec.NodeName = "node-2" })} {
		if err := w.client.Create(w.t.Context(), o); err != nil {
			w.t.Fatal(err)
		}
	}
	clear(w.writes)
}

// A stolen token of an agent reports claims in conflict that do not exist, or that have devices of other nodes. That costs no request.
func TestHealIgnoresForgedConflicts(t *testing.T) {
	forged := []v1alpha1.ConflictingClaim{pendingEviction("honest", "gpu-0"), pendingEviction("replaced", "gpu-0")}
	for i := range v1alpha1.MaxConflicts {
		forged = append(forged, pendingEviction(fmt.Sprint("forged-", i), "gpu-0"))
	}
	replaced := newClaim("replaced", "gpu-0")
	replaced.UID = "another"
	w := newWorld(t, interceptor.Funcs{}, gpuNode(losing(forged...)), replaced, newPod("replaced"))
	w.besides()
	h, reads := w.healer(), 0
	h.live = w.live(&reads)
	if result := w.twice(h, "node-1"); result.RequeueAfter != healInterval || reads > 0 {
		t.Errorf("%d reads, again after %v", reads, result.RequeueAfter)
	}
	w.want(map[string]int{})
}

// A node with hundreds of claims in conflict delays another one by a few reads, and has all its own looked at.
func TestHealIsFair(t *testing.T) {
	const many = 100
	var conflicts []v1alpha1.ConflictingClaim
	w := newWorld(t, interceptor.Funcs{}, gpuNode())
	for i := range many {
		name := fmt.Sprint("c", i)
		conflicts = append(conflicts, pendingEviction(name, "gpu-0"))
		for _, o := range []client.Object{newClaim(name, "gpu-0"), newPod(name, running)} {
			if err := w.client.Create(t.Context(), o); err != nil {
				t.Fatal(err)
			}
		}
	}
	w.set(losing(conflicts...))
	w.besides()
	h, reads, before, turns := w.healer(), 0, 0, 0
	h.live = w.live(&reads)
	queue := []string{"node-1", "node-2"}
	for ; len(queue) > 0; turns++ {
		name := queue[0]
		queue = queue[1:]
		result := w.once(h, types.NamespacedName{Name: name})
		if name == "node-2" && before == 0 {
			before = reads
		}
		if result.RequeueAfter > 0 && result.RequeueAfter < time.Second {
			queue = append(queue, name)
		}
	}
	w.want(map[string]int{"eviction pod-honest": 1})
	// A claim, its pod and its node, in some ten milliseconds. The other node waits for 20 of 100 claims at most, less than a second.
	if before > 3*20 || reads != 3*101 || turns < 1+100/20 || turns > 1+100/5 {
		t.Errorf("%d reads until the other node was healed, %d in all, %d turns", before, reads, turns)
	}
	var m dto.Metric
	if err := w.metrics.notMovable.WithLabelValues("node-1").Write(&m); err != nil || m.GetGauge().GetValue() != many || len(h.turns) > 0 {
		t.Errorf("%v not movable, %v, %v", m.GetGauge().GetValue(), err, h.turns)
	}
}

// What the API server answers, and when the healer comes back.
func TestHealAndTheAPIServer(t *testing.T) {
	pods := corev1.Resource("pods")
	for name, c := range map[string]struct {
		answer error
		again  time.Duration
		failed bool
	}{
		"a budget":              {apierrors.NewTooManyRequests("no disruption allowed", 10), healInterval, false},
		"a protected namespace": {apierrors.NewForbidden(pods, "pod-a", nil), healInterval, false},
		"the pod has changed":   {apierrors.NewConflict(pods, "pod-a", nil), 0, true},
		"the pod is gone":       {apierrors.NewNotFound(pods, "pod-a"), healInterval, false},
		"the API server is ill": {apierrors.NewInternalError(context.DeadlineExceeded), 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, interceptor.Funcs{
				SubResourceCreate: func(context.Context, client.Client, string, client.Object, client.Object, ...client.SubResourceCreateOption) error {
					return c.answer
				},
			}, gpuNode(losing(pendingEviction("a", "gpu-0"))), newClaim("a", "gpu-0"), newPod("a"))
			h := w.healer()
			for range 2 {
				result, err := h.Reconcile(t.Context(), requestFor("node-1"))
				if (err != nil) != c.failed || result.RequeueAfter != c.again {
					t.Errorf("again after %v, %v", result.RequeueAfter, err)
				}
			}
			if w.event() != "" {
				t.Error("an event about nothing")
			}
		})
	}
}

// An eviction counts although that of the next pod fails: the owner's next pod is not evicted at once for the same device.
func TestEvictionCountsBeforeAnError(t *testing.T) {
	shared := newClaim("a", "gpu-0")
	shared.Status.ReservedFor = append(shared.Status.ReservedFor, newClaim("b", "gpu-0").Status.ReservedFor...)
	w := newWorld(t, interceptor.Funcs{
		SubResourceCreate: func(ctx context.Context, c client.Client, name string, pod, sub client.Object, o ...client.SubResourceCreateOption) error {
			if pod.GetName() == "pod-b" {
				return apierrors.NewInternalError(errors.New("etcd is away"))
			}
			return c.SubResource(name).Create(ctx, pod, sub, o...)
		},
	})
	h := w.healer()
	plan := EvictionPlan{Conflict: pendingEviction("a", "gpu-0"), Evict: []*corev1.Pod{newPod("a"), newPod("b")}}
	for _, pod := range plan.Evict {
		if err := w.client.Create(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.carryOut(t.Context(), "node-1", plan, shared); err == nil {
		t.Error("no error")
	}
	if len(h.evictions.losses) != 1 {
		t.Errorf("recorded %v", h.evictions.losses)
	}
}

// Only exactly the pod that was judged is evicted.
func TestEvictionNamesThePod(t *testing.T) {
	var sent *policyv1.Eviction
	w := newWorld(t, interceptor.Funcs{
		SubResourceCreate: func(_ context.Context, _ client.Client, _ string, _, sub client.Object, _ ...client.SubResourceCreateOption) error {
			sent = sub.(*policyv1.Eviction)
			return nil
		},
	}, gpuNode(losing(pendingEviction("a", "gpu-0"))), newClaim("a", "gpu-0"), newPod("a"))
	w.twice(w.healer(), "node-1")
	pod := &corev1.Pod{}
	w.get("ns", "pod-a", pod)
	if p := sent.DeleteOptions.Preconditions; *p.UID != pod.UID || *p.ResourceVersion != pod.ResourceVersion {
		t.Errorf("preconditions %+v", p)
	}
}

// A GPU that broke or vanished after the allocation has no other holder, and may not be in the node's status.
func TestHealClaimsOfBrokenGPUs(t *testing.T) {
	lost := pendingEviction("a", "gpu-9")
	lost.Message = "device gpu-9 is not on this node"
	w := newWorld(t, interceptor.Funcs{}, gpuNode(losing(lost, pendingEviction("b", "gpu-0")), func(s *v1alpha1.GPUNodeStatus) {
		s.Devices[0].UnhealthyReason = "FellOffTheBus"
	}), newClaim("a", "gpu-9"), newPod("a"), newClaim("b", "gpu-0"), newPod("b"))
	w.twice(w.healer(), "node-1")
	w.want(map[string]int{"eviction pod-a": 1, "eviction pod-b": 1})
	for range 2 {
		if e := w.event(); !strings.Contains(e, "cannot have the GPU") || !strings.Contains(e, lost.Message) {
			t.Errorf("event %q", e)
		}
	}
}

// The claims that the scheduler makes for extended resources are in no pod's spec: reservedFor is what leads to their pods.
func TestHealClaimsOfExtendedResources(t *testing.T) {
	claim := newClaim("a", "gpu-0")
	claim.Annotations = map[string]string{resourceapi.ExtendedResourceClaimAnnotation: "true"}
	w := newWorld(t, interceptor.Funcs{}, gpuNode(losing(pendingEviction("a", "gpu-0"))), claim, newPod("a"))
	w.twice(w.healer(), "node-1")
	w.want(map[string]int{"eviction pod-a": 1})
}

func TestStillConflicting(t *testing.T) {
	for name, c := range map[string]struct {
		lost, allocated string
		want            bool
	}{
		"the same":                 {"gpu-0", "gpu-0", true},
		"another":                  {"gpu-0", "gpu-1", false},
		"a partition":              {"gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-0", true},
		"a partition, told by GPU": {"gpu-0", "gpu-0-mig-1g10gb-19-0", true},
		"a partition beside it":    {"gpu-0-mig-1g10gb-19-1", "gpu-0-mig-1g10gb-19-0", false},
		"a partition of another":   {"gpu-0", "gpu-00-mig-1g10gb-19-0", false},
	} {
		if got := stillConflicting(pendingEviction("a", c.lost), newClaim("a", c.allocated), testDriver, "node-1"); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}
