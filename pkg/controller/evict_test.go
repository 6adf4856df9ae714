// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	dto "github.com/prometheus/client_model/go"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// taint is one of gpu-0 since 12:00.
func taint(rule, key, value string) v1alpha1.DeviceTaint {
	since := metav1.NewTime(time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC))
	return v1alpha1.DeviceTaint{Rule: rule, Taint: v1alpha1.Taint{Key: key, Value: value, Effect: v1alpha1.TaintNoExecute, Since: &since}}
}

var broken = taint("", "tandem-gpu.dev/unhealthy", "XID")

// has is the status of a node whose GPU a pod has, with taints of that GPU.
func has(gpu int, pod *corev1.Pod, taints ...v1alpha1.DeviceTaint) func(*v1alpha1.GPUNodeStatus) {
	return func(s *v1alpha1.GPUNodeStatus) {
		d := &s.Devices[gpu]
		d.Taints = append(d.Taints, taints...)
		d.Holders = append(d.Holders, v1alpha1.DeviceHolder{Kind: v1alpha1.HolderPod, State: v1alpha1.HoldHeld, Pods: []v1alpha1.PodReference{
			{UID: pod.UID, Namespace: pod.Namespace, Name: pod.Name}}})
	}
}

// withLimit is a pod that runs with GPUs by a limit.
func withLimit(pod *corev1.Pod) {
	running(pod)
	pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{testResource: resource.MustParse("1")}
}

func tolerating(t corev1.Toleration) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Tolerations = append(p.Spec.Tolerations, t) }
}

func TestPlanRemoval(t *testing.T) {
	noon := broken.Since.Time
	const key = "tandem-gpu.dev/unhealthy"
	exists := corev1.TolerationOpExists
	lost := taint("", "gpu.nvidia.com/gpu-lost", "")
	noSchedule := broken
	noSchedule.Effect = v1alpha1.TaintNoSchedule
	ruled := taint("rule", "example.com/repair", "")
	byRule := func(n *v1alpha1.GPUNode) { n.Spec.Taints = []v1alpha1.RuleTaint{{Rule: "rule", Taint: ruled.Taint}} }
	ruledNoSchedule := ruled
	ruledNoSchedule.Effect = v1alpha1.TaintNoSchedule
	ofDevice := func(name string) func(*v1alpha1.GPUNode) {
		return func(n *v1alpha1.GPUNode) {
			byRule(n)
			n.Spec.Taints[0].Device = name
		}
	}
	ago := func(d time.Duration) *metav1.Time { return ptr.To(metav1.NewTime(noon.Add(time.Minute - d))) }
	for name, c := range map[string]struct {
		taints  []v1alpha1.DeviceTaint // of the pod's GPU, broken unless it is set
		pod     []func(*corev1.Pod)
		node    func(*v1alpha1.GPUNode)
		want    string        // the key of the taint that ends the pod, or ""
		after   time.Duration // noon
		refused string
	}{
		"by a limit":                {want: key},
		"no taint":                  {taints: []v1alpha1.DeviceTaint{}},
		"another effect":            {taints: []v1alpha1.DeviceTaint{noSchedule}},
		"beside another effect":     {taints: []v1alpha1.DeviceTaint{noSchedule, broken}, want: key},
		"bare":                      {pod: []func(*corev1.Pod){bare}, want: key},
		"a step of a workflow":      {pod: []func(*corev1.Pod){byWorkflow}, want: key},
		"not started":               {pod: []func(*corev1.Pod){func(p *corev1.Pod) { p.Status = corev1.PodStatus{Phase: corev1.PodPending} }}, want: key},
		"being deleted":             {pod: []func(*corev1.Pod){deleting}},
		"ended":                     {pod: []func(*corev1.Pod){func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }}},
		"of another node":           {pod: []func(*corev1.Pod){func(p *corev1.Pod) { p.Spec.NodeName = "node-2" }}},
		"not bound":                 {pod: []func(*corev1.Pod){func(p *corev1.Pod) { p.Spec.NodeName = "" }}},
		"asks for no GPU":           {pod: []func(*corev1.Pod){func(p *corev1.Pod) { p.Spec.Containers[0].Resources = corev1.ResourceRequirements{} }}},
		"asks for another resource": {pod: []func(*corev1.Pod){limitedTo("example.com/gpu", "1")}},
		"asks for none of it":       {pod: []func(*corev1.Pod){limitedTo(testResource, "0")}},
		"asks for a partition":      {pod: []func(*corev1.Pod){limitedTo("nvidia.com/mig-1g.10gb", "1")}, want: key},
		"a neighbour":               {pod: []func(*corev1.Pod){func(p *corev1.Pod) { p.UID = "neighbour" }}},
		"static":                    {pod: []func(*corev1.Pod){func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"} }}, want: key, refused: "static"},
		"of a DaemonSet":            {pod: []func(*corev1.Pod){func(p *corev1.Pod) { p.OwnerReferences[0].Kind = "DaemonSet" }}, want: key, refused: "DaemonSet rs"},
		"of a silent agent":         {node: func(n *v1alpha1.GPUNode) { n.Status.Seen = ago(3 * time.Minute) }},
		"of an agent":               {node: func(n *v1alpha1.GPUNode) { n.Status.Seen = ago(2 * time.Minute) }, want: key},
		"by a rule":                 {taints: []v1alpha1.DeviceTaint{ruled}, node: byRule, want: "example.com/repair"},
		"by a rule that is gone":    {taints: []v1alpha1.DeviceTaint{ruled}},
		"by a rule for its GPU":     {taints: []v1alpha1.DeviceTaint{ruled}, node: ofDevice("gpu-0"), want: "example.com/repair"},
		"by a rule for another GPU": {taints: []v1alpha1.DeviceTaint{ruled}, node: ofDevice("gpu-1")},
		"by another key of a rule":  {taints: []v1alpha1.DeviceTaint{taint("rule", "example.com/other", "")}, node: byRule},
		"before the agent knows":    {taints: []v1alpha1.DeviceTaint{ruledNoSchedule, broken}, node: byRule, pod: []func(*corev1.Pod){tolerating(corev1.Toleration{Key: key, Operator: exists})}},
		"by no rule and no fault":   {taints: []v1alpha1.DeviceTaint{taint("", "example.com/repair", "")}, node: byRule},
		"by a rule that changed": {taints: []v1alpha1.DeviceTaint{ruled}, node: func(n *v1alpha1.GPUNode) {
			byRule(n)
			n.Spec.Taints[0].Effect = v1alpha1.TaintNoSchedule
		}},
		"tolerates it":              {pod: []func(*corev1.Pod){tolerating(corev1.Toleration{Key: key, Operator: exists})}},
		"tolerates all":             {pod: []func(*corev1.Pod){tolerating(corev1.Toleration{Operator: exists})}},
		"tolerates the value":       {pod: []func(*corev1.Pod){tolerating(corev1.Toleration{Key: key, Value: "XID", Effect: corev1.TaintEffectNoExecute})}},
		"tolerates another value":   {pod: []func(*corev1.Pod){tolerating(corev1.Toleration{Key: key, Value: "Lost"})}, want: key},
		"tolerates another effect":  {pod: []func(*corev1.Pod){tolerating(corev1.Toleration{Key: key, Operator: exists, Effect: corev1.TaintEffectNoSchedule})}, want: key},
		"tolerates one of two":      {taints: []v1alpha1.DeviceTaint{broken, lost}, pod: []func(*corev1.Pod){tolerating(corev1.Toleration{Key: key, Operator: exists})}, want: lost.Key},
		"tolerates it for a while":  {pod: []func(*corev1.Pod){tolerating(corev1.Toleration{Key: key, Operator: exists, TolerationSeconds: ptr.To[int64](90)})}, want: key, after: 90 * time.Second},
		"tolerates it for less":     {pod: []func(*corev1.Pod){tolerating(corev1.Toleration{Key: key, Operator: exists, TolerationSeconds: ptr.To[int64](-1)})}, want: key},
		"tolerates one for a while": {taints: []v1alpha1.DeviceTaint{broken, lost}, pod: []func(*corev1.Pod){tolerating(corev1.Toleration{Key: key, Operator: exists, TolerationSeconds: ptr.To[int64](90)})}, want: lost.Key},
		"tolerates nodes that fail": {pod: []func(*corev1.Pod){tolerating(corev1.Toleration{Key: corev1.TaintNodeNotReady, Operator: exists, TolerationSeconds: ptr.To[int64](300)})}, want: key},
	} {
		t.Run(name, func(t *testing.T) {
			taints := c.taints
			if taints == nil {
				taints = []v1alpha1.DeviceTaint{broken}
			}
			node := gpuNode(has(0, newPod("a"), taints...), has(1, newPod("b")))
			if c.node != nil {
				c.node(node)
			}
			pod := newPod("a", append([]func(*corev1.Pod){withLimit}, c.pod...)...)
			got := PlanRemoval(node, pod, device.Resources{GPU: testResource}, noon.Add(time.Minute))
			if got.Taint.Key != c.want || (got.Device == "gpu-0") != (c.want != "") || (c.want != "") && !got.Due.Equal(noon.Add(c.after)) ||
				!strings.Contains(got.Refused, c.refused) || (c.refused == "") != (got.Refused == "") {
				t.Errorf("got %+v", got)
			}
		})
	}
}

func limitedTo(name corev1.ResourceName, n string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{name: resource.MustParse(n)}
	}
}

func (w *world) evictor() *evictor {
	return &evictor{cluster: w.cluster(), evictions: newEvictions(w.now), turns: map[string]podTurn{}}
}

func (w *world) evictions(result string) float64 {
	w.t.Helper()
	var m dto.Metric
	if err := w.metrics.evictions.WithLabelValues("taint", result).Write(&m); err != nil {
		w.t.Fatal(err)
	}
	return m.GetCounter().GetValue()
}

// The pod of the broken GPU leaves, once, and its neighbours stay.
func TestEvicts(t *testing.T) {
	a, b, c := newPod("a", withLimit), newPod("b", withLimit), newPod("c", withLimit)
	var sent []*policyv1.Eviction
	w := newWorld(t, interceptor.Funcs{
		SubResourceCreate: func(ctx context.Context, under client.Client, sub string, o, eviction client.Object, _ ...client.SubResourceCreateOption) error {
			sent = append(sent, eviction.(*policyv1.Eviction))
			pod := o.DeepCopyObject().(*corev1.Pod) // as the API server does, and kubelet has not ended it yet
			pod.Finalizers = []string{"example.com/kubelet"}
			if err := under.Update(ctx, pod); err != nil {
				return err
			}
			return under.Delete(ctx, pod)
		},
	}, gpuNode(has(0, a, broken), has(0, b), has(1, c)), a, b, c)
	w.clock = broken.Since.Time
	if result := w.twice(w.evictor(), "node-1"); result.RequeueAfter != lookInterval {
		t.Errorf("again after %s", result.RequeueAfter)
	}
	w.once(w.evictor(), requestFor("node-1").NamespacedName) // another leader
	w.want(map[string]int{"eviction pod-a": 1, "eviction pod-b": 1})
	for _, e := range sent {
		if p := e.DeleteOptions.Preconditions; p.UID == nil || p.ResourceVersion != nil || e.DeleteOptions.GracePeriodSeconds != nil {
			t.Errorf("sent %+v", e.DeleteOptions)
		}
	}
	for range 2 {
		if e := w.event(); !strings.HasPrefix(e, "Normal EvictedByTaint Pod pod-") || !strings.Contains(e, "has gpu-0 of node node-1, which has the taint tandem-gpu.dev/unhealthy=XID:NoExecute, and was evicted") {
			t.Errorf("event %q", e)
		}
	}
	if e := w.event(); e != "" || w.evictions("evicted") != 2 {
		t.Errorf("event %q, %v evictions", e, w.evictions("evicted"))
	}
}

// TestEvictsNoOtherPod: what the GPUNode says is compared with what the API server knows, when the eviction is due.
func TestEvictsNoOtherPod(t *testing.T) {
	successor := newPod("a", withLimit)
	successor.UID = "successor"
	elsewhere := newPod("a", withLimit, func(p *corev1.Pod) { p.Spec.NodeName = "node-2" })
	tainted := gpuNode(has(0, newPod("a"), broken))
	for name, c := range map[string]struct {
		now   *v1alpha1.GPUNode // the cache has tainted
		pods  []client.Object
		cheap bool // the pod alone shows that nothing is to be evicted, so the GPUNode is not read
	}{
		"the taint is gone":        {now: gpuNode(has(0, newPod("a"))), pods: []client.Object{newPod("a", withLimit)}},
		"the pod is gone":          {now: tainted, cheap: true},
		"a successor of that name": {tainted, []client.Object{successor}, true},
		"a pod of another node":    {tainted, []client.Object{elsewhere}, true},
		"a pod without a GPU":      {tainted, []client.Object{newPod("a", running)}, true},
		"a pod that has left":      {now: gpuNode(has(0, newPod("b"), broken)), pods: []client.Object{newPod("a", withLimit)}},
		"a pod that a claim has": {now: gpuNode(func(s *v1alpha1.GPUNodeStatus) {
			has(0, newPod("a"), broken)(s)
			s.Devices[0].Holders[0].Kind = v1alpha1.HolderClaim
		}), pods: []client.Object{newPod("a", withLimit)}},
		"a pod that is deleted":     {now: tainted, pods: []client.Object{newPod("a", withLimit, deleting)}},
		"the GPUNode is gone":       {pods: []client.Object{newPod("a", withLimit)}},
		"the pod of a like GPUNode": {now: gpuNode(), pods: []client.Object{newPod("a", withLimit)}},
	} {
		t.Run(name, func(t *testing.T) {
			objects := c.pods
			if c.now != nil {
				objects = append(objects, c.now.DeepCopy())
			}
			w := newWorld(t, interceptor.Funcs{}, objects...)
			w.clock = broken.Since.Time
			r, reads := w.evictor(), 0
			r.client, r.live = hasHeard(w, tainted), w.live(&reads)
			w.twice(r, "node-1")
			if want := map[bool]int{true: 2, false: 4}[c.cheap]; reads != want {
				t.Errorf("%d reads, want %d", reads, want)
			}
			w.want(map[string]int{})
			if e := w.event(); e != "" {
				t.Errorf("event %s", e)
			}
		})
	}
}

// TestEndedRuleEvictsNoPod: the taint of a rule evicts only while the rule is as the GPUNode says.
func TestEndedRuleEvictsNoPod(t *testing.T) {
	ruled := taint("fans", "example.com/repair", "fan")
	node := gpuNode(has(0, newPod("a"), ruled))
	evicts := func(r *resourceapi.DeviceTaintRule) {
		r.Spec.Taint.Effect, r.Spec.Taint.TimeAdded = resourceapi.DeviceTaintEffectNoExecute, ruled.Since
	}
	rule := newRule("fans", evicts)
	node.Spec.Taints = RuleTaints([]*resourceapi.DeviceTaintRule{rule}, testDriver, node.Name, node.Status.Devices)
	later := metav1.NewTime(ruled.Since.Add(time.Hour))
	for name, c := range map[string]struct {
		objects []client.Object
		fails   error
		writes  map[string]int
		failed  bool
	}{
		"the rule is there":            {objects: []client.Object{rule}, writes: map[string]int{"eviction pod-a": 1}},
		"the rule has ended":           {},
		"the rule ends nothing":        {objects: []client.Object{newRule("fans")}},
		"the rule is for another node": {objects: []client.Object{newRule("fans", evicts, inPool("node-2"))}},
		"another rule has its name":    {objects: []client.Object{newRule("fans", evicts, func(r *resourceapi.DeviceTaintRule) { r.Spec.Taint.TimeAdded = &later })}},
		"the API server failed":        {objects: []client.Object{rule}, fails: errors.New("etcd is away"), failed: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, interceptor.Funcs{
				Get: func(ctx context.Context, under client.WithWatch, key client.ObjectKey, o client.Object, options ...client.GetOption) error {
					if _, is := o.(*resourceapi.DeviceTaintRule); is && c.fails != nil {
						return c.fails
					}
					return under.Get(ctx, key, o, options...)
				},
			}, append(c.objects, node.DeepCopy(), newPod("a", withLimit))...)
			w.clock = ruled.Since.Time
			_, err := w.evictor().Reconcile(t.Context(), requestFor("node-1"))
			if (err != nil) != c.failed {
				t.Errorf("error %v", err)
			}
			if c.writes == nil {
				c.writes = map[string]int{}
			}
			w.want(c.writes)
		})
	}
}

// TestEndedRuleHidesNoOtherTaint: the earliest taint is that of a rule that has ended or cannot be read, and a later one ends the pod.
func TestEndedRuleHidesNoOtherTaint(t *testing.T) {
	ended, other := taint("fans", "example.com/repair", "fan"), taint("nics", "example.com/nic", "")
	later := metav1.NewTime(broken.Since.Add(time.Minute))
	fault := broken
	fault.Since, other.Since = &later, &later
	stands := newRule("nics", func(r *resourceapi.DeviceTaintRule) {
		r.Spec.Taint = resourceapi.DeviceTaint{Key: other.Key, Effect: resourceapi.DeviceTaintEffectNoExecute, TimeAdded: &later}
	})
	byBoth := []v1alpha1.RuleTaint{{Rule: "fans", Taint: ended.Taint}, {Rule: "nics", Taint: other.Taint}}
	forbidden := apierrors.NewForbidden(resourceapi.Resource("devicetaintrules"), "fans", nil)
	for name, c := range map[string]struct {
		also  v1alpha1.DeviceTaint
		fails error
		pod   func(*corev1.Pod)
		again time.Duration // instead of an eviction
	}{
		"a fault":                           {also: fault},
		"a fault, and no rule is read":      {also: fault, fails: forbidden},
		"another rule":                      {also: other},
		"another rule, and one is not read": {also: other, fails: forbidden},
		"a fault that is tolerated for a while": {also: fault, again: 9 * time.Minute, pod: tolerating(
			corev1.Toleration{Key: fault.Key, Operator: corev1.TolerationOpExists, TolerationSeconds: ptr.To[int64](600)})},
	} {
		t.Run(name, func(t *testing.T) {
			pod := newPod("a", withLimit)
			if c.pod != nil {
				c.pod(pod)
			}
			node := gpuNode(has(0, pod, ended, c.also))
			node.Spec.Taints = byBoth
			w := newWorld(t, interceptor.Funcs{
				Get: func(ctx context.Context, under client.WithWatch, key client.ObjectKey, o client.Object, options ...client.GetOption) error {
					if _, is := o.(*resourceapi.DeviceTaintRule); is && key.Name == "fans" && c.fails != nil {
						return c.fails
					}
					return under.Get(ctx, key, o, options...)
				},
			}, node, pod, stands)
			w.clock = later.Add(time.Minute)
			result := w.once(w.evictor(), requestFor("node-1").NamespacedName)
			if c.again > 0 {
				w.want(map[string]int{})
				if result.RequeueAfter != c.again {
					t.Errorf("again after %s, want %s", result.RequeueAfter, c.again)
				}
				return
			}
			w.want(map[string]int{"eviction pod-a": 1})
			if e := w.event(); !strings.Contains(e, c.also.Key) {
				t.Errorf("event %q, want one of %s", e, c.also.Key)
			}
		})
	}
}

// TestEvictionTimes: an eviction comes when it is due, a refused one is tried again, and one that moves nothing is only reported.
func TestEvictionTimes(t *testing.T) {
	pods := corev1.Resource("pods")
	budget := apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", 10)
	for name, c := range map[string]struct {
		pod    func(*corev1.Pod)
		answer error
		again  time.Duration
		failed bool
		sent   int
		event  string // part of it
	}{
		"tolerated for a while": {pod: tolerating(corev1.Toleration{Operator: corev1.TolerationOpExists, TolerationSeconds: ptr.To[int64](90)}), again: 90 * time.Second},
		"a DaemonSet":           {pod: func(p *corev1.Pod) { p.OwnerReferences[0].Kind = "DaemonSet" }, event: "Warning NotEvicted Pod pod-a has gpu-0", again: lookInterval},
		"a budget":              {answer: budget, again: 5 * time.Second, sent: 2, event: "disruption budget"},
		"a protected namespace": {answer: apierrors.NewForbidden(pods, "pod-a", nil), again: 5 * time.Minute, sent: 2, event: "forbidden"},
		"the pod has changed":   {answer: apierrors.NewConflict(pods, "pod-a", nil), failed: true, sent: 2},
		"the pod is gone":       {answer: apierrors.NewNotFound(pods, "pod-a"), sent: 2, again: lookInterval},
		"two budgets":           {answer: apierrors.NewInternalError(errors.New("more than one PodDisruptionBudget")), again: 5 * time.Second, sent: 2, event: "more than one"},
		"tolerated for longer than a Duration": {pod: tolerating(corev1.Toleration{Operator: corev1.TolerationOpExists, TolerationSeconds: ptr.To[int64](9223372037)}),
			again: (1 << 31) * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			pod := newPod("a", withLimit)
			if c.pod != nil {
				c.pod(pod)
			}
			w := newWorld(t, interceptor.Funcs{
				SubResourceCreate: func(context.Context, client.Client, string, client.Object, client.Object, ...client.SubResourceCreateOption) error {
					return c.answer
				},
			}, gpuNode(has(0, pod, broken)), pod)
			w.clock = broken.Since.Time
			r := w.evictor()
			for range 2 {
				result, err := r.Reconcile(t.Context(), requestFor("node-1"))
				if (err != nil) != c.failed || result.RequeueAfter != c.again {
					t.Errorf("again after %s, %v", result.RequeueAfter, err)
				}
				if e := w.event(); !strings.Contains(e, c.event) || (c.event == "") != (e == "") {
					t.Errorf("event %q", e)
				}
			}
			if w.writes["eviction pod-a"] != c.sent || w.evictions("evicted") != 0 || (w.evictions("refused") > 0) != strings.Contains(c.event, "i") && c.answer == budget {
				t.Errorf("writes %v", w.writes)
			}
			if len(r.evictions.losses) != 0 {
				t.Errorf("remembers %v", r.evictions.losses)
			}
		})
	}
}

// An owner whose pods get the same broken GPU again and again loses them less and less often.
func TestEvictionsByTaintAreBounded(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{}, gpuNode())
	r := w.evictor()
	w.clock = broken.Since.Time
	began := w.clock
	for i, want := range []time.Duration{1, 11, 31, 71} {
		pod := newPod(fmt.Sprint(i), withLimit)
		pod.CreationTimestamp = metav1.NewTime(w.clock.Add(time.Second))
		if err := w.client.Create(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
		w.set(func(s *v1alpha1.GPUNodeStatus) {
			s.Devices[0].Holders, s.Devices[0].Taints = nil, nil
			has(0, pod, broken)(s)
		})
		for w.writes["eviction "+pod.Name] == 0 && w.clock.Sub(began) < time.Hour {
			w.clock = w.clock.Add(time.Second)
			w.once(r, requestFor("node-1").NamespacedName)
		}
		if got := w.clock.Sub(began); got != want*time.Second {
			t.Errorf("pod %d was evicted after %s, want %d s", i, got, want)
		}
	}
}

// A node that names hundreds of pods, true or forged, delays another one by a few reads.
func TestEvictorIsFair(t *testing.T) {
	honest := newPod("honest", withLimit, func(p *corev1.Pod) { p.Spec.NodeName = "node-2" })
	other := gpuNode(has(0, honest, broken))
	other.Name, other.UID = "node-2", "uid-node-2"
	w := newWorld(t, interceptor.Funcs{}, gpuNode(func(s *v1alpha1.GPUNodeStatus) {
		s.Devices[0].Taints = []v1alpha1.DeviceTaint{broken}
		for i := range 100 {
			has(0, newPod(fmt.Sprint("forged-", i)))(s)
			has(0, newPod(fmt.Sprint("forged-", i)))(s)
		}
	}), other, honest)
	w.clock = broken.Since.Time
	r, reads, before := w.evictor(), 0, 0
	r.live = w.live(&reads)
	queue := []string{"node-1", "node-2"}
	for len(queue) > 0 {
		name := queue[0]
		queue = queue[1:]
		if name == "node-2" {
			before = reads
		}
		if result := w.once(r, types.NamespacedName{Name: name}); result.RequeueAfter == anotherTurn {
			queue = append(queue, name)
		}
	}
	w.want(map[string]int{"eviction pod-honest": 1})
	if before > 20 || reads != 102 || len(r.turns) > 0 {
		t.Errorf("%d reads until the other node's turn, %d in all, %v", before, reads, r.turns)
	}
}

// An API server that asks to be asked again, as while a budget is being updated, does not keep the only worker.
func TestEvictionWithoutAnAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod := newPod("a", withLimit)
		w := newWorld(t, interceptor.Funcs{
			SubResourceCreate: func(ctx context.Context, _ client.Client, _ string, _, _ client.Object, _ ...client.SubResourceCreateOption) error {
				<-ctx.Done()
				return ctx.Err()
			},
		}, pod)
		began := time.Now()
		evicted, refused, err := evict(t.Context(), w.client, pod)
		if took := time.Since(began); evicted || !errors.Is(refused, errNoAnswer) || err != nil || took != answerTime {
			t.Errorf("evicted %t, refused %v, %v after %s", evicted, refused, err, took)
		}
	})
}

// TestStaticPodIsNamed: the GPUNode has the UID that kubelet knows a static pod by, and the API server's mirror has another one.
func TestStaticPodIsNamed(t *testing.T) {
	known := newPod("a", withLimit)
	known.UID = "of-the-manifest"
	mirror := newPod("a", withLimit, func(p *corev1.Pod) {
		p.OwnerReferences, p.Annotations = nil, map[string]string{corev1.MirrorPodAnnotationKey: "of-the-manifest"}
	})
	w := newWorld(t, interceptor.Funcs{}, gpuNode(has(0, known, broken)), mirror)
	w.clock = broken.Since.Time
	w.once(w.evictor(), requestFor("node-1").NamespacedName)
	w.want(map[string]int{})
	if e := w.event(); !strings.Contains(e, "NotEvicted") || !strings.Contains(e, "static") {
		t.Errorf("event %q", e)
	}
}

// TestTurnsOverAShrinkingList: pods that end during a pass hide no other.
func TestTurnsOverAShrinkingList(t *testing.T) {
	const pods = 2*podsATurn + 4
	var objects []client.Object
	var holders []func(*v1alpha1.GPUNodeStatus)
	for i := range pods {
		pod := newPod(fmt.Sprintf("%02d", i), withLimit)
		objects, holders = append(objects, pod), append(holders, has(i%8, pod, broken))
	}
	node := gpuNode(holders...)
	read := map[string]bool{}
	w := newWorld(t, interceptor.Funcs{
		Get: func(ctx context.Context, under client.WithWatch, key client.ObjectKey, o client.Object, options ...client.GetOption) error {
			if _, is := o.(*corev1.Pod); is {
				read[key.Name] = true
			}
			return under.Get(ctx, key, o, options...)
		},
	}, append(objects, node)...)
	r := w.evictor()
	for again := anotherTurn; again == anotherTurn; {
		result, err := r.Reconcile(t.Context(), requestFor("node-1"))
		if err != nil {
			t.Fatal(err)
		}
		again = result.RequeueAfter
		current := &v1alpha1.GPUNode{}
		if err := w.client.Get(t.Context(), requestFor("node-1").NamespacedName, current); err != nil {
			t.Fatal(err)
		}
		for i := range current.Status.Devices {
			d := &current.Status.Devices[i]
			d.Holders = slices.DeleteFunc(d.Holders, func(h v1alpha1.DeviceHolder) bool { return read[h.Pods[0].Name] })
		}
		if err := w.client.Status().Update(t.Context(), current); err != nil {
			t.Fatal(err)
		}
	}
	if len(read) != pods {
		t.Errorf("%d of %d pods were looked at", len(read), pods)
	}
}
