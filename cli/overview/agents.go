// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/cli/workloads"
)

// AgentPod returns the running pod of a node's agent: of a DaemonSet of a release, never of a tenant. namespace is that of a release; if it is empty,
// the releases are found.
func (c Cluster) AgentPod(ctx context.Context, namespace, node string) (*corev1.Pod, error) {
	pods, err := workloads.Agents(ctx, c.Client, namespace, node)
	if err != nil {
		return nil, fmt.Errorf("find the agents: %w", err)
	}
	running := func(p corev1.Pod) bool { return p.DeletionTimestamp == nil && p.Status.Phase == corev1.PodRunning }
	at := slices.IndexFunc(pods, running)
	if at >= 0 {
		return &pods[at], nil
	}
	err = errors.New("there is none")
	for _, p := range pods {
		err = fmt.Errorf("pod %s/%s is %s", p.Namespace, p.Name, p.Status.Phase)
	}
	return nil, fmt.Errorf("find the running agent of node %s: %w", node, err)
}
