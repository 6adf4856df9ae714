// SPDX-License-Identifier: Apache-2.0

// Package fileclock reads the clock with which the kernel stamps files.
package fileclock

import (
	"time"

	"golang.org/x/sys/unix"
)

// Now returns the time that a file written now would have (linux/fs/inode.c, current_time): it is up to a tick (1 to 10 ms) behind
// time.Now. A later write never has an earlier stamp, unless the clock is set back. Compare it with the stamps of files only.
func Now() time.Time {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &t); err != nil {
		return time.Now().Round(0)
	}
	return time.Unix(t.Unix())
}
