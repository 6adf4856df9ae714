// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/overview"
)

// byPod and byClaim are holders of a pod.
func byPod(name string) v1alpha1.DeviceHolder {
	return v1alpha1.DeviceHolder{Kind: v1alpha1.HolderPod, State: v1alpha1.HoldHeld, Pods: []v1alpha1.PodReference{{UID: types.UID(name), Namespace: "ml", Name: name}}}
}

func byClaim(name string) v1alpha1.DeviceHolder {
	h := byPod(name)
	h.Kind, h.UID, h.Namespace, h.Name = v1alpha1.HolderClaim, types.UID("claim-"+name), "ml", name+"-gpu"
	return h
}

// node is a node with two GPUs, of which the first has a partition. An agent acts on its spec at once.
func node(holders ...v1alpha1.DeviceHolder) v1alpha1.GPUNode {
	return v1alpha1.GPUNode{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "GPUNode"},
		ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "u"},
		Status: v1alpha1.GPUNodeStatus{Devices: []v1alpha1.DeviceStatus{
			{Name: "gpu-0", UUID: "GPU-0", Holders: holders},
			{Name: "gpu-0-mig-1g10gb-19-0", UUID: "MIG-0", Parent: "gpu-0"},
			{Name: "gpu-1", UUID: "GPU-1"},
			{Name: "gpu-2", UUID: "GPU-2", Excluded: true},
		}},
	}
}

func TestSelect(t *testing.T) {
	waiting := v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}, Status: v1alpha1.GPUNodeStatus{Waiting: "no driver"}}
	for name, c := range map[string]struct {
		node      v1alpha1.GPUNode
		gpu, want string
	}{
		"all":         {node(), "", "gpu-0 gpu-1"},
		"number":      {node(), "1", "gpu-1"},
		"name":        {node(), "gpu-1", "gpu-1"},
		"UUID":        {node(), "GPU-0", "gpu-0"},
		"excluded":    {node(), "2", "gpu-2"},
		"unknown":     {node(), "3", `node-1 has no GPU "3": it has gpu-0, gpu-1, gpu-2`},
		"partition":   {node(), "MIG-0", "gpu-0-mig-1g10gb-19-0 of node-1 is a partition: maintenance concerns its GPU gpu-0"},
		"by suffix":   {node(), "0-mig-1g10gb-19-0", `node-1 has no GPU "0-mig-1g10gb-19-0": it has gpu-0, gpu-1, gpu-2`},
		"agent waits": {waiting, "", "node-1 reports no GPU: its agent waits: no driver"},
	} {
		gpus, err := Select(c.node, c.gpu)
		var names []string
		for _, g := range gpus {
			names = append(names, g.Name)
		}
		got := strings.Join(names, " ")
		if err != nil {
			got = err.Error()
		}
		if got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

func TestEntries(t *testing.T) {
	early, late := metav1.NewTime(time.Unix(1, 0)), metav1.NewTime(time.Unix(2, 0))
	before := []v1alpha1.GPUMaintenance{{UUID: "GPU-0", Reason: "fan", Since: &early}}
	for name, c := range map[string]struct {
		reason string
		want   []v1alpha1.GPUMaintenance
	}{
		"again":          {"", []v1alpha1.GPUMaintenance{{UUID: "GPU-0", Reason: "fan", Since: &early}, {UUID: "GPU-1", Since: &late}}},
		"another reason": {"rma", []v1alpha1.GPUMaintenance{{UUID: "GPU-0", Reason: "rma", Since: &early}, {UUID: "GPU-1", Reason: "rma", Since: &late}}},
	} {
		got, err := With(before, []GPU{{"gpu-0", "GPU-0"}, {"gpu-1", "GPU-1"}}, c.reason, late)
		if diff := cmp.Diff(c.want, got); diff != "" || err != nil {
			t.Errorf("%s: %v\n%s", name, err, diff)
		}
	}
	if before[0].Reason != "fan" {
		t.Error("the entries that were given have changed")
	}
	many := make([]v1alpha1.GPUMaintenance, v1alpha1.MaxMaintenance)
	if _, err := With(many, []GPU{{"gpu-0", "GPU-0"}}, "", late); err == nil {
		t.Error("more entries than are stored")
	}
	of := node()
	of.Spec.Maintenance = []v1alpha1.GPUMaintenance{{UUID: "GPU-0"}, {UUID: "GPU-gone"}, {UUID: "GPU-1"}}
	for gpu, want := range map[string]string{
		"": "[] gpu-0 GPU-gone gpu-1", "0": "[GPU-gone GPU-1] gpu-0", "GPU-gone": "[GPU-0 GPU-1] GPU-gone", "2": "[GPU-0 GPU-gone GPU-1] ",
	} {
		entries, ended, err := Without(of, gpu)
		left := []string{}
		for _, e := range entries {
			left = append(left, e.UUID)
		}
		if got := fmt.Sprint(left, " ", strings.Join(ended, " ")); got != want || err != nil {
			t.Errorf("without %q: %s, %v, want %s", gpu, got, err, want)
		}
	}
	if _, _, err := Without(of, "9"); err == nil {
		t.Error("a GPU that is not there")
	}
}

func TestWaits(t *testing.T) {
	ending := byClaim("old")
	ending.State, ending.WaitsFor = v1alpha1.HoldDraining, "process 4711 (python)"
	for name, c := range map[string]struct {
		change func(*v1alpha1.GPUNode)
		want   string
	}{
		"free":                  {func(*v1alpha1.GPUNode) {}, ""},
		"no answer":             {func(n *v1alpha1.GPUNode) { n.Status.Devices[0].Maintenance = nil }, "is not withdrawn yet: the agent of the node has not answered"},
		"held":                  {func(n *v1alpha1.GPUNode) { n.Status.Devices[0].Holders = []v1alpha1.DeviceHolder{byPod("infer")} }, "is held by ml/infer (limits)"},
		"two":                   {func(n *v1alpha1.GPUNode) { n.Status.Devices[0].Holders = []v1alpha1.DeviceHolder{byClaim("a"), ending} }, "is held by ml/a (claim a-gpu); ml/old (claim old-gpu), which has ended and waits for process 4711 (python)"},
		"its partition":         {func(n *v1alpha1.GPUNode) { n.Status.Devices[1].Holders = []v1alpha1.DeviceHolder{byPod("part")} }, "is held by ml/part (limits)"},
		"another GPU":           {func(n *v1alpha1.GPUNode) { n.Status.Devices[2].Holders = []v1alpha1.DeviceHolder{byPod("other")} }, ""},
		"allocated":             {func(n *v1alpha1.GPUNode) { n.Spec.Claims = claims("gpu-0") }, "is held by claim ml/next-gpu, not prepared yet"},
		"a partition allocated": {func(n *v1alpha1.GPUNode) { n.Spec.Claims = claims("gpu-0-mig-2g20gb-14-2") }, "is held by claim ml/next-gpu, not prepared yet"},
		"another allocated":     {func(n *v1alpha1.GPUNode) { n.Spec.Claims = claims("gpu-1") }, ""},
		"prepared": {func(n *v1alpha1.GPUNode) {
			n.Spec.Claims, n.Status.Devices[0].Holders = claims("gpu-0"), []v1alpha1.DeviceHolder{byClaim("next")}
		}, "is held by ml/next (claim next-gpu)"},
		"removed": {func(n *v1alpha1.GPUNode) { n.Status.Devices = n.Status.Devices[2:] }, ""},
	} {
		n := node()
		n.Status.Devices[0].Maintenance = &v1alpha1.DeviceMaintenance{}
		c.change(&n)
		if got := Waits(n, GPU{"gpu-0", "GPU-0"}).Text; got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func claims(device string) []v1alpha1.AllocatedClaim {
	return []v1alpha1.AllocatedClaim{{UID: "claim-next", Namespace: "ml", Name: "next-gpu", Devices: []string{device}}}
}

// cluster is an API server with one node, whose agent answers at once.
type cluster struct {
	*Drainer
	client *fake.Clientset
	said   []string
	// looks counts the reads of the GPUNode; at changes it before one.
	looks int
	at    map[int]func(*v1alpha1.GPUNode)
	node  v1alpha1.GPUNode
}

func newCluster(of v1alpha1.GPUNode, pods ...*corev1.Pod) *cluster {
	c := &cluster{node: of}
	var objects []runtime.Object
	for _, pod := range pods {
		objects = append(objects, pod)
	}
	c.client = fake.NewClientset(objects...)
	gpuNodes := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{v1alpha1.Resource: "GPUNodeList"})
	gpuNodes.PrependReactor("get", "gpunodes", func(clienttesting.Action) (bool, runtime.Object, error) {
		c.looks++
		if change := c.at[c.looks]; change != nil {
			change(&c.node)
		}
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&c.node)
		return true, &unstructured.Unstructured{Object: content}, err
	})
	gpuNodes.PrependReactor("patch", "gpunodes", func(action clienttesting.Action) (bool, runtime.Object, error) {
		patch := &unstructured.Unstructured{}
		if err := patch.UnmarshalJSON([]byte(`{"apiVersion":"tandem-gpu.dev/v1alpha1","kind":"GPUNode",` + string(action.(clienttesting.PatchAction).GetPatch())[1:])); err != nil {
			return true, nil, err
		}
		if patch.GetUID() != c.node.UID || patch.GetResourceVersion() != c.node.ResourceVersion {
			return true, nil, apierrors.NewConflict(v1alpha1.Resource.GroupResource(), "node-1", errors.New("another version"))
		}
		var to v1alpha1.GPUNode
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(patch.Object, &to); err != nil {
			return true, nil, err
		}
		c.node.Spec.Maintenance = to.Spec.Maintenance
		for i, d := range c.node.Status.Devices {
			c.node.Status.Devices[i].Maintenance = nil
			if entry, found := c.node.Spec.MaintenanceOf(d.UUID); found {
				c.node.Status.Devices[i].Maintenance = &v1alpha1.DeviceMaintenance{Reason: entry.Reason, Since: entry.Since}
			}
		}
		return true, patch, nil
	})
	c.Drainer = &Drainer{
		Cluster: overview.Cluster{Client: c.client, Dynamic: gpuNodes}, Now: time.Now, Interval: Interval, Settle: Settle,
		Say: func(line string) error { c.said = append(c.said, line); return nil },
	}
	return c
}

// evictions returns the names of the pods whose eviction was asked for.
func (c *cluster) evictions() (names []string) {
	for _, action := range c.client.Actions() {
		if action.Matches("create", "pods") && action.GetSubresource() == "eviction" {
			names = append(names, action.(clienttesting.CreateAction).GetObject().(*policyv1.Eviction).Name)
		}
	}
	return names
}

func pod(name, owner string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: name, UID: types.UID(name)}}
	if owner != "" {
		p.OwnerReferences = []metav1.OwnerReference{{Kind: owner, Name: "o", Controller: ptr.To(true)}}
	}
	return p
}

// holders sets those of gpu-0.
func holders(of ...v1alpha1.DeviceHolder) func(*v1alpha1.GPUNode) {
	return func(n *v1alpha1.GPUNode) { n.Status.Devices[0].Holders = of }
}

func TestRun(t *testing.T) {
	free := []string{"gpu-0 of node-1 is free"}
	const withdrawn = "gpu-0 of node-1 is taken out of service: its agent withdraws it from claims and limits"
	for name, c := range map[string]struct {
		holders []v1alpha1.DeviceHolder
		pods    []*corev1.Pod
		at      map[int]func(*v1alpha1.GPUNode)
		evict   func(times int) error
		options Options
		said    []string
		evicted []string
		err     string
		took    time.Duration
	}{
		"free": {said: free, took: 2 * time.Second},
		"held for a while": {
			holders: []v1alpha1.DeviceHolder{byPod("infer")}, at: map[int]func(*v1alpha1.GPUNode){4: holders()},
			said: append([]string{"gpu-0 of node-1 is held by ml/infer (limits)"}, free...), took: 4 * time.Second,
		},
		"a claim comes late": {
			at:   map[int]func(*v1alpha1.GPUNode){3: func(n *v1alpha1.GPUNode) { n.Spec.Claims = claims("gpu-0") }, 5: func(n *v1alpha1.GPUNode) { n.Spec.Claims = nil }},
			said: append([]string{"gpu-0 of node-1 is held by claim ml/next-gpu, not prepared yet"}, free...), took: 5 * time.Second,
		},
		"an agent that is slow": {
			at: map[int]func(*v1alpha1.GPUNode){
				2: func(n *v1alpha1.GPUNode) { n.Status.Devices[0].Maintenance = nil },
				3: func(n *v1alpha1.GPUNode) { n.Status.Devices[0].Maintenance = &v1alpha1.DeviceMaintenance{} },
			},
			said: free, took: 3 * time.Second,
		},
		"no agent": {
			at: map[int]func(*v1alpha1.GPUNode){2: func(n *v1alpha1.GPUNode) { n.Status.Devices[0].Maintenance = nil }}, options: Options{Timeout: time.Minute},
			said: []string{"gpu-0 of node-1 is not withdrawn yet: the agent of the node has not answered"},
			err:  "not free after 1m0s: gpu-0 is not withdrawn yet", took: time.Minute,
		},
		"held for too long": {
			holders: []v1alpha1.DeviceHolder{byPod("infer")}, options: Options{Timeout: time.Minute}, said: []string{"gpu-0 of node-1 is held by ml/infer (limits)"},
			err: "not free after 1m0s: gpu-0 is held by ml/infer (limits). The GPUs stay under maintenance", took: time.Minute,
		},
		"eviction": {
			holders: []v1alpha1.DeviceHolder{byPod("infer"), byClaim("train")}, pods: []*corev1.Pod{pod("infer", "ReplicaSet"), pod("train", "Job")},
			at: map[int]func(*v1alpha1.GPUNode){4: holders()}, options: Options{Evict: true}, evicted: []string{"infer", "train"},
			said: append([]string{"gpu-0 of node-1 is held by ml/infer (limits); ml/train (claim train-gpu)", "evicting pod ml/infer", "evicting pod ml/train"}, free...), took: 4 * time.Second,
		},
		"never without the flag": {
			holders: []v1alpha1.DeviceHolder{byPod("infer")}, pods: []*corev1.Pod{pod("infer", "ReplicaSet")}, options: Options{Timeout: time.Minute},
			said: []string{"gpu-0 of node-1 is held by ml/infer (limits)"}, err: "not free after 1m0s", took: time.Minute,
		},
		"without a controller, none is evicted": {
			holders: []v1alpha1.DeviceHolder{byPod("infer"), byPod("bare"), byPod("agent")},
			pods:    []*corev1.Pod{pod("infer", "ReplicaSet"), pod("bare", ""), pod("agent", "DaemonSet")}, options: Options{Evict: true},
			said: []string{"gpu-0 of node-1 is held by ml/infer (limits); ml/bare (limits); ml/agent (limits)"},
			err:  "cannot evict DaemonSet-managed Pods (use --force to override): ml/agent\ncannot evict Pods that declare no controller (use --force to override): ml/bare",
		},
		"by force": {
			holders: []v1alpha1.DeviceHolder{byPod("bare"), byPod("agent")}, pods: []*corev1.Pod{pod("bare", ""), pod("agent", "DaemonSet")},
			at: map[int]func(*v1alpha1.GPUNode){3: holders()}, options: Options{Evict: true, Force: true}, evicted: []string{"bare", "agent"},
			said: append([]string{"gpu-0 of node-1 is held by ml/bare (limits); ml/agent (limits)", "evicting pod ml/bare", "evicting pod ml/agent"}, free...), took: 3 * time.Second,
		},
		"another pod of the name": {
			holders: []v1alpha1.DeviceHolder{byPod("infer")}, pods: []*corev1.Pod{func() *corev1.Pod { p := pod("infer", "ReplicaSet"); p.UID = "next"; return p }()},
			at: map[int]func(*v1alpha1.GPUNode){3: holders()}, options: Options{Evict: true},
			said: append([]string{"gpu-0 of node-1 is held by ml/infer (limits)"}, free...), took: 3 * time.Second,
		},
		"a disruption budget": {
			holders: []v1alpha1.DeviceHolder{byPod("infer")}, pods: []*corev1.Pod{pod("infer", "ReplicaSet")}, at: map[int]func(*v1alpha1.GPUNode){9: holders()},
			options: Options{Evict: true}, evicted: []string{"infer", "infer"},
			evict: func(times int) error {
				if times == 1 {
					return apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", 0)
				}
				return nil
			},
			said: append([]string{"gpu-0 of node-1 is held by ml/infer (limits)",
				"error when evicting pod ml/infer (will retry after 5s): Cannot evict pod as it would violate the pod's disruption budget.", "evicting pod ml/infer"}, free...),
			took: 9 * time.Second,
		},
		"no right to evict": {
			holders: []v1alpha1.DeviceHolder{byPod("infer")}, pods: []*corev1.Pod{pod("infer", "ReplicaSet")}, options: Options{Evict: true}, evicted: []string{"infer"},
			evict: func(int) error { return apierrors.NewForbidden(corev1.Resource("pods"), "infer", errors.New("no")) },
			said:  []string{"gpu-0 of node-1 is held by ml/infer (limits)"}, err: "evict pod ml/infer: ",
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cluster := newCluster(node(c.holders...), c.pods...)
				cluster.at = c.at
				times := 0
				cluster.client.PrependReactor("create", "pods/eviction", func(clienttesting.Action) (bool, runtime.Object, error) {
					times++
					if c.evict != nil {
						return true, nil, c.evict(times)
					}
					return true, nil, nil
				})
				c.options.Wait = true
				start := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				err := cluster.Run(ctx, "node-1", "0", c.options)
				if (err == nil) != (c.err == "") || err != nil && !strings.HasPrefix(err.Error(), c.err) {
					t.Errorf("error %v, want %s", err, c.err)
				}
				if diff := cmp.Diff(append([]string{withdrawn}, c.said...), cluster.said); diff != "" {
					t.Error(diff)
				}
				evicted := cluster.evictions()
				slices.Sort(evicted)
				slices.Sort(c.evicted)
				if !slices.Equal(evicted, c.evicted) {
					t.Errorf("evicted %v, want %v", evicted, c.evicted)
				}
				if took := time.Since(start); took != c.took {
					t.Errorf("it took %s, want %s", took, c.took)
				}
			})
		})
	}
}

// Another client changes the object between read and write: both changes stay, and nothing is written twice.
func TestConflict(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(node())
		c.node.ResourceVersion = "1"
		read := c.Cluster.Dynamic.(*dynamicfake.FakeDynamicClient)
		once := true
		read.PrependReactor("patch", "gpunodes", func(clienttesting.Action) (bool, runtime.Object, error) {
			if once {
				once = false
				c.node.ResourceVersion, c.node.Spec.Maintenance = "2", []v1alpha1.GPUMaintenance{{UUID: "GPU-1", Reason: "theirs"}}
			}
			return false, nil, nil
		})
		for range 2 {
			if err := c.Run(t.Context(), "node-1", "0", Options{Reason: "ours"}); err != nil {
				t.Fatal(err)
			}
		}
		patches := 0
		for _, action := range read.Actions() {
			if action.GetVerb() == "patch" {
				patches++
			}
		}
		theirs, found := c.node.Spec.MaintenanceOf("GPU-1")
		if ours, ok := c.node.Spec.MaintenanceOf("GPU-0"); !ok || !found || ours.Reason != "ours" || theirs.Reason != "theirs" || patches != 2 {
			t.Errorf("%d patches made %+v", patches, c.node.Spec.Maintenance)
		}
		for range 2 {
			if err := c.End(t.Context(), "node-1", "gpu-0"); err != nil {
				t.Fatal(err)
			}
		}
		if len(c.node.Spec.Maintenance) != 1 {
			t.Errorf("left are %+v", c.node.Spec.Maintenance)
		}
	})
}

// An interrupted wait ends at once, with an error.
func TestInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if err := newCluster(node(byPod("infer"))).Run(ctx, "node-1", "", Options{Wait: true}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
	})
}
