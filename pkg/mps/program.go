// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/internal/driverroot"
)

// controlProgram is the daemon, and the program that sends it commands.
const controlProgram = "nvidia-cuda-mps-control"

// program is the driver's control program and how to run it.
type program struct {
	// path is relative to chroot if that is set.
	path, chroot string
	env          []string
	// timeout is how long the daemon may take for a command.
	timeout time.Duration
}

// findProgram finds nvidia-cuda-mps-control. It runs with the driver root as its root, where its C library is. If the driver root has no C
// library (GKE's cos-gpu-installer), it uses the C library of this container and the driver's libraries (TestWhereTheProgramRuns).
func (d Daemon) findProgram() (program, error) {
	path, err := driverroot.Find(d.Root, controlProgram)
	if err != nil {
		return program{}, err
	}
	p := program{path: path, chroot: d.Root, timeout: d.Grace, env: []string{
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
	// The daemon starts its servers by name.
	p.env = append(p.env, "PATH="+filepath.Dir(p.path)+":/usr/sbin:/usr/bin:/sbin:/bin")
	return p, nil
}

// interpreter returns the loader that a program needs: empty for a static program, and for a file that is not ELF.
func interpreter(path string) (string, error) {
	file, err := elf.Open(path)
	if _, isFormat := errors.AsType[*elf.FormatError](err); isFormat || errors.Is(err, io.EOF) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read the driver's program: %w", err)
	}
	defer file.Close()
	for _, header := range file.Progs {
		if header.Type == elf.PT_INTERP {
			text, err := io.ReadAll(header.Open())
			if err != nil {
				return "", fmt.Errorf("read the interpreter of %s: %w", path, err)
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

// command returns the program with arguments, in a process group of its own that is killed when ctx is done.
func (p program) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, p.path, args...)
	cmd.Env, cmd.Dir = p.env, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: p.chroot, Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	return cmd
}

// tell sends the daemon a command and returns its answer.
func (p program) tell(ctx context.Context, line string) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, p.timeout, fmt.Errorf("no answer after %s", p.timeout))
	defer cancel()
	cmd := p.command(ctx)
	cmd.Stdin = strings.NewReader(line + "\n")
	output := &answer{}
	cmd.Stdout, cmd.Stderr = output, output
	err := cmd.Run()
	text := strings.TrimSpace(string(output.text))
	if output.tooLong {
		err, text = errLongAnswer, text[:min(len(text), longestQuote)]
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil && text != "" {
		return "", fmt.Errorf("send the MPS daemon %q: %w: %s", line, err, text)
	}
	if err != nil {
		return "", fmt.Errorf("send the MPS daemon %q: %w", line, err)
	}
	return text, nil
}

// answer keeps what a program answers, unless that is too long. A client that is root may answer in the daemon's place.
type answer struct {
	text    []byte
	tooLong bool
}

const (
	longestAnswer = 64 << 10
	longestQuote  = 1 << 10
)

var errLongAnswer = fmt.Errorf("the answer is longer than %d bytes", longestAnswer)

func (a *answer) Write(p []byte) (int, error) {
	if len(a.text)+len(p) > longestAnswer {
		a.tooLong = true
		return 0, errLongAnswer
	}
	a.text = append(a.text, p...)
	return len(p), nil
}

// last keeps the end of what is written, and writes all of it to another writer.
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
