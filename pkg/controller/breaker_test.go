// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

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
func failing(reason string) func(*corev1.Pod) {
	return func(pod *corev1.Pod) { pod.Status.Phase, pod.Status.Reason = corev1.PodFailed, reason }
}

func TestTurnedAway(t *testing.T) {
	const small = corev1.ResourceName("nvidia.com/mig-1g.10gb")
	limits := device.Resources{GPU: testResource, Strategy: device.MIGStrategyMixed}
	for name, c := range map[string]struct {
		pod  []func(*corev1.Pod)
		want []corev1.ResourceName
	}{
		"Allocate failed":            {pod: []func(*corev1.Pod){asking(testResource), failing("UnexpectedAdmissionError")}, want: []corev1.ResourceName{testResource}},
		"for one of two, or both":    {pod: []func(*corev1.Pod){asking(testResource, small, small), failing("UnexpectedAdmissionError")}, want: []corev1.ResourceName{testResource, small}},
		"kubelet has none":           {pod: []func(*corev1.Pod){asking(testResource, small), failing("OutOfnvidia.com/gpu")}, want: []corev1.ResourceName{testResource}},
		"kubelet has no CPU":         {pod: []func(*corev1.Pod){asking(testResource), failing("OutOfcpu")}},
		"a resource of others":       {pod: []func(*corev1.Pod){asking("example.com/nic"), failing("UnexpectedAdmissionError")}},
		"admitted, and ended badly":  {pod: []func(*corev1.Pod){asking(testResource), failing("Error")}},
		"admitted, and runs":         {pod: []func(*corev1.Pod){asking(testResource), func(p *corev1.Pod) { p.Status.Phase = corev1.PodRunning }}},
		"asks for nothing":           {pod: []func(*corev1.Pod){failing("UnexpectedAdmissionError")}},
		"in an init container first": {pod: []func(*corev1.Pod){asking(testResource), func(p *corev1.Pod) { p.Spec.InitContainers, p.Spec.Containers = p.Spec.Containers, nil }, failing("UnexpectedAdmissionError")}, want: []corev1.ResourceName{testResource}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := TurnedAway(newPod("a", c.pod...), limits); !slices.Equal(got, c.want) {
				t.Errorf("%v, want %v", got, c.want)
			}
		})
	}
}

// breaker is one whose openings nobody waits for.
func (w *world) breaker() *breaker {
	b := newBreaker(w.client, device.Resources{GPU: testResource}, w.metrics, w.now)
	go func() {
		for {
			select {
			case <-b.opened:
			case <-w.t.Context().Done():
				return
			}
		}
	}()
	return b
}

// A node that turns away one pod after the other is offered none, until its agent has something else to say, or kubelet.
func TestBreaker(t *testing.T) {
	const pods = 6
	type step struct {
		ms      int
		pods    []int                         // turned away
		agent   func(*v1alpha1.GPUNodeStatus) // says something else
		kubelet string                        // puts this number into the node
		want    string
	}
	frees := func(s *v1alpha1.GPUNodeStatus) { s.Devices[1].Holders = nil }
	opened := step{pods: []int{0, 1, 2}, want: "0"}
	for name, steps := range map[string][]step{
		"a race":                            {{pods: []int{0, 1}, want: "8"}},
		"one after the other":               {{pods: []int{0}, want: "8"}, {ms: 1000, pods: []int{1}, want: "8"}, {ms: 2000, pods: []int{2}, want: "0"}},
		"races, one now and then":           {{pods: []int{0}, want: "8"}, {ms: 1500, pods: []int{1}, want: "8"}, {ms: 3000, pods: []int{2}, want: "8"}},
		"nobody says anything":              {opened, {ms: 60_000, want: "0"}},
		"the agent frees a GPU":             {opened, {ms: 500, agent: frees, want: "0"}, {ms: 2000, want: "8"}},
		"kubelet has devices":               {opened, {ms: 9000, kubelet: "7", want: "7"}, {ms: 11_000, want: "8"}},
		"kubelet has none":                  {opened, {ms: 9000, kubelet: "0", want: "0"}, {ms: 60_000, want: "0"}},
		"kubelet knew it before":            {{kubelet: "0", want: "0"}, {pods: []int{0, 1, 2}, want: "0"}, {ms: 60_000, want: "0"}},
		"kubelet has devices, and is wrong": {opened, {ms: 9000, kubelet: "8", want: "8"}, {ms: 9100, pods: []int{3, 4}, want: "8"}, {ms: 9200, pods: []int{5}, want: "0"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, interceptor.Funcs{}, gpuNode(func(s *v1alpha1.GPUNodeStatus) {
				s.Devices[1].Holders = []v1alpha1.DeviceHolder{{Kind: v1alpha1.HolderLimit}}
			}), coreNode("8", "8"))
			for i := range pods {
				if err := w.client.Create(t.Context(), newPod(fmt.Sprint(i), asking(testResource), failing("UnexpectedAdmissionError"))); err != nil {
					t.Fatal(err)
				}
			}
			r, began := w.allocatable(), w.clock
			w.twice(r, "node-1")
			for i, s := range steps {
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
				for _, pod := range s.pods {
					w.once(r.breaker, types.NamespacedName{Namespace: "ns", Name: fmt.Sprint("pod-", pod)})
				}
				w.twice(r, "node-1")
				if got := w.offers(); got != s.want {
					t.Errorf("step %d: %s are offered, want %s", i, got, s.want)
				}
			}
		})
	}
}

// Only pods that were bound with limits of ours are looked at when they leave.
func TestBreakerLooksAtFew(t *testing.T) {
	w := newWorld(t, interceptor.Funcs{})
	b := w.breaker()
	for want, pods := range map[bool][]*corev1.Pod{
		true:  {newPod("a", asking(testResource))},
		false: {newPod("a"), newPod("a", asking("example.com/nic")), newPod("a", asking(testResource), func(p *corev1.Pod) { p.Spec.NodeName = "" })},
	} {
		for i, pod := range pods {
			if got := b.of(pod); got != want {
				t.Errorf("pod %d: %t, want %t", i, got, want)
			}
		}
	}
	// One that is gone altogether has been deleted, which is no failure.
	w.once(b, types.NamespacedName{Namespace: "ns", Name: "gone"})
}
