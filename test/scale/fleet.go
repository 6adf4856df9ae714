// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/figure"
)

type fleet struct {
	names    []string
	machines map[string]*machine
	kubelets *kubelets
	watched  *watched
}

// close closes the ledgers of machines that have not run.
func (f *fleet) close() error {
	var errs []error
	for _, m := range f.machines {
		errs = append(errs, m.close())
	}
	return errors.Join(errs...)
}

// startFleet creates the nodes and runs their agents and kubelets in group, until ctx is done. It returns when all agents have
// published.
func (r *run) startFleet(ctx context.Context, group *errgroup.Group) error {
	r.fleet = &fleet{machines: map[string]*machine{}}
	for i := range r.Nodes {
		r.fleet.names = append(r.fleet.names, fmt.Sprintf("n%04d", i))
	}
	r.say("creating %d nodes", r.Nodes)
	if err := r.each(ctx, r.fleet.names, r.createNode); err != nil {
		return err
	}
	var err error
	if r.fleet.watched, err = r.watch(ctx, group); err != nil {
		return err
	}
	r.say("starting %d agents", r.Nodes)
	for _, name := range r.fleet.names {
		gpus, err := inventory(name, false)
		if err != nil {
			return err
		}
		m, err := newMachine(ctx, name, filepath.Join(r.dir, name), gpus, r.api)
		if err != nil {
			return errors.Join(err, r.fleet.close())
		}
		r.fleet.machines[name] = m
	}
	r.fleet.kubelets = &kubelets{client: r.client, machines: r.fleet.machines, lives: map[types.UID]*life{}}
	group.Go(func() error { return r.fleet.kubelets.run(ctx) })
	began := time.Now()
	for _, m := range r.fleet.machines {
		group.Go(func() error {
			if err := m.run(ctx); err != nil {
				return fmt.Errorf("run agent of %s: %w", m.name, err)
			}
			return nil
		})
	}
	err = r.await(ctx, "all agents to have published and reported", func() (int, int) {
		ready := 0
		for _, m := range r.fleet.machines {
			if r.fleet.watched.published(m.name) {
				ready++
			}
		}
		return ready, r.Nodes
	})
	r.add(figure.Figure{Name: "fleet_published", Value: time.Since(began).Seconds(), Unit: "s", N: r.Nodes})
	return err
}

// each calls for all items, many at once.
func (r *run) each(ctx context.Context, items []string, call func(context.Context, string) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for _, item := range items {
		group.Go(func() error { return call(ctx, item) })
	}
	return group.Wait()
}

// patience bounds each step. Nothing takes that long at 5,000 nodes.
const patience = 15 * time.Minute

// await returns when count has reached its goal.
func (r *run) await(ctx context.Context, what string, count func() (have, want int)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, errors.New("it took too long"))
	defer cancel()
	ticker := time.NewTicker(lookAgain)
	defer ticker.Stop()
	said := time.Now()
	for {
		have, want := count()
		if have >= want {
			return nil
		}
		if time.Since(said) > 10*time.Second {
			r.say("waiting for %s: %d of %d", what, have, want)
			said = time.Now()
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %d of %d: %w", what, have, want, context.Cause(ctx))
		case <-ticker.C:
		}
	}
}

const lookAgain = 20 * time.Millisecond

// createNode makes what kubelet registers. The controller that would remove the taint of a node that is not ready is off.
func (r *run) createNode(ctx context.Context, name string) error {
	amount := corev1.ResourceList{
		"cpu": resource.MustParse("192"), "memory": resource.MustParse("2Ti"), "pods": resource.MustParse("250"),
		install.ResourceName: *resource.NewQuantity(gpusANode, resource.DecimalSI),
	}
	nodes := r.client.CoreV1().Nodes()
	if _, err := nodes.Create(ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}},
	}, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create node %s: %w", name, err)
	}
	// Other controllers write the node, too.
	if _, err := nodes.Patch(ctx, name, types.MergePatchType, []byte(`{"spec":{"taints":null}}`), metav1.PatchOptions{}); err != nil {
		return fmt.Errorf("remove taints of node %s: %w", name, err)
	}
	status, err := json.Marshal(map[string]any{"status": corev1.NodeStatus{
		Capacity: amount, Allocatable: amount,
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady"}},
	}})
	if err != nil {
		return fmt.Errorf("encode status of node %s: %w", name, err)
	}
	if _, err := nodes.Patch(ctx, name, types.StrategicMergePatchType, status, metav1.PatchOptions{}, "status"); err != nil {
		return fmt.Errorf("report node %s: %w", name, err)
	}
	return nil
}

// occupy makes the objects that a fleet in use has: running pods with claims, claims without devices, and pods that wait.
func (r *run) occupy(ctx context.Context) error {
	r.say("making %d running pods, %d claims and %d pending pods", r.Nodes*occupied, r.Nodes*(occupied+otherClaims), r.Nodes*pendingANode)
	if err := r.each(ctx, r.fleet.names, r.occupyNode); err != nil {
		return err
	}
	return r.await(ctx, "the pods to run", func() (int, int) { return r.fleet.watched.count(corev1.PodRunning), r.Nodes * occupied })
}

func (r *run) occupyNode(ctx context.Context, node string) error {
	for i := range occupied {
		name := fmt.Sprintf("busy-%s-%d", node, i)
		claim, err := r.createClaim(ctx, namespace, name, claimSpec(install.DriverName))
		if err != nil {
			return err
		}
		pod := podWithClaim(name, corev1.PodResourceClaim{Name: "gpu", ResourceClaimName: &name})
		pod.Spec.SchedulerName = "scale" // this program
		made, err := r.createPod(ctx, namespace, pod)
		if err != nil {
			return err
		}
		claim.Status = resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
				{Request: "gpu", Driver: install.DriverName, Pool: node, Device: fmt.Sprintf("gpu-%d", i)},
			}}},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: name, UID: made.UID}},
		}
		if _, err := r.client.ResourceV1().ResourceClaims(namespace).UpdateStatus(ctx, claim, metav1.UpdateOptions{}); err != nil {
			return fmt.Errorf("allocate claim %s: %w", name, err)
		}
		binding := &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: name}, Target: corev1.ObjectReference{Kind: "Node", Name: node}}
		if err := r.client.CoreV1().Pods(namespace).Bind(ctx, binding, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("bind pod %s: %w", name, err)
		}
	}
	for i := range otherClaims {
		if _, err := r.createClaim(ctx, namespace, fmt.Sprintf("idle-%s-%d", node, i), claimSpec(install.DriverName)); err != nil {
			return err
		}
	}
	for i := range pendingANode {
		name := pendingPod(node, i)
		claim := fmt.Sprintf("idle-%s-%d", node, i)
		pod := podWithClaim(name, corev1.PodResourceClaim{Name: "gpu", ResourceClaimName: &claim})
		pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/waits"}}
		if _, err := r.createPod(ctx, namespace, pod); err != nil {
			return err
		}
	}
	return nil
}

func pendingPod(node string, i int) string { return fmt.Sprintf("pending-%s-%d", node, i) }

func (r *run) createClaim(ctx context.Context, namespace, name string, spec resourceapi.ResourceClaimSpec) (*resourceapi.ResourceClaim, error) {
	claim, err := r.client.ResourceV1().ResourceClaims(namespace).Create(ctx, &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec,
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("create claim %s: %w", name, err)
	}
	return claim, nil
}

func (r *run) createPod(ctx context.Context, namespace string, pod *corev1.Pod) (*corev1.Pod, error) {
	made, err := r.client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("create pod %s: %w", pod.Name, err)
	}
	return made, nil
}

func claimSpec(class string, selectors ...resourceapi.DeviceSelector) resourceapi.ResourceClaimSpec {
	return resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
		Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: class, Selectors: selectors},
	}}}}
}

func podWithClaim(name string, claims ...corev1.PodResourceClaim) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			AutomountServiceAccountToken: ptr.To(false), TerminationGracePeriodSeconds: ptr.To[int64](1), ResourceClaims: claims,
			Containers: []corev1.Container{{Name: "main", Image: "none"}},
		},
	}
	for _, c := range claims {
		pod.Spec.Containers[0].Resources.Claims = append(pod.Spec.Containers[0].Resources.Claims, corev1.ResourceClaim{Name: c.Name})
	}
	return pod
}
