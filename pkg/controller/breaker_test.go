// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// asking lets a pod ask for one device of each resource, in containers of its own.
func asking(resources ...corev1.ResourceName) func(*corev1.Pod) {
	return func(pod *corev1.Pod) {
		for _, name := range resources {
			pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{Name: fmt.Sprint("c", len(pod.Spec.Containers)),
				Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{name: resource.MustParse("1")}}})
		}
	}
}

// failing is how kubelet leaves a pod that it does not admit.
func failing(reason, message string) func(*corev1.Pod) {
	return func(pod *corev1.Pod) {
		pod.Status.Phase, pod.Status.Reason, pod.Status.Message = corev1.PodFailed, reason, message
	}
}

// unhealthy is what kubelet says where the device plugin of a resource is gone.
func unhealthy(resource string) func(*corev1.Pod) {
	return failing("UnexpectedAdmissionError", "Pod was rejected: Allocate failed due to no healthy devices present; cannot allocate unhealthy devices "+resource+", which is unexpected")
}

// byScheduler is how the API server marks a pod that a scheduler binds.
func byScheduler(pod *corev1.Pod) {
	pod.Status.Conditions = append(pod.Status.Conditions, corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionTrue})
}

func TestRejected(t *testing.T) {
	const small = corev1.ResourceName("nvidia.com/mig-1g.10gb")
	limits := device.Resources{GPU: testResource, Strategy: device.MIGStrategyMixed}
	gpu := []corev1.ResourceName{testResource}
	for name, c := range map[string]struct {
		pod  []func(*corev1.Pod)
		want []corev1.ResourceName
	}{
		"no plugin":                  {pod: []func(*corev1.Pod){asking(testResource), unhealthy(testResource)}, want: gpu},
		"for one of two":             {pod: []func(*corev1.Pod){asking(testResource, small, small), unhealthy(string(small))}, want: []corev1.ResourceName{small}},
		"one of a longer name":       {pod: []func(*corev1.Pod){asking(small, small+".me"), unhealthy(string(small + ".me"))}, want: []corev1.ResourceName{small + ".me"}},
		"too few":                    {pod: []func(*corev1.Pod){asking(testResource), failing("UnexpectedAdmissionError", "Allocate failed due to requested number of devices unavailable for nvidia.com/gpu. Requested: 1, Available: 0, which is unexpected")}, want: gpu},
		"by kubelet's accounts":      {pod: []func(*corev1.Pod){asking(testResource, small), failing("OutOfnvidia.com/gpu", "")}, want: gpu},
		"our agent refuses":          {pod: []func(*corev1.Pod){asking(testResource), failing("UnexpectedAdmissionError", "Allocate failed due to rpc error: code = FailedPrecondition desc = device GPU-1 is held by pod a/b by its nvidia.com/gpu limit (held), which is unexpected")}},
		"no room on the CPUs":        {pod: []func(*corev1.Pod){asking(testResource), failing("UnexpectedAdmissionError", "Allocate failed due to not enough cpus available to satisfy request: requested=4, available=2, which is unexpected")}},
		"another resource":           {pod: []func(*corev1.Pod){asking(testResource, "rdma/hca"), unhealthy("rdma/hca")}},
		"kubelet has no CPU":         {pod: []func(*corev1.Pod){asking(testResource), failing("OutOfcpu", "")}},
		"a resource of others":       {pod: []func(*corev1.Pod){asking("example.com/nic"), unhealthy("example.com/nic")}},
		"admitted, and ended badly":  {pod: []func(*corev1.Pod){asking(testResource), failing("Error", "no nvidia.com/gpu")}},
		"admitted, and runs":         {pod: []func(*corev1.Pod){asking(testResource), func(p *corev1.Pod) { p.Status.Phase = corev1.PodRunning }}},
		"asks for nothing":           {pod: []func(*corev1.Pod){unhealthy(testResource)}},
		"asks for none":              {pod: []func(*corev1.Pod){asking(testResource), unhealthy(testResource), func(p *corev1.Pod) { p.Spec.Containers[1].Resources.Limits[testResource] = resource.Quantity{} }}},
		"in an init container first": {pod: []func(*corev1.Pod){asking(testResource), unhealthy(testResource), func(p *corev1.Pod) { p.Spec.InitContainers, p.Spec.Containers = p.Spec.Containers, nil }}, want: gpu},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Rejected(newPod("a", c.pod...), limits); !slices.Equal(got, c.want) {
				t.Errorf("%v, want %v", got, c.want)
			}
		})
	}
}

// breaker returns a breaker whose openings no reconciler receives.
func (w *world) breaker() *breaker {
	b := newBreaker(w.cluster())
	b.opened = make(chan event.GenericEvent, 100)
	return b
}

// rejects shows the breaker that a pod which the scheduler bound has left Pending.
func (w *world) rejects(b *breaker, namespace, name string) {
	w.t.Helper()
	request := boundPod{types.NamespacedName{Namespace: namespace, Name: name}, types.UID("uid-" + name)}
	if _, err := b.Reconcile(w.t.Context(), request); err != nil {
		w.t.Fatal(err)
	}
}

// attack lets pods of a namespace leave Pending, one after the other, as the watch reports them.
func (w *world) attack(b *breaker, pods ...*corev1.Pod) {
	w.t.Helper()
	for _, pod := range pods {
		pending := pod.DeepCopy()
		pending.Status = corev1.PodStatus{Phase: corev1.PodPending, Conditions: pod.Status.Conditions}
		trimPod(pending)
		pod.Status.Conditions = nil // kubelet drops them when it rejects a pod
		if err := w.client.Create(w.t.Context(), pod); err != nil {
			w.t.Fatal(err)
		}
		if !leftPending(b.of).Delete(event.DeleteEvent{Object: pending}) {
			continue
		}
		for _, request := range boundPodOf(w.t.Context(), pending) {
			if _, err := b.Reconcile(w.t.Context(), request); err != nil {
				w.t.Fatal(err)
			}
		}
	}
}

// A tenant's pods that no scheduler bound, or would bind, change nothing for others.
func TestBreakerIgnoresWhatATenantForges(t *testing.T) {
	absurd := func(pod *corev1.Pod) {
		pod.Spec.Containers[1].Resources.Limits[testResource] = resource.MustParse("1000")
	}
	claimsToBe := func(pod *corev1.Pod) {
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "SchedulingGated"}}
	}
	kubelet := unhealthy(testResource)
	for name, c := range map[string]struct {
		change []func(*corev1.Pod)
		want   string
	}{
		"created with a nodeName":           {[]func(*corev1.Pod){asking(testResource), kubelet}, "8"},
		"and with an absurd limit":          {[]func(*corev1.Pod){asking(testResource), absurd, kubelet}, "8"},
		"and with a condition":              {[]func(*corev1.Pod){asking(testResource), claimsToBe, kubelet}, "8"},
		"bound by a scheduler of their own": {[]func(*corev1.Pod){asking(testResource), byScheduler, absurd, kubelet}, "8"},
		"bound, and honest":                 {[]func(*corev1.Pod){asking(testResource), byScheduler, kubelet}, "0"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, interceptor.Funcs{}, gpuNode(), coreNode("8", "8"))
			r := w.allocatable()
			w.twice(r, "node-1")
			for i := range breakerPods {
				w.attack(r.breaker, newPod(fmt.Sprint(i), c.change...))
			}
			w.twice(r, "node-1")
			if got := w.offers(); got != c.want {
				t.Errorf("%s are offered, want %s", got, c.want)
			}
		})
	}
}

// A pod of the same name that came after the one that the scheduler bound is not mistaken for it.
func TestBreakerKnowsThePod(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{}, gpuNode(), coreNode("8", "8"),
		newPod("a", asking(testResource), unhealthy(testResource), func(p *corev1.Pod) { p.UID = "later" }))
	b := w.breaker()
	for range breakerPods {
		w.rejects(b, "ns", "pod-a")
	}
	if b.open(offer{"node-1", testResource}) {
		t.Error("open")
	}
}

// A tenant with a scheduler of its own opens the breaker a few times; another tenant's pods do so still.
func TestBreakerIsBoundedByNamespace(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{}, gpuNode(), coreNode("8", "8"),
		newPod("a", asking(testResource), unhealthy(testResource)),
		newPod("b", asking(testResource), unhealthy(testResource), func(p *corev1.Pod) { p.Namespace = "other" }))
	b, of, status := w.breaker(), offer{"node-1", testResource}, gpuNode().Status
	opened := func(namespace, name string) bool {
		for range breakerPods {
			w.rejects(b, namespace, name)
		}
		defer b.close(of)
		return b.open(of)
	}
	began, n := w.clock, 0
	for w.clock.Sub(began) < 5*time.Minute {
		if opened("ns", "pod-a") {
			n++
		}
		w.clock = w.clock.Add(10 * time.Second)
	}
	if n != 3 {
		t.Errorf("opened %d times", n)
	}
	if !opened("other", "pod-b") || opened("other", "nothing") {
		t.Error("another namespace suffers")
	}
	w.clock = w.clock.Add(10 * time.Minute)
	b.count(offer{"node-2", testResource}, "ns", status)
	if len(b.offers) != 1 {
		t.Errorf("remembers %v", b.offers)
	}
}

// A node that turns away one pod after the other is offered none, until its agent has something else to say, or kubelet.
func TestBreaker(t *testing.T) {
	type change = func(*v1alpha1.GPUNodeStatus)
	type step struct {
		ms      int
		pods    int    // so many are turned away
		agent   change // says something else
		kubelet string // puts this number into the node
		want    string
	}
	holds := func(n int) change {
		return func(s *v1alpha1.GPUNodeStatus) {
			for i := range s.Devices {
				s.Devices[i].Holders = nil
				if i < n {
					s.Devices[i].Holders = []v1alpha1.DeviceHolder{{Kind: v1alpha1.HolderPod}}
				}
			}
		}
	}
	kubeletLists := func(limits v1alpha1.ExtendedResourceState) change {
		return func(s *v1alpha1.GPUNodeStatus) {
			for i := range s.Devices {
				s.Devices[i].ExtendedResourceState = limits
			}
		}
	}
	others := func(s *v1alpha1.GPUNodeStatus) { s.Mode, s.ExtendedResource = "ClaimsOnly", "" }
	dual := func(s *v1alpha1.GPUNodeStatus) { s.Mode, s.ExtendedResource = "Dual", testResource }
	opened := step{pods: 3, want: "0"}
	for name, c := range map[string]struct {
		steps []step
		opens int
	}{
		"a race":                   {steps: []step{{pods: 2, want: "8"}}},
		"one after the other":      {steps: []step{{pods: 1, want: "8"}, {ms: 1000, pods: 1, want: "8"}, {ms: 2000, pods: 1, want: "0"}}, opens: 1},
		"races, one now and then":  {steps: []step{{pods: 1, want: "8"}, {ms: 1500, pods: 1, want: "8"}, {ms: 3000, pods: 1, want: "8"}}},
		"no report":                {steps: []step{opened, {ms: 60_000, want: "0"}}, opens: 1},
		"the agent frees a GPU":    {steps: []step{opened, {ms: 500, agent: holds(0), want: "0"}, {ms: 2000, want: "8"}}, opens: 1},
		"and then there is a race": {steps: []step{opened, {ms: 300, pods: 3, want: "0"}, {ms: 500, agent: holds(0), want: "0"}, {ms: 2000, want: "8"}, {ms: 2100, pods: 2, want: "8"}}, opens: 1},
		"the agent is back, and nothing has changed": {steps: []step{opened, {ms: 500, agent: kubeletLists(""), want: "0"},
			{ms: 900, agent: kubeletLists(v1alpha1.ExtendedResourceAllocatable), want: "8"}, {ms: 5000, kubelet: "8", want: "8"}}, opens: 1},
		"that is not seen":                  {steps: []step{opened, {ms: 9000, kubelet: "8", want: "8"}}, opens: 1},
		"kubelet has devices":               {steps: []step{opened, {ms: 9000, kubelet: "7", want: "7"}, {ms: 11_000, want: "8"}}, opens: 1},
		"kubelet has none":                  {steps: []step{opened, {ms: 9000, kubelet: "0", want: "0"}, {ms: 60_000, want: "0"}}, opens: 1},
		"kubelet knew it before":            {steps: []step{{kubelet: "0", want: "0"}, opened, {ms: 60_000, want: "0"}}, opens: 1},
		"and has devices again":             {steps: []step{{kubelet: "0", want: "0"}, opened, {ms: 9000, kubelet: "8", want: "8"}}, opens: 1},
		"kubelet has devices, and is wrong": {steps: []step{opened, {ms: 9000, kubelet: "8", want: "8"}, {ms: 9100, pods: 2, want: "8"}, {ms: 9200, pods: 1, want: "0"}}, opens: 2},
		"another plugin serves it":          {steps: []step{{agent: others, want: "0"}, {kubelet: "8", want: "8"}, {pods: 9, want: "8"}, {ms: 60_000, agent: dual, want: "8"}}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, interceptor.Funcs{}, gpuNode(holds(1)), coreNode("8", "8"), newPod("a", asking(testResource), unhealthy(testResource)))
			r, began := w.allocatable(), w.clock
			w.twice(r, "node-1")
			for i, s := range c.steps {
				w.clock = began.Add(time.Duration(s.ms) * time.Millisecond)
				if s.agent != nil {
					w.set(s.agent)
				}
				if s.kubelet != "" {
					node := &corev1.Node{}
					w.get("", "node-1", node)
					node.Status.Allocatable[testResource] = resource.MustParse(s.kubelet)
					if err := w.client.Status().Update(t.Context(), node); err != nil {
						t.Fatal(err)
					}
				}
				for range s.pods {
					w.rejects(r.breaker, "ns", "pod-a")
				}
				w.twice(r, "node-1")
				if got := w.offers(); got != s.want {
					t.Errorf("step %d: %s are offered, want %s", i, got, s.want)
				}
			}
			if told := len(r.breaker.opened); told != c.opens {
				t.Errorf("opened %d times, want %d", told, c.opens)
			}
			if len(r.breaker.opened) > 0 {
				if node := (<-r.breaker.opened).Object.GetName(); node != "node-1" {
					t.Errorf("%s is looked at", node)
				}
			}
		})
	}
}

// What has opened for a node that is left alone, or for one that is gone, does not strike later.
func TestBreakerForgets(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{}, gpuNode(), coreNode("8", "8"), newPod("a", asking(testResource), unhealthy(testResource)))
	b, of := w.breaker(), offer{"node-1", testResource}
	open := func() {
		t.Helper()
		for range breakerPods {
			w.rejects(b, "ns", "pod-a")
		}
		if !b.open(of) || b.open(offer{"node-1", "nvidia.com/mig-1g.10gb"}) || b.open(offer{"node-2", testResource}) {
			t.Fatal("it is not open for this alone")
		}
	}
	open()
	b.close(of)
	if b.open(of) {
		t.Error("open though it was closed")
	}
	open()
	b.forget("node-2")
	if !b.open(of) {
		t.Error("closed by the end of another node")
	}
	b.forget("node-1")
	if len(b.offers) != 0 {
		t.Errorf("remembers %v", b.offers)
	}
	w.rejects(b, "ns", "pod-a")
	w.clock = w.clock.Add(3 * time.Second)
	b.count(offer{"node-2", testResource}, "ns", v1alpha1.GPUNodeStatus{})
	if b.offers[of] != nil {
		t.Error("remembers a pod of long ago")
	}
	// Of which it hears late.
	late := newPod("late", asking(testResource), unhealthy(testResource))
	late.Status.StartTime = &metav1.Time{Time: w.clock.Add(-2 * time.Minute)}
	if err := w.client.Create(t.Context(), late); err != nil {
		t.Fatal(err)
	}
	for range breakerPods {
		w.rejects(b, "ns", "pod-late")
	}
	if b.open(of) {
		t.Error("opened by pods that failed long ago")
	}
}

// A node that is left to kubelet stays so, whatever has opened meanwhile.
func TestBreakerOfANodeLeftAlone(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{}, gpuNode(), coreNode("8", "8"), newPod("a", asking(testResource), unhealthy(testResource)), newClaim("a", "gpu-0"))
	r := w.allocatable()
	foreign := func() {
		node := &corev1.Node{}
		w.get("", "node-1", node)
		node.Status.Allocatable[testResource] = resource.MustParse("8")
		if err := w.client.Status().Update(t.Context(), node); err != nil {
			t.Fatal(err)
		}
	}
	for range overrules + 2 {
		foreign()
		w.twice(r, "node-1")
	}
	if got := w.offers(); got != "8" {
		t.Fatalf("%s are offered: not left alone", got)
	}
	for range breakerPods {
		w.rejects(r.breaker, "ns", "pod-a")
	}
	w.twice(r, "node-1")
	if got := w.offers(); got != "8" || r.breaker.open(offer{"node-1", testResource}) {
		t.Errorf("%s are offered", got)
	}
}

// Only pods that were bound with limits of ours are looked at, when they leave.
func TestBreakerLooksAtFew(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{})
	b := w.breaker()
	left := leftPending(b.of)
	bound := newPod("a", asking(testResource), byScheduler)
	if left.Create(event.CreateEvent{Object: bound}) || left.Update(event.UpdateEvent{ObjectOld: bound, ObjectNew: bound}) || left.Generic(event.GenericEvent{Object: bound}) {
		t.Error("looks at a pod that waits")
	}
	for want, pods := range map[bool][]*corev1.Pod{
		true: {bound},
		false: {newPod("a"), newPod("a", asking("example.com/nic"), byScheduler), newPod("a", asking(testResource), byScheduler, func(p *corev1.Pod) { p.Spec.NodeName = "" }),
			newPod("a", asking(testResource))},
	} {
		for i, pod := range pods {
			if got := left.Delete(event.DeleteEvent{Object: pod}); got != want {
				t.Errorf("pod %d: %t, want %t", i, got, want)
			}
		}
	}
	// One that is gone altogether has been deleted, which is no failure; and a node that is not ours has no agent.
	w.rejects(b, "ns", "gone")
	if err := w.client.Create(t.Context(), newPod("a", asking(testResource), unhealthy(testResource))); err != nil {
		t.Fatal(err)
	}
	for range breakerPods {
		w.rejects(b, "ns", "pod-a")
	}
	if len(b.offers) > 0 {
		t.Errorf("remembers %v", b.offers)
	}
}
