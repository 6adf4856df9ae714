// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/tools/record"

	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/simulated/simnode"
)

func TestUninterruptible(t *testing.T) {
	dir := t.TempDir()
	for thread, status := range map[string]string{
		"7": "Name:\tkubelet-plugin\nState:\tD (disk sleep)\nvoluntary_ctxt_switches:\t42\n", "8": "Name:\tState: D\nState:\tS (sleeping)\n",
		"9": "State:\tR (running)\n", "10": "", "a": "State:\tD (disk sleep)\n",
	} {
		if err := os.Mkdir(filepath.Join(dir, thread), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, thread, "status"), []byte(status), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got, want := uninterruptible(dir), map[int]string{7: "42"}; !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := uninterruptible(filepath.Join(dir, "none")); len(got) > 0 {
		t.Errorf("without the directory: %v", got)
	}
}

// A thread waits in the kernel for a file system that does not answer, as for a driver that does not.
func TestStuckThreads(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skipped: mounting a file system needs root")
	}
	fuse, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("skipped: open /dev/fuse: %v", err)
	}
	dir := t.TempDir()
	if err := unix.Mount("tandem-test", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse)); err != nil {
		_ = unix.Close(fuse)
		t.Skipf("skipped: mount a FUSE file system: %v", err)
	}
	if got := stuckThreads(t.Context()); len(got) > 0 {
		t.Errorf("before: threads %v are stuck", got)
	}
	thread, ended := make(chan int, 1), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread()
		thread <- unix.Gettid()
		_, _ = os.Stat(filepath.Join(dir, "file"))
	}()
	asked := answerInit(t, fuse)
	stuck := <-thread
	<-asked
	// The first signal makes the wait uninterruptible (fs/fuse/dev.c, request_wait_answer).
	for late := time.Now().Add(10 * time.Second); !slices.Contains(stuckThreads(t.Context()), stuck); {
		if time.Now().After(late) {
			t.Errorf("thread %d is not reported", stuck)
			break
		}
		if err := unix.Tgkill(os.Getpid(), stuck, syscall.SIGURG); err != nil {
			t.Fatal(err)
		}
	}
	// Without its reader the connection ends, and with it the wait.
	if err := unix.Unmount(dir, unix.MNT_FORCE|unix.MNT_DETACH); err != nil {
		t.Error(err)
	}
	if err := unix.Close(fuse); err != nil {
		t.Error(err)
	}
	<-ended
}

// answerInit answers FUSE_INIT and no other request. asked is closed when another one was read.
func answerInit(t *testing.T, fuse int) (asked <-chan struct{}) {
	const initOpcode, headerSize, initSize = 26, 16, 64
	read := make(chan struct{})
	go func() {
		request := make([]byte, 1<<20)
		for {
			n, err := unix.Read(fuse, request)
			if err == unix.EINTR || err == unix.EAGAIN {
				continue
			}
			if err != nil || n < 16 {
				return
			}
			if binary.NativeEndian.Uint32(request[4:]) != initOpcode {
				close(read)
				return
			}
			answer := make([]byte, headerSize+initSize)
			binary.NativeEndian.PutUint32(answer, uint32(len(answer)))
			copy(answer[8:16], request[8:16])
			binary.NativeEndian.PutUint32(answer[headerSize:], 7)
			binary.NativeEndian.PutUint32(answer[headerSize+4:], 31)
			binary.NativeEndian.PutUint32(answer[headerSize+20:], 4096)
			if _, err := unix.Write(fuse, answer); err != nil {
				t.Errorf("answer FUSE_INIT: %v", err)
				return
			}
		}
	}()
	return read
}

// unless calls f, or returns an error while the condition is true.
func unless[T any](condition *atomic.Bool, err error, f func() (T, error)) func() (T, error) {
	return func() (T, error) {
		if condition.Load() {
			return *new(T), err
		}
		return f()
	}
}

// A package upgrade replaces the driver's library while a call of the agent hangs in the driver. execve would not return, so the agent goes on.
func TestDriverReplacedWhileACallHangs(t *testing.T) {
	c := nodeConfig(t)
	machine := simulatedMachine(t, &c)
	a, err := newAgent(c)
	if err != nil {
		t.Fatal(err)
	}
	var replaced atomic.Bool
	a.openDriver = func(o nvml.Options, seed string) nvml.Options {
		o = simnode.Options(o, seed)
		o.OpenLibrary = unless(&replaced, nvml.ErrDriverReplaced, o.OpenLibrary)
		return o
	}
	a.stuck = func(context.Context) []int { return []int{7} }
	running := runAgent(t, a)
	running.await("the API server has not listed this node's pods yet")
	replaced.Store(true)
	if err := os.Remove(filepath.Join(machine, "driver/dev/nvidia3")); err != nil {
		t.Fatal(err)
	}
	for event := ""; !strings.Contains(event, "Warning RestartPostponed"); {
		select {
		case event = <-running.events.Events:
		case err := <-running.done:
			t.Fatalf("the agent ended to be started again: %v", err)
		case <-time.After(time.Minute):
			t.Fatal("no event")
		}
	}
	running.stop()
}

// Nothing reads the GPUs while the restart waits.
func TestNoDeviceBeforeTheRestart(t *testing.T) {
	book, err := ledger.Open(t.Context(), ledger.Options{Dir: t.TempDir(), BootID: "boot", PodStates: anything{}})
	if err != nil {
		t.Fatal(err)
	}
	defer book.Close()
	synctest.Test(t, func(t *testing.T) {
		var returned atomic.Bool
		a := &Agent{recorder: record.NewFakeRecorder(2), stuck: func(context.Context) []int {
			if returned.Load() {
				return nil
			}
			return []int{7}
		}}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		errs := make(chan error, 1)
		wait := func() { go func() { errs <- a.whenCallsReturn(ctx, book, nvml.ErrDriverReplaced) }(); synctest.Wait() }
		wait()
		if err := book.Withheld(); err == nil || !strings.Contains(err.Error(), "does not return") {
			t.Errorf("withheld: %v", err)
		}
		returned.Store(true)
		if err := <-errs; !errors.Is(err, nvml.ErrDriverReplaced) {
			t.Errorf("once the call has returned: %v", err)
		}
		returned.Store(false)
		wait()
		cancel()
		if err := <-errs; err != nil {
			t.Errorf("stopped: %v", err)
		}
	})
}
