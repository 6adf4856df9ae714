// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"slices"
	"testing"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// BenchmarkCalls sets each call beside the emptiest one on the same socket.
func BenchmarkCalls(b *testing.B) {
	f := newFixture(b, release137)
	f.startKubelet()
	f.start()
	f.await("the list", healthyCount(8))
	client, err := f.kubelet.Plugin()
	if err != nil {
		b.Fatal(err)
	}
	available := make([]string, 8)
	for i := range available {
		available[i] = uuid(i)
	}
	ctx := context.Background()
	for _, bench := range []struct {
		name string
		call func() error
	}{
		{"empty", func() error { _, err := client.GetDevicePluginOptions(ctx, &pluginapi.Empty{}); return err }},
		{"allocate", func() error {
			_, err := client.Allocate(ctx, allocation([]string{uuid(7)}))
			return err
		}},
		{"allocate again", func() error {
			_, err := client.Allocate(ctx, allocation([]string{uuid(6)}))
			return err
		}},
		{"allocate 8", func() error {
			_, err := client.Allocate(ctx, allocation(available))
			return err
		}},
		{"preferred 4 of 8", func() error {
			_, err := client.GetPreferredAllocation(ctx, &pluginapi.PreferredAllocationRequest{
				ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: available, AllocationSize: 4}},
			})
			return err
		}},
	} {
		b.Run(bench.name, func(b *testing.B) {
			var took []time.Duration
			for b.Loop() {
				began := time.Now()
				if err := bench.call(); err != nil {
					b.Fatal(err)
				}
				took = append(took, time.Since(began))
				if bench.name != "allocate again" {
					for _, id := range available {
						f.ledger.release(id)
					}
				}
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
			b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
			b.ReportMetric(0, "ns/op") // the loop also undoes what the call did
		})
	}
}
