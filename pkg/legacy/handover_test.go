// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// kubelet starts no container before its GPUs are handed over.
func TestHandOverBeforeAContainerStarts(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var asked []string
	unclean := errors.New("used by process 4242 (python3)")
	f, client := serving(t, func(c *Config) {
		c.HandOver = func(_ context.Context, uuid string) error {
			mu.Lock()
			defer mu.Unlock()
			asked = append(asked, uuid)
			return unclean
		}
	})
	if !f.kubelet.State().Options.GetPreStartRequired() {
		t.Error("kubelet does not know that it must ask before it starts a container")
	}
	gpus := []string{uuid(0), uuid(1)}
	if _, err := client.Allocate(t.Context(), allocation(gpus)); err != nil {
		t.Fatal(err)
	}
	_, err := client.PreStartContainer(t.Context(), &pluginapi.PreStartContainerRequest{DevicesIds: gpus})
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), unclean.Error()) {
		t.Errorf("with a GPU that is not clean: %v", err)
	}
	mu.Lock()
	unclean, asked = nil, nil
	mu.Unlock()
	if _, err := client.PreStartContainer(t.Context(), &pluginapi.PreStartContainerRequest{DevicesIds: gpus}); err != nil {
		t.Error(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(asked, gpus) {
		t.Errorf("handed over %v, want %v", asked, gpus)
	}
}
