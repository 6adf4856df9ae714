// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/test/gpufaults"
	"github.com/tandem-gpu/tandem/test/manifests"
	"github.com/tandem-gpu/tandem/test/stories"
)

// leaving is a cause that makes pods leave a GPU of gpuNode: begin starts it, end ends it.
type leaving struct {
	name       string
	begin, end func(gpu int) error
}

// leavings are a drain, XID 79, a row remap failure, a GPU lost without an XID, and a DeviceTaintRule where the API server serves it.
func (s *story) leavings() []leaving {
	s.Helper()
	machine, plugin := s.Machine(), s.BuildPlugin()
	clear := func(int) error { return gpufaults.Clear(machine) }
	gpuctl := func(of string, args ...string) func(int) error {
		return func(gpu int) error {
			_, err := s.KubectlGPU(plugin, append([]string{of, fmt.Sprintf("%s/%s", gpuNode, stories.GPUName(gpu))}, args...)...)
			return err
		}
	}
	s.Undo(func() error { return gpufaults.Clear(machine) })
	s.undrains(plugin)
	all := []leaving{{"drain", gpuctl("drain", "--evict", "--timeout", "1m"), gpuctl("undrain")}}
	for _, fault := range []gpufaults.Fault{gpufaults.XID79, gpufaults.RowRemapFailed, gpufaults.Lost} {
		all = append(all, leaving{fault.Name, func(gpu int) error { return fault.Raise(machine, gpu) }, clear})
	}
	rules := theClient.ResourceV1().DeviceTaintRules()
	if _, err := rules.List(s.Ctx, metav1.ListOptions{}); apierrors.IsNotFound(err) {
		s.Logf("no round with a DeviceTaintRule, which the API server does not serve")
		return all
	} else if err != nil {
		s.Fatal(err)
	}
	name := s.Namespace
	end := func(int) error { return rules.Delete(context.WithoutCancel(s.Ctx), name, metav1.DeleteOptions{}) }
	s.Undo(func() error {
		if err := end(0); err != nil && !apierrors.IsNotFound(err) {
			return err
		}
		return nil
	})
	return append(all, leaving{"rule", func(gpu int) error {
		return s.ApplyAnywhere(fmt.Sprintf(taintRule, name, gpuNode, stories.GPUName(gpu)))
	}, end})
}

const taintRule = `
apiVersion: resource.k8s.io/v1
kind: DeviceTaintRule
metadata: {name: %s}
spec:
  deviceSelector: {driver: gpu.nvidia.com, pool: %s, device: %s}
  taint: {key: example.com/repair, value: fan, effect: NoExecute}
`

// TestPodsLeaveABrokenGPU: seven pods by each API run on two nodes with sixteen GPUs. Each cause in leavings is applied to the GPU of one pod. That
// pod leaves, its owner's next pod runs on another GPU, and the other pods run on. Then the GPU takes a pod of the same API again.
func TestPodsLeaveABrokenGPU(t *testing.T) {
	const ofEach = 7
	s := begin(t)
	s.Installed("health.values.yaml", "config.tandem.health.memory=NoExecute")
	s.Undo(func() error {
		_, err := theCluster.Kubectl(context.WithoutCancel(s.Ctx), "taint", "node", numaNode, "--overwrite", numaKey+"=true:NoSchedule")
		return err
	})
	s.Kubectl("taint", "node", numaNode, numaKey+"-")
	leavings := s.leavings()
	s.Manifest(manifests.SingleTemplate + manifests.ClaimDeployment("claims", "single", ofEach) + manifests.Deployment("limits", ofEach))
	s.Running(patient, 2*ofEach, 0)
	var took []time.Duration
	apis, lost := []string{"claims", "limits"}, map[int]int{}
	for i := range repetitions(t, 1) * len(leavings) * len(apis) {
		of := apis[i%len(apis)]
		victim, gpu := s.onNode(of, lost)
		lost[gpu]++
		took = append(took, s.leaves(leavings[i/len(apis)%len(leavings)], victim, gpu, 2*ofEach))
		s.Await(soon, "the GPU to be healthy and in service", func() error {
			object, err := s.GPUNodeObject()
			if err == nil && (object.Status.Counts.Unhealthy > 0 || slices.ContainsFunc(object.Status.Devices, gpunode.DeviceStatus.OutOfService)) {
				err = fmt.Errorf("counts: %+v", object.Status.Counts)
			}
			return err
		})
		// Fourteen pods have GPUs. Two more fill the nodes, so one gets this GPU.
		s.Kubectl("scale", "deployment", "-n", s.Namespace, of, fmt.Sprintf("--replicas=%d", ofEach+2))
		s.Running(patient, 2*gpusANode, 0)
		seen := s.Seen()
		if !slices.ContainsFunc(s.Pods(), func(p corev1.Pod) bool {
			return strings.HasPrefix(p.Name, of) && p.Spec.NodeName == gpuNode && slices.Contains(seen[p.Name], gpu)
		}) {
			t.Errorf("no pod of %s has GPU %d again", of, gpu)
		}
		s.Kubectl("scale", "deployment", "-n", s.Namespace, of, fmt.Sprintf("--replicas=%d", ofEach))
		s.Only(patient, 2*ofEach, "")
	}
	t.Logf("fault to replacement: rounds=%d p50=%s p99=%s", len(took), quantile(took, 50), quantile(took, 99))
	if failed := s.failed(); len(failed) > 0 {
		t.Errorf("pods failed: %v", failed)
	}
	s.NoDoubleOwners()
}

// onNode returns the name of a pod of a Deployment that runs on the node, and its GPU: one that pods have lost least often, because an owner that loses the same
// GPU again waits longer. If all pods run elsewhere, it deletes them one after another until one runs there.
func (s *story) onNode(of string, lost map[int]int) (victim string, gpu int) {
	s.Helper()
	s.Await(patient, "a pod of "+of+" on "+gpuNode, func() error {
		var elsewhere []string
		here := map[string]string{}
		for _, pod := range s.Pods() {
			switch {
			case !strings.HasPrefix(pod.Name, of) || !podstatus.Ready(&pod) || pod.DeletionTimestamp != nil:
			case pod.Spec.NodeName != gpuNode:
				elsewhere = append(elsewhere, pod.Name)
			default:
				here[pod.Name] = pod.Spec.Containers[0].Name
			}
		}
		gpu = -1
		for name, has := range s.Devices.Of(&s.Story, here) {
			if gpu < 0 || lost[has[0]] < lost[gpu] {
				victim, gpu = name, has[0]
			}
		}
		if gpu >= 0 {
			return nil
		}
		if len(elsewhere) > 0 {
			s.Kubectl("delete", "pod", "-n", s.Namespace, elsewhere[0])
		}
		return fmt.Errorf("pods %v are elsewhere", elsewhere)
	})
	return victim, gpu
}

// leaves makes the pods of a victim's GPU leave it, and returns how long it took until n pods ran on other GPUs.
func (s *story) leaves(l leaving, victim string, gpu, n int) time.Duration {
	s.Helper()
	before := s.Containers()
	delete(before, victim)
	took := s.Took(l.name+" of "+victim+" to the replacement", func() {
		if err := l.begin(gpu); err != nil {
			s.Fatalf("%s: %v", l.name, err)
		}
		s.Only(soon, n, victim)
	})
	now := s.Containers()
	for name, container := range before {
		if now[name] != container {
			s.Errorf("%s: %s: container %s, was %s", l.name, name, now[name], container)
		}
	}
	seen := s.Seen()
	for _, pod := range s.Pods() {
		if has := seen[pod.Name]; len(has) != 1 || pod.Spec.NodeName == gpuNode && has[0] == gpu {
			s.Errorf("%s: %s has GPUs %v, and was to leave %d", l.name, pod.Name, has, gpu)
		}
	}
	if err := l.end(gpu); err != nil {
		s.Fatalf("end of %s: %v", l.name, err)
	}
	return took
}

// TestOneOfEightIsLost: eight pods by each API have the GPUs of a node, and one GPU is lost. The others run on, and none fails admission:
// the replacement of the pod that had it waits until the GPU is back.
func TestOneOfEightIsLost(t *testing.T) {
	for _, api := range []string{"claim", "limit"} {
		t.Run(api, func(t *testing.T) {
			s := begin(t)
			machine := s.Machine()
			t.Cleanup(func() {
				if err := gpufaults.Clear(machine); err != nil {
					t.Error(err)
				}
			})
			if api == "claim" {
				s.Manifest(manifests.SingleTemplate + manifests.ClaimDeployment("eight", "single", gpusANode))
			} else {
				s.Manifest(manifests.Deployment("eight", gpusANode))
			}
			s.Running(soon, gpusANode, 0)
			before := s.Seen()
			if err := gpufaults.Lost.Raise(machine, 5); err != nil {
				t.Fatal(err)
			}
			s.Await(soon, "the node to say that a GPU is lost", func() error {
				object, err := s.GPUNodeObject()
				if err == nil && object.Status.Counts.Unhealthy != 1 {
					err = fmt.Errorf("counts: %+v", object.Status.Counts)
				}
				return err
			})
			for name, sees := range before {
				if slices.Equal(sees, []int{5}) {
					s.remove(name)
					delete(before, name)
				}
			}
			s.Await(soon, "the lost GPU to be withdrawn, and no other", func() error {
				if api == "claim" {
					return errors.Join(s.OfferedToPods(0), s.Withdrawn(5))
				}
				return errors.Join(s.OfferedToPods(gpusANode-1), s.OfferedToClaims(0))
			})
			s.Running(soon, gpusANode-1, 1)
			s.Same(before)
			for _, pod := range s.Pods() {
				if pod.Status.Phase == corev1.PodRunning && pod.DeletionTimestamp == nil && pod.Status.ContainerStatuses[0].RestartCount > 0 {
					t.Errorf("%s restarted", pod.Name)
				}
			}
			if failed := s.failed(); len(failed) > 0 {
				t.Errorf("pods failed: %v", failed)
			}
			if err := gpufaults.Clear(machine); err != nil {
				t.Fatal(err)
			}
			s.Took("the eighth pod to run again", func() { s.Running(soon, gpusANode, 0) })
			s.NoDoubleOwners()
			if failed := s.failed(); len(failed) > 0 {
				t.Errorf("pods failed: %v", failed)
			}
		})
	}
}
