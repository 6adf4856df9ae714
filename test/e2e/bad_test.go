// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/faults"
)

// event waits for an event of the story's namespace, of the node where the kind is Node, or of our Secret, whose message has all the
// words.
func (s *story) event(kind, name, reason string, words ...string) {
	s.Helper()
	namespace := s.namespace
	switch kind {
	case "Node":
		namespace = metav1.NamespaceDefault
	case "Secret":
		namespace = install.Namespace
	}
	s.await(soon, fmt.Sprintf("event %s on %s %s", reason, kind, name), func() error {
		list, err := theClient.CoreV1().Events(namespace).List(s.ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		seen := errors.New("there is none")
		for _, event := range list.Items {
			if event.InvolvedObject.Kind != kind || event.InvolvedObject.Name != name || event.Reason != reason {
				continue
			}
			if hasAll(event.Message, words) {
				return nil
			}
			seen = fmt.Errorf("it says %q, which lacks some of %q", event.Message, words)
		}
		return seen
	})
}

func hasAll(text string, words []string) bool {
	for _, word := range words {
		if !strings.Contains(text, word) {
			return false
		}
	}
	return true
}

// TestClaimForADeviceThatIsNotThere: an allocation names a device that does not exist, as after a GPU was removed. Claim and pod
// report it.
func TestClaimForADeviceThatIsNotThere(t *testing.T) {
	s := begin(t)
	s.manifest(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: stale}
spec:
  devices:
    requests:
    - name: gpu
      exactly: {deviceClassName: gpu.nvidia.com}
`)
	s.manifest(`
apiVersion: v1
kind: Pod
metadata: {name: stale}
spec:
  # No scheduler takes it, so the claim stays as it is.
  schedulerName: none
  terminationGracePeriodSeconds: 1
  resourceClaims: [{name: gpu, resourceClaimName: stale}]
  containers:
  - name: work
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [sleep, infinity]
    resources: {claims: [{name: gpu}]}
`)
	claim, err := theClient.ResourceV1().ResourceClaims(s.namespace).Get(s.ctx, "stale", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{
			{Request: "gpu", Driver: install.DriverName, Pool: gpuNode, Device: "gpu-99"},
		},
	}}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "stale", UID: s.pod("stale").UID}}
	if _, err := theClient.ResourceV1().ResourceClaims(s.namespace).UpdateStatus(s.ctx, claim, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	binding := &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "stale"}, Target: corev1.ObjectReference{Kind: "Node", Name: gpuNode}}
	if err := theClient.CoreV1().Pods(s.namespace).Bind(s.ctx, binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	s.event("ResourceClaim", "stale", "UnknownDevice", "gpu-99", "does not exist")
	s.event("Pod", "stale", "FailedPrepareDynamicResources", "gpu-99", "does not exist")
	s.wantHolds(0, 0)
}

// TestParametersThatCannotBeHonoured are refused with the path of the field, and nothing is held.
func TestParametersThatCannotBeHonoured(t *testing.T) {
	s := begin(t)
	for name, parameters := range map[string]string{
		"other": `{apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: {strategy: MPS, mpsConfig: {defaultPerDevicePinnedMemoryLimit: {GPU-00000000-0000-0000-0000-000000000000: 5Gi}}}}`,
	} {
		s.manifest(fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %[1]s}
spec:
  devices:
    requests:
    - name: gpu
      exactly: {deviceClassName: gpu.nvidia.com}
    config:
    - opaque:
        driver: gpu.nvidia.com
        parameters: %[2]s
---
apiVersion: v1
kind: Pod
metadata: {name: %[1]s}
spec:
  terminationGracePeriodSeconds: 1
  resourceClaims: [{name: gpu, resourceClaimName: %[1]s}]
  containers:
  - name: work
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [sleep, infinity]
    resources: {claims: [{name: gpu}]}
`, name, parameters))
	}
	const field = "config[0].opaque.parameters.sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit[GPU-00000000-0000-0000-0000-000000000000]"
	s.event("ResourceClaim", "other", "InvalidParameters", field, "retrying does not help")
	s.event("Pod", "other", "FailedPrepareDynamicResources", field)
	s.wantHolds(0, 0)
}

// TestRunDirectoryFull: a full run directory refuses no pod, and the ledger holds the GPUs of new pods and claims. They start when there
// is space. Running pods keep running.
func TestRunDirectoryFull(t *testing.T) {
	s := begin(t)
	before := s.occupy()
	_, stop := s.fill()
	s.manifest(one("limit", "limit-full") + one("claim", "claim-full"))
	// Their containers do not start, because the runtime needs space as well.
	s.wantHolds(3, 3)
	if pod := s.pod("limit-full"); pod.Status.Phase == corev1.PodFailed {
		t.Errorf("the limits pod was refused: %s %s", pod.Status.Reason, pod.Status.Message)
	}
	stop()
	s.retry("claim-full")
	s.running(patient, 6, 0)
	s.same(before)
	s.wantHolds(3, 3)
	s.noDoubleOwners()
}

// fill fills the node's /run, and what becomes free in it, until the returned function is called or the story ends.
func (s *story) fill() (filler *faults.Filler, stop func()) {
	s.Helper()
	filler, err := faults.Fill(s.ctx, node(), "/run")
	if err != nil {
		s.Fatal(err)
	}
	stop = s.undo(func() error { return filler.Stop(s.ctx) })
	s.await(soon, "the disk to be full", func() error {
		if full, err := filler.Full(s.ctx); err != nil || !full {
			return fmt.Errorf("full: %t, %w", full, err)
		}
		return nil
	})
	return filler, stop
}

// retry makes kubelet look at a pod, or "--all", now; left alone it tries a claim again after 60 to 90 seconds.
func (s *story) retry(pod string) {
	s.Helper()
	_, err := theCluster.Kubectl(s.ctx, "annotate", "pod", "-n", s.namespace, pod, "--overwrite", "retried="+strconv.FormatInt(time.Now().UnixNano(), 10))
	// One that has gone meanwhile waits for nothing.
	if err != nil && !strings.Contains(err.Error(), "not found") {
		s.Fatal(err)
	}
}

// same checks that these pods see the GPUs they saw.
func (s *story) same(before map[string][]int) {
	s.Helper()
	containers := map[string]string{}
	for pod := range before {
		containers[pod] = s.pod(pod).Spec.Containers[0].Name
	}
	for pod, now := range s.sees(containers) {
		if !slices.Equal(now, before[pod]) {
			s.Errorf("%s saw GPUs %v, now %v", pod, before[pod], now)
		}
	}
}

// TestRunDirectoryWiped while pods run: the agent goes on, and at its next start kubelet knows who has what.
func TestRunDirectoryWiped(t *testing.T) {
	s := begin(t)
	before := s.occupy()
	s.on(node(), "sh", "-c", "rm -rf /run/tandem/*")
	s.manifest(one("limit", "limit-wiped"))
	s.running(soon, 5, 0)
	s.manifest(one("claim", "claim-wiped"))
	s.running(patient, 6, 0)
	s.noDoubleOwners()
	s.remove("limit-wiped", "claim-wiped")
	s.on(node(), "sh", "-c", "rm -rf /run/tandem/*")
	s.killAgent()
	s.ready()
	s.wantHolds(2, 2)
	s.undisturbed(before)
}

// TestCDIDirectoryWiped: the next pod of each kind starts all the same.
func TestCDIDirectoryWiped(t *testing.T) {
	s := begin(t)
	s.manifest(singleTemplate)
	s.on(node(), "sh", "-c", "rm -rf /var/run/cdi/*")
	s.manifest(one("claim", "claim"))
	s.running(soon, 1, 0)
	s.on(node(), "sh", "-c", "rm -rf /var/run/cdi/*")
	s.manifest(one("limit", "limit"))
	s.running(soon, 2, 0)
	for _, pod := range []string{"claim", "limit"} {
		if gpus := s.gpus(pod, ""); len(gpus) != 1 {
			t.Errorf("%s sees GPUs %v", pod, gpus)
		}
	}
	s.noDoubleOwners()
}

// TestWrongConfiguration: helm refuses a wrong key. An agent that starts with one, from a ConfigMap that was edited by hand, says so, running
// pods continue, and the right configuration is all it takes.
func TestWrongConfiguration(t *testing.T) {
	s := begin(t)
	before := s.occupy()
	values := append([]string{"config.version=v1"}, installValues...)
	wrong := append([]string{"config.flags.plugin.devicelistStrategy={cdi-cri}"}, values...)
	err := install.Tandem(s.ctx, theCluster, install.Options{Detached: true, Values: wrong})
	if err == nil || !strings.Contains(err.Error(), "config.flags.plugin.devicelistStrategy: unknown key") {
		t.Errorf("helm says %v", err)
	}
	t.Cleanup(func() {
		if err := install.Tandem(s.ctx, theCluster, install.Options{Values: installValues}); err != nil {
			t.Error(err)
		}
	})
	if err := install.Tandem(s.ctx, theCluster, install.Options{Values: values}); err != nil {
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
	if err := install.Tandem(s.ctx, theCluster, install.Options{Values: installValues}); err != nil {
		t.Fatal(err)
	}
	s.undisturbed(before)
}
