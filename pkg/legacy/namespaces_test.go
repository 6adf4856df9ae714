// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// requesters are the namespaces whose pods wait for admission.
type requesters []string

func (r requesters) Requesters(context.Context, string) []string { return r }

// kubelet does not say whose pod it is: all that it may be have to be of the policy's namespaces.
func TestNamespacesOfLimits(t *testing.T) {
	for name, c := range map[string]struct {
		waiting requesters
		gpu     int
		want    string // part of the error; empty for an answer
	}{
		"of the policy":       {requesters{"team-a"}, 0, ""},
		"both of the policy":  {requesters{"team-a", "team-b"}, 0, ""},
		"of another":          {requesters{"team-x"}, 0, "does not admit"},
		"one of another":      {requesters{"team-a", "team-x"}, 0, "does not admit"},
		"unknown":             {nil, 0, "has reported no pod"},
		"GPU for all":         {requesters{"team-x"}, 1, ""},
		"GPU for all, unseen": {nil, 1, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, release137)
			f.inventory.set(func(device.Inventory) device.Inventory {
				inv := byMPS(2, 2, 4)
				inv.GPUs[0].Sharing.Namespaces = []string{"team-a", "team-b"}
				return inv
			})
			f.config.Sharing, f.config.Requesters = newFakeSharing(), c.waiting
			p, err := New(f.config)
			if err != nil {
				t.Fatal(err)
			}
			p.Refresh(time.Now())
			_, err = p.Allocate(t.Context(), "nvidia.com/gpu", allocation([]string{replicaOf(c.gpu, 0)}))
			if c.want == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "team-") {
				t.Errorf("got %v", err)
			}
			if holds := f.ledger.Holds(); len(holds) > 0 {
				t.Errorf("it has %v", holds)
			}
		})
	}
}
