// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	auditapi "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/utils/ptr"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/test/gpufaults"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// TestBudgetOfABrokenGPU: a budget keeps a pod with a limit on a GPU that has fallen off the bus, and an event says so. Without the budget the
// pod leaves, once, although the controller that evicts it is ended. The others stay.
func TestBudgetOfABrokenGPU(t *testing.T) {
	s := begin(t)
	machine := s.Machine()
	end := s.Undo(func() error { return gpufaults.Clear(machine) })
	s.Installed("health.values.yaml")
	s.Manifest(manifests.Deployment("infer", 3))
	s.Running(patient, 3, 0)
	allowEvictions := s.forbidEvictions()
	before := map[types.UID]bool{}
	for _, pod := range s.Pods() {
		before[pod.UID] = true
	}
	victim := s.Pods()[0]
	gpu := s.GPUs(victim.Name, "")[0]
	if err := gpufaults.XID79.Raise(machine, gpu); err != nil {
		t.Fatal(err)
	}
	s.Event("Pod", victim.Name, "NotEvicted", fmt.Sprintf("gpu-%d of node %s", gpu, gpuNode), "tandem-gpu.dev/unhealthy=Lost:NoExecute", "disruption budget")
	if now := s.Pod(victim.Name); now.UID != victim.UID || now.DeletionTimestamp != nil {
		t.Errorf("the pod is %+v in spite of the budget", now.ObjectMeta)
	}
	allowEvictions()
	s.Event("Pod", victim.Name, "EvictedByTaint", "and was evicted")
	// The next leader finds the pod while it ends, or after.
	s.Kubectl("delete", "pods", "-n", install.Namespace, "-l", controllerLabel, "--grace-period=0", "--force")
	s.Running(soon, 3, 0)
	stayed := 0
	for _, pod := range s.Pods() {
		if slices.Contains(s.GPUs(pod.Name, ""), gpu) {
			t.Errorf("%s has GPU %d, which is lost", pod.Name, gpu)
		}
		if before[pod.UID] {
			stayed++
		}
	}
	if stayed != 2 {
		t.Errorf("%d of 2 pods stayed", stayed)
	}
	end()
	s.Await(soon, "all other GPUs to be offered", func() error { return s.OfferedToPods(gpusANode) })
	evicted := 0
	list, err := theClient.CoreV1().Events(s.Namespace).List(s.Ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, event := range list.Items {
		if event.Reason == "EvictedByTaint" {
			evicted++
		}
	}
	if evicted != 1 {
		t.Errorf("%d evictions are reported", evicted)
	}
}

// eachStepVariable has TestEvictionAtEachStep play all pairs of a component and a step.
const eachStepVariable = "EACH_STEP"

// TestEvictionAtEachStep kills the agent, the controllers or the API server at a step of an eviction: each at one step, or with EACH_STEP=1 at all
// four. Only the pod of the broken GPU is evicted, and only once. After the fault the GPU is offered again.
func TestEvictionAtEachStep(t *testing.T) {
	s := begin(t)
	s.Undo(func() error { return gpufaults.Clear(s.Machine()) })
	s.Installed("health.values.yaml")
	s.Manifest(manifests.Deployment("infer", 3))
	s.Running(patient, 3, 0)
	played := 0
	for of, kill := range map[string]func(){
		"agent": func() { s.On(s.Node(), "pkill", "-KILL", "-x", "kubelet-plugin") },
		"controllers": func() {
			for _, n := range theCluster.Nodes() {
				s.On(n, "sh", "-c", "pkill -KILL -x controller || true")
			}
		},
		"API server": func() {
			server := theCluster.Component(cluster.APIServer)
			if err := errors.Join(server.Kill(s.Ctx), server.Start(s.Ctx)); err != nil {
				t.Fatal(err)
			}
		},
	} {
		for step, most := range map[string]string{"the GPU is broken": "agent", "a budget keeps the pod": "controllers", "the pod is ending": "API server", "the pod is gone": ""} {
			if of == most || os.Getenv(eachStepVariable) != "" {
				s.leavesOnce(step, of, kill)
				played++
			}
		}
	}
	if played < 3 {
		t.Errorf("%d steps were played", played)
	}
}

// leavesOnce breaks the GPU of one of the story's pods, and kills a component at a step.
func (s *story) leavesOnce(step, of string, kill func()) {
	s.Helper()
	when := of + " when " + step
	s.Logf("killing the %s", when)
	before := s.Pods()
	victim := before[0]
	gpu := s.GPUs(victim.Name, "")[0]
	used := slices.Concat(slices.Collect(maps.Values(s.Seen()))...)
	release := s.holdsAt(step, victim)
	from := s.audited(0, func(auditapi.Event) {})
	if err := gpufaults.XID79.Raise(s.Machine(), gpu); err != nil {
		s.Fatal(err)
	}
	there := func() *corev1.Pod {
		pods := s.Pods()
		if at := slices.IndexFunc(pods, func(p corev1.Pod) bool { return p.UID == victim.UID }); at >= 0 {
			return &pods[at]
		}
		return nil
	}
	switch step {
	case "a budget keeps the pod":
		s.Event("Pod", victim.Name, "NotEvicted", "disruption budget")
	case "the pod is ending":
		s.Await(soon, when, func() error {
			if pod := there(); pod == nil || pod.DeletionTimestamp == nil {
				return errors.New("the pod is not being deleted")
			}
			return nil
		})
	case "the pod is gone":
		s.Await(soon, when, func() error {
			if there() != nil {
				return errors.New("the pod is still there")
			}
			return nil
		})
	}
	kill()
	if step == "the pod is ending" {
		s.react(unused(used))
		if pod := there(); pod == nil || pod.DeletionTimestamp == nil {
			s.Fatalf("%s: the pod did not take its time to end", when)
		}
	}
	release()
	s.Only(patient, len(before), victim.Name)
	stayed := 0
	for _, pod := range s.Pods() {
		if slices.ContainsFunc(before, func(p corev1.Pod) bool { return p.UID == pod.UID }) {
			stayed++
		}
		if slices.Contains(s.GPUs(pod.Name, ""), gpu) {
			s.Errorf("%s: %s has GPU %d, which is lost", when, pod.Name, gpu)
		}
	}
	if stayed != len(before)-1 {
		s.Errorf("%s: %d of %d pods stayed", when, stayed, len(before)-1)
	}
	if err := gpufaults.Clear(s.Machine()); err != nil {
		s.Fatal(err)
	}
	s.Await(patient, "all GPUs to be offered: "+when, func() error {
		return errors.Join(s.OfferedToPods(gpusANode), s.OfferedToClaims(gpusANode-len(before)))
	})
	evicted := 0
	s.audited(from, func(event auditapi.Event) {
		if event.ObjectRef.Subresource == "eviction" && event.ResponseStatus.Code < http.StatusBadRequest {
			evicted++
		}
	})
	// An API server that is killed may not have written it down.
	if evicted > 1 || evicted == 0 && of != "API server" {
		s.Errorf("%s: %d evictions", when, evicted)
	}
	s.Logf("%s: %d eviction", when, evicted)
}

// unused returns a GPU that is not among some.
func unused(used []int) int {
	gpu := 0
	for slices.Contains(used, gpu) {
		gpu++
	}
	return gpu
}

// react applies a rule for a free GPU, removes it, and waits until the GPUNode shows both. At each change of the GPUNode's taints the
// controller looks again at the pod that is ending.
func (s *story) react(free int) {
	s.Helper()
	if _, err := theClient.ResourceV1().DeviceTaintRules().List(s.Ctx, metav1.ListOptions{}); apierrors.IsNotFound(err) {
		s.Log("the API server does not serve DeviceTaintRules: the pod ends before the controller has looked at it again")
		return
	}
	s.Cleanup(s.endTaint)
	s.taints(free, "NoSchedule")
	s.Shows("the rule", func(n gpunode.GPUNode) bool { return n.Status.Counts.Tainted == 1 })
	s.endTaint()
	s.Shows("the end of the rule", func(n gpunode.GPUNode) bool { return n.Status.Counts.Tainted == 0 })
}

// holdsAt holds an eviction at a step until release is called: a budget refuses it, or the pod takes time to end. The other steps are not held.
func (s *story) holdsAt(step string, victim corev1.Pod) (release func()) {
	s.Helper()
	switch step {
	case "a budget keeps the pod":
		return s.forbidEvictions()
	case "the pod is ending":
		release := theKubelets[gpuNode].Keep(victim.UID)
		s.Cleanup(release)
		return release
	}
	return func() {}
}

// forbidEvictions makes a budget that keeps each of the three pods, until allow is called.
func (s *story) forbidEvictions() (allow func()) {
	s.Helper()
	s.Manifest(`
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: all}
spec: {minAvailable: 3, selector: {matchLabels: {app: infer}}}
`)
	s.Await(soon, "the budget to allow nothing", func() error {
		budget, err := theClient.PolicyV1().PodDisruptionBudgets(s.Namespace).Get(s.Ctx, "all", metav1.GetOptions{})
		if err == nil && (budget.Status.CurrentHealthy != 3 || budget.Status.DisruptionsAllowed > 0) {
			err = fmt.Errorf("it is %+v", budget.Status)
		}
		return err
	})
	return func() { s.Kubectl("delete", "pdb", "-n", s.Namespace, "all") }
}

// TestForgedHolders: with the token of a node's agent a thief writes any holders into the GPUNode of that node. The controller evicts no pod
// that is on another node or asks for no GPU. A pod of that node that asks for one is evicted: the GPUNode is all that says which it has.
func TestForgedHolders(t *testing.T) {
	s := begin(t)
	const thief = "node-of-a-thief"
	s.Manifest(manifests.Pod("limit", "elsewhere"))
	s.Running(soon, 1, 0)
	for name, limit := range map[string]string{"without-gpu": "cpu", "control": install.ResourceName} {
		// Its node has no kubelet, so that it stays Pending.
		s.Manifest(fmt.Sprintf(`
---
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  nodeName: %s
  containers: [{name: work, image: none, resources: {limits: {%s: 1}}}]
`, name, thief, limit))
	}
	remove := s.Undo(func() error {
		for _, name := range []string{"without-gpu", "control"} {
			err := theClient.CoreV1().Pods(s.Namespace).Delete(s.Ctx, name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)})
			if err != nil && !apierrors.IsNotFound(err) {
				return err
			}
		}
		return s.removeGPUNode(thief)
	})
	if err := s.createGPUNode(theClient, thief, "", "{}"); err != nil {
		t.Fatal(err)
	}
	now := metav1.Now()
	forged := gpunode.GPUNodeStatus{Mode: "Dual", Seen: &now}
	for i, name := range []string{"elsewhere", "without-gpu", "control"} {
		pod := s.Pod(name)
		forged.Devices = append(forged.Devices, gpunode.DeviceStatus{
			Name: fmt.Sprintf("gpu-%d", i), UUID: fmt.Sprintf("GPU-%d", i), ExtendedResource: install.ResourceName,
			Taints:  []gpunode.DeviceTaint{{Taint: gpunode.Taint{Key: device.TaintUnhealthy, Effect: gpunode.TaintNoExecute, Since: &now}}},
			Holders: []gpunode.DeviceHolder{{Kind: gpunode.HolderPod, State: gpunode.HoldHeld, Pods: []gpunode.PodReference{{UID: pod.UID, Namespace: s.Namespace, Name: name}}}},
		})
	}
	s.writeStatus(thief, forged)
	s.Event("Pod", "control", "EvictedByTaint", "has gpu-2 of node "+thief)
	list, err := theClient.CoreV1().Events(s.Namespace).List(s.Ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, event := range list.Items {
		if of := event.InvolvedObject.Name; event.Reason == "EvictedByTaint" && of != "control" || event.Reason == "NotEvicted" {
			t.Errorf("%s of %s: %s", event.Reason, of, event.Message)
		}
	}
	for _, name := range []string{"elsewhere", "without-gpu"} {
		if pod := s.Pod(name); pod.DeletionTimestamp != nil {
			t.Errorf("%s was evicted", name)
		}
	}
	remove()
}

// writeStatus writes fields of a GPUNode's status.
func (s *story) writeStatus(name string, status gpunode.GPUNodeStatus) {
	s.Helper()
	patch, err := json.Marshal(map[string]any{"status": status})
	if err != nil {
		s.Fatal(err)
	}
	s.Kubectl("patch", "gpunode", name, "--subresource", "status", "--type", "merge", "-p", string(patch))
}

// removeGPUNode deletes a GPUNode for good.
func (s *story) removeGPUNode(name string) error {
	err := theClient.CoreV1().RESTClient().Delete().AbsPath(gpuNodesPath, name).Do(s.Ctx).Error()
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// TestRuleEvicts: a DeviceTaintRule with effect NoExecute moves the pod that has the GPU, by either API, and no other one.
func TestRuleEvicts(t *testing.T) {
	for api, deployment := range map[string]string{
		"claim": manifests.SingleTemplate + manifests.ClaimDeployment("two", "single", 2), "limit": manifests.Deployment("two", 2),
	} {
		t.Run(api, func(t *testing.T) {
			s := begin(t)
			if _, err := theClient.ResourceV1().DeviceTaintRules().List(s.Ctx, metav1.ListOptions{}); apierrors.IsNotFound(err) {
				t.Skip("the API server does not serve DeviceTaintRules")
			}
			t.Cleanup(s.endTaint)
			s.Manifest(deployment)
			s.Running(soon, 2, 0)
			pods := s.Pods()
			victim, other := pods[0], pods[1]
			gpu := s.GPUs(victim.Name, "")[0]
			s.taints(gpu, "NoExecute")
			if api == "limit" {
				s.Event("Pod", victim.Name, "EvictedByTaint", "example.com/repair=fan:NoExecute of DeviceTaintRule "+taintRule)
			}
			s.Await(soon, "another pod instead", func() error {
				var names []string
				for _, pod := range s.Pods() {
					if podstatus.Ready(&pod) && pod.DeletionTimestamp == nil {
						names = append(names, pod.Name)
					}
				}
				if len(names) != 2 || slices.Contains(names, victim.Name) {
					return fmt.Errorf("%v run", names)
				}
				return nil
			})
			s.haveNot(gpu)
			if now := s.Pod(other.Name); now.UID != other.UID || now.Status.ContainerStatuses[0].RestartCount > 0 {
				t.Errorf("the other pod is %+v", now.ObjectMeta)
			}
			s.endTaint()
			s.Await(soon, "the GPU to be back", func() error {
				object, err := s.GPUNodeObject()
				if err == nil && object.Status.Counts.Tainted > 0 {
					err = fmt.Errorf("counts: %+v", object.Status.Counts)
				}
				return err
			})
		})
	}
}
