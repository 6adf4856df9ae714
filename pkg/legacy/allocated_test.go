// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

func withAllocations(t *testing.T) (*fixture, allocations, pluginapi.DevicePluginClient) {
	claims := allocations{newObservable[[]device.Ref](nil)}
	f, client := serving(t, func(c *Config) { c.Allocations = claims })
	f.await("all devices", healthyCount(8))
	return f, claims, client
}

// withdrawn waits until kubelet has exactly these GPUs for unhealthy.
func (f *fixture) withdrawn(gpus ...int) {
	f.Helper()
	f.await("what is withdrawn", func(s kubeletState) bool {
		if len(s.Healthy()) != 8-len(gpus) {
			return false
		}
		return !slices.ContainsFunc(gpus, func(i int) bool { return slices.Contains(s.Healthy(), uuid(i)) })
	})
}

// TestAllocatedIsWithdrawn walks a GPU through everything that a claim and a limit can do to it.
func TestAllocatedIsWithdrawn(t *testing.T) {
	t.Parallel()
	f, claims, client := withAllocations(t)
	if _, err := client.Allocate(context.Background(), allocation([]string{uuid(3)})); err != nil {
		t.Fatal(err)
	}
	claims.put(3, 5)
	f.withdrawn(5) // a limit holds GPU 3, and keeps it
	f.ledger.release(uuid(3))
	f.withdrawn(3, 5)
	f.ledger.claim("c", 3)
	claims.put(3)
	f.withdrawn(3)
	f.ledger.release("c")
	f.ledger.RecordConflict(ledger.Conflict{UID: "late", Devices: []device.Ref{{GPU: uuid(4)}}})
	f.withdrawn(3, 4)
	claims.put()
	f.withdrawn(4)
	f.ledger.ClearConflict("late")
	f.withdrawn()
	if got := f.metric("tandem_device_plugin_withdrawals_total"); got != 3 {
		t.Errorf("%v withdrawals are counted, want GPUs 5, 3 and 4 once each", got)
	}
}

// TestAllocatedDecidesNothing: the ledger gives a GPU to the first holder that asks.
func TestAllocatedDecidesNothing(t *testing.T) {
	t.Parallel()
	f, claims, client := withAllocations(t)
	claims.put(2)
	f.withdrawn(2)
	if _, err := client.Allocate(context.Background(), allocation([]string{uuid(2)})); err != nil {
		t.Fatal(err)
	}
	f.withdrawn()
}

func TestAllocatedIsPreferredLast(t *testing.T) {
	t.Parallel()
	f, claims, client := withAllocations(t)
	if _, err := client.Allocate(context.Background(), allocation([]string{uuid(4)})); err != nil {
		t.Fatal(err)
	}
	claims.put(7, 6)
	f.ledger.claim("c", 5)
	f.withdrawn(5, 6, 7)
	for name, test := range map[string]struct {
		available, required []string
		size                int32
		want                []string
	}{
		"left out":                     {[]string{uuid(7), uuid(5), uuid(1), uuid(0)}, nil, 1, []string{uuid(1)}},
		"last":                         {[]string{uuid(7), uuid(6), uuid(5), uuid(1)}, nil, 2, []string{uuid(1), uuid(7)}},
		"last of several":              {[]string{uuid(7), uuid(6), uuid(5), uuid(1)}, nil, 4, []string{uuid(1), uuid(7), uuid(6)}},
		"nothing else":                 {[]string{uuid(6)}, nil, 1, []string{uuid(6)}},
		"required":                     {[]string{uuid(7), uuid(1)}, []string{uuid(7)}, 2, []string{uuid(7), uuid(1)}},
		"what kubelet has forgotten":   {[]string{uuid(7), uuid(4)}, nil, 1, []string{uuid(7)}},
		"unknown devices before those": {[]string{uuid(6), "GPU-x"}, nil, 1, []string{"GPU-x"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := client.GetPreferredAllocation(context.Background(), &pluginapi.PreferredAllocationRequest{
				ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
					{AvailableDeviceIDs: test.available, MustIncludeDeviceIDs: test.required, AllocationSize: test.size},
				},
			})
			if err != nil {
				t.Fatal(err)
			}
			if ids := got.GetContainerResponses()[0].GetDeviceIDs(); !slices.Equal(ids, test.want) {
				t.Errorf("got %v, want %v", ids, test.want)
			}
		})
	}
}

// TestWithdrawnAtOnce: kubelet hears of a claim's GPU within milliseconds of the decision. On a busy machine not each time.
func TestWithdrawnAtOnce(t *testing.T) {
	f, _, _ := withAllocations(t)
	shortest := time.Hour
	for n := 0; n < 8 && shortest > 100*time.Millisecond; n++ {
		began := time.Now()
		f.ledger.claim(fmt.Sprint(n), n)
		f.await("the withdrawal", healthyCount(7-n))
		shortest = min(shortest, time.Since(began))
	}
	if shortest > time.Second {
		t.Errorf("kubelet heard of it after %s", shortest)
	}
}

// TestAcknowledge: it is what kubelet says, not what was sent, and nothing while kubelet has no plugin.
func TestAcknowledge(t *testing.T) {
	t.Parallel()
	type answer struct {
		ids   int
		known bool
	}
	f := newFixture(t, release137)
	heard := newObservable(answer{})
	f.config.Acknowledge = func(_ string, ids []string, known bool) {
		heard.set(func(answer) answer { return answer{len(ids), known} })
	}
	f.startKubelet()
	_, stop := f.start()
	await := func(what string, want answer) {
		t.Helper()
		for deadline := time.After(patience); ; {
			changed := heard.Changed()
			if heard.get() == want {
				return
			}
			select {
			case <-changed:
			case <-deadline:
				t.Fatalf("%s: told %+v last, want %+v", what, heard.get(), want)
			}
		}
	}
	await("the first list", answer{8, true})
	f.ledger.claim("c", 0, 1)
	await("a withdrawal", answer{6, true})
	f.kubelet.Kill()
	await("without kubelet", answer{0, false})
	f.startKubelet()
	await("after kubelet is back", answer{6, true})
	f.ledger.release("c")
	await("the return", answer{8, true})
	stop()
	await("after the end", answer{0, false})
}
