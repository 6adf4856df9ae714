// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// maxHolderSeries bounds the holders of a device that the metric names. Any number of pods and containers can use one claim.
const maxHolderSeries = 64

var (
	holderDescription = prometheus.NewDesc("tandem_device_holder",
		"1 for each container that uses a device, as in kubelet's pod resources. api is claim or limit. "+
			"container is empty if only the pod is known. A device has at most 64 series.",
		[]string{"uuid", "device", "pod", "namespace", "container", "api"}, nil)
	omittedDescription = prometheus.NewDesc("tandem_device_holders_omitted",
		"Containers that use a device and that tandem_device_holder omits because the device has too many.", nil, nil)
)

// holders names the containers that use devices when metrics are collected. It reads the ledger, the pods in memory and kubelet's two
// checkpoints, so it also answers while kubelet or the API server is away.
type holders struct{ Config }

func (c holders) Describe(descriptions chan<- *prometheus.Desc) {
	descriptions <- holderDescription
	descriptions <- omittedDescription
}

// holderSeries are the labels of one series but the device's. rank is its position among those of its hold.
type holderSeries struct {
	podstate.PodContainer
	api  string
	rank int
}

func (s holderSeries) compare(other holderSeries) int {
	return cmp.Or(cmp.Compare(s.rank, other.rank), s.PodContainer.Compare(other.PodContainer), cmp.Compare(s.api, other.api))
}

func (c holders) Collect(metrics chan<- prometheus.Metric) {
	inventory, omitted := c.Inventory.Inventory(), 0
	for ref, all := range c.byDevice() {
		name, uuid := ref.GPU, ref.GPU // of a GPU that is lost
		d, known := inventory.ByRef(ref)
		switch {
		case known:
			name, uuid = d.Name(), d.UUID()
		case !ref.Whole():
			continue // being made for its holder, or gone
		}
		// Each holder has its first container before any has its second.
		slices.SortFunc(all, holderSeries.compare)
		named := min(len(all), maxHolderSeries)
		omitted += len(all) - named
		for _, s := range all[:named] {
			metrics <- prometheus.MustNewConstMetric(holderDescription, prometheus.GaugeValue, 1,
				uuid, name, s.Pod, s.Namespace, s.Container, s.api)
		}
	}
	metrics <- prometheus.MustNewConstMetric(omittedDescription, prometheus.GaugeValue, float64(omitted))
}

// byDevice returns the containers that use each device. A container with several replicas of a device counts once.
func (c holders) byDevice() map[device.Ref][]holderSeries {
	// Without a checkpoint the pods are known, but not their containers.
	checkpoint, _ := podstate.ReadDeviceCheckpoint(c.KubeletDir)
	claims, _ := podstate.ReadClaimState(c.KubeletDir, c.DriverName)
	type user struct {
		podstate.PodContainer
		api    string
		device device.Ref
	}
	seen, of := map[user]bool{}, map[device.Ref][]holderSeries{}
	for _, h := range c.Ledger.Holds() {
		api := "claim"
		if h.Holder.Kind == ledger.KindPod {
			api = "limit"
		}
		for rank, container := range c.Pods.Containers(h, checkpoint, claims) {
			if u := (user{container, api, h.Device}); !seen[u] {
				seen[u] = true
				of[h.Device] = append(of[h.Device], holderSeries{container, api, rank})
			}
		}
	}
	return of
}
