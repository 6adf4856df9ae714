// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/records"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// reopen takes the ledger of dir without its log, which names every damage.
func reopen(t *testing.T, dir string) *Ledger {
	t.Helper()
	ctx := klog.NewContext(t.Context(), klog.New(nil))
	l, err := Open(ctx, Options{Dir: dir, BootID: "boot", PodStates: judge(neverRunningOut)})
	must(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func neverRunningOut(Hold) PodState { return Running }

// written returns a directory with one record, the hold, and where the record is.
func written(t *testing.T, h Hold) (dir, path string) {
	t.Helper()
	dir = t.TempDir()
	l := reopen(t, dir)
	must(t, l.Expect(h))
	must(t, l.SetState(find(l, h.Holder.ID), StateHeld))
	path = filepath.Join(dir, "holds", recordName(keyOf(h)))
	must(t, l.Close())
	return dir, path
}

var samples = map[string]Hold{
	"claim": {Holder: Holder{KindClaim, "0e7c5a0e"}, Device: part("GPU-1", 0, 4), Namespace: "ns", Name: "train", Pods: []Pod{{UID: "p1", Namespace: "ns", Name: "train-0"}}},
	"limit": {Holder: Holder{KindPod, "GPU-1"}, Device: whole("GPU-1"), Resource: "nvidia.com/gpu", Pods: []Pod{{UID: "p1"}}},
}

// checkHeld expects that the damaged record holds its device and nothing else, and that it can be completed and released.
func checkHeld(t *testing.T, what, dir string, original Hold, mayBeReadable bool) {
	t.Helper()
	l := reopen(t, dir)
	h := find(l, original.Holder.ID)
	if len(l.Holds()) != 1 || h.Holder != original.Holder || h.Device != original.Device {
		t.Fatalf("%s: holds are %v", what, l.Holds())
	}
	if !h.Unreadable && (!mayBeReadable || h.State != StateHeld || h.Name != original.Name || len(h.Pods) != 1 || h.Pods[0] != original.Pods[0]) {
		t.Fatalf("%s: reads as %+v", what, h)
	}
	_, conflict := errors.AsType[*ConflictError](second(l.ReserveClaim(t.Context(), claimOf("other", original.Device))))
	if !conflict {
		t.Fatalf("%s: does not hold", what)
	}
	must(t, l.ReservePod(limitsOf("GPU-2")))
	must(t, l.Release(find(l, "GPU-2")))
	must(t, l.SetState(h, StateDraining))
	must(t, l.Close())

	l = reopen(t, dir)
	if h.Unreadable && !find(l, original.Holder.ID).Unreadable {
		t.Fatalf("%s: a change of state made it look like a record that was read", what)
	}
	must(t, l.Expect(original))
	completed := find(l, original.Holder.ID)
	if completed.Unreadable || completed.Name != original.Name || len(completed.Pods) != 1 {
		t.Fatalf("%s: completed to %+v", what, completed)
	}
	if h.Unreadable {
		must(t, l.Release(h))
		if len(l.Holds()) == 0 {
			t.Fatalf("%s: the pod state of the unknown holder released the known one", what)
		}
	}
	must(t, l.Close())

	l = reopen(t, dir)
	if again := find(l, original.Holder.ID); again.Unreadable || again.Name != original.Name {
		t.Fatalf("%s: completion did not last: %+v", what, again)
	}
	must(t, l.Release(find(l, original.Holder.ID)))
	must(t, l.Close())
	if left := list(t, filepath.Join(dir, "holds")); len(left) > 0 {
		t.Fatalf("%s: left behind %q", what, left)
	}
}

func TestDamagedRecordsHold(t *testing.T) {
	for kind, h := range samples {
		t.Run(kind, func(t *testing.T) {
			dir, path := written(t, h)
			intact, err := os.ReadFile(path)
			must(t, err)
			length, end := len(intact), bytes.IndexByte(intact, '\n')
			for n := range length + 1 {
				must(t, os.WriteFile(path, intact[:n], 0o600))
				checkHeld(t, fmt.Sprintf("truncated to %d bytes", n), dir, h, n >= end)
			}
			for n := range length {
				for _, flip := range []byte{0x01, 0x02, 0x20, 0x80, 0xff} {
					damaged := bytes.Clone(intact)
					damaged[n] ^= flip
					must(t, os.WriteFile(path, damaged, 0o600))
					// The names of JSON fields have no case. What follows the newline is left from longer contents.
					checkHeld(t, fmt.Sprintf("byte %d flipped by %#x", n, flip), dir, h, n < bytes.Index(intact, []byte(`:{`)) || n >= end)
				}
			}
		})
	}
}

// record returns the contents of the record of h.
func record(t *testing.T, h Hold) []byte {
	t.Helper()
	dir := t.TempDir()
	store := newRecords(dir, Options{BootID: "boot", Now: time.Now})
	_, err := store.Load()
	must(t, err)
	must(t, store.Put(keyOf(h), h))
	must(t, store.Close())
	data, err := os.ReadFile(filepath.Join(dir, recordName(keyOf(h))))
	must(t, err)
	return data
}

func TestOtherThingsInPlaceOfARecordHold(t *testing.T) {
	things := map[string]func(path string) error{
		"an empty directory": func(path string) error { return os.Mkdir(path, 0o700) },
		"a directory":        func(path string) error { return os.MkdirAll(filepath.Join(path, "x"), 0o700) },
		"a pipe":             func(path string) error { return unix.Mkfifo(path, 0o600) },
		"a dangling link":    func(path string) error { return os.Symlink("nowhere", path) },
		"text":               func(path string) error { return os.WriteFile(path, []byte("hello\nworld\n"), 0o600) },
		"zeros":              func(path string) error { return os.WriteFile(path, make([]byte, 4096), 0o600) },
		"another's record": func(path string) error {
			return os.WriteFile(path, record(t, Hold{Holder: Holder{KindClaim, "x"}, Device: whole("y"), State: StateHeld}), 0o600)
		},
		"an unknown state": func(path string) error {
			h := samples["claim"]
			if strings.Contains(filepath.Base(path), "pod") {
				h = samples["limit"]
			}
			h.State = "shared"
			return os.WriteFile(path, record(t, h), 0o600)
		},
	}
	for kind, h := range samples {
		for what, make := range things {
			t.Run(kind+"/"+what, func(t *testing.T) {
				dir, path := written(t, h)
				must(t, os.Remove(path))
				must(t, make(path))
				checkHeld(t, what, dir, h, false)
			})
			t.Run(kind+"/"+what+", given out again", func(t *testing.T) {
				dir, path := written(t, h)
				must(t, os.Remove(path))
				must(t, make(path))
				l := reopen(t, dir)
				if h.Holder.Kind == KindPod {
					// Its pod is unknown until Expect names it.
					if _, conflict := errors.AsType[*ConflictError](l.ReservePod(limitsOf(h.Holder.ID))); !conflict {
						t.Error("a pod got the device of an unknown one")
					}
					must(t, l.Expect(h))
					must(t, l.ReservePod(limitsOf(h.Holder.ID)))
				} else {
					must(t, second(l.ReserveClaim(t.Context(), claimOf(h.Holder.ID, h.Device))))
				}
				must(t, l.Close())
				if got := find(reopen(t, dir), h.Holder.ID); got.Unreadable || got.State != StateHeld {
					t.Errorf("%+v", got)
				}
			})
		}
	}
}

// That nothing is known of a holder's pods is no proof that it has none.
func TestNoPodStateEndsAnUnknownHolder(t *testing.T) {
	for kind, h := range samples {
		dir, path := written(t, h)
		must(t, os.Truncate(path, 10))
		l, err := Open(klog.NewContext(t.Context(), klog.New(nil)), Options{Dir: dir, BootID: "boot", PodStates: judge(func(Hold) PodState { return Gone })})
		must(t, err)
		if _, conflict := errors.AsType[*ConflictError](second(l.ReserveClaim(t.Context(), claimOf("other", whole("GPU-1"))))); !conflict {
			t.Errorf("%s: another claim got the device", kind)
		}
		must(t, l.DrainClaim(t.Context(), h.Holder.ID))
		if err := l.ReservePod([]PodRequest{{ID: "other", Device: whole("GPU-1")}}); err == nil {
			t.Errorf("%s: a limit got the device", kind)
		}
		if got := find(l, h.Holder.ID); got.Holder != h.Holder {
			t.Errorf("%s: holds are %v", kind, l.Holds())
		}
		must(t, l.Close())
	}
}

func TestStrangeNamesBlockNothing(t *testing.T) {
	dir, _ := written(t, samples["limit"])
	names := []string{
		"x", "claim", "claim~~GPU-1", "claim~a~", "~a~GPU-1", "claim~a~GPU-1~b", "claim~%zz~GPU-1", "claim~a~GPU-1@0+-1", "claim~a~GPU-1@0++4",
		"claim~a~GPU-1@00+4", "claim~%61~GPU-1", ".hidden", "core.123",
	}
	for _, name := range names {
		must(t, os.WriteFile(filepath.Join(dir, "holds", name), []byte("?"), 0o600))
	}
	l := reopen(t, dir)
	if n := len(l.Holds()); n != 1 {
		t.Errorf("%d holds: %v", n, l.Holds())
	}
	must(t, l.ReservePod(limitsOf("GPU-2")))
	if got := list(t, filepath.Join(dir, "holds")); len(got) != len(names)+2 {
		t.Errorf("files of another process were changed: %q", got)
	}
}

func TestNamesThatCouldNotBeReadBackAreRefused(t *testing.T) {
	l := reopen(t, t.TempDir())
	for _, ref := range []device.Ref{{}, part("a", -1, 4), part("a", 2, 0), part("a", 0, -1), whole("a@0+4"), whole("a@x")} {
		if _, err := l.ReserveClaim(t.Context(), claimOf("c", ref)); err == nil {
			t.Errorf("%+v was reserved", ref)
		}
	}
	if _, err := l.ReserveClaim(t.Context(), claimOf("", whole("a"))); err == nil {
		t.Error("a claim without UID was served")
	}
	if holds := l.Holds(); len(holds) > 0 {
		t.Errorf("held: %v", holds)
	}
	for i, id := range []string{"a/b", "a~b", "..", "%", "a\x00b", "GPU-1@0+1", "ü"} {
		must(t, l.ReservePod([]PodRequest{{ID: id, Device: whole(fmt.Sprint("/~%", i))}}))
	}
}

// TestRecordsOfALaterVersion: fields that a later version adds are ignored, and holders of a kind that it adds hold their devices.
func TestRecordsOfALaterVersion(t *testing.T) {
	h := samples["claim"]
	later := struct {
		Hold
		Later map[string]int `json:"later"`
	}{h, map[string]int{"memory": 7}}
	later.State = StateHeld
	dir := t.TempDir()
	store := records.New(records.Options[key, any]{What: "hold", Dir: filepath.Join(dir, "holds"), BootID: "boot", Name: recordName, Parse: parseRecordName})
	_, err := store.Load()
	must(t, err)
	must(t, store.Put(keyOf(h), later))
	must(t, store.Put(key{Holder{"lease", "l1"}, whole("GPU-2")}, later))
	must(t, store.Close())
	l := reopen(t, dir)
	if got := find(l, h.Holder.ID); got.Unreadable || got.Name != h.Name || got.State != StateHeld || !slices.Equal(got.Pods, h.Pods) {
		t.Errorf("%+v", got)
	}
	if err := l.ReservePod(limitsOf("GPU-2")); err == nil {
		t.Error("a holder of a later kind does not hold its device")
	}
	must(t, l.DrainClaim(t.Context(), h.Holder.ID))
	must(t, l.Close())
	if got := find(reopen(t, dir), h.Holder.ID); got.Unreadable || got.State != StateDraining {
		t.Errorf("%+v", got)
	}
}
