// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/owner"
	"github.com/tandem-gpu/tandem/internal/podstatus"
)

// endedHolders returns the devices of pods with limits that have ended, or were deleted by force, and may still use them. Tandem gives these
// devices to no other holder. kubelet no longer knows these pods: with NVIDIA's plugin it would give the devices to the next pods.
func (n *Nodes) endedHolders(ctx context.Context, node string) (devices []string, err error) {
	object, err := n.gpuNode(ctx, node)
	if err != nil || object == nil {
		return nil, err
	}
	// The pods are read after their holds: a pod that is there now was there then.
	pods, err := n.pods(ctx, node)
	if err != nil {
		return nil, err
	}
	lives := func(of v1alpha1.PodReference) bool {
		return slices.ContainsFunc(pods, func(pod corev1.Pod) bool { return owner.Is(&pod, of.UID) && !podstatus.Ended(&pod) })
	}
	for _, d := range object.Status.Devices {
		for _, h := range d.Holders {
			if h.Kind == v1alpha1.HolderPod && (h.State == v1alpha1.HoldDraining || !slices.ContainsFunc(h.Pods, lives)) {
				devices = append(devices, heldFor(d, h))
			}
		}
	}
	return devices, nil
}

// heldFor names a device and what its holder waits for.
func heldFor(d v1alpha1.DeviceStatus, h v1alpha1.DeviceHolder) string {
	if h.WaitsFor == "" {
		return d.Name
	}
	return fmt.Sprintf("%s (by %s)", d.Name, h.WaitsFor)
}

// checkHolders returns why NVIDIA's software would not know what pods with limits hold on a node. kubelet keeps a device of a living pod by
// resource and ID. NVIDIA's plugin has to list it under the same resource and ID, or kubelet gives the GPU to another pod. For a GPU without
// partitions these are nvidia.com/gpu and its UUID, unless the plugin shares it. Otherwise they depend on the plugin's configuration. NVIDIA's
// DRA driver knows nothing about limits.
func (n *Nodes) checkHolders(sets []daemonSet, node *corev1.Node, status v1alpha1.GPUNodeStatus) (refusals []string, err error) {
	if status.Omitted > 0 {
		return []string{"its GPUNode does not list all devices and holders"}, nil
	}
	configured, claims, err := returns(sets, node)
	if err != nil {
		return nil, err
	}
	// Until NVIDIA's software has registered, further pods may get devices, unless the node is cordoned.
	comes := !node.Spec.Unschedulable
	partitioned := map[string]bool{}
	for _, d := range status.Devices {
		partitioned[d.Parent] = true
	}
	// On the way back all GPUs are offered to limits, whatever the mode was.
	allowsMore := status.Mode == string(config.ModeClaimsOnly) || status.Mode == string(config.ModeSplit)
	var ended, taken, unlike, unlikeSoon []string
	for _, d := range status.Devices {
		// How such a device will be offered is known only once the mode has changed. The move checks again then.
		unoffered := allowsMore && d.ExtendedResource == "" && d.Parent == "" && !d.Excluded
		held, like := false, !configured && (d.ExtendedResource == config.Defaults().ResourceName || unoffered) && d.Parent == "" &&
			!partitioned[d.Name] && (d.Sharing == nil || d.Sharing.Replicas == 0)
		for _, h := range d.Holders {
			if h.Kind == v1alpha1.HolderPod {
				held, like = true, like && !h.Shared && !unoffered
			}
			if h.Kind == v1alpha1.HolderPod && h.WaitsFor != "" {
				ended = append(ended, heldFor(d, h))
			}
		}
		if held && claims {
			taken = append(taken, d.Name)
		}
		switch {
		case like:
		case held:
			unlike = append(unlike, d.Name)
		case comes && (unoffered || d.ExtendedResource != "" && !d.Excluded):
			unlikeSoon = append(unlikeSoon, d.Name)
		}
	}
	for _, refusal := range []struct {
		devices []string
		applies bool
		text    string
	}{
		{ended, true, "GPUs are still used although kubelet no longer knows the pods: %s. NVIDIA's software would give them away. " +
			"Wait until they are free, or end the processes"},
		{taken, true, "NVIDIA's DRA driver would give the GPUs of pods with limits to claims: %s. Drain the node with kubectl drain"},
		{unlike, !n.SameConfig, "NVIDIA's plugin may give the GPUs of pods to others, because its sharing, MIG strategy or resource names " +
			"may differ from Tandem's: %s. Drain the node with kubectl drain; or, if they are the same, add --same-config"},
		{unlikeSoon, !n.SameConfig && len(unlike) == 0, "pods may get GPUs before NVIDIA's plugin returns, which may then give these to others, because " +
			"its sharing, MIG strategy or resource names may differ from Tandem's: %s. Cordon the node with kubectl cordon; or, if they are the " +
			"same, add --same-config"},
	} {
		if refusal.applies && len(refusal.devices) > 0 {
			refusals = append(refusals, fmt.Sprintf(refusal.text, strings.Join(refusal.devices, ", ")))
		}
	}
	if claims && comes && len(taken) == 0 {
		refusals = append(refusals, "pods may get GPUs by limits before NVIDIA's DRA driver returns, which would give these to claims. "+
			"Cordon the node with kubectl cordon")
	}
	return refusals, nil
}

// returns reports what will come back to a node: whether a device plugin has a configuration, and whether a DRA driver serves GPUs to claims.
func returns(sets []daemonSet, node *corev1.Node) (configured, claims bool, err error) {
	after := node.DeepCopy()
	metav1.SetMetaDataLabel(&after.ObjectMeta, Label, returning)
	if after.Annotations[operatorAnnotation] == "true" {
		after.Labels[operatorLabel] = "true"
	}
	for _, set := range sets {
		runs, err := set.runsOn(after)
		if err != nil {
			return false, false, err
		}
		configured = configured || runs && set.role == devicePlugin && set.mayShare()
		claims = claims || runs && set.role == draDriver
	}
	return configured, claims, nil
}
