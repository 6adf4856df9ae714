// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// TestBackAfterALongAbsence: the scheduler binds pods to the node within seconds of the API server's return.
func TestBackAfterALongAbsence(t *testing.T) {
	f := newTree(t)
	cgroups := f.fresh()
	for range 5 { // the intervals are random
		synctest.Test(t, func(t *testing.T) {
			client := fake.NewClientset(pod(podA, "a"), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "n"}})
			back := time.Now().Add(10 * time.Minute)
			client.PrependReactor("*", "*", func(clienttesting.Action) (bool, runtime.Object, error) {
				return time.Now().Before(back), nil, errors.New("connection refused")
			})
			p, err := NewPods(client, "node-1", cgroups, "/nowhere")
			must(t, err)
			node := NewNode(client, "node-1")
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 2)
			go func() { done <- p.Run(ctx) }()
			go func() { done <- node.Run(ctx) }()
			time.Sleep(time.Until(back) - time.Second)
			if p.Synced() || node.UID() != "" {
				t.Error("known without an API server")
			}
			time.Sleep(time.Second + 2*askInterval + 100*time.Millisecond)
			synctest.Wait()
			if !p.Known(podA) || !p.Synced() || node.UID() != "n" {
				t.Errorf("known are the pod: %t, all pods: %t, the node: %q", p.Known(podA), p.Synced(), node.UID())
			}
			cancel()
			must(t, <-done)
			must(t, <-done)
		})
	}
}

func TestUnwantedSince(t *testing.T) {
	f := newTree(t)
	p, err := NewPods(fake.NewClientset(), "node-1", f.fresh(), t.TempDir())
	must(t, err)
	ends := time.Now().Add(time.Minute).Truncate(time.Second)
	terminating := pod(podB, "b")
	terminating.DeletionTimestamp = &metav1.Time{Time: ends}
	p.Observe(nil, pod(podA, "a"))
	p.Observe(nil, terminating)
	if got := p.UnwantedSince("unknown"); !got.IsZero() {
		t.Errorf("before the first list: %s", got)
	}
	listed := time.Now()
	p.Listed(listed)
	for uid, want := range map[string]time.Time{podA: {}, podB: ends, "unknown": listed} {
		if got := p.UnwantedSince(uid); !got.Equal(want) {
			t.Errorf("%s: %s, want %s", uid, got, want)
		}
	}
	p.Observe(pod(podA, "a"), nil)
	if got := p.UnwantedSince(podA); got.Before(listed) {
		t.Errorf("deleted: %s", got)
	}
}
