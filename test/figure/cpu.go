// SPDX-License-Identifier: Apache-2.0

package figure

import (
	"fmt"
	"time"

	"github.com/prometheus/procfs"
)

// ReadCPU returns the time that a process has used so far, in user mode and in the kernel, in steps of ten milliseconds.
func ReadCPU(pid int) (time.Duration, error) {
	process, err := procfs.NewProc(pid)
	if err != nil {
		return 0, fmt.Errorf("read CPU time of process %d: %w", pid, err)
	}
	stat, err := process.Stat()
	if err != nil {
		return 0, fmt.Errorf("read CPU time of process %d: %w", pid, err)
	}
	return time.Duration(stat.CPUTime() * float64(time.Second)), nil
}
