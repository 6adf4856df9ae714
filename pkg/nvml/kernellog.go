// SPDX-License-Identifier: Apache-2.0

// Reads XIDs from the lines of the kernel's log.

package nvml

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// openKernelLog opens the kernel's log. Each read of the file returns one record, first those since boot that the log still has, and waits
// for the next one (Documentation/ABI/testing/dev-kmsg).
func openKernelLog() (io.ReadCloser, error) {
	// The runtime's poller waits for a file that does not block, and Close ends that.
	return os.OpenFile("/dev/kmsg", os.O_RDONLY|unix.O_NONBLOCK, 0)
}

// maxRecord is longer than a record of the kernel's log, whose read fails if the buffer is too short (printk.c, PRINTK_MESSAGE_MAX).
const maxRecord = 16 << 10

// followKernelLog calls handle for each XID in the log, and for each load of the driver, until ctx is done. It returns an error if the log
// cannot be read any more.
func followKernelLog(ctx context.Context, log io.ReadCloser, handle func(gpu.XIDEvent)) error {
	stop := context.AfterFunc(ctx, func() { _ = log.Close() })
	defer func() {
		if stop() {
			_ = log.Close()
		}
	}()
	lines := bufio.NewReaderSize(log, maxRecord)
	for ctx.Err() == nil {
		line, err := lines.ReadSlice('\n')
		switch {
		case errors.Is(err, unix.EPIPE), // records were overwritten before they were read
			errors.Is(err, bufio.ErrBufferFull): // no record of the driver is so long
			continue
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("read the kernel's log: %w", err)
		}
		if event, found := parseRecord(string(line), bootTime()); found {
			handle(event)
		}
	}
	return nil
}

// bootTime is when the clock of the kernel's log was zero.
func bootTime() time.Time {
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) != nil {
		return time.Time{}
	}
	return time.Now().Add(-time.Duration(now.Nano()))
}

// xidText is the driver's text of an XID (open-gpu-kernel-modules, src/nvidia/src/kernel/gpu/rc/kernel_rc.c).
var xidText = regexp.MustCompile(`^NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?: GPU-I:(\d+))?(?: GPU-CI:(\d+))?\): (\d+)`)

// loadText begins the driver's text when its module is loaded (open-gpu-kernel-modules, kernel-open/nvidia/nv.c). All GPUs start anew.
const loadText = "NVRM: loading NVIDIA UNIX"

// parseRecord reads a record of the kernel's log: "<priority>,<sequence>,<microseconds>,<flags>;<text>". found is false for all records but
// those of the driver about an XID or its load. boot is when the log's clock was zero.
func parseRecord(line string, boot time.Time) (event gpu.XIDEvent, found bool) {
	prefix, text, whole := strings.Cut(strings.TrimSuffix(line, "\n"), ";")
	if !whole || !strings.HasPrefix(text, "NVRM: ") {
		return gpu.XIDEvent{}, false
	}
	var priority, sequence, microseconds uint64
	_, err := fmt.Sscanf(prefix, "%d,%d,%d,", &priority, &sequence, &microseconds)
	// The facility is above the three bits of the level, and zero for the kernel: a process that writes to the file has another one.
	if err != nil || priority>>3 != 0 {
		return gpu.XIDEvent{}, false
	}
	event = gpu.XIDEvent{
		GPUInstance: gpu.NoInstance, ComputeInstance: gpu.NoInstance, Sequence: sequence,
		Time: boot.Add(time.Duration(microseconds) * time.Microsecond), Message: text,
	}
	if strings.HasPrefix(text, loadText) {
		return event, true
	}
	m := xidText.FindStringSubmatch(text)
	if m == nil {
		return gpu.XIDEvent{}, false
	}
	event.PCI = slot(m[1])
	for at, into := range map[int]*int{2: &event.GPUInstance, 3: &event.ComputeInstance, 4: &event.XID} {
		if m[at] == "" {
			continue
		}
		n, err := strconv.Atoi(m[at])
		if err != nil {
			return gpu.XIDEvent{}, false
		}
		*into = n
	}
	return event, event.XID != 0
}

// slot returns a PCI address as device.XIDEvent has it: as the kernel writes it, and without the function.
func slot(address string) string {
	address, _, _ = strings.Cut(kernelAddress(address), ".")
	return address
}

// kernelAddress returns a PCI address as the kernel writes it: lower case, with a domain of four digits where they suffice. NVML writes
// eight.
func kernelAddress(address string) string {
	domain, rest, found := strings.Cut(strings.ToLower(address), ":")
	if !found {
		return domain
	}
	for len(domain) > 4 && domain[0] == '0' {
		domain = domain[1:]
	}
	return domain + ":" + rest
}
