// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
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

// Allocate was granted to a pod that the watch had not reported. Its container does not start.
func TestNamespaceOfTheAllocatedPod(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	namespace, known, failed := "", false, error(nil)
	f, client := serving(t, func(c *Config) {
		c.Requesters = requesters{"team-a"}
		c.Sharing = newFakeSharing()
		c.NamespaceOf = func(ledger.Hold) (string, bool, error) {
			mu.Lock()
			defer mu.Unlock()
			return namespace, known, failed
		}
	})
	if !f.kubelet.State().Options.GetPreStartRequired() {
		t.Error("kubelet does not know that it must ask before it starts a container")
	}
	f.inventory.set(func(device.Inventory) device.Inventory {
		inv := byMPS(2, 2, 4)
		inv.GPUs[0].Sharing.Namespaces = []string{"team-a"}
		return inv
	})
	f.await("the replicas", func(s kubeletState) bool { return slices.Contains(s.Healthy(), replicaOf(0, 0)) })
	start := func(gpu int) error {
		_, err := client.PreStartContainer(t.Context(), &pluginapi.PreStartContainerRequest{DevicesIds: []string{replicaOf(gpu, 0)}})
		return err
	}
	if err := start(0); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "no pod holds") {
		t.Errorf("without an Allocate: %v", err)
	}
	if _, err := client.Allocate(t.Context(), allocation([]string{replicaOf(0, 0)})); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		namespace string
		known     bool
		failed    error
		want      codes.Code
	}{
		{"", false, nil, codes.Unavailable}, {"", false, errors.New("no such file"), codes.Unavailable},
		{"evil", true, nil, codes.PermissionDenied}, {"team-a", true, nil, codes.OK},
	} {
		mu.Lock()
		namespace, known, failed = step.namespace, step.known, step.failed
		mu.Unlock()
		if err := start(0); status.Code(err) != step.want {
			t.Errorf("%+v: %v", step, err)
		}
		if err := start(1); err != nil {
			t.Errorf("a GPU for all namespaces: %v", err)
		}
	}
}
