// SPDX-License-Identifier: Apache-2.0

package figure

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// tick is the unit of times in /proc (proc_pid_stat(5); USER_HZ is 100 on all Linux architectures that Go supports).
const tick = 10 * time.Millisecond

// ReadCPU returns the time that a process has used so far, in user mode and in the kernel, in steps of ten milliseconds.
func ReadCPU(pid int) (time.Duration, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, fmt.Errorf("read CPU time of process %d: %w", pid, err)
	}
	used, err := parseCPU(string(data))
	if err != nil {
		return 0, fmt.Errorf("read CPU time of process %d: %w", pid, err)
	}
	return used, nil
}

// parseCPU adds the fields 14 and 15 of /proc/PID/stat. Field 2 is the program's name in parentheses, which may contain blanks.
func parseCPU(stat string) (used time.Duration, err error) {
	fields := strings.Fields(stat[strings.LastIndex(stat, ")")+1:])
	if len(fields) < 13 {
		return 0, errors.New("utime or stime is missing")
	}
	for _, field := range fields[11:13] {
		ticks, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, err
		}
		used += time.Duration(ticks) * tick
	}
	return used, nil
}
