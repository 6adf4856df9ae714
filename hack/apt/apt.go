// SPDX-License-Identifier: Apache-2.0

// Package apt installs Debian packages that building and testing need.
package apt

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/tandem-gpu/tandem/hack/filelock"
	"github.com/tandem-gpu/tandem/hack/progress"
)

// turns is locked by every run that installs packages, hack/deps.sh among them. apt-get does not wait for another apt-get: update fails
// while one reads the lists.
const turns = "/run/lock/tandem-apt.lock"

// Options for every apt-get: a download that fails is tried again, and a dpkg of other programs is awaited.
var options = []string{"-q", "-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=300"}

// Available reports whether this process can install packages.
func Available() bool {
	_, err := exec.LookPath("apt-get")
	return err == nil && os.Geteuid() == 0
}

// Install installs the packages that missing names. Processes take turns, so missing is called when the turn has come: another one may
// have installed them. It is idempotent and safe for concurrent use.
func Install(ctx context.Context, out io.Writer, missing func() ([]string, error)) error {
	return installer{lock: turns, aptGet: aptGet}.install(ctx, out, missing)
}

// installer has what tests replace.
type installer struct {
	lock   string
	aptGet func(ctx context.Context, out io.Writer, args ...string) error
}

func (i installer) install(ctx context.Context, out io.Writer, missing func() ([]string, error)) error {
	if err := os.MkdirAll(filepath.Dir(i.lock), 0o755); err != nil {
		return fmt.Errorf("create directory of apt's lock: %w", err)
	}
	unlock, err := filelock.Wait(ctx, i.lock)
	if err != nil {
		return fmt.Errorf("wait for another installation of packages: %w", err)
	}
	defer unlock()
	packages, err := missing()
	if err != nil || len(packages) == 0 {
		return err
	}
	fmt.Fprintf(out, "installing Debian packages: %s\n", strings.Join(packages, " "))
	if err := i.aptGet(ctx, out, "update"); err != nil {
		return err
	}
	return i.aptGet(ctx, out, append([]string{"install", "-y", "--no-install-recommends"}, packages...)...)
}

func aptGet(ctx context.Context, out io.Writer, args ...string) error {
	cmd := exec.CommandContext(ctx, "apt-get", append(args, options...)...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C")
	var output progress.Tail
	cmd.Stdout, cmd.Stderr = &output, &output
	stop := progress.Every(progress.Heartbeat, func() { fmt.Fprintf(out, "apt-get %s: %s\n", args[0], output.Last()) })
	defer stop()
	if err := cmd.Run(); err != nil {
		// The reason comes first: readers of a long log may see the start of a message only.
		return fmt.Errorf("apt-get %s: %s: %w\n%s", args[0], reason(output.String()), err, &output)
	}
	return nil
}

// reason is the first line in which apt-get names an error.
func reason(output string) string {
	for line := range strings.Lines(output) {
		if reason, ok := strings.CutPrefix(line, "E: "); ok {
			return strings.TrimSpace(reason)
		}
	}
	return "no error named"
}
