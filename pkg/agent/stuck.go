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

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/ledger"
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
	if !broadcast.Sleep(ctx, stuckPause) {
		return nil
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

// sourceRestart is the agent's source of ledger.Withhold while it cannot start again.
const sourceRestart = "restart of the agent"

// whenCallsReturn returns err. If err makes the agent start again, it first waits until no driver call is stuck: execve would not return, and
// the node would have no agent. Nothing reads the driver meanwhile, so no device is given to a new holder.
func (a *Agent) whenCallsReturn(ctx context.Context, to *ledger.Ledger, err error) error {
	for reported := false; Restarts(err); {
		threads := a.stuck(ctx)
		if len(threads) == 0 {
			return err
		}
		if !reported {
			reported = true
			to.Withhold(sourceRestart, fmt.Errorf("the agent has to start again, and a call to the driver does not return: %w", err))
			klog.FromContext(ctx).Info("The agent has to start again, and waits for a driver call that does not return", "reason", err.Error(),
				"threads", threads)
			a.event(corev1.EventTypeWarning, "RestartPostponed", fmt.Sprintf("The agent has to start again (%v). It cannot, because one of its calls "+
				"to the driver does not return. No GPU is given to new pods, and running pods keep theirs, until the call returns or the node is rebooted. "+
				"Look in the kernel's log (dmesg) for the GPU that hangs. Reset it, or reboot the node", err))
		}
		if !broadcast.Sleep(ctx, fileInterval) {
			return nil
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
