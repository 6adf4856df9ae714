// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// TestConcurrentCalls lets claims, limits, faults and lists run into each other. Whatever Allocate says yes to must be
// held by that limit, and when all is over kubelet must see what is true.
func TestConcurrentCalls(t *testing.T) {
	t.Parallel()
	f, client := serving(t, nil)
	ctx := context.Background()
	var work sync.WaitGroup
	for worker := range 4 {
		work.Go(func() {
			for round := range 100 {
				id := uuid((worker*3 + round) % 8)
				_, err := client.Allocate(ctx, allocation([]string{id}))
				switch status.Code(err) {
				case codes.OK, codes.FailedPrecondition:
				default:
					t.Errorf("allocate: %v", err)
				}
				if _, err := client.GetPreferredAllocation(ctx, &pluginapi.PreferredAllocationRequest{
					ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: []string{id}, AllocationSize: 1}},
				}); err != nil {
					t.Errorf("preferred: %v", err)
				}
			}
		})
	}
	work.Go(func() {
		for round := range 100 {
			gpu := device.Ref{GPU: uuid(round % 8)}
			_, err := f.ledger.ReserveClaim(ctx, ledger.ClaimRequest{UID: "claim", Devices: []device.Ref{gpu}})
			if err == nil {
				if _, err := client.Allocate(ctx, allocation([]string{gpu.GPU})); status.Code(err) != codes.FailedPrecondition {
					t.Errorf("a limit got %s while a claim has it: %v", gpu, err)
				}
			}
			for _, h := range f.ledger.Holds() {
				if err := f.ledger.Release(h); err != nil {
					t.Error(err)
				}
			}
		}
	})
	work.Go(func() {
		for round := range 100 {
			f.inventory.setHealth(uuid(round%8), device.Health{Reason: device.ReasonLost})
			f.inventory.setHealth(uuid(round%8), device.Health{})
		}
	})
	work.Wait()
	for _, h := range f.ledger.Holds() {
		if err := f.ledger.Release(h); err != nil {
			t.Error(err)
		}
	}
	f.await("all GPUs", healthyCount(8))
}
