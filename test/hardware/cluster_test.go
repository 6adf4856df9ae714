// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
)

const (
	// imageVariable is an archive of Tandem's image, for a machine that cannot build it.
	imageVariable = "TANDEM_HARDWARE_IMAGE"
	clusterImage  = "docker.io/local/cuda:1"
	patience      = 2 * time.Minute
)

// kube is a one-node cluster on this machine whose node has this machine's GPUs.
type kube struct {
	*cluster.Cluster
	bench  *bench
	client kubernetes.Interface
	gpus   int
}

// TestCluster installs Tandem on a real cluster of one node that has this machine's GPUs. Pods run CUDA programs by limits and by claims.
func TestCluster(t *testing.T) {
	b := open(t)
	b.need(t, "rootfs", "kubectl-gpu")
	if os.Geteuid() != 0 {
		t.Skip("needs root, for a cluster")
	}
	if _, err := exec.LookPath("go"); err != nil {
		t.Skipf("needs Go, to build the programs of the cluster: %v", err)
	}
	k := startCluster(t, b)
	for _, step := range []struct {
		name string
		run  func(*testing.T, *kube)
	}{
		{"Published", published},
		{"NoGPU", noGPU},
		{"Limits", limits},
		{"Claim", claim},
		{"SharedClaim", sharedClaim},
		{"ClaimWaitsForLimits", claimWaitsForLimits},
		{"LimitsWaitForClaim", limitsWaitForClaim},
		{"AgentRestarts", agentRestarts},
		{"XID", xidOfAPod},
		{"Idle", idle},
		{"Uninstall", uninstall},
	} {
		t.Run(step.name, func(t *testing.T) { step.run(t, k) })
	}
}

func startCluster(t *testing.T, b *bench) *kube {
	t.Helper()
	c, err := cluster.New(cluster.Config{
		Dir: filepath.Join(t.TempDir(), "cluster"), Progress: t.Output(),
		Nodes: []cluster.NodeConfig{{Name: "node-1", Mounts: b.mounts(t)}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			if err := c.CollectLogs(context.Background(), filepath.Join(b.out, "logs")); err != nil {
				t.Log(err)
			}
		}
		if err := c.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if err := c.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(t.TempDir(), "cuda.tar")
	if err := cluster.WriteRootImage(archive, clusterImage, filepath.Join(b.programs, "rootfs")); err != nil {
		t.Fatal(err)
	}
	if err := c.LoadImage(t.Context(), archive); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	err = install.Tandem(t.Context(), c, install.Options{
		Profile: install.RealGPUs, Image: os.Getenv(imageVariable), Values: b.values(), Progress: t.Output(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("installed within %s", time.Since(start))
	config, err := c.RESTConfig()
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return &kube{Cluster: c, bench: b, client: client, gpus: len(b.node.Inventory().GPUs)}
}

// mounts are what a node needs of this machine, beside its programs: the driver and the device nodes.
func (b *bench) mounts(t *testing.T) (mounts []cluster.Mount) {
	t.Helper()
	add := func(path string) {
		mounts = append(mounts, cluster.Mount{Source: filepath.Join(b.options.HostRoot, path), Target: path})
	}
	if standIn := os.Getenv("SYSFS_ROOT"); standIn != "" {
		add(filepath.Dir(standIn)) // it has the driver, too
		return mounts
	}
	if root := b.report.Layout.DriverRoot; root != "/" {
		add(root)
	}
	found, err := filepath.Glob(filepath.Join(b.options.HostRoot, b.report.Layout.DevRoot, "dev/nvidia*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range found {
		mounts = append(mounts, cluster.Mount{Source: path, Target: filepath.Join("/dev", filepath.Base(path))})
	}
	return mounts
}

// values are what the chart does not find out by itself: where a stand-in is.
func (b *bench) values() []string {
	sysfs := os.Getenv("SYSFS_ROOT")
	if sysfs == "" {
		return nil
	}
	return []string{
		"driverRoot=" + os.Getenv("DRIVER_ROOT"), "devRoot=" + os.Getenv("DEV_ROOT"), "extraArgs[0]=--sysfs-root=/host" + sysfs,
	}
}

func await(t *testing.T, what string, condition func() error) {
	t.Helper()
	deadline := time.After(patience)
	for {
		err := condition()
		if err == nil {
			return
		}
		select {
		case <-deadline:
			t.Fatalf("waited %s for %s: %v", patience, what, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// show keeps what a command prints, for the reader of the results.
func (k *kube) show(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := k.Kubectl(t.Context(), args...)
	if err != nil {
		t.Error(err)
	}
	k.bench.record(t, name, []byte(out))
	return out
}

// plugin keeps what kubectl gpu prints.
func (k *kube) plugin(t *testing.T, args string) {
	t.Helper()
	cmd, err := k.Command(t.Context(), filepath.Join(k.bench.programs, "kubectl-gpu"), strings.Fields(args)...)
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("kubectl gpu %s: %v: %s", args, err, out)
	}
	k.bench.record(t, "gpu-"+strings.Fields(args)[0]+".txt", out)
}

// pod creates a pod that runs a program of the image.
func (k *kube) pod(t *testing.T, name string, change func(*corev1.Pod), args ...string) {
	t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			RestartPolicy: corev1.RestartPolicyNever, TerminationGracePeriodSeconds: ptr.To[int64](1),
			Containers: []corev1.Container{{
				Name: "main", Image: clusterImage, ImagePullPolicy: corev1.PullNever, Command: args,
				Env: []corev1.EnvVar{{Name: "LC_ALL", Value: "C"}},
			}},
		},
	}
	change(pod)
	if _, err := k.client.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// byLimits asks for so many GPUs by limits.
func byLimits(count int) func(*corev1.Pod) {
	return func(pod *corev1.Pod) {
		pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{
			install.ResourceName: *resource.NewQuantity(int64(count), resource.DecimalSI),
		}
	}
}

// byClaim uses a claim that exists.
func byClaim(claim string) func(*corev1.Pod) {
	return func(pod *corev1.Pod) {
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &claim}}
		pod.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	}
}

func (k *kube) claim(t *testing.T, name string, count int) {
	t.Helper()
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com", Count: int64(count)},
		}}}},
	}
	if _, err := k.client.ResourceV1().ResourceClaims("default").Create(t.Context(), claim, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// phase waits for a phase of a pod.
func (k *kube) phase(t *testing.T, name string, want corev1.PodPhase) {
	t.Helper()
	await(t, fmt.Sprintf("pod %s to be %s", name, want), func() error {
		pod, err := k.client.CoreV1().Pods("default").Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if pod.Status.Phase != want {
			return fmt.Errorf("it is %s: %s %s %+v", pod.Status.Phase, pod.Status.Reason, pod.Status.Message, pod.Status.ContainerStatuses)
		}
		return nil
	})
}

// waits requires that the scheduler finds no place for a pod.
func (k *kube) waits(t *testing.T, name string) {
	t.Helper()
	await(t, fmt.Sprintf("pod %s to wait", name), func() error {
		pod, err := k.client.CoreV1().Pods("default").Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable {
				t.Logf("%s waits: %s", name, c.Message)
				return nil
			}
		}
		return fmt.Errorf("it is %s with %+v", pod.Status.Phase, pod.Status.Conditions)
	})
}

func (k *kube) logs(t *testing.T, name string) string {
	t.Helper()
	out, err := k.Kubectl(t.Context(), "logs", name)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// remove deletes a pod, and waits until it is gone.
func (k *kube) remove(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		if err := k.client.CoreV1().Pods("default").Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range names {
		await(t, "the end of pod "+name, func() error {
			_, err := k.client.CoreV1().Pods("default").Get(t.Context(), name, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return nil
			}
			return errors.Join(errors.New("it is there"), err)
		})
	}
}

// removeClaim deletes a claim that no pod uses any more.
func (k *kube) removeClaim(t *testing.T, name string) {
	t.Helper()
	if err := k.client.ResourceV1().ResourceClaims("default").Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
}

// ran requires that a pod has run the CUDA program on so many GPUs of this machine, and removes it.
func (k *kube) ran(t *testing.T, name string, count int) {
	t.Helper()
	k.phase(t, name, corev1.PodSucceeded)
	out := k.logs(t, name)
	if !strings.Contains(out, "kernel ok") || strings.Count(out, "device ") != count {
		t.Errorf("the program of pod %s sees other devices than %d, or computes wrongly: %s", name, count, out)
	}
	for line := range strings.Lines(out) {
		if _, uuid, found := strings.Cut(strings.TrimSpace(line), "GPU-"); found {
			if _, known := k.bench.node.Inventory().ByUUID("GPU-" + uuid); !known {
				t.Errorf("pod %s sees GPU-%s, which this machine does not have", name, uuid)
			}
		}
	}
}

// published requires that both APIs offer all GPUs, and keeps what the cluster shows of them.
func published(t *testing.T, k *kube) {
	published := k.show(t, "resourceslices.yaml", "get", "resourceslices", "-o", "yaml")
	k.show(t, "gpunode.yaml", "get", "gpunodes", "-o", "yaml")
	k.show(t, "node.yaml", "get", "nodes", "-o", "yaml")
	for _, args := range []string{"ls", "doctor"} {
		k.plugin(t, args)
	}
	for _, g := range k.bench.node.Inventory().GPUs {
		if !strings.Contains(published, g.UUID) {
			t.Errorf("no slice has %s", g.UUID)
		}
	}
	node, err := k.client.CoreV1().Nodes().Get(t.Context(), "node-1", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got := node.Status.Allocatable[install.ResourceName]; got.Value() != int64(k.gpus) {
		t.Errorf("the node offers %s GPUs by limits, want %d", got.String(), k.gpus)
	}
}

// noGPU requires that a pod that asks for no GPU gets none.
func noGPU(t *testing.T, k *kube) {
	k.pod(t, "none", func(*corev1.Pod) {}, "/usr/bin/cuda", "run")
	k.phase(t, "none", corev1.PodFailed)
	t.Logf("%s", strings.TrimSpace(k.logs(t, "none")))
	k.remove(t, "none")
}

func limits(t *testing.T, k *kube) {
	start := time.Now()
	k.pod(t, "limits", byLimits(k.gpus), "/usr/bin/cuda", "run")
	k.ran(t, "limits", k.gpus)
	t.Logf("a pod by limits has run a kernel %s after its creation", time.Since(start))
	k.remove(t, "limits")
}

func claim(t *testing.T, k *kube) {
	start := time.Now()
	k.claim(t, "one", 1)
	k.pod(t, "claim", byClaim("one"), "/usr/bin/cuda", "run")
	k.ran(t, "claim", 1)
	t.Logf("a pod by a claim has run a kernel %s after its creation", time.Since(start))
	if smi := k.bench.smiInContainer(t); smi != "" {
		k.pod(t, "smi", byClaim("one"), smi, "-L")
		k.phase(t, "smi", corev1.PodSucceeded)
		if out := k.logs(t, "smi"); strings.Count(out, "UUID: GPU-") != 1 {
			t.Errorf("nvidia-smi -L in a pod with one GPU: %s", out)
		}
		k.remove(t, "smi")
	}
	k.remove(t, "claim")
	k.removeClaim(t, "one")
}

// sharedClaim runs two pods at once on the GPU of one claim.
func sharedClaim(t *testing.T, k *kube) {
	k.claim(t, "shared", 1)
	k.pod(t, "shared-1", byClaim("shared"), "/usr/bin/cuda", "loop", "600")
	k.phase(t, "shared-1", corev1.PodRunning)
	k.pod(t, "shared-2", byClaim("shared"), "/usr/bin/cuda", "run")
	k.ran(t, "shared-2", 1)
	k.phase(t, "shared-1", corev1.PodRunning)
	k.plugin(t, "node node-1")
	k.remove(t, "shared-1", "shared-2")
	k.removeClaim(t, "shared")
}

func claimWaitsForLimits(t *testing.T, k *kube) {
	k.pod(t, "holder", byLimits(k.gpus), "/usr/bin/cuda", "loop", "600")
	k.phase(t, "holder", corev1.PodRunning)
	k.claim(t, "late", 1)
	k.pod(t, "late", byClaim("late"), "/usr/bin/cuda", "run")
	k.waits(t, "late")
	start := time.Now()
	k.remove(t, "holder")
	gone := time.Since(start)
	k.ran(t, "late", 1)
	t.Logf("the holder was gone after %s, the pod that waited for its GPU has run after %s", gone, time.Since(start))
	k.remove(t, "late")
	k.removeClaim(t, "late")
}

func limitsWaitForClaim(t *testing.T, k *kube) {
	k.claim(t, "all", k.gpus)
	k.pod(t, "holder", byClaim("all"), "/usr/bin/cuda", "loop", "600")
	k.phase(t, "holder", corev1.PodRunning)
	k.pod(t, "late", byLimits(1), "/usr/bin/cuda", "run")
	k.waits(t, "late")
	start := time.Now()
	k.remove(t, "holder")
	k.removeClaim(t, "all")
	gone := time.Since(start)
	k.ran(t, "late", 1)
	t.Logf("the holder was gone after %s, the pod that waited for its GPU has run after %s", gone, time.Since(start))
	k.remove(t, "late")
}

// agentRestarts requires that a pod keeps its GPU, and that no other gets it, while the agent is replaced.
func agentRestarts(t *testing.T, k *kube) {
	k.pod(t, "holder", byLimits(k.gpus), "/usr/bin/cuda", "loop", "600")
	k.phase(t, "holder", corev1.PodRunning)
	before := k.agent(t)
	if err := k.client.CoreV1().Pods(install.Namespace).Delete(t.Context(), before.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	await(t, "another agent", func() error {
		after, err := k.findAgent(t.Context())
		if err == nil && (after.UID == before.UID || !ready(after)) {
			err = errors.New("the new agent is not ready")
		}
		return err
	})
	t.Logf("another agent was ready %s after the deletion of the first", time.Since(start))
	k.claim(t, "late", 1)
	k.pod(t, "late", byClaim("late"), "/usr/bin/cuda", "run")
	k.waits(t, "late")
	k.phase(t, "holder", corev1.PodRunning)
	k.remove(t, "holder")
	k.ran(t, "late", 1)
	k.remove(t, "late")
	k.removeClaim(t, "late")
}

func ready(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

func (k *kube) findAgent(ctx context.Context) (*corev1.Pod, error) {
	pods, err := k.client.CoreV1().Pods(install.Namespace).List(ctx, metav1.ListOptions{
		LabelSelector: "app.kubernetes.io/instance=" + install.Release + ",app.kubernetes.io/component!=controller",
	})
	if err != nil {
		return nil, err
	}
	for i, pod := range pods.Items {
		if slices.ContainsFunc(pod.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Kind == "DaemonSet" }) && pod.DeletionTimestamp == nil {
			return &pods.Items[i], nil
		}
	}
	return nil, fmt.Errorf("none of %d pods is an agent", len(pods.Items))
}

func (k *kube) agent(t *testing.T) *corev1.Pod {
	t.Helper()
	pod, err := k.findAgent(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return pod
}

func (k *kube) metrics(t *testing.T) string {
	t.Helper()
	out, err := k.client.CoreV1().RESTClient().Get().
		AbsPath("/api/v1/namespaces", install.Namespace, "pods", k.agent(t).Name+":8080", "proxy/metrics").DoRaw(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// xidOfAPod requires that an XID by a pod's own fault is counted, and that the GPU stays offered.
func xidOfAPod(t *testing.T, k *kube) {
	k.pod(t, "fault", byLimits(1), "/usr/bin/cuda", "fault")
	k.phase(t, "fault", corev1.PodSucceeded)
	t.Logf("%s", strings.TrimSpace(k.logs(t, "fault")))
	if os.Getenv(standInVariable) == "" {
		start := time.Now()
		await(t, "XID 31 in the metrics", func() error {
			if strings.Contains(k.metrics(t), `xid="31"`) {
				return nil
			}
			return errors.New("no XID 31")
		})
		t.Logf("XID 31 is in the metrics %s after the end of the pod was seen", time.Since(start))
	}
	k.remove(t, "fault")
	k.pod(t, "after", byLimits(k.gpus), "/usr/bin/cuda", "run")
	k.ran(t, "after", k.gpus)
	k.remove(t, "after")
	if strings.Contains(k.metrics(t), "tandem_unhealthy_device{") {
		t.Error("a GPU is unhealthy by the fault of a program")
	}
}

// idle records what the agent costs while nothing happens, and requires that it has no device node open where persistence mode is on.
func idle(t *testing.T, k *kube) {
	agent := k.agentProcess(t)
	const long = 20 * time.Second
	before := agent.cpu(t)
	open := 0
	for range 20 {
		time.Sleep(long / 20)
		links, err := filepath.Glob(filepath.Join(agent.dir, "fd/*"))
		if err != nil {
			t.Fatal(err)
		}
		for _, link := range links {
			if target, err := os.Readlink(link); err == nil && strings.Contains(target, "/dev/nvidia") {
				open++
				break
			}
		}
	}
	used := agent.cpu(t) - before
	status, err := os.ReadFile(filepath.Join(agent.dir, "status"))
	if err != nil {
		t.Fatal(err)
	}
	memory := ""
	for line := range strings.Lines(string(status)) {
		if strings.HasPrefix(line, "VmRSS") || strings.HasPrefix(line, "RssAnon") {
			memory += strings.Join(strings.Fields(line), " ") + " "
		}
	}
	t.Logf("the idle agent: %s%.3f %% of a core, a device node open in %d of 20 looks", memory, 100*used.Seconds()/long.Seconds(), open)
	if open > 0 && k.bench.persistent() {
		t.Errorf("in %d of 20 looks the agent had a device node open, although persistence mode is on", open)
	}
	k.bench.record(t, "metrics.txt", []byte(k.metrics(t)))
}

func (k *kube) agentProcess(t *testing.T) runningAgent {
	t.Helper()
	found, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range found {
		line, err := os.ReadFile(path)
		if err == nil && bytes.Contains(line, []byte("kubelet-plugin")) && bytes.Contains(line, []byte("--driver-name=")) {
			return runningAgent{filepath.Dir(path)}
		}
	}
	t.Fatal("no process of the agent")
	return runningAgent{}
}

// runningAgent is the agent's directory in /proc.
type runningAgent struct{ dir string }

// cpu is what the process has used of a core.
func (a runningAgent) cpu(t *testing.T) time.Duration {
	t.Helper()
	stat, err := os.ReadFile(filepath.Join(a.dir, "stat"))
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	fields := strings.Fields(after)
	var ticks int
	for _, field := range fields[11:13] { // utime and stime, proc_pid_stat(5)
		n, err := strconv.Atoi(field)
		if err != nil {
			t.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

// uninstall requires that nothing of Tandem stays in the API.
func uninstall(t *testing.T, k *kube) {
	k.show(t, "events.txt", "get", "events", "-A")
	k.show(t, "agent.log", "logs", "-n", install.Namespace, k.agent(t).Name)
	if err := install.Uninstall(t.Context(), k.Cluster, install.Options{Progress: t.Output()}); err != nil {
		t.Fatal(err)
	}
	await(t, "the end of slices and GPUs", func() error {
		list, err := k.client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		node, err := k.client.CoreV1().Nodes().Get(t.Context(), "node-1", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if left := node.Status.Allocatable[install.ResourceName]; len(list.Items) > 0 || !left.IsZero() {
			return fmt.Errorf("%d slices, %s GPUs by limits", len(list.Items), left.String())
		}
		return nil
	})
}
