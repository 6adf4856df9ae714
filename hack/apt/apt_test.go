// SPDX-License-Identifier: Apache-2.0

package apt

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestInstallationsTakeTurns lets ten installations of the same package start at once: one apt-get at a time, and one installation.
func TestInstallationsTakeTurns(t *testing.T) {
	var running, calls atomic.Int32
	var installed atomic.Bool
	i := installer{lock: filepath.Join(t.TempDir(), "locks", "apt"), aptGet: func(_ context.Context, _ io.Writer, args ...string) error {
		if running.Add(1) > 1 {
			t.Error("two apt-get at once")
		}
		defer running.Add(-1)
		calls.Add(1)
		time.Sleep(20 * time.Millisecond) // long enough for another to come
		if args[0] == "install" {
			if args[len(args)-1] != "gcc" {
				t.Errorf("apt-get %q", args)
			}
			installed.Store(true)
		}
		return nil
	}}
	var all sync.WaitGroup
	for range 10 {
		all.Go(func() {
			if err := i.install(t.Context(), io.Discard, func() ([]string, error) {
				if installed.Load() {
					return nil, nil
				}
				return []string{"gcc"}, nil
			}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if calls.Load() != 2 {
		t.Errorf("apt-get ran %d times, want update and install", calls.Load())
	}
}

func TestAptGetNamesTheReason(t *testing.T) {
	if _, err := exec.LookPath("apt-get"); err != nil {
		t.Skip("no apt-get here")
	}
	var out bytes.Buffer
	err := aptGet(t.Context(), &out, "install", "--simulate", "no-such-package-of-tandem")
	var exit *exec.ExitError
	if !errors.As(err, &exit) || !strings.HasPrefix(err.Error(), "apt-get install: Unable to locate package no-such-package-of-tandem: ") {
		t.Errorf("a package that does not exist: %v", err)
	}
}
