// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	restwatch "k8s.io/client-go/rest/watch"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// BenchmarkFleet measures the memory of this program on a fleet. The API server is fake: it streams as many objects as a full cluster has,
// each as large as usual. GOGC and GOMEMLIMIT of the environment apply. It takes a minute, so run it with -benchtime=1x.
func BenchmarkFleet(b *testing.B) {
	for _, nodes := range []int{1000, 5000} {
		b.Run(strconv.Itoa(nodes), func(b *testing.B) {
			for b.Loop() {
				measure(b, &fleet{nodes: nodes, claims: 20 * nodes, withDevices: gpusANode * nodes, pods: 4 * nodes})
			}
		})
	}
}

// After the controller has caught up, agents report changes for a while, as with 50 pods a second. The steady memory is read afterwards.
const (
	traffic          = 30 * time.Second
	changesPerSecond = 100
)

func measure(b *testing.B, f *fleet) {
	b.Helper()
	f.init(b)
	server := httptest.NewServer(f)
	defer server.Close()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	endpoint := listener.Addr().String()
	if err := listener.Close(); err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	cmd := exec.CommandContext(ctx, os.Args[0], append([]string{"--kubeconfig=" + kubeconfig(b, server.URL), "--http-endpoint=" + endpoint, "--v=0"}, lease...)...)
	cmd.Env = append(os.Environ(), asController+"=1")
	began := time.Now()
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	defer func() { cancel(); _ = cmd.Wait() }() // killed
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for idle := 0; idle < 5; <-ticker.C {
		m := metrics(ctx, endpoint)
		if idle++; m["leader_election_master_status"] != 1 || m["workqueue_depth"]+m["controller_runtime_active_workers"] != 0 ||
			m[`controller_runtime_reconcile_total{controller="relay"`] < float64(f.nodes) {
			idle = 0
		}
		if time.Since(began) > 5*time.Minute {
			b.Fatalf("the controller did not catch up: %v", m)
		}
	}
	b.ReportMetric(time.Since(began).Seconds(), "s-catch-up")
	before := metrics(ctx, endpoint)["process_cpu_seconds_total"]
	b.ReportMetric(before, "s-cpu")
	close(f.caughtUp)
	time.Sleep(traffic)
	b.ReportMetric(100*(metrics(ctx, endpoint)["process_cpu_seconds_total"]-before)/traffic.Seconds(), "%-cpu-in-traffic")
	b.ReportMetric(memory(b, cmd.Process.Pid, "VmRSS:"), "MiB-steady")
	b.ReportMetric(memory(b, cmd.Process.Pid, "VmHWM:"), "MiB-peak")
	b.ReportMetric(metrics(ctx, endpoint)["go_memstats_next_gc_bytes"]/(1<<20), "MiB-next-GC")
	b.ReportMetric(float64(f.writes), "writes")
	b.ReportMetric(0, "ns/op")
}

// metrics returns the sums of the controller's metrics by name, and by name and first label.
func metrics(ctx context.Context, endpoint string) map[string]float64 {
	sums := map[string]float64{}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+endpoint+"/metrics", nil)
	if err != nil {
		return sums
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return sums // it starts
	}
	defer response.Body.Close()
	text, _ := io.ReadAll(response.Body)
	for line := range strings.Lines(string(text)) {
		at := strings.LastIndexByte(line, ' ')
		value, err := strconv.ParseFloat(strings.TrimSpace(line[at+1:]), 64)
		if err != nil {
			continue
		}
		name, labels, _ := strings.Cut(line[:at], "{")
		first, _, _ := strings.Cut(labels, ",")
		sums[name] += value
		sums[name+"{"+first] += value
	}
	return sums
}

func memory(b *testing.B, pid int, key string) float64 {
	b.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if fields := strings.Fields(line); fields[0] == key {
			kib, err := strconv.ParseFloat(fields[1], 64)
			if err != nil {
				b.Fatal(err)
			}
			return kib / 1024
		}
	}
	b.Fatalf("no %s of the process", key)
	return 0
}

// fleet is an API server that streams objects and accepts every write.
type fleet struct {
	nodes, claims, withDevices, pods int

	codecs   serializer.CodecFactory
	caughtUp chan struct{}
	mu       sync.Mutex
	lease    *coordinationv1.Lease
	writes   int
}

const gpusANode = 8

func (f *fleet) init(b *testing.B) {
	b.Helper()
	all := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientscheme.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(all); err != nil {
			b.Fatal(err)
		}
	}
	f.caughtUp = make(chan struct{})
	f.codecs = serializer.NewCodecFactory(all)
}

func (f *fleet) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	switch kind := path.Base(r.URL.Path); {
	case strings.Contains(r.URL.Path, "/leases"):
		f.serveLease(w, r)
	case r.Method != http.MethodGet:
		f.mu.Lock()
		f.writes++
		f.mu.Unlock()
		http.NotFound(w, r)
	case query.Get("watch") == "":
		write(w, map[string]any{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimList", "metadata": map[string]any{"resourceVersion": "1"}})
	case kind == "resourceclaims":
		f.stream(w, r, runtime.ContentTypeProtobuf, resourceapi.SchemeGroupVersion, f.claims, f.claim)
	case kind == "gpunodes":
		f.stream(w, r, runtime.ContentTypeJSON, v1alpha1.GroupVersion, f.nodes, f.gpuNode)
	case kind == "nodes":
		f.stream(w, r, runtime.ContentTypeProtobuf, corev1.SchemeGroupVersion, f.nodes, f.node)
	case kind == "pods" && strings.Contains(query.Get("fieldSelector"), "status.phase=Pending"):
		pods := f.pods
		if strings.Contains(query.Get("fieldSelector"), "spec.nodeName!=") {
			pods = 0 // none has a node
		}
		f.stream(w, r, runtime.ContentTypeProtobuf, corev1.SchemeGroupVersion, pods, f.pod)
	default:
		http.NotFound(w, r)
	}
}

// stream sends the initial events of a watch, and later changes of GPUNodes.
func (f *fleet) stream(w http.ResponseWriter, r *http.Request, mediaType string, of schema.GroupVersion, n int, object func(i int) runtime.Object) {
	info, _ := runtime.SerializerInfoForMediaType(f.codecs.SupportedMediaTypes(), mediaType)
	w.Header().Set("Content-Type", mediaType+";stream=watch")
	w.WriteHeader(http.StatusOK)
	outer := f.codecs.EncoderForVersion(info.StreamSerializer.Serializer, corev1.SchemeGroupVersion)
	events := restwatch.NewEncoder(streaming.NewEncoder(info.StreamSerializer.NewFrameWriter(w), outer), f.codecs.EncoderForVersion(info.Serializer, of))
	var last runtime.Object
	for i := range n {
		last = object(i)
		if events.Encode(&watch.Event{Type: watch.Added, Object: last}) != nil {
			return
		}
	}
	if last == nil {
		last = object(0)
	}
	end := last.DeepCopyObject()
	meta, _ := end.(metav1.Object)
	meta.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
	if events.Encode(&watch.Event{Type: watch.Bookmark, Object: end}) != nil {
		return
	}
	flusher, _ := w.(http.Flusher)
	flusher.Flush()
	if _, is := last.(*v1alpha1.GPUNode); !is {
		<-r.Context().Done()
		return
	}
	select {
	case <-f.caughtUp:
	case <-r.Context().Done():
	}
	ticker := time.NewTicker(time.Second / changesPerSecond)
	defer ticker.Stop()
	for i := 0; ; i++ {
		select {
		case <-r.Context().Done():
			return
		case <-ticker.C:
		}
		node, _ := object(i % n).(*v1alpha1.GPUNode)
		node.ResourceVersion = strconv.Itoa(2000000 + i)
		node.Status.ObservedGeneration = int64(i)
		if events.Encode(&watch.Event{Type: watch.Modified, Object: node}) != nil {
			return
		}
		flusher.Flush()
	}
}

func (f *fleet) serveLease(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.Method != http.MethodGet {
		body, _ := io.ReadAll(r.Body)
		f.lease = &coordinationv1.Lease{}
		if _, _, err := f.codecs.UniversalDeserializer().Decode(body, nil, f.lease); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		f.lease.TypeMeta = metav1.TypeMeta{APIVersion: "coordination.k8s.io/v1", Kind: "Lease"}
	}
	if f.lease == nil {
		http.NotFound(w, r)
		return
	}
	write(w, f.lease)
}

func write(w http.ResponseWriter, o any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(o) // a client that has gone needs no answer
}

// The names are as long as those of real clusters.
func nodeName(i int) string  { return fmt.Sprintf("gpu-node-%05d.cluster.example.com", i) }
func claimName(i int) string { return fmt.Sprintf("training-job-%06d-worker-0-gpu-x2x4z", i) }
func podName(i int) string   { return fmt.Sprintf("training-job-%06d-worker-0-5d8b7", i) }
func uid(kind byte, i int) types.UID {
	return types.UID(fmt.Sprintf("%c5a3f0c2-9d1e-4b7a-8c66-%011d", kind, i))
}

func metaOf(kind byte, namespace, name string, i int) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: namespace, Name: name, UID: uid(kind, i), ResourceVersion: strconv.Itoa(1000000 + i), CreationTimestamp: metav1.Now(),
		ManagedFields: []metav1.ManagedFieldsEntry{{
			Manager: "kube-controller-manager", Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "v1", Time: ptr.To(metav1.Now()), FieldsType: "FieldsV1",
			FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:annotations":{".":{}},"f:ownerReferences":{".":{},"k:{\"uid\":\"x\"}":{}}},"f:spec":{"f:devices":{"f:requests":{}}}}`),
		}},
	}
}

func (f *fleet) namespace(i int) string { return fmt.Sprintf("team-%03d", i%100) }

func (f *fleet) claim(i int) runtime.Object {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metaOf('c', f.namespace(i), claimName(i), i)}
	claim.Annotations = map[string]string{"resource.kubernetes.io/pod-claim-name": "gpu"}
	claim.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: podName(i), UID: uid('a', i), Controller: ptr.To(true), BlockOwnerDeletion: ptr.To(true)}}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: "gpu.nvidia.com", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
		Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: `device.attributes["gpu.nvidia.com"].productName.matches("H100")`}}},
	}}}
	if i >= f.withDevices {
		return claim
	}
	claim.Finalizers = []string{resourceapi.Finalizer}
	node := nodeName(i / gpusANode)
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: podName(i), UID: uid('a', i)}}
	claim.Status.Allocation = &resourceapi.AllocationResult{
		Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{
			Request: "gpu", Driver: "gpu.nvidia.com", Pool: node, Device: fmt.Sprint("gpu-", i%gpusANode),
		}}},
		NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
		}}},
		AllocationTimestamp: ptr.To(metav1.Now()),
	}
	return claim
}

func (f *fleet) gpuNode(i int) runtime.Object {
	node := &v1alpha1.GPUNode{ObjectMeta: metaOf('g', "", nodeName(i), i)}
	node.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: nodeName(i), UID: uid('n', i)}}
	node.Status = v1alpha1.GPUNodeStatus{
		Mode: "Dual", BootID: string(uid('b', i)), Counts: v1alpha1.DeviceCounts{Total: gpusANode, Claims: gpusANode}, ExtendedResource: "nvidia.com/gpu",
	}
	for at := range gpusANode {
		c := i*gpusANode + at
		node.Spec.Claims = append(node.Spec.Claims, v1alpha1.AllocatedClaim{
			UID: uid('c', c), Namespace: f.namespace(c), Name: claimName(c), Devices: []string{fmt.Sprint("gpu-", at)}, Pools: []string{nodeName(i)},
		})
		node.Status.Devices = append(node.Status.Devices, v1alpha1.DeviceStatus{
			Name: fmt.Sprint("gpu-", at), UUID: "GPU-" + string(uid('d', c)), Model: "NVIDIA H100 80GB HBM3",
			ExtendedResource: "nvidia.com/gpu", ExtendedResourceState: v1alpha1.ExtendedResourceWithdrawn,
			Holders: []v1alpha1.DeviceHolder{{
				Kind: v1alpha1.HolderClaim, State: v1alpha1.HoldHeld, UID: uid('c', c), Namespace: f.namespace(c), Name: claimName(c),
				Pods: []v1alpha1.PodReference{{UID: uid('a', c), Namespace: f.namespace(c), Name: podName(c)}},
			}},
		})
	}
	return node
}

func (f *fleet) node(i int) runtime.Object {
	node := &corev1.Node{ObjectMeta: metaOf('n', "", nodeName(i), i)}
	node.Labels, node.Annotations = map[string]string{}, map[string]string{}
	for at := range 90 {
		node.Labels[fmt.Sprintf("feature.node.kubernetes.io/cpu-cpuid.FEATURE%d", at)] = "true"
	}
	for at := range 10 {
		node.Annotations[fmt.Sprintf("example.com/annotation-%d", at)] = strings.Repeat("x", 100)
	}
	node.Status.Capacity, node.Status.Allocatable = corev1.ResourceList{}, corev1.ResourceList{}
	for at, r := range []corev1.ResourceName{"cpu", "memory", "pods", "ephemeral-storage", "hugepages-1Gi", "hugepages-2Mi", "rdma/hca", "example.com/a", "nvidia.com/gpu"} {
		node.Status.Capacity[r] = resource.MustParse("8")
		node.Status.Allocatable[r] = resource.MustParse(strconv.Itoa(8 - at))
	}
	for _, c := range []corev1.NodeConditionType{"MemoryPressure", "DiskPressure", "PIDPressure", "Ready"} {
		node.Status.Conditions = append(node.Status.Conditions, corev1.NodeCondition{Type: c, Status: "False", Reason: "KubeletHasSufficient", Message: "kubelet has sufficient memory available"})
	}
	node.Status.Conditions = append(node.Status.Conditions, corev1.NodeCondition{Type: "GPUsHealthy", Status: "True", Reason: "AllHealthy", Message: "all GPUs and partitions are healthy"})
	for at := range 50 {
		node.Status.Images = append(node.Status.Images, corev1.ContainerImage{
			Names: []string{fmt.Sprintf("registry.example.com/team/image-%d@sha256:%064d", at, at), fmt.Sprintf("registry.example.com/team/image-%d:v1", at)}, SizeBytes: 1 << 30,
		})
	}
	return node
}

func (f *fleet) pod(i int) runtime.Object {
	pod := &corev1.Pod{ObjectMeta: metaOf('p', f.namespace(i), fmt.Sprintf("waiting-job-%06d-worker-0-5d8b7", i), i)}
	pod.Labels = map[string]string{"job-name": fmt.Sprint("waiting-job-", i), "batch.kubernetes.io/controller-uid": string(uid('j', i))}
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: ptr.To("whole-gpu")}}
	container := corev1.Container{Name: "worker", Image: "registry.example.com/team/training:v1"}
	container.Resources.Limits = corev1.ResourceList{"cpu": resource.MustParse("8"), "memory": resource.MustParse("64Gi")}
	container.Resources.Requests = container.Resources.Limits
	for at := range 20 {
		container.Env = append(container.Env, corev1.EnvVar{Name: fmt.Sprint("VARIABLE_", at), Value: strings.Repeat("x", 40)})
	}
	pod.Spec.Containers = []corev1.Container{container}
	pod.Status.Phase = corev1.PodPending
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable", Message: strings.Repeat("0/5000 nodes are available. ", 10)}}
	return pod
}
