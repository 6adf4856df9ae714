// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"cmp"
	"context"
	"slices"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	resourceinformers "k8s.io/client-go/informers/resource/v1"
	"k8s.io/client-go/kubernetes"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// RuleTaints returns the taints of the rules that may select devices of a node, for GPUNode.spec, in a stable order. The agent knows in
// which pool a device is. A rule for a device without a pool concerns the nodes that have the device, or the GPU of such a partition. If there
// are too many rules, those that evict come first. It is a pure function.
func RuleTaints(rules []*resourceapi.DeviceTaintRule, driver, node string, devices []v1alpha1.DeviceStatus) []v1alpha1.RuleTaint {
	var taints []v1alpha1.RuleTaint
	for _, rule := range rules {
		selector, taint := rule.Spec.DeviceSelector, rule.Spec.Taint
		effect := v1alpha1.TaintEffect(taint.Effect)
		if selector == nil || effect != v1alpha1.TaintNoSchedule && effect != v1alpha1.TaintNoExecute || selector.Driver != nil && *selector.Driver != driver {
			continue // the scheduler takes an effect that it does not know for None
		}
		relayed := v1alpha1.RuleTaint{Rule: rule.Name, Taint: v1alpha1.Taint{
			Key: taint.Key, Value: taint.Value, Effect: effect, Since: cmp.Or(taint.TimeAdded, &rule.CreationTimestamp),
		}}
		if selector.Pool != nil {
			if relayed.Pool = *selector.Pool; device.NodeOfPool(relayed.Pool) != node {
				continue
			}
		}
		if selector.Device != nil {
			relayed.Device = *selector.Device
			has := func(d v1alpha1.DeviceStatus) bool {
				return availability.StatusName(d).GPU == device.GPUName(relayed.Device)
			}
			if relayed.Device == "" || selector.Pool == nil && !slices.ContainsFunc(devices, has) {
				continue
			}
		}
		taints = append(taints, relayed)
	}
	slices.SortFunc(taints, func(a, b v1alpha1.RuleTaint) int {
		return cmp.Or(cmp.Compare(a.Effect, b.Effect), cmp.Compare(a.Rule, b.Rule)) // "NoExecute" comes before "NoSchedule"
	})
	return taints
}

// tainter writes GPUNode.spec.taints. TestDeviceTaintRule fails without it.
type tainter struct {
	cluster
	rules *ruleCache
}

// devicesChanged leaves out what changes no taint. A rule may select a new device.
var devicesChanged = changed(func(n *v1alpha1.GPUNode) any {
	names := make([]string, 0, len(n.Status.Devices))
	for _, d := range n.Status.Devices {
		names = append(names, d.Name)
	}
	return []any{n.UID, n.Generation, names}
})

func (r *tainter) register(m manager.Manager) error {
	return forGPUNodes(m, "taints", 4, devicesChanged).
		WatchesRawSource(r.rules.changes(handler.EnqueueRequestsFromMapFunc(r.nodes))).
		Complete(r)
}

// nodes returns the nodes that a rule concerns, or has concerned.
func (r *tainter) nodes(ctx context.Context, o client.Object) (requests []reconcile.Request) {
	rule, ok := o.(*resourceapi.DeviceTaintRule)
	if !ok {
		return nil
	}
	var list v1alpha1.GPUNodeList
	if err := r.client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		klog.FromContext(ctx).Error(err, "Cannot tell which nodes a DeviceTaintRule concerns", "rule", rule.Name)
		return nil
	}
	for _, n := range list.Items {
		had := slices.ContainsFunc(n.Spec.Taints, func(t v1alpha1.RuleTaint) bool { return t.Rule == rule.Name })
		if had || len(RuleTaints([]*resourceapi.DeviceTaintRule{rule}, r.driver, n.Name, n.Status.Devices)) > 0 {
			requests = append(requests, reconcile.Request{NamespacedName: types.NamespacedName{Name: n.Name}})
		}
	}
	return requests
}

// taints returns those that the spec of a node has to have.
func (r *tainter) taints(node *v1alpha1.GPUNode) []v1alpha1.RuleTaint {
	devices := node.Status.Devices
	if !slices.ContainsFunc(devices, func(d v1alpha1.DeviceStatus) bool { return !isNamedByUUID(d) }) {
		// Without a driver the status has at most GPUs that are held, by UUID. Rules for single devices stay, so that the agent does not offer a
		// tainted device when the driver returns.
		devices = nil
		for _, t := range node.Spec.Taints {
			devices = append(devices, v1alpha1.DeviceStatus{Name: device.GPUName(t.Device)})
		}
	}
	return RuleTaints(r.rules.list(), r.driver, node.Name, devices)
}

// Reconcile implements reconcile.Reconciler for one node. It is idempotent.
func (r *tainter) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	node := &v1alpha1.GPUNode{}
	if err := r.client.Get(ctx, request.NamespacedName, node); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	taints := r.taints(node)
	if len(taints) > v1alpha1.MaxTaints {
		// The API server would refuse all of them.
		klog.FromContext(ctx).Info("Relaying only a part of the DeviceTaintRules", "node", node.Name, "rules", len(taints), "most", v1alpha1.MaxTaints)
		taints = taints[:v1alpha1.MaxTaints]
	}
	if apiequality.Semantic.DeepEqual(taints, node.Spec.Taints) {
		return reconcile.Result{}, nil
	}
	return reconcile.Result{}, patchSpec(ctx, r.client, node, "taints", taints)
}

// ruleCache is the cache of DeviceTaintRules. It is empty where the API server does not serve them, as before Kubernetes 1.37. It is a
// manager.Runnable.
type ruleCache struct {
	api      kubernetes.Interface
	informer toolscache.SharedIndexInformer
	// known is closed once it is known which rules there are.
	known   chan struct{}
	isKnown sync.Once
}

func newRuleCache(api kubernetes.Interface) *ruleCache {
	return &ruleCache{
		api: api, informer: resourceinformers.NewDeviceTaintRuleInformer(api, 0, toolscache.Indexers{}),
		known: make(chan struct{}),
	}
}

// NeedLeaderElection implements manager.LeaderElectionRunnable: standby replicas fill the cache too.
func (c *ruleCache) NeedLeaderElection() bool { return false }

// unservedPolls is how often the API server must answer in a row that it does not serve rules. During an upgrade another API server of the
// control plane may serve them, and the taints of nodes stay.
const unservedPolls = 10

// Start implements manager.Runnable. The watch of a kind that the API server does not serve, or not to this controller, would fail forever.
func (c *ruleCache) Start(ctx context.Context) error {
	refused, unserved := false, 0
	err := wait.PollUntilContextCancel(ctx, idleInterval, true, func(ctx context.Context) (bool, error) {
		_, err := c.api.ResourceV1().DeviceTaintRules().List(ctx, metav1.ListOptions{Limit: 1})
		switch {
		case err == nil:
			return true, nil
		case apierrors.IsNotFound(err):
			if unserved++; unserved == unservedPolls {
				c.isKnown.Do(func() { close(c.known) }) // there are none
			}
		case apierrors.IsForbidden(err):
			if !refused {
				klog.FromContext(ctx).Info("Not following DeviceTaintRules: the controller may not read them. Nodes keep the taints that they have",
					"reason", err.Error())
			}
			refused, unserved = true, 0
		default:
			// An informer would ask again as well, but would not find out that the kind is not served.
			klog.FromContext(ctx).Info("Cannot list DeviceTaintRules, trying again", "after", idleInterval, "reason", err.Error())
			unserved = 0
		}
		return false, nil
	})
	if err != nil {
		return nil // ctx is done
	}
	go func() {
		if toolscache.WaitForCacheSync(ctx.Done(), c.informer.HasSynced) {
			c.isKnown.Do(func() { close(c.known) })
		}
	}()
	c.informer.RunWithContext(ctx)
	return nil
}

func (c *ruleCache) list() []*resourceapi.DeviceTaintRule {
	var rules []*resourceapi.DeviceTaintRule
	for _, o := range c.informer.GetStore().List() {
		if rule, ok := o.(*resourceapi.DeviceTaintRule); ok {
			rules = append(rules, rule)
		}
	}
	return rules
}

// changes calls a handler for rules whose spec changed. The reconciler's workers start once it is known which rules there are.
func (c *ruleCache) changes(h handler.EventHandler) source.SyncingSource {
	return filledSource{&source.Informer{Informer: c.informer, Handler: h, Predicates: []predicate.Predicate{
		changed(func(r *resourceapi.DeviceTaintRule) any { return r.Spec }),
	}}, "DeviceTaintRules", c.synced}
}

// synced waits until it is known which rules there are. It returns false if ctx is done first.
func (c *ruleCache) synced(ctx context.Context) bool {
	select {
	case <-c.known:
		return true
	case <-ctx.Done():
		return false
	}
}
