// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// twin is the ledger as one would write it without disk, concurrency or cost.
type twin struct {
	holds     map[key]State
	shares    map[key]device.Share
	pods      map[key]string
	podStates map[string]PodState
}

func (w *twin) podState(h Hold) PodState { return w.podStates[h.Holder.ID] }

func (w *twin) drop(k key) { delete(w.holds, k); delete(w.shares, k); delete(w.pods, k) }

func (w *twin) of(holder Holder) []key {
	var keys []key
	for k := range w.holds {
		if k.holder == holder {
			keys = append(keys, k)
		}
	}
	return keys
}

// inTheWay are the holds that count and that keep the holder from what it wants.
func (w *twin) inTheWay(holder Holder, want map[device.Ref]device.Share, counts func(key) bool) (found []key) {
	for ref, share := range want {
		memory, equal := share.Of, share.OfCount
		alike := func(k key) bool { return w.shares[k].Of > 0 && w.shares[k].OfCount == share.OfCount }
		for k := range w.holds {
			if k.holder != holder && counts(k) && k.device == ref && alike(k) {
				memory -= min(memory, w.shares[k].Bytes)
				equal -= min(equal, w.shares[k].Count)
			}
		}
		for k := range w.holds {
			beside := k.device == ref && alike(k) && share.Of > 0 && share.Bytes <= memory && share.Count <= equal
			if k.holder != holder && counts(k) && k.device.Overlaps(ref) && !beside {
				found = append(found, k)
			}
		}
	}
	return found
}

// clear drops ended holders from the way, and reports whether any other is in it.
func (w *twin) clear(holder Holder, want map[device.Ref]device.Share) (blocked, waits bool) {
	ended := func(k key) bool { return w.podStates[k.holder.ID] == Gone }
	for _, k := range w.inTheWay(holder, want, func(key) bool { return true }) {
		if ended(k) {
			w.drop(k)
		}
	}
	blocked = len(w.inTheWay(holder, want, func(key) bool { return true })) > 0
	stays := func(k key) bool { return w.holds[k] != StateDraining && w.podStates[k.holder.ID] == Running }
	return blocked, blocked && len(w.inTheWay(holder, want, stays)) == 0
}

// sharesOf are the shares that the claim has already, where the request is for as much.
func (w *twin) sharesOf(uid string, want map[device.Ref]device.Share, alone device.Ref) map[device.Ref]device.Share {
	shares := maps.Clone(want)
	for ref, share := range want {
		k := key{Holder{KindClaim, uid}, ref}
		has, held := w.shares[k]
		switch {
		case !held, w.holds[k] == StateDraining, has == device.Share{}, ref == alone:
		case share == device.Share{} && has.Bytes == has.Of && has.OfCount == 0,
			share != device.Share{} && share.Bytes == has.Bytes && share.Count == has.Count:
			shares[ref] = has
		}
	}
	return shares
}

func (w *twin) reserveClaim(uid string, want map[device.Ref]device.Share) (ok bool) {
	holder := Holder{KindClaim, uid}
	for _, k := range w.of(holder) {
		if _, keeps := want[k.device]; !keeps {
			w.holds[k] = StateDraining
		}
	}
	if blocked, _ := w.clear(holder, want); blocked {
		return false
	}
	for ref, share := range want {
		w.holds[key{holder, ref}] = StateHeld
		w.shares[key{holder, ref}] = share
		w.pods[key{holder, ref}] = "pod-of-" + uid
	}
	return true
}

func (w *twin) drainClaim(uid string) {
	for _, k := range w.of(Holder{KindClaim, uid}) {
		if w.holds[k] = StateDraining; w.podStates[uid] == Gone {
			w.drop(k)
		}
	}
}

func (w *twin) reservePodDevice(id string, ref device.Ref, share device.Share) bool {
	holder := Holder{KindPod, id}
	for _, k := range w.of(holder) {
		switch {
		case w.podStates[id] == Gone:
			w.drop(k)
		case w.podStates[id] == Orphaned, w.holds[k] == StateDraining:
			return false
		}
	}
	if blocked, _ := w.clear(holder, map[device.Ref]device.Share{ref: share}); blocked {
		return false
	}
	w.holds[key{holder, ref}] = StateHeld
	w.shares[key{holder, ref}] = share
	w.pods[key{holder, ref}] = ""
	return true
}

var (
	twinRefs = []device.Ref{
		whole("a"), part("a", 0, 4), part("a", 4, 3), part("a", 0, 2), part("a", 2, 2), part("a", 3, 2), whole("b"), part("b", 0, 1), whole("c"),
	}
	twinClaims = []string{"c1", "c2", "c3", "c4"}
)

func TestLikeItsTwin(t *testing.T) {
	for seed := range uint64(60) {
		synctest.Test(t, func(t *testing.T) { likeItsTwin(t, rand.New(rand.NewPCG(seed, 7)), seed) })
	}
}

func likeItsTwin(t *testing.T, random *rand.Rand, seed uint64) {
	w := &twin{holds: map[key]State{}, shares: map[key]device.Share{}, pods: map[key]string{}, podStates: map[string]PodState{}}
	// None of the memory, or some quarters or all of it, or some of four or eight equal shares; in some runs nothing is shared, and in some nearly
	// everything.
	shared := []int{0, 2, 10}[seed%3]
	share := func() device.Share {
		if random.IntN(12) >= shared {
			return device.Share{}
		}
		if random.IntN(2) == 0 {
			return device.Share{Bytes: uint64(random.IntN(5)) << 30, Of: 4 << 30}
		}
		return device.Share{Bytes: uint64(random.IntN(2)) << 30, Of: 4 << 30, Count: uint64(1 + random.IntN(3)), OfCount: uint64(4 << random.IntN(2))}
	}
	options := Options{Dir: t.TempDir(), BootID: "boot", PodStates: judge(w.podState)}
	l, err := Open(t.Context(), options)
	must(t, err)
	defer func() { _ = l.Close() }()
	var old []Hold
	var done []string
	for range 400 {
		ref := twinRefs[random.IntN(len(twinRefs))]
		uid := twinClaims[random.IntN(len(twinClaims))]
		var what string
		switch operation := random.IntN(12); operation {
		case 0, 1, 2:
			refs := []device.Ref{ref}
			if more := twinRefs[random.IntN(len(twinRefs))]; more != ref {
				refs = append(refs, more)
			}
			want := map[device.Ref]device.Share{}
			for _, ref := range refs {
				want[ref] = share()
			}
			what = fmt.Sprintf("reserve %v for claim %s", want, uid)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			start := time.Now()
			request := claimOf(uid, refs...)
			request.Shares = maps.Clone(want)
			alone := device.Ref{}
			if random.IntN(2) == 0 && want[ref].Whole() { // no holder shares the device with the claim
				alone = ref
				delete(request.Shares, alone)
			}
			want = w.sharesOf(uid, want, alone)
			_, err := l.ReserveClaim(ctx, request)
			cancel()
			ok := w.reserveClaim(uid, want)
			checkAnswer(t, what, err, ok)
			if _, waits := w.clear(Holder{KindClaim, uid}, want); !ok && waits != (time.Since(start) > 0) {
				t.Errorf("%s: waited %v", what, time.Since(start))
			}
		case 3:
			what = "drain " + uid
			must(t, l.DrainClaim(t.Context(), uid))
			w.drainClaim(uid)
		case 4, 5:
			id, share := ref.String(), share()
			if !share.Whole() {
				id = fmt.Sprintf("%s::%d", id, random.IntN(4))
			}
			what = fmt.Sprintf("reserve limit %s: %s", id, share)
			err := l.ReservePod([]PodRequest{{ID: id, Device: ref, Share: share}})
			checkAnswer(t, what, err, w.reservePodDevice(id, ref, share))
		case 6:
			share := share()
			what = fmt.Sprintf("expect %s of %s for %s", share, ref, uid)
			err := l.Expect(Hold{Holder: Holder{KindClaim, uid}, Device: ref, Share: share, State: StateHeld, Pods: []Pod{{UID: "pod-of-" + uid}}})
			k := key{Holder{KindClaim, uid}, ref}
			_, known := w.holds[k]
			if !known {
				w.holds[k], w.shares[k] = StateRestored, share
			} else if w.holds[k] == StateRestored && w.shares[k].Whole() {
				w.shares[k] = share
			}
			w.pods[k] = "pod-of-" + uid
			if _, conflict := errors.AsType[*ConflictError](err); err != nil && !conflict {
				t.Errorf("%s: %v", what, err)
			}
		case 7:
			ids := append([]string{ref.String(), fmt.Sprintf("%s::%d", ref, random.IntN(4))}, twinClaims...)
			id := ids[random.IntN(len(ids))]
			w.podStates[id] = PodState(random.IntN(4))
			what = fmt.Sprintf("pod state %d of %s", w.podStates[id], id)
		case 8:
			if holds := l.Holds(); len(holds) > 0 {
				h := holds[random.IntN(len(holds))]
				state := []State{StateHeld, StateDraining}[random.IntN(2)]
				what = fmt.Sprintf("make %s on %s %s", h, h.Device, state)
				must(t, l.SetState(h, state))
				w.holds[keyOf(h)] = state
			}
		case 9:
			if holds := l.Holds(); len(holds) > 0 {
				h := holds[random.IntN(len(holds))]
				what = fmt.Sprintf("release %s on %s", h, h.Device)
				must(t, l.Release(h))
				w.drop(keyOf(h))
			}
		case 10:
			current := l.Holds()
			what = "old generations"
			for _, h := range old {
				if slices.ContainsFunc(current, func(c Hold) bool { return c.Generation == h.Generation }) {
					continue
				}
				must(t, l.Release(h))
				must(t, l.SetState(h, StateDraining))
				must(t, l.Identify(h, Pod{UID: "wrong"}))
			}
			old = append(old, current...)
		case 11:
			what = "reopen"
			must(t, l.Close())
			old = nil
			l, err = Open(t.Context(), options)
			must(t, err)
		}
		done = append(done, what)
		got, gotShares, gotPods := map[key]State{}, map[key]device.Share{}, map[key]string{}
		for _, h := range l.Holds() {
			got[keyOf(h)], gotShares[keyOf(h)], gotPods[keyOf(h)] = h.State, h.Share, ""
			for _, pod := range h.Pods {
				gotPods[keyOf(h)] += pod.UID
			}
		}
		for k := range got {
			if _, known := w.shares[k]; !known {
				w.shares[k] = device.Share{} // the zero is a share as well
			}
		}
		if !maps.Equal(got, w.holds) || !maps.Equal(gotShares, w.shares) || !maps.Equal(gotPods, w.pods) || t.Failed() {
			t.Fatalf("seed %d: after\n%q\nholds are\n%v %v\nbut should be\n%v %v", seed, done, got, gotPods, w.holds, w.pods)
		}
	}
}

func checkAnswer(t *testing.T, what string, err error, ok bool) {
	t.Helper()
	if _, conflict := errors.AsType[*ConflictError](err); conflict == ok || err != nil && !conflict {
		t.Errorf("%s: %v, the twin says %v", what, err, ok)
	}
}

// node is the hardware: each user writes its name to the slices that it uses, and must never find another name there.
type node struct {
	slices  map[string]*[8]atomic.Pointer[string]
	running sync.Map
}

func (n *node) Started(Hold, []Hold) bool { return false }
func (*node) Reuses(Hold) bool            { return true }

func (n *node) PodState(h Hold) PodState {
	if _, running := n.running.Load(h.Holder); running {
		return Terminating
	}
	return Gone
}

// use runs a holder's containers for a moment.
func (n *node) use(t *testing.T, name string, refs []device.Ref) {
	for _, ref := range refs {
		for i := range n.slices[ref.GPU] {
			if at := ref.Placement; !ref.Whole() && (i < at.Start || i >= at.Start+at.Size) {
				continue
			}
			place := &n.slices[ref.GPU][i]
			if !place.CompareAndSwap(nil, &name) {
				if other := place.Load(); other != nil {
					t.Errorf("%s and %s both run on %s, slice %d", name, *other, ref.GPU, i)
				}
				continue
			}
			defer place.CompareAndSwap(&name, nil)
		}
	}
	time.Sleep(50 * time.Microsecond)
}

// TestNoDeviceHasTwoUsers lets many claims and pods compete for few devices while reconcilers act on states that are a moment
// old.
func TestNoDeviceHasTwoUsers(t *testing.T) {
	n := &node{slices: map[string]*[8]atomic.Pointer[string]{"a": {}, "b": {}, "c": {}}}
	l, err := Open(t.Context(), Options{Dir: t.TempDir(), BootID: "boot", PodStates: n})
	must(t, err)
	defer l.Close()
	ctx, stop := context.WithCancel(t.Context())
	var workers, reconcilers sync.WaitGroup
	var claims, limits, refused atomic.Int64
	for i := range 12 {
		workers.Go(func() {
			random := rand.New(rand.NewPCG(uint64(i), 1))
			holder := Holder{KindClaim, fmt.Sprintf("c%d", i)}
			for range 150 {
				refs := []device.Ref{twinRefs[random.IntN(len(twinRefs))]}
				if more := twinRefs[random.IntN(len(twinRefs))]; !more.Overlaps(refs[0]) {
					refs = append(refs, more)
				}
				// A claim shared by pods that come and go: its UID is prepared again, with what it had or with something else.
				for again := range 2 {
					n.running.Store(holder, true)
					wait, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
					_, err := l.ReserveClaim(wait, claimOf(holder.ID, refs...))
					cancel()
					if err != nil {
						refused.Add(1)
					} else {
						claims.Add(1)
						n.use(t, fmt.Sprint(holder.ID, again), refs)
					}
					n.running.Delete(holder)
				}
				if random.IntN(3) > 0 {
					if err := l.DrainClaim(ctx, holder.ID); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	for i, ref := range twinRefs {
		workers.Go(func() {
			holder := Holder{KindPod, ref.String()}
			for range 300 {
				n.running.Store(holder, true)
				if err := l.ReservePod([]PodRequest{{ID: holder.ID, Device: ref}}); err != nil {
					refused.Add(1)
				} else {
					limits.Add(1)
					n.use(t, fmt.Sprint("limit", i), []device.Ref{ref})
				}
				n.running.Delete(holder)
			}
		})
	}
	for range 3 {
		reconcilers.Go(func() {
			for ctx.Err() == nil {
				changed := l.Changed()
				for _, h := range l.Holds() {
					if n.PodState(h) != Gone {
						continue
					}
					if err := l.Release(h); err != nil {
						t.Error(err)
					}
				}
				select {
				case <-changed:
				case <-ctx.Done():
				}
			}
		})
	}
	workers.Wait()
	stop()
	reconcilers.Wait()
	if claims.Load() == 0 || limits.Load() == 0 || refused.Load() == 0 {
		t.Error("there was no fight")
	}
	t.Logf("%d claims and %d limits served, %d refused", claims.Load(), limits.Load(), refused.Load())
	for _, h := range l.Holds() {
		must(t, l.Release(h))
	}
	if len(l.byGPU)+len(l.byHolder)+len(l.claims.byUID) > 0 {
		t.Errorf("left in memory: %v %v %v", l.byGPU, l.byHolder, l.claims.byUID)
	}
}
