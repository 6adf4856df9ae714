// SPDX-License-Identifier: Apache-2.0

// Package workloads finds the workloads of Tandem's releases in a cluster. Tenants can give their own objects any label and any owner
// reference. So the package starts from what only administrators write: the ClusterRoleBindings of a release name its ServiceAccounts, and
// so its namespace.
package workloads

import (
	"context"
	"errors"
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// Labels of a component of every release: of its workload, and of the ClusterRoleBinding that gives the workload its rights.
const (
	AgentLabels      = "app.kubernetes.io/part-of=tandem,app.kubernetes.io/component=kubelet-plugin"
	ControllerLabels = "app.kubernetes.io/part-of=tandem,app.kubernetes.io/component=controller"
)

// ErrNoBinding means that no ClusterRoleBinding of Tandem exists: it is not installed, or was installed with rbac.create=false.
var ErrNoBinding = errors.New("no ClusterRoleBinding has the labels of Tandem " +
	"(if it is installed with rbac.create=false, give its namespace with --namespace)")

// DaemonSets returns those of the agents. namespace is the one that the user names as a release's. If it is empty, those of all releases are
// found.
func DaemonSets(ctx context.Context, client kubernetes.Interface, namespace string) ([]appsv1.DaemonSet, error) {
	list := func(namespace string) ([]appsv1.DaemonSet, error) {
		list, err := client.AppsV1().DaemonSets(namespace).List(ctx, metav1.ListOptions{LabelSelector: AgentLabels})
		if err != nil {
			return nil, fmt.Errorf("list DaemonSets of namespace %s: %w", namespace, err)
		}
		return list.Items, nil
	}
	return find(ctx, client, namespace, AgentLabels, list, func(set appsv1.DaemonSet) string { return set.Spec.Template.Spec.ServiceAccountName })
}

// Deployments returns those of the controllers, as DaemonSets returns those of the agents.
func Deployments(ctx context.Context, client kubernetes.Interface, namespace string) ([]appsv1.Deployment, error) {
	list := func(namespace string) ([]appsv1.Deployment, error) {
		list, err := client.AppsV1().Deployments(namespace).List(ctx, metav1.ListOptions{LabelSelector: ControllerLabels})
		if err != nil {
			return nil, fmt.Errorf("list Deployments of namespace %s: %w", namespace, err)
		}
		return list.Items, nil
	}
	return find(ctx, client, namespace, ControllerLabels, list, func(d appsv1.Deployment) string { return d.Spec.Template.Spec.ServiceAccountName })
}

// find returns the workloads of a component. account returns the name of a workload's ServiceAccount.
func find[T any](
	ctx context.Context, client kubernetes.Interface, namespace, labels string, list func(namespace string) ([]T, error), account func(T) string,
) ([]T, error) {
	if namespace != "" {
		return list(namespace)
	}
	accounts, err := accounts(ctx, client, labels)
	if err != nil {
		return nil, err
	}
	var found []T
	for i, of := range accounts {
		if i > 0 && accounts[i-1].Namespace == of.Namespace {
			continue
		}
		all, err := list(of.Namespace)
		if err != nil {
			return nil, err
		}
		for _, one := range all {
			if slices.Contains(accounts, types.NamespacedName{Namespace: of.Namespace, Name: account(one)}) {
				found = append(found, one)
			}
		}
	}
	return found, nil
}

// accounts returns the ServiceAccounts that have the rights of a component, sorted.
func accounts(ctx context.Context, client kubernetes.Interface, labels string) ([]types.NamespacedName, error) {
	list, err := client.RbacV1().ClusterRoleBindings().List(ctx, metav1.ListOptions{LabelSelector: labels})
	if apierrors.IsForbidden(err) {
		return nil, fmt.Errorf("list ClusterRoleBindings, which name Tandem's namespace: %w (give the namespace with --namespace)", err)
	}
	if err != nil {
		return nil, fmt.Errorf("list ClusterRoleBindings: %w", err)
	}
	var found []types.NamespacedName
	for _, binding := range list.Items {
		for _, subject := range binding.Subjects {
			if subject.Kind == rbacv1.ServiceAccountKind && subject.Namespace != "" {
				found = append(found, types.NamespacedName{Namespace: subject.Namespace, Name: subject.Name})
			}
		}
	}
	if len(found) == 0 {
		return nil, ErrNoBinding
	}
	slices.SortFunc(found, func(a, b types.NamespacedName) int {
		return slices.Compare([]string{a.Namespace, a.Name}, []string{b.Namespace, b.Name})
	})
	return slices.Compact(found), nil
}

// Agents returns the pods of DaemonSets on one node.
func Agents(ctx context.Context, client kubernetes.Interface, namespace, node string) ([]corev1.Pod, error) {
	sets, err := DaemonSets(ctx, client, namespace)
	if err != nil {
		return nil, err
	}
	return Pods(ctx, client, sets, node)
}

// Pods returns the pods of DaemonSets, of one node or, if node is empty, of all.
func Pods(ctx context.Context, client kubernetes.Interface, sets []appsv1.DaemonSet, node string) ([]corev1.Pod, error) {
	options := metav1.ListOptions{LabelSelector: AgentLabels}
	if node != "" {
		options.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", node).String()
	}
	var found []corev1.Pod
	var seen []string
	for _, set := range sets {
		if slices.Contains(seen, set.Namespace) {
			continue
		}
		seen = append(seen, set.Namespace)
		list, err := client.CoreV1().Pods(set.Namespace).List(ctx, options)
		if err != nil {
			return nil, fmt.Errorf("list pods of namespace %s: %w", set.Namespace, err)
		}
		for _, pod := range list.Items {
			if (node == "" || pod.Spec.NodeName == node) && slices.ContainsFunc(sets, func(set appsv1.DaemonSet) bool { return Controls(&set, &pod) }) {
				found = append(found, pod)
			}
		}
	}
	return found, nil
}

// Controls reports whether the DaemonSet controls the pod. Both must be of one namespace: a tenant can write any UID into a pod of its own.
func Controls(set *appsv1.DaemonSet, pod *corev1.Pod) bool {
	owner := metav1.GetControllerOf(pod)
	return owner != nil && owner.Kind == "DaemonSet" && owner.UID == set.UID && pod.Namespace == set.Namespace
}
