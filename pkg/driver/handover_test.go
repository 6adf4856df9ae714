// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
)

// A claim is prepared only when its GPUs are clean. kubelet tries again.
func TestPrepareHandsGPUsOver(t *testing.T) {
	unclean := errors.New("used by process 4242 (python3)")
	var asked []string
	r := newRig(t, machine(4), func(c *Config) {
		c.HandOver = func(_ context.Context, uuid string) error {
			asked = append(asked, uuid)
			return unclean
		}
	})
	c := r.claim("next", "gpu-1", "gpu-2")
	if err := r.ask(t.Context(), c); err == nil || !strings.Contains(err.Error(), "device gpu-1 is not clean, retrying: used by process 4242") {
		t.Errorf("with a GPU that is not clean: %v", err)
	}
	if holds := r.ledger.Holds(); len(holds) > 0 {
		t.Errorf("the claim holds %v although it was not prepared", holds)
	}
	unclean, asked = nil, nil
	if err := r.ask(t.Context(), c); err != nil {
		t.Error(err)
	}
	if want := []string{uuidOf(1), uuidOf(2)}; !slices.Equal(asked, want) {
		t.Errorf("handed over %v, want %v", asked, want)
	}
}
