// SPDX-License-Identifier: Apache-2.0

package programs_test

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/simulated/programs"
	"github.com/tandem-gpu/tandem/simulated/simdriver"
)

// rig is a driver root with the programs, and the directories of one daemon.
type rig struct {
	root, pipe, log string
}

func newRig(t *testing.T) rig {
	t.Helper()
	// Paths of sockets are short.
	root, err := os.MkdirTemp("", "mps")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	simdriver.Install(t, root)
	return rig{root: root, pipe: filepath.Join(root, "pipe"), log: filepath.Join(root, "log")}
}

func (r rig) command(args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(r.root, programs.Dir, programs.MPSControl), args...)
	cmd.Env = []string{
		"CUDA_MPS_PIPE_DIRECTORY=" + r.pipe, "CUDA_MPS_LOG_DIRECTORY=" + r.log, "CUDA_VISIBLE_DEVICES=GPU-a,GPU-b",
	}
	return cmd
}

// start starts the daemon in the foreground, and returns when it takes commands.
func (r rig) start(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := r.command(append([]string{"-f"}, args...)...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("the daemon does not listen: %q, %v", line, err)
	}
	return cmd
}

// tell gives the daemon commands, a line each.
func (r rig) tell(t *testing.T, lines string) (string, int) {
	t.Helper()
	cmd := r.command()
	cmd.Stdin = strings.NewReader(lines)
	return outcome(t, cmd)
}

func outcome(t *testing.T, cmd *exec.Cmd) (string, int) {
	t.Helper()
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out)), cmd.ProcessState.ExitCode()
}

func (r rig) fault(t *testing.T, word string) {
	t.Helper()
	simdriver.Fault(t, r.root, word)
}

func TestDaemonTakesCommands(t *testing.T) {
	r := newRig(t)
	if out, code := r.tell(t, "get_server_list\n"); code != 1 || out != "Cannot find MPS control daemon process" {
		t.Errorf("without a daemon: %d %s", code, out)
	}
	daemon := r.start(t)
	for _, step := range []struct {
		lines, want string
		code        int
	}{
		{"get_default_active_thread_percentage", "100.0", 0},
		{"set_default_active_thread_percentage 50\nget_default_active_thread_percentage\n", "50.0\n50.0", 0},
		{"set_default_active_thread_percentage 101", "Invalid percentage: 101", 1},
		{"get_default_device_pinned_mem_limit 0", "", 0},
		{"set_default_device_pinned_mem_limit 0 512M\nget_default_device_pinned_mem_limit 0", "512M", 0},
		{"set_default_device_pinned_mem_limit 0 512", "Invalid memory limit: 512", 1},
		{"get_server_list", "", 0},
		{"make_coffee", "Unknown command: make_coffee", 1},
	} {
		if out, code := r.tell(t, step.lines); out != step.want || code != step.code {
			t.Errorf("%q: %d %q, want %d %q", step.lines, code, out, step.code, step.want)
		}
	}
	for _, name := range []string{"control", "control_privileged", "control_lock", "log", "nvidia-cuda-mps-control.pid"} {
		if _, err := os.Stat(filepath.Join(r.pipe, name)); err != nil {
			t.Error(err)
		}
	}
	if out, code := outcome(t, r.command("-f")); code != 1 || out != "An instance of this daemon is already running" {
		t.Errorf("a second daemon: %d %s", code, out)
	}
	if log, err := os.ReadFile(filepath.Join(r.log, "control.log")); err != nil || !strings.Contains(string(log), "Starting control daemon using socket") {
		t.Errorf("log %s, %v", log, err)
	}
	if _, code := r.tell(t, "quit"); code != 0 {
		t.Errorf("quit: %d", code)
	}
	if err := daemon.Wait(); err != nil {
		t.Errorf("end of the daemon: %v", err)
	}
	if _, err := os.Stat(filepath.Join(r.pipe, "nvidia-cuda-mps-control.pid")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("pid file: %v", err)
	}
	// What it left does not keep another from starting.
	r.start(t)
}

func TestClientsGetWhatTheDaemonSays(t *testing.T) {
	r := newRig(t)
	if out, code := outcome(t, r.command("client")); code != 1 || !strings.HasPrefix(out, "Not a client of MPS") {
		t.Errorf("without a daemon: %d %s", code, out)
	}
	daemon := r.start(t)
	r.tell(t, "set_default_device_pinned_mem_limit 0 1G\nset_default_active_thread_percentage 25\n")
	out, code := outcome(t, r.command("client"))
	if want := "Active threads: 25.0 %\nGPU-a: limited to 1024 MiB by the daemon\nGPU-b: no limit"; code != 0 || !strings.HasSuffix(out, want) {
		t.Errorf("client: %d %s", code, out)
	}
	// What was set after the server was started is for the next server.
	r.tell(t, "set_default_device_pinned_mem_limit 0 2G\n")
	own := r.command("client")
	own.Env = append(own.Env, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4G,1=256MB", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=90")
	out, code = outcome(t, own)
	if want := "Active threads: 25.0 %\nGPU-a: limited to 1024 MiB by the daemon\nGPU-b: limited to 256 MiB by the client"; code != 0 || !strings.HasSuffix(out, want) {
		t.Errorf("client with limits of its own: %d %s", code, out)
	}
	server, _ := r.tell(t, "get_server_list")
	held := r.command("client", "hold")
	lines, err := held.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := held.Start(); err != nil {
		t.Fatal(err)
	}
	reader := bufio.NewReader(lines)
	if line, err := reader.ReadString('\n'); err != nil || line != "Client of MPS server "+server+"\n" {
		t.Errorf("client: %q, %v", line, err)
	}
	// Who loses the daemon is told.
	if err := daemon.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := held.Wait(); err == nil {
		t.Error("the client lives on without its daemon")
	}
	// The server goes with its daemon.
	for {
		if _, err := os.Stat("/proc/" + server + "/exe"); err != nil {
			break
		}
	}
}

// hold starts a client that stays until leave, or until it loses its daemon.
func (r rig) hold(t *testing.T) (client *exec.Cmd, leave func()) {
	t.Helper()
	client = r.command("client", "hold")
	lines, err := client.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := client.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Process.Kill() })
	if line, err := bufio.NewReader(lines).ReadString('\n'); err != nil || !strings.HasPrefix(line, "Client of MPS server") {
		t.Fatalf("client: %q, %v", line, err)
	}
	return client, func() {
		_ = client.Process.Kill()
		_ = client.Wait()
	}
}

// quit starts the command in the background.
func (r rig) quit(t *testing.T, line string) (sender *exec.Cmd, ended <-chan error) {
	t.Helper()
	sender = r.command()
	sender.Stdin = strings.NewReader(line + "\n")
	if err := sender.Start(); err != nil {
		t.Fatal(err)
	}
	return sender, ends(sender)
}

func ends(cmd *exec.Cmd) <-chan error {
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	return ended
}

// within returns how a program has ended.
func within(t *testing.T, what string, ended <-chan error) error {
	t.Helper()
	select {
	case err := <-ended:
		return err
	case <-time.After(20 * time.Second):
		t.Fatalf("%s does not end", what)
		return nil
	}
}

func TestQuitAwaitsTheClients(t *testing.T) {
	for _, killed := range []bool{false, true} {
		t.Run(fmt.Sprintf("sender killed %t", killed), func(t *testing.T) {
			r := newRig(t)
			daemon := ends(r.start(t))
			_, leave := r.hold(t)
			sender, answered := r.quit(t, "quit")
			// New clients are refused from when the daemon has the command.
			for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
				out, code := outcome(t, r.command("client"))
				if code != 0 && strings.Contains(out, "quits") {
					break
				}
				if time.Now().After(deadline) {
					t.Fatalf("a daemon that quits answers a new client: %d %s", code, out)
				}
			}
			select {
			case err := <-answered:
				t.Errorf("quit returned beside a client: %v", err)
			default:
			}
			if killed {
				_ = sender.Process.Kill()
				_ = within(t, "quit", answered)
			}
			leave()
			if err := within(t, "the daemon", daemon); err != nil {
				t.Errorf("end of the daemon: %v", err)
			}
			if !killed {
				if err := within(t, "quit", answered); err != nil {
					t.Errorf("quit: %v", err)
				}
			}
		})
	}
}

func TestQuitWithALimit(t *testing.T) {
	r := newRig(t)
	daemon := ends(r.start(t))
	client, _ := r.hold(t)
	for _, wrong := range []string{"quit -t", "quit -t x", "quit -t 0", "quit now"} {
		if out, code := r.tell(t, wrong); code != 1 {
			t.Errorf("%s: %d %s", wrong, code, out)
		}
	}
	start := time.Now()
	_, answered := r.quit(t, "quit -t 1")
	if err := within(t, "quit", answered); err != nil {
		t.Errorf("quit: %v", err)
	}
	if took := time.Since(start); took < time.Second {
		t.Errorf("it waited %s for its clients", took)
	}
	if err := within(t, "the daemon", daemon); err != nil {
		t.Errorf("end of the daemon: %v", err)
	}
	if err := within(t, "the client", ends(client)); err == nil {
		t.Error("the client lives on without its daemon")
	}
}

func TestFaultsOfTheDaemon(t *testing.T) {
	r := newRig(t)
	r.fault(t, programs.FaultFail+" no device")
	if out, code := outcome(t, r.command("-f")); code != 1 || out != "no device" {
		t.Errorf("fail: %d %s", code, out)
	}
	if out, code := outcome(t, r.command("-d")); code != 1 || out != "no device" {
		t.Errorf("fail in the background: %d %s", code, out)
	}
	r.fault(t, "")
	if out, code := outcome(t, r.command("-d")); code != 0 {
		t.Fatalf("in the background: %d %s", code, out)
	}
	r.fault(t, programs.FaultStubborn)
	r.tell(t, "quit")
	if out, code := r.tell(t, "get_default_active_thread_percentage"); code != 0 || out != "100.0" {
		t.Errorf("stubborn: %d %s", code, out)
	}
	r.fault(t, programs.FaultMute)
	mute := r.command()
	mute.Stdin = strings.NewReader("get_server_list\n")
	if err := mute.Start(); err != nil {
		t.Fatal(err)
	}
	r.fault(t, "")
	if _, code := r.tell(t, "quit -t 1"); code != 0 {
		t.Errorf("quit: %d", code)
	}
	_ = mute.Wait()
}
