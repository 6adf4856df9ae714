// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/progress"
)

const (
	// lookAgain is how often the conditions are read; what one waits for here takes seconds.
	lookAgain = 200 * time.Millisecond
	// patience bounds each wait where the caller's context does not.
	patience = 10 * time.Minute
	// heartbeat is how often a wait logs what it still waits for.
	heartbeat = 5 * time.Second
)

// await returns when agents, slices and resource are there on every node.
func await(ctx context.Context, c *cluster.Cluster, s *progress.Log) error {
	client, err := clientFor(c)
	if err != nil {
		return err
	}
	for _, wait := range []struct {
		what  string
		holds func(context.Context) (missing string, err error)
	}{
		{"controller ready", func(ctx context.Context) (string, error) { return controllerMissing(ctx, client) }},
		{"agents ready", func(ctx context.Context) (string, error) { return agentsMissing(ctx, client) }},
		{"slices published", func(ctx context.Context) (string, error) { return slicesMissing(ctx, client, c) }},
		{ResourceName + " offered", func(ctx context.Context) (string, error) { return resourceMissing(ctx, client, c) }},
	} {
		if err := until(ctx, s, wait.what, wait.holds); err != nil {
			return err
		}
		s.Say("%s", wait.what)
	}
	return nil
}

// until polls until nothing is missing, and logs every few seconds what is.
func until(ctx context.Context, s *progress.Log, what string, holds func(context.Context) (missing string, err error)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ticker := time.NewTicker(lookAgain)
	defer ticker.Stop()
	said := time.Now()
	for {
		missing, err := holds(ctx)
		if err == nil && missing == "" {
			return nil
		}
		if err != nil {
			missing = err.Error()
		}
		if time.Since(said) > heartbeat {
			s.Say("waiting: %s", missing)
			said = time.Now()
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w: %s", what, ctx.Err(), missing)
		case <-ticker.C:
		}
	}
}

// controllerMissing wants the pods of the current template only, so that an old one does nothing any more.
func controllerMissing(ctx context.Context, client kubernetes.Interface) (string, error) {
	deployments, err := client.AppsV1().Deployments(Namespace).List(ctx, byRelease())
	if err != nil {
		return "", fmt.Errorf("list Deployments: %w", err)
	}
	if len(deployments.Items) == 0 {
		return "no Deployment", nil
	}
	leads := false
	for _, d := range deployments.Items {
		want, status := ptr.Deref(d.Spec.Replicas, 1), d.Status
		leads = leads || want > 0
		if status.ObservedGeneration < d.Generation || status.UpdatedReplicas != want || status.Replicas != want || status.ReadyReplicas != want {
			return describePods(ctx, client, fmt.Sprintf("%d of %d controllers ready, %d of them new", status.ReadyReplicas, want, status.UpdatedReplicas))
		}
	}
	if !leads {
		return "", nil
	}
	return leaderMissing(ctx, client)
}

// leaderMissing wants a pod that exists to have the Lease. One that was killed keeps it for half a minute, in which no controller works.
func leaderMissing(ctx context.Context, client kubernetes.Interface) (string, error) {
	lease, err := client.CoordinationV1().Leases(Namespace).Get(ctx, leaseName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return "no controller leads", nil
	}
	if err != nil {
		return "", fmt.Errorf("get Lease of the controller: %w", err)
	}
	holder := ptr.Deref(lease.Spec.HolderIdentity, "")
	pod, err := client.CoreV1().Pods(Namespace).Get(ctx, holder, metav1.GetOptions{})
	switch {
	case holder == "" || apierrors.IsNotFound(err) || err == nil && pod.DeletionTimestamp != nil:
		return fmt.Sprintf("the controller that leads (%q) is gone", holder), nil
	case err != nil:
		return "", fmt.Errorf("get pod %s: %w", holder, err)
	}
	return "", nil
}

// leaseName is that of the chart's controller.
const leaseName = Release + "-controller"

func agentsMissing(ctx context.Context, client kubernetes.Interface) (string, error) {
	sets, err := client.AppsV1().DaemonSets(Namespace).List(ctx, byRelease())
	if err != nil {
		return "", fmt.Errorf("list DaemonSets: %w", err)
	}
	if len(sets.Items) == 0 {
		return "no DaemonSet", nil
	}
	for _, set := range sets.Items {
		if !rolledOut(set) {
			status := set.Status
			return describePods(ctx, client, fmt.Sprintf("%d of %d agents ready", status.NumberReady, status.DesiredNumberScheduled))
		}
	}
	return "", nil
}

func rolledOut(set appsv1.DaemonSet) bool {
	status := set.Status
	return status.ObservedGeneration >= set.Generation && status.DesiredNumberScheduled > 0 &&
		status.UpdatedNumberScheduled == status.DesiredNumberScheduled && status.NumberReady == status.DesiredNumberScheduled
}

// describePods adds why pods are not ready, in the words of their containers.
func describePods(ctx context.Context, client kubernetes.Interface, text string) (string, error) {
	pods, err := client.CoreV1().Pods(Namespace).List(ctx, byRelease())
	if err != nil {
		return "", fmt.Errorf("list pods: %w", err)
	}
	for _, pod := range pods.Items {
		for _, status := range append(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses...) {
			if waiting := status.State.Waiting; waiting != nil && waiting.Reason != "PodInitializing" {
				text += fmt.Sprintf("; %s/%s: %s %s", pod.Name, status.Name, waiting.Reason, waiting.Message)
			}
			if ended := status.LastTerminationState.Terminated; ended != nil {
				text += fmt.Sprintf("; %s/%s ended before: %s", pod.Name, status.Name, strings.TrimSpace(ended.Message))
			}
		}
	}
	return text, nil
}

// slicesMissing wants a complete pool with at least one device of each node.
func slicesMissing(ctx context.Context, client kubernetes.Interface, c *cluster.Cluster) (string, error) {
	list, err := client.ResourceV1().ResourceSlices().List(ctx,
		metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorDriver + "=" + DriverName})
	if err != nil {
		return "", fmt.Errorf("list ResourceSlices: %w", err)
	}
	for _, node := range c.Nodes() {
		if !published(list.Items, node.Name()) {
			return "slices of " + node.Name(), nil
		}
	}
	return "", nil
}

func published(list []resourceapi.ResourceSlice, node string) bool {
	devices, slices, wanted := 0, map[string]int64{}, map[string]int64{}
	for _, slice := range list {
		if slice.Spec.NodeName == nil || *slice.Spec.NodeName != node {
			continue
		}
		pool := fmt.Sprintf("%s/%d", slice.Spec.Pool.Name, slice.Spec.Pool.Generation)
		devices += len(slice.Spec.Devices)
		slices[pool]++
		wanted[pool] = slice.Spec.Pool.ResourceSliceCount
	}
	for pool, count := range wanted {
		if slices[pool] < count {
			return false
		}
	}
	return devices > 0
}

// resourceMissing looks at the capacity: what claims hold is missing from allocatable, rightly.
func resourceMissing(ctx context.Context, client kubernetes.Interface, c *cluster.Cluster) (string, error) {
	for _, node := range c.Nodes() {
		object, err := client.CoreV1().Nodes().Get(ctx, node.Name(), metav1.GetOptions{})
		if err != nil {
			return "", fmt.Errorf("get node %s: %w", node.Name(), err)
		}
		_, offered := object.Status.Allocatable[corev1.ResourceName(ResourceName)]
		if total := object.Status.Capacity[corev1.ResourceName(ResourceName)]; !offered || total.IsZero() {
			return fmt.Sprintf("%s in the status of %s (kubelet writes it every ten seconds)", ResourceName, node.Name()), nil
		}
	}
	return "", nil
}

func awaitNoPods(ctx context.Context, c *cluster.Cluster) error {
	client, err := clientFor(c)
	if err != nil {
		return err
	}
	return until(ctx, progress.New(nil), "the end of agents and controller", func(ctx context.Context) (string, error) {
		pods, err := client.CoreV1().Pods(Namespace).List(ctx, byRelease())
		if apierrors.IsNotFound(err) || err == nil && len(pods.Items) == 0 {
			return "", nil
		}
		if err != nil {
			return "", fmt.Errorf("list pods: %w", err)
		}
		return fmt.Sprintf("%d pods are still there", len(pods.Items)), nil
	})
}

func byRelease() metav1.ListOptions {
	return metav1.ListOptions{LabelSelector: "app.kubernetes.io/instance=" + Release}
}

func clientFor(c *cluster.Cluster) (kubernetes.Interface, error) {
	config, err := c.RESTConfig()
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, errors.Join(errors.New("make client"), err)
	}
	return client, nil
}
