// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	k8sresource "k8s.io/apimachinery/pkg/api/resource"
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
	"github.com/tandem-gpu/tandem/cli/overview"
	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
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
		"agent waits": {waiting, "", "node-1 lists no GPU: no GPU for new pods and claims: no driver"},
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
		if diff := gocmp.Diff(c.want, got); diff != "" || err != nil {
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
		"held, and the agent is gone since": {func(n *v1alpha1.GPUNode) {
			seen := metav1.Unix(0, 0)
			n.Status.Seen, n.Status.Devices[0].Holders = &seen, []v1alpha1.DeviceHolder{byPod("infer")}
			*n = availability.AsOf(seen.Add(time.Hour), *n)
		}, "is held by ml/infer (limits) (its agent has been silent since 1970-01-01T00:00:00Z: its GPUNode is of that time, and new pods may get no GPU)"},
		"removed": {func(n *v1alpha1.GPUNode) { n.Status.Devices = n.Status.Devices[2:] }, ""},
		"an earlier answer": {
			func(n *v1alpha1.GPUNode) { n.Status.ObservedGeneration = 2 }, "is not withdrawn yet: the agent of the node has not answered",
		},
		"removed before the answer": {
			func(n *v1alpha1.GPUNode) { n.Status.ObservedGeneration, n.Status.Devices = 2, n.Status.Devices[2:] },
			"is not withdrawn yet: the agent of the node has not answered",
		},
		"an agent that waits for the driver": {func(n *v1alpha1.GPUNode) { n.Status = v1alpha1.GPUNodeStatus{Waiting: "no driver"} }, ""},
		"a later answer":                     {func(n *v1alpha1.GPUNode) { n.Status.ObservedGeneration = 4 }, ""},
	} {
		n := node()
		n.Status.ObservedGeneration, n.Status.Devices[0].Maintenance = 3, &v1alpha1.DeviceMaintenance{}
		c.change(&n)
		if got := Waits(n, GPU{"gpu-0", "GPU-0"}, 3, nil).Text; got != c.want {
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
	// away is set while the agent does not answer.
	away bool
	// looks counts the reads of the GPUNode; at changes it before one.
	looks int
	at    map[int]func(*v1alpha1.GPUNode)
	node  v1alpha1.GPUNode
	// fails are the errors of reads of the GPUNode.
	fails map[int]error
}

func newCluster(of v1alpha1.GPUNode, objects ...runtime.Object) *cluster {
	c := &cluster{node: of, client: fake.NewClientset(objects...)}
	gpuNodes := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{v1alpha1.Resource: "GPUNodeList"})
	gpuNodes.PrependReactor("get", "gpunodes", func(clienttesting.Action) (bool, runtime.Object, error) {
		c.looks++
		if change := c.at[c.looks]; change != nil {
			change(&c.node)
		}
		if err := c.fails[c.looks]; err != nil {
			return true, nil, err
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
		c.node.Generation++
		if !c.away {
			answer(&c.node)
		}
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&c.node)
		return true, &unstructured.Unstructured{Object: content}, err
	})
	c.Drainer = &Drainer{
		Cluster: overview.Cluster{Client: c.client, Dynamic: gpuNodes, DriverName: "gpu.nvidia.com"}, Resources: device.Resources{GPU: "nvidia.com/gpu"},
		Now: time.Now, Interval: Interval, Settle: Settle, Say: func(line string) error { c.said = append(c.said, line); return nil },
	}
	return c
}

// answer is the agent's: it acts on the spec.
func answer(n *v1alpha1.GPUNode) {
	n.Status.ObservedGeneration = n.Generation
	for i, d := range n.Status.Devices {
		n.Status.Devices[i].Maintenance = nil
		if entry, found := n.Spec.MaintenanceOf(d.UUID); found {
			n.Status.Devices[i].Maintenance = &v1alpha1.DeviceMaintenance{Reason: entry.Reason, Since: entry.Since}
		}
	}
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

// pod is a pod on node-1 that requests a GPU.
func pod(name, owner string) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: name, UID: types.UID(name)},
		Spec:       corev1.PodSpec{NodeName: "node-1", Containers: []corev1.Container{{Name: "c", Resources: limits("nvidia.com/gpu")}}},
	}
	if owner != "" {
		p.OwnerReferences = []metav1.OwnerReference{{Kind: owner, Name: "o", Controller: ptr.To(true)}}
	}
	return p
}

func limits(resource corev1.ResourceName) corev1.ResourceRequirements {
	return corev1.ResourceRequirements{Limits: corev1.ResourceList{resource: k8sresource.MustParse("1")}}
}

// byName replaces a pod's limit by a claim of the name.
func byName(p *corev1.Pod, claim string) *corev1.Pod {
	p.Spec.Containers[0].Resources = corev1.ResourceRequirements{}
	p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &claim}}
	return p
}

// claim is a claim that is allocated gpu-0 of the driver and the pool.
func claim(name, driver, pool string) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: name, UID: types.UID("uid-" + name)},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: driver, Pool: pool, Device: "gpu-0"}},
		}}},
	}
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
		pods    []runtime.Object
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
		"an agent whose answer is of an earlier request": {
			at:   map[int]func(*v1alpha1.GPUNode){2: func(n *v1alpha1.GPUNode) { n.Status.ObservedGeneration = 0 }, 3: answer},
			said: free, took: 3 * time.Second,
		},
		"no agent": {
			at: map[int]func(*v1alpha1.GPUNode){2: func(n *v1alpha1.GPUNode) { n.Status.Devices[0].Maintenance = nil }}, options: Options{Timeout: time.Minute},
			said: []string{"gpu-0 of node-1 is not withdrawn yet: the agent of the node has not answered"},
			err:  "not free after 1m0s: gpu-0 is not withdrawn yet", took: time.Minute,
		},
		"held for too long": {
			holders: []v1alpha1.DeviceHolder{byPod("infer")}, options: Options{Timeout: time.Minute}, said: []string{"gpu-0 of node-1 is held by ml/infer (limits)"},
			err: "not free after 1m0s: gpu-0 is held by ml/infer (limits). The GPUs stay under maintenance; --evict evicts their pods", took: time.Minute,
		},
		"eviction": {
			holders: []v1alpha1.DeviceHolder{byPod("infer"), byClaim("train")}, pods: []runtime.Object{
				pod("infer", "ReplicaSet"), byName(pod("train", "Job"), "train-gpu"), claim("train-gpu", "gpu.nvidia.com", "node-1"),
			},
			at: map[int]func(*v1alpha1.GPUNode){4: holders()}, options: Options{Evict: true}, evicted: []string{"infer", "train"},
			said: append([]string{"gpu-0 of node-1 is held by ml/infer (limits); ml/train (claim train-gpu)", "evicting pod ml/infer", "evicting pod ml/train"}, free...), took: 4 * time.Second,
		},
		"never without the flag": {
			holders: []v1alpha1.DeviceHolder{byPod("infer")}, pods: []runtime.Object{pod("infer", "ReplicaSet")}, options: Options{Timeout: time.Minute},
			said: []string{"gpu-0 of node-1 is held by ml/infer (limits)"}, err: "not free after 1m0s", took: time.Minute,
		},
		"without a controller, none is evicted": {
			holders: []v1alpha1.DeviceHolder{byPod("infer"), byPod("bare"), byPod("agent")},
			pods:    []runtime.Object{pod("infer", "ReplicaSet"), pod("bare", ""), pod("agent", "DaemonSet")}, options: Options{Evict: true},
			said: []string{"gpu-0 of node-1 is held by ml/infer (limits); ml/bare (limits); ml/agent (limits)"},
			err:  "cannot evict DaemonSet-managed Pods (use --force to override): ml/agent\ncannot evict Pods that declare no controller (use --force to override): ml/bare",
		},
		"a static pod, which the API server knows by another UID": {
			holders: []v1alpha1.DeviceHolder{byPod("infer")}, options: Options{Evict: true}, pods: []runtime.Object{func() *corev1.Pod {
				p := pod("infer", "Node")
				p.Annotations, p.UID = map[string]string{corev1.MirrorPodAnnotationKey: string(p.UID)}, "mirror"
				return p
			}()},
			said: []string{"gpu-0 of node-1 is held by ml/infer (limits)"}, err: "cannot evict static Pods (remove their manifests from the node): ml/infer",
		},
		"by force": {
			holders: []v1alpha1.DeviceHolder{byPod("bare"), byPod("agent")}, pods: []runtime.Object{pod("bare", ""), pod("agent", "DaemonSet")},
			at: map[int]func(*v1alpha1.GPUNode){3: holders()}, options: Options{Evict: true, Force: true}, evicted: []string{"bare", "agent"},
			said: append([]string{"gpu-0 of node-1 is held by ml/bare (limits); ml/agent (limits)", "evicting pod ml/bare", "evicting pod ml/agent"}, free...), took: 3 * time.Second,
		},
		"another pod of the name": {
			holders: []v1alpha1.DeviceHolder{byPod("infer")}, pods: []runtime.Object{func() *corev1.Pod { p := pod("infer", "ReplicaSet"); p.UID = "next"; return p }()},
			at: map[int]func(*v1alpha1.GPUNode){3: holders()}, options: Options{Evict: true},
			said: append([]string{"gpu-0 of node-1 is held by ml/infer (limits)"}, free...), took: 3 * time.Second,
		},
		"a disruption budget": {
			holders: []v1alpha1.DeviceHolder{byPod("infer")}, pods: []runtime.Object{pod("infer", "ReplicaSet")}, at: map[int]func(*v1alpha1.GPUNode){9: holders()},
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
			holders: []v1alpha1.DeviceHolder{byPod("infer")}, pods: []runtime.Object{pod("infer", "ReplicaSet")}, options: Options{Evict: true}, evicted: []string{"infer"},
			evict: func(int) error { return apierrors.NewForbidden(corev1.Resource("pods"), "infer", errors.New("no")) },
			said:  []string{"gpu-0 of node-1 is held by ml/infer (limits)"}, err: "evict pod ml/infer: ",
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cluster := newCluster(node(c.holders...), c.pods...)
				cluster.at = c.at
				times := 0
				cluster.client.PrependReactor("create", "pods/eviction", func(action clienttesting.Action) (bool, runtime.Object, error) {
					times++
					if c.evict != nil {
						return true, nil, c.evict(times)
					}
					// The pod's claim ends with it.
					of := action.(clienttesting.CreateAction).GetObject().(*policyv1.Eviction).Name + "-gpu"
					_ = cluster.client.Tracker().Delete(resourceapi.SchemeGroupVersion.WithResource("resourceclaims"), "ml", of)
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
				if diff := gocmp.Diff(append([]string{withdrawn}, c.said...), cluster.said); diff != "" {
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

// TestEvictsHoldersOnly: with the token of an agent, an attacker writes any names into the status of its GPUNode. Only pods that are on the node and
// request a GPU are evicted, with --force too. The others are named once, and the command does not wait for them.
func TestEvictsHoldersOnly(t *testing.T) {
	const (
		elsewhere = "GPUNode names pod ml/victim, which is not on node node-1: not evicted"
		without   = "GPUNode names pod ml/victim, which requests no nvidia.com/gpu and has no claim of driver gpu.nvidia.com on node-1 " +
			"(--resource-name, --driver-name): not evicted"
	)
	victim := func(change func(*corev1.Pod)) *corev1.Pod {
		p := pod("victim", "ReplicaSet")
		change(p)
		return p
	}
	ofTemplate := func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources = corev1.ResourceRequirements{}
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: ptr.To("t")}}
		p.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: ptr.To("victim-gpu")}}
	}
	ofLimits := func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources = limits("deviceclass.resource.kubernetes.io/gpu.nvidia.com")
		p.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: "victim-gpu"}
	}
	named := func(p *corev1.Pod) { byName(p, "victim-gpu") }
	owned := func(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
		c.OwnerReferences = []metav1.OwnerReference{{Kind: "Pod", Name: "victim", UID: "victim", Controller: ptr.To(true)}}
		return c
	}
	ours := claim("victim-gpu", "gpu.nvidia.com", "node-1")
	admin := claim("victim-gpu", "gpu.nvidia.com", "node-1")
	admin.Status.Allocation.Devices.Results[0].AdminAccess = ptr.To(true)
	unallocated := claim("victim-gpu", "gpu.nvidia.com", "node-1")
	unallocated.Status.Allocation = nil
	for name, c := range map[string]struct {
		victim *corev1.Pod
		claim  *resourceapi.ResourceClaim
		want   string // empty if it is evicted
	}{
		"a GPU":                             {victim(func(*corev1.Pod) {}), nil, ""},
		"a GPU of another node":             {victim(func(p *corev1.Pod) { p.Spec.NodeName = "node-2" }), nil, elsewhere},
		"not bound":                         {victim(func(p *corev1.Pod) { p.Spec.NodeName = "" }), nil, elsewhere},
		"no GPU":                            {victim(func(p *corev1.Pod) { p.Spec.Containers[0].Resources = limits("cpu") }), nil, without},
		"another device":                    {victim(func(p *corev1.Pod) { p.Spec.Containers[0].Resources = limits("example.com/nic") }), nil, without},
		"a partition":                       {victim(func(p *corev1.Pod) { p.Spec.Containers[0].Resources = limits("nvidia.com/mig-1g.10gb") }), nil, ""},
		"a replica":                         {victim(func(p *corev1.Pod) { p.Spec.Containers[0].Resources = limits("nvidia.com/gpu.shared") }), nil, ""},
		"in an init container":              {victim(func(p *corev1.Pod) { p.Spec.InitContainers, p.Spec.Containers = p.Spec.Containers, nil }), nil, ""},
		"a claim":                           {victim(named), ours, ""},
		"a claim of a GPU's own pool":       {victim(named), claim("victim-gpu", "gpu.nvidia.com", "node-1/gpu-00"), ""},
		"a claim of a template":             {victim(ofTemplate), owned(ours.DeepCopy()), ""},
		"a claim for limits":                {victim(ofLimits), owned(ours.DeepCopy()), ""},
		"a claim of another pod's template": {victim(ofTemplate), ours, without},
		"a claim of another driver":         {victim(named), claim("victim-gpu", "nic.example.com", "node-1"), without},
		"a claim of another node":           {victim(named), claim("victim-gpu", "gpu.nvidia.com", "node-2"), without},
		"a claim with admin access":         {victim(named), admin, without},
		"a claim that is not allocated":     {victim(named), unallocated, without},
		"a claim that does not exist":       {victim(named), nil, without},
	} {
		for _, force := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, force=%t", name, force), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					objects := []runtime.Object{c.victim}
					if c.claim != nil {
						objects = append(objects, c.claim)
					}
					// What the GPUNode says of resources and of the holder's claim changes nothing.
					n := node(byPod("victim"), byClaim("victim"))
					n.Status.ExtendedResource, n.Status.Devices[0].ExtendedResource = "cpu", "example.com/nic"
					cluster := newCluster(n, objects...)
					evicts(cluster)
					err := cluster.Run(t.Context(), "node-1", "0", Options{Wait: true, Evict: true, Force: force, Timeout: 10 * time.Second})
					said := slices.DeleteFunc(slices.Clone(cluster.said), func(line string) bool { return line != elsewhere && line != without })
					switch evicted := cluster.evictions(); {
					case c.want == "" && (len(evicted) != 1 || len(said) > 0):
						t.Errorf("evicted %v, said %q", evicted, said)
					case c.want != "" && (len(evicted) > 0 || !slices.Equal(said, []string{c.want}) || err == nil ||
						!strings.HasPrefix(err.Error(), "GPUNode node-1 names only pods that cannot have its GPUs")):
						t.Errorf("evicted %v, said %q, error %v", evicted, said, err)
					}
				})
			})
		}
	}
}

func evicts(c *cluster) {
	c.client.PrependReactor("create", "pods/eviction", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, nil })
}

// TestRefusedBesideHolders: a pod that is refused keeps no holder from being evicted, and the wait ends with the last of them.
func TestRefusedBesideHolders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		victim := pod("victim", "ReplicaSet")
		victim.Spec.NodeName = "node-2"
		c := newCluster(node(byPod("infer"), byPod("victim")), pod("infer", "ReplicaSet"), victim)
		evicts(c)
		c.at = map[int]func(*v1alpha1.GPUNode){6: holders(byPod("victim"))}
		start := time.Now()
		err := c.Run(t.Context(), "node-1", "0", Options{Wait: true, Evict: true, Timeout: time.Hour})
		if took := time.Since(start); err == nil || took != 4*time.Second || !strings.Contains(err.Error(), ": these are not evicted. ") {
			t.Errorf("after %s: %v", took, err)
		}
		want := []string{
			"gpu-0 of node-1 is taken out of service: its agent withdraws it from claims and limits",
			"gpu-0 of node-1 is held by ml/infer (limits); ml/victim (limits)",
			"GPUNode names pod ml/victim, which is not on node node-1: not evicted", "evicting pod ml/infer",
			"gpu-0 of node-1 is held by ml/victim (limits)",
		}
		if diff := gocmp.Diff(want, c.said); diff != "" {
			t.Error(diff)
		}
	})
}

func TestOnlyFor(t *testing.T) {
	refused := map[types.UID]bool{"a": true, "b": true}
	named := func(uids ...types.UID) (pods []v1alpha1.PodReference) {
		for _, uid := range uids {
			pods = append(pods, v1alpha1.PodReference{UID: uid})
		}
		return pods
	}
	for name, c := range map[string]struct {
		waits Waiting
		want  bool
	}{
		"refused":                {Waiting{Holders: [][]v1alpha1.PodReference{named("a"), named("b", "a")}}, true},
		"one is not":             {Waiting{Holders: [][]v1alpha1.PodReference{named("a"), named("c")}}, false},
		"one of a holder is not": {Waiting{Holders: [][]v1alpha1.PodReference{named("a", "c")}}, false},
		"a claim":                {Waiting{Holders: [][]v1alpha1.PodReference{named("a"), nil}}, false},
		"no answer":              {Waiting{Unanswered: true}, false},
	} {
		if got := c.waits.OnlyFor(refused); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// TestNamesThatChange: a GPUNode that names other pods at each look does not lead one drain through the cluster.
func TestNamesThatChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(node())
		c.at = map[int]func(*v1alpha1.GPUNode){}
		for i := range 2 * mostPods {
			c.at[i+2] = holders(byPod(fmt.Sprint("a-", i)), byPod(fmt.Sprint("b-", i)))
		}
		err := c.Run(t.Context(), "node-1", "0", Options{Wait: true, Evict: true, Timeout: time.Hour})
		if err == nil || !strings.Contains(err.Error(), "has named more than 512 pods") {
			t.Errorf("got %v", err)
		}
		reads := 0
		for _, action := range c.client.Actions() {
			if action.Matches("get", "pods") {
				reads++
			}
		}
		if reads != mostPods {
			t.Errorf("%d pods were read", reads)
		}
	})
}

// TestEvictionNeedsClaims: a pod whose claim the user may not read is not evicted.
func TestEvictionNeedsClaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(node(byClaim("train")), byName(pod("train", "Job"), "train-gpu"))
		evicts(c)
		deny(c, "get")
		err := c.Run(t.Context(), "node-1", "0", Options{Wait: true, Evict: true, Timeout: time.Hour})
		if !apierrors.IsForbidden(err) || len(c.evictions()) > 0 {
			t.Errorf("evicted %v, error %v", c.evictions(), err)
		}
	})
}

func deny(c *cluster, verb string) {
	c.client.PrependReactor(verb, "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(resourceapi.Resource("resourceclaims"), "", errors.New("no"))
	})
}

// TestClaimsThatAreNotPrepared: while the controller is down the GPUNode does not list a claim that was allocated a GPU, and kubelet prepares
// it all the same.
func TestClaimsThatAreNotPrepared(t *testing.T) {
	const withdrawn, free = "gpu-0 of node-1 is taken out of service: its agent withdraws it from claims and limits", "gpu-0 of node-1 is free"
	admin := claim("c", "gpu.nvidia.com", "node-1")
	admin.Status.Allocation.Devices.Results[0].AdminAccess = ptr.To(true)
	other := claim("c", "gpu.nvidia.com", "node-1")
	other.Status.Allocation.Devices.Results[0].Device = "gpu-1"
	part := claim("c", "gpu.nvidia.com", "node-1/gpu-00")
	part.Status.Allocation.Devices.Results[0].Device = "gpu-0-mig-1g10gb-19-0"
	for name, c := range map[string]struct {
		claim *resourceapi.ResourceClaim
		held  bool
	}{
		"allocated":                {claim("c", "gpu.nvidia.com", "node-1"), true},
		"a partition":              {part, true},
		"another GPU":              {other, false},
		"another node":             {claim("c", "gpu.nvidia.com", "node-2"), false},
		"another driver":           {claim("c", "nic.example.com", "node-1"), false},
		"admin access":             {admin, false},
		"the user may not see it ": {claim("c", "gpu.nvidia.com", "node-1"), false},
		"claims are not served":    {claim("c", "gpu.nvidia.com", "node-1"), false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cluster := newCluster(node(), c.claim)
				want, took := []string{withdrawn, free}, 2*time.Second
				if strings.HasPrefix(name, "the user") {
					deny(cluster, "list")
					want = []string{withdrawn, "note: you may not list ResourceClaims of all namespaces. Only GPUNode node-1 says whether one was allocated a GPU " +
						"and is not prepared yet", free}
				}
				if name == "claims are not served" {
					cluster.client.PrependReactor("*", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
						return true, nil, apierrors.NewGenericServerResponse(404, "list", resourceapi.Resource("resourceclaims"), "", "404 page not found", 0, true)
					})
				}
				if c.held {
					want, took = []string{withdrawn, "gpu-0 of node-1 is held by claim ml/c, not prepared yet", free}, 9*time.Second
					cluster.at = map[int]func(*v1alpha1.GPUNode){9: func(*v1alpha1.GPUNode) {
						if err := cluster.client.ResourceV1().ResourceClaims("ml").Delete(t.Context(), "c", metav1.DeleteOptions{}); err != nil {
							t.Error(err)
						}
					}}
				}
				start := time.Now()
				if err := cluster.Run(t.Context(), "node-1", "0", Options{Wait: true, Timeout: time.Hour}); err != nil {
					t.Error(err)
				}
				if diff := gocmp.Diff(want, cluster.said); diff != "" || time.Since(start) != took {
					t.Errorf("after %s:\n%s", time.Since(start), diff)
				}
				lists := 0
				for _, action := range cluster.client.Actions() {
					if action.Matches("list", "resourceclaims") {
						lists++
					}
				}
				if most := map[bool]int{false: 1, true: 2}[c.held]; lists != most {
					t.Errorf("claims were listed %d times, want %d", lists, most)
				}
			})
		})
	}
}

// TestReadsAreRepeated: an API server that is away for a while does not end a drain, which says so once.
func TestReadsAreRepeated(t *testing.T) {
	away := apierrors.NewInternalError(errors.New("etcd is away"))
	for name, c := range map[string]struct {
		verb, resource string
		fails          map[int]error // reads of the GPUNode
		want           string
	}{
		"the GPUNode":         {"", "", map[int]error{3: away, 4: errors.New("connection refused")}, "get GPUNodes: Internal error occurred: etcd is away"},
		"the list of claims":  {"list", "resourceclaims", nil, "list ResourceClaims: Internal error occurred: etcd is away"},
		"a claim of the list": {"get", "resourceclaims", nil, "get claim ml/c: Internal error occurred: etcd is away"},
		"a pod to evict":      {"get", "pods", nil, "get pod ml/train: Internal error occurred: etcd is away"},
		"a claim of a pod":    {"get", "resourceclaims", nil, "get claim ml/train-gpu of pod train: Internal error occurred: etcd is away"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cluster := newCluster(node(), byName(pod("train", "Job"), "train-gpu"), claim("train-gpu", "gpu.nvidia.com", "node-1"))
				evicts(cluster)
				switch name {
				case "a claim of the list":
					cluster = newCluster(node(), claim("c", "gpu.nvidia.com", "node-1"))
				case "a pod to evict", "a claim of a pod":
					cluster.node = node(byClaim("train"))
				}
				failed := 0
				cluster.client.PrependReactor(cmp.Or(c.verb, "none"), cmp.Or(c.resource, "none"), func(clienttesting.Action) (bool, runtime.Object, error) {
					if failed == 2 {
						return false, nil, nil
					}
					failed++
					return true, nil, away
				})
				cluster.fails = c.fails
				cluster.at = map[int]func(*v1alpha1.GPUNode){20: func(n *v1alpha1.GPUNode) {
					holders()(n)
					for _, of := range []string{"c", "train-gpu"} {
						_ = cluster.client.Tracker().Delete(resourceapi.SchemeGroupVersion.WithResource("resourceclaims"), "ml", of)
					}
				}}
				err := cluster.Run(t.Context(), "node-1", "0", Options{Wait: true, Evict: true, Timeout: time.Hour})
				said := slices.DeleteFunc(slices.Clone(cluster.said), func(line string) bool { return !strings.HasPrefix(line, "error") })
				if want := []string{"error, will retry every 1s: " + c.want}; err != nil || !slices.Equal(said, want) || failed != 2 && c.verb != "" {
					t.Errorf("error %v, said %q, want %q, %d failed", err, said, want, failed)
				}
			})
		})
	}
}

// What a user may not read does not come by waiting.
func TestForbiddenReadEndsTheWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(node(byPod("infer")))
		c.fails = map[int]error{3: apierrors.NewForbidden(v1alpha1.Resource.GroupResource(), "node-1", errors.New("no"))}
		start := time.Now()
		err := c.Run(t.Context(), "node-1", "0", Options{Wait: true, Timeout: time.Hour})
		if took := time.Since(start); !apierrors.IsForbidden(err) || took != time.Second {
			t.Errorf("after %s: %v", took, err)
		}
	})
}

// TestStaleAnswer: a GPU was under maintenance before, and the agent is cut off from the API server since. Its old answer does not count for
// the new request.
func TestStaleAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(node())
		if err := c.Run(t.Context(), "node-1", "0", Options{Wait: true, Timeout: time.Hour}); err != nil {
			t.Fatal(err)
		}
		c.away, c.said = true, nil
		if err := c.End(t.Context(), "node-1", "0"); err != nil {
			t.Fatal(err)
		}
		err := c.Run(t.Context(), "node-1", "0", Options{Wait: true, Timeout: time.Minute})
		if err == nil || !strings.HasPrefix(err.Error(), "not free after 1m0s: gpu-0 is not withdrawn yet") {
			t.Errorf("said %q, error %v", c.said, err)
		}
	})
}

// TestEndedByAnother: a GPU that is no longer under maintenance is not called free, even before the agent has answered that change.
func TestEndedByAnother(t *testing.T) {
	for name, change := range map[string]func(*v1alpha1.GPUNode){
		"GPUNode is gone":   nil,
		"undrain":           func(n *v1alpha1.GPUNode) { n.Spec.Maintenance = nil },
		"GPUNode was anew":  func(n *v1alpha1.GPUNode) { n.UID = "next" },
		"GPUNode was empty": func(n *v1alpha1.GPUNode) { n.UID, n.Spec.Maintenance = "next", nil },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(node())
				if c.at = map[int]func(*v1alpha1.GPUNode){3: change}; change == nil {
					c.fails = map[int]error{3: apierrors.NewNotFound(v1alpha1.Resource.GroupResource(), "node-1")}
				}
				err := c.Run(t.Context(), "node-1", "0", Options{Wait: true, Timeout: time.Minute})
				if err == nil || !strings.HasPrefix(err.Error(), "gpu-0 of node-1 is no longer under maintenance") {
					t.Errorf("said %q, error %v", c.said, err)
				}
			})
		})
	}
}
