// SPDX-License-Identifier: Apache-2.0

// Package drain takes GPUs of a node out of service and back, as kubectl gpu drain and undrain do. select.go decides and is pure. Run and
// End write GPUNode.spec.maintenance, and Run waits until no holder is left. The agent acts on the entries.
package drain

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/explain"
	"github.com/tandem-gpu/tandem/cli/overview"
	"github.com/tandem-gpu/tandem/internal/owner"
	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Drainer drains GPUs with the rights of its user. One call at a time.
type Drainer struct {
	Cluster overview.Cluster
	// Resources are the extended resources of the GPUs. They are not read from the GPUNode: see evict.
	Resources device.Resources
	// Say is called with each line for the user.
	Say func(line string) error
	// Now is the clock.
	Now func() time.Time
	// Interval is the time between two looks at the node. Settle is how long a GPU must have no holder until it counts as free: a claim that
	// was allocated it, or a pod that was bound, just before the agent withdrew it may not be known yet.
	Interval, Settle time.Duration

	// uid and generation are those of the GPUNode with the entries.
	uid        types.UID
	generation int64
	// allocated are claims that were allocated the GPUs, when they were last listed. unlisted is set if the user may not list claims.
	allocated []v1alpha1.AllocatedClaim
	unlisted  bool
	// named are the pods that the GPUNode has named. evicted are those whose eviction the API server has accepted, refused those that cannot
	// have a GPU of the node. again is when to ask again for those that a disruption budget protects.
	named, evicted, refused map[types.UID]bool
	again                   map[types.UID]time.Time
}

// Defaults of a Drainer.
const (
	Interval = time.Second
	Settle   = 2 * time.Second
	// evictAgain is the pause of kubectl drain after a disruption budget has prevented an eviction.
	evictAgain = 5 * time.Second
	// mostPods bounds the pods that one drain looks at: a GPUNode can name others at each look. It is twice what a node runs.
	mostPods = 512
)

// Options of a drain.
type Options struct {
	Reason string
	// Wait waits until no holder is left; without it Run returns once the entries are written. Timeout bounds the wait; zero is none.
	Wait    bool
	Timeout time.Duration
	// Evict evicts the pods of the holders. Force includes pods of DaemonSets and pods without a controller.
	Evict, Force bool
}

// Run takes GPUs out of service: the one that gpu names (a number, a name or a UUID), or all of the node if it is empty. It is idempotent.
// An error means that the GPUs are not known to be free.
func (d *Drainer) Run(ctx context.Context, node, gpu string, o Options) error {
	if len(o.Reason) > v1alpha1.MaxMaintenanceReason {
		return fmt.Errorf("the reason has %d bytes: at most %d are stored", len(o.Reason), v1alpha1.MaxMaintenanceReason)
	}
	var gpus []GPU
	stored, err := d.change(ctx, node, func(n v1alpha1.GPUNode) (entries []v1alpha1.GPUMaintenance, err error) {
		if gpus, err = Select(n, gpu); err != nil {
			return nil, err
		}
		return With(n.Spec.Maintenance, gpus, o.Reason, metav1.NewTime(d.Now().Truncate(time.Second)))
	})
	if err != nil {
		return err
	}
	d.uid, d.generation = stored.UID, stored.Generation
	err = d.sayAll(node, gpus, "is taken out of service: its agent withdraws it from claims and limits")
	if err != nil || !o.Wait {
		return err
	}
	return d.await(ctx, node, gpus, o)
}

// End puts GPUs into service again: the one that gpu names, or all of the node if it is empty. It is idempotent.
func (d *Drainer) End(ctx context.Context, node, gpu string) error {
	var ended []string
	_, err := d.change(ctx, node, func(n v1alpha1.GPUNode) (entries []v1alpha1.GPUMaintenance, err error) {
		entries, ended, err = Without(n, gpu)
		return entries, err
	})
	if err != nil {
		return err
	}
	switch {
	case len(ended) == 0 && gpu == "":
		return d.Say(fmt.Sprintf("no GPU of %s is under maintenance", node))
	case len(ended) == 0:
		return d.Say(fmt.Sprintf("GPU %s of %s is not under maintenance", gpu, node))
	}
	for _, name := range ended {
		if err := d.Say(fmt.Sprintf("%s of %s is in service again", name, node)); err != nil {
			return err
		}
	}
	return nil
}

// change replaces the entries of a node by those that next returns, and returns the GPUNode that has them. It starts again if another client
// has changed the object.
func (d *Drainer) change(
	ctx context.Context, name string, next func(v1alpha1.GPUNode) ([]v1alpha1.GPUMaintenance, error),
) (stored v1alpha1.GPUNode, err error) {
	err = retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		stored, err = d.Cluster.GPUNode(ctx, name)
		if err != nil {
			return err
		}
		entries, err := next(stored)
		if err != nil || apiequality.Semantic.DeepEqual(entries, stored.Spec.Maintenance) {
			return err
		}
		patch, err := json.Marshal(map[string]any{
			"metadata": map[string]any{"uid": stored.UID, "resourceVersion": stored.ResourceVersion},
			"spec":     map[string]any{"maintenance": append([]v1alpha1.GPUMaintenance{}, entries...)},
		})
		if err != nil {
			return fmt.Errorf("encode the maintenance of GPUNode %s: %w", name, err)
		}
		stored, err = d.Cluster.PatchGPUNode(ctx, name, patch)
		return err
	})
	// A user who may not even get it needs to patch it, too.
	if denied, is := errors.AsType[*overview.DeniedError](err); is {
		denied.Verb = "patch"
	}
	if apierrors.IsConflict(err) {
		err = fmt.Errorf("write the maintenance of GPUNode %s: other clients keep changing it: %w", name, err)
	}
	return stored, err
}

// await waits until the GPUs have had no holder for a while, and says what they wait for whenever that changes.
func (d *Drainer) await(ctx context.Context, node string, gpus []GPU, o Options) error {
	waiting, cancel := ctx, context.CancelFunc(func() {})
	if o.Timeout > 0 {
		waiting, cancel = context.WithTimeout(ctx, o.Timeout)
	}
	defer cancel()
	d.allocated, d.unlisted = nil, false
	d.named, d.evicted, d.refused = map[types.UID]bool{}, map[types.UID]bool{}, map[types.UID]bool{}
	d.again = map[types.UID]time.Time{}
	said := map[string]string{}
	var freeSince time.Time
	failing := false
	for {
		left, err := d.look(waiting, node, gpus, o, said)
		switch {
		case err != nil || left > 0:
			freeSince = time.Time{}
		case freeSince.IsZero():
			freeSince = d.Now()
		}
		if err == nil && left == 0 && d.Now().Sub(freeSince) >= d.Settle {
			if err = d.listClaims(waiting, node, gpus); err == nil {
				if len(d.allocated) == 0 {
					return d.sayAll(node, gpus, "is free")
				}
				freeSince = time.Time{}
			}
		}
		if err != nil && waiting.Err() == nil {
			if _, passes := errors.AsType[*passingError](err); !passes {
				return err
			}
			if !failing {
				if err := d.Say(fmt.Sprintf("error, will retry every %s: %v", d.Interval, err)); err != nil {
					return err
				}
			}
		}
		failing = err != nil
		select {
		case <-waiting.Done():
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return timedOut(node, gpus, said, o)
		case <-time.After(d.Interval):
		}
	}
}

// passingError is an error of a request that the next look repeats: a drain that has waited for hours does not end with one of them.
type passingError struct{ error }

func (e *passingError) Unwrap() error { return e.error }

// passing returns the error of a read for await. What the user may not read, or what does not exist, does not change by itself.
func passing(err error) error {
	if err == nil || apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
		return err
	}
	return &passingError{err}
}

// sayAll says the same of each GPU.
func (d *Drainer) sayAll(node string, gpus []GPU, what string) error {
	for _, g := range gpus {
		if err := d.Say(fmt.Sprintf("%s of %s %s", g.Name, node, what)); err != nil {
			return err
		}
	}
	return nil
}

func timedOut(node string, gpus []GPU, said map[string]string, o Options) error {
	var left []string
	for _, g := range gpus {
		if said[g.UUID] != "" {
			left = append(left, g.Name+" "+said[g.UUID])
		}
	}
	if len(left) == 0 {
		return fmt.Errorf("the GPUs of %s were not free for long enough within %s. They stay under maintenance", node, o.Timeout)
	}
	more := ""
	if !o.Evict {
		more = "; --evict evicts their pods"
	}
	return fmt.Errorf("not free after %s: %s. The GPUs stay under maintenance%s", o.Timeout, strings.Join(left, "; "), more)
}

// look returns how many GPUs are not free, and evicts their holders if the user wants that.
func (d *Drainer) look(ctx context.Context, node string, gpus []GPU, o Options, said map[string]string) (left int, err error) {
	now, err := d.Cluster.GPUNode(ctx, node)
	if err != nil && !apierrors.IsNotFound(err) {
		return 0, passing(err)
	}
	// One that was deleted has no entries.
	if err := d.check(node, now, gpus); err != nil {
		return 0, err
	}
	if err := d.recheckClaims(ctx, node); err != nil {
		return 0, err
	}
	var waiting []Waiting
	for _, g := range gpus {
		waits := Waits(now, g, d.generation, d.allocated)
		if waits.Text != "" {
			waiting = append(waiting, waits)
		}
		if _, looked := said[g.UUID]; !looked && waits.Unanswered {
			// The agent answers within a second.
			said[g.UUID] = ""
			continue
		}
		if waits.Text != said[g.UUID] && waits.Text != "" {
			if err := d.Say(fmt.Sprintf("%s of %s %s", g.Name, node, waits.Text)); err != nil {
				return len(waiting), err
			}
		}
		said[g.UUID] = waits.Text
	}
	if !o.Evict {
		return len(waiting), nil
	}
	if err := d.evict(ctx, node, waiting, o.Force); err != nil {
		return len(waiting), err
	}
	if len(waiting) > 0 && !slices.ContainsFunc(waiting, func(w Waiting) bool { return !w.OnlyFor(d.refused) }) {
		return len(waiting), fmt.Errorf("GPUNode %s names only pods that cannot have its GPUs: these are not evicted. "+
			"The GPUs stay under maintenance", node)
	}
	return len(waiting), nil
}

// check returns an error if the GPUNode no longer is the one that the entries were written to, or no longer has them.
func (d *Drainer) check(node string, now v1alpha1.GPUNode, gpus []GPU) error {
	for _, g := range gpus {
		if _, found := now.Spec.MaintenanceOf(g.UUID); !found || now.UID != d.uid {
			return fmt.Errorf("%s of %s is no longer under maintenance: another client has ended it, or the GPUNode was deleted. "+
				"Drain it again", g.Name, node)
		}
	}
	return nil
}

// listClaims lists the claims that are allocated the GPUs. The GPUNode lacks them while the controller does not run. Without the right to
// list claims, or if the API server does not serve them, it finds none.
func (d *Drainer) listClaims(ctx context.Context, node string, gpus []GPU) error {
	if d.unlisted {
		return nil
	}
	d.allocated = nil
	err := d.Cluster.EachClaim(ctx, func(claim *resourceapi.ResourceClaim) {
		of := AllocatedOn(node, d.Cluster.DriverName, claim)
		if slices.ContainsFunc(gpus, func(g GPU) bool { return overlaps(of, availability.NameOf(g.Name)) }) {
			d.allocated = append(d.allocated, of)
		}
	})
	switch {
	case apierrors.IsNotFound(err):
		d.allocated = nil
		return nil
	case apierrors.IsForbidden(err):
		d.allocated, d.unlisted = nil, true
		return d.Say(fmt.Sprintf("note: you may not list ResourceClaims of all namespaces. Only GPUNode %s says whether one was allocated a GPU and is "+
			"not prepared yet", node))
	}
	return passing(err)
}

// recheckClaims removes the claims whose allocation has changed since they were listed. A list of all claims at each look would be too much
// in a large cluster.
func (d *Drainer) recheckClaims(ctx context.Context, node string) error {
	var still []v1alpha1.AllocatedClaim
	for _, before := range d.allocated {
		claim, err := d.Cluster.Client.ResourceV1().ResourceClaims(before.Namespace).Get(ctx, before.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return passing(fmt.Errorf("get claim %s/%s: %w", before.Namespace, before.Name, err))
		}
		if now := AllocatedOn(node, d.Cluster.DriverName, claim); now.UID == before.UID && slices.Equal(now.Devices, before.Devices) {
			still = append(still, before)
		}
	}
	d.allocated = still
	return nil
}

// evict evicts the pods of holders, and none of them if one may not be. An agent's token is enough to write any name into the status of its
// GPUNode, and the user may evict more than an agent. So evict reads each pod from the API server, and evicts only pods that are on the node
// and request a GPU or have a claim with one.
func (d *Drainer) evict(ctx context.Context, node string, waiting []Waiting, force bool) error {
	var pods []*corev1.Pod
	seen := map[types.UID]bool{}
	for _, ref := range podsOf(waiting) {
		if ref.Name == "" || seen[ref.UID] || d.evicted[ref.UID] || d.refused[ref.UID] || d.Now().Before(d.again[ref.UID]) {
			continue
		}
		seen[ref.UID], d.named[ref.UID] = true, true
		if len(d.named) > mostPods {
			return fmt.Errorf("GPUNode %s has named more than %d pods during this command: no more pods are evicted", node, mostPods)
		}
		pod, err := d.Cluster.Client.CoreV1().Pods(ref.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err), err == nil && (!owner.Is(pod, ref.UID) || pod.DeletionTimestamp != nil || podstatus.Ended(pod)):
			continue
		case err != nil:
			return passing(fmt.Errorf("get pod %s/%s: %w", ref.Namespace, ref.Name, err))
		}
		why, err := d.notHere(ctx, node, pod)
		switch {
		case err != nil:
			return err
		case why == "":
			pods = append(pods, pod)
		default:
			d.refused[ref.UID] = true
			if err := d.Say(fmt.Sprintf("GPUNode names pod %s/%s, which %s: not evicted", pod.Namespace, pod.Name, why)); err != nil {
				return err
			}
		}
	}
	if err := Evictable(pods, force); err != nil {
		return err
	}
	for _, pod := range pods {
		if err := d.evictOne(ctx, pod); err != nil {
			return err
		}
	}
	return nil
}

func podsOf(waiting []Waiting) (pods []v1alpha1.PodReference) {
	for _, w := range waiting {
		pods = append(pods, slices.Concat(w.Holders...)...)
	}
	return pods
}

// notHere returns why a pod cannot have a GPU of the node; empty if it can.
func (d *Drainer) notHere(ctx context.Context, node string, pod *corev1.Pod) (why string, err error) {
	switch {
	case pod.Spec.NodeName != node:
		return "is not on node " + node, nil
	case explain.HasLimits(pod, d.Resources):
		return "", nil
	}
	for name, own := range resourceclaim.PodClaims(pod) {
		claim, err := d.Cluster.Client.ResourceV1().ResourceClaims(pod.Namespace).Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return "", passing(fmt.Errorf("get claim %s/%s of pod %s: %w", pod.Namespace, name, pod.Name, err))
		}
		if own && resourceclaim.IsForPod(pod, claim, true) != nil {
			continue
		}
		if len(AllocatedOn(node, d.Cluster.DriverName, claim).Devices) > 0 {
			return "", nil
		}
	}
	return fmt.Sprintf("requests no %s and has no claim of driver %s on %s (--resource-name, --driver-name)", d.Resources.GPU, d.Cluster.DriverName, node), nil
}

func (d *Drainer) evictOne(ctx context.Context, pod *corev1.Pod) error {
	err := d.Cluster.Client.PolicyV1().Evictions(pod.Namespace).Evict(ctx, &policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: ptr.To(pod.UID)}},
	})
	switch name := pod.Namespace + "/" + pod.Name; {
	case err == nil:
		d.evicted[pod.UID] = true
		return d.Say("evicting pod " + name)
	case apierrors.IsNotFound(err), apierrors.IsConflict(err): // it is gone, or another pod has its name
		d.evicted[pod.UID] = true
		return nil
	case apierrors.IsTooManyRequests(err):
		d.again[pod.UID] = d.Now().Add(evictAgain)
		return d.Say(fmt.Sprintf("error when evicting pod %s (will retry after %s): %v", name, evictAgain, err))
	default:
		return fmt.Errorf("evict pod %s: %w", name, err)
	}
}

// Evictable returns an error that names the pods that may not be evicted; nil if all may. The words are those of kubectl drain. It is a pure
// function.
func Evictable(pods []*corev1.Pod, force bool) error {
	var static, daemons, bare []string
	for _, pod := range pods {
		name := pod.Namespace + "/" + pod.Name
		owner := metav1.GetControllerOf(pod)
		switch {
		case pod.Annotations[corev1.MirrorPodAnnotationKey] != "":
			static = append(static, name)
		case force:
		case owner == nil:
			bare = append(bare, name)
		case owner.Kind == "DaemonSet":
			daemons = append(daemons, name)
		}
	}
	var errs []error
	for _, of := range []struct {
		why  string
		pods []string
	}{
		{"cannot evict static Pods (remove their manifests from the node)", static},
		{"cannot evict DaemonSet-managed Pods (use --force to override)", daemons},
		{"cannot evict Pods that declare no controller (use --force to override)", bare},
	} {
		if len(of.pods) > 0 {
			errs = append(errs, fmt.Errorf("%s: %s", of.why, strings.Join(of.pods, ", ")))
		}
	}
	return errors.Join(errs...)
}
