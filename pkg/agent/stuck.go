// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
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

// whenCallsReturn returns err. If err asks for a new start, it waits for driver calls that do not return: the node would have no agent. The node
// is served meanwhile as it was last read.
func (a *Agent) whenCallsReturn(ctx context.Context, err error) error {
	reported := false
	for Restarts(err) {
		threads := a.stuck(ctx)
		if len(threads) == 0 {
			return err
		}
		if !reported {
			reported = true
			klog.FromContext(ctx).Info("The agent has to start again, and waits for a driver call that does not return", "reason", err.Error(), "threads", threads)
			a.event(corev1.EventTypeWarning, "RestartPostponed", fmt.Sprintf("The agent has to start again (%v), and cannot, because a call of the "+
				"agent to the driver does not return. It serves the GPUs as it read them last, and starts again when the call returns, or when the node is "+
				"rebooted. Look for the GPU that hangs in the kernel's log", err))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(fileInterval):
		}
	}
	return err
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
