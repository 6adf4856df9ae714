// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	drahealthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	drahealthv1alpha1 "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// taintsOf returns the taints of all devices of all pools as "key=value:effect".
func taintsOf(t *testing.T, inv device.Inventory, kept Capabilities) map[string][]string {
	t.Helper()
	taints := map[string][]string{}
	for _, pool := range poolsOf(t, Facts{Inventory: inv, Kept: kept}) {
		for _, slice := range pool.Slices {
			for _, d := range slice.Devices {
				for _, taint := range d.Taints {
					taints[d.Name] = append(taints[d.Name], taint.Key+"="+taint.Value+":"+string(taint.Effect))
				}
			}
		}
	}
	return taints
}

// An unhealthy device has Tandem's taint and NVIDIA's, with the effect that the node configuration sets, in each kind of pool.
func TestHealthTaints(t *testing.T) {
	inv := machine(4)
	inv.GPUs[0].Health = device.Health{Reason: device.ReasonLost, XID: 79}
	inv.GPUs[1].Health = device.Health{Reason: device.ReasonXID, XID: 48, Evict: true}
	inv.GPUs[2].Health = device.Health{Reason: device.ReasonFabric, Message: "not started"}
	want := map[string][]string{
		"gpu-0": {"tandem-gpu.dev/unhealthy=Lost:NoSchedule", "gpu.nvidia.com/xid=79:NoSchedule", "gpu.nvidia.com/gpu-lost=:NoSchedule"},
		"gpu-1": {"tandem-gpu.dev/unhealthy=XID:NoExecute", "gpu.nvidia.com/xid=48:NoExecute"},
		"gpu-2": {"tandem-gpu.dev/unhealthy=Fabric:NoSchedule"},
	}
	if diff := cmp.Diff(want, taintsOf(t, inv, everything)); diff != "" {
		t.Error(diff)
	}
}

// The pool of a dynamic GPU has the taints beside its counters: all devices for the GPU, one for a partition.
func TestHealthTaintsInGPUPools(t *testing.T) {
	inv := machine(2, dynamic)
	for i := range inv.GPUs {
		cut(&inv.GPUs[i], "1g.10gb", 6)
		inv.GPUs[i].Partitions[0].Made = true
	}
	inv.GPUs[0].Health = device.Health{Reason: device.ReasonResetRequired, Evict: true}
	inv.GPUs[1].Partitions[0].Health = device.Health{Reason: device.ReasonXID, XID: 94}
	taints := taintsOf(t, inv, everything)
	for name, all := range taints {
		if device.GPUName(name) == "gpu-0" {
			if diff := cmp.Diff([]string{"tandem-gpu.dev/unhealthy=ResetRequired:NoExecute"}, all); diff != "" {
				t.Errorf("%s: %s", name, diff)
			}
		}
	}
	devices := 0
	for _, pool := range poolsOf(t, Facts{Inventory: inv, Kept: everything}) {
		for _, slice := range pool.Slices {
			for _, d := range slice.Devices {
				if device.GPUName(d.Name) == "gpu-0" {
					devices++
				}
			}
		}
	}
	partition := inv.GPUs[1].Partitions[0].Name()
	if diff := cmp.Diff([]string{"tandem-gpu.dev/unhealthy=XID:NoSchedule", "gpu.nvidia.com/xid=94:NoSchedule"}, taints[partition]); diff != "" {
		t.Errorf("%s: %s", partition, diff)
	}
	// Two profiles are possible at the partition's placement.
	if len(taints) != devices+2 || devices < 10 {
		t.Errorf("tainted are %d devices, want the %d of gpu-0 and two of gpu-1: %v", len(taints), devices, taints)
	}
	without := everything
	without.Taints = false
	if taints := taintsOf(t, inv, without); len(taints) > 0 {
		t.Errorf("an API server that drops taints is sent %v", taints)
	}
}

// kubelet of 1.36 watches by v1alpha1, later ones by v1.
func TestWatchHealthStatus(t *testing.T) {
	t.Parallel()
	inv := machine(2)
	inv.GPUs[1].Health = device.Health{Reason: device.ReasonNotClean, Message: "used by process 7"} // its holder can use it
	r := newRig(t, inv).run()
	conn, err := grpc.NewClient("unix://"+filepath.Join(r.dir, "plugins", "gpu.nvidia.com", "dra.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	stream, err := drahealthv1.NewDRAResourceHealthClient(conn).NodeWatchResources(ctx, &drahealthv1.NodeWatchResourcesRequest{}, grpc.WaitForReady(true))
	if err != nil {
		t.Fatal(err)
	}
	next := func() map[string]string {
		t.Helper()
		response, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		health := map[string]string{}
		for _, d := range response.Devices {
			health[d.Device.PoolName+"/"+d.Device.DeviceName] = strings.TrimSpace(d.Health.String() + " " + d.Message)
		}
		return health
	}
	if diff := cmp.Diff(map[string]string{"node1/gpu-0": "HEALTHY", "node1/gpu-1": "HEALTHY"}, next()); diff != "" {
		t.Error(diff)
	}
	lost := machine(2, dynamic)
	lost.GPUs[0].Health = device.Health{Reason: device.ReasonLost, Message: "it has fallen off the bus"}
	r.inventory.set(lost)
	want := map[string]string{
		"node1/gpu-0": "UNHEALTHY Lost: it has fallen off the bus", "node1/gpu-00/gpu-0": "UNHEALTHY Lost: it has fallen off the bus",
		"node1/gpu-1": "HEALTHY", "node1/gpu-01/gpu-1": "HEALTHY",
	}
	if diff := cmp.Diff(want, next()); diff != "" {
		t.Error(diff)
	}
	older, err := drahealthv1alpha1.NewDRAResourceHealthClient(conn).NodeWatchResources(ctx, &drahealthv1alpha1.NodeWatchResourcesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if response, err := older.Recv(); err != nil || len(response.Devices) != 4 {
		t.Errorf("by v1alpha1: %v, %v", response, err)
	}
	// The streams end with the driver.
	if err := r.stop(); err != nil {
		t.Error(err)
	}
}

// TestPartitionIsTaintedByItsOwnHealth: its health has the faults of its GPU, and says whether pods are evicted.
func TestPartitionIsTaintedByItsOwnHealth(t *testing.T) {
	t.Parallel()
	part := device.Partition{UUID: "MIG-0", Profile: "1g.10gb", Health: device.Health{Reason: device.ReasonXID, XID: 94, Evict: true}}
	part.Ref = device.Ref{GPU: "GPU-0", Placement: device.Placement{Size: 1}}
	gpu := device.GPU{UUID: "GPU-0", MIGEnabled: true, Health: device.Health{Reason: device.ReasonXID, XID: 119}, Partitions: []device.Partition{part}}
	withdrawn, _ := findWithdrawn(device.Inventory{GPUs: []device.GPU{gpu}}, nil, nil, time.Now())
	for _, d := range (device.Inventory{GPUs: []device.GPU{gpu}}).Devices() {
		want := resourceapi.DeviceTaintEffectNoSchedule
		if d.Ref() == part.Ref {
			want = resourceapi.DeviceTaintEffectNoExecute
		}
		for pool, taints := range map[string][]resourceapi.DeviceTaint{
			"of the node": factsOf(d, withdrawn, allocated{}, Capabilities{Taints: true}).taints, "of the GPU": gpuPool{tainted: withdrawn}.taints(d.Ref()),
		} {
			if len(taints) == 0 || taints[0].Effect != want {
				t.Errorf("pool %s: %s has %v, want %s", pool, d.Name(), taints, want)
			}
		}
	}
}
