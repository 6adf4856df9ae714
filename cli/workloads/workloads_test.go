// SPDX-License-Identifier: Apache-2.0

package workloads

import (
	"errors"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"
)

func meta(namespace, name, component string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(namespace + "/" + name), Labels: map[string]string{
		"app.kubernetes.io/part-of": "tandem", "app.kubernetes.io/component": component,
	}}
}

func set(namespace, name, account string) *appsv1.DaemonSet {
	return &appsv1.DaemonSet{ObjectMeta: meta(namespace, name, "kubelet-plugin"),
		Spec: appsv1.DaemonSetSpec{Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{ServiceAccountName: account}}}}
}

func pod(namespace, name, node string, owner *metav1.OwnerReference) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: meta(namespace, name, "kubelet-plugin"), Spec: corev1.PodSpec{NodeName: node}}
	if owner != nil {
		p.OwnerReferences = []metav1.OwnerReference{*owner}
	}
	return p
}

func owner(kind string, uid types.UID, controller bool) *metav1.OwnerReference {
	return &metav1.OwnerReference{APIVersion: "apps/v1", Kind: kind, UID: uid, Controller: ptr.To(controller)}
}

func binding(name, component string, subjects ...rbacv1.Subject) *rbacv1.ClusterRoleBinding {
	return &rbacv1.ClusterRoleBinding{ObjectMeta: meta("", name, component), Subjects: subjects}
}

func account(namespace, name string) rbacv1.Subject {
	return rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: name}
}

// cluster has two releases, and a tenant who copies all that a tenant can write.
func cluster() *fake.Clientset {
	deployment := func(namespace, account string) *appsv1.Deployment {
		d := &appsv1.Deployment{ObjectMeta: meta(namespace, "tandem-controller", "controller")}
		d.Spec.Template.Spec.ServiceAccountName = account
		return d
	}
	return fake.NewClientset(
		binding("tandem", "kubelet-plugin", account("tandem-system", "tandem"), rbacv1.Subject{Kind: rbacv1.GroupKind, Name: "x"}),
		binding("second", "kubelet-plugin", account("second", "tandem")),
		binding("tandem-controller", "controller", account("tandem-system", "tandem-controller")),
		set("tandem-system", "tandem", "tandem"), set("second", "tandem", "tandem"), set("tandem-system", "other", "another-account"),
		set("aaa-tenant", "tandem", "tandem"), set("zzz-tenant", "tandem", "tandem"),
		deployment("tandem-system", "tandem-controller"), deployment("aaa-tenant", "tandem-controller"),
		pod("tandem-system", "agent-a", "a", owner("DaemonSet", "tandem-system/tandem", true)),
		pod("tandem-system", "agent-b", "b", owner("DaemonSet", "tandem-system/tandem", true)),
		pod("second", "agent-a", "a", owner("DaemonSet", "second/tandem", true)),
		pod("tandem-system", "unowned", "a", nil),
		pod("tandem-system", "not-its-controller", "a", owner("DaemonSet", "tandem-system/tandem", false)),
		pod("tandem-system", "another-kind", "a", owner("Job", "tandem-system/tandem", true)),
		pod("tandem-system", "another-owner", "a", owner("DaemonSet", "tandem-system/other", true)),
		pod("aaa-tenant", "its-own", "a", owner("DaemonSet", "aaa-tenant/tandem", true)),
		pod("aaa-tenant", "forged", "a", owner("DaemonSet", "tandem-system/tandem", true)),
	)
}

func names[T any, P interface {
	*T
	metav1.Object
}](objects []T) string {
	var found []string
	for i := range objects {
		found = append(found, P(&objects[i]).GetNamespace()+"/"+P(&objects[i]).GetName())
	}
	return strings.Join(found, " ")
}

// A tenant's objects are not Tandem's, whatever labels, names and owners they have.
func TestOnlyWhatAdministratorsBind(t *testing.T) {
	client := cluster()
	for namespace, want := range map[string]struct{ sets, onA, all, deployments string }{
		"": {"second/tandem tandem-system/tandem", "second/agent-a tandem-system/agent-a", "second/agent-a tandem-system/agent-a tandem-system/agent-b",
			"tandem-system/tandem-controller"},
		// The user names the namespace, so no ClusterRoleBinding has to.
		"second": {"second/tandem", "second/agent-a", "second/agent-a", ""},
	} {
		sets, err := DaemonSets(t.Context(), client, namespace)
		if got := names(sets); err != nil || got != want.sets {
			t.Errorf("DaemonSets of %q: %s, %v", namespace, got, err)
		}
		for node, want := range map[string]string{"a": want.onA, "": want.all} {
			pods, err := Pods(t.Context(), client, sets, node)
			if got := names(pods); err != nil || got != want {
				t.Errorf("pods of %q on %q: %s, %v", namespace, node, got, err)
			}
		}
		deployments, err := Deployments(t.Context(), client, namespace)
		if got := names(deployments); err != nil || got != want.deployments {
			t.Errorf("Deployments of %q: %s, %v", namespace, got, err)
		}
	}
}

func TestNoBinding(t *testing.T) {
	client := fake.NewClientset(set("tandem-system", "tandem", "tandem"), binding("x", "another", account("tandem-system", "tandem")))
	if sets, err := DaemonSets(t.Context(), client, ""); !errors.Is(err, ErrNoBinding) || len(sets) > 0 {
		t.Errorf("%v, %v", sets, err)
	}
	client.PrependReactor("list", "clusterrolebindings", func(action clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(action.GetResource().GroupResource(), "", errors.New("no"))
	})
	if _, err := DaemonSets(t.Context(), client, ""); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "give the namespace with --namespace") {
		t.Error(err)
	}
}
