// SPDX-License-Identifier: Apache-2.0

package facts

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/hack/cluster"
)

// apiServer starts an API server without nodes.
func apiServer(t *testing.T) *rest.Config {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("an API server of one's own needs root")
	}
	dir, err := cluster.OwnedDir(t.Context(), "tandem-facts-", os.Stdout)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	c, err := cluster.New(cluster.Config{
		Dir: filepath.Join(dir, "cluster"), KubernetesVersion: os.Getenv("KUBERNETES"), APIServerOnly: true, Progress: os.Stdout,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
		defer cancel()
		if err := c.Stop(ctx); err != nil {
			t.Error(err)
		}
	})
	if err := c.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	config, err := c.RESTConfig()
	if err != nil {
		t.Fatal(err)
	}
	return config
}

func TestFacts(t *testing.T) {
	config := apiServer(t)
	t.Run("who bound a pod", func(t *testing.T) { whoBoundAPod(t, kubernetes.NewForConfigOrDie(config)) })
	t.Run("lists are bounded", func(t *testing.T) { listsAreBounded(t, dynamic.NewForConfigOrDie(config)) })
}

// whoBoundAPod: of two pods that kubelet rejects, the last Pending version says which of them a scheduler bound, whatever its author
// wrote. The breaker counts no other.
func whoBoundAPod(t *testing.T, client kubernetes.Interface) {
	ctx, no := t.Context(), false
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	_, err := client.CoreV1().ServiceAccounts("default").Create(ctx, account, metav1.CreateOptions{})
	must(err)
	pods := client.CoreV1().Pods("default")
	events, err := pods.Watch(ctx, metav1.ListOptions{FieldSelector: "status.phase=Pending"})
	must(err)
	defer events.Stop()
	for name, node := range map[string]string{"direct": "node-1", "bound": ""} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}}
		pod.Spec = corev1.PodSpec{NodeName: node, AutomountServiceAccountToken: &no, Containers: []corev1.Container{{Name: "c", Image: "i"}}}
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionTrue}} // forged
		_, err := pods.Create(ctx, pod, metav1.CreateOptions{})
		must(err)
	}
	binding := &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "bound"}, Target: corev1.ObjectReference{Kind: "Node", Name: "node-1"}}
	must(pods.Bind(ctx, binding, metav1.CreateOptions{}))
	got := map[string]bool{}
	for _, name := range []string{"direct", "bound"} {
		_, err := pods.Patch(ctx, name, types.MergePatchType, []byte(`{"status":{"phase":"Failed","conditions":[]}}`), metav1.PatchOptions{}, "status")
		must(err)
	}
	for len(got) < 2 {
		select {
		case e := <-events.ResultChan():
			pod, ok := e.Object.(*corev1.Pod)
			if !ok {
				t.Fatalf("%v", e)
			}
			if e.Type == watch.Deleted {
				got[pod.Name] = slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
					return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionTrue
				})
			}
		case <-time.After(time.Minute):
			t.Fatalf("only %v left Pending", got)
		}
	}
	if got["direct"] || !got["bound"] {
		t.Errorf("bound by a scheduler: %v", got)
	}
}

// listsAreBounded: no token makes the controller keep 9,000 conflicts of one node.
func listsAreBounded(t *testing.T, client dynamic.Interface) {
	data, err := os.ReadFile("../../deployments/helm/tandem/files/tandem-gpu.dev_gpunodes.yaml")
	if err != nil {
		t.Fatal(err)
	}
	definition := &unstructured.Unstructured{}
	if err := yaml.Unmarshal(data, &definition.Object); err != nil {
		t.Fatal(err)
	}
	definitions := schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	if _, err := client.Resource(definitions).Create(t.Context(), definition, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	nodes := client.Resource(v1alpha1.Resource)
	node := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": v1alpha1.GroupVersion.String(), "kind": "GPUNode", "metadata": map[string]any{"name": "node-1"},
	}}
	err = wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		_, err := nodes.Create(ctx, node, metav1.CreateOptions{})
		return err == nil, nil // the definition takes a moment to be served
	})
	if err != nil {
		t.Fatal(err)
	}
	for n, refused := range map[int]bool{v1alpha1.MaxConflicts: false, v1alpha1.MaxConflicts + 1: true, 9000: true} {
		var conflicts []any
		for i := range n {
			conflicts = append(conflicts, map[string]any{
				"uid": fmt.Sprint("uid-", i), "namespace": "ns", "name": "a", "devices": []any{"gpu-0"},
				"since": "2026-01-01T00:00:00.000000Z", "pendingEviction": true, "message": "m",
			})
		}
		forged, err := nodes.Get(t.Context(), "node-1", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		forged.Object["status"] = map[string]any{"conflicts": conflicts}
		if _, err := nodes.UpdateStatus(t.Context(), forged, metav1.UpdateOptions{}); apierrors.IsInvalid(err) != refused || !refused && err != nil {
			t.Errorf("%d conflicts: %v", n, err)
		}
	}
}
