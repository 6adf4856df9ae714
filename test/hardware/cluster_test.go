// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
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
	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/figure"
)

const (
	// imageVariable is an archive of Tandem's image. Without it the image is built.
	imageVariable = "TANDEM_HARDWARE_IMAGE"
	// cudaImage has the CUDA program.
	cudaImage = "docker.io/local/cuda:1"
	patience  = 2 * time.Minute
)

// kube is a one-node cluster on this machine whose node has this machine's GPUs.
type kube struct {
	*cluster.Cluster
	// ctx ends when the run is interrupted.
	ctx    context.Context
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
	if _, err := gotool.Root(t.Context()); err != nil {
		t.Skipf("needs Go and a checkout, for the programs of the cluster and the chart: %v", err)
	}
	for _, g := range b.node.Inventory().GPUs {
		if g.MIGEnabled {
			t.Skipf("needs GPUs without MIG mode, which %s has", g.Name())
		}
	}
	ctx, stop := signal.NotifyContext(t.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	k := startCluster(ctx, t, b)
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
		if ctx.Err() != nil {
			t.Fatalf("not run from %s on: %v", step.name, context.Cause(ctx))
		}
		t.Run(step.name, func(t *testing.T) { step.run(t, k) })
	}
}

func startCluster(ctx context.Context, t *testing.T, b *bench) *kube {
	t.Helper()
	dir, err := cluster.OwnedDir(ctx, "tandem-hardware-", t.Output())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	c, err := cluster.New(cluster.Config{
		Dir: filepath.Join(dir, "cluster"), Progress: t.Output(),
		Nodes: []cluster.NodeConfig{{Name: "node-1", Mounts: b.mounts(t)}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Minute)
		defer cancel()
		if t.Failed() {
			if err := c.CollectLogs(ctx, filepath.Join(b.out, "logs")); err != nil {
				t.Log(err)
			}
		}
		if err := c.Stop(ctx); err != nil {
			t.Error(err)
		}
	})
	if err := c.Start(ctx); err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(t.TempDir(), "cuda.tar")
	if err := cluster.WriteRootImage(archive, cudaImage, filepath.Join(b.programs, "rootfs")); err != nil {
		t.Fatal(err)
	}
	if err := c.LoadImage(ctx, archive); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	err = install.Tandem(ctx, c, install.Options{
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
	return &kube{Cluster: c, ctx: ctx, bench: b, client: client, gpus: len(b.node.Inventory().GPUs)}
}

// mounts are what a node needs of this machine, beside its programs: the driver and the device nodes.
func (b *bench) mounts(t *testing.T) (mounts []cluster.Mount) {
	t.Helper()
	add := func(path string) {
		mounts = append(mounts, cluster.Mount{Source: filepath.Join(b.options.HostRoot, path), Target: path})
	}
	if os.Getenv(standInVariable) != "" {
		add(filepath.Dir(os.Getenv("SYSFS_ROOT"))) // it has the driver, too
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

// values tell the chart where the driver is, as the environment tells it the tests.
func (b *bench) values() (values []string) {
	for variable, value := range map[string]string{
		"DRIVER_ROOT": "driverRoot=", "DEV_ROOT": "devRoot=", "SYSFS_ROOT": "extraArgs[0]=--sysfs-root=/host",
	} {
		if path := os.Getenv(variable); path != "" {
			values = append(values, value+path)
		}
	}
	return values
}

// await polls until a condition holds. It ends the test at once when the run is interrupted.
func (k *kube) await(t *testing.T, what string, condition func() error) {
	t.Helper()
	deadline := time.After(patience)
	for {
		err := condition()
		if err == nil {
			return
		}
		select {
		case <-k.ctx.Done():
			t.Fatalf("wait for %s: %v", what, context.Cause(k.ctx))
		case <-deadline:
			t.Fatalf("waited %s for %s: %v", patience, what, err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// show keeps what a command prints, for the reader of the results.
func (k *kube) show(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := k.Kubectl(k.ctx, args...)
	if err != nil {
		t.Error(err)
	}
	k.bench.record(t, name, []byte(out))
	return out
}

// plugin returns and keeps what kubectl gpu prints.
func (k *kube) plugin(t *testing.T, args ...string) string {
	t.Helper()
	cmd, err := k.Command(k.ctx, filepath.Join(k.bench.programs, "kubectl-gpu"), args...)
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("kubectl gpu %s: %v: %s", strings.Join(args, " "), err, out)
	}
	k.bench.record(t, "gpu-"+args[0]+".txt", out)
	return string(out)
}

// pod creates a pod that runs a program of the CUDA image. It is removed at the end of the test, if it is still there.
func (k *kube) pod(t *testing.T, name string, change func(*corev1.Pod), args ...string) {
	t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			RestartPolicy: corev1.RestartPolicyNever, TerminationGracePeriodSeconds: ptr.To[int64](1),
			Containers: []corev1.Container{{
				Name: "main", Image: cudaImage, ImagePullPolicy: corev1.PullNever, Command: args,
				Env: []corev1.EnvVar{{Name: "LC_ALL", Value: "C"}},
			}},
		},
	}
	change(pod)
	if _, err := k.client.CoreV1().Pods("default").Create(k.ctx, pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if k.ctx.Err() == nil { // else the cluster goes
			k.remove(t, name)
		}
	})
}

// byLimits asks for count GPUs by limits.
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

// newClaim creates a claim of count GPUs. It is removed at the end of the test, after the pods.
func (k *kube) newClaim(t *testing.T, name string, count int) {
	t.Helper()
	claims := k.client.ResourceV1().ResourceClaims("default")
	_, err := claims.Create(k.ctx, &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com", Count: int64(count)},
		}}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if k.ctx.Err() != nil {
			return // the cluster goes
		}
		if err := claims.Delete(k.ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			t.Error(err)
		}
		k.await(t, "the end of claim "+name, func() error {
			_, err := claims.Get(k.ctx, name, metav1.GetOptions{})
			return isGone(err)
		})
		k.offers(t, k.gpus, k.gpus)
	})
}

func isGone(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return errors.Join(errors.New("it still exists"), err)
}

// offers waits until both APIs offer these numbers of GPUs. Before that, the scheduler may still place a pod on a GPU that is held. A GPU that
// a pod has by limits counts as offered by limits.
func (k *kube) offers(t *testing.T, byLimits, byClaims int) {
	t.Helper()
	k.await(t, "both APIs to show what is free", func() error {
		node, err := k.client.CoreV1().Nodes().Get(k.ctx, "node-1", metav1.GetOptions{})
		if err != nil {
			return err
		}
		list, err := k.client.ResourceV1().ResourceSlices().List(k.ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		free := 0
		for _, slice := range list.Items {
			for _, d := range slice.Spec.Devices {
				if len(d.Taints) == 0 {
					free++
				}
			}
		}
		if got := node.Status.Allocatable[install.ResourceName]; got.Value() != int64(byLimits) || free != byClaims {
			return fmt.Errorf("%s GPUs by limits and %d by claims, not %d and %d", got.String(), free, byLimits, byClaims)
		}
		return nil
	})
}

// phase waits for a phase of a pod. It does not wait for a pod that has ended otherwise.
func (k *kube) phase(t *testing.T, name string, want corev1.PodPhase) {
	t.Helper()
	k.await(t, fmt.Sprintf("pod %s to be %s", name, want), func() error {
		pod, err := k.client.CoreV1().Pods("default").Get(k.ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		is := fmt.Sprintf("it is %s: %s %s %+v", pod.Status.Phase, pod.Status.Reason, pod.Status.Message, pod.Status.ContainerStatuses)
		switch pod.Status.Phase {
		case want:
			return nil
		case corev1.PodFailed, corev1.PodSucceeded:
			out, err := k.Kubectl(k.ctx, "logs", name) // a pod that kubelet refused has none
			t.Fatalf("pod %s should be %s: %s\nlogs: %s (%v)", name, want, is, out, err)
		}
		return errors.New(is)
	})
}

// waits requires that the scheduler finds no place for a pod.
func (k *kube) waits(t *testing.T, name string) {
	t.Helper()
	k.await(t, fmt.Sprintf("pod %s to wait", name), func() error {
		pod, err := k.client.CoreV1().Pods("default").Get(k.ctx, name, metav1.GetOptions{})
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
	out, err := k.Kubectl(k.ctx, "logs", name)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// remove deletes pods, and waits until they are gone. It is idempotent.
func (k *kube) remove(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		if err := k.client.CoreV1().Pods("default").Delete(k.ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			t.Error(err)
		}
	}
	for _, name := range names {
		k.await(t, "the end of pod "+name, func() error {
			_, err := k.client.CoreV1().Pods("default").Get(k.ctx, name, metav1.GetOptions{})
			return isGone(err)
		})
	}
}

// ran requires that a pod has run the CUDA program on count GPUs of this machine, and returns them.
func (k *kube) ran(t *testing.T, name string, count int) []string {
	t.Helper()
	k.phase(t, name, corev1.PodSucceeded)
	out := k.logs(t, name)
	gpus := k.devices(t, name, out)
	if !strings.Contains(out, "kernel ok") || len(gpus) != count {
		t.Errorf("the program of pod %s computes wrongly, or does not see exactly %d GPUs: %s", name, count, out)
	}
	return gpus
}

// devices are the UUIDs that the CUDA program of a pod has printed.
func (k *kube) devices(t *testing.T, name, out string) (gpus []string) {
	t.Helper()
	for line := range strings.Lines(out) {
		if _, uuid, found := strings.Cut(strings.TrimSpace(line), "GPU-"); found {
			gpus = append(gpus, "GPU-"+uuid)
			if _, known := k.bench.node.Inventory().ByUUID("GPU-" + uuid); !known {
				t.Errorf("pod %s sees GPU-%s, which this machine does not have", name, uuid)
			}
		}
	}
	slices.Sort(gpus)
	return slices.Compact(gpus)
}

// published requires that both APIs offer all GPUs, and keeps what the cluster shows of them.
func published(t *testing.T, k *kube) {
	offered := k.show(t, "resourceslices.yaml", "get", "resourceslices", "-o", "yaml")
	for _, g := range k.bench.node.Inventory().GPUs {
		if !strings.Contains(offered, g.UUID) {
			t.Errorf("no slice has %s", g.UUID)
		}
	}
	k.show(t, "gpunode.yaml", "get", "gpunodes", "-o", "yaml")
	k.show(t, "node.yaml", "get", "nodes", "-o", "yaml")
	if list := k.plugin(t, "ls"); !strings.Contains(list, "gpu-0") {
		t.Errorf("kubectl gpu ls has no gpu-0: %s", list)
	}
	k.plugin(t, "doctor")
	k.offers(t, k.gpus, k.gpus)
}

// noGPU requires that a pod that asks for no GPU has no device node of one.
func noGPU(t *testing.T, k *kube) {
	k.pod(t, "none", func(pod *corev1.Pod) { pod.Spec.Containers[0].Image = cluster.BusyboxImage }, "ls", "/dev")
	k.phase(t, "none", corev1.PodSucceeded)
	if nodes := k.logs(t, "none"); !strings.Contains(nodes, "null") || strings.Contains(nodes, "nvidia") {
		t.Errorf("a pod without a GPU has these device nodes: %s", nodes)
	}
}

func limits(t *testing.T, k *kube) {
	start := time.Now()
	k.pod(t, "limits", byLimits(k.gpus), "/usr/bin/cuda", "run")
	k.phase(t, "limits", corev1.PodSucceeded)
	t.Logf("a pod by limits has ended %s after its creation", time.Since(start))
	k.ran(t, "limits", k.gpus)
}

func claim(t *testing.T, k *kube) {
	start := time.Now()
	k.newClaim(t, "one", 1)
	k.pod(t, "claim", byClaim("one"), "/usr/bin/cuda", "run")
	k.phase(t, "claim", corev1.PodSucceeded)
	t.Logf("a pod by a claim has ended %s after its creation", time.Since(start))
	k.ran(t, "claim", 1)
	if smi := k.bench.smiInContainer(t); smi != "" {
		k.pod(t, "smi", byClaim("one"), smi, "-L")
		k.phase(t, "smi", corev1.PodSucceeded)
		if out := k.logs(t, "smi"); strings.Count(out, "UUID: GPU-") != 1 {
			t.Errorf("nvidia-smi -L in a pod with one GPU: %s", out)
		}
	}
}

// sharedClaim runs two pods at once on the GPU of one claim.
func sharedClaim(t *testing.T, k *kube) {
	k.newClaim(t, "shared", 1)
	k.pod(t, "shared-1", byClaim("shared"), "/usr/bin/cuda", "loop", "600")
	k.phase(t, "shared-1", corev1.PodRunning)
	k.pod(t, "shared-2", byClaim("shared"), "/usr/bin/cuda", "run")
	second := k.ran(t, "shared-2", 1)
	if first := k.devices(t, "shared-1", k.logs(t, "shared-1")); !slices.Equal(first, second) {
		t.Errorf("two pods of one claim see the GPUs %v and %v", first, second)
	}
	k.phase(t, "shared-1", corev1.PodRunning)
	k.plugin(t, "node", "node-1")
}

// claimBehindLimits has the pod holder with all GPUs by limits, and the pod late, which waits for one of them by a claim.
func (k *kube) claimBehindLimits(t *testing.T) {
	t.Helper()
	k.newClaim(t, "late", 1)
	k.pod(t, "holder", byLimits(k.gpus), "/usr/bin/cuda", "loop", "600")
	k.phase(t, "holder", corev1.PodRunning)
	k.offers(t, k.gpus, 0)
	k.pod(t, "late", byClaim("late"), "/usr/bin/cuda", "run")
	k.waits(t, "late")
}

func claimWaitsForLimits(t *testing.T, k *kube) {
	k.claimBehindLimits(t)
	k.handOver(t)
}

func limitsWaitForClaim(t *testing.T, k *kube) {
	k.newClaim(t, "all", k.gpus)
	k.pod(t, "holder", byClaim("all"), "/usr/bin/cuda", "loop", "600")
	k.phase(t, "holder", corev1.PodRunning)
	k.offers(t, 0, k.gpus)
	k.pod(t, "late", byLimits(1), "/usr/bin/cuda", "run")
	k.waits(t, "late")
	k.handOver(t)
}

// handOver ends the pod that holds all GPUs, and requires that the one that waits runs.
func (k *kube) handOver(t *testing.T) {
	t.Helper()
	start := time.Now()
	k.remove(t, "holder")
	gone := time.Since(start)
	k.phase(t, "late", corev1.PodSucceeded)
	t.Logf("the holder was gone after %s, the pod that waited for its GPU has ended after %s", gone, time.Since(start))
	k.ran(t, "late", 1)
}

// agentRestarts requires that a pod keeps its GPU, and that a claim that waits for it does not get it, while the agent is replaced.
func agentRestarts(t *testing.T, k *kube) {
	k.claimBehindLimits(t)
	before := k.agent(t)
	if err := k.client.CoreV1().Pods(install.Namespace).Delete(k.ctx, before.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	k.await(t, "another agent", func() error {
		after, err := k.findAgent()
		if err == nil && (after.UID == before.UID || !ready(after)) {
			err = errors.New("the new agent is not ready")
		}
		return err
	})
	t.Logf("another agent was ready %s after the deletion of the first", time.Since(start))
	k.offers(t, k.gpus, 0)
	k.waits(t, "late")
	k.phase(t, "holder", corev1.PodRunning)
	k.handOver(t)
}

func ready(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

func (k *kube) findAgent() (*corev1.Pod, error) {
	pods, err := k.client.CoreV1().Pods(install.Namespace).List(k.ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=kubelet-plugin"})
	if err != nil {
		return nil, err
	}
	for i, pod := range pods.Items {
		if pod.DeletionTimestamp == nil {
			return &pods.Items[i], nil
		}
	}
	return nil, errors.New("no agent has a pod that stays")
}

func (k *kube) agent(t *testing.T) *corev1.Pod {
	t.Helper()
	pod, err := k.findAgent()
	if err != nil {
		t.Fatal(err)
	}
	return pod
}

func (k *kube) readMetrics() (string, error) {
	agent, err := k.findAgent()
	if err != nil {
		return "", err
	}
	page, err := k.client.CoreV1().RESTClient().Get().
		AbsPath("/api/v1/namespaces", install.Namespace, "pods", agent.Name+":8080", "proxy/metrics").DoRaw(k.ctx)
	return string(page), err
}

func (k *kube) metrics(t *testing.T) (page string) {
	t.Helper()
	k.await(t, "the agent's metrics", func() (err error) {
		page, err = k.readMetrics()
		return err
	})
	return page
}

// xids is how often a page of metrics counts an XID. The agent counts those since the boot.
func xids(t *testing.T, page string, xid int) (count float64) {
	t.Helper()
	for line := range strings.Lines(page) {
		if strings.HasPrefix(line, "tandem_gpu_xids_total{") && strings.Contains(line, fmt.Sprintf("xid=%q", strconv.Itoa(xid))) {
			_, number, _ := strings.Cut(line, "} ")
			value, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
			if err != nil {
				t.Fatal(err)
			}
			count += value
		}
	}
	return count
}

// xidOfAPod requires that an XID by a pod's own fault is counted, and that the GPU stays offered.
func xidOfAPod(t *testing.T, k *kube) {
	const illegalAddress = 31 // NVIDIA's XID catalog: GPU memory page fault
	before := xids(t, k.metrics(t), illegalAddress)
	k.pod(t, "fault", byLimits(1), "/usr/bin/cuda", "fault")
	k.phase(t, "fault", corev1.PodSucceeded)
	if os.Getenv(standInVariable) == "" {
		start := time.Now()
		k.await(t, "another XID 31 in the metrics", func() error {
			page, err := k.readMetrics()
			if now := xids(t, page, illegalAddress); err == nil && now <= before {
				err = fmt.Errorf("%v, as before", now)
			}
			return err
		})
		t.Logf("the XID was in the metrics %s after the end of the pod was seen", time.Since(start))
	}
	k.remove(t, "fault")
	k.pod(t, "after", byLimits(k.gpus), "/usr/bin/cuda", "run")
	k.ran(t, "after", k.gpus)
	if strings.Contains(k.metrics(t), "tandem_unhealthy_device{") {
		t.Error("a GPU is unhealthy by the fault of a program")
	}
}

// idle records what the agent costs while nothing happens. Where persistence mode is on, it has device nodes open only while it scans.
func idle(t *testing.T, k *kube) {
	agent := k.agentProcess(t)
	const long = 20 * time.Second
	before := agent.cpu(t)
	open := 0
	for range 20 {
		time.Sleep(long / 20)
		if len(openNodes(t, agent.dir)) > 0 {
			open++
		}
	}
	used := agent.cpu(t) - before
	memory, err := figure.ReadMemoryIn(agent.dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the idle agent: %.1f MiB resident, %.1f anonymous, %.1f %% of a core, a device node open in %d of 20 looks",
		memory.Resident, memory.Anonymous, 100*used.Seconds()/long.Seconds(), open)
	// A scan takes tens of milliseconds each second.
	if open > 5 && k.bench.persistent() {
		t.Errorf("in %d of 20 looks the agent had a device node open, although persistence mode is on", open)
	}
	k.bench.record(t, "metrics.txt", []byte(k.metrics(t)))
}

// agentProcess finds the agent among the processes of the node.
func (k *kube) agentProcess(t *testing.T) runningAgent {
	t.Helper()
	root, err := k.Nodes()[0].Root()
	if err != nil {
		t.Fatal(err)
	}
	found, err := filepath.Glob(filepath.Join(root, "proc/[0-9]*/cmdline"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range found {
		line, err := os.ReadFile(path)
		if err == nil && bytes.Contains(line, []byte("kubelet-plugin")) && bytes.Contains(line, []byte("--driver-name=")) {
			return runningAgent{filepath.Dir(path)}
		}
	}
	t.Fatal("no process of the agent on the node")
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

// uninstall requires that no slice and no GPU by limits stays.
func uninstall(t *testing.T, k *kube) {
	k.show(t, "events.txt", "get", "events", "-A")
	k.show(t, "agent.log", "logs", "-n", install.Namespace, k.agent(t).Name)
	if err := install.Uninstall(k.ctx, k.Cluster, install.Options{Progress: t.Output()}); err != nil {
		t.Fatal(err)
	}
	k.await(t, "the end of slices and GPUs", func() error {
		list, err := k.client.ResourceV1().ResourceSlices().List(k.ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		node, err := k.client.CoreV1().Nodes().Get(k.ctx, "node-1", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if left := node.Status.Allocatable[install.ResourceName]; len(list.Items) > 0 || !left.IsZero() {
			return fmt.Errorf("%d slices, %s GPUs by limits", len(list.Items), left.String())
		}
		return nil
	})
}
