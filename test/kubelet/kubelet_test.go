// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/podstate"
	"github.com/tandem-gpu/tandem/test/faults"
)

const (
	gpu        = "nvidia.com/gpu"
	driverName = "gpu.nvidia.com"
)

// startOne starts a kubelet, and fails the test if a registration fails.
func startOne(t *testing.T, o Options) *Kubelet {
	t.Helper()
	k := startAny(t, o)
	t.Cleanup(func() {
		k.Stop()
		if failures := k.Failures(); len(failures) > 0 {
			t.Errorf("failures: %v", failures)
		}
	})
	return k
}

func startAny(t *testing.T, o Options) *Kubelet {
	t.Helper()
	// t.TempDir is too long for a socket's path.
	dir, err := os.MkdirTemp("", "k")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	o.Dir = dir
	k, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Stop)
	return k
}

func serve(t *testing.T, path string, register func(*grpc.Server)) (stop func()) {
	t.Helper()
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	register(server)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return server.Stop
}

func await(t *testing.T, k *Kubelet, what string, holds func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if !broadcast.Await(ctx, k.Changed, holds) {
		t.Fatalf("waited for %s: %v", what, k.Failures())
	}
}

func limited(name string, n int64) corev1.Container {
	return corev1.Container{Name: name, Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{gpu: *resource.NewQuantity(n, resource.DecimalSI)}}}
}

// A pod gets devices that the plugin lists as healthy and no other pod has. Its init containers leave theirs to it. The product reads
// all of it in the checkpoint.
func TestDevices(t *testing.T) {
	k := startOne(t, Options{})
	plugin := faults.NewDevicePlugin(map[string]int{"a": 0, "b": 1, "c": 2})
	stop := serve(t, filepath.Join(k.Dir, "device-plugins", "p.sock"), func(s *grpc.Server) { pluginapi.RegisterDevicePluginServer(s, plugin) })
	conn, err := dial(filepath.Join(k.Dir, "device-plugins", "kubelet.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	register := &pluginapi.RegisterRequest{Version: pluginapi.Version, Endpoint: "p.sock", ResourceName: gpu}
	if _, err := pluginapi.NewRegistrationClient(conn).Register(t.Context(), register); err != nil {
		t.Fatal(err)
	}
	await(t, k, "a list", func() bool { _, ok := k.DevicePlugin(gpu); return ok })

	first := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "first"}, Spec: corev1.PodSpec{
		InitContainers: []corev1.Container{limited("init", 1)}, Containers: []corev1.Container{limited("main", 2)},
	}}
	if err := k.admit(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, g := range k.Granted() {
		got = append(got, g.Container+"="+strings.Join(g.IDs, ","))
	}
	if want := []string{"init=a", "main=a,b"}; !slices.Equal(got, want) {
		t.Errorf("devices are %v, want %v", got, want)
	}
	checkpoint, err := podstate.ReadDeviceCheckpoint(k.Dir)
	if err != nil || len(checkpoint.Devices) != 3 || checkpoint.Devices[2] != (podstate.PodDevice{PodUID: "first", Container: "main", Resource: gpu, ID: "b"}) {
		t.Errorf("the checkpoint has %+v (%v)", checkpoint.Devices, err)
	}

	second := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "second"}, Spec: corev1.PodSpec{Containers: []corev1.Container{limited("main", 2)}}}
	if err := k.admit(t.Context(), second); err == nil || !strings.Contains(err.Error(), "Requested: 2, Available: 1") {
		t.Errorf("a pod that asks for too much: %v", err)
	}
	k.Release("first")
	plugin.Offer("b", "c")
	await(t, k, "a new list", func() bool { _, allocatable := k.counts(); return allocatable[gpu] == 2 })
	if err := k.admit(t.Context(), second); err != nil || !slices.Equal(k.Granted()[0].IDs, []string{"b", "c"}) {
		t.Errorf("the second pod got %+v (%v)", k.Granted(), err)
	}
	resources, err := podstate.NewPodResources(k.Dir)
	if err != nil {
		t.Fatal(err)
	}
	defer resources.Close()
	if all, err := resources.Allocatable(t.Context()); err != nil || !slices.Equal(all[gpu], []string{"b", "c"}) {
		t.Errorf("allocatable are %v (%v)", all, err)
	}
	stop()
	await(t, k, "the end of the stream", func() bool {
		capacity, allocatable := k.counts()
		return capacity[gpu] == 3 && allocatable[gpu] == 0
	})
}

// draDriver answers with one device for each claim.
type draDriver struct {
	registerapi.UnimplementedRegistrationServer
	drapb.UnimplementedDRAPluginServer
	endpoint string
	mu       sync.Mutex
	calls    []string
	refuse   bool
}

func (d *draDriver) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{Type: registerapi.DRAPlugin, Name: driverName, Endpoint: d.endpoint, SupportedVersions: []string{drapb.DRAPluginService}}, nil
}

func (d *draDriver) NotifyRegistrationStatus(context.Context, *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	return &registerapi.RegistrationStatusResponse{}, nil
}

func (d *draDriver) NodePrepareResources(_ context.Context, r *drapb.NodePrepareResourcesRequest) (*drapb.NodePrepareResourcesResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	answer := &drapb.NodePrepareResourcesResponse{Claims: map[string]*drapb.NodePrepareResourceResponse{}}
	for _, c := range r.GetClaims() {
		d.calls = append(d.calls, "prepare "+c.GetName())
		one := &drapb.NodePrepareResourceResponse{Devices: []*drapb.Device{{RequestNames: []string{"gpu"}, PoolName: "n", DeviceName: "gpu-0", CdiDeviceIds: []string{"k8s.x/gpu=0"}}}}
		if d.refuse {
			one = &drapb.NodePrepareResourceResponse{Error: "not now"}
		}
		answer.Claims[c.GetUid()] = one
	}
	return answer, nil
}

func (d *draDriver) NodeUnprepareResources(_ context.Context, r *drapb.NodeUnprepareResourcesRequest) (*drapb.NodeUnprepareResourcesResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	answer := &drapb.NodeUnprepareResourcesResponse{Claims: map[string]*drapb.NodeUnprepareResourceResponse{}}
	for _, c := range r.GetClaims() {
		d.calls = append(d.calls, "unprepare "+c.GetName())
		answer.Claims[c.GetUid()] = &drapb.NodeUnprepareResourceResponse{}
	}
	return answer, nil
}

// A claim is prepared once for all pods that share it, and unprepared after the last. One that is refused is asked for again. The product
// reads in the checkpoint which pods have which devices.
func TestClaims(t *testing.T) {
	podOf := func(name string) *corev1.Pod {
		shared := "shared"
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID(name)}, Spec: corev1.PodSpec{
			ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &shared}},
			Containers:     []corev1.Container{{Name: "main", Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpu"}}}}},
		}}
	}
	object := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "shared", UID: "c"}, Status: resourceapi.ResourceClaimStatus{
		Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
			{Request: "gpu", Driver: driverName, Pool: "n", Device: "gpu-0"},
		}}},
	}}
	for _, name := range []string{"one", "two"} {
		object.Status.ReservedFor = append(object.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: name, UID: types.UID(name)})
	}
	k := startOne(t, Options{Client: fake.NewClientset(object), Node: &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "n"}, Status: corev1.NodeStatus{Capacity: corev1.ResourceList{"cpu": resource.MustParse("1")}},
	}})
	d := &draDriver{endpoint: filepath.Join(k.Dir, "plugins", "dra.sock"), refuse: true}
	serve(t, d.endpoint, func(s *grpc.Server) { drapb.RegisterDRAPluginServer(s, d) })
	serve(t, filepath.Join(k.Dir, "plugins_registry", "d-reg.sock"), func(s *grpc.Server) { registerapi.RegisterRegistrationServer(s, d) })
	await(t, k, "the driver", func() bool { _, ok := k.Driver(driverName); return ok })

	one, two, other := podOf("one"), podOf("two"), podOf("other")
	if err := k.prepare(t.Context(), one); err == nil || !strings.Contains(err.Error(), "not now") {
		t.Errorf("a refused claim: %v", err)
	}
	d.mu.Lock()
	d.refuse = false
	d.mu.Unlock()
	if err := k.prepare(t.Context(), other); err == nil || !strings.Contains(err.Error(), "is not allowed to use") {
		t.Errorf("a pod that the claim is not reserved for: %v", err)
	}
	for _, pod := range []*corev1.Pod{one, two} {
		if err := k.prepare(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
	}
	if devices := k.claimDevices(two, two.Spec.Containers[0]); len(devices) != 1 || !slices.Equal(devices[0].CDI, []string{"k8s.x/gpu=0"}) {
		t.Errorf("the second pod has %+v", devices)
	}
	claims, err := podstate.ReadClaimState(k.Dir, driverName)
	if err != nil || len(claims) != 1 || !slices.Equal(claims[0].PodUIDs, []string{"one", "two"}) || !slices.Equal(claims[0].CDIDevices, []string{"k8s.x/gpu=0"}) {
		t.Errorf("the checkpoint has %+v (%v)", claims, err)
	}
	if err := k.unprepare(t.Context(), one.UID); err != nil || slices.Contains(d.calls, "unprepare shared") {
		t.Errorf("a claim that another pod has: %v, calls %v", err, d.calls)
	}
	if err := k.unprepare(t.Context(), two.UID); err != nil {
		t.Fatal(err)
	}
	if want := []string{"prepare shared", "prepare shared", "unprepare shared"}; !slices.Equal(d.calls, want) {
		t.Errorf("calls %v, want %v", d.calls, want)
	}
	if claims, err := podstate.ReadClaimState(k.Dir, driverName); err != nil || len(claims) > 0 {
		t.Errorf("the checkpoint still has %+v (%v)", claims, err)
	}
}

// A driver that is killed leaves its sockets. kubelet registers the one that puts its own in their place.
func TestDriverAfterAKilledOne(t *testing.T) {
	k := startOne(t, Options{})
	registry := filepath.Join(k.Dir, "plugins_registry", "d-reg.sock")
	d := &draDriver{endpoint: filepath.Join(k.Dir, "plugins", "dra.sock")}
	register := func(s *grpc.Server) { registerapi.RegisterRegistrationServer(s, d) }
	serve(t, registry, register)
	await(t, k, "the driver", func() bool { _, ok := k.Driver(driverName); return ok })
	killed, _ := k.Driver(driverName)

	fresh := filepath.Join(t.TempDir(), "fresh.sock")
	serve(t, fresh, register)
	if err := os.Rename(fresh, registry); err != nil {
		t.Fatal(err)
	}
	await(t, k, "the next driver", func() bool {
		next, ok := k.Driver(driverName)
		return ok && next.Identified.After(killed.Identified)
	})
}

// otherPlugin is a plugin that kubelet must refuse.
type otherPlugin struct {
	registerapi.UnimplementedRegistrationServer
	info registerapi.PluginInfo
	told chan *registerapi.RegistrationStatus
}

func (p *otherPlugin) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &p.info, nil
}

func (p *otherPlugin) NotifyRegistrationStatus(_ context.Context, s *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	p.told <- s
	return &registerapi.RegistrationStatusResponse{}, nil
}

// A plugin of another kind, or for another version of the API, is told that it is not registered.
func TestPluginsThatAreRefused(t *testing.T) {
	for kind, versions := range map[string][]string{registerapi.CSIPlugin: {drapb.DRAPluginService}, registerapi.DRAPlugin: {"v0.DRAPlugin"}} {
		t.Run(kind, func(t *testing.T) {
			k := startAny(t, Options{})
			p := &otherPlugin{info: registerapi.PluginInfo{Type: kind, Name: driverName, SupportedVersions: versions}, told: make(chan *registerapi.RegistrationStatus, 1)}
			serve(t, filepath.Join(k.Dir, "plugins_registry", "p-reg.sock"), func(s *grpc.Server) { registerapi.RegisterRegistrationServer(s, p) })
			if told := <-p.told; told.GetPluginRegistered() || !strings.Contains(told.GetError(), versions[0]) {
				t.Errorf("it is told %v", told)
			}
			await(t, k, "a failure", func() bool { return len(k.Failures()) == 1 })
			if _, ok := k.Driver(driverName); ok {
				t.Error("it is registered")
			}
		})
	}
}

// kubelet asks again if the API server does not answer. Otherwise the node's pods would never be removed.
func TestAPIServerIsAway(t *testing.T) {
	now := metav1.Now()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "one", UID: "u", DeletionTimestamp: &now, Finalizers: []string{"x"}}}
	client := fake.NewClientset(pod)
	asked := map[string]int{}
	done := make(chan struct{})
	answer := func(action clienttesting.Action) (bool, runtime.Object, error) {
		asked[action.GetVerb()]++ // the client calls one reactor at a time
		switch asked[action.GetVerb()] {
		case 1:
			return true, nil, syscall.ECONNREFUSED
		case 2:
			return true, nil, apierrors.NewServiceUnavailable("starting")
		}
		if action.GetVerb() == "delete" {
			close(done)
		}
		return true, pod, nil
	}
	client.PrependReactor("patch", "pods", answer)
	client.PrependReactor("delete", "pods", answer)
	startOne(t, Options{Client: client, Node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}}})
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatal("the pod was not removed")
	}
	if asked["patch"] != 3 || asked["delete"] != 3 {
		t.Errorf("asked %v", asked)
	}
}
