// SPDX-License-Identifier: Apache-2.0

package wiring

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

func TestInUse(t *testing.T) {
	first, second := device.Ref{GPU: "GPU-b", Placement: device.Placement{Size: 1}}, device.Ref{GPU: "GPU-b", Placement: device.Placement{Start: 1, Size: 1}}
	inventory := device.Inventory{GPUs: []device.GPU{
		{UUID: "GPU-a"}, {UUID: "GPU-b", Partitions: []device.Partition{{Ref: first, UUID: "MIG-1"}, {Ref: second}}},
	}}
	claim := podstate.KubeletClaim{CDIDevices: []string{"k8s.gpu.nvidia.com/gpu=GPU-c", "k8s.gpu.nvidia.com/sharing=x"}}
	hold := func(ref device.Ref) ledger.Hold { return ledger.Hold{Device: ref} }
	for what, c := range map[string]struct {
		claims []podstate.KubeletClaim
		holds  []ledger.Hold
		want   map[string]bool
	}{
		"nothing":                          {want: map[string]bool{}},
		"a claim with admin access":        {claims: []podstate.KubeletClaim{claim}, want: map[string]bool{claim.CDIDevices[0]: true, claim.CDIDevices[1]: true}},
		"a claim that kubelet prepares":    {claims: []podstate.KubeletClaim{claim, {}}},
		"a GPU":                            {holds: []ledger.Hold{hold(device.Ref{GPU: "GPU-a"})}, want: map[string]bool{"GPU-a": true}},
		"a GPU that is lost":               {holds: []ledger.Hold{hold(device.Ref{GPU: "GPU-d"})}, want: map[string]bool{"GPU-d": true}},
		"a partition":                      {holds: []ledger.Hold{hold(first)}, want: map[string]bool{"MIG-1": true}},
		"a partition that is not made yet": {holds: []ledger.Hold{hold(second)}, want: map[string]bool{cdi.AnyPartition: true}},
		"a partition of a lost GPU": {
			holds: []ledger.Hold{hold(device.Ref{GPU: "GPU-d", Placement: first.Placement}), hold(device.Ref{GPU: "GPU-a"})},
			want:  map[string]bool{cdi.AnyPartition: true, "GPU-a": true},
		},
	} {
		if diff := cmp.Diff(c.want, inUse(c.claims, c.holds, inventory)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
}
