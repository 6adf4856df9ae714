// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// smallDisk is a tmpfs that other processes fill.
type smallDisk struct {
	t    *testing.T
	path string
	n    int
}

func newSmallDisk(t *testing.T) *smallDisk {
	t.Helper()
	path := t.TempDir()
	if err := unix.Mount("tmpfs", path, "tmpfs", 0, "size=256k,nr_inodes=256"); err != nil {
		t.Skipf("a full disk needs the right to mount a tmpfs: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return &smallDisk{t: t, path: path}
}

// fill leaves no block.
func (d *smallDisk) fill() {
	d.t.Helper()
	for {
		d.n++
		err := os.WriteFile(filepath.Join(d.path, fmt.Sprintf("filler-%d", d.n)), make([]byte, os.Getpagesize()), 0o600)
		if errors.Is(err, unix.ENOSPC) {
			return
		}
		if err != nil {
			d.t.Fatal(err)
		}
	}
}

// fillWithInodes leaves no inode.
func (d *smallDisk) fillWithInodes() {
	d.t.Helper()
	for {
		d.n++
		err := os.WriteFile(filepath.Join(d.path, fmt.Sprintf("filler-%d", d.n)), nil, 0o600)
		if errors.Is(err, unix.ENOSPC) {
			return
		}
		if err != nil {
			d.t.Fatal(err)
		}
	}
}

func (d *smallDisk) empty() {
	d.t.Helper()
	fillers, err := filepath.Glob(filepath.Join(d.path, "filler-*"))
	if err != nil {
		d.t.Fatal(err)
	}
	for _, filler := range fillers {
		if err := os.Remove(filler); err != nil {
			d.t.Fatal(err)
		}
	}
}

// TestFullDisk keeps all blocks of the disk in use. No operation fails, and no hold is lost over a restart: a new record has at least
// its name.
func TestFullDisk(t *testing.T) {
	disk := newSmallDisk(t)
	podState := Running
	options := Options{Dir: filepath.Join(disk.path, "tandem"), BootID: "boot", PodStates: judge(func(Hold) PodState { return podState })}
	open := func() *Ledger {
		l, err := Open(klog.NewContext(t.Context(), klog.New(nil)), options)
		must(t, err)
		return l
	}
	l := open()
	must(t, second(l.ReserveClaim(t.Context(), claimOf("c1", whole("c1")))))
	must(t, l.ReservePod(limitsOf("a")))
	must(t, l.Repair())
	// do runs one operation on a disk that is full before and after.
	do := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
		disk.fill()
	}
	disk.fill()
	gpus := []string{"a", "b", "c", "d"}
	for range 5 {
		do("reserve", l.ReservePod(limitsOf(gpus...)))
		do("reserve a new claim", second(l.ReserveClaim(t.Context(), claimOf("new", whole("x"), whole("y")))))
		for _, gpu := range gpus {
			do("identify", l.Identify(find(l, gpu), Pod{UID: "pod-" + gpu}))
			do("drain", l.SetState(find(l, gpu), StateDraining))
			do("hold again", l.SetState(find(l, gpu), StateHeld))
			do("reuse", l.ReservePod(limitsOf(gpu)))
		}
		two := claimOf("c1", whole("c1"))
		two.Pods = []Pod{{UID: "p"}}
		do("prepare again with another pod", second(l.ReserveClaim(t.Context(), two)))
		do("unprepare", l.DrainClaim(t.Context(), "c1"))
		do("prepare while it drains", second(l.ReserveClaim(t.Context(), claimOf("c1", whole("c1")))))
		before := names(l)
		must(t, l.Close())
		l = open()
		if after := names(l); !slices.Equal(after, before) {
			t.Errorf("held after a restart: %v, want %v", after, before)
		}
		if h := find(l, "c1"); h.Unreadable || h.Name != "c1" || len(h.Pods) != 2 {
			t.Errorf("a record from before the disk was full: %+v", h)
		}
		if _, conflict := errors.AsType[*ConflictError](l.ReservePod([]PodRequest{{ID: "other", Device: whole("x")}})); !conflict {
			t.Error("a record without contents does not hold its device")
		}
		for _, gpu := range gpus[1:] {
			do("release", l.Release(find(l, gpu)))
		}
		do("release", l.Release(find(l, "new")))
	}
	disk.empty()
	must(t, l.ReservePod(limitsOf("b")))
	must(t, l.Repair())
	podState = Gone
	must(t, l.DrainClaim(t.Context(), "c1"))
	must(t, l.Close())
	l = open()
	if h := find(l, "b"); h.Unreadable || h.Resource != "nvidia.com/gpu" {
		t.Errorf("a record after the disk had room again: %+v", h)
	}
	must(t, l.Close())
}

// TestRepairOnAFullDisk: a hold for which the disk had no room is recorded as soon as there is some.
func TestRepairOnAFullDisk(t *testing.T) {
	disk := newSmallDisk(t)
	options := Options{Dir: filepath.Join(disk.path, "tandem"), BootID: "boot", PodStates: judge(neverGone)}
	l, err := Open(t.Context(), options)
	must(t, err)
	disk.fillWithInodes()
	for _, uid := range []string{"c1", "c2"} {
		if err := l.Expect(Hold{Holder: Holder{KindClaim, uid}, Device: whole(uid)}); !errors.Is(err, unix.ENOSPC) {
			t.Fatalf("expect on a disk without inodes: %v", err)
		}
	}
	if err := l.Repair(); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("repair on a disk without inodes: %v", err)
	}
	must(t, l.Release(find(l, "c2")))
	if _, conflict := errors.AsType[*ConflictError](l.ReservePod(limitsOf("c1"))); !conflict {
		t.Error("a hold without a record does not hold its device")
	}
	disk.empty()
	for range 2 {
		must(t, l.Repair())
	}
	before := stateOf(l)
	must(t, l.Close())
	l, err = Open(t.Context(), options)
	must(t, err)
	defer l.Close()
	sameState(t, before, stateOf(l))
	if len(before) != 1 {
		t.Errorf("recorded: %v", before)
	}
}

// TestUnwritable: the ledger knows before a pod comes that it could not record its hold, and also from a failed attempt. It knows when it
// can again.
func TestUnwritable(t *testing.T) {
	for name, c := range map[string]struct {
		harm, undo func(*smallDisk) error
		want       error
	}{
		"no inode": {
			func(d *smallDisk) error { d.fillWithInodes(); return nil },
			func(d *smallDisk) error { d.empty(); return nil }, unix.ENOSPC,
		},
		"read-only": {
			func(d *smallDisk) error { return unix.Mount("", d.path, "", unix.MS_REMOUNT|unix.MS_RDONLY, "") },
			func(d *smallDisk) error { return unix.Mount("", d.path, "", unix.MS_REMOUNT, "") }, unix.EROFS,
		},
	} {
		t.Run(name, func(t *testing.T) {
			disk := newSmallDisk(t)
			l, err := Open(t.Context(), Options{Dir: filepath.Join(disk.path, "tandem"), BootID: "boot", PodStates: judge(neverGone)})
			must(t, err)
			defer l.Close()
			probe := func(want error) {
				t.Helper()
				l.Probe()
				if got := l.Unwritable(); !errors.Is(got, want) {
					t.Errorf("unwritable: %v, want %v", got, want)
				}
			}
			probe(nil)
			must(t, c.harm(disk))
			changed := l.Changed()
			probe(c.want)
			<-changed
			must(t, c.undo(disk))
			changed = l.Changed()
			probe(nil)
			<-changed
			must(t, l.ReservePod(limitsOf("a")))
			must(t, c.harm(disk))
			if err := l.ReservePod(limitsOf("b")); !errors.Is(err, c.want) || !errors.Is(l.Unwritable(), c.want) {
				t.Errorf("reserve: %v, unwritable: %v", err, l.Unwritable())
			}
			must(t, c.undo(disk))
			probe(nil)
			if entries, err := os.ReadDir(filepath.Join(disk.path, "tandem/holds")); err != nil || len(entries) != 1 {
				t.Errorf("records: %v, %v", entries, err)
			}
		})
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func sameState(t *testing.T, want, got map[string]string) {
	t.Helper()
	for name := range union(want, got) {
		if want[name] != got[name] {
			t.Errorf("%s: %q, want %q", name, got[name], want[name])
		}
	}
}
