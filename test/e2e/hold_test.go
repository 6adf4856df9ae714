// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
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
	return s.undo(func() error { return c.Thaw() })
}

// freezeProcess is freeze for processes of a node, by their numbers there.
func (s *story) freezeProcess(n *cluster.Node, pids ...string) (thaw func()) {
	s.Helper()
	s.on(n, "kill", append([]string{"-STOP"}, pids...)...)
	return s.undo(func() error {
		cmd, err := n.Command(s.ctx, "kill", append([]string{"-CONT"}, pids...)...)
		if err != nil {
			return err
		}
		return cmd.Run()
	})
}

// undo returns a function that runs once, at the latest when the story ends.
func (s *story) undo(action func() error) func() {
	var once sync.Once
	undo := func() {
		once.Do(func() {
			if err := action(); err != nil {
				s.Error(err)
			}
		})
	}
	s.Cleanup(undo)
	return undo
}

// agentProcess is the agent's process on a node.
func (s *story) agentProcess(n *cluster.Node) string {
	s.Helper()
	return strings.TrimSpace(s.on(n, "pgrep", "-x", "kubelet-plugin"))
}

// freezeController stops the controller, wherever it runs.
func (s *story) freezeController() (thaw func()) {
	s.Helper()
	for _, n := range theCluster.Nodes() {
		if pids := strings.Fields(s.on(n, "sh", "-c", "pgrep -x controller || true")); len(pids) > 0 {
			return s.freezeProcess(n, pids...)
		}
	}
	s.Fatal("no controller runs")
	return nil
}

// shimOf returns the process between the runtime and a pod. While it is frozen, the pod's containers cannot be ended.
func (s *story) shimOf(n *cluster.Node, uid types.UID) string {
	s.Helper()
	shim, err := faults.ShimOf(s.ctx, n, string(uid))
	if err != nil {
		s.Fatal(err)
	}
	return shim
}

// forbid refuses every write of a user to a resource until allow is called, or the story ends. Probe makes such a write without
// storing it.
func (s *story) forbid(name, group, resource, user string, probe func() error) (allow func()) {
	s.Helper()
	name = "held-back-" + s.namespace + "-" + name
	s.kubectl("delete", "validatingadmissionpolicybinding,validatingadmissionpolicy", name, "--ignore-not-found")
	s.manifest(fmt.Sprintf(`
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
	allow = s.undo(func() error {
		_, err := theCluster.Kubectl(s.ctx, "delete", "validatingadmissionpolicybinding,validatingadmissionpolicy", name, "--ignore-not-found")
		return err
	})
	s.await(soon, "writes to "+resource+" to be refused", func() error {
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
	pod := s.agentPod(gpuNode)
	agent := s.as(pod.Spec.ServiceAccountName, &pod)
	user := "system:serviceaccount:" + install.Namespace + ":" + pod.Spec.ServiceAccountName
	own := s.sliceOf(gpuNode)
	return s.forbid("slices", "resource.k8s.io", "resourceslices", user, func() error { return writes{s, agent}.update(own) })
}

// holdNodeStatus keeps kubelet from writing the status of its node, so that allocatable does not change.
func (s *story) holdNodeStatus() (allow func()) {
	s.Helper()
	user := "system:node:" + gpuNode
	kubelet := s.impersonate(user, "system:nodes", "system:authenticated")
	return s.forbid("node-status", "", "nodes/status", user, func() error {
		_, err := kubelet.CoreV1().Nodes().Patch(s.ctx, gpuNode, types.StrategicMergePatchType, []byte(`{"status":{}}`),
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

// gpuNodeObject is the node's current GPUNode.
func (s *story) gpuNodeObject() (gpunode.GPUNode, error) {
	var object gpunode.GPUNode
	text, err := theClient.Discovery().RESTClient().Get().
		AbsPath("/apis", gpunode.GroupVersion.Group, gpunode.GroupVersion.Version, gpunode.Resource.Resource, gpuNode).DoRaw(s.ctx)
	if err == nil {
		err = json.Unmarshal(text, &object)
	}
	return object, err
}

// conflict waits until the GPUNode has a conflict with or without a pending eviction.
func (s *story) conflict(patience time.Duration, pendingEviction bool) (lost gpunode.ConflictingClaim) {
	s.Helper()
	s.await(patience, fmt.Sprintf("a conflict (eviction pending: %t)", pendingEviction), func() error {
		object, err := s.gpuNodeObject()
		if err != nil {
			return err
		}
		for _, l := range object.Status.Conflicts {
			if l.Namespace == s.namespace && l.PendingEviction == pendingEviction {
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
	s.await(soon, fmt.Sprintf("%d pods to be bound", n), func() error {
		var states []string
		bound := 0
		for _, pod := range s.pods() {
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
	for _, pod := range s.pods() {
		if pod.Status.Phase == corev1.PodFailed && pod.DeletionTimestamp == nil {
			names = append(names, pod.Name+": "+pod.Status.Reason)
		}
	}
	return names
}

// took runs a part of a story and says how long it took.
func (s *story) took(what string, part func()) time.Duration {
	s.Helper()
	began := time.Now()
	part()
	took := time.Since(began)
	s.Logf("%s: %.1f s", what, took.Seconds())
	return took
}

// kubeletDir on the node.
const kubeletDir = "/var/lib/kubelet"

// withoutKubelet stops kubelet, does something, and starts it again, the story failing in between or not.
func (s *story) withoutKubelet(part func()) {
	s.Helper()
	kubelet := node().Component(cluster.Kubelet)
	if err := kubelet.Stop(s.ctx); err != nil {
		s.Fatal(err)
	}
	start := s.undo(func() error { return kubelet.Start(context.WithoutCancel(s.ctx)) })
	part()
	start()
}

// nodePath is where a file of the node is for this process.
func (s *story) nodePath(path string) string {
	s.Helper()
	root, err := node().Root()
	if err != nil {
		s.Fatal(err)
	}
	return filepath.Join(root, path)
}
