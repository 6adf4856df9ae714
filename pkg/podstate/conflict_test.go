// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/internal/owner"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

func ownedBy(kind string, controller bool) option {
	versions := map[string]string{"ReplicaSet": "apps/v1", "Workflow": "argoproj.io/v1alpha1"}
	return func(p *corev1.Pod) {
		p.OwnerReferences = append(p.OwnerReferences, metav1.OwnerReference{APIVersion: versions[kind], Kind: kind, Name: "owner", UID: "owner", Controller: &controller})
	}
}

func safeToEvict(p *corev1.Pod) {
	metav1.SetMetaDataAnnotation(&p.ObjectMeta, owner.SafeToEvict, "true")
}

func requestFor(uids ...string) ledger.ClaimRequest {
	h := claim(ledger.StateHeld, uids...)
	return ledger.ClaimRequest{UID: h.Holder.ID, Namespace: h.Namespace, Name: h.Name, Pods: h.Pods}
}

func TestMovable(t *testing.T) {
	replica := ownedBy("ReplicaSet", true)
	tests := []struct {
		name    string
		pods    []*corev1.Pod
		deleted *corev1.Pod
		want    bool
	}{
		{"a replica", []*corev1.Pod{pod(podA, "a", pending, replica)}, nil, true},
		{"a bare pod", []*corev1.Pod{pod(podA, "a", pending)}, nil, false},
		{"an owner that is not its controller", []*corev1.Pod{pod(podA, "a", pending, ownedBy("ReplicaSet", false))}, nil, false},
		{"a step of a workflow", []*corev1.Pod{pod(podA, "a", pending, ownedBy("Workflow", true))}, nil, false},
		{"a step that is safe to evict", []*corev1.Pod{pod(podA, "a", pending, ownedBy("Workflow", true), safeToEvict)}, nil, true},
		{"a bare pod that says it is safe", []*corev1.Pod{pod(podA, "a", pending, safeToEvict)}, nil, false},
		{"shared with a step", []*corev1.Pod{pod(podA, "a", pending, replica), pod(podB, "b", pending, ownedBy("Workflow", true), names("one"))}, nil, false},
		{"a static pod", []*corev1.Pod{pod(podA, "a", pending, ownedBy("Node", true), mirrorOf(podA))}, nil, false},
		{"has started a container", []*corev1.Pod{pod(podA, "a", replica, ranOnce)}, nil, false},
		{"shared with a replica", []*corev1.Pod{pod(podA, "a", pending, replica), pod(podB, "b", pending, replica, names("one"))}, nil, true},
		{"shared with a bare pod", []*corev1.Pod{pod(podA, "a", pending, replica), pod(podB, "b", pending, names("one"))}, nil, false},
		{"shared with one that runs", []*corev1.Pod{pod(podA, "a", pending, replica), pod(podB, "b", replica, names("one"), ranOnce)}, nil, false},
		{"shared with one that goes", []*corev1.Pod{pod(podA, "a", pending, replica), pod(podB, "b", names("one"), beingDeleted)}, nil, true},
		{"is going itself", []*corev1.Pod{pod(podA, "a", pending, replica, beingDeleted)}, nil, false},
		{"is over", []*corev1.Pod{pod(podA, "a", replica, phase(corev1.PodFailed))}, nil, false},
		{"is gone", nil, pod(podA, "a", replica), false},
		{"is nowhere", nil, nil, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := known(t, newTree(t), test.pods...)
				if test.deleted != nil {
					p.add(t, test.deleted)
					p.forget(test.deleted)
				}
				if got := p.Movable(t.Context(), requestFor(podA)); got != test.want {
					t.Errorf("got %v, want %v", got, test.want)
				}
			})
		})
	}
}

// Kubelet hears of a pod before we do.
func TestMovableWaitsForThePod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := known(t, newTree(t))
		start := time.Now()
		answer := make(chan bool)
		ask := func() { answer <- p.Movable(t.Context(), requestFor(podA)) }
		go ask()
		if <-answer || time.Since(start) != time.Second {
			t.Errorf("gave up after %v", time.Since(start))
		}
		go ask()
		synctest.Wait()
		p.add(t, pod(podA, "a", pending, ownedBy("ReplicaSet", true)))
		if !<-answer || time.Since(start) != time.Second {
			t.Errorf("after %v", time.Since(start))
		}
	})
}

func TestEnded(t *testing.T) {
	lost := ledger.Conflict{UID: "claim-uid", Namespace: "apps", Name: "one", Pods: []ledger.Pod{{UID: podA}}, Since: time.Now()}
	tests := []struct {
		name    string
		pods    []*corev1.Pod
		deleted *corev1.Pod
		want    bool
	}{
		{"waits", []*corev1.Pod{pod(podA, "a", pending)}, nil, false},
		{"is being deleted", []*corev1.Pod{pod(podA, "a", pending, beingDeleted)}, nil, false},
		{"is over", []*corev1.Pod{pod(podA, "a", phase(corev1.PodFailed))}, nil, true},
		{"is gone", nil, pod(podA, "a", names("one")), true},
		{"was never seen", nil, nil, false},
		{"was forgotten long ago", nil, nil, true},
		{"is gone, another names the claim", []*corev1.Pod{pod(podB, "b", pending, names("one"))}, pod(podA, "a"), false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			p := known(t, newTree(t), test.pods...)
			if test.deleted != nil {
				p.add(t, test.deleted)
				p.forget(test.deleted)
			}
			lost := lost
			if test.name == "was forgotten long ago" {
				lost.Since = time.Now().Add(-time.Hour)
			}
			if got := p.Ended(lost); got != test.want {
				t.Errorf("got %v, want %v", got, test.want)
			}
			p.synced = time.Time{}
			if p.Ended(lost) {
				t.Error("before the first list")
			}
		})
	}
}
