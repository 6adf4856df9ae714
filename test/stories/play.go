// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/hack/queue"
)

const (
	// LogsVariable names the directory for what a failed run has to tell.
	LogsVariable = "STORIES_LOGS"
	// QueueVariable names the file of a queue of stories, which several runs share (hack/cmd/stories).
	QueueVariable = "STORIES_QUEUE"
)

// Play runs the stories that flags name, or those that it can take from the queue, first those that a preference likes. An interrupted run
// takes no more.
func (p *Place) Play(ctx context.Context, m *testing.M, likes ...func(name string) bool) (code int, err error) {
	path, queued := os.LookupEnv(QueueVariable)
	if !queued {
		return m.Run(), nil
	}
	for ctx.Err() == nil {
		name, ok, err := queue.At(path).Take(ctx, likes...)
		if err != nil {
			return 1, err
		}
		if !ok {
			return code, nil
		}
		if err := flag.Set("test.run", "^"+name+"$"); err != nil {
			return 1, err
		}
		if m.Run() == 0 {
			continue
		}
		code = 1
		// A broken cluster would take the other clusters' stories and fail them.
		if err := p.ready(ctx); err != nil {
			return code, fmt.Errorf("play no more stories after %s: %w", name, err)
		}
	}
	return 1, fmt.Errorf("play stories: %w", context.Cause(ctx))
}

// ready returns when Tandem is ready on the cluster.
func (p *Place) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, Patient)
	defer cancel()
	return install.Ready(ctx, p.Cluster)
}

// EndWithParent calls end when the program that has started the run ends, even if it was killed: its clusters would run on.
func EndWithParent(end func()) error {
	parent, err := unix.PidfdOpen(os.Getppid(), 0)
	if err != nil {
		return fmt.Errorf("find the program that has started the run: %w", err)
	}
	go func() {
		ended := []unix.PollFd{{Fd: int32(parent), Events: unix.POLLIN}}
		for {
			if _, err := unix.Poll(ended, -1); !errors.Is(err, unix.EINTR) {
				end()
				return
			}
		}
	}()
	return nil
}
