// SPDX-License-Identifier: Apache-2.0

package nodelabels

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/klog/v2"
)

// nfdLabels is the annotation in which Node Feature Discovery lists the labels that it manages (node-feature-discovery, api/nfd/v1alpha1).
// GPU Feature Discovery writes its labels through it. Where a label already has the right value, NFD does not become a field manager of it.
const nfdLabels = "nfd.node.kubernetes.io/feature-labels"

// onNode is the output to the Node object.
type onNode struct {
	nodes typedcorev1.NodeInterface
	name  string
	// node is the object that read got.
	node *corev1.Node
}

func (o *onNode) read(ctx context.Context) (err error) {
	if o.node, err = o.nodes.Get(ctx, o.name, metav1.GetOptions{}); err != nil {
		return fmt.Errorf("get node %s: %w", o.name, err)
	}
	return nil
}

func (o *onNode) otherOwner(want map[string]string) string { return otherOwner(o.node, want) }

// write without labels removes Tandem's labels, but keeps those that Node Feature Discovery manages as well.
func (o *onNode) write(ctx context.Context, labels map[string]string) (changed bool, err error) {
	if len(labels) == 0 {
		labels = listedByNFD(o.node)
	}
	if maps.Equal(ownedLabels(o.node), labels) {
		return false, nil
	}
	if o.node, err = applyTo(ctx, o.nodes, o.node, labels); err != nil {
		return false, err
	}
	klog.FromContext(ctx).Info("Wrote the node's labels", "labels", len(labels))
	return true, nil
}

// RemoveFromAll removes the labels of all Writers from all nodes. It is idempotent. On an error it goes on with the other nodes. Uninstallation
// calls it, after the agents have lost their rights.
func RemoveFromAll(ctx context.Context, nodes typedcorev1.NodeInterface) (removed int, err error) {
	const atOnce = 100 // a Node lists the machine's images, and so may have 50 KiB
	var errs []error
	for options := (metav1.ListOptions{Limit: atOnce}); ; {
		list, err := nodes.List(ctx, options)
		if err != nil {
			return removed, errors.Join(append(errs, fmt.Errorf("list nodes: %w", err))...)
		}
		for i := range list.Items {
			node := &list.Items[i]
			keep := listedByNFD(node)
			if maps.Equal(ownedLabels(node), keep) {
				continue
			}
			if _, err := applyTo(ctx, nodes, node, keep); err == nil {
				removed++
			} else if !apierrors.IsNotFound(err) {
				errs = append(errs, err)
			}
		}
		if options.Continue = list.Continue; options.Continue == "" {
			return removed, errors.Join(errs...)
		}
	}
}

// applyTo makes Manager the owner of exactly these labels. It removes no label that another field manager owns as well, and fails where another
// one owns a label with another value. With the UID it does not create a node that was deleted.
func applyTo(ctx context.Context, nodes typedcorev1.NodeInterface, node *corev1.Node, labels map[string]string) (*corev1.Node, error) {
	applied, err := nodes.Apply(ctx, applycorev1.Node(node.Name).WithUID(node.UID).WithLabels(labels), metav1.ApplyOptions{FieldManager: Manager})
	if err != nil {
		return nil, fmt.Errorf("apply the labels of node %s: %w", node.Name, err)
	}
	return applied, nil
}

// ownedLabels are the labels of the node that Manager owns.
func ownedLabels(node *corev1.Node) map[string]string {
	owned := map[string]string{}
	for _, entry := range node.ManagedFields {
		if isOurs(entry) {
			for key := range labelsOf(entry) {
				if value, found := node.Labels[key]; found {
					owned[key] = value
				}
			}
		}
	}
	return owned
}

func isOurs(entry metav1.ManagedFieldsEntry) bool {
	return entry.Manager == Manager && entry.Operation == metav1.ManagedFieldsOperationApply
}

// listedByNFD are the labels that Manager owns and Node Feature Discovery manages. It would not write them again before its next resync, by
// default within an hour.
func listedByNFD(node *corev1.Node) map[string]string {
	labels, listed := ownedLabels(node), nfdList(node)
	maps.DeleteFunc(labels, func(key, _ string) bool { return !slices.Contains(listed, key) })
	return labels
}

func nfdList(node *corev1.Node) []string { return strings.Split(node.Annotations[nfdLabels], ",") }

// otherOwner says who else has one of the labels, or GPU Feature Discovery's timestamp; empty if there is none.
func otherOwner(node *corev1.Node, want map[string]string) string {
	if len(want) == 0 {
		return ""
	}
	keys := append(slices.Sorted(maps.Keys(want)), Prefix+timestamp)
	for _, entry := range slices.SortedFunc(slices.Values(node.ManagedFields), func(a, b metav1.ManagedFieldsEntry) int { return cmp.Compare(a.Manager, b.Manager) }) {
		if isOurs(entry) {
			continue
		}
		labels := labelsOf(entry)
		for _, key := range keys {
			if labels[key] {
				return fmt.Sprintf("the field manager %s owns the label %s", entry.Manager, key)
			}
		}
	}
	listed := nfdList(node)
	for _, key := range keys {
		if slices.Contains(listed, key) {
			return fmt.Sprintf("Node Feature Discovery lists the label %s in the annotation %s", key, nfdLabels)
		}
	}
	return ""
}

// labelsOf returns the keys of the labels that an entry owns (sigs.k8s.io/structured-merge-diff, "f:" before the name of a field).
func labelsOf(entry metav1.ManagedFieldsEntry) map[string]bool {
	var fields struct {
		Metadata struct {
			Labels map[string]json.RawMessage `json:"f:labels"`
		} `json:"f:metadata"`
	}
	if entry.FieldsV1 == nil || json.Unmarshal(entry.FieldsV1.GetRawBytes(), &fields) != nil {
		return nil
	}
	keys := map[string]bool{}
	for field := range fields.Metadata.Labels {
		if key, ok := strings.CutPrefix(field, "f:"); ok {
			keys[key] = true
		}
	}
	return keys
}
