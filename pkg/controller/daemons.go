// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/internal/regarding"
	"github.com/tandem-gpu/tandem/pkg/mps"
)

// DaemonPlan contains the changes to the daemons' pods of a node.
type DaemonPlan struct {
	Create []v1alpha1.MPSDaemon
	Delete []*corev1.Pod
	// Waiting are the daemons that do not run and are not starting.
	Waiting []v1alpha1.WaitingDaemon
	// Again is when to plan again if nothing changes; zero for never.
	Again time.Duration
}

const (
	// startsIn is how long a daemon's pod may take to become ready before GPUNode reports why it is not.
	startsIn = 15 * time.Second
	// failsFor is the age at which a failed pod is replaced. Without it a pod that kubelet rejects would be created in a loop.
	failsFor = 10 * time.Second
)

// PlanDaemons returns the pods to create and to delete for a node's daemons. It is a pure function.
func PlanDaemons(node *v1alpha1.GPUNode, pods []*corev1.Pod, config DaemonPods, now time.Time) DaemonPlan {
	var plan DaemonPlan
	wait := func(d v1alpha1.MPSDaemon, format string, args ...any) {
		plan.Waiting = append(plan.Waiting, v1alpha1.WaitingDaemon{Name: d.Name, Message: oneLine(fmt.Sprintf(format, args...))})
	}
	again := func(in time.Duration) {
		if plan.Again == 0 || in < plan.Again {
			plan.Again = in
		}
	}
	made := map[string][]*corev1.Pod{}
	for _, pod := range pods {
		made[pod.Labels[daemonLabel]] = append(made[pod.Labels[daemonLabel]], pod)
	}
	wanted := map[string]bool{}
	for _, d := range node.Status.Daemons {
		pod := podOf(node, d, made[d.Name])
		switch {
		case pod == nil && len(made[d.Name]) > 0:
			continue // The pod was created for an earlier GPUNode of this name, or for other settings. The next one is created when it is gone.
		case pod == nil:
			// A pod that an older controller created stays for its clients.
			if err := config.check(d); err != nil {
				wait(d, "no pod is created for it: %v", err)
				continue
			}
			plan.Create = append(plan.Create, d)
			continue
		}
		age := now.Sub(pod.CreationTimestamp.Time)
		switch {
		case pod.DeletionTimestamp != nil:
			// The next one is created when it is gone.
		case podstatus.Ended(pod) && age >= failsFor:
			wait(d, "pod %s has failed and is replaced: %s", pod.Name, because(pod))
			continue
		case podstatus.Ended(pod):
			wait(d, "pod %s has failed: %s", pod.Name, because(pod))
			again(failsFor - age)
		case podstatus.Ready(pod):
		case because(pod) != "":
			wait(d, "pod %s does not run: %s", pod.Name, because(pod))
		case age >= startsIn:
			wait(d, "pod %s is not ready %s after it was created: see its events", pod.Name, startsIn)
		default:
			again(startsIn - age)
		}
		wanted[pod.Name] = true
	}
	for _, name := range node.Status.UnknownDaemons {
		for _, pod := range made[name] {
			wanted[pod.Name] = true
		}
	}
	for _, pod := range pods {
		if pod.DeletionTimestamp == nil && !wanted[pod.Name] {
			plan.Delete = append(plan.Delete, pod)
		}
	}
	slices.SortFunc(plan.Waiting, func(a, b v1alpha1.WaitingDaemon) int { return cmp.Compare(a.Name, b.Name) })
	return plan
}

// podOf returns the pod of a daemon that this GPUNode owns and that has the daemon's settings; nil if there is none. An older controller may
// have created a second one under another name: podOf then returns the one to keep.
func podOf(node *v1alpha1.GPUNode, d v1alpha1.MPSDaemon, pods []*corev1.Pod) *corev1.Pod {
	var found *corev1.Pod
	hash := mps.Settings(d.MPSSettings).Hash()
	for _, pod := range pods {
		switch {
		case !metav1.IsControlledBy(pod, node) || pod.Annotations[settingsAnnotation] != hash:
		case found == nil || found.DeletionTimestamp != nil && pod.DeletionTimestamp == nil:
			found = pod
		case (found.DeletionTimestamp == nil) == (pod.DeletionTimestamp == nil) && pod.Name < found.Name:
			found = pod
		}
	}
	return found
}

// because returns why a pod does not run; empty if its status has no reason.
func because(pod *corev1.Pod) string {
	if podstatus.Ended(pod) {
		return strings.Trim(pod.Status.Reason+": "+pod.Status.Message, ": ")
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return c.Reason + ": " + c.Message
		}
	}
	for _, c := range pod.Status.ContainerStatuses {
		if ended := c.LastTerminationState.Terminated; ended != nil {
			return strings.Trim(fmt.Sprintf("its container ended with code %d: %s", ended.ExitCode, lastLine(ended.Message)), ": ")
		}
		if w := c.State.Waiting; w != nil && w.Reason != "" && w.Reason != "ContainerCreating" && w.Reason != "PodInitializing" {
			return strings.Trim(w.Reason+": "+w.Message, ": ")
		}
	}
	return ""
}

func lastLine(text string) string {
	text = strings.TrimSpace(text)
	return text[strings.LastIndex(text, "\n")+1:]
}

// oneLine returns a message of one line, short enough for a list of messages.
func oneLine(text string) string {
	return regarding.Shorten(strings.Join(strings.Fields(text), " "), 500)
}

// daemons runs the pods of the MPS daemons that GPUNodes request.
type daemons struct {
	cluster
	// pods reads the pods of daemons, including running ones. It is nil if the controller runs no daemons.
	pods   client.Reader
	config DaemonPods
}

// daemonCache returns a cache of the daemons' pods. Standby replicas fill it too.
func daemonCache(m manager.Manager, namespace string) (cache.Cache, error) {
	ours, err := labels.Parse(daemonLabel)
	if err != nil {
		return nil, fmt.Errorf("select the pods of MPS daemons: %w", err)
	}
	pods, err := cache.New(m.GetConfig(), cache.Options{
		HTTPClient: m.GetHTTPClient(), Scheme: m.GetScheme(), Mapper: m.GetRESTMapper(),
		DefaultTransform: cache.TransformStripManagedFields(),
		ByObject: map[client.Object]cache.ByObject{&corev1.Pod{}: {
			Namespaces: map[string]cache.Config{namespace: {}},
			Label:      ours,
		}},
	})
	if err != nil {
		return nil, fmt.Errorf("make cache of the pods of MPS daemons: %w", err)
	}
	if err := m.Add(indexedPods{pods}); err != nil {
		return nil, fmt.Errorf("add cache of the pods of MPS daemons: %w", err)
	}
	return pods, nil
}

// ownerIndex finds the pods of daemons by the name of their GPUNode.
const ownerIndex = "gpunode"

// ownerOf returns the values of ownerIndex for a pod.
func ownerOf(o client.Object) []string {
	if owner := metav1.GetControllerOf(o); owner != nil && owner.Kind == "GPUNode" {
		return []string{owner.Name}
	}
	return nil
}

// indexedPods adds ownerIndex when it starts, because that needs the API server. A reconciler that lists pods before fails and runs again.
type indexedPods struct{ cache.Cache }

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (indexedPods) NeedLeaderElection() bool { return false }

// Start implements manager.Runnable.
func (p indexedPods) Start(ctx context.Context) error {
	if err := p.IndexField(ctx, &corev1.Pod{}, ownerIndex, ownerOf); err != nil {
		return fmt.Errorf("index the pods of MPS daemons: %w", err)
	}
	return p.Cache.Start(ctx)
}

func (d *daemons) register(m manager.Manager) error {
	b := forGPUNodes(m, "daemons", 4, daemonsChanged)
	// Without daemons the controller may not read pods of its namespace.
	if d.config.Template != nil {
		pods, err := daemonCache(m, d.config.Namespace)
		if err != nil {
			return err
		}
		d.pods = pods
		b = b.WatchesRawSource(source.Kind(pods, &corev1.Pod{}, handler.TypedEnqueueRequestForOwner[*corev1.Pod](
			m.GetScheme(), m.GetRESTMapper(), &v1alpha1.GPUNode{}, handler.OnlyControllerOwner())))
	}
	return b.Complete(d)
}

// daemonsChanged selects the changes of daemons. A GPUNode's status changes once a second.
var daemonsChanged = changed(func(n *v1alpha1.GPUNode) any {
	return []any{n.UID, n.Status.Daemons, n.Status.UnknownDaemons, n.Spec.Daemons}
})

// Reconcile implements reconcile.Reconciler for one node. It is idempotent. The garbage collector deletes the pods of a
// GPUNode that is gone.
func (d *daemons) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	node := &v1alpha1.GPUNode{}
	if err := d.client.Get(ctx, request.NamespacedName, node); err != nil {
		setNode(d.metrics.daemonsWaiting, request.Name, 0)
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	pods, err := d.podsOf(ctx, node.Name)
	if err != nil {
		return reconcile.Result{}, err
	}
	plan := PlanDaemons(node, pods, d.config, d.now())
	var errs []error
	for _, pod := range plan.Delete {
		errs = append(errs, d.delete(ctx, pod))
	}
	for _, daemon := range plan.Create {
		if err := d.create(ctx, node, daemon); err != nil {
			errs = append(errs, err)
			plan.Waiting = append(plan.Waiting, v1alpha1.WaitingDaemon{Name: daemon.Name, Message: oneLine(err.Error())})
		}
	}
	setNode(d.metrics.daemonsWaiting, node.Name, len(plan.Waiting))
	if !apiequality.Semantic.DeepEqual(node.Spec.Daemons, plan.Waiting) {
		errs = append(errs, patchSpec(ctx, d.client, node, "daemons", plan.Waiting))
	}
	return requeue(plan.Again, errs)
}

func (d *daemons) podsOf(ctx context.Context, node string) ([]*corev1.Pod, error) {
	if d.pods == nil {
		return nil, nil
	}
	var list corev1.PodList
	if err := d.pods.List(ctx, &list, client.InNamespace(d.config.Namespace), client.MatchingFields{ownerIndex: node}); err != nil {
		return nil, fmt.Errorf("list pods of the MPS daemons of node %s: %w", node, err)
	}
	pods := make([]*corev1.Pod, len(list.Items))
	for i := range list.Items {
		pods[i] = &list.Items[i]
	}
	return pods, nil
}

// create creates a daemon's pod. A pod that exists already is not in the cache yet.
func (d *daemons) create(ctx context.Context, node *v1alpha1.GPUNode, daemon v1alpha1.MPSDaemon) error {
	pod, err := d.config.Pod(node, daemon)
	if err != nil {
		return err
	}
	switch err := d.client.Create(ctx, pod); {
	case apierrors.IsAlreadyExists(err):
		return nil
	case err != nil:
		return fmt.Errorf("create pod %s of MPS daemon %s: %w", pod.Name, daemon.Name, err)
	}
	d.metrics.daemonPods.WithLabelValues("created").Inc()
	klog.FromContext(ctx).Info("Created the pod of an MPS daemon", "node", node.Name, "daemon", daemon.Name, "pod", klog.KObj(pod))
	return nil
}

func (d *daemons) delete(ctx context.Context, pod *corev1.Pod) error {
	err := d.client.Delete(ctx, pod, client.Preconditions{UID: &pod.UID})
	switch {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err): // another pod has its name
		return nil
	case err != nil:
		return fmt.Errorf("delete pod %s of an MPS daemon: %w", pod.Name, err)
	}
	d.metrics.daemonPods.WithLabelValues("deleted").Inc()
	klog.FromContext(ctx).Info("Deleted the pod of an MPS daemon", "pod", klog.KObj(pod))
	return nil
}
