// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/handover"
)

// A claim is prepared only when its GPUs are clean. kubelet tries again.
func TestPrepareHandsGPUsOver(t *testing.T) {
	t.Parallel()
	unclean := errors.New("used by process 4242 (python3)")
	var mu sync.Mutex
	var asked []string
	var together sync.WaitGroup // both GPUs are handed over at the same time
	together.Add(2)
	r := newRig(t, machine(4), func(c *Config) {
		c.HandOver = func(_ context.Context, uuid string) error {
			mu.Lock()
			asked = append(asked, uuid)
			mu.Unlock()
			together.Done()
			together.Wait()
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
	together.Add(2)
	if err := r.ask(t.Context(), c); err != nil {
		t.Error(err)
	}
	slices.Sort(asked)
	if want := []string{uuidOf(1), uuidOf(2)}; !slices.Equal(asked, want) {
		t.Errorf("handed over %v, want %v", asked, want)
	}
}

// What a claim reads of a process on its GPU does not name the pod of another namespace.
func TestPrepareNamesNoPodOfOthers(t *testing.T) {
	t.Parallel()
	unclean := &handover.InUseError{Processes: []handover.Outsider{{Description: "process 7 (python3, state R) of pod 0a1b", Pod: "others/trainer"}}}
	r := newRig(t, machine(2), func(c *Config) {
		c.HandOver = func(_ context.Context, uuid string) error { return fmt.Errorf("hand over GPU %s: %w", uuid, unclean) }
	})
	err := r.ask(t.Context(), r.claim("next", "gpu-1"))
	if err == nil || !strings.Contains(err.Error(), "of pod 0a1b") || strings.Contains(err.Error(), "others") || strings.Contains(err.Error(), "trainer") {
		t.Errorf("the claim gets %v", err)
	}
}

// A claim that has its GPU is prepared again although no new holder could get it: its containers may have to start again.
func TestPrepareAgainWhatNoOtherGets(t *testing.T) {
	t.Parallel()
	for _, reason := range []string{device.ReasonNotClean, device.ReasonNotInjectable, device.ReasonNotRecordable} {
		r := newRig(t, machine(2))
		before := r.claim("before", "gpu-0")
		if err := r.ask(t.Context(), before); err != nil {
			t.Fatal(err)
		}
		unusable := func(g *device.GPU) { g.Health = device.Health{Reason: reason} }
		r.inventory.set(machine(2, unusable))
		if err := r.ask(t.Context(), before); err != nil {
			t.Errorf("%s: %v", reason, err)
		}
		if err := r.ask(t.Context(), r.claim("next", "gpu-1")); err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("%s: a new claim gets %v", reason, err)
		}
		if _, err := r.driver.UnprepareResourceClaims(t.Context(), []kubeletplugin.NamespacedObject{{UID: before.UID}}); err != nil {
			t.Fatal(err)
		}
		if err := r.ask(t.Context(), before); err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("%s: an unprepared claim gets %v", reason, err)
		}
	}
}
