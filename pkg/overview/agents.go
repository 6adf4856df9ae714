// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
)

// AgentLabels select the agents' pods of every release of the chart.
const AgentLabels = "app.kubernetes.io/part-of=tandem,app.kubernetes.io/component=kubelet-plugin"

// AgentPod returns the running pod of a node's agent, from one namespace or from all.
func (c Cluster) AgentPod(ctx context.Context, namespace, node string) (*corev1.Pod, error) {
	list, err := c.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{
		LabelSelector: AgentLabels, FieldSelector: fields.OneTermEqualSelector("spec.nodeName", node).String(),
	})
	if apierrors.IsForbidden(err) && namespace == metav1.NamespaceAll {
		return nil, fmt.Errorf("list pods: %w (give the namespace of the agents with --namespace)", err)
	}
	if err != nil {
		return nil, fmt.Errorf("list pods: %w", err)
	}
	running := func(p corev1.Pod) bool {
		return p.Spec.NodeName == node && p.DeletionTimestamp == nil && p.Status.Phase == corev1.PodRunning
	}
	at := slices.IndexFunc(list.Items, running)
	if at >= 0 {
		return &list.Items[at], nil
	}
	err = errors.New("there is none")
	for _, p := range list.Items {
		if p.Spec.NodeName == node {
			err = fmt.Errorf("pod %s/%s is %s", p.Namespace, p.Name, p.Status.Phase)
		}
	}
	return nil, fmt.Errorf("find the running agent of node %s: %w", node, err)
}
