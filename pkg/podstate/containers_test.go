// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"reflect"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// uses adds a container that names claims of the pod's spec.
func uses(container string, names ...string) option {
	return func(p *corev1.Pod) { p.Spec.Containers = append(p.Spec.Containers, claimUser(container, names)) }
}

func initUses(container string, policy *corev1.ContainerRestartPolicy, names ...string) option {
	return func(p *corev1.Pod) {
		c := claimUser(container, names)
		c.RestartPolicy = policy
		p.Spec.InitContainers = append(p.Spec.InitContainers, c)
	}
}

func claimUser(container string, names []string) corev1.Container {
	c := corev1.Container{Name: container}
	for _, name := range names {
		c.Resources.Claims = append(c.Resources.Claims, corev1.ResourceClaim{Name: name})
	}
	return c
}

func mapped(containers ...string) option {
	return func(p *corev1.Pod) {
		for _, name := range containers {
			p.Status.ExtendedResourceClaimStatus.RequestMappings = append(p.Status.ExtendedResourceClaimStatus.RequestMappings,
				corev1.ContainerExtendedResourceRequest{ContainerName: name, ResourceName: "nvidia.com/gpu"})
		}
	}
}

func TestContainers(t *testing.T) {
	t.Parallel()
	allocated := func(pod, container string) PodDevice {
		return PodDevice{PodUID: pod, Container: container, Resource: "nvidia.com/gpu", ID: "GPU-a"}
	}
	shared := KubeletClaim{UID: "claim-uid", PodUIDs: []string{podA, podB}}
	tests := []struct {
		name    string
		pods    []*corev1.Pod
		hold    ledger.Hold
		devices []PodDevice
		claims  []KubeletClaim
		want    []PodContainer
	}{
		{"a limit", []*corev1.Pod{pod(podA, "a")}, limit(ledger.StateHeld, 0, podA),
			[]PodDevice{allocated(podA, "main"), allocated(podB, "of an earlier pod"), {PodUID: podA, Container: "other", Resource: "nvidia.com/gpu", ID: "GPU-b"},
				{PodUID: podA, Container: "other", Resource: "nvidia.com/mig-1g.10gb", ID: "GPU-a"}},
			nil, []PodContainer{{"apps", "a", "main"}}},
		{"a limit that kubelet has not written yet", []*corev1.Pod{pod(podA, "a")}, limit(ledger.StateHeld, 0, podA), nil, nil, []PodContainer{{"apps", "a", ""}}},
		{"a limit without a pod", []*corev1.Pod{pod(podA, "a")}, limit(ledger.StateHeld, 0), []PodDevice{allocated(podA, "main")}, nil, nil},
		{"of an init container and, after it, of a sidecar and a container", []*corev1.Pod{pod(podA, "a", asksFirst("1"), asksBeside("1"), asks("1"), named)},
			limit(ledger.StateHeld, 0, podA), []PodDevice{allocated(podA, "init-0"), allocated(podA, "init-1"), allocated(podA, "main-0")}, nil,
			[]PodContainer{{"apps", "a", "init-1"}, {"apps", "a", "main-0"}}},
		{"a pod that the API server does not have", nil, limit(ledger.StateHeld, 0, podA), []PodDevice{allocated(podA, "main")}, nil, nil},
		{"a terminal pod", []*corev1.Pod{pod(podA, "a", phase(corev1.PodSucceeded))}, limit(ledger.StateHeld, 0, podA), []PodDevice{allocated(podA, "main")}, nil, nil},
		{"a pod that is being deleted", []*corev1.Pod{pod(podA, "a", beingDeleted)}, limit(ledger.StateHeld, 0, podA), []PodDevice{allocated(podA, "main")}, nil,
			[]PodContainer{{"apps", "a", "main"}}},
		{"a claim, by two of three containers", []*corev1.Pod{pod(podA, "a", names("one"), uses("x", "gpu"), uses("w", "gpu", "else"), uses("y", "else"))},
			claim(ledger.StateHeld, podA), nil, nil, []PodContainer{{"apps", "a", "w"}, {"apps", "a", "x"}}},
		{"a claim from a template, by a sidecar", []*corev1.Pod{pod(podA, "a", fromTemplate("one"), initUses("first", nil, "gpu"), initUses("sidecar", &keeps, "gpu"))},
			claim(ledger.StateHeld, podA), nil, nil, []PodContainer{{"apps", "a", "sidecar"}}},
		{"a claim, by an init container only", []*corev1.Pod{pod(podA, "a", names("one"), initUses("first", nil, "gpu"))},
			claim(ledger.StateHeld, podA), nil, nil, []PodContainer{{"apps", "a", ""}}},
		{"a claim for extended resources", []*corev1.Pod{pod(podA, "a", extended("one"), mapped("main"))},
			claim(ledger.StateHeld, podA), nil, nil, []PodContainer{{"apps", "a", "main"}}},
		{"a claim that a second pod shares", []*corev1.Pod{pod(podA, "a", names("one"), uses("x", "gpu")), pod(podB, "b", names("one"), uses("y", "gpu"))},
			claim(ledger.StateHeld, podA), nil, []KubeletClaim{shared}, []PodContainer{{"apps", "a", "x"}, {"apps", "b", "y"}}},
		{"a pod that waits for the claim", []*corev1.Pod{pod(podA, "a", names("one"), uses("x", "gpu")), pod(podB, "b", names("one"), uses("y", "gpu"))},
			claim(ledger.StateHeld, podA, podB), nil, []KubeletClaim{{UID: "claim-uid", PodUIDs: []string{podA}}}, []PodContainer{{"apps", "a", "x"}}},
		{"a claim of which only the UID is known", []*corev1.Pod{pod(podA, "a", names("one"), uses("x", "gpu"))},
			ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: "claim-uid"}}, nil, []KubeletClaim{{UID: "claim-uid", PodUIDs: []string{podA}}},
			[]PodContainer{{"apps", "a", ""}}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			got := known(t, newTree(t), test.pods...).Containers(test.hold, DeviceCheckpoint{Devices: test.devices}, test.claims)
			if !slices.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestContainersOfADeletedPod(t *testing.T) {
	t.Parallel()
	a := pod(podA, "a", names("one"), uses("x", "gpu"))
	p := known(t, newTree(t), a)
	p.forget(a)
	if got := p.Containers(claim(ledger.StateHeld, podA), DeviceCheckpoint{}, nil); got != nil {
		t.Errorf("got %v", got)
	}
}

// The informer may trim a pod again.
func TestTrimKeepsClaimUsers(t *testing.T) {
	t.Parallel()
	both := func(p *corev1.Pod) { p.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}} }
	once := trimmed(pod(podA, "a", names("one"), asksFirst("1"), initUses("sidecar", &keeps, "gpu"), asks("1"), both, named))
	if twice := trimmed(once); !reflect.DeepEqual(once, twice) {
		t.Errorf("trimmed again: %+v, before: %+v", twice.Spec, once.Spec)
	}
	if got, want := claimants(once, "one"), []string{"init-1", "main-0"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
