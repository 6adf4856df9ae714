// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/fileclock"
)

// A hold on a read-only disk gets the pods that kubelet names. Only their record waits.
func TestExpectOnAReadOnlyDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skipped: mounting a tmpfs needs root")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		t.Skipf("skipped: mount a tmpfs: %v", err)
	}
	t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	open := func() *Ledger {
		t.Helper()
		l, err := Open(t.Context(), Options{Dir: dir, BootID: "boot", PodStates: judge(func(Hold) PodState { return Running }), Now: fileclock.Now})
		must(t, err)
		return l
	}
	hold := Hold{Holder: Holder{KindClaim, "claim"}, Device: whole("a"), Namespace: "default", Name: "claim", Pods: []Pod{{UID: "first"}}}
	l := open()
	must(t, l.Expect(hold))
	must(t, l.Close())
	must(t, unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	l = open()
	t.Cleanup(func() { _ = l.Close() })
	hold.Pods = append(hold.Pods, Pod{UID: "second"})
	if err := l.Expect(hold); err == nil {
		t.Error("no error although nothing could be written")
	}
	if holds := l.Holds(); len(holds) != 1 || len(holds[0].Pods) != 2 {
		t.Errorf("holds %+v", holds)
	}
}
