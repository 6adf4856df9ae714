// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// KernelLogFile is the kernel's log in a machine's directory, in the format of /dev/kmsg (Documentation/ABI/testing/dev-kmsg): a line
// "priority,sequence,microseconds,-;text" for each record since the boot. It is a regular file, so it differs from /dev/kmsg in two
// ways: a read can return several records, and it returns none at the end, where /dev/kmsg waits.
const KernelLogFile = "kmsg"

// The priority of the driver's lines, which name none: facility kernel, level warning (printk's default).
const kernelPriority = 4

// LogKernel appends records to the kernel's log of the machine in dir. Processes may call it at the same time.
func LogKernel(dir string, texts ...string) error {
	file, err := os.OpenFile(filepath.Join(dir, KernelLogFile), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("write the kernel log: %w", err)
	}
	if err := errors.Join(appendRecords(file, texts), file.Close()); err != nil {
		return fmt.Errorf("write the kernel log of %s: %w", dir, err)
	}
	return nil
}

// appendRecords writes all records at once, so that a reader never sees the beginning of one.
func appendRecords(file *os.File, texts []string) error {
	if err := flock(file); err != nil {
		return err
	}
	before, err := io.ReadAll(file)
	if err != nil {
		return err
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return err
	}
	sequence := bytes.Count(before, []byte("\n"))
	var records strings.Builder
	for i, text := range texts {
		fmt.Fprintf(&records, "%d,%d,%d,-;%s\n", kernelPriority, sequence+i, time.Duration(now.Nano()).Microseconds(), text)
	}
	_, err = file.WriteString(records.String())
	return err
}

// bootKernelLog begins the log of a boot in which the driver is loaded.
func bootKernelLog(dir string, p Profile) error {
	if err := os.Remove(filepath.Join(dir, KernelLogFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return LogKernel(dir, "Linux version (simulated)", loadedText(p))
}

// loadedText is what the driver logs when it is loaded.
func loadedText(p Profile) string {
	return "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  " + p.Driver.Version + "  Release Build"
}

// logXIDs appends the events of faults that are newer than those of before, as the driver logs them. A directory without a machine
// has no log.
func logXIDs(dir string, before, faults Faults) error {
	var newest uint64
	for _, e := range before.Events {
		newest = max(newest, e.Sequence)
	}
	var fresh []Event
	for _, e := range faults.Events {
		if e.Sequence > newest {
			fresh = append(fresh, e)
		}
	}
	profile, err := Load(filepath.Join(dir, ProfileFile))
	if errors.Is(err, fs.ErrNotExist) || len(fresh) == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	var texts []string
	for _, e := range fresh {
		place, err := profile.find(e.GPU)
		if err != nil {
			return err
		}
		texts = append(texts, e.text(profile.GPUs[place].PCI))
	}
	return LogKernel(dir, texts...)
}

// text is the driver's line (open-gpu-kernel-modules, kernel_rc.c, krcReportXid): the address has no function.
func (e Event) text(address string) string {
	at := "PCI:" + strings.TrimSuffix(address, ".0")
	if e.GPUInstance != nil {
		at += fmt.Sprintf(" GPU-I:%02d", *e.GPUInstance)
		if e.ComputeInstance != nil {
			at += fmt.Sprintf(" GPU-CI:%02d", *e.ComputeInstance)
		}
	}
	pid, name := "'<unknown>'", "<unknown>"
	if e.PID != 0 {
		pid, name = fmt.Sprint(e.PID), orElse(e.Process, name)
	}
	return fmt.Sprintf("NVRM: Xid (%s): %d, pid=%s, name=%s, %s", at, e.XID, pid, name, orElse(e.Message, xidMessages[e.XID]))
}

// xidMessages begin as the driver's do (NVIDIA, XID Errors).
var xidMessages = map[uint64]string{
	13:  "Graphics Exception: ESR 0x504730=0xc0e000e",
	31:  "Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f_a0000000",
	43:  "Ch 00000008",
	45:  "Ch 00000008",
	48:  "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer",
	63:  "Row Remapper: New row marked for remapping, reset gpu to activate.",
	64:  "Row Remapper: Failed to remap a row",
	74:  "NVLink: fatal error detected on link 3",
	79:  "GPU has fallen off the bus.",
	94:  "Contained: SM (0x1). RST: No, D-RST: No",
	95:  "Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No",
	109: "Ch 00000008, errorString CTX SWITCH TIMEOUT, Info 0x2c00a",
	119: "Timeout after 6s of waiting for RPC response from GPU0 GSP!",
	154: "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
}

// RaiseXID adds an event to the faults in force and to the kernel's log. Its sequence is chosen; a test that calls it must be the
// only one that writes faults.
func RaiseXID(dir string, e Event) error {
	faults, err := ReadFaults(dir)
	if err != nil {
		return err
	}
	// The time, so that it is higher than those of events that were removed from the file again.
	e.Sequence = uint64(time.Now().UnixMicro())
	for _, other := range faults.Events {
		e.Sequence = max(e.Sequence, other.Sequence+1)
	}
	faults.Events = append(faults.Events, e)
	return WriteFaults(dir, faults)
}
