// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	resourceinformers "k8s.io/client-go/informers/resource/v1"
	clientfake "k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/dynamic-resource-allocation/resourceslice/tracker"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// TestRulesAsTheScheduler: for 10,000 random rules and 10,000 slices, what the controller relays and the agent selects from it is what the
// scheduler's own code adds to the devices.
func TestRulesAsTheScheduler(t *testing.T) {
	t.Parallel()
	const rounds, each = 200, 50
	selected := 0
	for round := range rounds {
		r := rand.New(rand.NewPCG(1, uint64(round)))
		objects, rules, slicesOfNode := randomRules(r, each)
		patched := patchedBy(t, objects)
		for node, published := range slicesOfNode {
			var devices []v1alpha1.DeviceStatus
			for _, s := range published {
				for _, d := range s.Spec.Devices {
					devices = append(devices, v1alpha1.DeviceStatus{Name: d.Name})
				}
			}
			relayed := RuleTaints(rules, testDriver, node, devices)
			for _, s := range published {
				for i, d := range s.Spec.Devices {
					var want, got []string
					for _, taint := range patched[s.Name].Spec.Devices[i].Taints {
						if taint.Effect == resourceapi.DeviceTaintEffectNoSchedule || taint.Effect == resourceapi.DeviceTaintEffectNoExecute {
							want = append(want, v1alpha1.Taint{Key: taint.Key, Value: taint.Value, Effect: v1alpha1.TaintEffect(taint.Effect)}.String())
						}
					}
					for _, rule := range relayed {
						if s.Spec.Driver == testDriver && rule.Selects(s.Spec.Pool.Name, d.Name) {
							got = append(got, rule.Taint.String())
						}
					}
					slices.Sort(want)
					slices.Sort(got)
					if s.Spec.Driver != testDriver {
						continue
					}
					selected += len(got)
					if !slices.Equal(got, want) {
						t.Fatalf("round %d, %s of pool %s: %v, the scheduler has %v", round, d.Name, s.Spec.Pool.Name, got, want)
					}
				}
			}
		}
	}
	if selected < rounds*each {
		t.Errorf("the rules select %d devices", selected)
	}
}

// randomRules returns as many rules and slices of some nodes.
func randomRules(r *rand.Rand, n int) (objects []runtime.Object, rules []*resourceapi.DeviceTaintRule, byNode map[string][]*resourceapi.ResourceSlice) {
	pick := func(of ...string) string { return of[r.IntN(len(of))] }
	maybe := func(of ...string) *string {
		if r.IntN(2) == 0 {
			return nil
		}
		return ptr.To(pick(of...))
	}
	byNode = map[string][]*resourceapi.ResourceSlice{}
	names := []string{"gpu-0", "gpu-1", "gpu-10", "gpu-0-mig-1g10gb-19-0", "gpu-1-mig-3g40gb-9-4", "nic-0"}
	for i := range n {
		node := fmt.Sprint("node-", r.IntN(20))
		s := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("slice-", i)}, Spec: resourceapi.ResourceSliceSpec{
			Driver: pick(testDriver, testDriver, testDriver, "nic.example.com"), NodeName: &node,
			Pool: resourceapi.ResourcePool{Name: pick(node, node+"/gpu-00", node+"/gpu-01"), ResourceSliceCount: 1},
		}}
		for _, name := range names {
			if r.IntN(2) == 0 {
				s.Spec.Devices = append(s.Spec.Devices, resourceapi.Device{Name: name})
			}
		}
		byNode[node] = append(byNode[node], s)
		objects = append(objects, s)
	}
	for i := range n {
		node := fmt.Sprint("node-", r.IntN(21))
		rule := &resourceapi.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("rule-", i)}, Spec: resourceapi.DeviceTaintRuleSpec{
			Taint: resourceapi.DeviceTaint{Key: fmt.Sprint("example.com/rule-", i), Value: pick("", "fan"), Effect: resourceapi.DeviceTaintEffect(
				pick("None", "NoSchedule", "NoExecute", "Later"))},
		}}
		if r.IntN(20) > 0 {
			rule.Spec.DeviceSelector = &resourceapi.DeviceTaintSelector{
				Driver: maybe(testDriver, testDriver, "nic.example.com", ""), Pool: maybe(node, node+"/gpu-00", node+"/gpu-01", "node", ""),
				Device: maybe(append(names, "gpu-7", "")...),
			}
		}
		rules, objects = append(rules, rule), append(objects, rule)
	}
	return objects, rules, byNode
}

// patchedBy returns the slices as the scheduler has them.
func patchedBy(t *testing.T, objects []runtime.Object) map[string]*resourceapi.ResourceSlice {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	api := clientfake.NewClientset(objects...)
	factory := informers.NewSharedInformerFactory(api, 0)
	resources := factory.Resource().V1()
	tracked, err := tracker.StartTracker(ctx, tracker.Options{
		EnableDeviceTaintRules: true, SliceInformer: resourceinformers.ToTypedResourceSliceInformer(resources.ResourceSlices()),
		TaintInformer: resourceinformers.ToTypedDeviceTaintRuleInformer(resources.DeviceTaintRules()), KubeClient: api,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer tracked.Stop()
	factory.Start(ctx.Done())
	if !toolscache.WaitFor(ctx, "", tracked.HasSyncedChecker()) {
		t.Fatal("the tracker does not sync")
	}
	list, err := tracked.ListPatchedResourceSlices()
	if err != nil {
		t.Fatal(err)
	}
	patched := map[string]*resourceapi.ResourceSlice{}
	for _, s := range list {
		patched[s.Name] = s
	}
	return patched
}

// newRule is a rule for devices of Tandem's driver.
func newRule(name string, change ...func(*resourceapi.DeviceTaintRule)) *resourceapi.DeviceTaintRule {
	r := &resourceapi.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.Unix(1, 0)}, Spec: resourceapi.DeviceTaintRuleSpec{
		DeviceSelector: &resourceapi.DeviceTaintSelector{Driver: ptr.To(testDriver)},
		Taint:          resourceapi.DeviceTaint{Key: "example.com/repair", Value: "fan", Effect: resourceapi.DeviceTaintEffectNoSchedule},
	}}
	for _, c := range change {
		c(r)
	}
	return r
}

func inPool(pool string) func(*resourceapi.DeviceTaintRule) {
	return func(r *resourceapi.DeviceTaintRule) { r.Spec.DeviceSelector.Pool = &pool }
}

func ofDevice(name string) func(*resourceapi.DeviceTaintRule) {
	return func(r *resourceapi.DeviceTaintRule) { r.Spec.DeviceSelector.Device = &name }
}

// rules is a cache with these rules.
func rules(t *testing.T, of ...*resourceapi.DeviceTaintRule) *ruleCache {
	t.Helper()
	c := newRuleCache(clientfake.NewClientset())
	for _, r := range of {
		if err := c.informer.GetStore().Add(r); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

// TestTainter: a rule is written once, follows the devices of the node, and ends.
func TestTainter(t *testing.T) {
	evicts := newRule("a", inPool("node-1/gpu-03"), ofDevice("gpu-3"), func(r *resourceapi.DeviceTaintRule) {
		r.Spec.Taint.Effect, r.Spec.Taint.TimeAdded = resourceapi.DeviceTaintEffectNoExecute, ptr.To(metav1.Unix(2, 0))
	})
	w := newWorld(t, interceptor.Funcs{}, gpuNode())
	r := &tainter{cluster: w.cluster(), rules: rules(t, newRule("b"), evicts, newRule("later", ofDevice("gpu-9-mig-1g10gb-19-0")), newRule("elsewhere", inPool("node-10")))}
	r.client = w.cached()
	w.set(func(s *v1alpha1.GPUNodeStatus) { s.Devices = []v1alpha1.DeviceStatus{{Name: "gpu-3", UUID: "GPU-3"}} })
	w.twice(r, "node-1")
	fan := v1alpha1.Taint{Key: "example.com/repair", Value: "fan", Effect: v1alpha1.TaintNoSchedule, Since: ptr.To(metav1.Unix(1, 0))}
	want := []v1alpha1.RuleTaint{{Rule: "a", Pool: "node-1/gpu-03", Device: "gpu-3", Taint: fan}, {Rule: "b", Taint: fan}}
	want[0].Effect, want[0].Since = v1alpha1.TaintNoExecute, ptr.To(metav1.Unix(2, 0))
	if diff := cmp.Diff(want, w.gpuNode().Spec.Taints); diff != "" {
		t.Error(diff)
	}
	w.set(func(s *v1alpha1.GPUNodeStatus) { s.Devices = append(s.Devices, v1alpha1.DeviceStatus{Name: "gpu-9"}) })
	w.twice(r, "node-1")
	if now := w.gpuNode().Spec.Taints; len(now) != 3 || now[2].Rule != "later" {
		t.Errorf("with the GPU of a partition: %v", now)
	}
	for _, held := range [][]v1alpha1.DeviceStatus{nil, {{Name: "GPU-9", UUID: "GPU-9"}}} {
		w.set(func(s *v1alpha1.GPUNodeStatus) { s.Devices = held })
		w.twice(r, "node-1")
		if now := w.gpuNode().Spec.Taints; len(now) != 3 {
			t.Errorf("while the driver is away and %v is held: %v", held, now)
		}
	}
	r.rules = rules(t)
	w.twice(r, "node-1")
	if now := w.gpuNode().Spec.Taints; len(now) > 0 {
		t.Errorf("without a rule: %v", now)
	}
	w.want(map[string]int{"patch GPUNode": 3})

	var many []*resourceapi.DeviceTaintRule
	for i := range v1alpha1.MaxTaints {
		many = append(many, newRule(fmt.Sprint("many-", i)))
	}
	r.rules = rules(t, append(many, evicts)...)
	w.twice(r, "node-1")
	if now := w.gpuNode().Spec.Taints; len(now) != v1alpha1.MaxTaints || now[0].Rule != "a" {
		t.Errorf("of too many rules: %d, first %v", len(now), now[0])
	}
}

// TestNewDevicesAreTainted: a GPUNode whose devices or spec change is looked at, and one whose devices get a holder is not.
func TestNewDevicesAreTainted(t *testing.T) {
	before := gpuNode()
	for name, c := range map[string]struct {
		change func(*v1alpha1.GPUNode)
		want   bool
	}{
		"a device": {func(n *v1alpha1.GPUNode) {
			n.Status.Devices = append(n.Status.Devices, v1alpha1.DeviceStatus{Name: "gpu-8"})
		}, true},
		"the spec":       {func(n *v1alpha1.GPUNode) { n.Generation++ }, true},
		"another object": {func(n *v1alpha1.GPUNode) { n.UID = "other" }, true},
		"a holder":       {func(n *v1alpha1.GPUNode) { n.Status.Devices[0].Holders = make([]v1alpha1.DeviceHolder, 1) }, false},
	} {
		after := before.DeepCopy()
		c.change(after)
		if got := devicesChanged.Update(event.UpdateEvent{ObjectOld: before, ObjectNew: after}); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// TestNodesOfARule: a rule with a pool concerns one node, one for a device those that have it, and one for the driver all. A node that a rule
// has concerned is told of its end.
func TestNodesOfARule(t *testing.T) {
	var objects []client.Object
	for i := range 5 {
		n := gpuNode()
		n.Name, n.UID = fmt.Sprint("node-", i), ""
		n.Status.Devices = []v1alpha1.DeviceStatus{{Name: "gpu-0"}, {Name: fmt.Sprint("gpu-", 10+i)}}
		if i == 4 {
			n.Spec.Taints = []v1alpha1.RuleTaint{{Rule: "had"}}
		}
		objects = append(objects, n)
	}
	r := &tainter{cluster: newWorld(t, interceptor.Funcs{}, objects...).cluster()}
	for _, c := range []struct {
		rule *resourceapi.DeviceTaintRule
		want []string
	}{
		{newRule("driver"), []string{"node-0", "node-1", "node-2", "node-3", "node-4"}},
		{newRule("pool", inPool("node-2/gpu-00")), []string{"node-2"}},
		{newRule("device", ofDevice("gpu-13")), []string{"node-3"}},
		{newRule("nothing", ofDevice("gpu-99")), nil},
		{newRule("other", func(r *resourceapi.DeviceTaintRule) { r.Spec.DeviceSelector.Driver = ptr.To("nic.example.com") }), nil},
		{newRule("had", func(r *resourceapi.DeviceTaintRule) { r.Spec.Taint.Effect = resourceapi.DeviceTaintEffectNone }), []string{"node-4"}},
	} {
		var got []string
		for _, request := range r.nodes(t.Context(), c.rule) {
			got = append(got, request.Name)
		}
		slices.Sort(got)
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.rule.Name, got, c.want)
		}
	}
}

// TestRuleCache: where the API server does not serve the kind for some minutes there are no rules, and where the controller may not read them
// it is not known which there are. In both cases one request a minute finds out whether that has changed, also after the API server has failed.
func TestRuleCache(t *testing.T) {
	gvr := resourceapi.Resource("devicetaintrules")
	for name, c := range map[string]struct {
		err   error
		known bool
		once  error // of one request, the first unless at is set
		at    int32
	}{
		"not served":                   {apierrors.NewNotFound(gvr, ""), true, nil, 0},
		"forbidden":                    {apierrors.NewForbidden(gvr, "", nil), false, nil, 0},
		"served":                       {nil, true, nil, 0},
		"away, and then not served":    {apierrors.NewNotFound(gvr, ""), true, apierrors.NewServiceUnavailable("the API server starts"), 0},
		"too busy, and then forbidden": {apierrors.NewForbidden(gvr, "", nil), false, apierrors.NewTooManyRequests("later", 1), 0},
		"away, and then served":        {nil, true, errors.New("connection refused"), 0},
		"away between two answers":     {apierrors.NewNotFound(gvr, ""), false, errors.New("connection refused"), 5},
		"away all the time":            {apierrors.NewServiceUnavailable("the API server starts"), false, nil, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				api := clientfake.NewClientset(newRule("a"))
				var refuses atomic.Bool
				var requests atomic.Int32
				refuses.Store(c.err != nil)
				api.PrependReactor("list", "devicetaintrules", func(clienttesting.Action) (bool, runtime.Object, error) {
					if requests.Add(1) == max(c.at, 1) && c.once != nil {
						return true, nil, c.once
					}
					return refuses.Load(), nil, c.err
				})
				cache := newRuleCache(api)
				done := make(chan error, 1)
				go func() { done <- cache.Start(ctx) }()
				known := func() bool {
					synctest.Wait()
					select {
					case <-cache.known:
						return true
					default:
						return false
					}
				}
				if c.once != nil {
					synctest.Wait()
					time.Sleep(idleInterval)
				}
				time.Sleep((unservedPolls - 2) * idleInterval)
				if got := known(); got != (c.err == nil) {
					t.Errorf("known too early: %t after %d requests", got, requests.Load())
				}
				time.Sleep(2 * idleInterval)
				if got := known(); got != c.known || c.err != nil && (requests.Load() > 12 || len(cache.list()) > 0) {
					t.Errorf("known: %t after %d requests, with %v", got, requests.Load(), cache.list())
				}
				refuses.Store(false)
				time.Sleep(2 * idleInterval)
				if got := cache.list(); !known() || len(got) != 1 || got[0].Name != "a" {
					t.Errorf("once it is served: %v", got)
				}
				cancel()
				if err := <-done; err != nil {
					t.Error(err)
				}
			})
		})
	}
}
