// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/explain"
	"github.com/tandem-gpu/tandem/cli/workloads"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/internal/terminal"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// say prints a line. Agents, and tenants in some places, write parts of it.
func (n *Nodes) say(format string, args ...any) {
	fmt.Fprintln(n.Progress, terminal.Plain(explain.OneLine(fmt.Sprintf(format, args...)), false))
}

func (n *Nodes) node(ctx context.Context, name string) (*corev1.Node, error) {
	node, err := n.Client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("get node %s: %w", name, err)
	}
	return node, nil
}

// gpuNode returns the GPUNode of a node; nil if there is none.
func (n *Nodes) gpuNode(ctx context.Context, name string) (*v1alpha1.GPUNode, error) {
	object, err := n.GPUNode(ctx, name)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("get GPUNode %s: %w", name, err)
	}
	return object, nil
}

// patchNode sets labels and annotations; nil removes one.
func (n *Nodes) patchNode(ctx context.Context, name string, labels, annotations map[string]any) error {
	changes := map[string]any{"labels": labels}
	if annotations != nil { // null would remove all
		changes["annotations"] = annotations
	}
	patch, err := json.Marshal(map[string]any{"metadata": changes})
	if err == nil {
		_, err = n.Client.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: fieldManager})
	}
	if err != nil {
		return fmt.Errorf("change labels of node %s: %w", name, err)
	}
	return nil
}

func (n *Nodes) pods(ctx context.Context, node string) ([]corev1.Pod, error) {
	list, err := n.Client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
	if err != nil {
		return nil, fmt.Errorf("list pods of node %s: %w", node, err)
	}
	return slices.DeleteFunc(list.Items, func(pod corev1.Pod) bool { return pod.Spec.NodeName != node }), nil
}

// podsOf returns the pods of DaemonSets on a node.
func (n *Nodes) podsOf(ctx context.Context, sets []daemonSet, node string) ([]corev1.Pod, error) {
	pods, err := n.pods(ctx, node)
	return slices.DeleteFunc(pods, func(pod corev1.Pod) bool {
		return !slices.ContainsFunc(sets, func(d daemonSet) bool { return workloads.Controls(&d.DaemonSet, &pod) })
	}), err
}

// agent returns the pod of Tandem's agent on a node; nil if none is found.
func (n *Nodes) agent(ctx context.Context, node string) (*corev1.Pod, error) {
	pods, err := workloads.Agents(ctx, n.Client, n.Namespace, node)
	if err != nil && !errors.Is(err, workloads.ErrNoBinding) {
		return nil, fmt.Errorf("find Tandem's agents: %w", err)
	}
	for i := range pods {
		if pods[i].DeletionTimestamp == nil {
			return &pods[i], nil
		}
	}
	return nil, nil
}

// limitPods returns the running pods of a node that a device plugin has given GPUs or partitions by limits.
func (n *Nodes) limitPods(ctx context.Context, node string) ([]corev1.Pod, error) {
	pods, err := n.pods(ctx, node)
	return slices.DeleteFunc(pods, func(pod corev1.Pod) bool {
		return pod.Status.Phase != corev1.PodRunning || pod.DeletionTimestamp != nil || pod.Status.ExtendedResourceClaimStatus != nil ||
			!explain.HasLimits(&pod, device.Resources{GPU: config.Defaults().ResourceName})
	}), err
}

// slices counts the driver's ResourceSlices of a node. It is zero if the API server does not serve ResourceSlices.
func (n *Nodes) slices(ctx context.Context, node string) (count int, err error) {
	selector := fields.Set{resourceapi.ResourceSliceSelectorNodeName: node, resourceapi.ResourceSliceSelectorDriver: n.DriverName}.String()
	list, err := n.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: selector})
	if err != nil && !apierrors.IsNotFound(err) {
		return 0, fmt.Errorf("list ResourceSlices of node %s: %w", node, err)
	}
	return len(list.Items), nil
}

// allocatedClaims lists the claims that have devices. There are none if the API server does not serve ResourceClaims.
func (n *Nodes) allocatedClaims(ctx context.Context) ([]resourceapi.ResourceClaim, error) {
	list, err := n.Client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list ResourceClaims: %w", err)
	}
	return slices.DeleteFunc(list.Items, func(claim resourceapi.ResourceClaim) bool { return claim.Status.Allocation == nil }), nil
}

// claimsOn returns the names of the claims that have devices of these drivers on a node, sorted. NVIDIA's pool has the name of the node.
func claimsOn(node string, claims []resourceapi.ResourceClaim, drivers ...string) []string {
	var names []string
	for _, claim := range claims {
		if slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
			return slices.Contains(drivers, r.Driver) && device.NodeOfPool(r.Pool) == node
		}) {
			names = append(names, claim.Namespace+"/"+claim.Name)
		}
	}
	slices.Sort(names)
	return names
}

func isReady(pod *corev1.Pod) bool {
	return pod.DeletionTimestamp == nil && podstatus.Ready(pod)
}

func podNames(pods []corev1.Pod) (names []string) {
	for _, pod := range pods {
		names = append(names, pod.Namespace+"/"+pod.Name)
	}
	return names
}
