// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/pkg/ledger"
)

func pending(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }

func container(gpus string) corev1.Container {
	requests := corev1.ResourceList{"cpu": resource.MustParse("1"), "example.com/nic": resource.MustParse("3")}
	if gpus != "" {
		requests["nvidia.com/gpu"] = resource.MustParse(gpus)
	}
	return corev1.Container{Resources: corev1.ResourceRequirements{Requests: requests, Limits: requests}}
}

func asks(gpus ...string) option {
	return func(p *corev1.Pod) {
		for _, n := range gpus {
			p.Spec.Containers = append(p.Spec.Containers, container(n))
		}
	}
}

// asksFirst is an init container, which leaves its devices to what comes after it.
func asksFirst(gpus string) option {
	return func(p *corev1.Pod) { p.Spec.InitContainers = append(p.Spec.InitContainers, container(gpus)) }
}

// asksBeside is a sidecar, which keeps them.
func asksBeside(gpus string) option {
	return func(p *corev1.Pod) {
		always := corev1.ContainerRestartPolicyAlways
		sidecar := container(gpus)
		sidecar.RestartPolicy = &always
		p.Spec.InitContainers = append(p.Spec.InitContainers, sidecar)
	}
}

// ours are the resources that count.
func ours(resource string) bool { return strings.HasPrefix(resource, "nvidia.com/") }

// asksPart is a container that asks for a partition.
func asksPart(p *corev1.Pod) {
	part := corev1.ResourceList{"nvidia.com/mig-1g.10gb": resource.MustParse("1")}
	p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Resources: corev1.ResourceRequirements{Requests: part, Limits: part}})
}

func admitted(p *corev1.Pod) { now := metav1.Now(); p.Status.StartTime = &now }

func specialClaim(resource string) option {
	return func(p *corev1.Pod) {
		p.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{
			ResourceClaimName: "special", RequestMappings: []corev1.ContainerExtendedResourceRequest{{ResourceName: resource}},
		}
	}
}

func TestBound(t *testing.T) {
	tests := []struct {
		name string
		pod  *corev1.Pod
		want int
	}{
		{"asks for one", pod(podA, "a", pending, asks("1")), 1},
		{"several containers", pod(podA, "a", pending, asks("1", "", "2")), 3},
		{"an init container that needs more", pod(podA, "a", pending, asks("1"), asksFirst("2")), 2},
		{"a sidecar", pod(podA, "a", pending, asksBeside("1"), asks("1")), 2},
		{"asks for none", pod(podA, "a", pending, asks("", "0")), 0},
		{"has no containers that ask", pod(podA, "a", pending), 0},
		{"admitted", pod(podA, "a", pending, asks("1"), admitted), 0},
		{"rejected", pod(podA, "a", asks("1"), phase(corev1.PodFailed)), 0},
		{"being deleted", pod(podA, "a", pending, asks("1"), beingDeleted), 0},
		{"served by a claim of the scheduler's", pod(podA, "a", pending, asks("1"), specialClaim("nvidia.com/gpu")), 0},
		{"another resource is served by a claim", pod(podA, "a", pending, asks("1"), specialClaim("example.com/nic")), 1},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var want []ledger.PendingPods
			if test.want > 0 {
				want = []ledger.PendingPods{{PodUID: podA, Resource: "nvidia.com/gpu", Devices: test.want}}
			}
			if got := known(t, newTree(t), test.pod).Queue(ours).PendingPods(); !slices.Equal(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
		})
	}
}

func TestBoundByResource(t *testing.T) {
	got := known(t, newTree(t), pod(podA, "a", pending, asks("2"), asksPart, asksPart)).Queue(ours).PendingPods()
	slices.SortFunc(got, func(a, b ledger.PendingPods) int { return strings.Compare(a.Resource, b.Resource) })
	want := []ledger.PendingPods{{PodUID: podA, Resource: "nvidia.com/gpu", Devices: 2}, {PodUID: podA, Resource: "nvidia.com/mig-1g.10gb", Devices: 2}}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// Pods come in the order in which they were bound: who has met the claim's has met those before it.
func TestMeet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := known(t, newTree(t))
		met := make(chan int)
		go func() {
			p.WaitForPods(t.Context(), requestFor(podA))
			met <- len(p.Queue(ours).PendingPods())
		}()
		synctest.Wait()
		p.add(t, pod(podB, "b", pending, asks("1")))
		synctest.Wait()
		select {
		case <-met:
			t.Fatal("returned before the watch reported a pod of the claim")
		default:
		}
		p.add(t, pod(podA, "a", pending))
		if bound := <-met; bound != 1 {
			t.Errorf("%d pods are bound", bound)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		p.WaitForPods(ctx, requestFor("unknown"))
		if waited := time.Since(start); waited != time.Second {
			t.Errorf("gave up after %s", waited)
		}
		p.WaitForPods(ctx, ledger.ClaimRequest{})
	})
}

func TestUnexplained(t *testing.T) {
	for name, test := range map[string]struct {
		pod   *corev1.Pod
		group int
		holds []ledger.Hold
		want  bool
	}{
		"it runs, and nothing names it":       {pod(podA, "a", asks("1"), admitted), busyGroup, nil, true},
		"it has what it asks for":             {pod(podA, "a", asks("1"), admitted), busyGroup, []ledger.Hold{limit(ledger.StateHeld, 0, podA)}, false},
		"it has less":                         {pod(podA, "a", asks("2"), admitted), busyGroup, []ledger.Hold{limit(ledger.StateHeld, 0, podA)}, true},
		"it has it by another resource":       {pod(podA, "a", asksPart, admitted), busyGroup, []ledger.Hold{limit(ledger.StateHeld, 0, podA)}, true},
		"it has not been admitted":            {pod(podA, "a", asks("1")), busyGroup, nil, false},
		"it has left nothing":                 {pod(podA, "a", asks("1"), admitted), noGroup, nil, false},
		"it asks for nothing":                 {pod(podA, "a", admitted), busyGroup, nil, false},
		"the scheduler has made it a claim":   {pod(podA, "a", asks("1"), admitted, specialClaim("nvidia.com/gpu")), busyGroup, nil, false},
		"its hold names another pod":          {pod(podA, "a", asks("1"), admitted), busyGroup, []ledger.Hold{limit(ledger.StateHeld, 0, podB)}, true},
		"its hold names an earlier pod first": {pod(podA, "a", asks("1"), admitted), busyGroup, []ledger.Hold{limit(ledger.StateHeld, 0, podB, podA)}, false},
		"what names it is a claim, no limit":  {pod(podA, "a", asks("1"), admitted), busyGroup, []ledger.Hold{claim(ledger.StateHeld, podA)}, true},
	} {
		f := newTree(t)
		f.v2("kubepods/burstable/podanchor", true)
		f.group(podA, test.group)
		if got := known(t, f, test.pod).Unexplained(ours, test.holds); got != test.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
