// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/test/oracle"
)

// table lists the GPUs that the containers see, and then the pods that see none.
func table(pods []corev1.Pod, seen oracle.Picture) string {
	type row struct {
		pod, container string
		device         oracle.Device
	}
	var rows []row
	for _, container := range seen.Containers {
		for _, device := range container.Devices {
			rows = append(rows, row{container.Pod, container.Name, device})
		}
	}
	slices.SortStableFunc(rows, func(a, b row) int { return cmp.Compare(a.device.GPU.Index, b.device.GPU.Index) })

	var text bytes.Buffer
	out := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintln(out, "POD\tCONTAINER\tAPI\tGPU\tUUID\tNUMA NODE\tSTATE")
	for _, r := range rows {
		gpu := r.device.GPU
		fmt.Fprintf(out, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", r.pod, r.container, r.device.API, orDash(gpu.Index), cmp.Or(gpu.UUID, "-"),
			orDash(gpu.NUMANode), stateOf(pods, r.pod))
	}
	for _, pod := range pods {
		if len(seen.PodDevices(pod.Namespace, pod.Name)) == 0 {
			fmt.Fprintf(out, "%s\t-\t%s\t-\t-\t-\t%s\n", pod.Name, asks(pod), state(pod))
		}
	}
	// It writes to memory.
	_ = out.Flush()
	return text.String()
}

func orDash(n int) string {
	if n < 0 {
		return "-"
	}
	return strconv.Itoa(n)
}

// asks is the API by which a pod asks for GPUs.
func asks(pod corev1.Pod) oracle.API {
	if len(pod.Spec.ResourceClaims) > 0 {
		return oracle.Claim
	}
	for _, container := range pod.Spec.Containers {
		if _, ok := container.Resources.Limits[install.ResourceName]; ok {
			return oracle.Limits
		}
	}
	return "-"
}

func stateOf(pods []corev1.Pod, name string) string {
	for _, pod := range pods {
		if pod.Name == name {
			return state(pod)
		}
	}
	return "unknown"
}

// state is a pod's phase, and why where it is not simply running.
func state(pod corev1.Pod) string {
	text := string(pod.Status.Phase)
	switch {
	case pod.DeletionTimestamp != nil:
		return text + ", being deleted"
	case pod.Status.Reason != "":
		return text + ": " + pod.Status.Reason + " " + pod.Status.Message
	case unschedulable(pod):
		return text + ": no GPU is free"
	}
	for _, status := range pod.Status.ContainerStatuses {
		if waiting := status.State.Waiting; waiting != nil {
			return strings.TrimSpace(text + ": " + waiting.Reason + " " + waiting.Message)
		}
	}
	return text
}

func unschedulable(pod corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodPending && slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable
	})
}

func ready(pod corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodRunning && podstatus.Ready(&pod)
}

func isExpected(name string) bool {
	return slices.ContainsFunc(expected, func(e expectation) bool { return e.pod == name })
}

func count(pods []corev1.Pod) (running, pending int) {
	for _, pod := range pods {
		switch pod.Status.Phase {
		case corev1.PodRunning:
			running++
		case corev1.PodPending:
			pending++
		}
	}
	return running, pending
}
