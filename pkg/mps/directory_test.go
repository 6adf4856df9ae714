// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/filewatch"
)

func directory(t *testing.T) string {
	t.Helper()
	dir := Dir(t.TempDir(), "one")
	if err := Make(dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

func hold(t *testing.T, dir string) *Holder {
	t.Helper()
	h, err := Hold(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func alive(t *testing.T, dir string) (Ready, bool) {
	t.Helper()
	ready, alive, err := Alive(dir)
	if err != nil {
		t.Fatal(err)
	}
	return ready, alive
}

func TestReadyIsTrueUntilItIsTakenBack(t *testing.T) {
	dir := directory(t)
	if _, is := alive(t, dir); is {
		t.Fatal("alive before a supervisor ran")
	}
	h := hold(t, dir)
	want := Ready{Pod: "uid", Hash: "hash"}
	if err := h.Publish(want); err != nil {
		t.Fatal(err)
	}
	if got, is := alive(t, dir); !is || got != want {
		t.Errorf("alive: %t %+v, want %+v", is, got, want)
	}
	if err := h.Retract(); err != nil {
		t.Fatal(err)
	}
	if _, is := alive(t, dir); is {
		t.Error("alive after it was taken back")
	}
	if held, err := Held(dir); err != nil || !held {
		t.Errorf("held: %t, %v", held, err)
	}
	if err := h.Release(); err != nil {
		t.Fatal(err)
	}
	if held, err := Held(dir); err != nil || held {
		t.Errorf("held after release: %t, %v", held, err)
	}
}

// The directory was removed and made again, and the next supervisor is faster.
func TestRetractLeavesWhatAnotherSays(t *testing.T) {
	dir := directory(t)
	before := hold(t, dir)
	if err := before.Publish(Ready{Pod: "before"}); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.RemoveAll(dir), Make(dir)); err != nil {
		t.Fatal(err)
	}
	next := hold(t, dir)
	if err := next.Publish(Ready{Pod: "next"}); err != nil {
		t.Fatal(err)
	}
	if err := before.Release(); err != nil {
		t.Error(err)
	}
	if ready, is := alive(t, dir); !is || ready.Pod != "next" {
		t.Errorf("alive: %t %+v", is, ready)
	}
	if err := next.Release(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(dir, readyFile)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the next one's record: %v", err)
	}
}

// TestARecordOfTheDeadIsVoid kills a process that said it was ready: the record stays, also under the lock of the next one.
func TestARecordOfTheDeadIsVoid(t *testing.T) {
	dir := directory(t)
	holder := exec.Command(os.Args[0])
	holder.Env = append(os.Environ(), holdFor+"="+dir)
	holder.Stderr = os.Stderr
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := Await(t.Context(), dir, "dead"); err != nil {
		t.Fatal(err)
	}
	if err := holder.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := holder.Wait(); err == nil {
		t.Fatal("it was not killed")
	}
	h := hold(t, dir)
	defer h.Release()
	if _, err := os.Stat(filepath.Join(dir, readyFile)); err != nil {
		t.Fatalf("the test proves nothing: %v", err)
	}
	if _, is := alive(t, dir); is {
		t.Error("a record of one who was killed counts")
	}
}

// holdFor has this program say that it is ready, and wait to be killed.
const holdFor = "TEST_HOLD_FOR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(holdFor); dir != "" {
		h, err := Hold(context.Background(), dir)
		if err == nil {
			err = h.Publish(Ready{Hash: "dead"})
		}
		if err != nil {
			os.Exit(3)
		}
		select {}
	}
	if text := os.Getenv(superviseFor); text != "" {
		if err := supervise(text); err != nil {
			os.Exit(3)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestAwaitWantsTheRightSettings(t *testing.T) {
	dir := directory(t)
	h := hold(t, dir)
	defer h.Release()
	if err := h.Publish(Ready{Hash: "other"}); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Await(short, dir, "wanted"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("await other settings: %v", err)
	}
	answer := make(chan error, 1)
	go func() {
		_, err := Await(t.Context(), dir, "wanted")
		answer <- err
	}()
	if err := h.Publish(Ready{Hash: "wanted"}); err != nil {
		t.Fatal(err)
	}
	if err := <-answer; err != nil {
		t.Error(err)
	}
}

func TestAwaitEndsWithTheDirectory(t *testing.T) {
	dir := directory(t)
	answer := make(chan error, 1)
	go func() {
		_, err := Await(t.Context(), dir, "wanted")
		answer <- err
	}()
	if err := Remove(dir); err != nil {
		t.Fatal(err)
	}
	if err := <-answer; !errors.Is(err, os.ErrNotExist) {
		t.Errorf("await: %v", err)
	}
}

func TestStopWaitsForTheDaemon(t *testing.T) {
	dir := directory(t)
	h := hold(t, dir)
	stopped := make(chan error, 1)
	go func() { stopped <- Stop(t.Context(), dir) }()
	if err := h.Await(t.Context()); !errors.Is(err, ErrStopped) {
		t.Fatalf("await: %v", err)
	}
	select {
	case err := <-stopped:
		t.Fatalf("stopped while the daemon lives: %v", err)
	case <-time.After(3 * lockInterval):
	}
	if err := h.Release(); err != nil {
		t.Fatal(err)
	}
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 3*lockInterval)
	defer cancel()
	if _, err := Hold(short, dir); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("hold while it is to stay away: %v", err)
	}
	if err := Make(dir); err != nil {
		t.Fatal(err)
	}
	if err := hold(t, dir).Release(); err != nil {
		t.Fatal(err)
	}
}

// containerd makes a directory that was removed when kubelet starts the supervisor anew.
func TestADirectoryThatTheAgentHasNotMade(t *testing.T) {
	dir := Dir(t.TempDir(), "name")
	if err := os.MkdirAll(filepath.Join(dir, PipeDir), 0o755); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 3*lockInterval)
	defer cancel()
	if _, err := Hold(short, dir); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("hold: %v", err)
	}
	if err := Make(dir); err != nil {
		t.Fatal(err)
	}
	if err := hold(t, dir).Release(); err != nil {
		t.Fatal(err)
	}
}

// The few inotify instances of a user may all be another's.
func TestWithoutInotify(t *testing.T) {
	filewatch.NewWatcher = func() (*fsnotify.Watcher, error) { return nil, unix.EMFILE }
	t.Cleanup(func() { filewatch.NewWatcher = fsnotify.NewWatcher })
	t.Run("settings", TestAwaitWantsTheRightSettings)
	t.Run("stop", TestStopWaitsForTheDaemon)
	t.Run("directory", TestADirectoryThatGoesEndsTheHolder)
	t.Run("await", TestAwaitEndsWithTheDirectory)
}

func TestStopOfNothing(t *testing.T) {
	if err := Stop(t.Context(), Dir(t.TempDir(), "none")); err != nil {
		t.Error(err)
	}
}

func TestADirectoryThatGoesEndsTheHolder(t *testing.T) {
	dir := directory(t)
	h := hold(t, dir)
	if err := Remove(dir); err != nil {
		t.Fatal(err)
	}
	if err := h.Await(t.Context()); !errors.Is(err, ErrGone) {
		t.Errorf("await: %v", err)
	}
	// Made again at once, as by an agent that wants another daemon of this name.
	if err := Make(dir); err != nil {
		t.Fatal(err)
	}
	next := hold(t, dir)
	defer next.Release()
	if err := h.ended(); !errors.Is(err, ErrGone) {
		t.Errorf("ended: %v", err)
	}
	if _, err := Hold(t.Context(), filepath.Join(dir, "gone")); !errors.Is(err, ErrGone) {
		t.Errorf("hold of nothing: %v", err)
	}
}

// Clients can write to the pipe directory: deeper than there are descriptors, and than a path can be.
func TestRemoveWhatClientsLeave(t *testing.T) {
	dir := directory(t)
	const depth = 3000
	if err := os.Mkdir(filepath.Join(dir, PipeDir), 0o755); err != nil {
		t.Fatal(err)
	}
	at, err := unix.Open(filepath.Join(dir, PipeDir), unix.O_RDONLY|unix.O_DIRECTORY, 0)
	for range depth {
		for _, name := range []string{"deep", "beside"} {
			if err == nil {
				err = unix.Mkdirat(at, name, 0o700)
			}
		}
		if err == nil {
			err = unix.Mkdirat(at, "beside/below", 0o700)
		}
		var next int
		if err == nil {
			next, err = unix.Openat(at, "deep", unix.O_RDONLY|unix.O_DIRECTORY, 0)
		}
		if err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(at)
		at = next
	}
	_ = unix.Close(at)
	outside := filepath.Join(t.TempDir(), "outside")
	for _, err := range []error{
		os.WriteFile(outside, nil, 0o600), os.Symlink(filepath.Dir(outside), filepath.Join(dir, PipeDir, "link")),
		// Left by an attempt that failed.
		os.MkdirAll(filepath.Join(dir, ".removed-1", "x", "y"), 0o700), os.WriteFile(filepath.Join(dir, ".removed-2"), nil, 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	few := unix.Rlimit{Cur: 64, Max: before.Max}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	// One attempt is enough, though on a busy machine not within Remove's time limit.
	err = remove(dir, time.Minute)
	if limitErr := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); err != nil || limitErr != nil {
		t.Fatal(err, limitErr)
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("it is there: %v", err)
	}
	if _, err := os.Stat(outside); err != nil {
		t.Errorf("a link was followed: %v", err)
	}
	for range 2 {
		if err := Remove(dir); err != nil {
			t.Error(err)
		}
	}
	// Not what the agent makes.
	for _, err := range []error{os.WriteFile(dir, nil, 0o600), Remove(dir), os.Symlink(filepath.Dir(outside), dir), Remove(dir)} {
		if err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Lstat(dir); !os.IsNotExist(err) {
		t.Errorf("it is there: %v", err)
	}
}

func TestHashTellsSettingsApart(t *testing.T) {
	percent := int32(50)
	one := Settings{Devices: []string{"GPU-1", "GPU-2"}, DriverRoot: "/"}
	seen := map[string]int{}
	for i, s := range []Settings{
		one,
		{Devices: []string{"GPU-2", "GPU-1"}, DriverRoot: "/"},
		{Devices: one.Devices, DriverRoot: "/run/nvidia/driver"},
		{Devices: one.Devices, DriverRoot: "/", MultiUser: true},
		{Devices: one.Devices, DriverRoot: "/", ActiveThreadPercentage: &percent},
		{Devices: one.Devices, DriverRoot: "/", PinnedMemoryMiB: []int64{0, 512}},
		{Devices: one.Devices, DriverRoot: "/", PinnedMemoryMiB: []int64{512}},
		{Devices: one.Devices, DriverRoot: "/", Generation: 1},
	} {
		if err := s.Validate(); err != nil {
			t.Errorf("%d: %v", i, err)
		}
		if other, ok := seen[s.Hash()]; ok {
			t.Errorf("%d has the hash of %d", i, other)
		}
		seen[s.Hash()] = i
		text, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		var back Settings
		if err := json.Unmarshal(text, &back); err != nil || back.Hash() != s.Hash() {
			t.Errorf("%d does not survive the journey: %v", i, err)
		}
	}
}

// Daemons keep running over an upgrade from a version that had no generations: without one the hash is that version's.
func TestHashOfAVersionWithoutGenerations(t *testing.T) {
	s := Settings{Devices: []string{"GPU-1"}, DriverRoot: "/"}
	sum := sha256.Sum256([]byte(`{"devices":["GPU-1"],"driverRoot":"/"}`))
	if got, want := s.Hash(), hex.EncodeToString(sum[:8]); got != want {
		t.Errorf("hash %s, want %s", got, want)
	}
}

func TestValidate(t *testing.T) {
	percent := int32(101)
	for want, s := range map[string]Settings{
		"no devices": {DriverRoot: "/"},
		"active thread percentage 101: not from 0 to 100":  {Devices: []string{"a"}, DriverRoot: "/", ActiveThreadPercentage: &percent},
		"memory limits of 2 devices, of which there are 1": {Devices: []string{"a"}, DriverRoot: "/", PinnedMemoryMiB: []int64{1, 1}},
		"memory limit of device 0: -1 MiB":                 {Devices: []string{"a"}, DriverRoot: "/", PinnedMemoryMiB: []int64{-1}},
		`driver root "/run/..": not a clean absolute path`: {Devices: []string{"a"}, DriverRoot: "/run/.."},
	} {
		if err := s.Validate(); err == nil || err.Error() != want {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}
