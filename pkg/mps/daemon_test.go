// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bufio"
	"context"
	"encoding/json"
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

	"github.com/tandem-gpu/tandem/simulated/simdriver"
)

// patience bounds every wait. A test that needs it has failed.
const patience = time.Minute

// shortGrace is for tests in which a daemon does not answer or end.
const shortGrace = 2 * time.Second

// rig is a driver root with the simulated programs, and a daemon's directory.
type rig struct{ daemon Daemon }

func newRig(t *testing.T) rig {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("a driver's program is run chrooted, which needs root")
	}
	root := t.TempDir()
	simdriver.Install(t, root)
	percent := int32(40)
	return rig{Daemon{
		Settings: Settings{
			Devices: []string{"GPU-a", "GPU-b"}, ActiveThreadPercentage: &percent, PinnedMemoryMiB: []int64{0, 512}, DriverRoot: "/run/nvidia/driver",
		},
		Dir: directory(t), Root: root, PipeDir: ClientPipeDir, LogDir: ClientLogDir, Mounts: root, Volumes: "/pods/uid", Pod: "uid",
		Grace: patience / 3,
	}}
}

// run runs the daemon until stop is called, which returns how it ended; the test does so at its end.
func (r rig) run(t *testing.T) (ended <-chan error, stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	result, again := make(chan error, 1), make(chan error, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		err := r.daemon.Run(ctx)
		result <- err
		again <- err
	}()
	t.Cleanup(func() { cancel(); <-done })
	return result, func() error { cancel(); return <-again }
}

func (r rig) await(t *testing.T) Ready {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	ready, err := Await(ctx, r.daemon.Dir, r.daemon.Settings.Hash())
	if err != nil {
		t.Fatal(err)
	}
	return ready
}

func (r rig) fault(t *testing.T, text string) {
	t.Helper()
	simdriver.Fault(t, r.daemon.Root, text)
}

// client is what a container runs that uses the daemon.
func (r rig) client(args ...string) *exec.Cmd {
	cmd := exec.Command(simdriver.MPSControl, append([]string{"client"}, args...)...)
	cmd.Env, cmd.Dir = []string{"CUDA_MPS_PIPE_DIRECTORY=" + ClientPipeDir}, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: r.daemon.Root}
	return cmd
}

// hold starts a client that stays until it loses its daemon.
func (r rig) hold(t *testing.T) *exec.Cmd {
	t.Helper()
	held := r.client("hold")
	out, err := held.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := held.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = held.Process.Kill() })
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("client: %s, %v", line, err)
	}
	return held
}

// pid of the control daemon; 0 where it has none.
func (r rig) pid(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(r.daemon.Root, ClientPipeDir, "nvidia-cuda-mps-control.pid"))
	if errors.Is(err, os.ErrNotExist) {
		return 0
	}
	pid, parseErr := strconv.Atoi(strings.TrimSpace(string(text)))
	if err := errors.Join(err, parseErr); err != nil {
		t.Fatal(err)
	}
	return pid
}

func (r rig) checkDown(t *testing.T) {
	t.Helper()
	if _, is := alive(t, r.daemon.Dir); is {
		t.Error("the daemon is called ready")
	}
	// A process that another test is about to start has all open files for a moment, and with them the lock.
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		held, err := Held(r.daemon.Dir)
		if err == nil && !held {
			return
		}
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("the directory is held: %t, %v", held, err)
		}
	}
}

func gone(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		// A process that is dead and was not waited for still has a number, but no program.
		if _, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err != nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("process %d lives on", pid)
		}
	}
}

func TestADaemonIsReadyWithItsSettings(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	_, stop := r.run(t)
	if ready := r.await(t); ready.Pod != "uid" {
		t.Errorf("ready: %+v", ready)
	}
	out, err := r.client().CombinedOutput()
	if want := "Active threads: 40.0 %\nGPU-a: no limit\nGPU-b: limited to 512 MiB by the daemon\n"; err != nil || !strings.HasSuffix(string(out), want) {
		t.Errorf("client: %v %s", err, out)
	}
	for _, name := range []string{PipeDir, LogDir, ShmLink} {
		if target, err := os.Readlink(filepath.Join(r.daemon.Dir, name)); err != nil || target != "/pods/uid/"+name {
			t.Errorf("%s: %s, %v", name, target, err)
		}
	}
	if err := errors.Join(r.daemon.Ready(), r.daemon.Answers(t.Context())); err != nil {
		t.Errorf("probes: %v", err)
	}
	before := r.daemon
	before.Pod = "that of before"
	if err := before.Ready(); err == nil {
		t.Error("a pod that ends is ready by the daemon of the next")
	}
	server := r.tell(t, "get_server_list")
	if err := stop(); err != nil {
		t.Errorf("end: %v", err)
	}
	r.checkDown(t)
	if pid := r.pid(t); pid != 0 {
		t.Errorf("daemon %d was not told to quit", pid)
	}
	number, err := strconv.Atoi(server)
	if err != nil {
		t.Fatal(err)
	}
	gone(t, number)
}

// Clients of before come as soon as a daemon listens that was started anew, and may come before it was told anything.
func TestNoClientBeforeTheSettings(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.daemon.Grace = shortGrace
	r.fault(t, "mute")
	_, _ = r.run(t)
	var out []byte
	err := errors.New("no daemon")
	for deadline := time.Now().Add(patience); err != nil && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		out, err = r.client().CombinedOutput()
	}
	if want := "Active threads: 40.0 %\nGPU-a: no limit\nGPU-b: limited to 512 MiB by the daemon\n"; err != nil || !strings.HasSuffix(string(out), want) {
		t.Errorf("client: %v %s", err, out)
	}
	if _, is := alive(t, r.daemon.Dir); is {
		t.Error("a daemon that does not answer is called ready")
	}
}

func (r rig) tell(t *testing.T, line string) string {
	t.Helper()
	p, err := r.daemon.findProgram()
	if err != nil {
		t.Fatal(err)
	}
	p.timeout = patience
	text, err := p.tell(t.Context(), line)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func TestADaemonThatDiesIsAnError(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	ended, _ := r.run(t)
	r.await(t)
	if err := syscall.Kill(r.pid(t), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil || !strings.Contains(err.Error(), "ended by itself: signal: killed") {
		t.Errorf("end: %v", err)
	}
	r.checkDown(t)
	// A restarted supervisor gets a daemon from what is left.
	r.run(t)
	r.await(t)
}

// TestADaemonDiesWithItsSupervisor kills the supervisor: nothing of the daemon is left, and it does not count as ready.
func TestADaemonDiesWithItsSupervisor(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	supervisor := exec.Command(os.Args[0])
	text, err := json.Marshal(r.daemon)
	if err != nil {
		t.Fatal(err)
	}
	supervisor.Env = append(os.Environ(), superviseFor+"="+string(text))
	if err := supervisor.Start(); err != nil {
		t.Fatal(err)
	}
	r.await(t)
	if out, err := r.client().CombinedOutput(); err != nil {
		t.Fatalf("client: %v %s", err, out)
	}
	pid := r.pid(t)
	if err := supervisor.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = supervisor.Wait()
	if _, is := alive(t, r.daemon.Dir); is {
		t.Error("the daemon is called ready")
	}
	gone(t, pid)
	r.run(t)
	r.await(t)
}

// superviseFor has this program run the daemon that the variable describes.
const superviseFor = "TEST_SUPERVISE_FOR"

func supervise(text string) error {
	var d Daemon
	if err := json.Unmarshal([]byte(text), &d); err != nil {
		return err
	}
	return d.Run(context.Background())
}

func TestTheAgentStopsADaemonAndStartsItAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	ended, _ := r.run(t)
	r.await(t)
	pid := r.pid(t)
	if err := Stop(t.Context(), r.daemon.Dir); err != nil {
		t.Fatal(err)
	}
	gone(t, pid)
	r.checkDown(t)
	if err := r.daemon.Answers(t.Context()); err != nil {
		t.Errorf("a stopped daemon is unwell: %v", err)
	}
	if err := Make(r.daemon.Dir); err != nil {
		t.Fatal(err)
	}
	r.await(t)
	pid = r.pid(t)
	if err := Remove(r.daemon.Dir); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("end: %v", err)
	}
	gone(t, pid)
}

func TestAnotherSupervisorWaits(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	_, stop := r.run(t)
	r.await(t)
	next := r
	next.daemon.Pod = "next"
	next.run(t)
	if ready := r.await(t); ready.Pod != "uid" {
		t.Errorf("ready: %+v", ready)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if ready := r.await(t); ready.Pod != "next" {
		t.Errorf("ready: %+v", ready)
	}
}

func TestADaemonThatDoesNotStart(t *testing.T) {
	t.Parallel()
	for word, want := range map[string]string{
		simdriver.Fail + " cannot open /dev/nvidiactl": "ended by itself: exit status 1: cannot open /dev/nvidiactl",
		simdriver.Hang: "Cannot find MPS control daemon process",
		simdriver.Mute: `send the MPS daemon "get_default_active_thread_percentage": no answer after 2s`,
	} {
		t.Run(strings.Fields(word)[0], func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.daemon.Grace = shortGrace
			r.fault(t, word)
			ended, _ := r.run(t)
			if err := <-ended; err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("end: %v", err)
			}
			r.checkDown(t)
		})
	}
	t.Run("no driver", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		r.daemon.Root = t.TempDir()
		ended, _ := r.run(t)
		if err := <-ended; err == nil || !strings.Contains(err.Error(), "find nvidia-cuda-mps-control") {
			t.Errorf("end: %v", err)
		}
	})
	t.Run("no settings", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		r.daemon.Settings.Devices = nil
		if err := r.daemon.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "no devices") {
			t.Errorf("end: %v", err)
		}
	})
}

// quit returns only when the last client is gone, so a daemon with a client ends by SIGTERM.
func TestADaemonWithAClientEnds(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.daemon.Grace = 3 * time.Second // a busy machine may need a part of it to look
	_, stop := r.run(t)
	r.await(t)
	held := r.hold(t)
	pid, start := r.pid(t), time.Now()
	stopped := make(chan error, 1)
	go func() { stopped <- stop() }()
	for _, is := alive(t, r.daemon.Dir); is; _, is = alive(t, r.daemon.Dir) {
		time.Sleep(time.Millisecond)
	}
	if r.pid(t) == 0 {
		t.Error("the daemon was called ready until it had ended")
	}
	if err := <-stopped; err != nil {
		t.Errorf("end: %v", err)
	}
	if took := time.Since(start); took < r.daemon.Grace {
		t.Errorf("quit did not wait for the client: the daemon has ended after %s", took)
	}
	r.checkDown(t)
	// A daemon that is killed leaves its file.
	if left := r.pid(t); left != 0 {
		t.Errorf("daemon %d was killed", left)
	}
	gone(t, pid)
	if err := held.Wait(); err == nil {
		t.Error("the client lives on without its daemon")
	}
}

func TestADaemonThatWillNotEndIsKilled(t *testing.T) {
	t.Parallel()
	for _, word := range []string{simdriver.Stubborn, simdriver.Mute} {
		t.Run(word, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.daemon.Grace = shortGrace
			_, stop := r.run(t)
			r.await(t)
			held := r.hold(t)
			pid, server := r.pid(t), r.tell(t, "get_server_list")
			r.fault(t, word)
			if word == simdriver.Mute {
				if err := r.daemon.Answers(t.Context()); err == nil {
					t.Error("a daemon that does not answer is well")
				}
			}
			if err := stop(); err != nil {
				t.Errorf("end: %v", err)
			}
			r.checkDown(t)
			gone(t, pid)
			number, err := strconv.Atoi(server)
			if err != nil {
				t.Fatal(err)
			}
			gone(t, number)
			if err := held.Wait(); err == nil {
				t.Error("the client has lost nothing")
			}
		})
	}
}

// TestWhereTheProgramRuns: with the driver root as its root, if the loader that it needs is there.
func TestWhereTheProgramRuns(t *testing.T) {
	dynamic, err := exec.LookPath("ls")
	if err != nil {
		t.Skip("there is no dynamic program here")
	}
	loader, err := interpreter(dynamic)
	if err != nil || loader == "" {
		t.Skipf("%s needs no loader: %v", dynamic, err)
	}
	root := t.TempDir()
	put := func(path string) {
		t.Helper()
		data, err := os.ReadFile(dynamic)
		path = filepath.Join(root, path)
		if err := errors.Join(err, os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, data, 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	put("bin/" + controlProgram)
	put("lib64/libcuda.so.1")
	d := Daemon{Root: root, PipeDir: "/pipe", LogDir: "/log", Settings: Settings{Devices: []string{"a", "b"}}}
	p, err := d.findProgram()
	if err != nil || p.chroot != "" || p.path != filepath.Join(root, "bin", controlProgram) ||
		!slices.Contains(p.env, "LD_LIBRARY_PATH="+filepath.Join(root, "lib64")) || !slices.Contains(p.env, "CUDA_VISIBLE_DEVICES=a,b") {
		t.Errorf("without a loader: %+v, %v", p, err)
	}
	put(loader)
	if p, err = d.findProgram(); err != nil || p.chroot != root || p.path != "/bin/"+controlProgram {
		t.Errorf("with a loader: %+v, %v", p, err)
	}
}

func TestFromEnvironment(t *testing.T) {
	t.Setenv(PodUIDEnv, "uid")
	t.Setenv(KubeletDirEnv, "/var/lib/kubelet")
	t.Setenv(SettingsEnv, `{"devices":["GPU-a"],"driverRoot":"/"}`)
	d, err := FromEnvironment()
	if err != nil || d.Volumes != "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~empty-dir" || d.Settings.Validate() != nil || d.Dir != PodDir {
		t.Errorf("%+v, %v", d, err)
	}
	t.Setenv(SettingsEnv, "{")
	if _, err := FromEnvironment(); err == nil || !strings.Contains(err.Error(), SettingsEnv) {
		t.Errorf("settings that are none: %v", err)
	}
	t.Setenv(PodUIDEnv, "")
	if _, err := FromEnvironment(); err == nil || !strings.Contains(err.Error(), PodUIDEnv) {
		t.Errorf("no pod: %v", err)
	}
}

// TestEndlessAnswer: a client that is root and answers in the daemon's place does not fill the supervisor's memory.
func TestEndlessAnswer(t *testing.T) {
	t.Parallel()
	script := filepath.Join(t.TempDir(), "endless")
	if err := os.WriteFile(script, []byte("#!/bin/sh\nexec yes 0123456789\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	text, err := program{path: script, env: os.Environ(), timeout: patience}.tell(t.Context(), "get_server_list")
	if err == nil || !strings.Contains(err.Error(), "the answer is longer than 65536 bytes") || len(err.Error()) > 2*longestQuote || text != "" {
		t.Errorf("%d bytes, %v", len(text), err)
	}
}
