// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/faults"
	"github.com/tandem-gpu/tandem/test/manifests"
	"github.com/tandem-gpu/tandem/test/stories"
)

// Stories of how GPUs become free. Each ends, as all do, when every GPU is free in both APIs and the ledger is empty.

// shaped is a pod by limits with a given rest of its spec.
func shaped(name, spec string) string {
	return fmt.Sprintf(`
---
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  terminationGracePeriodSeconds: 1
%s`, name, strings.TrimPrefix(spec, "\n"))
}

const (
	initContainer = `
  initContainers:
  - name: first
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [sh, -c, "ls /dev/nvidia[0-9]*"]
    resources: {limits: {nvidia.com/gpu: 1}}
  containers:
  - name: work
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [sleep, infinity]
    resources: {limits: {nvidia.com/gpu: 1}}
`
	crashing = `
  containers:
  - name: work
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [sh, -c, "ls /dev/nvidia[0-9]* && exit 3"]
    resources: {limits: {nvidia.com/gpu: 1}}
`
	finishing = `
  restartPolicy: Never
  containers:
  - name: work
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [ls, /dev]
    resources: {limits: {nvidia.com/gpu: 1}}
`
)

// TestOneHoldAPod: whatever a pod does with its containers, it holds its one GPU until it has ended, and no longer.
func TestOneHoldAPod(t *testing.T) {
	s := begin(t)
	// A limits pod asks for the GPU of a finished one at once, so seven others leave it no choice.
	s.Manifest(shaped("others", strings.ReplaceAll(initContainer, "nvidia.com/gpu: 1", "nvidia.com/gpu: 7")))
	s.Running(soon, 1, 0)
	s.WantHolds(0, 7)

	s.Manifest(shaped("init", initContainer))
	s.Running(soon, 2, 0)
	s.WantHolds(0, 8)
	s.remove("init")

	s.Manifest(shaped("crashing", crashing))
	s.Await(soon, "three restarts", func() error {
		statuses := s.Pod("crashing").Status.ContainerStatuses
		if len(statuses) == 0 || statuses[0].RestartCount < 2 {
			return fmt.Errorf("%v", statuses)
		}
		return nil
	})
	s.WantHolds(0, 8)
	s.remove("crashing")

	// Each of these is bound as soon as the one before has ended, before kubelet has removed anything of it.
	for i := range 3 {
		s.Manifest(shaped(fmt.Sprintf("finishing-%d", i), finishing))
	}
	s.Await(soon, "three pods to succeed one after the other", func() error {
		var states []string
		done := 0
		for _, pod := range s.Pods() {
			states = append(states, pod.Name+"="+string(pod.Status.Phase)+pod.Status.Reason)
			if pod.Status.Phase == corev1.PodSucceeded {
				done++
			}
		}
		if done != 3 {
			return errors.New(strings.Join(states, " "))
		}
		return nil
	})
	s.WantHolds(0, 7)
}

// refuser is a device plugin whose every Allocate fails.
type refuser struct{ *faults.DevicePlugin }

func (*refuser) Allocate(context.Context, *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	return nil, errors.New("refused by a test")
}

// TestAdmissionFailsAfterAllocate: kubelet is given a GPU for one container and then rejects the pod for what the other asks for.
func TestAdmissionFailsAfterAllocate(t *testing.T) {
	const resource = "example.com/refused"
	s := begin(t)
	plugin := &refuser{faults.NewDevicePlugin(map[string]int{"refused-0": 0})}
	server := s.serve(filepath.Join(devicePluginDir, "refuser.sock"), func(server *grpc.Server) { pluginapi.RegisterDevicePluginServer(server, plugin) })
	s.register(server, resource)
	s.Await(soon, resource+" to be offered", func() error {
		n, err := theClient.CoreV1().Nodes().Get(s.Ctx, gpuNode, metav1.GetOptions{})
		if err == nil && n.Status.Allocatable.Name(resource, "").Value() < 1 {
			err = errors.New("it is not")
		}
		return err
	})
	s.Manifest(shaped("rejected", `
  containers:
  - name: first
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [sleep, infinity]
    resources: {limits: {nvidia.com/gpu: 3}}
  - name: second
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [sleep, infinity]
    resources: {limits: {example.com/refused: 1}}
`))
	s.Await(soon, "kubelet to reject the pod", func() error {
		if pod := s.Pod("rejected"); pod.Status.Phase != corev1.PodFailed {
			return fmt.Errorf("it is %s", pod.Status.Phase)
		}
		return nil
	})
	// The object stays: its phase is what counts.
	s.Took("the GPUs of a rejected pod to be free", func() { s.awaitEmpty(patient) })
	if _, limits := s.HoldsByKind(); limits != 0 {
		t.Errorf("%d holds", limits)
	}
	if err := server.Stop(); err != nil {
		t.Fatal(err)
	}
}

// awaitEmpty waits for the ledger of the node to be empty.
func (s *story) awaitEmpty(patience time.Duration) {
	s.Helper()
	s.Await(patience, "the ledger to be empty", s.Empty)
}

// TestStaticPod: a pod that kubelet reads from a file has a UID that the API server does not know, and its mirror there may be
// deleted at any time. It keeps its GPU until the file is gone.
func TestStaticPod(t *testing.T) {
	s := begin(t)
	file := s.NodePath(filepath.Join(staticPodDir, "static.yaml"))
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	// Not with an init container: its GPU would be refused to the other container (docs/design/0002-ledger.md, known limits).
	text := strings.Replace(manifests.Pod("limit", "static"), "metadata: {name: static}", "metadata: {name: static, namespace: "+s.Namespace+"}", 1)
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	remove := s.Undo(func() error { return os.Remove(file) })
	s.Running(soon, 1, 0)
	mirror := "static-" + gpuNode
	before := s.GPUs(mirror, "")
	uid := s.Pod(mirror).UID
	s.WantHolds(0, 1)

	s.Kubectl("delete", "pod", "-n", s.Namespace, mirror, "--force", "--grace-period=0")
	s.Await(soon, "kubelet to make the mirror again", func() error {
		pod, err := theClient.CoreV1().Pods(s.Namespace).Get(s.Ctx, mirror, metav1.GetOptions{})
		if err == nil && (pod.UID == uid || pod.Status.Phase != corev1.PodRunning) {
			err = fmt.Errorf("%s is %s", pod.UID, pod.Status.Phase)
		}
		return err
	})
	s.fillWithLimits(7)
	s.WantHolds(0, 8)
	s.NoDoubleOwners()
	s.Same(map[string][]int{mirror: before})
	s.remove("others")

	remove()
	s.Took("the GPU of a static pod to be free", func() { s.awaitEmpty(patient) })
}

// fillWithLimits starts one pod that takes so many GPUs, and leaves limits no choice among the others.
func (s *story) fillWithLimits(gpus int) {
	s.Helper()
	running := 0
	for _, pod := range s.Pods() {
		if pod.Status.Phase == corev1.PodRunning {
			running++
		}
	}
	s.Manifest(shaped("others", strings.ReplaceAll(initContainer, "nvidia.com/gpu: 1", fmt.Sprintf("nvidia.com/gpu: %d", gpus))))
	s.Running(soon, running+1, 0)
}

// plugin is a connection to the agent's DRA service: the stories that use it are kubelet.
func (s *story) plugin() drapb.DRAPluginClient {
	s.Helper()
	conn, err := grpc.NewClient("unix://"+s.NodePath(filepath.Join(pluginsDir, install.DriverName, "dra.sock")),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { conn.Close() })
	return drapb.NewDRAPluginClient(conn)
}

// allocate asks the agent for a GPU as kubelet does, for a pod that it does not name.
func (s *story) allocate(uuid string) error {
	s.Helper()
	sockets, err := filepath.Glob(s.NodePath(filepath.Join(devicePluginDir, "tandem-gpu-*.sock")))
	if err != nil || len(sockets) != 1 {
		s.Fatalf("sockets of the device plugin: %v (%v)", sockets, err)
	}
	conn, err := grpc.NewClient("unix://"+sockets[0], grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	if err != nil {
		s.Fatal(err)
	}
	defer conn.Close()
	_, err = pluginapi.NewDevicePluginClient(conn).Allocate(s.Ctx, &pluginapi.AllocateRequest{
		ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: []string{uuid}}},
	})
	return err
}

// unprepare asks for what kubelets below 1.37 ask for while pods still use a claim.
func (s *story) unprepare(claim string) {
	s.Helper()
	object, err := theClient.ResourceV1().ResourceClaims(s.Namespace).Get(s.Ctx, claim, metav1.GetOptions{})
	if err != nil {
		s.Fatal(err)
	}
	answer, err := s.plugin().NodeUnprepareResources(s.Ctx, &drapb.NodeUnprepareResourcesRequest{
		Claims: []*drapb.Claim{{Namespace: s.Namespace, Name: claim, Uid: string(object.UID)}},
	})
	if err != nil {
		s.Fatal(err)
	}
	if said := answer.Claims[string(object.UID)].GetError(); said != "" {
		s.Errorf("unprepare %s: %s", claim, said)
	}
}

// TestUnpreparedInUse: a claim that two pods share is unprepared while they run, as kubelets below 1.37 do. No other holder gets
// the GPU until both are gone, and a third pod of the claim may still come.
func TestUnpreparedInUse(t *testing.T) {
	s := begin(t)
	s.Example("shared-claim.yaml")
	s.remove("shared-claim")
	s.Example("shared-claim-pods.yaml")
	s.Running(soon, 2, 0)
	shared := s.GPUs("shared-claim-a", "")
	claim := s.Pod("shared-claim-a").Spec.ResourceClaims[0].ResourceClaimName
	if claim == nil {
		t.Fatal("the pods share no claim by name")
	}
	s.unprepare(*claim)
	s.WantHolds(1, 0)
	s.fillWithLimits(7)
	s.NoDoubleOwners()

	// The next pod of the claim makes it whole again; what kubelet knows of it stays its own.
	third := s.Pod("shared-claim-b").DeepCopy()
	third.ObjectMeta = metav1.ObjectMeta{Name: "shared-claim-c", Namespace: s.Namespace}
	third.Spec.NodeName = ""
	third.Status = corev1.PodStatus{}
	if _, err := theClient.CoreV1().Pods(s.Namespace).Create(s.Ctx, third, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	s.Running(soon, 4, 0)
	if now := s.GPUs("shared-claim-c", ""); !slices.Equal(now, shared) {
		t.Errorf("the third pod sees GPUs %v, the first %v", now, shared)
	}
	s.unprepare(*claim)
	s.remove("shared-claim-a", "shared-claim-b")
	s.WantHolds(1, 7)
	s.NoDoubleOwners()
	s.remove("shared-claim-c", "others")
	s.Took("the GPU of an unprepared claim to be free", func() { s.awaitEmpty(soon) })
}

// TestAgentAwayWhilePodsEnd: pods end by every way there is while no agent runs. When it is back, it finds out.
func TestAgentAwayWhilePodsEnd(t *testing.T) {
	s := begin(t)
	s.Occupy()
	s.withoutAgent(func() {
		s.remove("limit-0")
		s.Kubectl("delete", "pod", "-n", s.Namespace, "limit-1", "claim-0", "--force", "--grace-period=0")
		// Kubelet does not let it go before it is unprepared.
		s.Kubectl("delete", "pod", "-n", s.Namespace, "claim-1", "--wait=false")
	})
	s.Ready()
	s.Took("the GPUs to be free", func() { s.awaitEmpty(patient) })
	s.NoPods()
}

// withoutAgent takes the agents off all nodes, does something, and brings them back.
func (s *story) withoutAgent(part func()) {
	s.Helper()
	set := func(selector string) error {
		_, err := theClient.AppsV1().DaemonSets(install.Namespace).Patch(context.WithoutCancel(s.Ctx), s.daemonSet(), types.StrategicMergePatchType,
			[]byte(`{"spec":{"template":{"spec":{"nodeSelector":`+selector+`}}}}`), metav1.PatchOptions{})
		return err
	}
	if err := set(`{"agents":"away"}`); err != nil {
		s.Fatal(err)
	}
	back := s.Undo(func() error { return set(`{"agents":null}`) })
	s.Await(soon, "the agents to be gone", func() error {
		list, err := theClient.CoreV1().Pods(install.Namespace).List(s.Ctx, metav1.ListOptions{LabelSelector: stories.AgentLabel})
		if err == nil && len(list.Items) > 0 {
			err = fmt.Errorf("%d pods", len(list.Items))
		}
		return err
	})
	part()
	back()
}

func (s *story) daemonSet() string {
	s.Helper()
	list, err := theClient.AppsV1().DaemonSets(install.Namespace).List(s.Ctx, metav1.ListOptions{LabelSelector: stories.AgentLabel})
	if err != nil || len(list.Items) != 1 {
		s.Fatalf("%d DaemonSets of the agent: %v", len(list.Items), err)
	}
	return list.Items[0].Name
}

// Files in which kubelet remembers who has which device.
const (
	deviceState = devicePluginDir + "/kubelet_internal_checkpoint"
	claimState  = kubeletDir + "/dra_manager_state"
)

// TestKubeletAwayWhilePodsEnd: containers die and pods are force-deleted while kubelet is down, and what kubelet remembered is
// lost as well.
func TestKubeletAwayWhilePodsEnd(t *testing.T) {
	s := begin(t)
	s.Occupy()
	s.withoutKubelet(func() {
		s.endContainers("claim-0", "limit-0")
		s.Kubectl("delete", "pod", "-n", s.Namespace, "--all", "--force", "--grace-period=0")
		s.On(node(), "rm", deviceState, claimState)
	})
	s.Ready()
	s.Took("the GPUs to be free", func() { s.awaitEmpty(patient) })
}

// endContainers kills the processes of pods without kubelet or the runtime.
func (s *story) endContainers(pods ...string) {
	s.Helper()
	for _, pod := range pods {
		uid := strings.ReplaceAll(string(s.Pod(pod).UID), "_", "-")
		s.On(node(), "sh", "-c", `for f in $(find /sys/fs/cgroup -path "*$0*" -name cgroup.procs); do for p in $(cat $f); do kill -9 $p; done; done 2> /dev/null; true`, uid)
	}
}

// TestKubeletForgetsRunningPods: kubelet loses its checkpoint while pods run. No other holder gets their GPUs, also if kubelet asks for
// them, and they are free when the pods are gone.
func TestKubeletForgetsRunningPods(t *testing.T) {
	s := begin(t)
	before := s.Occupy()
	t.Logf("holds before:\n%s", s.Records(node()))
	for _, pod := range []string{"claim-0", "limit-0"} {
		if err := s.allocate(s.devices(pod)[0].GPU.UUID); err == nil {
			t.Errorf("another holder got the GPU of %s", pod)
		} else {
			t.Log(err)
		}
	}
	s.WantHolds(2, 2)
	s.withoutKubelet(func() { s.On(node(), "rm", deviceState, claimState) })
	s.Ready()
	s.Same(before)
	s.Manifest(manifests.Deployment("limits", gpusANode) + manifests.ClaimDeployment("claims", "single", gpusANode))
	s.awaitGPUsInUse(gpusANode)
	s.NoDoubleOwners()
	s.Same(before)
	t.Logf("failed: %v", s.failed())
	s.Kubectl("delete", "deployment", "-n", s.Namespace, "claims", "limits")
	s.remove()
	s.Took("the GPUs to be free", func() { s.awaitEmpty(patient) })
}

// awaitGPUsInUse waits until so many GPUs are held and seen by running pods.
func (s *story) awaitGPUsInUse(n int) {
	s.Helper()
	s.Await(patient, fmt.Sprintf("%d GPUs to be in use", n), func() error {
		claims, limits := s.HoldsByKind()
		running := 0
		for _, pod := range s.Pods() {
			if pod.Status.Phase == corev1.PodRunning && pod.DeletionTimestamp == nil {
				running++
			}
		}
		if claims+limits != n || running != n {
			return fmt.Errorf("%d by claims, %d by limits, %d pods run", claims, limits, running)
		}
		return nil
	})
}
