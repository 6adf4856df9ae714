// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// withContainers gives a pod containers that all use the claim, under its own name.
func withContainers(p *corev1.Pod, claim string, n int) *corev1.Pod {
	for i := range n {
		c := corev1.Container{Name: fmt.Sprintf("c%02d", i)}
		c.Resources.Claims = []corev1.ResourceClaim{{Name: claim}}
		p.Spec.Containers = append(p.Spec.Containers, c)
	}
	return p
}

// holderMetric returns the series of tandem_device_holder as "device uuid namespace/pod/container api".
func (g *rig) holderMetric() (series []string) {
	g.t.Helper()
	families, err := g.counts.Gather()
	must(g.t, err)
	for _, family := range families {
		if family.GetName() != "tandem_device_holder" {
			continue
		}
		for _, m := range family.GetMetric() {
			value := map[string]string{}
			for _, pair := range m.GetLabel() {
				value[pair.GetName()] = pair.GetValue()
			}
			if m.GetGauge().GetValue() != 1 {
				g.t.Errorf("%v is %v, want 1", value, m.GetGauge().GetValue())
			}
			series = append(series, fmt.Sprintf("%s %s %s/%s/%s %s", value["device"], value["uuid"], value["namespace"], value["pod"], value["container"], value["api"]))
		}
	}
	slices.Sort(series)
	return series
}

func (g *rig) wantHolders(want ...string) {
	g.t.Helper()
	if got := g.holderMetric(); !slices.Equal(got, want) {
		g.t.Errorf("holders are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestHolders(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-0:MIG-a", "GPU-1", "GPU-2", "GPU-3")
	g.addPod(g.pod("p1"))
	g.addPod(withContainers(g.pod("p2", "one"), "one", 2))
	g.addPod(withContainers(g.pod("p3", "one"), "one", 1))
	g.addPod(g.pod("p4"))
	for _, uid := range []string{"p1", "p2", "p3", "p4"} {
		g.group(uid, true)
	}
	g.checkpoint("p1", "GPU-1", "p4", "MIG-a")
	must(t, g.r.Restore(t.Context()))
	stop := g.run()
	defer stop()
	g.claim("one", "c1", "gpu-2")
	g.prepare("c1", "one", "GPU-2", "p2")
	g.await("GPU-0@0+1: pod MIG-a held [p4]", "GPU-1: pod GPU-1 held [p1]", "GPU-2: claim c1 held [p2]")
	partition := fmt.Sprintf("%s MIG-a", g.Inventory().GPUs[0].Partitions[0].Name())
	want := []string{
		partition + " apps/p4/main limit", "gpu-1 GPU-1 apps/p1/main limit",
		"gpu-2 GPU-2 apps/p2/c00 claim", "gpu-2 GPU-2 apps/p2/c01 claim",
	}
	slices.Sort(want)
	g.wantHolders(want...)

	// A second pod shares the claim, which kubelet alone knows. Neither kubelet nor the API server has to answer.
	g.change(func() { g.away = true })
	g.claimState(kubeletClaim{"c1", "one", []string{"p2", "p3"}, []string{"gpu-2"}})
	g.wantHolders(append(want, "gpu-2 GPU-2 apps/p3/c00 claim")...)
	if n := g.metric("tandem_device_holders_omitted"); n != 0 {
		t.Errorf("%v holders are omitted", n)
	}

	// The driver loses a GPU, and the holder of another GPU ends.
	g.setGPUs("GPU-0:MIG-a", "GPU-2")
	g.deletePod("p2")
	g.awaitDeleted("p2")
	lost := []string{"GPU-1 GPU-1 apps/p1/main limit", "gpu-2 GPU-2 apps/p3/c00 claim", want[slices.Index(want, partition+" apps/p4/main limit")]}
	slices.Sort(lost)
	g.wantHolders(lost...)
}

// One holder with many containers neither hides the others of the device nor makes any number of series.
func TestHoldersAreBounded(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.addPod(withContainers(g.pod("a", "big"), "big", 70))
	g.addPod(withContainers(g.pod("z", "small"), "small", 1))
	must(t, g.r.Restore(t.Context()))
	g.watchPods()
	part := device.Share{Bytes: 1, Of: 4}
	for _, name := range []string{"big", "small"} {
		request := ledger.ClaimRequest{
			UID: name, Namespace: "apps", Name: name, Devices: []device.Ref{{GPU: "GPU-1"}}, Shares: map[device.Ref]device.Share{{GPU: "GPU-1"}: part},
			Pods: []ledger.Pod{{UID: map[string]string{"big": "a", "small": "z"}[name], Namespace: "apps"}},
		}
		_, err := g.book.ReserveClaim(t.Context(), request)
		must(t, err)
	}
	series := g.holderMetric()
	if len(series) != 64 || series[len(series)-1] != "gpu-1 GPU-1 apps/z/c00 claim" {
		t.Errorf("got %d series:\n%s", len(series), strings.Join(series, "\n"))
	}
	if n := g.metric("tandem_device_holders_omitted"); n != 7 {
		t.Errorf("%v are omitted", n)
	}
}

// A container that has several replicas of a GPU is one holder of it.
func TestHolderOfReplicas(t *testing.T) {
	t.Parallel()
	g := newRig(t, "GPU-1")
	g.addPod(g.pod("p1"))
	must(t, g.r.Restore(t.Context()))
	stop := g.run()
	defer stop()
	for n := range 2 {
		id := device.ReplicaID("GPU-1", n)
		must(t, g.book.ReservePod([]ledger.PodRequest{{ID: id, Resource: resource, Device: device.Ref{GPU: "GPU-1"}, Share: device.Replica(8, 4)}}))
	}
	g.checkpoint("p1", device.ReplicaID("GPU-1", 0), "p1", device.ReplicaID("GPU-1", 1))
	g.await("GPU-1: pod GPU-1::0 held [p1] has "+device.Replica(8, 4).String(), "GPU-1: pod GPU-1::1 held [p1] has "+device.Replica(8, 4).String())
	g.wantHolders("gpu-1 GPU-1 apps/p1/main limit")
}
