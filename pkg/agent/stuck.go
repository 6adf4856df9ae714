// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// stuckPause is the time between two looks at a thread.
const stuckPause = time.Second

// stuckThreads returns the threads of this process that sleep uninterruptibly for a second or more without waking, as in a driver call that
// does not return. While there is one, execve does not return either: it kills all other threads and waits for them (Linux, fs/exec.c,
// de_thread).
func stuckThreads(ctx context.Context) (stuck []int) {
	first := uninterruptible("/proc/self/task")
	if len(first) == 0 {
		return nil
	}
	select {
	case <-ctx.Done():
		return nil
	case <-time.After(stuckPause):
	}
	second := uninterruptible("/proc/self/task")
	for thread, switches := range first {
		if again, still := second[thread]; still && again == switches {
			stuck = append(stuck, thread)
		}
	}
	slices.Sort(stuck)
	return stuck
}

// uninterruptible returns the threads in state D below a task directory, with the number of times that each of them has slept
// (proc_pid_status(5)). A thread that ends meanwhile is none.
func uninterruptible(tasks string) map[int]string {
	entries, err := os.ReadDir(tasks)
	if err != nil {
		return nil
	}
	threads := map[int]string{}
	for _, entry := range entries {
		text, err := os.ReadFile(filepath.Join(tasks, entry.Name(), "status"))
		thread, numberErr := strconv.Atoi(entry.Name())
		if err != nil || numberErr != nil {
			continue
		}
		fields := map[string]string{}
		for line := range strings.Lines(string(text)) {
			name, value, _ := strings.Cut(line, ":")
			fields[name] = strings.TrimSpace(value)
		}
		if strings.HasPrefix(fields["State"], "D") {
			threads[thread] = fields["voluntary_ctxt_switches"]
		}
	}
	return threads
}
