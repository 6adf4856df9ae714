// SPDX-License-Identifier: Apache-2.0

// Package explain answers why a pod waits for a GPU, or failed, from API objects alone. Every function but Why is pure. Why names the
// holders in namespaces whose pods the viewer may list.
package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulinghelper "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// namedNodes bounds the nodes that an answer names.
const namedNodes = 5

// MayRun returns a function that reports whether the pod may run on a node, judged by node selector, node affinity and taints.
func MayRun(pod *corev1.Pod) func(*corev1.Node) bool {
	affinity := nodeaffinity.GetRequiredNodeAffinity(pod)
	return func(node *corev1.Node) bool {
		if match, err := affinity.Match(node); err != nil || !match {
			return false
		}
		_, repelled := untolerated(pod, node)
		return !repelled
	}
}

// untolerated returns the first taint of a node that keeps the pod off it.
func untolerated(pod *corev1.Pod, node *corev1.Node) (corev1.Taint, bool) {
	repels := func(t *corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
	}
	return schedulinghelper.FindMatchingUntoleratedTaint(klog.Background(), node.Spec.Taints, pod.Spec.Tolerations, repels, false)
}

// WhyUnserved returns why a node gives no GPU to new pods and claims, or may give none, and since when, in one line; empty if it gives some.
// Every view shows it. The status is that of availability.AsOf.
func WhyUnserved(s v1alpha1.GPUNodeStatus) string {
	if s.Waiting == "" {
		return ""
	}
	since := ""
	if s.WaitingSince != nil {
		since = " since " + s.WaitingSince.UTC().Format(time.RFC3339)
	}
	if s.Waiting == availability.Silent {
		return fmt.Sprintf("its agent has been silent%s: its GPUNode is of that time, and new pods may get no GPU", since)
	}
	return fmt.Sprintf("no GPU for new pods and claims%s: %s", since, OneLine(s.Waiting))
}

// whyNone returns why none of the nodes that a pod may run on can satisfy its request. It returns the empty string if a node can,
// so that the pod waits for another reason, and if no node has such devices.
func whyNone(nodes []v1alpha1.GPUNode, asked request) string {
	var serving, unserved []v1alpha1.GPUNode
	for _, n := range nodes {
		if n.Status.Waiting == "" {
			serving = append(serving, n)
		} else {
			unserved = append(unserved, n)
		}
	}
	reason, room := explainServing(serving, asked)
	if room || len(unserved) == 0 {
		return reason
	}
	slices.SortFunc(unserved, func(a, b v1alpha1.GPUNode) int { return cmp.Compare(a.Name, b.Name) })
	if reason != "" {
		return reason + "; no GPU for new pods on " + list(unserved, func(n v1alpha1.GPUNode) string { return n.Name })
	}
	return "no node that gives GPUs to new pods has " + asked.noun(asked.Devices) + "; " +
		list(unserved, func(n v1alpha1.GPUNode) string { return n.Name + ": " + WhyUnserved(n.Status) })
}

// explainServing is whyNone for nodes that give GPUs to new pods. room is whether one of them can satisfy the request.
func explainServing(nodes []v1alpha1.GPUNode, asked request) (reason string, room bool) {
	if asked.Memory > 0 || asked.Shares > 0 {
		return explainShare(nodes, asked)
	}
	if !slices.ContainsFunc(nodes, func(n v1alpha1.GPUNode) bool { return asked.mixes(n.Status) }) {
		asked.Limits = ""
	}
	type counted struct {
		name string
		v1alpha1.DeviceCounts
		taints []string
	}
	var with []counted
	var total, free int64
	for _, node := range nodes {
		counts := asked.counts(node.Status)
		if counts.Total == 0 {
			continue
		}
		if int64(counts.Free)+asked.divided(node.Status) >= asked.Devices {
			return "", true
		}
		with = append(with, counted{node.Name, counts, taintsOf(node.Status)})
		total, free = total+int64(counts.Total), free+int64(counts.Free)
	}
	if len(with) == 0 {
		return "", false
	}
	slices.SortFunc(with, func(a, b counted) int {
		return cmp.Or(cmp.Compare(b.Free, a.Free), cmp.Compare(a.name, b.name))
	})
	are := []string{"held"}
	for _, of := range []struct {
		count func(v1alpha1.DeviceCounts) int32
		what  string
	}{
		{func(c v1alpha1.DeviceCounts) int32 { return c.Unhealthy }, "unhealthy"},
		{func(c v1alpha1.DeviceCounts) int32 { return c.Maintenance }, "under maintenance"},
		{func(c v1alpha1.DeviceCounts) int32 { return c.Tainted }, "tainted"},
	} {
		if slices.ContainsFunc(with, func(n counted) bool { return of.count(n.DeviceCounts) > 0 }) {
			are = append(are, of.what)
		}
	}
	held := are[len(are)-1]
	if len(are) > 1 {
		held = strings.Join(are[:len(are)-1], ", ") + " or " + held
	}
	switch {
	case free > 0:
		return fmt.Sprintf("no node has %s free: %s", asked.noun(asked.Devices), list(with, func(n counted) string {
			return fmt.Sprintf("%s has %d of %d (%s)", n.name, n.Free, n.Total, holders(n.DeviceCounts, n.taints))
		})), false
	case len(with) == 1:
		return fmt.Sprintf("%s of %s are %s: %s", asked.all(total), with[0].name, held, holders(with[0].DeviceCounts, with[0].taints)), false
	}
	return fmt.Sprintf("%s of %d nodes are %s: %s", asked.all(total), len(with), held, list(with, func(n counted) string {
		return fmt.Sprintf("%s (%s)", n.name, holders(n.DeviceCounts, n.taints))
	})), false
}

// explainShare is explainServing for a request of shares of GPUs. A free GPU that is not shared satisfies a request of memory as a whole.
func explainShare(nodes []v1alpha1.GPUNode, asked request) (reason string, room bool) {
	type counted struct {
		name string
		// memory and shares are the most that is left on one device.
		memory, shares int64
	}
	var with []counted
	for _, node := range nodes {
		fitting, shared := int64(0), false
		most := counted{name: node.Name}
		reported := availability.NewNode(node.Status, nil)
		for _, d := range node.Status.Devices {
			if _, out := whyOutUntolerated(d.Name, d); out {
				continue
			}
			if d.Sharing == nil || d.Sharing.Claims == "" {
				if d.Parent == "" && len(d.Holders) == 0 && asked.Shares == 0 {
					fitting++
				}
				continue
			}
			shared = true
			left := reported.Left(d, reported.Held)
			most.memory, most.shares = max(most.memory, int64(left.Bytes)), max(most.shares, int64(left.Count))
			if asked.fits(d, left) {
				fitting++
			}
		}
		if fitting >= asked.Devices {
			return "", true
		}
		if shared {
			with = append(with, most)
		}
	}
	byShares := asked.Shares > 0 && !slices.ContainsFunc(with, func(n counted) bool { return n.shares >= asked.Shares })
	switch {
	case len(with) == 0 && asked.Shares > 0:
		return fmt.Sprintf("no node divides its GPUs into shares; the pod requests %s of one", equalShares(asked.Shares)), false
	case len(with) == 0:
		return fmt.Sprintf("no node shares the memory of its GPUs; the pod requests %s of one", Mebibytes(asked.Memory)), false
	}
	slices.SortFunc(with, func(a, b counted) int {
		return cmp.Or(cmp.Compare(b.shares, a.shares), cmp.Compare(b.memory, a.memory), cmp.Compare(a.name, b.name))
	})
	amount := Mebibytes(asked.Memory)
	if byShares {
		amount = equalShares(asked.Shares)
	}
	return fmt.Sprintf("no node has %s left on %s: %s", amount, asked.noun(asked.Devices), list(with, func(n counted) string {
		if byShares {
			return fmt.Sprintf("%s has %d at most", n.name, n.shares)
		}
		return fmt.Sprintf("%s has %s at most", n.name, Mebibytes(n.memory))
	})), false
}

// fits reports whether what is left of a shared device satisfies the request.
func (r request) fits(d v1alpha1.DeviceStatus, left device.Share) bool {
	held := slices.ContainsFunc(d.Holders, func(h v1alpha1.DeviceHolder) bool { return !h.Shared && h.Memory == 0 })
	switch {
	case held || int64(left.Bytes) < r.Memory || r.Shares > int64(left.Count):
		return false
	case r.Memory > 0:
		return true
	case d.Sharing.Claims == v1alpha1.ClaimSharing(device.ByMemory): // all of the memory by default
		return len(d.Holders) == 0
	default:
		return d.Sharing.Claims == v1alpha1.ClaimSharing(device.Unlimited) || left.Count > 0
	}
}

// divided returns how many devices with holders have a share left for a claim that requests no amount.
func (r request) divided(status v1alpha1.GPUNodeStatus) (n int64) {
	if r.Limits != "" || r.Resource != "" {
		return 0
	}
	node := availability.NewNode(status, nil)
	for _, d := range status.Devices {
		_, out := whyOutUntolerated(d.Name, d)
		shared := d.Sharing != nil && d.Sharing.Claims != "" && len(d.Holders) > 0
		if shared && !out && r.fits(d, node.Left(d, node.Held)) {
			n++
		}
	}
	return n
}

func equalShares(n int64) string { return Number(int(n), "share") }

// Number returns a number of things for users, such as "1 node" or "2 nodes". cli/overview and cli/doctor call it as well.
func Number(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// Count returns 1 for true and 0 for false, to count and to compare. cli/overview calls it as well.
func Count(is bool) int {
	if is {
		return 1
	}
	return 0
}

// Mebibytes returns an amount of memory for users. Tables of cli/overview call it as well.
func Mebibytes(bytes int64) string { return fmt.Sprintf("%d MiB", bytes>>20) }

// request is what a pod waits for.
type request struct {
	Devices int64
	// Memory is the number of bytes requested of each device, and Shares that of equal shares. If both are zero, the request is for what a
	// device gives by default: all of it, unless the node divides it for claims.
	Memory, Shares int64
	// Resource is the extended resource of partitions; empty for GPUs.
	Resource string
	// Limits is the extended resource of GPUs if the pod requests GPUs by it alone. On a partitioned node it may name partitions.
	Limits string
}

// mixes reports whether the resource of GPUs covers partitions or replicas on a node, or does not cover all of its GPUs.
func (a request) mixes(status v1alpha1.GPUNodeStatus) bool {
	return a.Limits != "" && a.Limits == status.ExtendedResource && (status.Partitions != nil || slices.ContainsFunc(status.Devices, replicated))
}

// counts returns the counts of the requested devices on a node.
func (a request) counts(status v1alpha1.GPUNodeStatus) v1alpha1.DeviceCounts {
	resource := a.Resource
	if a.mixes(status) {
		resource = a.Limits
	}
	if resource == "" {
		return status.Counts
	}
	var counts v1alpha1.DeviceCounts
	node := availability.NewNode(status, nil)
	for _, d := range status.Devices {
		if d.ExtendedResource != resource || d.Excluded {
			continue
		}
		if !replicated(d) {
			node.Count(&counts, d)
			continue
		}
		n, free, held := d.Sharing.Replicas, replicasLeft(d), podsOn(d)
		counts.Total += n
		switch node.Reason(d) {
		case availability.Unhealthy:
			counts.Unhealthy += n
		case availability.Maintenance:
			counts.Maintenance += n
		case availability.Tainted:
			counts.Tainted += n
		case availability.HeldByClaim, availability.Draining:
			counts.Claims += max(0, n-held-free)
			fallthrough // pods may hold replicas of the part that claims leave
		default:
			counts.Pods, counts.Free = counts.Pods+held, counts.Free+free
		}
	}
	return counts
}

// replicated reports whether an extended resource offers replicas of a device.
func replicated(d v1alpha1.DeviceStatus) bool { return d.Sharing != nil && d.Sharing.Replicas > 0 }

// replicasLeft returns how many replicas of a healthy device a pod can get.
func replicasLeft(d v1alpha1.DeviceStatus) int32 { return max(0, d.Sharing.Allocatable-podsOn(d)) }

// podsOn counts the holders of a device that are pods, of which each has one replica.
func podsOn(d v1alpha1.DeviceStatus) (n int32) {
	for _, h := range d.Holders {
		if h.Kind == v1alpha1.HolderPod {
			n++
		}
	}
	return n
}

// resource is the extended resource that names the devices; empty for GPUs.
func (a request) resource() string { return cmp.Or(a.Resource, a.Limits) }

func (a request) noun(n int64) string {
	if a.resource() != "" {
		return fmt.Sprintf("%d %s", n, a.resource())
	}
	return Number(int(n), "GPU")
}

func (a request) all(n int64) string {
	if n == 1 {
		return "all " + cmp.Or(a.resource(), "GPUs")
	}
	return "all " + a.noun(n)
}

// taintsOf returns the taints by rules of a node's devices, each once and a few of many.
func taintsOf(status v1alpha1.GPUNodeStatus) (texts []string) {
	for _, d := range status.Devices {
		for _, t := range d.RuleTaints() {
			texts = append(texts, OneLine(t.String()))
		}
	}
	return FirstOf(uniq(texts), mostTaints, "%d more")
}

// mostTaints bounds the taints of a node that an answer names.
const mostTaints = 2

// holders returns text such as "5 by pods, 3 by claims". It names the taints of tainted devices.
func holders(counts v1alpha1.DeviceCounts, taints []string) string {
	var parts []string
	for _, part := range []struct {
		n    int32
		what string
	}{{counts.Pods, "by pods"}, {counts.Claims, "by claims"}, {counts.Unhealthy, "unhealthy"}, {counts.Maintenance, "under maintenance"},
		{counts.Tainted, "tainted by " + strings.Join(taints, " and ")}} {
		if part.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", part.n, part.what))
		}
	}
	return strings.Join(parts, ", ")
}

func list[T any](nodes []T, describe func(T) string) string {
	parts := make([]string, len(nodes))
	for i, node := range nodes[:min(namedNodes, len(nodes))] {
		parts[i] = describe(node)
	}
	return strings.Join(FirstOf(parts, namedNodes, "and %d more"), ", ")
}

// FirstOf returns the first texts, and in place of the others how many they are. It is pure. Views call it for what they show.
func FirstOf(texts []string, most int, others string) []string {
	if more := len(texts) - most; more > 0 {
		return append(texts[:most:most], fmt.Sprintf(others, more))
	}
	return texts
}

// ofWholeGPUs reports whether the selectors of a class name the driver and devices of type gpu. A class that may select partitions does not count:
// API objects do not say how many more partitions a GPU has room for.
func ofWholeGPUs(class resourceapi.DeviceClass, driver string) bool {
	return names(class, driver) && names(class, "gpu") && !names(class, "mig")
}
