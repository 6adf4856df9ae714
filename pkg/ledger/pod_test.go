// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/fileclock"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Kubelet keeps an account for each resource: what a pod has by one is no reuse by another.
func TestTheSameIDByAnotherResource(t *testing.T) {
	l := openWithQueue(t, nil)
	ask := func(id, resource string, ref device.Ref) error {
		return l.ReservePod([]PodRequest{{ID: id, Resource: resource, Device: ref}})
	}
	for range 2 {
		must(t, ask("MIG-1", "nvidia.com/mig-1g.10gb", part("a", 0, 1)))
		must(t, ask("MIG-2", "nvidia.com/gpu", part("a", 1, 1)))
	}
	var conflict *ConflictError
	for range 2 {
		if err := ask("MIG-1", "nvidia.com/gpu", part("a", 0, 1)); !errors.As(err, &conflict) {
			t.Errorf("got %v", err)
		}
		if err := ask("a", "nvidia.com/gpu", whole("a")); !errors.As(err, &conflict) || len(conflict.Holds) != 2 {
			t.Errorf("the whole GPU: %v", err)
		}
	}
	must(t, ask("b", "nvidia.com/gpu", whole("b")))
	if err := ask("MIG-3", "nvidia.com/mig-1g.10gb", part("b", 3, 1)); !errors.As(err, &conflict) {
		t.Errorf("a partition of a whole GPU that is held: %v", err)
	}
}

// A device out of service stays with the pod that has it, and goes to no other one: also not once that pod has ended.
func TestKeep(t *testing.T) {
	ended := false
	l := openWithQueue(t, nil)
	l.options.PodStates = reusing{judge(func(Hold) PodState {
		if ended {
			return Gone
		}
		return Running
	})}
	const broken = "its fan is broken"
	ask := func(id, keep string) error {
		return l.ReservePod([]PodRequest{{ID: "free", Resource: "nvidia.com/gpu", Device: whole("free")},
			{ID: id, Resource: "nvidia.com/gpu", Device: whole(id), OutOfService: keep}})
	}
	if err := ask("a", broken); !errors.Is(err, ErrWithdrawn) || !strings.Contains(err.Error(), broken) || len(l.Holds()) > 0 {
		t.Errorf("a new pod: %v, holds %v", err, l.Holds())
	}
	must(t, ask("a", ""))
	must(t, ask("a", broken))
	ended = true
	if err := ask("a", broken); !errors.Is(err, ErrWithdrawn) {
		t.Errorf("the next pod: %v", err)
	}
}

// reusing takes each request for a held device for one of the holder's own pod.
type reusing struct{ judge }

func (reusing) Started(Hold, []Hold) bool { return false }
func (reusing) Reuses(Hold) bool          { return true }

// refusing counts how often it is asked whether a request comes from the hold's own pod.
type refusing struct {
	judge
	asked *int
}

func (refusing) Started(Hold, []Hold) bool { return false }
func (r refusing) Reuses(Hold) bool        { *r.asked++; return false }

// kubelet waits for Allocate in its only sync loop, and each answer of Reuses may take a second.
func TestOneRefusalDecides(t *testing.T) {
	asked := 0
	l, err := Open(t.Context(), Options{Dir: t.TempDir(), BootID: "boot", PodStates: refusing{func(Hold) PodState { return Running }, &asked}, Now: fileclock.Now})
	must(t, err)
	t.Cleanup(func() { _ = l.Close() })
	var requests []PodRequest
	for _, id := range []string{"a", "b", "c", "d"} {
		requests = append(requests, PodRequest{ID: id, Resource: "nvidia.com/gpu", Device: whole(id)})
	}
	must(t, l.ReservePod(requests))
	var conflict *ConflictError
	if err := l.ReservePod(requests); !errors.As(err, &conflict) || len(conflict.Holds) != len(requests) {
		t.Errorf("the next pod: %v", err)
	}
	if asked != 1 {
		t.Errorf("asked %d times", asked)
	}
}

// slowReuses is asked about a hold while other calls go on.
type slowReuses struct {
	judge
	asked func()
}

func (s *slowReuses) Reuses(Hold) bool {
	if asked := s.asked; asked != nil {
		s.asked = nil
		asked()
	}
	return false
}

// An Allocate of a kubelet that has died waits for the pod that had the device. That pod ends meanwhile, and the next kubelet gives the
// device to another pod. The first call must not take the hold of that pod for the one that it has judged, and forget the pod.
func TestSlowAllocateOfADeadKubelet(t *testing.T) {
	ended := map[string]bool{}
	states := &slowReuses{judge: func(h Hold) PodState {
		if len(h.Pods) > 0 && ended[h.Pods[0].UID] {
			return Gone
		}
		return Running
	}}
	l, err := Open(t.Context(), Options{Dir: t.TempDir(), BootID: "boot", PodStates: states, Now: fileclock.Now})
	must(t, err)
	t.Cleanup(func() { _ = l.Close() })
	ask := func() error {
		return l.ReservePod([]PodRequest{{ID: "a", Resource: "nvidia.com/gpu", Device: whole("a")}})
	}
	must(t, ask())
	must(t, l.Identify(find(l, "a"), Pod{UID: "first"}))
	states.asked = func() {
		ended["first"] = true
		must(t, ask())
		must(t, l.Identify(find(l, "a"), Pod{UID: "second"}))
	}
	var conflict *ConflictError
	if err := ask(); !errors.As(err, &conflict) {
		t.Errorf("the slow call: %v", err)
	}
	if pods := find(l, "a").Pods; len(pods) != 1 || pods[0].UID != "second" {
		t.Errorf("the hold is of %v, want the second pod", pods)
	}
}

// identifying names the pod of a hold while it judges whether the hold is reused, and knows only pods that a hold names.
type identifying struct {
	judge
	identify func(Hold)
}

func (i identifying) Reuses(h Hold) bool {
	i.identify(h)
	return false
}

// TestNextPodBeforeIdentification: a pod gets the device of one that kubelet has rejected, although the hold named that one late.
func TestNextPodBeforeIdentification(t *testing.T) {
	var l *Ledger
	podStates := identifying{
		judge: func(h Hold) PodState {
			if len(h.Pods) == 0 {
				return Running
			}
			return Gone
		},
		identify: func(h Hold) {
			if err := l.Identify(h, Pod{UID: "rejected"}); err != nil {
				t.Error(err)
			}
		},
	}
	l, err := Open(t.Context(), Options{Dir: t.TempDir(), BootID: "boot", PodStates: podStates})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for range 2 {
		if err := l.ReservePod(limitsOf("a")); err != nil {
			t.Error(err)
		}
	}
	if holds := l.Holds(); len(holds) != 1 || len(holds[0].Pods) > 0 {
		t.Errorf("holds %v", holds)
	}
}
