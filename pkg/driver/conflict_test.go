// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// ask prepares claims of one pod without kubelet in between.
func (r *rig) ask(ctx context.Context, claims ...*resourceapi.ResourceClaim) error {
	results, err := r.driver.PrepareResourceClaims(ctx, claims)
	errs := []error{err}
	for _, result := range results {
		errs = append(errs, result.Err)
	}
	return errors.Join(errs...)
}

func TestOutcomesOfAConflict(t *testing.T) {
	t.Parallel()
	secret := &ledger.Pod{UID: "p", Namespace: "team-b", Name: "secret"}
	tests := []struct {
		name    string
		movable bool
		holder  ledger.PodState
		outcome string
		says    string
	}{
		{"a controller creates another pod", true, ledger.Running, outcomePendingEviction, "the pod is evicted"},
		{"no controller does", false, ledger.Running, outcomeWaiting, "the claim waits"},
		{"the holder does not go in time", false, ledger.Terminating, outcomeDeadline, "the claim waits"},
		{"the holder does not go, and a controller creates another pod", true, ledger.Terminating, outcomePendingEviction, "the pod is evicted"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, machine(8))
			r.pods.movable.Store(test.movable)
			r.takeByPod(1, secret)
			r.podstate.set(uuidOf(1), test.holder)
			c := newClaim("a", "gpu-0", "gpu-1")
			ctx, cancel := context.WithTimeout(t.Context(), shortCall)
			defer cancel()
			err := r.ask(ctx, c)
			if err == nil || !strings.Contains(err.Error(), "gpu-1 ("+uuidOf(1)+") is held by a pod in another namespace") || !strings.Contains(err.Error(), test.says) {
				t.Errorf("error %v", err)
			}
			conflicts := r.ledger.Conflicts()
			if len(conflicts) != 1 {
				t.Fatalf("conflicts: %+v", conflicts)
			}
			l := conflicts[0]
			if l.UID != "uid-a" || l.Namespace != "team-a" || l.Name != "a" || l.PendingEviction != (test.outcome == outcomePendingEviction) ||
				!slices.Equal(l.Devices, []device.Ref{{GPU: uuidOf(1)}}) || !slices.Equal(l.Names, []string{"gpu-1"}) || len(l.Pods) != 1 || l.Pods[0].UID != "pod-uid-a" {
				t.Errorf("conflict: %+v", l)
			}
			for what, text := range map[string]string{"error": fmt.Sprint(err), "events": r.events.all(), "conflict": l.Message} {
				if strings.Contains(text, "secret") || strings.Contains(text, "team-b") {
					t.Errorf("%s tells too much: %s", what, text)
				}
			}
			if n := r.metric("tandem_prepare_conflicts_total", "pod", test.outcome); n != 1 {
				t.Errorf("%v conflicts counted", n)
			}
		})
	}
}

// A kubelet that restarts, and sockets that are made anew, end the calls that wait.
func TestAnInterruptedClaimHasNotLost(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(8))
	r.pods.movable.Store(true)
	r.takeByPod(0, &ledger.Pod{UID: "p"})
	r.podstate.set(uuidOf(0), ledger.Terminating)
	interrupted := errors.New("a socket is gone")
	ctx, cancel := context.WithCancelCause(t.Context())
	time.AfterFunc(50*time.Millisecond, func() { cancel(interrupted) })
	if err := r.ask(ctx, newClaim("a", "gpu-0")); !errors.Is(err, interrupted) {
		t.Errorf("error %v", err)
	}
	if conflicts := r.ledger.Conflicts(); len(conflicts) > 0 {
		t.Errorf("conflicts: %+v", conflicts)
	}
}

func TestPendingEvictionIsExplained(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(8))
	r.pods.movable.Store(true)
	r.takeByPod(0, nil)
	c := newClaim("a", "gpu-0")
	if err := r.ask(t.Context(), c); err == nil {
		t.Fatal("prepared")
	}
	r.releasePodHold(0)
	err := r.ask(t.Context(), c)
	if err == nil || !strings.Contains(err.Error(), "controller is evicting the pod") || !strings.Contains(err.Error(), "gpu-0") {
		t.Error(err)
	}
	if events := r.events.all(); !strings.Contains(events, "team-a/a DeviceHeld: ") || !strings.Contains(events, "team-a/a ClaimPendingEviction: ") {
		t.Error("events:", events)
	}
	if n := r.metric("tandem_prepare_conflicts_total"); n != 1 {
		t.Error("one conflict was counted as", n)
	}
	r.ledger.ClearConflict("uid-a")
	if err := r.ask(t.Context(), c); err != nil {
		t.Error(err)
	}
}

// bound is a limits pod that goes away after a moment.
type bound chan struct{}

func (b bound) Changed() <-chan struct{} { return b }

func (b bound) PendingPods() []ledger.PendingPods {
	select {
	case <-b:
		return nil
	default:
		return []ledger.PendingPods{{PodUID: "p", Resource: "nvidia.com/gpu", Devices: 8}}
	}
}

func TestPrepareLetsLimitsGoFirst(t *testing.T) {
	t.Parallel()
	waiting := make(bound)
	r := newRig(t, machine(8))
	book, err := ledger.Open(t.Context(), ledger.Options{Dir: t.TempDir(), BootID: "boot", PodStates: r.podstate, Queue: waiting})
	if err != nil {
		t.Fatal(err)
	}
	defer book.Close()
	r.driver.Ledger = book
	answer := make(chan error, 1)
	go func() { answer <- r.ask(t.Context(), newClaim("a", "gpu-0")) }()
	select {
	case err := <-answer:
		t.Fatal("did not wait:", err)
	case <-time.After(20 * time.Millisecond):
	}
	close(waiting)
	if err := <-answer; err != nil {
		t.Fatal(err)
	}
	if err := r.ask(t.Context(), newClaim("b", "gpu-1")); err != nil {
		t.Fatal(err)
	}
	if n := r.metric("tandem_prepare_pods_first_wait_seconds"); n != 1 {
		t.Errorf("%v calls were counted as waiting, want 1", n)
	}
}

// Kubelet may hear of pods before we do: a claim takes nothing before its own pod is known, and with it those bound before.
func TestPrepareWaitsForItsPod(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(8))
	r.pods.met = make(chan struct{})
	answer := make(chan error, 1)
	go func() { answer <- r.ask(t.Context(), newClaim("a", "gpu-0")) }()
	select {
	case err := <-answer:
		t.Fatal("did not wait:", err)
	case <-time.After(20 * time.Millisecond):
	}
	if holds := r.ledger.Holds(); len(holds) > 0 {
		t.Errorf("holds %v", holds)
	}
	close(r.pods.met)
	if err := <-answer; err != nil {
		t.Fatal(err)
	}
}

// Where no GPU is offered to pods, no pod goes first.
func TestPrepareWaitsForNoPodWithoutLimits(t *testing.T) {
	r := newRig(t, machine(1), func(c *Config) { c.OfferedToPods = func(device.GPU) bool { return false } })
	if err := r.ask(t.Context(), newClaim("a", "gpu-0")); err != nil {
		t.Fatal(err)
	}
	if n := r.pods.waited.Load(); n > 0 {
		t.Errorf("waited %d times for pods", n)
	}
}

// What limits pods could get depends on the MIG strategy, and not on unhealthy devices.
func TestLimitDevices(t *testing.T) {
	part := func(g *device.GPU, start int, health device.Health) {
		g.Partitions = append(g.Partitions, device.Partition{
			UUID: "MIG", Ref: device.Ref{GPU: g.UUID, Placement: device.Placement{Start: start, Size: 1}}, Profile: "1g.10gb", Health: health,
		})
	}
	inv := machine(5, func(g *device.GPU) {
		switch g.Minor {
		case 1:
			g.Health = device.Health{Reason: device.ReasonLost}
		case 2:
			g.MIGEnabled = true
			part(g, 0, device.Health{})
			part(g, 1, device.Health{Reason: device.ReasonUnreachable})
		case 4:
			g.MIGEnabled, g.Dynamic = true, true
		}
	})
	notTheLast := func(g device.GPU) bool { return g.Minor != 3 }
	for strategy, want := range map[device.MIGStrategy]string{
		device.MIGStrategyNone:   "map[nvidia.com/gpu:[{GPU-0 all} {GPU-2 all}]]",
		device.MIGStrategyMixed:  "map[nvidia.com/gpu:[{GPU-0 all}] nvidia.com/mig-1g.10gb:[{GPU-2@0+1 all}]]",
		device.MIGStrategySingle: "map[nvidia.com/gpu:[{GPU-0 all}]]",
	} {
		d := &Driver{Config: Config{Limits: device.Resources{GPU: "nvidia.com/gpu", Strategy: strategy}, OfferedToPods: notTheLast}}
		got := fmt.Sprint(d.podSlots(inv))
		for i := range 5 {
			got = strings.ReplaceAll(got, uuidOf(i), fmt.Sprintf("GPU-%d", i))
		}
		if got != want {
			t.Errorf("%s: %s, want %s", strategy, got, want)
		}
	}
}
