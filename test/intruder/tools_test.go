// SPDX-License-Identifier: Apache-2.0

package intruder

import (
	"context"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/migrate"
	"github.com/tandem-gpu/tandem/cli/overview"
	"github.com/tandem-gpu/tandem/cli/workloads"
	"github.com/tandem-gpu/tandem/hack/install"
)

// A tenant's pod has the labels of an agent and names its DaemonSet as owner, and an accomplice has an agent's token. kubectl gpu inspect does
// not run a command in that pod, and migrate does not count it as an agent. The token cannot make a better disguise.
func TestInspectAndMigrateBelieveNoThief(t *testing.T) {
	sets, err := workloads.DaemonSets(t.Context(), theClient, "")
	if err != nil || len(sets) != 1 {
		t.Fatal(len(sets), err)
	}
	pose := func(namespace, name string) *corev1.Pod {
		t.Helper()
		pod := podIn(namespace, name)
		pod.Labels, pod.Spec.NodeName = sets[0].Spec.Template.Labels, ownNode
		pod.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(&sets[0], appsv1.SchemeGroupVersion.WithKind("DaemonSet"))}
		created, err := theClient.CoreV1().Pods(namespace).Create(t.Context(), pod, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		created.Status.Phase = corev1.PodRunning
		created.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		if created, err = theClient.CoreV1().Pods(namespace).UpdateStatus(t.Context(), created, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		return created
	}
	pose("default", "tenants-agent")

	thief := clientOf(t, as(t, agentAccount, agentPods[ownNode]))
	for what, try := range map[string]func() error{
		"create an agent's pod": func() error {
			pod := podIn(install.Namespace, "thief")
			pod.Labels = sets[0].Spec.Template.Labels
			_, err := thief.CoreV1().Pods(install.Namespace).Create(t.Context(), pod, metav1.CreateOptions{})
			return err
		},
		"label a pod": func() error {
			_, err := thief.CoreV1().Pods(install.Namespace).Patch(t.Context(), agentPods[otherNode].Name, types.MergePatchType,
				[]byte(`{"metadata":{"labels":{"app.kubernetes.io/component":"kubelet-plugin"}}}`), metav1.PatchOptions{})
			return err
		},
		"create a DaemonSet": func() error {
			set := sets[0].DeepCopy()
			set.ObjectMeta = metav1.ObjectMeta{Namespace: install.Namespace, Name: "thief", Labels: set.Labels}
			_, err := thief.AppsV1().DaemonSets(install.Namespace).Create(t.Context(), set, metav1.CreateOptions{})
			return err
		},
		"list ClusterRoleBindings": func() error {
			_, err := thief.RbacV1().ClusterRoleBindings().List(t.Context(), metav1.ListOptions{})
			return err
		},
	} {
		if err := try(); !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v", what, err)
		}
	}

	all := overview.Cluster{Client: theClient, DriverName: install.DriverName}
	if pod, err := all.AgentPod(t.Context(), "", ownNode); err == nil {
		t.Errorf("inspect would run a command in %s/%s", pod.Namespace, pod.Name)
	} else if !strings.Contains(err.Error(), "find the running agent of node "+ownNode) {
		t.Error(err)
	}
	plan := func() string {
		t.Helper()
		nodes := migrate.Nodes{
			Client: theClient, DriverName: install.DriverName, Back: true, Only: ownNode,
			GPUNode: func(context.Context, string) (*v1alpha1.GPUNode, error) { return &v1alpha1.GPUNode{}, nil },
		}
		p, err := nodes.Plan(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return p.String()
	}
	if _, err := theClient.CoreV1().Nodes().Patch(t.Context(), ownNode, types.MergePatchType,
		[]byte(`{"metadata":{"labels":{"`+migrate.Label+`":"true"}}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	const agentless = "no agent of Tandem is found"
	if text := plan(); !strings.Contains(text, agentless) {
		t.Errorf("migrate counts the tenant's pod as an agent:\n%s", text)
	}

	// The same pod in the release's namespace, where tenants create none, is the agent.
	agent := pose(install.Namespace, "agent")
	if pod, err := all.AgentPod(t.Context(), "", ownNode); err != nil {
		t.Error(err)
	} else if pod.UID != agent.UID {
		t.Errorf("the agent's pod is %s/%s (%s)", pod.Namespace, pod.Name, pod.Status.Phase)
	}
	if text := plan(); strings.Contains(text, agentless) {
		t.Errorf("migrate does not find the agent:\n%s", text)
	}
}
