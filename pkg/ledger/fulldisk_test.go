// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// smallDisk is a tmpfs that others fill up.
type smallDisk struct {
	t    *testing.T
	path string
	n    int
}

func newSmallDisk(t *testing.T) *smallDisk {
	t.Helper()
	path := t.TempDir()
	if err := unix.Mount("tmpfs", path, "tmpfs", 0, "size=256k,nr_inodes=64"); err != nil {
		t.Skipf("a full disk needs the right to mount a tmpfs: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return &smallDisk{t: t, path: path}
}

// fill leaves neither a block nor an inode.
func (d *smallDisk) fill() {
	d.t.Helper()
	page := make([]byte, spareSize)
	for {
		d.n++
		err := os.WriteFile(filepath.Join(d.path, fmt.Sprintf("filler-%d", d.n)), page, 0o600)
		if errors.Is(err, unix.ENOSPC) && d.stat().Bfree == 0 && d.stat().Ffree == 0 {
			return
		}
		if err != nil && !errors.Is(err, unix.ENOSPC) {
			d.t.Fatal(err)
		}
		if d.stat().Bfree == 0 {
			page = nil
		}
		if d.stat().Ffree == 0 {
			d.grow()
		}
	}
}

// grow takes the last blocks where inodes ended first.
func (d *smallDisk) grow() {
	d.t.Helper()
	file, err := os.OpenFile(filepath.Join(d.path, "filler-1"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		d.t.Fatal(err)
	}
	defer file.Close()
	for err == nil {
		_, err = file.Write(make([]byte, spareSize))
	}
	if !errors.Is(err, unix.ENOSPC) {
		d.t.Fatal(err)
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

func (d *smallDisk) stat() unix.Statfs_t {
	d.t.Helper()
	var stat unix.Statfs_t
	if err := unix.Statfs(d.path, &stat); err != nil {
		d.t.Fatal(err)
	}
	return stat
}

// TestFullDisk keeps the disk full all the time: whatever is freed is gone at once.
func TestFullDisk(t *testing.T) {
	disk := newSmallDisk(t)
	podState := Running
	options := Options{Dir: filepath.Join(disk.path, "tandem"), BootID: "boot", PodStates: judge(func(Hold) PodState { return podState })}
	l, err := Open(t.Context(), options)
	must(t, err)
	must(t, l.Provision(4))
	for _, uid := range []string{"c1", "c2"} {
		_, err = l.ReserveClaim(t.Context(), claimOf(uid, whole(uid)))
		must(t, err)
	}
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
		for _, gpu := range gpus {
			do("reserve", l.ReservePod(limitsOf(gpu)))
		}
		refused(t, l, claimOf("new", whole("x"), whole("y")))
		for _, gpu := range gpus {
			do("identify", l.Identify(find(l, gpu), Pod{UID: "pod-" + gpu}))
			do("drain", l.SetState(find(l, gpu), StateDraining))
			do("hold again", l.SetState(find(l, gpu), StateHeld))
			do("reuse", l.ReservePod(limitsOf(gpu)))
		}
		do("reuse all", l.ReservePod(limitsOf(gpus...)))
		_, err := l.ReserveClaim(t.Context(), ClaimRequest{UID: "c1", Namespace: "ns", Name: "c1", Pods: []Pod{{UID: "p"}}, Devices: claimOf("", whole("c1")).Devices})
		do("prepare again with another pod", err)
		do("unprepare", l.DrainClaim(t.Context(), "c1"))
		_, err = l.ReserveClaim(t.Context(), claimOf("c1", whole("c1")))
		do("revive", err)
		for _, gpu := range gpus {
			do("release", l.Release(find(l, gpu)))
		}
		refused(t, l, claimOf("new", whole("x")))
		before := stateOf(l)
		must(t, l.Close())
		disk.fill()
		l, err = Open(t.Context(), options)
		must(t, err)
		sameState(t, before, stateOf(l))
		do("reserve before provision", l.ReservePod(limitsOf("a")))
		do("release before provision", l.Release(find(l, "a")))
		do("provision again", l.Provision(4))
	}
	if err := l.Provision(5); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("provision more than there is: %v", err)
	}
	podState = Gone
	do("unprepare c1", l.DrainClaim(t.Context(), "c1"))
	if n := len(l.Holds()); n != 1 {
		t.Errorf("%d holds, want c2's", n)
	}
	do("provision with what c1 left", l.Provision(5))
	do("unprepare c2", l.DrainClaim(t.Context(), "c2"))
	disk.empty()
	_, err = l.ReserveClaim(t.Context(), claimOf("new", whole("x"), whole("y")))
	must(t, err)
	must(t, l.Close())
}

func refused(t *testing.T, l *Ledger, r ClaimRequest) {
	t.Helper()
	before := stateOf(l)
	reservation, err := l.ReserveClaim(t.Context(), r)
	if !errors.Is(err, unix.ENOSPC) || reservation.last != 0 {
		t.Errorf("claim on a full disk: reserved %v, %v", reservation, err)
	}
	sameState(t, before, stateOf(l))
}

// TestClaimThatFillsTheDisk has room for one of two devices.
func TestClaimThatFillsTheDisk(t *testing.T) {
	disk := newSmallDisk(t)
	l, err := Open(t.Context(), Options{Dir: filepath.Join(disk.path, "tandem"), BootID: "boot", PodStates: judge(neverGone)})
	must(t, err)
	defer l.Close()
	disk.fill()
	must(t, os.Remove(filepath.Join(disk.path, "filler-2")))
	refused(t, l, claimOf("c", whole("x"), whole("y")))
	if left := list(t, l.disk.holds()); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
	_, err = l.ReserveClaim(t.Context(), claimOf("c", whole("x")))
	must(t, err)
}

// What could not be recorded at a start is held all the same, and recorded when there is room.
func TestRecordWhatTheDiskHadNoRoomFor(t *testing.T) {
	disk := newSmallDisk(t)
	options := Options{Dir: filepath.Join(disk.path, "tandem"), BootID: "boot", PodStates: judge(neverGone)}
	l, err := Open(t.Context(), options)
	must(t, err)
	disk.fill()
	for _, uid := range []string{"c1", "c2"} {
		if err := l.Expect(Hold{Holder: Holder{KindClaim, uid}, Device: whole(uid)}); !errors.Is(err, unix.ENOSPC) {
			t.Fatalf("expect on a full disk: %v", err)
		}
	}
	if err := l.Record(); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("record on a full disk: %v", err)
	}
	must(t, l.Release(find(l, "c2")))
	if _, conflict := errors.AsType[*ConflictError](l.ReservePod(limitsOf("c1"))); !conflict {
		t.Error("a hold without a record does not hold")
	}
	disk.empty()
	must(t, l.Record())
	must(t, l.Record())
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
