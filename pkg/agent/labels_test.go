// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	fakedynamic "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/nodelabels"
	"github.com/tandem-gpu/tandem/pkg/nvml"
)

// labelledNode is an API server with the node, which has a label of an earlier agent.
func labelledNode(t *testing.T, c config.Config) *fake.Clientset {
	t.Helper()
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: c.NodeName, UID: "n", Labels: map[string]string{"zone": "a"}}})
	earlier := applycorev1.Node(c.NodeName).WithLabels(map[string]string{"nvidia.com/gpu.count": "8"})
	if _, err := client.CoreV1().Nodes().Apply(t.Context(), earlier, metav1.ApplyOptions{FieldManager: nodelabels.Manager}); err != nil {
		t.Fatal(err)
	}
	return client
}

// noFeatures returns the client of an API server without NodeFeature objects.
func noFeatures() *fakedynamic.FakeDynamicClient {
	return fakedynamic.NewSimpleDynamicClient(runtime.NewScheme())
}

func labelsOf(t *testing.T, client *fake.Clientset, name string) map[string]string {
	t.Helper()
	node, err := client.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return node.Labels
}

// The agent writes the labels of its node's GPUs and configuration, removes them where there is nothing to label, and otherwise keeps them.
func TestNodeLabels(t *testing.T) {
	for name, test := range map[string]struct {
		prepare func(t *testing.T, c *config.Config)
		// want has labels that the node has in the end; "" for a label that it has not.
		want map[string]string
	}{
		"GPUs": {
			func(t *testing.T, c *config.Config) {
				machine := simulatedMachine(t, c)
				c.MachineTypeFile, c.NoTimestamp = filepath.Join(machine, "model"), false
				check(t, os.WriteFile(c.MachineTypeFile, []byte("ACME DGX (rev. 2)\n"), 0o600))
				c.Sharing = config.NodeSharing{Strategy: device.TimeSlicing, Resources: []config.SharedResource{{Name: c.ResourceName, Replicas: device.Replicas{Count: 2}}}}
			},
			map[string]string{"nvidia.com/gpu.count": "4", "nvidia.com/gpu.product": "NVIDIA-L4-SHARED", "nvidia.com/gpu.replicas": "2", "nvidia.com/gpu.machine": "ACME-DGX-rev.-2", "zone": "a"},
		},
		"disabled": {
			func(t *testing.T, c *config.Config) { simulatedMachine(t, c); c.NodeLabels = false },
			map[string]string{"nvidia.com/gpu.count": "", "nvidia.com/gpu.product": "", "zone": "a"},
		},
		"disabled, without a driver": {
			func(_ *testing.T, c *config.Config) { c.NodeLabels = false },
			map[string]string{"nvidia.com/gpu.count": "", "zone": "a"},
		},
		"no GPU any more": {
			func(t *testing.T, c *config.Config) { setAbsent(t, simulatedMachine(t, c), 4) },
			map[string]string{"nvidia.com/gpu.count": "", "zone": "a"},
		},
		"no hardware any more": {
			func(t *testing.T, c *config.Config) {
				check(t, os.RemoveAll(filepath.Join(c.SysfsRoot, "bus/pci/devices")))
			},
			map[string]string{"nvidia.com/gpu.count": "", "zone": "a"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := nodeConfig(t)
			test.prepare(t, &c)
			client := labelledNode(t, c)
			a, err := newAgent(c)
			check(t, err)
			a.client, a.dynamic = client, noFeatures()
			running := runAgent(t, a)
			await(t, fmt.Sprintf("the labels %v", test.want), func() bool {
				labels := labelsOf(t, client, c.NodeName)
				for key, want := range test.want {
					if labels[key] != want {
						return false
					}
				}
				return true
			})
			if _, found := labelsOf(t, client, c.NodeName)["nvidia.com/gfd.timestamp"]; found != !c.NoTimestamp {
				t.Errorf("timestamp: %v", found)
			}
			running.stop()
		})
	}
}

// With Node Feature Discovery, the agent writes the labels to an object in its namespace. The agents' DaemonSet owns the object. The agent
// removes its labels from the Node.
func TestNodeFeature(t *testing.T) {
	c := nodeConfig(t)
	simulatedMachine(t, &c)
	c.UseNodeFeatureAPI, c.Namespace, c.PodName = true, "gpu", "agent-x"
	client := labelledNode(t, c)
	owners := []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "agent", UID: "d", Controller: ptr.To(true), BlockOwnerDeletion: ptr.To(true)}}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: c.PodName, OwnerReferences: owners}}
	_, err := client.CoreV1().Pods(c.Namespace).Create(t.Context(), pod, metav1.CreateOptions{})
	check(t, err)
	a, err := newAgent(c)
	check(t, err)
	applied := make(chan clienttesting.PatchAction, 10)
	features := noFeatures()
	features.PrependReactor("patch", "nodefeatures", func(action clienttesting.Action) (bool, runtime.Object, error) {
		applied <- action.(clienttesting.PatchAction)
		object := &unstructured.Unstructured{}
		return true, object, json.Unmarshal(action.(clienttesting.PatchAction).GetPatch(), &object.Object)
	})
	a.client, a.dynamic = client, features
	running := runAgent(t, a)
	patch := <-applied
	running.stop()
	var object struct {
		Metadata metav1.ObjectMeta
		Spec     struct{ Labels map[string]string }
	}
	check(t, json.Unmarshal(patch.GetPatch(), &object))
	want := []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "agent", UID: "d"}}
	if patch.GetNamespace() != "gpu" || object.Metadata.Name != "nvidia-features-for-"+c.NodeName || object.Spec.Labels["nvidia.com/gpu.count"] != "4" ||
		!reflect.DeepEqual(object.Metadata.OwnerReferences, want) {
		t.Errorf("in namespace %s: %s", patch.GetNamespace(), patch.GetPatch())
	}
	if labels := labelsOf(t, client, c.NodeName); labels["nvidia.com/gpu.count"] != "" || labels["zone"] != "a" {
		t.Errorf("labels are %v", labels)
	}

	// Another DaemonSet can adopt the pod. An owner that is gone would have the object deleted.
	for _, uid := range []types.UID{"d", "e"} {
		pod.OwnerReferences[0].UID = uid
		_, err := client.CoreV1().Pods(c.Namespace).Update(t.Context(), pod, metav1.UpdateOptions{})
		check(t, err)
		if owners, err := a.owner(t.Context()); err != nil || len(owners) != 1 || owners[0].UID != uid {
			t.Errorf("owners %v, %v; want UID %s", owners, err, uid)
		}
	}

	// The agent writes no object without an owner: it would stay after an uninstallation.
	a.config.PodName = "other"
	if owners, err := a.owner(t.Context()); err == nil || !strings.Contains(err.Error(), "get pod gpu/other") {
		t.Errorf("owners %v, %v", owners, err)
	}
	a.config.PodName = "" // outside a pod
	if owners, err := a.owner(t.Context()); len(owners) > 0 || err != nil {
		t.Errorf("owners %v, %v", owners, err)
	}
}

// A driver that is away, for an upgrade or since the boot, does not cost a node its labels.
func TestNodeLabelsStayWithoutADriver(t *testing.T) {
	for err, want := range map[error]bool{
		&nvml.NoDriverError{}:                 true,
		&nvml.NoDriverError{NoHardware: true}: false,
		&nvml.PausedError{}:                   true,
		errors.New("driver 1 finds no GPU"):   false,
	} {
		if got := driverAway(err); got != want {
			t.Errorf("%v: got %v", err, got)
		}
	}
	c := nodeConfig(t)
	client := labelledNode(t, c)
	a, err := newAgent(c)
	check(t, err)
	a.client, a.dynamic = client, noFeatures()
	running := runAgent(t, a)
	running.await("driver: no NVIDIA driver")
	running.wantEvent("NoDriver")
	running.stop()
	if labels := labelsOf(t, client, c.NodeName); labels["nvidia.com/gpu.count"] != "8" {
		t.Errorf("labels are %v", labels)
	}
}

// Without a chosen configuration the agent does not know whether the node wants labels.
func TestNodeLabelsStayWithoutAConfiguration(t *testing.T) {
	for _, unchosen := range []bool{false, true} {
		c := nodeConfig(t)
		c.Unchosen = unchosen
		a, err := newAgent(c)
		check(t, err)
		a.client, a.dynamic = labelledNode(t, c), noFeatures()
		parts, err := a.newComponents()
		check(t, err)
		if _, known := a.labelConfig(t.Context(), parts, &gpus{list: []device.GPU{gpuA}}, prometheus.NewRegistry()).Want(); known == unchosen {
			t.Errorf("unchosen %v: the labels are known: %v", unchosen, known)
		}
		check(t, parts.Resources.Close())
	}
}

func TestMachine(t *testing.T) {
	c := nodeConfig(t)
	a := &Agent{config: c}
	if got := a.readMachine(t.Context()); got != "" {
		t.Errorf("without a file: %q", got)
	}
	dmi := filepath.Join(c.SysfsRoot, "class/dmi/id")
	check(t, os.MkdirAll(dmi, 0o755))
	check(t, os.WriteFile(filepath.Join(dmi, "product_name"), []byte("DGX H100\n"), 0o600))
	if got := a.readMachine(t.Context()); got != "DGX H100\n" {
		t.Errorf("DMI: %q", got)
	}
	a.config.MachineTypeFile = filepath.Join(c.HostRoot, "model")
	check(t, os.WriteFile(a.config.MachineTypeFile, []byte(strings.Repeat("x", 1<<20)), 0o600))
	if got := a.readMachine(t.Context()); len(got) < 63 || len(got) > 4096 {
		t.Errorf("a long file: %d bytes", len(got))
	}
}
