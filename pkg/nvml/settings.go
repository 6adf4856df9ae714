// SPDX-License-Identifier: Apache-2.0

// Compute modes and time slices.

package nvml

import (
	"bytes"
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
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/driverroot"
	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

var computeModes = map[gpu.ComputeMode]gonvml.ComputeMode{
	gpu.ComputeModeDefault:          gonvml.COMPUTEMODE_DEFAULT,
	gpu.ComputeModeExclusiveProcess: gonvml.COMPUTEMODE_EXCLUSIVE_PROCESS,
	gpu.ComputeModeProhibited:       gonvml.COMPUTEMODE_PROHIBITED,
}

// SetComputeMode sets how many processes may use a GPU, and returns the mode before, for the revert. The setting is lost when the
// driver is unloaded. The error is gpu.ErrUnsupported if the GPU has no such mode, as with MIG mode on. pkg/sharing calls it.
// Idempotent and safe for concurrent use; it waits for other operations on the GPU.
func (n *Node) SetComputeMode(ctx context.Context, uuid string, mode gpu.ComputeMode) (before gpu.ComputeMode, err error) {
	about := fmt.Sprintf("set compute mode of GPU %s to %s", uuid, mode)
	return operate(ctx, n, uuid, about, func(op *operation) (gpu.ComputeMode, error) {
		return op.setComputeMode(mode)
	}, nil) // nothing to revert: a caller whose ctx ended retries
}

// ComputeMode reads the compute mode. Safe for concurrent use.
func (n *Node) ComputeMode(ctx context.Context, uuid string) (gpu.ComputeMode, error) {
	return operate(ctx, n, uuid, "read compute mode of GPU "+uuid, (*operation).computeMode, nil)
}

func (op *operation) computeMode() (gpu.ComputeMode, error) {
	now, ret := op.device.GetComputeMode()
	if ret != gonvml.SUCCESS {
		return "", settingError(ret)
	}
	for name, mode := range computeModes {
		if mode == now {
			return name, nil
		}
	}
	return "", fmt.Errorf("NVML answers %d, which is no mode of today's drivers", now)
}

func (op *operation) setComputeMode(mode gpu.ComputeMode) (before gpu.ComputeMode, err error) {
	wanted, known := computeModes[mode]
	if !known {
		return "", errors.New("there is no such mode")
	}
	before, err = op.computeMode()
	if err != nil || before == mode {
		return before, err
	}
	if ret := op.device.SetComputeMode(wanted); ret != gonvml.SUCCESS {
		return "", settingError(ret)
	}
	return before, nil
}

// settingError returns NVML's answer to a setting as an error.
func settingError(ret gonvml.Return) error {
	switch ret {
	case gonvml.ERROR_NOT_SUPPORTED, gonvml.ERROR_FUNCTION_NOT_FOUND:
		return fmt.Errorf("%w (%w)", gpu.ErrUnsupported, returnError{ret})
	}
	return returnError{ret}
}

// SetTimeSlice sets how long a process has the GPU before the next one: 0 is the driver's default, 1 short, 2 medium, 3 long. It
// runs the driver's nvidia-smi, because NVML has no such call. The setting is lost when the driver is unloaded. The error is
// gpu.ErrUnsupported if the GPU has no time slices, the driver has no nvidia-smi that sets them, or the agent has no right to set
// them. pkg/sharing calls it. Idempotent and safe for concurrent use; it waits for other operations on the GPU.
func (n *Node) SetTimeSlice(ctx context.Context, uuid string, interval int) error {
	about := fmt.Sprintf("set time slice of GPU %s to %d", uuid, interval)
	if interval < 0 || interval > 3 {
		return fmt.Errorf("%s: not from 0 to 3", about)
	}
	return change(ctx, n, uuid, about, func(op *operation) error {
		return n.runSMI("time slice of "+uuid, op.layout, "compute-policy", "-i", uuid, "--set-timeslice="+strconv.Itoa(interval))
	})
}

// refusals are nvidia-smi's exit statuses after which nothing was done, and a retry does not help (nvidia-smi(1), return value): its version
// does not know the arguments, the GPU does not support the operation, the agent has no permission, or the driver does not have the function.
var refusals = []int{2, 3, 4, 13}

// smi runs the driver's nvidia-smi. The error is gpu.ErrUnsupported if it refuses the operation, or the driver has no nvidia-smi.
func (o Options) smi(l layout, args ...string) error {
	root := o.onHost(l.driverRoot)
	smi, err := driverroot.Find(root, "nvidia-smi")
	if err != nil {
		return fmt.Errorf("%w: %w", gpu.ErrUnsupported, err)
	}
	err = o.execute(l, filepath.Join(root, smi), args...)
	var exit *exec.ExitError
	if errors.As(err, &exit) && slices.Contains(refusals, exit.ExitCode()) || errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%w: %w", gpu.ErrUnsupported, err)
	}
	return err
}

// toolPatience is a tool's timeout as a multiple of patience: it initialises every GPU of the node first.
const toolPatience = 3

// toolDelay is how long a tool that was killed may take to end.
const toolDelay = time.Second

// errToolStays means that a tool, or an earlier one with the same key, was killed and does not end.
var errToolStays = errors.New("nvidia-smi hangs in the driver and cannot be killed. If it does not end, reboot the node")

// runSMI is Options.smi with a limit also for a tool that cannot be killed because it sleeps in the driver. The tool and the goroutine that
// waits for it end once the driver answers. Until then, runSMI returns errToolStays and starts no other tool with the same key. Calls with
// one key must not be concurrent.
func (n *Node) runSMI(about string, l layout, args ...string) error {
	limit := toolPatience*n.options.patience + 2*toolDelay // later than the tool's own timeout
	_, err := attemptFor(n, limit, about, nil, func() (struct{}, error) {
		return struct{}{}, n.options.smi(l, args...)
	}, nil)
	if errors.Is(err, errNoAnswer) {
		return errToolStays
	}
	return err
}

// execute runs a program of the driver with the libraries of the driver root. A program that takes too long is killed with all
// its processes.
func (o Options) execute(l layout, path string, args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), toolPatience*o.patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	// LD_PRELOAD is the library that it loads by name; its other libraries need no environment. The locale does not change its
	// output.
	cmd.Env = []string{"LD_PRELOAD=" + l.library, "PATH=/usr/bin:/bin", "LC_ALL=C"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	// A process of it that cannot be killed keeps its output open.
	cmd.WaitDelay = toolDelay
	output, err := o.runTool(cmd)
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("run %s: it did not end within %s%s", commandLine(path, args), toolPatience*o.patience, said(output))
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("run %s: %w (the program, or the C library that it needs, is missing in the agent's image)", commandLine(path, args), err)
	case err != nil:
		return fmt.Errorf("run %s: %w%s", commandLine(path, args), err, said(output))
	}
	return nil
}

func commandLine(path string, args []string) string {
	return strings.Join(append([]string{filepath.Base(path)}, args...), " ")
}

// said returns a program's output in one line for an event.
func said(output []byte) string {
	text := strings.Join(strings.Fields(string(bytes.ToValidUTF8(output, []byte("?")))), " ")
	if text == "" {
		return ""
	}
	const most = 500
	if len(text) > most {
		text = text[:most] + "…"
	}
	return ": " + text
}
