// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/pager"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// ConditionGPUsHealthy is the type of the node condition that says whether all GPUs of a node are healthy. It is part of the API.
const ConditionGPUsHealthy corev1.NodeConditionType = "GPUsHealthy"

// ConditionGPURepairNeeded is the type of the node condition for tools that repair nodes. It is True while a GPU of the node has a fault that
// only a reboot or another GPU ends: its reason is Reboot or Replace. It is False with the reason Reset where the reset of one GPU is enough,
// which is no reason to end the other pods of the node. It is part of the API.
const ConditionGPURepairNeeded corev1.NodeConditionType = "GPURepairNeeded"

// Reasons of the conditions, beside the reason of one fault.
const (
	conditionNoFault = "NoFault"
	conditionHealthy = "AllHealthy"
	conditionSeveral = "SeveralFaults"
	conditionUnknown = "NotServed"
)

// maxConditionMessage bounds the message: a node is written often.
const maxConditionMessage = 1024

// GPUsHealthy returns the condition of a node by the status of its GPUNode, without times. served is false for a node without GPUs, and
// while the agent has read none. It is a pure function.
func GPUsHealthy(status v1alpha1.GPUNodeStatus) (condition corev1.NodeCondition, served bool) {
	condition = corev1.NodeCondition{
		Type: ConditionGPUsHealthy, Status: corev1.ConditionTrue, Reason: conditionHealthy, Message: "all GPUs and partitions are healthy",
	}
	unhealthy := map[string]bool{}
	var faults []string
	for _, d := range status.Devices {
		if d.Parent == "" && d.UnhealthyReason != "" {
			unhealthy[d.Name] = true
		}
	}
	reasons := map[string]bool{}
	for _, d := range status.Devices {
		reason, _, _ := strings.Cut(d.UnhealthyReason, ":")
		served = served || reason != device.ReasonNotRead
		// A partition has the faults of its GPU. One that is being made has no reason of one word.
		if reason == "" || strings.Contains(reason, " ") || unhealthy[d.Parent] || d.Excluded {
			continue
		}
		reasons[reason] = true
		condition.Status, condition.Reason = corev1.ConditionFalse, reason
		faults = append(faults, d.Name+": "+d.UnhealthyReason)
	}
	if len(reasons) > 1 {
		condition.Reason = conditionSeveral
	}
	if len(faults) > 0 {
		condition.Message = conditionMessage(faults)
	}
	return condition, served
}

func conditionMessage(faults []string) string {
	message := strings.Join(faults, "; ")
	return strings.ToValidUTF8(message[:min(len(message), maxConditionMessage)], "")
}

// GPURepairNeeded returns the condition of a node by the status of its GPUNode, without times. What keeps a GPU from new holders and is no
// hardware fault, such as a full disk or a pause, needs no repair. It is a pure function.
func GPURepairNeeded(status v1alpha1.GPUNodeStatus) corev1.NodeCondition {
	condition := corev1.NodeCondition{
		Type: ConditionGPURepairNeeded, Status: corev1.ConditionFalse, Reason: conditionNoFault, Message: "no GPU has a hardware fault",
	}
	worst := device.RepairNone
	listed := map[string]bool{}
	var faults []string
	for _, d := range status.Devices {
		// An older agent does not write the repair.
		repair := device.WorstRepair(cmp.Or(device.Repair(d.Repair), device.ParseHealth(d.UnhealthyReason).Repair()), device.RepairNone)
		// A partition has the faults of its GPU, which is listed before it.
		if repair == device.RepairNone || d.Excluded || listed[d.Parent] {
			continue
		}
		listed[d.Name] = true
		worst = device.WorstRepair(worst, repair)
		faults = append(faults, fmt.Sprintf("%s needs %s: %s", d.Name, repair, d.UnhealthyReason))
	}
	if worst != device.RepairNone {
		condition.Reason, condition.Message = string(worst), conditionMessage(faults)
	}
	if worst != device.RepairNone && worst != device.RepairReset {
		condition.Status = corev1.ConditionTrue
	}
	return condition
}

// conditions writes the conditions GPUsHealthy and GPURepairNeeded of nodes.
type conditions struct{ cluster }

func (r *conditions) register(m manager.Manager) error {
	reported := changed(func(n *corev1.Node) any { return n.Status.Conditions })
	return forGPUNodes(m, "conditions", 2, gpuNodeChanged).
		Watches(&corev1.Node{}, &handler.EnqueueRequestForObject{}, builder.WithPredicates(reported)).
		Complete(r)
}

// Reconcile implements reconcile.Reconciler for one node. It is idempotent.
func (r *conditions) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	gpus, node := &v1alpha1.GPUNode{}, &corev1.Node{}
	if err := r.client.Get(ctx, request.NamespacedName, node); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if err := r.client.Get(ctx, request.NamespacedName, gpus); client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, err
	}
	healthy, served := GPUsHealthy(gpus.Status)
	var errs []error
	for _, want := range []corev1.NodeCondition{healthy, GPURepairNeeded(gpus.Status)} {
		before := conditionOf(node, want.Type)
		if !served {
			// A node that reboots, or whose driver is loaded again, is no repaired one yet.
			if before.Type == "" || want.Type == ConditionGPURepairNeeded && before.Status == corev1.ConditionTrue && gpus.Status.Waiting != "" {
				continue
			}
			want.Status, want.Reason = corev1.ConditionUnknown, conditionUnknown
			want.Message = cmp.Or(gpus.Status.Waiting, "no agent serves GPUs of the node")
		}
		if before.Status == want.Status && before.Reason == want.Reason && before.Message == want.Message {
			continue
		}
		want.LastHeartbeatTime = metav1.NewTime(r.now())
		want.LastTransitionTime = want.LastHeartbeatTime
		if before.Status == want.Status {
			want.LastTransitionTime = before.LastTransitionTime
		}
		errs = append(errs, r.write(ctx, node, want))
	}
	return reconcile.Result{}, errors.Join(errs...)
}

// write writes one condition. An admission policy of an older chart denies a condition that it does not know.
func (r *conditions) write(ctx context.Context, node *corev1.Node, condition corev1.NodeCondition) error {
	patch := jsonPatch{types.StrategicMergePatchType, map[string]any{"status": map[string]any{"conditions": []corev1.NodeCondition{condition}}}}
	if err := r.client.Status().Patch(ctx, node.DeepCopy(), patch); err != nil {
		return client.IgnoreNotFound(fmt.Errorf("write condition %s of node %s: %w", condition.Type, node.Name, err))
	}
	return nil
}

func isOurs(c corev1.NodeCondition) bool {
	return c.Type == ConditionGPUsHealthy || c.Type == ConditionGPURepairNeeded
}

// conditionOf returns a condition of a node; an empty one if there is none.
func conditionOf(node *corev1.Node, of corev1.NodeConditionType) corev1.NodeCondition {
	for _, c := range node.Status.Conditions {
		if c.Type == of {
			return c
		}
	}
	return corev1.NodeCondition{}
}

// RemoveConditions removes Tandem's conditions from all nodes: no controller updates them after an uninstallation. It is idempotent. On an
// error it goes on with the other nodes.
func RemoveConditions(ctx context.Context, nodes typedcorev1.NodeInterface) (removed int, err error) {
	patch := fmt.Appendf(nil, `{"status":{"conditions":[{"$patch":"delete","type":%q},{"$patch":"delete","type":%q}]}}`,
		ConditionGPUsHealthy, ConditionGPURepairNeeded)
	pages := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return nodes.List(ctx, o) })
	pages.PageSize = 100 // a Node lists the machine's images, and so may have 50 KiB
	var failed error
	err = pages.EachListItem(ctx, metav1.ListOptions{}, func(object runtime.Object) error {
		node, is := object.(*corev1.Node)
		if !is || !slices.ContainsFunc(node.Status.Conditions, isOurs) {
			return nil
		}
		if _, err := nodes.Patch(ctx, node.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status"); err == nil {
			removed++
		} else if !apierrors.IsNotFound(err) {
			failed = errors.Join(failed, fmt.Errorf("remove conditions of node %s: %w", node.Name, err))
		}
		return nil
	})
	if err != nil {
		err = fmt.Errorf("list nodes: %w", err)
	}
	return removed, errors.Join(failed, err)
}
