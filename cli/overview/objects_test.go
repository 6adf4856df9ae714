// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"
)

// waitingPods are pods with a claim of a template of their own each, and the templates.
func waitingPods(n int) (pods []*corev1.Pod, objects []runtime.Object) {
	for i := range n {
		name := fmt.Sprint("t", i)
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: name}}
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: ptr.To(name)}}
		pods = append(pods, pod)
		objects = append(objects, &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: name}})
	}
	return pods, objects
}

// TestObjectsOfACancelledRequest: what one viewer no longer waits for is neither kept nor counted for the others, who do not wait for it.
func TestObjectsOfACancelledRequest(t *testing.T) {
	pods, objects := waitingPods(mostObjects)
	client := fake.NewClientset(append(objects, &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "gpu"}})...)
	o := NewObjects(Cluster{Client: client})
	ctx, cancel := context.WithCancel(t.Context())
	at := "list deviceclasses"
	client.PrependReactor("*", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if !o.mu.TryLock() {
			t.Errorf("%s %s blocks other viewers", action.GetVerb(), action.GetResource().Resource)
		} else {
			o.mu.Unlock()
		}
		if action.GetVerb()+" "+action.GetResource().Resource == at {
			cancel()
		}
		return ctx.Err() != nil, nil, ctx.Err()
	})
	for _, next := range []string{"get resourceclaimtemplates", ""} {
		if got := o.Of(ctx, pods); len(got.Templates) > 0 {
			t.Errorf("%d templates by cancelled requests", len(got.Templates))
		}
		ctx, cancel = context.WithCancel(t.Context())
		at = next
	}
	if got := o.Of(ctx, pods); len(got.Classes) != 1 || len(got.Templates) != mostObjects {
		t.Errorf("after two cancelled requests: %d classes, %d templates", len(got.Classes), len(got.Templates))
	}
	n := len(client.Actions())
	if o.Of(ctx, pods); len(client.Actions()) != n {
		t.Errorf("%d requests for what is known", len(client.Actions())-n)
	}
	cancel()
}

// TestObjectsOfADeletedTemplate: the claim that was made of a template says what the pod requests. Claims are not read while the template
// exists, because each pod has its own.
func TestObjectsOfADeletedTemplate(t *testing.T) {
	pods, objects := waitingPods(2)
	for _, pod := range pods {
		pod.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: ptr.To("claim-of-" + pod.Name)}}
		objects = append(objects, &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: "claim-of-" + pod.Name}})
	}
	got := NewObjects(Cluster{Client: fake.NewClientset(objects[1:]...)}).Of(t.Context(), pods)
	if len(got.Claims) != 1 || got.Claims[types.NamespacedName{Namespace: "ml", Name: "claim-of-t0"}] == nil || len(got.Templates) != 2 {
		t.Errorf("%+v", got)
	}
}

// TestObjectsInTurn: a tenant with many claims leaves requests for the others.
func TestObjectsInTurn(t *testing.T) {
	pods, objects := waitingPods(2 * mostObjects)
	late := pods[0].DeepCopy()
	late.Namespace = "other"
	client := fake.NewClientset(append(objects, &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: late.Name}})...)
	got := NewObjects(Cluster{Client: client}).Of(t.Context(), append(pods, late))
	if len(got.Templates) != mostObjects || got.Templates[types.NamespacedName{Namespace: "other", Name: late.Name}] == nil {
		t.Errorf("%d templates, without that of the other namespace", len(got.Templates))
	}
}

// TestObjectsAtTheSameTime: requests do not wait for each other.
func TestObjectsAtTheSameTime(t *testing.T) {
	pods, _ := waitingPods(requestsAtOnce)
	all := make(chan struct{})
	var mu sync.Mutex
	asked := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "resourceclaimtemplates") {
			mu.Lock()
			if asked++; asked == requestsAtOnce {
				close(all)
			}
			mu.Unlock()
			select {
			case <-all:
			case <-r.Context().Done():
			}
		}
		http.NotFound(w, r)
	}))
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL, QPS: -1})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if got := NewObjects(Cluster{Client: client}).Of(ctx, pods); len(got.Templates) != requestsAtOnce {
		t.Errorf("%d of %d requests were answered", len(got.Templates), requestsAtOnce)
	}
}
