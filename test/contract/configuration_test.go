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
)

// TestWrongConfiguration: helm refuses a wrong key. An agent that starts with one, from a ConfigMap that was edited by hand, says so, running
// pods continue, and the right configuration is all it takes.
func TestWrongConfiguration(t *testing.T) {
	s := begin(t)
	before := s.occupy()
	values := append([]string{"config.version=v1"}, installValues...)
	wrong := append([]string{"config.flags.plugin.devicelistStrategy={cdi-cri}"}, values...)
	err := install.Tandem(s.ctx, theCluster, install.Options{Image: noImage, Detached: true, Values: wrong})
	if err == nil || !strings.Contains(err.Error(), "config.flags.plugin.devicelistStrategy: unknown key") {
		t.Errorf("helm says %v", err)
	}
	t.Cleanup(func() {
		if err := install.Tandem(s.ctx, theCluster, install.Options{Image: noImage, Values: installValues}); err != nil {
			t.Error(err)
		}
	})
	if err := install.Tandem(s.ctx, theCluster, install.Options{Image: noImage, Values: values}); err != nil {
		t.Fatal(err)
	}
	s.kubectl("patch", "configmap", "-n", install.Namespace, install.Release, "--type=merge", `--patch={"data": {"config.yaml": "flags: {plugin: {devicelistStrategy: [cdi-cri]}}"}}`)
	s.kubectl("delete", "pod", "-n", install.Namespace, "-l", agentLabel, "--wait=false")
	s.await(soon, "an agent to say what is wrong", func() error {
		list, err := theClient.CoreV1().Pods(install.Namespace).List(s.ctx, metav1.ListOptions{LabelSelector: agentLabel})
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
	s.same(before)
	if err := install.Tandem(s.ctx, theCluster, install.Options{Image: noImage, Values: installValues}); err != nil {
		t.Fatal(err)
	}
	s.undisturbed(before)
}

// TestEditedConfiguration: a change of the ConfigMap, which is all that a change of the chart's value is, reaches the agent that
// runs, and a wrong one is refused.
func TestEditedConfiguration(t *testing.T) {
	s := begin(t)
	s.installed("split.values.yaml", "config.tandem.mode=Dual")
	s.served("Dual", gpusANode, gpusANode)
	gpus := s.occupy()
	containers, agent := s.containers(), s.agentPod(gpuNode)
	edit := func(devices string) {
		patch := fmt.Sprintf(`{"data": {"config.yaml": "{version: v1, tandem: {mode: Split, devices: [%s]}}"}}`, devices)
		s.kubectl("patch", "configmap", "-n", install.Namespace, install.Release, "--type=merge", "--patch="+patch)
		// Kubelet brings a new file within a minute or two, and at once to a pod that changes.
		s.kubectl("annotate", "pod", "-n", install.Namespace, agent.Name, "--overwrite", fmt.Sprintf("look=%d", len(devices)))
	}
	edit("{match: {index: 0}, use: limits}, {match: {index: 77}, use: limits}")
	s.event("Node", gpuNode, "ConfigRejected", "tandem.devices[1].match", "index 77")
	s.served("Dual", 6, 6)
	edit("{match: {index: 0}, use: limits}, {match: {index: 1}, use: limits}")
	s.served("Split", 2, 4)
	s.unchanged(containers, gpus)
	if now := s.agentPod(gpuNode); now.UID != agent.UID || now.Status.ContainerStatuses[0].RestartCount != agent.Status.ContainerStatuses[0].RestartCount {
		t.Errorf("the agent's pod %s restarted or was replaced by %s", agent.Name, now.Name)
	}
}

// TestWrongModesAreRefused: nothing changes, and an event on the node gives the reason.
func TestWrongModesAreRefused(t *testing.T) {
	s := begin(t)
	s.unlabelAtEnd()
	gpus := s.occupy()
	containers := s.containers()
	s.labelled("Splitt")
	s.event("Node", gpuNode, "ConfigRejected", "Splitt", "Dual, ClaimsOnly, DevicePluginOnly, Split")
	s.labelled("Split")
	s.event("Node", gpuNode, "ConfigRejected", "tandem.devices: is required")
	s.served("Dual", 6, 6)
	s.unchanged(containers, gpus)
}

// TestConfigurationByLabel: a node's label selects one of several configurations, while pods of both kinds run.
func TestConfigurationByLabel(t *testing.T) {
	const label = "nvidia.com/device-plugin.config"
	s := begin(t)
	s.installed("config-by-label.values.yaml")
	s.served("Dual", gpusANode, gpusANode)
	gpus := s.occupy()
	containers, agents := s.containers(), s.agentRestarts()

	s.label(label, "limits-only")
	s.served("DevicePluginOnly", 6, 0)
	s.unchanged(containers, gpus)
	// The next agent does the same.
	s.killAgent()
	s.served("DevicePluginOnly", 6, 0)
	agents++

	s.label(label, "absent")
	s.event("Node", gpuNode, "ConfigRejected", label+"=absent", "only default, index, limits-only")
	s.served("DevicePluginOnly", 6, 0)

	s.label(label, "index")
	s.served("Dual", 6, 6)
	s.event("Node", gpuNode, "ConfigWithoutEffect", "flags.failOnInitError: the agent waits for the driver")
	s.unchanged(containers, gpus)

	s.kubectl("label", "node", gpuNode, label+"-")
	s.served("Dual", 6, 6)
	s.unchanged(containers, gpus)
	s.wantHolds(2, 2)
	if now := s.agentRestarts(); now != agents {
		t.Errorf("the agents' containers restarted %d times, not %d", now, agents)
	}
}
