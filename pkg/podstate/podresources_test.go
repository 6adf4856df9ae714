// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/grpc"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// fakeKubelet serves the pod resources API.
type fakeKubelet struct {
	podresources.UnimplementedPodResourcesListerServer
	list        *podresources.ListPodResourcesResponse
	allocatable *podresources.AllocatableResourcesResponse
}

func (k *fakeKubelet) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	return k.list, nil
}

func (k *fakeKubelet) GetAllocatableResources(context.Context, *podresources.AllocatableResourcesRequest) (*podresources.AllocatableResourcesResponse, error) {
	return k.allocatable, nil
}

// serve listens where kubelet does, until the returned function is called.
func (k *fakeKubelet) serve(t *testing.T, kubeletDir string) (stop func()) {
	t.Helper()
	dir := filepath.Join(kubeletDir, "pod-resources")
	must(t, os.MkdirAll(dir, 0o755))
	listener, err := net.Listen("unix", filepath.Join(dir, "kubelet.sock"))
	must(t, err)
	server := grpc.NewServer()
	podresources.RegisterPodResourcesListerServer(server, k)
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(listener) }()
	return func() { server.Stop(); <-done }
}

func newPodResources(t *testing.T, kubeletDir string) *PodResources {
	t.Helper()
	p, err := NewPodResources(kubeletDir)
	must(t, err)
	t.Cleanup(func() { must(t, p.Close()) })
	return p
}

// socketDir is short enough for the path of a socket.
func socketDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kubelet")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func TestList(t *testing.T) {
	dir := socketDir(t)
	kubelet := &fakeKubelet{list: &podresources.ListPodResourcesResponse{PodResources: []*podresources.PodResources{
		{Name: "limits", Namespace: "apps", Containers: []*podresources.ContainerResources{
			{Name: "main", Devices: []*podresources.ContainerDevices{
				{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"GPU-a", "GPU-b"}},
				{ResourceName: "example.com/nic", DeviceIds: []string{"nic"}},
			}},
			{Name: "side"},
		}},
		{Name: "claims", Namespace: "apps", Containers: []*podresources.ContainerResources{
			{Name: "main", DynamicResources: []*podresources.DynamicResource{
				{ClaimName: "one", ClaimNamespace: "apps", ClaimResources: []*podresources.ClaimResource{
					{DriverName: "gpu.nvidia.com", PoolName: "node-1", DeviceName: "gpu-0"},
					{DriverName: "other.example.com", PoolName: "node-1", DeviceName: "x"},
				}},
				{ClaimName: "other", ClaimNamespace: "apps", ClaimResources: []*podresources.ClaimResource{
					{DriverName: "other.example.com", PoolName: "node-1", DeviceName: "y"},
				}},
			}},
		}},
	}}}
	defer kubelet.serve(t, dir)()
	devices, claims, err := newPodResources(t, dir).List(t.Context(), ours, "gpu.nvidia.com")
	must(t, err)
	if want := []UsedDevice{
		{Namespace: "apps", Pod: "limits", Container: "main", Resource: "nvidia.com/gpu", ID: "GPU-a"},
		{Namespace: "apps", Pod: "limits", Container: "main", Resource: "nvidia.com/gpu", ID: "GPU-b"},
	}; !reflect.DeepEqual(devices, want) {
		t.Errorf("devices are %+v, want %+v", devices, want)
	}
	if want := []KubeletClaim{
		{Namespace: "apps", Name: "one", Devices: []PoolDevice{{"node-1", "gpu-0"}}},
	}; !reflect.DeepEqual(claims, want) {
		t.Errorf("claims are %+v, want %+v", claims, want)
	}
}

// A node's answer may be longer than what grpc takes by default.
func TestListOfMuch(t *testing.T) {
	dir := socketDir(t)
	kubelet := &fakeKubelet{list: &podresources.ListPodResourcesResponse{PodResources: []*podresources.PodResources{
		{Name: strings.Repeat("x", 5<<20)},
	}}}
	defer kubelet.serve(t, dir)()
	if _, _, err := newPodResources(t, dir).List(t.Context(), ours, "gpu.nvidia.com"); err != nil {
		t.Fatal(err)
	}
}

func TestAllocatableAcrossKubeletRestart(t *testing.T) {
	dir := socketDir(t)
	p := newPodResources(t, dir)
	if _, err := p.Allocatable(t.Context()); err == nil || !strings.Contains(err.Error(), "get kubelet's allocatable resources") {
		t.Fatalf("kubelet is away: got %v", err)
	}
	kubelet := &fakeKubelet{allocatable: &podresources.AllocatableResourcesResponse{Devices: []*podresources.ContainerDevices{
		{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"GPU-a"}},
		{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"GPU-b"}},
	}}}
	for range 2 {
		stop := kubelet.serve(t, dir)
		for {
			got, err := p.Allocatable(t.Context())
			if err != nil {
				continue // grpc waits before it connects again; the test's own deadline bounds this
			}
			if want := map[string][]string{"nvidia.com/gpu": {"GPU-a", "GPU-b"}}; !reflect.DeepEqual(got, want) {
				t.Fatalf("got %v, want %v", got, want)
			}
			break
		}
		stop()
		_ = os.Remove(filepath.Join(dir, "pod-resources", "kubelet.sock"))
	}
}
