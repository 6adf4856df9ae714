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
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/pkg/overview"
)

// Drainer drains GPUs with the rights of its user. One call at a time.
type Drainer struct {
	Cluster overview.Cluster
	// Say is called with each line for the user.
	Say func(line string) error
	// Now is the clock.
	Now func() time.Time
	// Interval is the time between two looks at the node. Settle is how long a GPU must have no holder until it counts as free: a claim that
	// was allocated it, or a pod that was bound, just before the agent withdrew it may not be known yet.
	Interval, Settle time.Duration

	// evicted are the pods whose eviction the API server has accepted. again is when to ask again for those that a disruption budget protects.
	evicted map[types.UID]bool
	again   map[types.UID]time.Time
}

// Defaults of a Drainer.
const (
	Interval = time.Second
	Settle   = 2 * time.Second
	// evictAgain is the pause of kubectl drain after a disruption budget has prevented an eviction.
	evictAgain = 5 * time.Second
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
	err := d.change(ctx, node, func(n v1alpha1.GPUNode) (entries []v1alpha1.GPUMaintenance, err error) {
		if gpus, err = Select(n, gpu); err != nil {
			return nil, err
		}
		return With(n.Spec.Maintenance, gpus, o.Reason, metav1.NewTime(d.Now().Truncate(time.Second)))
	})
	if err != nil {
		return err
	}
	err = d.sayAll(node, gpus, "is taken out of service: its agent withdraws it from claims and limits")
	if err != nil || !o.Wait {
		return err
	}
	return d.await(ctx, node, gpus, o)
}

// End puts GPUs into service again: the one that gpu names, or all of the node if it is empty. It is idempotent.
func (d *Drainer) End(ctx context.Context, node, gpu string) error {
	var ended []string
	err := d.change(ctx, node, func(n v1alpha1.GPUNode) (entries []v1alpha1.GPUMaintenance, err error) {
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

// change replaces the entries of a node by those that next returns. It starts again if another client has changed the object.
func (d *Drainer) change(ctx context.Context, name string, next func(v1alpha1.GPUNode) ([]v1alpha1.GPUMaintenance, error)) error {
	err := retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		node, err := d.Cluster.GPUNode(ctx, name)
		if err != nil {
			return err
		}
		entries, err := next(node)
		if err != nil || apiequality.Semantic.DeepEqual(entries, node.Spec.Maintenance) {
			return err
		}
		patch, err := json.Marshal(map[string]any{
			"metadata": map[string]any{"uid": node.UID, "resourceVersion": node.ResourceVersion},
			"spec":     map[string]any{"maintenance": append([]v1alpha1.GPUMaintenance{}, entries...)},
		})
		if err != nil {
			return fmt.Errorf("encode the maintenance of GPUNode %s: %w", name, err)
		}
		return d.Cluster.PatchGPUNode(ctx, name, patch)
	})
	if apierrors.IsConflict(err) {
		return fmt.Errorf("write the maintenance of GPUNode %s: other clients keep changing it: %w", name, err)
	}
	return err
}

// await waits until the GPUs have had no holder for a while, and says what they wait for whenever that changes.
func (d *Drainer) await(ctx context.Context, node string, gpus []GPU, o Options) error {
	waiting, cancel := ctx, context.CancelFunc(func() {})
	if o.Timeout > 0 {
		waiting, cancel = context.WithTimeout(ctx, o.Timeout)
	}
	defer cancel()
	d.evicted, d.again = map[types.UID]bool{}, map[types.UID]time.Time{}
	said := map[string]string{}
	var freeSince time.Time
	for {
		left, err := d.look(waiting, node, gpus, o, said)
		switch {
		case err != nil && waiting.Err() == nil:
			return err
		case err != nil || left > 0:
			freeSince = time.Time{}
		case freeSince.IsZero():
			freeSince = d.Now()
		}
		if err == nil && left == 0 && d.Now().Sub(freeSince) >= d.Settle {
			return d.sayAll(node, gpus, "is free")
		}
		select {
		case <-waiting.Done():
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return timedOut(node, gpus, said, o.Timeout)
		case <-time.After(d.Interval):
		}
	}
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

func timedOut(node string, gpus []GPU, said map[string]string, after time.Duration) error {
	var left []string
	for _, g := range gpus {
		if said[g.UUID] != "" {
			left = append(left, g.Name+" "+said[g.UUID])
		}
	}
	if len(left) == 0 {
		return fmt.Errorf("the GPUs of %s were not free for long enough within %s. They stay under maintenance", node, after)
	}
	return fmt.Errorf("not free after %s: %s. The GPUs stay under maintenance", after, strings.Join(left, "; "))
}

// look returns how many GPUs are not free, and evicts their holders if the user wants that.
func (d *Drainer) look(ctx context.Context, node string, gpus []GPU, o Options, said map[string]string) (left int, err error) {
	now, err := d.Cluster.GPUNode(ctx, node)
	if err != nil {
		return 0, err
	}
	var pods []v1alpha1.PodReference
	for _, g := range gpus {
		waits := Waits(now, g)
		if waits.Text != "" {
			left++
		}
		if _, looked := said[g.UUID]; !looked && waits.Unanswered {
			// The agent answers within a second.
			said[g.UUID] = ""
			continue
		}
		if waits.Text != said[g.UUID] && waits.Text != "" {
			if err := d.Say(fmt.Sprintf("%s of %s %s", g.Name, node, waits.Text)); err != nil {
				return left, err
			}
		}
		said[g.UUID] = waits.Text
		for _, pod := range waits.Pods {
			if !slices.ContainsFunc(pods, func(p v1alpha1.PodReference) bool { return p.UID == pod.UID }) {
				pods = append(pods, pod)
			}
		}
	}
	if !o.Evict {
		return left, nil
	}
	return left, d.evict(ctx, pods, o.Force)
}

// evict evicts pods, and none of them if one may not be.
func (d *Drainer) evict(ctx context.Context, refs []v1alpha1.PodReference, force bool) error {
	var pods []*corev1.Pod
	for _, ref := range refs {
		if d.evicted[ref.UID] || d.Now().Before(d.again[ref.UID]) {
			continue
		}
		pod, err := d.Cluster.Client.CoreV1().Pods(ref.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err), err == nil && (pod.UID != ref.UID || pod.DeletionTimestamp != nil || podstatus.Ended(pod)):
		case err != nil:
			return fmt.Errorf("get pod %s/%s: %w", ref.Namespace, ref.Name, err)
		default:
			pods = append(pods, pod)
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
