// SPDX-License-Identifier: Apache-2.0

package intruder

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/drain"
	"github.com/tandem-gpu/tandem/cli/overview"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// With the token of an agent, a thief names pods of kube-system as holders of a GPU, and an administrator drains that GPU with
// --evict --force. Only the pod that is on the node and requests a GPU is evicted.
func TestDrainBelievesNoThief(t *testing.T) {
	victims := map[string]func(*corev1.Pod){
		"dns":  func(p *corev1.Pod) { p.Namespace, p.Spec.NodeName = "kube-system", otherNode },
		"logs": func(p *corev1.Pod) { p.Namespace = "kube-system" },
		"trainer": func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{install.ResourceName: resource.MustParse("1")}
		},
	}
	named := []gpunode.PodReference{}
	for name, change := range victims {
		pod := podIn("default", name)
		pod.Spec.NodeName = ownNode
		change(pod)
		created, err := theClient.CoreV1().Pods(pod.Namespace).Create(t.Context(), pod, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		named = append(named, gpunode.PodReference{UID: created.UID, Namespace: created.Namespace, Name: created.Name})
	}
	admin, err := theCluster.RESTConfig()
	if err != nil {
		t.Fatal(err)
	}
	objects, err := dynamic.NewForConfig(admin)
	if err != nil {
		t.Fatal(err)
	}
	thief, err := dynamic.NewForConfig(as(t, agentAccount, agentPods[ownNode]))
	if err != nil {
		t.Fatal(err)
	}
	until(t, "create its GPUNode", "", func() error { return createGPUNode(t, thief, nil, nil) })
	status := gpunode.GPUNodeStatus{
		Mode: "Dual", ObservedGeneration: 1 << 40,
		Devices: []gpunode.DeviceStatus{{
			Name: "gpu-0", UUID: "GPU-0", Maintenance: &gpunode.DeviceMaintenance{},
			Holders: []gpunode.DeviceHolder{{Kind: gpunode.HolderPod, State: gpunode.HoldHeld, Pods: named}},
		}},
	}
	forged, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&status)
	if err != nil {
		t.Fatal(err)
	}
	until(t, "forge the status", "", func() error {
		object, err := thief.Resource(gpunodes).Get(t.Context(), ownNode, metav1.GetOptions{})
		if err != nil {
			return err
		}
		object = &unstructured.Unstructured{Object: object.Object}
		object.Object["status"] = forged
		_, err = thief.Resource(gpunodes).UpdateStatus(t.Context(), object, metav1.UpdateOptions{})
		return err
	})
	var said []string
	d := drain.Drainer{
		Cluster:   overview.Cluster{Client: theClient, Dynamic: objects, DriverName: install.DriverName},
		Resources: device.Resources{GPU: install.ResourceName}, Now: time.Now, Interval: 100 * time.Millisecond, Settle: drain.Settle,
		Say: func(line string) error { said = append(said, line); return nil },
	}
	err = d.Run(t.Context(), ownNode, "0", drain.Options{Wait: true, Timeout: 20 * time.Second, Evict: true, Force: true})
	t.Logf("%v\n%s", err, strings.Join(said, "\n"))
	if err := d.End(t.Context(), ownNode, ""); err != nil {
		t.Error(err)
	}
	if err == nil {
		t.Error("drain says that the GPU is free, although pods that it refused to evict hold it")
	}
	for _, pod := range named {
		found, err := theClient.CoreV1().Pods(pod.Namespace).Get(t.Context(), pod.Name, metav1.GetOptions{})
		gone := apierrors.IsNotFound(err) || err == nil && found.DeletionTimestamp != nil
		if gone != (pod.Name == "trainer") {
			t.Errorf("pod %s/%s: gone %v, %v", pod.Namespace, pod.Name, gone, err)
		}
		refused := slices.ContainsFunc(said, func(line string) bool {
			return strings.Contains(line, pod.Namespace+"/"+pod.Name) && strings.Contains(line, "not evicted")
		})
		if refused == (pod.Name == "trainer") {
			t.Errorf("pod %s/%s: said to be refused: %v", pod.Namespace, pod.Name, refused)
		}
	}
}
