// SPDX-License-Identifier: Apache-2.0

package nodelabels

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/client-go/dynamic"
	fakedynamic "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"
)

const featureName = "nvidia-features-for-n"

// newFeatures returns the client of an API server that serves NodeFeatures and records field managers.
func newFeatures() *fakedynamic.FakeDynamicClient {
	scheme := runtime.NewScheme()
	kind := NodeFeatures.GroupVersion().WithKind("NodeFeature")
	scheme.AddKnownTypeWithName(kind, &unstructured.Unstructured{})
	scheme.AddKnownTypeWithName(NodeFeatures.GroupVersion().WithKind("NodeFeatureList"), &unstructured.UnstructuredList{})
	metav1.AddToGroupVersion(scheme, NodeFeatures.GroupVersion())
	client := fakedynamic.NewSimpleDynamicClientWithCustomListKinds(scheme, map[schema.GroupVersionResource]string{NodeFeatures: "NodeFeatureList"})
	tracker := clienttesting.NewFieldManagedObjectTracker(scheme, serializer.NewCodecFactory(scheme).UniversalDecoder(), managedfields.NewDeducedTypeConverter())
	client.PrependReactor("*", "*", clienttesting.ObjectReaction(tracker))
	return client
}

func (r *rig) features() dynamic.ResourceInterface {
	return r.dynamic.Resource(NodeFeatures).Namespace("tandem")
}

// feature returns the node's NodeFeature; nil if there is none.
func (r *rig) feature() *unstructured.Unstructured {
	r.t.Helper()
	object, err := r.features().Get(context.Background(), featureName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return object
}

// wantFeature compares the labels in the node's NodeFeature; nil for no object.
func (r *rig) wantFeature(what string, want map[string]string) {
	r.t.Helper()
	object := r.feature()
	if object == nil {
		if want != nil {
			r.t.Errorf("%s: no NodeFeature", what)
		}
		return
	}
	got, _, err := unstructured.NestedStringMap(object.Object, "spec", "labels")
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		r.t.Errorf("%s (-want +got): %v\n%s", what, err, diff)
	}
	if name := object.GetLabels()["nfd.node.kubernetes.io/node-name"]; name != "n" {
		r.t.Errorf("%s: it is for the node %q", what, name)
	}
}

// wantWrite checks that write makes these requests for NodeFeatures, and that it returns this failure, or none if failure is empty.
func (r *rig) wantWrite(what, requests, failure string) (handedBack bool) {
	r.t.Helper()
	r.dynamic.ClearActions()
	handedBack, err := r.write(context.Background())
	if (err != nil) != (failure != "") || err != nil && !strings.Contains(err.Error(), failure) {
		r.t.Errorf("%s: error %v, want %q", what, err, failure)
	}
	var got []string
	for _, action := range r.dynamic.Actions() {
		got = append(got, action.GetVerb())
		if patch, ok := action.(clienttesting.PatchActionImpl); ok && (patch.PatchOptions.Force != nil && *patch.PatchOptions.Force || patch.PatchOptions.FieldManager != Manager) {
			r.t.Errorf("%s: patch with %+v", what, patch.PatchOptions)
		}
		// If the object has changed since the GET, another field manager may have written it.
		if deletion, ok := action.(clienttesting.DeleteActionImpl); ok {
			if p := deletion.DeleteOptions.Preconditions; p == nil || p.UID == nil || p.ResourceVersion == nil {
				r.t.Errorf("%s: deletion with %+v", what, p)
			}
		}
	}
	if requests != strings.Join(got, " ") {
		r.t.Errorf("%s: requests %q, want %q", what, got, requests)
	}
	return handedBack
}

// patchFeature changes the NodeFeature as another field manager.
func (r *rig) patchFeature(manager string, patch any) {
	r.t.Helper()
	text, err := json.Marshal(patch)
	if err != nil {
		r.t.Fatal(err)
	}
	if _, err := r.features().Patch(context.Background(), featureName, types.MergePatchType, text, metav1.PatchOptions{FieldManager: manager}); err != nil {
		r.t.Fatal(err)
	}
}

// nfd changes the node as Node Feature Discovery's master does, as far as the Writer sees it. It lists the labels of all NodeFeatures, writes
// labels whose value differs, and removes labels that it listed before and no NodeFeature has any more (node-feature-discovery v0.19.0,
// pkg/nfd-master, updateNodeObject).
func (r *rig) nfd() {
	r.t.Helper()
	labels, keys := map[string]any{}, []string{}
	for key := range r.node().Labels {
		if strings.Contains(","+r.node().Annotations[nfdLabels]+",", ","+key+",") {
			labels[key] = nil
		}
	}
	if object := r.feature(); object != nil {
		values, _, _ := unstructured.NestedStringMap(object.Object, "spec", "labels")
		for key, value := range values {
			delete(labels, key)
			if r.node().Labels[key] != value {
				labels[key] = value
			}
			keys = append(keys, key)
		}
	}
	var list any = strings.Join(keys, ",")
	if len(keys) == 0 {
		list = nil
	}
	r.patch("nfd-master", labels, map[string]any{nfdLabels: list})
}

func TestNodeFeature(t *testing.T) {
	r := newRig(t)
	r.restart(true)
	r.owners = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "tandem", UID: "d1"}}
	r.wantWrite("first", "get patch", "")
	r.wantFeature("first", r.next)
	r.wantLabels("first", map[string]string{})
	if owners := r.feature().GetOwnerReferences(); len(owners) != 1 || owners[0].UID != "d1" {
		t.Errorf("owners %v", owners)
	}
	if got := testutil.ToFloat64(r.written); got != 2 {
		t.Errorf("metric is %v", got)
	}
	r.wantWrite("nothing new", "", "")
	r.nfd()
	r.wantLabels("applied", r.next)
	r.wantWrite("applied", "get", "")
	r.wantWrite("seen", "", "")

	r.next = map[string]string{product: "NVIDIA-L4-SHARED", "nvidia.com/mig.strategy": "mixed"}
	r.wantWrite("changed", "get patch", "")
	r.wantFeature("changed", r.next)
	r.nfd()

	r.restart(true)
	r.wantWrite("after a restart", "get", "")
	r.owners[0].UID = "d2"
	r.restart(true)
	r.wantWrite("of another DaemonSet", "get patch", "")
	if owners := r.feature().GetOwnerReferences(); len(owners) != 1 || owners[0].UID != "d2" {
		t.Errorf("owners %v", owners)
	}

	// Node Feature Discovery then removes the labels, which the agent sees.
	if err := r.features().Delete(t.Context(), featureName, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	r.wantWrite("removed by hand, and not seen", "", "")
	r.nfd()
	r.wantWrite("removed by hand", "get patch", "")
	r.wantFeature("removed by hand", r.next)
	r.nfd()

	labels := r.next
	r.unknown, r.next = true, nil
	r.wantWrite("the driver is away", "", "")
	r.wantFeature("the driver is away", labels)
	r.unknown = false
	r.wantWrite("no GPU, or disabled", "get delete", "")
	r.wantFeature("no GPU, or disabled", nil)
	r.nfd()
	r.wantLabels("no GPU, or disabled", map[string]string{})
	r.restart(true)
	r.wantWrite("no GPU, after a restart", "get", "")
	r.wantEvents("alone")

	r.next, r.noOwner = labels, errors.New("refused")
	r.wantWrite("without an answer about the owner", "get", "find the owner of NodeFeature "+featureName+": refused")
	r.wantFeature("without an answer about the owner", nil)
}

// The Writer removes the labels from one place before it writes them to the other.
func TestNodeFeatureSwitch(t *testing.T) {
	r := newRig(t)
	r.wantRequests("first", 1, 1)
	r.wantFeature("first", nil)
	r.restart(true)
	r.wantWrite("to the NodeFeature", "get patch", "")
	r.wantLabels("to the NodeFeature", map[string]string{})
	r.wantFeature("to the NodeFeature", r.next)
	r.nfd()
	r.wantLabels("to the NodeFeature", r.next)

	r.restart(false)
	if !r.wantWrite("back", "get delete", "") {
		t.Error("it does not wait for Node Feature Discovery")
	}
	r.wantFeature("back", nil)
	r.nfd()
	r.wantWrite("on the node", "", "")
	r.wantLabels("on the node", r.next)
	r.settled = false
	r.wantWrite("the NodeFeature is gone", "", "")
	r.wantEvents("alone")

	// The labels are disabled at the same time as the NodeFeature.
	r.restart(true)
	r.wantWrite("again", "get patch", "")
	r.nfd()
	r.restart(false)
	r.next = nil
	r.wantWrite("disabled", "get delete", "")
	r.nfd()
	r.wantLabels("disabled", map[string]string{})
}

// The Writer waits handBack for Node Feature Discovery, not until the next interval.
func TestNodeFeatureHandsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.restart(true)
		r.wantWrite("first", "get patch", "")
		r.nfd()
		r.restart(false)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.Run(ctx) }()
		synctest.Wait()
		r.nfd()
		r.wantLabels("handed back", map[string]string{})
		time.Sleep(2 * handBack)
		synctest.Wait()
		r.wantLabels("afterwards", r.next)
		r.wantEvents("afterwards")
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// The Writer does not change an object that another field manager has written. It writes no object if another field manager has labels on the
// node.
func TestNodeFeatureOfOthers(t *testing.T) {
	theirs := map[string]any{"spec": map[string]any{"labels": map[string]any{product: "other"}}}
	const written = "the field manager gfd has written the NodeFeature tandem/" + featureName
	t.Run("before", func(t *testing.T) {
		r := newRig(t)
		object := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": NodeFeatures.GroupVersion().String(), "kind": "NodeFeature",
			"metadata": map[string]any{"name": featureName, "namespace": "tandem", "labels": map[string]any{featureNode: "n"}}, "spec": theirs["spec"],
		}}
		if _, err := r.features().Create(t.Context(), object, metav1.CreateOptions{FieldManager: "gfd"}); err != nil {
			t.Fatal(err)
		}
		r.wantWrite("with labels on the node", "get", "")
		r.wantLabels("with labels on the node", r.next)
		r.wantEvents("with labels on the node")
		r.restart(true)
		r.wantWrite("beside it", "get", "")
		r.wantLabels("beside it", map[string]string{})
		r.wantEvents("beside it", written)
		r.wantWrite("settled", "", "")
		r.next = nil
		r.wantWrite("disabled", "get", "")
		r.wantFeature("disabled", map[string]string{product: "other"})
	})
	t.Run("later", func(t *testing.T) {
		r := newRig(t)
		r.restart(true)
		r.wantWrite("first", "get patch", "")
		r.nfd()
		r.patchFeature("gfd", theirs)
		r.nfd()
		r.wantWrite("gfd comes", "get", "")
		r.wantEvents("gfd comes", written)
		if got := testutil.ToFloat64(r.written); got != 0 {
			t.Errorf("metric is %v", got)
		}
		if err := r.features().Delete(t.Context(), featureName, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		r.nfd()
		r.wantWrite("gone", "get patch", "")
		r.wantFeature("gone", r.next)
	})
	t.Run("metadata only", func(t *testing.T) {
		r := newRig(t)
		r.restart(true)
		r.wantWrite("first", "get patch", "")
		r.patchFeature("backup", map[string]any{"metadata": map[string]any{"annotations": map[string]any{"a": "b"}}})
		r.next = map[string]string{count: "8"}
		r.wantWrite("changed", "get patch", "")
		r.wantFeature("changed", r.next)
		r.wantEvents("changed")
	})
	// Another field manager has changed the node that the object names. Server-side apply does not overwrite that.
	t.Run("for another node", func(t *testing.T) {
		r := newRig(t)
		r.restart(true)
		r.wantWrite("first", "get patch", "")
		r.patchFeature("gfd", map[string]any{"metadata": map[string]any{"labels": map[string]any{featureNode: "m"}}})
		r.settled = false
		r.wantWrite("redirected", "get patch", "conflict")
	})
	t.Run("of an unknown field manager", func(t *testing.T) {
		o := inFeature{object: &feature{ObjectMeta: metav1.ObjectMeta{Namespace: "tandem", Name: featureName}}}
		if got, want := o.otherOwner(map[string]string{count: "4"}), "an unknown field manager has written the NodeFeature tandem/"+featureName; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	})
	// NFD merges the objects of all namespaces.
	t.Run("in another namespace", func(t *testing.T) {
		r := newRig(t)
		r.patch("nfd-master", map[string]any{count: "4"}, map[string]any{nfdLabels: count})
		r.restart(true)
		r.wantWrite("beside it", "get", "")
		r.wantFeature("beside it", nil)
		r.wantEvents("beside it", "owns the label "+count)
	})
}

// If the API server does not serve NodeFeatures, the labels on the node stay. One event says what to do.
func TestNoNodeFeatures(t *testing.T) {
	unserved := apierrors.NewGenericServerResponse(http.StatusNotFound, "get", NodeFeatures.GroupResource(), featureName, "404 page not found", 0, true)
	refused := apierrors.NewForbidden(NodeFeatures.GroupResource(), featureName, errors.New("no role"))
	r := newRig(t)
	var answer error = unserved
	r.dynamic.PrependReactor("*", "nodefeatures", func(clienttesting.Action) (bool, runtime.Object, error) { return answer != nil, nil, answer })
	r.wantWrite("on the node", "get", "")
	r.wantLabels("on the node", r.next)
	r.wantWrite("on the node, again", "", "")

	r.restart(true)
	before := r.next
	r.next = map[string]string{count: "8"}
	for i, events := range [][]string{{"Warning NodeLabelsNotWritten Tandem writes no labels of GPU Feature Discovery to this node, because the API server has no NodeFeatures"}, nil} {
		what := fmt.Sprintf("attempt %d", i)
		r.wantWrite(what, "get", "the API server has no NodeFeatures (nfd.k8s-sigs.io/v1alpha1)")
		r.wantLabels(what, before)
		r.wantEvents(what, events...)
	}
	answer = nil
	r.patch("gfd", map[string]any{"nvidia.com/gfd.timestamp": "1"}, nil)
	r.wantWrite("installed beside GPU Feature Discovery", "get", "")
	r.wantEvents("installed beside GPU Feature Discovery", "field manager gfd owns the label nvidia.com/gfd.timestamp")
	r.patch("gfd", map[string]any{"nvidia.com/gfd.timestamp": nil}, nil)
	r.wantWrite("installed", "get patch", "")
	r.wantFeature("installed", r.next)
	r.wantLabels("installed", map[string]string{})

	answer = unserved
	r.next = nil
	r.wantWrite("no GPU", "get", "")

	// The agent may lack the right. That is an error only if it is to write a NodeFeature.
	answer, r.next = refused, before
	r.restart(false)
	r.wantWrite("on the node, without the right", "get", "")
	r.wantLabels("on the node, without the right", r.next)
	r.restart(true)
	r.wantWrite("without the right", "get", "get NodeFeature "+featureName)
	r.wantLabels("without the right", r.next)
}

// For a resource that it does not serve, the API server answers with a text; for a missing object, with a Status.
func TestUnserved(t *testing.T) {
	for name, test := range map[string]struct {
		kind, answer string
		want         bool
	}{
		"resource": {"text/plain", "404 page not found\n", true},
		"object":   {"application/json", `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404,"details":{"name":"x","kind":"nodefeatures"}}`, false},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", test.kind)
			w.WriteHeader(http.StatusNotFound)
			_, _ = w.Write([]byte(test.answer))
		}))
		client, err := dynamic.NewForConfig(&rest.Config{Host: server.URL})
		if err != nil {
			t.Fatal(err)
		}
		_, err = client.Resource(NodeFeatures).Namespace("tandem").Get(t.Context(), "x", metav1.GetOptions{})
		server.Close()
		if got := isUnserved(err); !apierrors.IsNotFound(err) || got != test.want {
			t.Errorf("%s: got %v for %v", name, got, err)
		}
	}
}
