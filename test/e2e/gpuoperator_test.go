// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// operandLabels are the node labels by which GPU Operator's components are selected, with the label app of their pods. NSM's pods are not
// waited for.
var operandLabels = map[string]string{
	"nvidia.com/gpu.deploy.device-plugin":         "nvidia-device-plugin-daemonset",
	"nvidia.com/gpu.deploy.gpu-feature-discovery": "gpu-feature-discovery",
	"nvidia.com/gpu.deploy.dcgm-exporter":         "nvidia-dcgm-exporter",
	"nvidia.com/gpu.deploy.dcgm":                  "nvidia-dcgm",
	"nvidia.com/gpu.deploy.nvsm":                  "",
}

// migManager is a stand-in for GPU Operator's MIG manager, which needs its images. It does to the cluster what that does (NVIDIA/mig-parted
// 0d08f4f0026e, pkg/mig/reconfigure/reconfigure.go, Run). The story's namespace is the Operator's.
type migManager struct{ *story }

const migState = "nvidia.com/mig.config.state"

// set gives each label of the Operator's components the value, unless it is "false", and the state.
func (m migManager) set(value, state string) {
	m.Helper()
	n, err := theClient.CoreV1().Nodes().Get(m.Ctx, gpuNode, metav1.GetOptions{})
	if err != nil {
		m.Fatal(err)
	}
	args := []string{"label", "node", gpuNode, "--overwrite", migState + "=" + state}
	for key := range operandLabels {
		if n.Labels[key] != "false" {
			args = append(args, key+"="+value)
		}
	}
	m.Kubectl(args...)
}

// reconfigure changes MIG while the Operator's components are away. As the real one, it looks for their pods once a second, at first after
// one second, and for nothing else.
func (m migManager) reconfigure(change func()) {
	m.Helper()
	m.set("paused-for-mig-change", "pending")
	for _, app := range slices.Sorted(maps.Values(operandLabels)) {
		if app == "" {
			continue
		}
		err := wait.PollUntilContextTimeout(m.Ctx, time.Second, 5*time.Minute, false, func(ctx context.Context) (bool, error) {
			pods, err := theClient.CoreV1().Pods(m.Namespace).List(ctx, metav1.ListOptions{
				FieldSelector: "spec.nodeName=" + gpuNode, LabelSelector: "app=" + app,
			})
			return err == nil && len(pods.Items) == 0, err
		})
		if err != nil {
			m.Fatalf("wait for the end of the pods of %s: %v", app, err)
		}
	}
	change()
	m.set("true", "success")
}

// operand is a component of the Operator, which its label on the node selects.
func operand(label string) string {
	return fmt.Sprintf(`
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: %[1]s}
spec:
  selector: {matchLabels: {app: %[1]s}}
  template:
    metadata: {labels: {app: %[1]s}}
    spec:
      nodeSelector: {%[2]s: "true"}
      terminationGracePeriodSeconds: 1
      containers:
      - name: work
        image: docker.io/library/busybox:1.37
        imagePullPolicy: Never
        command: [sleep, infinity]
`, operandLabels[label], label)
}

// TestMIGManager: GPU Operator's MIG manager cuts a free GPU. It waits for the Operator's own pods only, which takes four seconds at least; by
// then the agent has paused. Running pods and the agent stay, and both APIs serve the partitions afterwards. A GPU that a pod has and no
// process uses is cut as well: an event says so.
func TestMIGManager(t *testing.T) {
	s := begin(t)
	manager := migManager{s}
	gpus := s.Occupy()
	used, free := slices.Concat(slices.Collect(maps.Values(gpus))...), 0
	for slices.Contains(used, free) {
		free++
	}
	idle := gpus["claim-0"][0]
	t.Cleanup(func() { s.Uncut(free) })
	t.Cleanup(func() { s.Uncut(idle) })
	t.Cleanup(func() { s.DeleteAll() })
	s.Undo(func() error {
		args := []string{"label", "node", gpuNode, migState + "-"}
		for key := range operandLabels {
			args = append(args, key+"-")
		}
		_, err := theCluster.Kubectl(context.WithoutCancel(s.Ctx), args...)
		return err
	})
	containers, agent, restarts := s.Containers(), s.AgentPod(gpuNode), s.AgentRestarts()
	manager.set("true", "success")
	s.Manifest(operand("nvidia.com/gpu.deploy.dcgm-exporter"))
	s.Running(soon, 5, 0)

	manager.reconfigure(func() {
		object, err := s.GPUNodeObject()
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range object.Status.Devices {
			if !strings.HasPrefix(d.UnhealthyReason, device.ReasonPaused+":") {
				t.Errorf("the MIG manager resets GPUs while %s is %q, not %s", d.Name, d.UnhealthyReason, device.ReasonPaused)
			}
		}
		s.Readyz(503, "pause", "paused-for-mig-change")
		s.Administer("-i", fmt.Sprint(free), "-mig", "1")
		s.Administer("mig", "-i", fmt.Sprint(free), "-cgi", "1g.10gb,1g.10gb,3g.40gb", "-C")
	})

	s.Readyz(200)
	s.Await(soon, "limits to see the partitions", func() error {
		return errors.Join(s.Allocatable("nvidia.com/mig-1g.10gb", 2), s.Allocatable("nvidia.com/mig-3g.40gb", 1), s.OfferedToPods(gpusANode-3))
	})
	s.Manifest(manifests.PartitionTemplate("ones", "1g.10gb") + manifests.ClaimPod("by-claim", "ones") +
		strings.Replace(manifests.Pod("limit", "by-limit"), "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", 1))
	s.Running(soon, 7, 0)
	for name, container := range s.Containers() {
		if was, occupied := containers[name]; occupied && container != was {
			t.Errorf("%s: container %s, was %s", name, container, was)
		}
	}
	for name, seen := range gpus {
		if now := s.GPUs(name, ""); !slices.Equal(now, seen) {
			t.Errorf("%s saw GPUs %v, now %v", name, seen, now)
		}
	}
	s.explained()
	s.Administer("-i", fmt.Sprint(idle), "-mig", "1")
	s.Administer("mig", "-i", fmt.Sprint(idle), "-cgi", "1g.10gb", "-C")
	s.Event("Node", gpuNode, "HeldDeviceChanged", fmt.Sprintf("gpu-%d ", idle), "is in MIG mode", s.Namespace+"/claim-0")
	if now := s.AgentPod(gpuNode); now.UID != agent.UID || s.AgentRestarts() != restarts {
		t.Errorf("the agent is %s with %d restarts, was %s with %d", now.Name, s.AgentRestarts(), agent.Name, restarts)
	}
	s.NoDoubleOwners()
}
