// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const pluginLabel = "nvidia.com/gpu.deploy.device-plugin"

func labelled(name, value string) *corev1.Node {
	labels := map[string]string{pluginLabel: value, "nvidia.com/gpu.deploy.dcgm": "true", "nvidia.com/gpu.present": "true"}
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: "n", Labels: labels}}
}

func (a *testAgent) label(value string) {
	a.t.Helper()
	if _, err := a.client.CoreV1().Nodes().Update(a.t.Context(), labelled(a.config.NodeName, value), metav1.UpdateOptions{}); err != nil {
		a.t.Fatal(err)
	}
}

// offered counts the devices in slices that are not withdrawn.
func offered(t *testing.T, client *fake.Clientset) int {
	t.Helper()
	count := 0
	for _, slice := range published(t, client) {
		for _, d := range slice.Spec.Devices {
			if len(d.Taints) == 0 {
				count++
			}
		}
	}
	return count
}

// While GPU Operator upgrades the driver or changes MIG, the node's labels say so. Then the agent offers nothing, and goes on by itself
// afterwards. What pods have stays theirs.
func TestPausedNode(t *testing.T) {
	shortest := time.Hour // on a busy machine not each time
	for _, value := range []string{"paused-for-driver-upgrade", "paused-for-mig-change", "yes_paused-for-driver-upgrade"} {
		t.Run(value, func(t *testing.T) {
			c, uuids := awayNode(t)
			kubelet, stopKubelet := startDeviceManager(t, c)
			client := fake.NewClientset(labelled(c.NodeName, "true"))
			a, err := newAgent(c)
			if err != nil {
				t.Fatal(err)
			}
			a.client = client
			running := runAgent(t, a)
			all := heldOnly(uuids)
			all[uuids[2]], all[uuids[3]] = pluginapi.Healthy, pluginapi.Healthy
			kubelet.await(all)
			await(t, "devices to be offered", func() bool { return offered(t, client) > 0 })

			running.label(value)
			began := time.Now()
			kubelet.await(heldOnly(uuids))
			await(t, "no device to be offered", func() bool { return offered(t, client) == 0 })
			shortest = min(shortest, time.Since(began))
			running.await("pause: node label " + pluginLabel + "=" + value)
			running.wantEvent("DriverPaused")

			running.label("true")
			kubelet.await(all)
			await(t, "devices to be offered again", func() bool { return offered(t, client) > 0 })
			running.wantEvent("DriverResumed")
			if err := a.status.Ready(); err != nil && strings.Contains(err.Error(), "pause") {
				t.Errorf("not ready: %v", err)
			}
			stopKubelet()
			running.stop()
		})
	}
	if shortest > 2*time.Second {
		t.Errorf("withdrawn after %s", shortest)
	}
}

// An agent that starts on a paused node does not touch the driver, and needs no restart of its pod afterwards.
func TestStartOnAPausedNode(t *testing.T) {
	for name, held := range map[string]bool{"nothing is held": false, "a claim has a GPU": true} {
		t.Run(name, func(t *testing.T) {
			c := nodeConfig(t)
			simulatedMachine(t, &c)
			client := fake.NewClientset(labelled(c.NodeName, "paused-for-driver-upgrade"))
			var running *testAgent
			if held {
				running = startWith(t, c, client)
			} else {
				a, err := newAgent(c)
				if err != nil {
					t.Fatal(err)
				}
				a.client = client
				running = runAgent(t, a)
			}
			running.await("pause: node label " + pluginLabel)
			running.wantEvent("DriverPaused")
			if n := offered(t, client); n > 0 {
				t.Errorf("%d devices are offered", n)
			}
			running.label("true")
			if held {
				select {
				case err := <-running.done:
					if !Restarts(err) {
						t.Errorf("ended: %v", err)
					}
				case <-time.After(time.Minute):
					t.Error("the agent stays in driverless mode")
				}
				return
			}
			await(t, "all devices to be offered", func() bool { return offered(t, client) == 4 })
			running.stop()
		})
	}
}
