// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"context"
	"crypto/rand"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

//go:embed setup.sh
var setupScript string

//go:embed setup-cgroup.sh
var setupCgroupScript string

// joinGroup, run by a shell in a machine, moves it from the starter's cgroups to the machine's, enters the machine's cgroup
// namespace, and becomes the command. In this order, because a process inside the namespace cannot join a cgroup of v2.
const joinGroup = `for procs in /sys/fs/cgroup/system/cgroup.procs /sys/fs/cgroup/*/system/cgroup.procs; do ` +
	`[ ! -e "$procs" ] || echo 0 > "$procs" || exit 126; done; exec nsenter --cgroup=/proc/1/ns/cgroup -- "$@"`

// machine is one set of namespaces, kept by a holder process that is PID 1 in it: when that ends, the kernel ends
// everything on the machine and takes its mounts and interfaces apart.
type machine struct {
	name string
	// dir holds the machine's state; rootfs below it is its disk and survives a reboot.
	dir    string
	group  string
	pause  string
	mounts []Mount
	// runOptions are further ones of the mount at /run, each after a comma.
	runOptions string
	env        []string
}

// machineState is what is on disk about a running machine.
type machineState struct {
	Holder process `json:"holder"`
	BootID string  `json:"bootID"`
}

var errDown = errors.New("machine is down")

func (m *machine) rootfs() string        { return filepath.Join(m.dir, "rootfs") }
func (m *machine) stateFile() string     { return filepath.Join(m.dir, "machine.json") }
func (m *machine) path(in string) string { return filepath.Join(m.rootfs(), in) }

func (m *machine) state() (machineState, error) {
	var state machineState
	err := readJSON(m.stateFile(), &state)
	if errors.Is(err, fs.ErrNotExist) {
		return machineState{}, fmt.Errorf("%s: %w", m.name, errDown)
	}
	return state, err
}

// holder answers the running machine's first process.
func (m *machine) holder() (process, error) {
	state, err := m.state()
	if err != nil {
		return process{}, err
	}
	if !state.Holder.alive() {
		return process{}, fmt.Errorf("%s: %w", m.name, errDown)
	}
	return state.Holder, nil
}

// boot creates the machine's namespaces. Its disk must exist.
func (m *machine) boot() error {
	if err := makeCgroup(m.group); err != nil {
		return fmt.Errorf("boot %s: %w", m.name, err)
	}
	env, bootID, err := m.setupEnvironment()
	if err != nil {
		return fmt.Errorf("boot %s: %w", m.name, err)
	}
	if err := m.startHolder(env, bootID); err != nil {
		return fmt.Errorf("boot %s: %w", m.name, err)
	}
	return nil
}

// startHolder runs the set-up scripts and returns when they have become the pause program.
func (m *machine) startHolder(env []string, bootID string) error {
	if err := keepFiles(); err != nil {
		return err
	}
	var output bytes.Buffer
	ready, readyWriter, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make pipe: %w", err)
	}
	defer ready.Close()
	cmd := exec.Command("/bin/sh", "-c", setupScript)
	cmd.Env = env
	cmd.Stderr = &output
	cmd.ExtraFiles = []*os.File{readyWriter}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true,
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
	}
	begin, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	readyWriter.Close()
	if err != nil {
		return fmt.Errorf("start first process: %w", err)
	}
	// Collects the process whenever it ends; where this process ends first, the host's init does.
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()

	holder, err := identify(cmd.Process.Pid)
	if err == nil {
		err = writeJSON(m.stateFile(), machineState{Holder: holder, BootID: bootID})
	}
	if err == nil {
		_, err = io.WriteString(begin, "begin\n")
	}
	begin.Close()
	if err != nil {
		return errors.Join(fmt.Errorf("record first process: %w", err), cmd.Process.Kill())
	}
	if said, err := io.ReadAll(ready); err != nil || string(said) != "ready\n" {
		return fmt.Errorf("set up namespaces: %w: %s", errors.Join(err, <-ended), strings.TrimSpace(output.String()))
	}
	return nil
}

func (m *machine) setupEnvironment() (env []string, bootID string, err error) {
	found, err := hierarchies()
	if err != nil {
		return nil, "", err
	}
	var groups, mounts []string
	for _, h := range found {
		options := h.options
		if h.v2 {
			options = "v2"
		}
		groups = append(groups, h.dir+" "+options)
	}
	for _, mount := range m.mounts {
		mode := "rw"
		if mount.ReadOnly {
			mode = "ro"
		}
		mounts = append(mounts, mount.Source+" "+mount.Target+" "+mode)
	}
	trees, err := systemTrees()
	if err != nil {
		return nil, "", err
	}
	id := make([]byte, 16)
	rand.Read(id)
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80
	bootID = fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
	return []string{
		"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "NAME=" + m.name, "ROOT=" + m.rootfs(), "GROUP=" + m.group,
		"HIERARCHIES=" + strings.Join(groups, "\n"), "TREES=" + strings.Join(trees, " "),
		"MOUNTS=" + strings.Join(mounts, "\n"), "RUN_OPTIONS=" + m.runOptions, "BOOT_ID=" + bootID, "PAUSE=" + m.pause, "SECOND=" + setupCgroupScript,
	}, bootID, nil
}

// halt ends everything on the machine at once, as a power cut would. Its disk stays. It is idempotent.
func (m *machine) halt(ctx context.Context) error {
	state, err := m.state()
	if errors.Is(err, errDown) {
		return removeCgroup(ctx, m.group)
	}
	if err != nil {
		return err
	}
	// The kernel lets PID 1 of a namespace end only after every other process of it.
	if err := state.Holder.kill(ctx); err != nil {
		return fmt.Errorf("halt %s: %w", m.name, err)
	}
	if err := removeCgroup(ctx, m.group); err != nil {
		return fmt.Errorf("halt %s: %w", m.name, err)
	}
	if err := os.Remove(m.stateFile()); err != nil {
		return fmt.Errorf("halt %s: %w", m.name, err)
	}
	return nil
}

// command prepares a command that runs in all the machine's namespaces and in its cgroup. Cancelling the context ends it there.
func (m *machine) command(ctx context.Context, name string, args ...string) (*exec.Cmd, error) {
	holder, err := m.holder()
	if err != nil {
		return nil, err
	}
	all := []string{"--target", strconv.Itoa(holder.Pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--",
		"/bin/sh", "-c", joinGroup, "sh", name}
	cmd := exec.CommandContext(ctx, "nsenter", append(all, args...)...)
	cmd.Env = m.env
	// nsenter has to stay and wait for its child, so ending it alone would leave the child behind.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	return cmd, nil
}

// networkCommand prepares a command of the host that sees the machine's network.
func (m *machine) networkCommand(ctx context.Context, name string, args ...string) (*exec.Cmd, error) {
	holder, err := m.holder()
	if err != nil {
		return nil, err
	}
	all := []string{"--target", strconv.Itoa(holder.Pid), "--net", "--", name}
	return exec.CommandContext(ctx, "nsenter", append(all, args...)...), nil
}

// dial opens a connection as a process on the machine would.
func (m *machine) dial(ctx context.Context, network, address string) (net.Conn, error) {
	holder, err := m.holder()
	if err != nil {
		return nil, err
	}
	if network == "unix" {
		address = filepath.Join("/proc", strconv.Itoa(holder.Pid), "root", address)
	}
	return dialIn(ctx, holder, network, address)
}

// listen accepts connections as a process on the machine would.
func (m *machine) listen(ctx context.Context, network, address string) (net.Listener, error) {
	holder, err := m.holder()
	if err != nil {
		return nil, err
	}
	return listenIn(ctx, holder, network, address)
}

// run runs a command and puts its output into the error.
func run(cmd *exec.Cmd) error {
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
