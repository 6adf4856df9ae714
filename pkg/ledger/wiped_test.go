// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// TestWipedDirectory: whatever is deleted below the run directory, the ledger continues and the next process has all of its
// holds.
func TestWipedDirectory(t *testing.T) {
	for name, wipe := range map[string]func(t *testing.T, dir string){
		"everything": func(t *testing.T, dir string) { must(t, os.RemoveAll(dir)) },
		"all but itself": func(t *testing.T, dir string) {
			for _, entry := range list(t, dir) {
				must(t, os.RemoveAll(filepath.Join(dir, entry)))
			}
		},
		"records": func(t *testing.T, dir string) { must(t, os.RemoveAll(filepath.Join(dir, "holds"))) },
	} {
		for next, do := range map[string]func(l *Ledger) error{
			"reserve a limit": func(l *Ledger) error { return l.ReservePod(limitsOf("GPU-3")) },
			"reserve a claim": func(l *Ledger) error {
				_, err := l.ReserveClaim(t.Context(), ClaimRequest{UID: "new", Devices: []device.Ref{whole("GPU-3")}})
				return err
			},
			"release":  func(l *Ledger) error { return l.Release(find(l, "GPU-2")) },
			"repair":   func(l *Ledger) error { return l.Repair() },
			"identify": func(l *Ledger) error { return l.Identify(find(l, "GPU-2"), Pod{UID: "p9"}) },
		} {
			t.Run(name+", then "+next, func(t *testing.T) {
				dir := filepath.Join(t.TempDir(), "tandem")
				l := reopen(t, dir)
				_, err := l.ReserveClaim(t.Context(), ClaimRequest{UID: "old", Devices: []device.Ref{whole("GPU-1")}})
				must(t, err)
				must(t, l.ReservePod(limitsOf("GPU-2")))
				awaitAnnounced(l)
				wipe(t, dir)
				must(t, do(l))
				want := names(l)
				if got := list(t, filepath.Join(dir, "holds")); !slices.Equal(got, want) {
					t.Errorf("records %v, holds %v", got, want)
				}
				if _, err := Open(t.Context(), Options{Dir: dir, BootID: "boot", PodStates: judge(neverRunningOut)}); !errors.Is(err, ErrLocked) {
					t.Errorf("another process opens the ledger: %v", err)
				}
				must(t, l.Close())
				if got := names(reopen(t, dir)); !slices.Equal(got, want) {
					t.Errorf("the next process knows %v, this one had %v", got, want)
				}
			})
		}
	}
}

// awaitAnnounced waits until the contents of all records are written: a write during the wipe would make the directory again.
func awaitAnnounced(l *Ledger) {
	for {
		changed := l.Changed()
		l.mu.Lock()
		announcing := l.announcing
		l.mu.Unlock()
		if !announcing {
			return
		}
		<-changed
	}
}

func names(l *Ledger) []string {
	found := map[string]bool{}
	for _, h := range l.Holds() {
		found[recordName(keyOf(h))] = true
	}
	return slices.Sorted(maps.Keys(found))
}

// TestWipedDirectoryInOtherHands: another process has opened a new ledger in the meantime, so this one gives nothing away.
func TestWipedDirectoryInOtherHands(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "tandem")
	l := reopen(t, dir)
	must(t, os.RemoveAll(dir))
	reopen(t, dir)
	if err := l.ReservePod(limitsOf("GPU-1")); !errors.Is(err, ErrLocked) {
		t.Errorf("reserving beside another process: %v", err)
	}
}
