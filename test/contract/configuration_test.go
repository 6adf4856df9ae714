// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/stories"
)

// TestWrongConfiguration: helm refuses a wrong key. An agent that starts with one, from a ConfigMap that was edited by hand, says so, running
// pods continue, and the right configuration is all it takes.
func TestWrongConfiguration(t *testing.T) {
	s := begin(t)
	before := s.Occupy()
	values := []string{"config.version=v1"}
	wrong := append([]string{"config.flags.plugin.devicelistStrategy={cdi-cri}"}, values...)
	err := s.Install(s.Ctx, install.Options{Detached: true, Values: wrong})
	if err == nil || !strings.Contains(err.Error(), "config.flags.plugin.devicelistStrategy: unknown key") {
		t.Errorf("helm says %v", err)
	}
	t.Cleanup(func() {
		if err := s.Install(s.Ctx, install.Options{}); err != nil {
			t.Error(err)
		}
	})
	if err := s.Install(s.Ctx, install.Options{Values: values}); err != nil {
		t.Fatal(err)
	}
	s.Kubectl("patch", "configmap", "-n", install.Namespace, install.Release, "--type=merge", `--patch={"data": {"config.yaml": "flags: {plugin: {devicelistStrategy: [cdi-cri]}}"}}`)
	s.Kubectl("delete", "pod", "-n", install.Namespace, "-l", stories.AgentLabel, "--wait=false")
	s.Await(soon, "an agent to say what is wrong", func() error {
		list, err := theClient.CoreV1().Pods(install.Namespace).List(s.Ctx, metav1.ListOptions{LabelSelector: stories.AgentLabel})
		if err != nil {
			return err
		}
		said := errors.New("all run")
		for _, pod := range list.Items {
			for _, status := range pod.Status.ContainerStatuses {
				for _, state := range []corev1.ContainerState{status.State, status.LastTerminationState} {
					if state.Terminated == nil {
						continue
					}
					if said = errors.New(state.Terminated.Message); strings.Contains(state.Terminated.Message, "flags.plugin.devicelistStrategy") {
						return nil
					}
				}
			}
		}
		return said
	})
	s.Same(before)
	if err := s.Install(s.Ctx, install.Options{}); err != nil {
		t.Fatal(err)
	}
	s.Undisturbed(before)
}

// TestEditedConfiguration: a change of the ConfigMap, which is all that a change of the chart's value is, reaches the agent that
// runs, and a wrong one is refused.
func TestEditedConfiguration(t *testing.T) {
	s := begin(t)
	s.Installed("split.values.yaml", "config.tandem.mode=Dual")
	s.Served("Dual", gpusANode, gpusANode)
	gpus := s.Occupy()
	containers, agent := s.Containers(), s.AgentPod(gpuNode)
	edit := func(devices string) {
		patch := fmt.Sprintf(`{"data": {"config.yaml": "{version: v1, tandem: {mode: Split, devices: [%s]}}"}}`, devices)
		s.Kubectl("patch", "configmap", "-n", install.Namespace, install.Release, "--type=merge", "--patch="+patch)
		// Kubelet brings a new file within a minute or two, and at once to a pod that changes.
		s.Kubectl("annotate", "pod", "-n", install.Namespace, agent.Name, "--overwrite", fmt.Sprintf("look=%d", len(devices)))
	}
	edit("{match: {index: 0}, use: limits}, {match: {index: 77}, use: limits}")
	s.Event("Node", gpuNode, "ConfigRejected", "tandem.devices[1].match", "index 77")
	s.Served("Dual", 6, 6)
	edit("{match: {index: 0}, use: limits}, {match: {index: 1}, use: limits}")
	s.Served("Split", 2, 4)
	s.Unchanged(containers, gpus)
	if now := s.AgentPod(gpuNode); now.UID != agent.UID || now.Status.ContainerStatuses[0].RestartCount != agent.Status.ContainerStatuses[0].RestartCount {
		t.Errorf("the agent's pod %s restarted or was replaced by %s", agent.Name, now.Name)
	}
}

// TestWrongModesAreRefused: nothing changes, and an event on the node gives the reason.
func TestWrongModesAreRefused(t *testing.T) {
	s := begin(t)
	s.UnlabelAtEnd()
	gpus := s.Occupy()
	containers := s.Containers()
	s.Labelled("Splitt")
	s.Event("Node", gpuNode, "ConfigRejected", "Splitt", "Dual, ClaimsOnly, DevicePluginOnly, Split")
	s.Labelled("Split")
	s.Event("Node", gpuNode, "ConfigRejected", "tandem.devices: is required")
	s.Served("Dual", 6, 6)
	s.Unchanged(containers, gpus)
}

// TestConfigurationByLabel: a node's label selects one of several configurations, while pods of both kinds run.
func TestConfigurationByLabel(t *testing.T) {
	const label = "nvidia.com/device-plugin.config"
	s := begin(t)
	s.Installed("config-by-label.values.yaml")
	s.Served("Dual", gpusANode, gpusANode)
	gpus := s.Occupy()
	containers, agents := s.Containers(), s.AgentRestarts()

	s.Label(label, "limits-only")
	s.Served("DevicePluginOnly", 6, 0)
	s.Unchanged(containers, gpus)
	// The next agent does the same.
	s.KillAgent()
	s.Served("DevicePluginOnly", 6, 0)
	agents++

	s.Label(label, "absent")
	s.Event("Node", gpuNode, "ConfigRejected", label+"=absent", "only default, index, limits-only")
	s.Served("DevicePluginOnly", 6, 0)

	s.Label(label, "index")
	s.Served("Dual", 6, 6)
	s.Event("Node", gpuNode, "ConfigWithoutEffect", "flags.failOnInitError: the agent waits for the driver")
	s.Unchanged(containers, gpus)

	s.Kubectl("label", "node", gpuNode, label+"-")
	s.Served("Dual", 6, 6)
	s.Unchanged(containers, gpus)
	s.WantHolds(2, 2)
	if now := s.AgentRestarts(); now != agents {
		t.Errorf("the agents' containers restarted %d times, not %d", now, agents)
	}
}
