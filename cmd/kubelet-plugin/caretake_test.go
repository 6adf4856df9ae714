// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// Whoever replaces a driver waits for the pods with its GPUs to end, and kubelet ends none whose claim nobody unprepares.
func TestClaimsEndWithoutADriver(t *testing.T) {
	c := nodeConfig(t)
	a, err := newAgent(c)
	if err != nil {
		t.Fatal(err)
	}
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "apps", Name: "one", UID: "c1"}}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: c.DriverName, Pool: c.NodeName, Device: "gpu-0"}},
	}}
	a.client = fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: c.NodeName, UID: "n"}}, claim)
	cgroups := podstate.NewCgroups(c.CgroupRoot)
	pods, err := podstate.NewPods(a.client, c.NodeName, cgroups, c.KubeletDir)
	if err != nil {
		t.Fatal(err)
	}
	resources, err := podstate.NewPodResources(c.KubeletDir)
	if err != nil {
		t.Fatal(err)
	}
	defer resources.Close()
	book, err := a.openLedger(t.Context(), pods, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer book.Close()
	request := ledger.ClaimRequest{UID: "c1", Namespace: "apps", Name: "one", Devices: []device.Ref{{GPU: "GPU-0"}}}
	if _, err := book.ReserveClaim(t.Context(), request); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	care := caretaker{agent: a, cgroups: cgroups, pods: pods, book: book, made: newRecords(t.TempDir(), "boot"), resources: resources, watchPods: func() {
		watching.Go(func() { _ = pods.Run(ctx) })
	}}
	start, stop := care.prepare(t.Context())
	defer stop()
	start()
	start()
	socket := filepath.Join(c.KubeletDir, "plugins", c.DriverName, "dra.sock")
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close()
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
	if holds := book.Holds(); len(holds) > 0 {
		t.Errorf("still held: %v", holds)
	}
	stop()
	if left, err := filepath.Glob(filepath.Join(c.KubeletDir, "plugins*", "*", "*.sock")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// A node where nothing is held has nothing to take care of.
func TestNothingToTakeCareOf(t *testing.T) {
	c := nodeConfig(t)
	a := start(t, c)
	a.await("driver: no NVIDIA driver")
	if left, err := filepath.Glob(filepath.Join(c.KubeletDir, "plugins_registry", "*")); err != nil || len(left) > 0 {
		t.Errorf("registered: %v, %v", left, err)
	}
	a.stop()
}
