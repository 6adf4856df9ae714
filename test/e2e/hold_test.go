// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/faults"
)

// What is in this file makes one party of a race wait, so that the others decide before it.

// freeze stops a component until thaw or the end of the story. Its sockets stay open and do not answer.
func (s *story) freeze(c *cluster.Component) (thaw func()) {
	s.Helper()
	if err := c.Freeze(); err != nil {
		s.Fatal(err)
	}
	return s.Undo(func() error { return c.Thaw() })
}

// freezeProcess is freeze for processes of a node, by their numbers there.
func (s *story) freezeProcess(n *cluster.Node, pids ...string) (thaw func()) {
	s.Helper()
	s.On(n, "kill", append([]string{"-STOP"}, pids...)...)
	return s.Undo(func() error {
		cmd, err := n.Command(s.Ctx, "kill", append([]string{"-CONT"}, pids...)...)
		if err != nil {
			return err
		}
		return cmd.Run()
	})
}

// freezeController stops the controller, wherever it runs.
func (s *story) freezeController() (thaw func()) {
	s.Helper()
	for _, n := range theCluster.Nodes() {
		if pids := strings.Fields(s.On(n, "sh", "-c", "pgrep -x controller || true")); len(pids) > 0 {
			return s.freezeProcess(n, pids...)
		}
	}
	s.Fatal("no controller runs")
	return nil
}

// shimOf returns the process between the runtime and a pod. While it is frozen, the pod's containers cannot be ended.
func (s *story) shimOf(n *cluster.Node, uid types.UID) string {
	s.Helper()
	shim, err := faults.ShimOf(s.Ctx, n, string(uid))
	if err != nil {
		s.Fatal(err)
	}
	return shim
}

// forbid refuses every write of a user to a resource until allow is called, or the story ends. Probe makes such a write without
// storing it.
func (s *story) forbid(name, group, resource, user string, probe func() error) (allow func()) {
	s.Helper()
	name = "held-back-" + s.Namespace + "-" + name
	s.Kubectl("delete", "validatingadmissionpolicybinding,validatingadmissionpolicy", name, "--ignore-not-found")
	s.Manifest(fmt.Sprintf(`
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: %[1]s}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules: [{apiGroups: [%[2]q], apiVersions: ["*"], operations: [CREATE, UPDATE, DELETE], resources: [%[3]q]}]
  matchConditions: [{name: user, expression: "request.userInfo.username == '%[4]s'"}]
  validations: [{expression: "false", message: held back}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: %[1]s}
spec: {policyName: %[1]s, validationActions: [Deny]}
`, name, group, resource, user))
	allow = s.Undo(func() error {
		_, err := theCluster.Kubectl(s.Ctx, "delete", "validatingadmissionpolicybinding,validatingadmissionpolicy", name, "--ignore-not-found")
		return err
	})
	s.Await(soon, "writes to "+resource+" to be refused", func() error {
		err := probe()
		if err == nil {
			return errors.New("they are allowed")
		}
		if strings.Contains(err.Error(), "held back") {
			return nil
		}
		return err
	})
	return allow
}

// holdSlices keeps the node's agent from writing its ResourceSlices.
func (s *story) holdSlices() (allow func()) {
	s.Helper()
	pod := s.AgentPod(gpuNode)
	agent := s.As(pod.Spec.ServiceAccountName, &pod)
	user := "system:serviceaccount:" + install.Namespace + ":" + pod.Spec.ServiceAccountName
	own := s.SliceOf(gpuNode)
	return s.forbid("slices", "resource.k8s.io", "resourceslices", user, func() error { return writes{s, agent}.update(own) })
}

// holdNodeStatus keeps kubelet from writing the status of its node, so that allocatable does not change.
func (s *story) holdNodeStatus() (allow func()) {
	s.Helper()
	user := "system:node:" + gpuNode
	kubelet := s.impersonate(user, "system:nodes", "system:authenticated")
	return s.forbid("node-status", "", "nodes/status", user, func() error {
		_, err := kubelet.CoreV1().Nodes().Patch(s.Ctx, gpuNode, types.StrategicMergePatchType, []byte(`{"status":{}}`),
			metav1.PatchOptions{DryRun: dryRun}, "status")
		return err
	})
}

func (s *story) impersonate(user string, groups ...string) kubernetes.Interface {
	s.Helper()
	config, err := theCluster.RESTConfig()
	if err != nil {
		s.Fatal(err)
	}
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: groups}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		s.Fatal(err)
	}
	return client
}

// conflict waits until the GPUNode has a conflict with or without a pending eviction.
func (s *story) conflict(patience time.Duration, pendingEviction bool) (lost gpunode.ConflictingClaim) {
	s.Helper()
	s.Await(patience, fmt.Sprintf("a conflict (eviction pending: %t)", pendingEviction), func() error {
		object, err := s.GPUNodeObject()
		if err != nil {
			return err
		}
		for _, l := range object.Status.Conflicts {
			if l.Namespace == s.Namespace && l.PendingEviction == pendingEviction {
				lost = l
				return nil
			}
		}
		return fmt.Errorf("conflicts: %v", object.Status.Conflicts)
	})
	return lost
}

// bound waits until so many pods of the story are on the node, whatever has become of them.
func (s *story) bound(n int) {
	s.Helper()
	s.Await(soon, fmt.Sprintf("%d pods to be bound", n), func() error {
		var states []string
		bound := 0
		for _, pod := range s.Pods() {
			states = append(states, fmt.Sprintf("%s on %q", pod.Name, pod.Spec.NodeName))
			if pod.Spec.NodeName != "" {
				bound++
			}
		}
		if bound != n {
			return errors.New(strings.Join(states, ", "))
		}
		return nil
	})
}

// failed returns the story's failed pods, without those that the story ended.
func (s *story) failed() (names []string) {
	s.Helper()
	for _, pod := range s.Pods() {
		if pod.Status.Phase == corev1.PodFailed && pod.DeletionTimestamp == nil {
			names = append(names, pod.Name+": "+pod.Status.Reason)
		}
	}
	return names
}

// kubeletDir on the node.
const kubeletDir = "/var/lib/kubelet"

// withoutKubelet stops kubelet, does something, and starts it again, the story failing in between or not.
func (s *story) withoutKubelet(part func()) {
	s.Helper()
	kubelet := node().Component(cluster.Kubelet)
	if err := kubelet.Stop(s.Ctx); err != nil {
		s.Fatal(err)
	}
	start := s.Undo(func() error { return kubelet.Start(context.WithoutCancel(s.Ctx)) })
	part()
	start()
}
