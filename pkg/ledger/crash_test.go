// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/pkg/device"
)

const (
	crashDir  = "LEDGER_TEST_CRASH_DIR"
	crashStep = "LEDGER_TEST_CRASH_STEP"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(crashDir); dir != "" {
		os.Exit(crashChild(dir))
	}
	os.Exit(m.Run())
}

// judge answers by holder.
type judge func(Hold) PodState

func (j judge) PodState(h Hold) PodState { return j(h) }
func (judge) Started(Hold, []Hold) bool  { return false }
func (judge) Reuses(Hold) bool           { return true }

func neverGone(Hold) PodState { return Orphaned }

func onlyDrainingGone(h Hold) PodState {
	if h.Holder.ID == "quick" {
		return Gone
	}
	return Running
}

func claimOf(uid string, refs ...device.Ref) ClaimRequest {
	return ClaimRequest{UID: uid, Namespace: "ns", Name: uid, Pods: []Pod{{UID: "pod-of-" + uid}}, Devices: refs}
}

func limitsOf(gpus ...string) []PodRequest {
	var requests []PodRequest
	for _, gpu := range gpus {
		requests = append(requests, PodRequest{ID: gpu, Resource: "nvidia.com/gpu", Device: device.Ref{GPU: gpu}})
	}
	return requests
}

func whole(gpu string) device.Ref { return device.Ref{GPU: gpu} }

func part(gpu string, start, size int) device.Ref {
	return device.Ref{GPU: gpu, Placement: device.Placement{Start: start, Size: size}}
}

// script is what the child does before it dies. Each operation is acknowledged when it has been answered.
var script = []func(context.Context, *Ledger) error{
	func(ctx context.Context, l *Ledger) error {
		return second(l.ReserveClaim(ctx, claimOf("c1", whole("a"), whole("b"))))
	},
	func(_ context.Context, l *Ledger) error { return l.ReservePod(limitsOf("c", "d")) },
	func(_ context.Context, l *Ledger) error {
		return l.Identify(find(l, "c"), Pod{UID: "p1", Name: "p1", Namespace: "ns"})
	},
	func(_ context.Context, l *Ledger) error { return l.SetState(find(l, "d"), StateDraining) },
	func(_ context.Context, l *Ledger) error { return l.ReservePod(limitsOf("c")) },
	func(_ context.Context, l *Ledger) error {
		return l.Expect(Hold{Holder: Holder{KindClaim, "c2"}, Device: whole("e")})
	},
	func(ctx context.Context, l *Ledger) error {
		r := claimOf("c2", whole("e"), part("f", 0, 4))
		return second(l.ReserveClaim(ctx, r))
	},
	func(ctx context.Context, l *Ledger) error { return l.DrainClaim(ctx, "c1") },
	func(ctx context.Context, l *Ledger) error {
		return second(l.ReserveClaim(ctx, claimOf("c1", whole("b"), whole("g"))))
	},
	func(ctx context.Context, l *Ledger) error {
		return second(l.ReserveClaim(ctx, claimOf("quick", part("f", 4, 3))))
	},
	func(ctx context.Context, l *Ledger) error { return l.DrainClaim(ctx, "quick") },
	func(_ context.Context, l *Ledger) error { return l.Release(find(l, "c")) },
	func(_ context.Context, l *Ledger) error { return l.ReservePod(limitsOf("c", "h", "i")) },
	func(_ context.Context, l *Ledger) error { return l.Release(find(l, "d")) },
}

func second(_ Reservation, err error) error { return err }

func find(l *Ledger, holder string) Hold {
	holds := l.Holds()
	if i := slices.IndexFunc(holds, func(h Hold) bool { return h.Holder.ID == holder }); i >= 0 {
		return holds[i]
	}
	return Hold{}
}

func crashChild(dir string) int {
	last, err := strconv.Atoi(os.Getenv(crashStep))
	if err != nil {
		return 2
	}
	steps := 0
	l, err := Open(context.Background(), Options{Dir: dir, BootID: "boot", PodStates: judge(onlyDrainingGone), Step: func(string) {
		if steps++; steps == last {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}})
	if err != nil {
		fmt.Println("open:", err)
		return 2
	}
	for i, operation := range script {
		err := operation(context.Background(), l)
		if err == nil {
			err = l.Repair() // now, and not a millisecond later
		}
		if err != nil {
			fmt.Println("operation", i, err)
			return 2
		}
		fmt.Println("ok")
	}
	return 0
}

// stateOf is what matters of a hold to the outside, without what a process makes up for itself.
func stateOf(l *Ledger) map[string]string {
	state := map[string]string{}
	for _, h := range l.Holds() {
		state[recordName(keyOf(h))] = fmt.Sprintf("%s %s/%s %s %v %v", h.State, h.Namespace, h.Name, h.Resource, h.Pods, h.Unreadable)
	}
	return state
}

// TestDeathAtEveryStep kills a process before each of its steps on disk. The next process finds what was answered. Of the unfinished
// operation it finds any part; a record that has only its name holds its device.
func TestDeathAtEveryStep(t *testing.T) {
	states := []map[string]string{{}}
	model, err := Open(t.Context(), Options{Dir: t.TempDir(), BootID: "boot", PodStates: judge(onlyDrainingGone)})
	if err != nil {
		t.Fatal(err)
	}
	defer model.Close()
	for i, operation := range script {
		if err := operation(t.Context(), model); err != nil {
			t.Fatalf("operation %d: %v", i, err)
		}
		states = append(states, stateOf(model))
	}
	for step := 1; ; step++ {
		dir := t.TempDir()
		answered, killed := runChild(t, dir, step)
		if answered < len(script) && !killed {
			t.Fatalf("step %d: the child ended by itself after %d operations", step, answered)
		}
		checkSurvivor(t, dir, step, answered, states)
		if !killed {
			t.Logf("%d steps, %d operations", step-1, len(script))
			return
		}
	}
}

func runChild(t *testing.T, dir string, step int) (answered int, killed bool) {
	t.Helper()
	child := exec.Command(os.Args[0])
	child.Env = append(os.Environ(), crashDir+"="+dir, crashStep+"="+strconv.Itoa(step))
	out, err := child.Output()
	for line := range strings.Lines(string(out)) {
		if line != "ok\n" {
			t.Fatalf("step %d: child: %s", step, line)
		}
		answered++
	}
	return answered, err != nil
}

func checkSurvivor(t *testing.T, dir string, step, answered int, states []map[string]string) {
	t.Helper()
	before, after := states[answered], states[min(answered+1, len(states)-1)]
	l, err := Open(t.Context(), Options{Dir: dir, BootID: "boot", PodStates: judge(neverGone)})
	if err != nil {
		t.Fatalf("step %d: %v", step, err)
	}
	defer l.Close()
	got := stateOf(l)
	for name := range union(before, after, got) {
		unfinished := before[name] == "" && after[name] != "" && strings.HasSuffix(got[name], " true")
		if !unfinished && !slices.Contains([]string{before[name], after[name]}, got[name]) {
			t.Errorf("step %d after %d operations: %s is %q, want %q or %q", step, answered, name, got[name], before[name], after[name])
		}
	}
	if conflict := doublyHeld(l.Holds()); conflict != "" {
		t.Errorf("step %d: %s", step, conflict)
	}
	records := list(t, filepath.Join(dir, "holds"))
	if len(records) != len(got) {
		t.Errorf("step %d: files %q for %d holds", step, records, len(got))
	}
}

func union(maps ...map[string]string) map[string]bool {
	names := map[string]bool{}
	for _, m := range maps {
		for name := range m {
			names[name] = true
		}
	}
	return names
}

func doublyHeld(holds []Hold) string {
	for i, a := range holds {
		for _, b := range holds[:i] {
			if a.Holder != b.Holder && a.Device.Overlaps(b.Device) {
				return fmt.Sprintf("%s is held by %s and %s by %s", a.Device, a, b.Device, b)
			}
		}
	}
	return ""
}

func list(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

// TestDeathAnywhere kills a working process at any instruction, again and again over the same directory.
func TestDeathAnywhere(t *testing.T) {
	dir := t.TempDir()
	for round := range 20 {
		child := exec.Command(os.Args[0])
		child.Env = append(os.Environ(), crashDir+"="+dir, crashStep+"=-1")
		out, err := child.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for range round % len(script) {
			lines.Scan()
		}
		time.Sleep(time.Duration(round*37) * time.Microsecond)
		if err := child.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = child.Wait()
		l, err := Open(t.Context(), Options{Dir: dir, BootID: "boot", PodStates: judge(neverGone)})
		if err != nil {
			t.Fatal(err)
		}
		for _, h := range l.Holds() {
			if info, err := os.Stat(filepath.Join(dir, "holds", recordName(keyOf(h)))); err != nil || h.Unreadable && info.Size() > 0 {
				t.Errorf("round %d: torn record: %v, %v", round, h, err)
			}
			if err := l.Release(h); err != nil {
				t.Error(err)
			}
		}
		if left := list(t, filepath.Join(dir, "holds")); len(left) > 0 {
			t.Errorf("round %d: left behind: %q", round, left)
		}
		l.Close()
	}
}
