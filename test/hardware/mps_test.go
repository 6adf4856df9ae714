// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// mpsControl is the driver's MPS control daemon for the first GPU, outside of any container.
type mpsControl struct {
	bench   *bench
	program string
	dir     string
	daemon  *exec.Cmd
	ended   chan error
}

func newMPS(t *testing.T, b *bench) *mpsControl {
	t.Helper()
	program := filepath.Join(filepath.Dir(filepath.Join(b.options.HostRoot, b.report.Layout.SMI)), "nvidia-cuda-mps-control")
	if _, err := os.Stat(program); err != nil || b.report.Layout.SMI == "" {
		t.Skipf("the driver has no MPS: %v", err)
	}
	// Short, because sockets are in it; and open to the other users.
	dir, err := os.MkdirTemp("/tmp", "mps-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	return &mpsControl{bench: b, program: program, dir: dir}
}

func (m *mpsControl) environment(cmd *exec.Cmd) *exec.Cmd {
	cmd.Env = append(cmd.Env, "CUDA_MPS_PIPE_DIRECTORY="+m.dir, "CUDA_MPS_LOG_DIRECTORY="+m.dir)
	return cmd
}

// start runs the daemon in the foreground, as Tandem does, and waits until it answers.
func (m *mpsControl) start(t *testing.T) {
	t.Helper()
	m.daemon = m.environment(m.bench.command(context.WithoutCancel(t.Context()), m.program, "-f", "-multiuser-server"))
	m.daemon.Env = append(m.daemon.Env, "CUDA_VISIBLE_DEVICES="+m.bench.first().UUID)
	var output bytes.Buffer
	m.daemon.Stdout, m.daemon.Stderr = &output, &output
	m.daemon.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := m.daemon.Start(); err != nil {
		t.Fatal(err)
	}
	daemon, ended := m.daemon, make(chan error, 1)
	m.ended = ended
	go func() { ended <- daemon.Wait() }()
	t.Cleanup(func() { _ = syscall.Kill(-daemon.Process.Pid, syscall.SIGKILL) })
	deadline := time.After(30 * time.Second)
	for {
		out, err := m.command(t, "get_server_list", 10*time.Second)
		if err == nil {
			return
		}
		select {
		case err := <-ended:
			t.Skipf("the MPS daemon does not run here: %v: %s", err, output.Bytes())
		case <-deadline:
			t.Fatalf("the MPS daemon does not answer: %v: %s", err, out)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (m *mpsControl) command(t *testing.T, command string, limit time.Duration) ([]byte, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	cmd := m.environment(m.bench.command(ctx, m.program))
	cmd.Stdin = strings.NewReader(command + "\n")
	return cmd.CombinedOutput()
}

// client runs a CUDA program as a user, with a memory limit if there is one.
func (m *mpsControl) client(t *testing.T, uid uint32, limit string, args ...string) ([]byte, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	return m.newClient(ctx, uid, limit, args...).CombinedOutput()
}

func (m *mpsControl) newClient(ctx context.Context, uid uint32, limit string, args ...string) *exec.Cmd {
	cmd := m.environment(m.bench.command(ctx, "cuda", args...))
	if limit != "" {
		cmd.Env = append(cmd.Env, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="+limit)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	return cmd
}

// quitWithClient finds out how the daemon ends while a client uses it: the client must not keep it for ever.
func (m *mpsControl) quitWithClient(t *testing.T) {
	t.Helper()
	client := m.newClient(context.WithoutCancel(t.Context()), 1000, "", "hold")
	input, err := client.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	output, err := client.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := client.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Process.Kill() })
	buffer, seen := make([]byte, 4096), ""
	for !strings.Contains(seen, "holding") {
		n, err := output.Read(buffer)
		if err != nil {
			t.Fatalf("the client ended: %v: %s", err, seen)
		}
		seen += string(buffer[:n])
	}
	start := time.Now()
	out, err := m.command(t, "quit", 15*time.Second)
	t.Logf("quit with a client: %v after %s: %s", err, time.Since(start), bytes.TrimSpace(out))
	select {
	case err := <-m.ended:
		t.Logf("the daemon ended with a client: %v after %s", err, time.Since(start))
		m.ended <- err
	case <-time.After(5 * time.Second):
		t.Log("the daemon lives on with its client")
	}
	_ = input.Close()
	t.Logf("the client ends: %v", client.Wait())
	m.await(t)
}

func (m *mpsControl) quit(t *testing.T) {
	t.Helper()
	if out, err := m.command(t, "quit", 15*time.Second); err != nil {
		t.Errorf("quit: %v: %s", err, out)
	}
	m.await(t)
}

// await waits for the daemon's end, and ends it as Tandem would if it does not.
func (m *mpsControl) await(t *testing.T) {
	t.Helper()
	select {
	case <-m.ended:
	case <-time.After(30 * time.Second):
		t.Error("the daemon has not ended 30 s after quit and its last client")
		_ = syscall.Kill(-m.daemon.Process.Pid, syscall.SIGKILL)
		<-m.ended
	}
}
