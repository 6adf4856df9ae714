// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/driverroot"
)

// controlProgram is both the daemon and what commands are given to it with.
const controlProgram = "nvidia-cuda-mps-control"

// program is the driver's own, as it is to be run.
type program struct {
	// path is in the root where chroot is set, and as this process sees it otherwise.
	path, chroot string
	env          []string
	// patience is how long the daemon may take for a command.
	patience time.Duration
}

// findProgram finds nvidia-cuda-mps-control. It is run with the driver root as its root, where its C library is; a driver root without
// one (GKE's cos-gpu-installer) leaves it to find the driver's libraries there and the C library here.
func (d Daemon) findProgram() (program, error) {
	path, err := driverroot.Find(d.Root, controlProgram)
	if err != nil {
		return program{}, err
	}
	p := program{path: path, chroot: d.Root, patience: d.Grace, env: []string{
		"CUDA_VISIBLE_DEVICES=" + strings.Join(d.Settings.Devices, ","),
		"CUDA_MPS_PIPE_DIRECTORY=" + d.PipeDir,
		"CUDA_MPS_LOG_DIRECTORY=" + d.LogDir,
		"LC_ALL=C",
	}}
	switch loader, err := interpreter(filepath.Join(d.Root, path)); {
	case err != nil:
		return program{}, err
	case loader != "" && !existsIn(d.Root, loader):
		p.path, p.chroot = filepath.Join(d.Root, path), ""
		var dirs []string
		for _, dir := range driverroot.LibraryDirs {
			if existsIn(d.Root, dir) {
				dirs = append(dirs, filepath.Join(d.Root, dir))
			}
		}
		p.env = append(p.env, "LD_LIBRARY_PATH="+strings.Join(dirs, ":"))
	}
	// The server is started by name.
	p.env = append(p.env, "PATH="+filepath.Dir(p.path)+":/usr/sbin:/usr/bin:/sbin:/bin")
	return p, nil
}

// interpreter is the loader that a program needs: empty for a static one, and for what is no ELF file.
func interpreter(path string) (string, error) {
	file, err := elf.Open(path)
	if _, isFormat := err.(*elf.FormatError); isFormat || errors.Is(err, io.EOF) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("look at the driver's program: %w", err)
	}
	defer file.Close()
	for _, header := range file.Progs {
		if header.Type == elf.PT_INTERP {
			text, err := io.ReadAll(header.Open())
			if err != nil {
				return "", fmt.Errorf("read what %s needs: %w", path, err)
			}
			return string(bytes.TrimRight(text, "\x00")), nil
		}
	}
	return "", nil
}

func existsIn(root, path string) bool {
	_, err := driverroot.Resolve(root, path)
	return err == nil
}

// command is the program with arguments, in a process group of its own that ends with ctx.
func (p program) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, p.path, args...)
	cmd.Env, cmd.Dir = p.env, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: p.chroot, Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	return cmd
}

// tell gives the daemon a command, and returns what it says.
func (p program) tell(ctx context.Context, line string) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, p.patience, fmt.Errorf("no answer after %s", p.patience))
	defer cancel()
	cmd := p.command(ctx)
	cmd.Stdin = strings.NewReader(line + "\n")
	output, err := cmd.CombinedOutput()
	text := strings.TrimSpace(string(output))
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil && text != "" {
		return "", fmt.Errorf("tell the MPS daemon %q: %w: %s", line, err, text)
	}
	if err != nil {
		return "", fmt.Errorf("tell the MPS daemon %q: %w", line, err)
	}
	return text, nil
}

// last keeps the end of what is written, and passes it on.
type last struct {
	to   io.Writer
	text []byte
}

func (l *last) Write(p []byte) (int, error) {
	const most = 1 << 10
	l.text = append(l.text, p...)
	l.text = l.text[max(0, len(l.text)-most):]
	return l.to.Write(p)
}

// linkShm says where the daemon's shared memory is on the host.
func (d Daemon) linkShm() error {
	beside := filepath.Join(d.Dir, "."+ShmLink+"-new")
	if err := os.Remove(beside); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("link the shared memory of MPS daemon: %w", err)
	}
	if err := os.Symlink(d.Shm, beside); err != nil {
		return fmt.Errorf("link the shared memory of MPS daemon: %w", err)
	}
	link := filepath.Join(d.Dir, ShmLink)
	// A container that was started without a daemon, as after a reboot, had its runtime make a directory, and may have written there.
	if info, err := os.Lstat(link); err == nil && info.IsDir() {
		if err := os.RemoveAll(link); err != nil {
			return fmt.Errorf("link the shared memory of MPS daemon: %w", err)
		}
	}
	if err := os.Rename(beside, link); err != nil {
		return fmt.Errorf("link the shared memory of MPS daemon: %w", err)
	}
	return nil
}
