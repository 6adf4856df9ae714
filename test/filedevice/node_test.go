// SPDX-License-Identifier: Apache-2.0

package filedevice

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/driver"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
	"github.com/tandem-gpu/tandem/pkg/wiring"
)

const (
	nodeName     = "node-1"
	driverName   = "files.example.com"
	resourceName = "example.com/file"
)

// node is a node with a running agent whose devices are files.
type node struct {
	caller
	api    *fake.Clientset
	files  *source
	cdiDir string
}

// startNode starts an agent for the files until the test ends, and waits until both APIs are served.
func startNode(t *testing.T, files map[string]properties) *node {
	t.Helper()
	// t.TempDir is too long for a socket's path.
	dir, err := os.MkdirTemp("", "files")
	check(t, err)
	t.Cleanup(func() { check(t, os.RemoveAll(dir)) })
	n := &node{caller: startKubelet(t, dir), api: newAPI(), files: &source{dir: t.TempDir()}, cdiDir: t.TempDir()}
	for id, p := range files {
		n.put(id, p)
	}

	c := config.Defaults()
	c.NodeName, c.DriverName, c.ResourceName, c.CDIHook = nodeName, driverName, resourceName, "none"
	c.KubeletDir, c.RunDir, c.CgroupRoot, c.CDIDir = dir, t.TempDir(), t.TempDir(), n.cdiDir
	parts, err := wiring.New(wiring.Options{
		Config: c, BootID: "boot", Hardware: n.files, Client: n.api, Recorder: &record.FakeRecorder{}, Registerer: prometheus.NewRegistry(),
		Hooks: wiring.Hooks{
			PodStates:   func(*podstate.Pods) ledger.PodStates { return podStates{} },
			Pods:        func(*podstate.Pods) driver.Pods { return pods{} },
			Allocations: noAllocations{}, DaemonTrouble: func(string) string { return "" },
		},
	})
	check(t, err)
	t.Cleanup(func() { check(t, parts.Resources.Close()) })
	problems, err := parts.Open(t.Context())
	check(t, errors.Join(append(problems, err)...))
	t.Cleanup(func() { check(t, parts.Ledger.Close()) })
	parts.Connect(c)
	apis, err := parts.NewAPIs(wiring.Serving{Config: c, Registerer: prometheus.NewRegistry()})
	check(t, err)

	ctx, stop := context.WithCancel(context.Background())
	group, ctx := errgroup.WithContext(ctx)
	for _, run := range []func(context.Context) error{
		n.files.Run, parts.Pods.Run, parts.Node.Run, parts.CDI.Run, parts.Handover.Run, parts.Health.Run, apis.Claims.Run, apis.Limits.Run,
	} {
		group.Go(func() error { return run(ctx) })
	}
	t.Cleanup(func() {
		stop()
		check(t, group.Wait())
	})
	eventually(t, n.registered)
	eventually(t, apis.Claims.Ready)
	eventually(t, apis.Limits.Ready)
	return n
}

// put adds a device.
func (n *node) put(id string, p properties) {
	n.t.Helper()
	data, err := json.Marshal(p)
	check(n.t, err)
	unnamed := filepath.Join(n.files.dir, "unnamed")
	check(n.t, os.WriteFile(unnamed, data, 0o600))
	check(n.t, os.Rename(unnamed, n.files.path(id)))
}

// remove removes a device.
func (n *node) remove(id string) {
	n.t.Helper()
	check(n.t, os.Remove(n.files.path(id)))
}

// claim makes a claim that the scheduler has allocated a device.
func (n *node) claim(name, published string) *resourceapi.ResourceClaim {
	n.t.Helper()
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: name, UID: types.UID("uid-" + name)},
		Status: resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
				{Request: "file", Driver: driverName, Pool: nodeName, Device: published},
			}}},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: name, UID: types.UID("pod-" + name)}},
		},
	}
	_, err := n.api.ResourceV1().ResourceClaims(claim.Namespace).Create(n.t.Context(), claim, metav1.CreateOptions{})
	check(n.t, err)
	return claim
}

// devices returns the devices in the driver's slices.
func (n *node) devices() []resourceapi.Device {
	n.t.Helper()
	list, err := n.api.ResourceV1().ResourceSlices().List(n.t.Context(), metav1.ListOptions{})
	check(n.t, err)
	var devices []resourceapi.Device
	for _, slice := range list.Items {
		if slice.Spec.Driver != driverName || slice.Spec.Pool.Name != nodeName {
			n.t.Errorf("slice of driver %s in pool %s", slice.Spec.Driver, slice.Spec.Pool.Name)
		}
		devices = append(devices, slice.Spec.Devices...)
	}
	return devices
}

// published describes the devices in the slices by UUID, with Tandem's taints as "!name=value".
func (n *node) published() string {
	n.t.Helper()
	var all []string
	for _, d := range n.devices() {
		text := *d.Attributes["uuid"].StringValue
		for _, taint := range d.Taints {
			if name, is := strings.CutPrefix(taint.Key, "tandem-gpu.dev/"); is {
				text += "!" + name + "=" + taint.Value
			}
		}
		all = append(all, text)
	}
	return strings.Join(all, " ")
}

// await waits until the scheduler and kubelet have these devices.
func (n *node) await(published, listed string) {
	n.t.Helper()
	eventually(n.t, func() error {
		if p, l := n.published(), n.listed(); p != published || l != listed {
			return fmt.Errorf("slices have %q, want %q; limits have %q, want %q", p, published, l, listed)
		}
		return nil
	})
}

// wantFile fails the test unless a container runtime gives a container with these CDI names the file of the device and nothing else.
func (n *node) wantFile(names []string, id string) {
	n.t.Helper()
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(n.cdiDir), cdilib.WithAutoRefresh(false))
	check(n.t, err)
	container := &oci.Spec{}
	if _, err := cache.InjectDevices(container, names...); err != nil {
		n.t.Fatalf("inject %v: %v", names, err)
	}
	want := &oci.Spec{Mounts: []oci.Mount{{Source: n.files.path(id), Destination: filepath.Join(containerDir, id), Options: []string{"bind", "rw"}}}}
	if difference := cmp.Diff(want, container); difference != "" {
		n.t.Errorf("a container with %v differs from what %s needs (-want +got):\n%s", names, id, difference)
	}
}

// newAPI returns client-go's fake of an API server, with what it lacks for slices: names, resource versions and dry runs.
func newAPI() *fake.Clientset {
	api := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "node-uid"}})
	var version atomic.Int64
	store := func(action clienttesting.Action) (handled bool, stored runtime.Object, err error) {
		slice := action.(interface{ GetObject() runtime.Object }).GetObject().(*resourceapi.ResourceSlice)
		slice.ResourceVersion = strconv.FormatInt(version.Add(1), 10)
		if slice.Name == "" {
			slice.Name = slice.GenerateName + slice.ResourceVersion
		}
		create, is := action.(clienttesting.CreateActionImpl)
		return is && len(create.CreateOptions.DryRun) > 0, slice, nil
	}
	api.PrependReactor("create", "resourceslices", store)
	api.PrependReactor("update", "resourceslices", store)
	return api
}

// podStates are those of pods that run until their hold drains.
type podStates struct{}

func (podStates) PodState(h ledger.Hold) ledger.PodState {
	if h.State == ledger.StateDraining {
		return ledger.Gone
	}
	return ledger.Running
}
func (podStates) Started(ledger.Hold, []ledger.Hold) bool { return true }
func (podStates) Reuses(ledger.Hold) bool                 { return false }

// pods says that no pod has an owner that replaces it.
type pods struct{}

func (pods) Movable(context.Context, ledger.ClaimRequest) bool { return false }
func (pods) WaitForPods(context.Context, ledger.ClaimRequest)  {}
func (pods) Uses(ledger.Hold) bool                             { return true }

// noAllocations: no controller runs.
type noAllocations struct{}

func (noAllocations) Claims() []v1alpha1.AllocatedClaim { return nil }
func (noAllocations) Synced() bool                      { return true }
func (noAllocations) Maintenance() map[string]bool      { return nil }
func (noAllocations) Allocated() []ledger.Hold          { return nil }
func (noAllocations) OutOfService() func(device.Device) string {
	return func(device.Device) string { return "" }
}
func (noAllocations) Changed() <-chan struct{} { return nil }

// eventually waits until a condition holds.
func eventually(t *testing.T, condition func() error) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		err := condition()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
