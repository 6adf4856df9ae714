// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/hack/install"
)

// The stories in this file attack through MPS: with stolen tokens, and from a client's container.

// TestHostileClient: a client that is root fills what it shares with its daemon and leaves links there. The host's /run has as much room as
// before, another daemon's clients go on, and its own daemon starts again.
func TestHostileClient(t *testing.T) {
	s := begin(t)
	const hostile, other = 0, 1
	for gpu, name := range []string{"hostile", "other"} {
		s.Manifest(mpsClaim(name, gpu) + mpsPod(name, name))
	}
	s.Running(patient, 2, 0)
	server := func(pod string) (string, error) {
		log, err := s.log(pod)
		server, _, _ := strings.Cut(strings.TrimSpace(log), "\n")
		if err == nil && server == "" {
			err = errors.New("it has no server yet")
		}
		return server, err
	}
	servers := map[string]string{}
	for _, pod := range []string{"hostile", "other"} {
		s.Await(soon, pod+" to be a client", func() (err error) { servers[pod], err = server(pod); return err })
	}
	const room = "stat -f -c %f /run"
	before := s.On(node(), "sh", "-c", room)
	out, err := s.sh("hostile", `cd /tmp/nvidia-mps && ln -s /etc/passwd nvidia-cuda-mps-control.pid.new && mkdir -p a/b && chmod 0 a
		dd if=/dev/zero of=full bs=1M count=500`)
	if err == nil || !strings.Contains(out+err.Error(), "No space left on device") {
		t.Errorf("a client fills the pipe directory: %s, %v", out, err)
	}
	var blocks, left int64
	if _, err := fmt.Sscan(before, &blocks); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscan(s.On(node(), "sh", "-c", room), &left); err != nil {
		t.Fatal(err)
	}
	// Others write there, too.
	if most := int64(16 << 20 / 4096); blocks-left > most {
		t.Errorf("the host's /run had %d free blocks, has %d", blocks, left)
	}
	// Sooner than the probe.
	s.On(node(), "sh", "-c", "kill -KILL $(cat /run/tandem/mps/$0-*/pipe/nvidia-cuda-mps-control.pid)", string(s.Claim("hostile").UID))
	s.Await(patient, "the client to have another server", func() error {
		now, err := server("hostile")
		if err == nil && now == servers["hostile"] {
			err = errors.New("it has the same")
		}
		return err
	})
	s.Await(soon, "the restarted client to see an empty pipe directory", func() error {
		out, err := s.sh("hostile", "ls /tmp/nvidia-mps")
		if err == nil && (strings.Contains(out, "full") || strings.Contains(out, "pid.new")) {
			err = errors.New("there is " + out)
		}
		return err
	})
	if now, err := server("other"); err != nil || now != servers["other"] {
		t.Errorf("the client of another daemon had %s, has %s, %v", servers["other"], now, err)
	}
	if got := []int{s.GPUs("hostile", "")[0], s.GPUs("other", "")[0]}; !slices.Equal(got, []int{hostile, other}) {
		t.Errorf("GPUs %v", got)
	}
}

// TestAnnotationsGiveNoGPU: kubelet passes CDI devices of claims and device plugins only, so the annotation of a pod is no way around the
// ledger. It is why a daemon's pod cannot get its GPU by CDI (docs/design/0013-sharing.md).
func TestAnnotationsGiveNoGPU(t *testing.T) {
	s := begin(t)
	s.Manifest(fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata:
  name: annotated
  annotations: {cdi.k8s.io/tandem: "k8s.%s/gpu=%s"}
spec:
  terminationGracePeriodSeconds: 1
  nodeSelector: {kubernetes.io/hostname: %s}
  containers:
  - {name: work, image: "docker.io/library/busybox:1.37", imagePullPolicy: Never, command: [sleep, infinity]}
`, install.DriverName, s.uuidsInOrder()[0], gpuNode))
	s.Running(soon, 1, 0)
	if got := s.GPUs("annotated", ""); len(got) > 0 {
		t.Errorf("it has GPUs %v", got)
	}
}

// TestMPSNamespaces: only the namespaces of a policy are its clients, through either API.
func TestMPSNamespaces(t *testing.T) {
	s := begin(t)
	w := tenants{story: s, limits: s.beside("others"), uuids: s.uuidsInOrder()}
	w.configured(fmt.Sprintf(`{version: v1, tandem: {devices: [{match: {model: NVIDIA H100 80GB HBM3}, sharing: {strategy: MPS, memoryShares: true, replicas: %d,
		namespaces: [%s]}}]}}`, replicas, s.Namespace), allShared())
	s.Await(patient, "replicas of all GPUs", func() error { return s.OfferedToPods(gpusANode * replicas) })
	for _, n := range []*story{s, w.limits} {
		n.Manifest(limitsPod("limits"))
	}
	refused := w.limits
	s.Await(patient, "kubelet to refuse the other namespace's pod", func() error {
		pod := refused.Pod("limits")
		if pod.Status.Phase != corev1.PodFailed || !strings.Contains(pod.Status.Message, "does not admit") {
			return fmt.Errorf("it is %s: %s", pod.Status.Phase, pod.Status.Message)
		}
		return nil
	})
	// While both pods wait, the agent refuses either's call: it cannot tell which pod kubelet asks for.
	s.Await(patient, "the admitted namespace's pod to run or fail", func() error {
		if phase := s.Pod("limits").Status.Phase; phase != corev1.PodFailed && phase != corev1.PodRunning {
			return errors.New(string(phase))
		}
		return nil
	})
	if s.Pod("limits").Status.Phase == corev1.PodFailed {
		s.remove("limits")
		s.Manifest(limitsPod("limits"))
	}
	s.Running(patient, 1, 0)
	if !s.sharesKept() {
		return
	}
	refused.Manifest(sharedClaim("share"))
	s.Manifest(sharedClaim("share"))
	s.Running(patient, 2, 0)
	s.Await(patient, "the claim of the other namespace to be refused", func() error {
		out := refused.Kubectl("get", "events", "-n", refused.Namespace, "-o", "jsonpath={.items[*].message}")
		if !strings.Contains(out, "does not admit clients of namespace "+refused.Namespace) {
			return fmt.Errorf("events: %s", out)
		}
		return nil
	})
	for _, n := range []*story{s, w.limits} {
		n.Kubectl("delete", "pod,resourceclaim", "--all", "-n", n.Namespace, "--wait=false")
	}
	w.configured("{version: v1}", nil)
	s.Await(patient, "nothing to be left", func() error { return errors.Join(s.NothingShared(), s.Empty()) })
}

func allShared() map[int]int {
	all := map[int]int{}
	for gpu := range gpusANode {
		all[gpu] = replicas
	}
	return all
}

// limitsPod is a client by a limit.
func limitsPod(name string) string {
	text := strings.Replace(mpsPod(name, "none"), "resourceClaims: [{name: gpu, resourceClaimName: none}]", "nodeSelector: {kubernetes.io/hostname: "+gpuNode+"}", 1)
	return strings.Replace(text, "{claims: [{name: gpu}]}", "{limits: {"+install.ResourceName+": 1}}", 1)
}

// sharedClaim is a claim for a part of a GPU, and its pod.
func sharedClaim(name string) string {
	return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %s}
spec:
  devices:
    requests:
    - {name: gpu, exactly: {deviceClassName: gpu.nvidia.com, capacity: {requests: {memory: 1Gi}}}}
%s`, name, mpsPod(name, name))
}
