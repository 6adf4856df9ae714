// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/controller"
)

// The stories in this file attack through MPS: with stolen tokens, and from a client's container.

// forged is a daemon that an attacker with the agent's token requests.
func forged(change func(*gpunode.MPSDaemon)) gpunode.MPSDaemon {
	d := gpunode.MPSDaemon{Name: "forged", MPSSettings: gpunode.MPSSettings{
		Devices: []string{"GPU-1"}, DriverRoot: simulatedMachine + "/driver",
	}}
	change(&d)
	return d
}

// TestForgedDaemons: an attacker with an agent's token writes its node's status, and gets no pod of a program of its choice. The
// controller that believes it could not create that pod either.
func TestForgedDaemons(t *testing.T) {
	s := begin(t)
	pod := s.agentPod(gpuNode)
	thief := s.as(pod.Spec.ServiceAccountName, &pod)
	// The agent would correct its status.
	agent := s.agentProcess(node())
	s.undo(func() error { s.on(node(), "kill", "-CONT", agent); return s.request(thief) })
	s.on(node(), "kill", "-STOP", agent)
	for name, c := range map[string]struct {
		change func(*gpunode.MPSDaemon)
		want   string
	}{
		"configuration of the host": {func(d *gpunode.MPSDaemon) { d.DriverRoot = "/etc" }, "driver root /etc is none of"},
		"files of containers":       {func(d *gpunode.MPSDaemon) { d.DriverRoot = "/run/containerd" }, "driver root /run/containerd is none of"},
		"images":                    {func(d *gpunode.MPSDaemon) { d.DriverRoot = "/var/lib/containerd" }, "is none of"},
		"a variable":                {func(d *gpunode.MPSDaemon) { d.Devices = []string{"GPU-1 LD_PRELOAD=x"} }, "is no UUID of a device"},
	} {
		if err := s.request(thief, forged(c.change)); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		s.await(soon, name+" to be refused", func() error {
			object, err := s.gpuNodeObject()
			if err != nil {
				return err
			}
			if told := object.Spec.Daemons; len(told) != 1 || !strings.Contains(told[0].Message, c.want) {
				return fmt.Errorf("the controller says %+v", told)
			}
			return nil
		})
		if pods := s.daemons(); len(pods) > 0 {
			t.Errorf("%s: there is pod %s", name, pods[0].Name)
		}
	}
	many := make([]gpunode.MPSDaemon, 1000)
	for i := range many {
		many[i] = forged(func(d *gpunode.MPSDaemon) { d.Name = fmt.Sprint("forged-", i) })
	}
	for name, daemons := range map[string][]gpunode.MPSDaemon{
		"no name":           {forged(func(d *gpunode.MPSDaemon) { d.Name = "" })},
		"another directory": {forged(func(d *gpunode.MPSDaemon) { d.Name = ".." })},
		"a long device":     {forged(func(d *gpunode.MPSDaemon) { d.Devices = []string{strings.Repeat("a", 1<<10)} })},
		"many devices":      {forged(func(d *gpunode.MPSDaemon) { d.Devices = slices.Repeat([]string{"GPU-1"}, 1000) })},
		"many daemons":      many,
	} {
		if err := s.request(thief, daemons...); !apierrors.IsInvalid(err) {
			t.Errorf("%s: %v, which should be invalid", name, err)
		}
	}
}

// request writes the daemons of the node's status.
func (s *story) request(client kubernetes.Interface, daemons ...gpunode.MPSDaemon) error {
	s.Helper()
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"daemons": daemons}})
	if err != nil {
		s.Fatal(err)
	}
	return client.CoreV1().RESTClient().Patch(types.MergePatchType).AbsPath(gpuNodesPath, gpuNode, "status").Body(patch).Do(s.ctx).Error()
}

// TestStolenControllerToken: what is not the pod of a daemon, as this controller creates it, is forbidden. Nothing is stored.
func TestStolenControllerToken(t *testing.T) {
	s := begin(t)
	pod := s.controllerPod()
	thief, made := s.as(pod.Spec.ServiceAccountName, &pod), s.wouldMake(pod)
	for name, c := range map[string]struct {
		change func(*corev1.Pod)
		want   string // empty for allowed
	}{
		"a daemon's":          {func(*corev1.Pod) {}, ""},
		"configuration":       {func(p *corev1.Pod) { s.volume(p, "driver-root").HostPath.Path = "/etc" }, "driver root of an MPS daemon"},
		"files of containers": {func(p *corev1.Pod) { s.volume(p, "driver-root").HostPath.Path = "/run/containerd" }, "driver root of an MPS daemon"},
		"all daemons' files": {func(p *corev1.Pod) {
			p.Labels[daemonLabel], s.volume(p, "daemon").HostPath.Path = "", "/run/tandem/mps/"
		}, "no pods but those"},
		"another's name":        {func(p *corev1.Pod) { p.Name = "tandem-mps-other-00000000" }, "no pods but those"},
		"pipes on the host":     {func(p *corev1.Pod) { *s.volume(p, "pipe") = *s.volume(p, "daemon"); p.Spec.Volumes[1].Name = "pipe" }, "nothing else of the host"},
		"pipes without a limit": {func(p *corev1.Pod) { s.volume(p, "pipe").EmptyDir.SizeLimit = nil }, "nothing else of the host"},
		"privileged": {func(p *corev1.Pod) {
			p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true)}
		}, "privileges"},
	} {
		asked := made.DeepCopy()
		c.change(asked)
		_, err := thief.CoreV1().Pods(install.Namespace).Create(s.ctx, asked, metav1.CreateOptions{DryRun: dryRun})
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.want != "" && (!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: %v, which should be forbidden and say %q", name, err, c.want)
		}
	}
}

// wouldMake is the pod of a daemon, as the controller of that pod creates it.
func (s *story) wouldMake(pod corev1.Pod) *corev1.Pod {
	s.Helper()
	args := append([]string{"--namespace=" + install.Namespace, "--pod-name=p"}, pod.Spec.Containers[0].Args...)
	c, err := config.LoadController(args, func(string) (string, bool) { return "", false }, io.Discard)
	if err != nil {
		s.Fatal(err)
	}
	template, err := controller.DaemonTemplate(c.DaemonPod)
	if err != nil {
		s.Fatal(err)
	}
	memory, err := c.SharedMemory()
	if err != nil {
		s.Fatal(err)
	}
	object, err := s.gpuNodeObject()
	if err != nil {
		s.Fatal(err)
	}
	pods := controller.DaemonPods{
		Template: template, Namespace: install.Namespace, RunDir: c.RunDir, KubeletDir: c.KubeletDir, DriverRoots: c.DriverRoots, SharedMemory: memory,
	}
	made, err := pods.Pod(&object, forged(func(*gpunode.MPSDaemon) {}))
	if err != nil {
		s.Fatal(err)
	}
	return made
}

func (s *story) volume(pod *corev1.Pod, name string) *corev1.Volume {
	s.Helper()
	i := slices.IndexFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == name })
	if i < 0 {
		s.Fatalf("no volume %s", name)
	}
	return &pod.Spec.Volumes[i]
}

// TestHostileClient: a client that is root fills what it shares with its daemon and leaves links there. The host's /run has as much room as
// before, another daemon's clients go on, and its own daemon starts again.
func TestHostileClient(t *testing.T) {
	s := begin(t)
	const hostile, other = 0, 1
	for gpu, name := range []string{"hostile", "other"} {
		s.manifest(mpsClaim(name, gpu) + mpsPod(name, name))
	}
	s.running(patient, 2, 0)
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
		s.await(soon, pod+" to be a client", func() (err error) { servers[pod], err = server(pod); return err })
	}
	const room = "stat -f -c %f /run"
	before := s.on(node(), "sh", "-c", room)
	out, err := s.sh("hostile", `cd /tmp/nvidia-mps && ln -s /etc/passwd nvidia-cuda-mps-control.pid.new && mkdir -p a/b && chmod 0 a
		dd if=/dev/zero of=full bs=1M count=500`)
	if err == nil || !strings.Contains(out+err.Error(), "No space left on device") {
		t.Errorf("a client fills the pipe directory: %s, %v", out, err)
	}
	var blocks, left int64
	if _, err := fmt.Sscan(before, &blocks); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscan(s.on(node(), "sh", "-c", room), &left); err != nil {
		t.Fatal(err)
	}
	// Others write there, too.
	if most := int64(16 << 20 / 4096); blocks-left > most {
		t.Errorf("the host's /run had %d free blocks, has %d", blocks, left)
	}
	// Sooner than the probe.
	s.on(node(), "sh", "-c", "kill -KILL $(cat /run/tandem/mps/$0-*/pipe/nvidia-cuda-mps-control.pid)", string(s.claim("hostile").UID))
	s.await(patient, "the client to have another server", func() error {
		now, err := server("hostile")
		if err == nil && now == servers["hostile"] {
			err = errors.New("it has the same")
		}
		return err
	})
	s.await(soon, "the restarted client to see an empty pipe directory", func() error {
		out, err := s.sh("hostile", "ls /tmp/nvidia-mps")
		if err == nil && (strings.Contains(out, "full") || strings.Contains(out, "pid.new")) {
			err = errors.New("there is " + out)
		}
		return err
	})
	if now, err := server("other"); err != nil || now != servers["other"] {
		t.Errorf("the client of another daemon had %s, has %s, %v", servers["other"], now, err)
	}
	if got := []int{s.gpus("hostile", "")[0], s.gpus("other", "")[0]}; !slices.Equal(got, []int{hostile, other}) {
		t.Errorf("GPUs %v", got)
	}
}

// TestAnnotationsGiveNoGPU: kubelet passes CDI devices of claims and device plugins only, so the annotation of a pod is no way around the
// ledger. It is why a daemon's pod cannot get its GPU by CDI (docs/design/0013-sharing.md).
func TestAnnotationsGiveNoGPU(t *testing.T) {
	s := begin(t)
	s.manifest(fmt.Sprintf(`
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
	s.running(soon, 1, 0)
	if got := s.gpus("annotated", ""); len(got) > 0 {
		t.Errorf("it has GPUs %v", got)
	}
}

// TestMPSNamespaces: only the namespaces of a policy are its clients, through either API.
func TestMPSNamespaces(t *testing.T) {
	s := begin(t)
	w := tenants{story: s, limits: s.beside("others"), uuids: s.uuidsInOrder()}
	w.configured(fmt.Sprintf(`{version: v1, tandem: {devices: [{match: {model: NVIDIA H100 80GB HBM3}, sharing: {strategy: MPS, memoryShares: true, replicas: %d,
		namespaces: [%s]}}]}}`, replicas, s.namespace), allShared())
	s.await(patient, "replicas of all GPUs", func() error { return s.offeredToPods(gpusANode * replicas) })
	for _, n := range []*story{s, w.limits} {
		n.manifest(limitsPod("limits"))
	}
	refused := w.limits
	s.await(patient, "kubelet to refuse the other namespace's pod", func() error {
		pod := refused.pod("limits")
		if pod.Status.Phase != corev1.PodFailed || !strings.Contains(pod.Status.Message, "does not admit") {
			return fmt.Errorf("it is %s: %s", pod.Status.Phase, pod.Status.Message)
		}
		return nil
	})
	// Both may have waited at the same time.
	if s.pod("limits").Status.Phase == corev1.PodFailed {
		s.remove("limits")
		s.manifest(limitsPod("limits"))
	}
	s.running(patient, 1, 0)
	if !s.sharesKept() {
		return
	}
	refused.manifest(sharedClaim("share"))
	s.manifest(sharedClaim("share"))
	s.running(patient, 2, 0)
	s.await(patient, "the claim of the other namespace to be refused", func() error {
		out := refused.kubectl("get", "events", "-n", refused.namespace, "-o", "jsonpath={.items[*].message}")
		if !strings.Contains(out, "does not admit clients of namespace "+refused.namespace) {
			return fmt.Errorf("events: %s", out)
		}
		return nil
	})
	for _, n := range []*story{s, w.limits} {
		n.kubectl("delete", "pod,resourceclaim", "--all", "-n", n.namespace, "--wait=false")
	}
	w.configured("{version: v1}", nil)
	s.await(patient, "nothing to be left", func() error { return errors.Join(s.nothingShared(), s.empty()) })
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
