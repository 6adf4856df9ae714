// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// secretive is a node with a name of another namespace in every field that has names.
func secretive() v1alpha1.GPUNode {
	pods := []v1alpha1.PodReference{{UID: "u-pod", Namespace: "secret", Name: "secret-pod"}}
	held := v1alpha1.DeviceHolder{
		Kind: v1alpha1.HolderClaim, State: v1alpha1.HoldDraining, UID: "u", Namespace: "secret", Name: "secret-claim", Pods: pods,
		WaitsFor: "process 1 of pod secret/secret-pod", Shared: true, Memory: 1 << 30,
	}
	ours := v1alpha1.DeviceHolder{Kind: v1alpha1.HolderPod, State: v1alpha1.HoldHeld, UID: "o", Pods: []v1alpha1.PodReference{{UID: "o", Namespace: "ml", Name: "ours"}}}
	return v1alpha1.GPUNode{
		Spec: v1alpha1.GPUNodeSpec{Claims: []v1alpha1.AllocatedClaim{{UID: "a", Namespace: "secret", Name: "secret-late", Devices: []string{"gpu-1"}}}},
		Status: v1alpha1.GPUNodeStatus{
			Devices: []v1alpha1.DeviceStatus{{Name: "gpu-0", Holders: []v1alpha1.DeviceHolder{held, ours}, Sharing: &v1alpha1.DeviceSharing{Memory: 1 << 31}}, {Name: "gpu-1"}},
			Conflicts: []v1alpha1.ConflictingClaim{{UID: "c", Namespace: "secret", Name: "secret-conflict", Devices: []string{"gpu-0"},
				Message: "held by secret/secret-pod"}},
		},
	}
}

// TestNaming: no form of a node has a name of a namespace that may not be named, and the original keeps its names.
func TestNaming(t *testing.T) {
	whole := NodeOf(secretive())
	if got := whole.Namespaces(); !slices.Equal(got, []string{"ml", "secret"}) {
		t.Errorf("namespaces %q", got)
	}
	forms := func(n Node) string {
		data, err := json.Marshal(n)
		if err != nil {
			t.Fatal(err)
		}
		s := Style{UTF8: true}
		return string(data) + s.Table(New([]Node{n}), View{Wide: true}) + s.Draw(PictureOf(n, nil, ""))
	}
	before := forms(whole)
	got := forms(whole.Naming(func(namespace string) bool { return namespace == "ml" }))
	if strings.Contains(got, "secret") || !strings.Contains(got, "ml/ours (limits)") {
		t.Error(got)
	}
	for _, words := range []string{"another namespace (claim), waits for the last process of a pod of another namespace", "1024 MiB", "a claim of another namespace, not prepared yet", "Conflict: a claim of another namespace, gpu-0"} {
		if !strings.Contains(got, words) {
			t.Errorf("no %q in\n%s", words, got)
		}
	}
	if after := forms(whole); after != before {
		t.Errorf("the original has changed:\n%s\n%s", before, after)
	}
}

// TestRights: all namespaces are asked for first, each question is asked once a minute, their number is bounded, and an error is no right.
func TestRights(t *testing.T) {
	var asked []string
	var failure error
	allowed := map[string]bool{"a": true, "own": true}
	client := fake.NewClientset()
	client.PrependReactor("create", "selfsubjectaccessreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		review := action.(clienttesting.CreateAction).GetObject().(*authorizationv1.SelfSubjectAccessReview)
		asked = append(asked, review.Spec.ResourceAttributes.Namespace)
		review.Status.Allowed = allowed[review.Spec.ResourceAttributes.Namespace]
		return true, review, failure
	})
	synctest.Test(t, func(t *testing.T) {
		r := NewRights(Cluster{Client: client}, "own")
		ctx := t.Context()
		for range 2 {
			if may := r.MayName(ctx, []string{"a", "b", ""}); !may("a") || may("b") || may("") || may("not asked") {
				t.Errorf("a %t, b %t", may("a"), may("b"))
			}
		}
		if !slices.Equal(asked, []string{"", "a", "b"}) {
			t.Errorf("asked for %q", asked)
		}
		var many []string
		for i := range 128 {
			many = append(many, fmt.Sprint("n", i))
			allowed[many[i]] = true
		}
		may := r.MayName(ctx, append(many, "own"))
		if !may("n0") || may(many[len(many)-1]) || !may("own") || len(asked) != 66 {
			t.Errorf("%d questions, own %t", len(asked), may("own"))
		}
		time.Sleep(rightsFor)
		delete(allowed, "a")
		if r.MayName(ctx, []string{"a"})("a") {
			t.Error("a lost right is used after a minute")
		}
		time.Sleep(rightsFor)
		allowed["a"], failure = true, errors.New("the API server is away")
		if r.MayName(ctx, []string{"a"})("a") {
			t.Error("an error counts as a right")
		}
		time.Sleep(rightsFor)
		gone, cancel := context.WithCancel(ctx)
		cancel()
		failure = gone.Err()
		r.MayName(gone, []string{"a"})
		if failure = nil; !r.MayName(ctx, []string{"a"})("a") {
			t.Error("the answer for a caller that had gone is used")
		}
	})
}
