// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/oracle"
)

// The example with a partition of each profile, made for its pods, and the chart values that let it.
const (
	partitionPods   = "mig-profiles"
	partitionValues = "mig-dynamic.values.yaml"
)

// partition has partitions made for pods, says who got which, and ends them: the rest of the demo needs all GPUs whole.
func (d *demo) partition(ctx context.Context) error {
	list, err := d.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list ResourceSlices: %w", err)
	}
	if !counted(list.Items) {
		d.steps.next("MIG partitions on demand need Kubernetes 1.36 or newer: left out")
		return nil
	}
	d.steps.next("MIG partitions, made when pods ask for them: %s", partitionPods)
	if err := d.apply(ctx, partitionPods); err != nil {
		return err
	}
	err = d.await(ctx, "them to run", func(ctx context.Context) (string, error) {
		pods, err := d.pods(ctx)
		names := make([]string, len(pods))
		for i, pod := range pods {
			names[i] = pod.Name
		}
		if err != nil {
			return "", err
		}
		return d.notRunning(ctx, names)
	})
	if err != nil {
		return err
	}
	seen, err := oracle.Observe(ctx, d.cluster)
	if err != nil {
		return err
	}
	var problem error
	for _, container := range seen.Containers {
		if container.Namespace != namespace {
			continue
		}
		if len(container.Devices) != 1 || container.Devices[0].Whole() {
			problem = errors.Join(problem, fmt.Errorf("pod %s can use %+v, not one partition", container.Pod, container.Devices))
			continue
		}
		device := container.Devices[0]
		d.steps.say("%-16s a part of GPU %d (%s)", container.Pod, device.GPU.Index, device.Partition.Instance)
	}
	for _, double := range seen.DoublyOwned() {
		problem = errors.Join(problem, errors.New(double.String()))
	}
	return errors.Join(problem, d.reunite(ctx))
}

// counted reports whether the API server keeps the counters that partitions on demand need.
func counted(list []resourceapi.ResourceSlice) bool {
	return slices.ContainsFunc(list, func(s resourceapi.ResourceSlice) bool { return len(s.Spec.SharedCounters) > 0 })
}

// reunite ends the pods and returns when all GPUs are whole again.
func (d *demo) reunite(ctx context.Context) error {
	if _, err := d.cluster.Kubectl(ctx, "delete", "--namespace", namespace, "-f", filepath.Join(d.examples, partitionPods+".yaml")); err != nil {
		return err
	}
	err := d.await(ctx, "all GPUs to be whole again", func(ctx context.Context) (string, error) {
		for _, node := range d.cluster.Nodes() {
			object, err := d.client.CoreV1().Nodes().Get(ctx, node.Name(), metav1.GetOptions{})
			if err != nil {
				return "", fmt.Errorf("get node %s: %w", node.Name(), err)
			}
			total, free := object.Status.Capacity[install.ResourceName], object.Status.Allocatable[install.ResourceName]
			if total.Cmp(free) != 0 {
				return fmt.Sprintf("%s says %s of %s", node.Name(), free.String(), total.String()), nil
			}
		}
		return "", nil
	})
	if err == nil {
		d.steps.say("gone with their pods, and all GPUs are whole again")
	}
	return err
}
