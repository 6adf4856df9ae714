// SPDX-License-Identifier: Apache-2.0

package nodelabels

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	fakedynamic "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/internal/broadcast"
)

const (
	product = "nvidia.com/gpu.product"
	count   = "nvidia.com/gpu.count"
)

// rig is a node in an API server with field managers, and its writer.
type rig struct {
	*Writer
	t       *testing.T
	client  *fake.Clientset
	dynamic *fakedynamic.FakeDynamicClient
	events  *record.FakeRecorder
	changed broadcast.Signal
	next    map[string]string
	unknown bool
	owners  []metav1.OwnerReference
	noOwner error
}

// newRig returns a rig with a node that has labels of others.
func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{t: t, client: fake.NewClientset(), dynamic: newFeatures(), events: record.NewFakeRecorder(10), next: map[string]string{product: "NVIDIA-L4", count: "4"}}
	r.create("u1")
	r.restart(false)
	return r
}

// restart replaces the Writer by that of the next agent.
func (r *rig) restart(useNodeFeature bool) {
	r.Writer = NewWriter(Config{
		Nodes: r.client.CoreV1().Nodes(), NodeName: "n", Want: func() (map[string]string, bool) { return r.next, !r.unknown },
		UseNodeFeature: useNodeFeature, Features: r.dynamic.Resource(NodeFeatures).Namespace("tandem"),
		Owner:   func(context.Context) ([]metav1.OwnerReference, error) { return r.owners, r.noOwner },
		Changed: r.changed.Changed, Seen: func() map[string]string { return r.node().Labels }, Interval: time.Minute,
		Recorder: r.events, Registerer: prometheus.NewRegistry(),
	})
}

func (r *rig) create(uid types.UID) {
	r.t.Helper()
	labels := map[string]string{"zone": "a", "nvidia.com/gpu.present": "true", "nvidia.com/gpu.deploy.dcgm": "true"}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", UID: uid, Labels: labels}}
	if _, err := r.client.CoreV1().Nodes().Create(context.Background(), node, metav1.CreateOptions{FieldManager: "kubelet"}); err != nil {
		r.t.Fatal(err)
	}
}

// node does not count as a request.
func (r *rig) node() *corev1.Node {
	r.t.Helper()
	object, err := r.client.Tracker().Get(corev1.SchemeGroupVersion.WithResource("nodes"), "", "n")
	if err != nil {
		r.t.Fatal(err)
	}
	return object.(*corev1.Node)
}

// patch changes metadata as another field manager; nil removes a label.
func (r *rig) patch(manager string, labels map[string]any, annotations map[string]any) {
	r.t.Helper()
	metadata := map[string]any{}
	if labels != nil {
		metadata["labels"] = labels
	}
	if annotations != nil {
		metadata["annotations"] = annotations
	}
	patch, err := json.Marshal(map[string]any{"metadata": metadata})
	if err != nil {
		r.t.Fatal(err)
	}
	if _, err := r.client.CoreV1().Nodes().Patch(context.Background(), "n", types.MergePatchType, patch, metav1.PatchOptions{FieldManager: manager}); err != nil {
		r.t.Fatal(err)
	}
}

// requests returns the number of GETs and of PATCHes by Tandem that write makes, and fails on its error.
func (r *rig) requests() (gets, patches int) {
	r.t.Helper()
	r.client.ClearActions()
	if _, err := r.write(context.Background()); err != nil {
		r.t.Fatal(err)
	}
	for _, action := range r.client.Actions() {
		switch action.GetVerb() {
		case "get":
			gets++
		case "patch":
			patches++
		}
	}
	return gets, patches
}

func (r *rig) wantRequests(what string, gets, patches int) {
	r.t.Helper()
	if g, p := r.requests(); g != gets || p != patches {
		r.t.Errorf("%s: %d GETs and %d PATCHes, want %d and %d", what, g, p, gets, patches)
	}
}

// wantLabels compares the labels of the node, apart from those that it had before.
func (r *rig) wantLabels(what string, want map[string]string) {
	r.t.Helper()
	got := maps.Clone(r.node().Labels)
	for _, key := range []string{"zone", "nvidia.com/gpu.present", "nvidia.com/gpu.deploy.dcgm"} {
		if _, found := got[key]; !found {
			r.t.Errorf("%s: %s is gone", what, key)
		}
		delete(got, key)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		r.t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func (r *rig) wantEvents(what string, want ...string) {
	r.t.Helper()
	if len(r.events.Events) != len(want) {
		r.t.Errorf("%s: %d events, want %d", what, len(r.events.Events), len(want))
	}
	for _, text := range want {
		select {
		case event := <-r.events.Events:
			if !strings.Contains(event, text) {
				r.t.Errorf("%s: event %q, want %q", what, event, text)
			}
		default:
		}
	}
}

func TestWrites(t *testing.T) {
	r := newRig(t)
	r.wantRequests("first", 1, 1)
	r.wantLabels("first", r.next)
	if got := testutil.ToFloat64(r.written); got != 2 {
		t.Errorf("metric is %v", got)
	}
	r.wantRequests("nothing new", 0, 0)

	r.next = map[string]string{product: "NVIDIA-L4-SHARED", "nvidia.com/mig.strategy": "mixed"}
	r.wantRequests("changed", 1, 1)
	r.wantLabels("changed", r.next)

	r.patch("kubectl-label", map[string]any{product: nil, "zone": "b"}, nil)
	r.wantRequests("removed by hand", 1, 1)
	r.wantLabels("removed by hand", r.next)

	r.patch("kubectl-label", map[string]any{"zone": "c"}, nil)
	r.wantRequests("a label of others", 1, 0)
	r.wantRequests("seen", 0, 0)

	r.unknown, r.next = true, nil
	r.wantRequests("the driver is away", 0, 0)
	r.wantLabels("the driver is away", map[string]string{product: "NVIDIA-L4-SHARED", "nvidia.com/mig.strategy": "mixed"})

	r.unknown = false
	r.wantRequests("no GPU, or disabled", 1, 1)
	r.wantLabels("no GPU, or disabled", map[string]string{})
	r.wantRequests("gone", 0, 0)
	r.wantEvents("alone")

	// The next agent of the node has nothing to write.
	r.next = map[string]string{product: "NVIDIA-L4"}
	r.wantRequests("a GPU", 1, 1)
	r.settled = false
	r.wantRequests("after a restart", 1, 0)
}

// A node that was deleted and registered again gets its labels.
func TestNodeIsReplaced(t *testing.T) {
	r := newRig(t)
	r.wantRequests("first", 1, 1)
	for _, action := range r.client.Actions() {
		// With the UID the API server creates no node.
		if patch, ok := action.(clienttesting.PatchAction); ok && !strings.Contains(string(patch.GetPatch()), `"uid":"u1"`) {
			t.Errorf("patch without the node's UID: %s", patch.GetPatch())
		}
		// By force it would take a label that another one has written since the GET.
		if patch, ok := action.(clienttesting.PatchActionImpl); ok && ptr.Deref(patch.PatchOptions.Force, false) {
			t.Errorf("patch by force: %+v", patch.PatchOptions)
		}
	}
	nodes := r.client.CoreV1().Nodes()
	if err := nodes.Delete(t.Context(), "n", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	r.create("u2")
	r.wantRequests("registered again", 1, 1)
	r.wantLabels("registered again", r.next)
}

// Another field manager keeps its labels, whatever their values are. One of them is enough.
func TestOtherOwner(t *testing.T) {
	for name, test := range map[string]struct {
		labels      map[string]any
		annotations map[string]any
		want        string
	}{
		"another value":       {labels: map[string]any{product: "other"}, want: "field manager gfd owns the label " + product},
		"the same value":      {labels: map[string]any{count: "4"}, want: "field manager gfd owns the label " + count},
		"the timestamp":       {labels: map[string]any{"nvidia.com/gfd.timestamp": "1"}, want: "field manager gfd owns the label nvidia.com/gfd.timestamp"},
		"listed by NFD":       {annotations: map[string]any{"nfd.node.kubernetes.io/feature-labels": "cpu-cpuid.AVX,nvidia.com/gpu.count"}, want: "Node Feature Discovery lists the label " + count},
		"a label of no GFD":   {labels: map[string]any{"nvidia.com/gpu.workload.config": "container"}},
		"another list of NFD": {annotations: map[string]any{nfdLabels: "cpu-cpuid.AVX,nvidia.com/gpu.present"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.patch("gfd", test.labels, test.annotations)
			theirs := map[string]string{}
			for key, value := range test.labels {
				theirs[key] = value.(string)
			}
			if test.want == "" {
				r.wantRequests("beside it", 1, 1)
				r.wantEvents("beside it")
				return
			}
			r.wantRequests("beside it", 1, 0)
			r.wantLabels("beside it", theirs)
			r.wantEvents("beside it", test.want)
			r.next = map[string]string{product: "other", count: "4"}
			r.wantRequests("changed", 1, 0)
			r.wantEvents("changed")
			r.wantRequests("settled", 0, 0)

			gone := map[string]any{}
			for key := range test.labels {
				gone[key] = nil
			}
			r.patch("gfd", gone, map[string]any{nfdLabels: nil})
			r.settled = r.settled && len(gone) > 0 // the annotation alone is noticed with the next change of a label
			r.wantRequests("gone", 1, 1)
			r.wantLabels("gone", r.next)
			r.wantEvents("gone")
		})
	}
}

// Tandem gives up its labels to one that comes later, and does not remove those that Node Feature Discovery has taken over without writing.
func TestOtherOwnerComesLater(t *testing.T) {
	r := newRig(t)
	r.wantRequests("first", 1, 1)
	r.patch("gfd", map[string]any{product: "other"}, nil)
	r.wantRequests("gfd comes", 1, 1)
	r.wantLabels("gfd comes", map[string]string{product: "other"})
	r.wantEvents("gfd comes", "field manager gfd")
	if got := testutil.ToFloat64(r.written); got != 0 {
		t.Errorf("metric is %v", got)
	}

	r = newRig(t)
	r.wantRequests("first", 1, 1)
	r.patch("nfd-master", map[string]any{count: "4", "zone": "b"}, map[string]any{nfdLabels: "nvidia.com/gpu.count"})
	r.wantRequests("NFD comes", 1, 1)
	r.wantLabels("NFD comes", map[string]string{count: "4"})
	r.wantEvents("NFD comes", "Node Feature Discovery lists the label "+count)
	r.wantRequests("settled", 0, 0)
	r.patch("nfd-master", map[string]any{count: "8"}, nil)
	r.wantRequests("NFD changes it", 1, 0)
	r.wantLabels("NFD changes it", map[string]string{count: "8"})
	r.wantEvents("NFD changes it")

	r = newRig(t)
	r.wantRequests("first", 1, 1)
	r.patch("nfd-master", nil, map[string]any{nfdLabels: "nvidia.com/gpu.count"})
	r.next = nil
	r.wantRequests("disabled beside NFD", 1, 1)
	r.wantLabels("disabled beside NFD", map[string]string{count: "4"})
}

func TestRemoveFromAll(t *testing.T) {
	r := newRig(t)
	nodes := r.client.CoreV1().Nodes()
	if _, err := nodes.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "other"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	r.next["nvidia.com/gpu.replicas"] = "1"
	r.wantRequests("first", 1, 1)
	r.patch("kubectl-label", map[string]any{product: "mine"}, map[string]any{nfdLabels: "nvidia.com/gpu.count"})
	r.client.PrependReactor("list", "nodes", func(action clienttesting.Action) (bool, runtime.Object, error) {
		all, err := r.client.Tracker().List(corev1.SchemeGroupVersion.WithResource("nodes"), corev1.SchemeGroupVersion.WithKind("Node"), "")
		if err != nil {
			return true, nil, err
		}
		// The node with labels is on the second page.
		list, first := all.(*corev1.NodeList), action.(clienttesting.ListActionImpl).ListOptions.Continue == ""
		list.Items = slices.DeleteFunc(list.Items, func(n corev1.Node) bool { return (n.Name == "n") == first })
		if first {
			list.Continue = "second"
		}
		return true, list, nil
	})
	for i, want := range []int{1, 0} {
		if removed, err := RemoveFromAll(t.Context(), nodes); removed != want || err != nil {
			t.Errorf("call %d: removed from %d nodes, %v, want %d", i, removed, err, want)
		}
	}
	r.wantLabels("removed", map[string]string{product: "mine", count: "4"})

	// One node with an error does not keep the others from being cleaned.
	r = newRig(t)
	nodes = r.client.CoreV1().Nodes()
	r.wantRequests("first", 1, 1)
	r.client.PrependReactor("patch", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("refused")
	})
	if removed, err := RemoveFromAll(t.Context(), nodes); removed != 0 || err == nil || !strings.Contains(err.Error(), "node n: refused") {
		t.Errorf("removed from %d nodes, %v", removed, err)
	}
}

// Run writes at once, after a change, after an error, and at each interval.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.Run(ctx) }()
		synctest.Wait()
		r.wantLabels("at once", map[string]string{product: "NVIDIA-L4", count: "4"})

		r.next = map[string]string{count: "8"}
		r.changed.Notify()
		synctest.Wait()
		r.wantLabels("after a change", map[string]string{count: "8"})

		r.patch("kubectl-label", map[string]any{count: nil}, nil)
		synctest.Wait()
		r.wantLabels("before the interval", map[string]string{})
		time.Sleep(time.Minute)
		synctest.Wait()
		r.wantLabels("after the interval", map[string]string{count: "8"})

		var refused atomic.Bool
		refused.Store(true)
		r.client.PrependReactor("patch", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
			return refused.Load(), nil, errors.New("refused")
		})
		r.next = map[string]string{count: "2"}
		r.changed.Notify()
		synctest.Wait()
		if got := testutil.ToFloat64(r.failures); got != 1 {
			t.Errorf("%v failures", got)
		}
		// Not at each interval: of 5,000 agents without the right, each asks once in five minutes.
		time.Sleep(time.Hour)
		synctest.Wait()
		if got := testutil.ToFloat64(r.failures); got < 8 || got > 20 {
			t.Errorf("%v failures within an hour", got)
		}
		refused.Store(false)
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		r.wantLabels("after an error", map[string]string{count: "2"})

		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		r.wantLabels("stopped", map[string]string{count: "2"})
	})
}
