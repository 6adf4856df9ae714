// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"context"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
)

func TestNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		client := fake.NewClientset()
		node := func(uid, mode string) *corev1.Node {
			return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: types.UID(uid), Labels: map[string]string{"mode": mode}}}
		}
		n := NewNode(client, "node-1")
		done := make(chan error, 1)
		go func() { done <- n.Run(ctx) }()
		synctest.Wait()
		if n.UID() != "" {
			t.Errorf("before the node is registered: UID %q", n.UID())
		}
		nodes := client.CoreV1().Nodes()
		for _, step := range []struct {
			name      string
			do        func() error
			uid, mode string
			changed   bool
		}{
			{"registered", func() error { _, err := nodes.Create(ctx, node("1", "a"), metav1.CreateOptions{}); return err }, "1", "a", true},
			{"nothing new", func() error {
				same := node("1", "a")
				same.Status.Phase, same.ResourceVersion = corev1.NodeRunning, "7"
				_, err := nodes.Update(ctx, same, metav1.UpdateOptions{})
				return err
			}, "1", "a", false},
			{"labelled", func() error { _, err := nodes.Update(ctx, node("1", "b"), metav1.UpdateOptions{}); return err }, "1", "b", true},
			{"its runtime is known", func() error {
				known := node("1", "b")
				known.Status.NodeInfo.ContainerRuntimeVersion = "containerd://2.1.4"
				_, err := nodes.Update(ctx, known, metav1.UpdateOptions{})
				return err
			}, "1", "b", true},
			{"deleted", func() error { return nodes.Delete(ctx, "node-1", metav1.DeleteOptions{}) }, "", "", true},
			{"registered again", func() error { _, err := nodes.Create(ctx, node("2", "b"), metav1.CreateOptions{}); return err }, "2", "b", true},
		} {
			changed := n.Changed()
			if err := step.do(); err != nil {
				t.Fatalf("%s: %v", step.name, err)
			}
			synctest.Wait()
			announced := false
			select {
			case <-changed:
				announced = true
			default:
			}
			if mode, _ := n.Label("mode"); string(n.UID()) != step.uid || mode != step.mode || announced != step.changed {
				t.Errorf("%s: UID %q, label %q, announced %t; want %q, %q, %t", step.name, n.UID(), mode, announced, step.uid, step.mode, step.changed)
			}
		}
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
