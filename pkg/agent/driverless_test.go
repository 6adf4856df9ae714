// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// hold records a hold of a claim, as an agent before did.
func hold(t *testing.T, c config.Config, bootID string, request ledger.ClaimRequest) {
	t.Helper()
	book, err := ledger.Open(t.Context(), ledger.Options{Dir: c.RunDir, BootID: bootID, PodStates: anything{}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := book.ReserveClaim(t.Context(), request); err != nil {
		t.Fatal(err)
	}
	if err := book.Close(); err != nil {
		t.Fatal(err)
	}
}

// A driver upgrade waits until the pods with its GPUs have ended, and kubelet ends no pod whose claims are not unprepared.
func TestClaimsEndWithoutADriver(t *testing.T) {
	c := nodeConfig(t)
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "apps", Name: "one", UID: "c1"}}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: c.DriverName, Pool: c.NodeName, Device: "gpu-0"}},
	}}
	slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "slice"}, Spec: resourceapi.ResourceSliceSpec{
		Driver: c.DriverName, NodeName: &c.NodeName, Pool: resourceapi.ResourcePool{Name: c.NodeName, ResourceSliceCount: 1},
	}}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: c.NodeName, UID: "n"}}
	client := fake.NewClientset(node, claim, slice)
	a := startWith(t, c, client)
	socket := filepath.Join(c.KubeletDir, "plugins", c.DriverName, "dra.sock")
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	kubelet := drapb.NewDRAPluginClient(connection)
	callCtx, giveUp := context.WithTimeout(t.Context(), time.Minute)
	defer giveUp()
	claims := []*drapb.Claim{{Namespace: "apps", Uid: "c1", Name: "one"}}
	prepared, err := kubelet.NodePrepareResources(callCtx, &drapb.NodePrepareResourcesRequest{Claims: claims}, grpc.WaitForReady(true))
	if err != nil || !strings.Contains(fmt.Sprint(prepared.GetClaims()["c1"].GetError()), "no NVIDIA driver now") {
		t.Errorf("prepare: %v, %v", prepared, err)
	}
	unprepared, err := kubelet.NodeUnprepareResources(callCtx, &drapb.NodeUnprepareResourcesRequest{Claims: claims})
	if err != nil || unprepared.GetClaims()["c1"].GetError() != "" {
		t.Errorf("unprepare: %v, %v", unprepared, err)
	}
	a.await("driver: no NVIDIA driver")
	await(t, "the end of all ResourceSlices", func() bool { return len(published(t, client)) == 0 })
	if err := connection.Close(); err != nil {
		t.Error(err)
	}
	a.stop()
	book, err := ledger.Open(t.Context(), ledger.Options{Dir: c.RunDir, BootID: a.bootID, PodStates: anything{}})
	if err != nil {
		t.Fatal(err)
	}
	defer book.Close()
	if holds := book.Holds(); len(holds) > 0 {
		t.Errorf("still held: %v", holds)
	}
	if left, err := filepath.Glob(filepath.Join(c.KubeletDir, "plugins*", "*", "*.sock")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func published(t *testing.T, client *fake.Clientset) []resourceapi.ResourceSlice {
	t.Helper()
	list, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return list.Items
}

// The agent starts again once the driver is there.
func TestDriverArrives(t *testing.T) {
	c := nodeConfig(t)
	machine := simulatedMachine(t, &c)
	setAbsent(t, machine, 4)
	a := startWith(t, c, fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: c.NodeName, UID: "n"}}))
	a.await("finds no GPU")
	setAbsent(t, machine, 0)
	select {
	case err := <-a.done:
		if !Restarts(err) {
			t.Errorf("ended: %v", err)
		}
	case <-time.After(time.Minute):
		t.Error("the agent stays in driverless mode")
	}
}

// A node where nothing is held has nothing to unprepare.
func TestNothingHeldWithoutADriver(t *testing.T) {
	c := nodeConfig(t)
	a := start(t, c)
	a.await("driver: no NVIDIA driver")
	if left, err := filepath.Glob(filepath.Join(c.KubeletDir, "plugins_registry", "*")); err != nil || len(left) > 0 {
		t.Errorf("registered: %v, %v", left, err)
	}
	a.stop()
}

// A claim state of kubelet that cannot be read may have claims, which have to end without a driver.
func TestUnreadableClaimStateWithoutADriver(t *testing.T) {
	c := nodeConfig(t)
	a, err := newAgent(c)
	if err != nil {
		t.Fatal(err)
	}
	book, err := ledger.Open(t.Context(), ledger.Options{Dir: c.RunDir, BootID: a.bootID, PodStates: anything{}})
	if err != nil {
		t.Fatal(err)
	}
	defer book.Close()
	if a.holdsAny(book) {
		t.Error("a node without claims and holds counts as one that has some")
	}
	if err := os.WriteFile(podstate.ClaimStatePath(c.KubeletDir), []byte("torn"), 0o600); err != nil {
		t.Fatal(err)
	}
	if !a.holdsAny(book) {
		t.Error("nothing is held, although kubelet may have claims")
	}
}
