// SPDX-License-Identifier: Apache-2.0

package binaries

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"

	"github.com/tandem-gpu/tandem/hack/filelock"
	"github.com/tandem-gpu/tandem/hack/progress"
)

// debianPackages maps each Debian package the cluster needs to a file by which it is recognized where there is no dpkg.
var debianPackages = []struct{ name, file string }{
	{"containernetworking-plugins", cniDir + "/bridge"},
	{"iptables", "/usr/sbin/iptables"},
	{"nftables", "/usr/sbin/nft"},
	{"conntrack", "/usr/sbin/conntrack"},
	{"iproute2", "/usr/sbin/ip"},
	{"kmod", "/usr/sbin/modprobe"},
	{"busybox-static", "/usr/bin/busybox"},
	{"util-linux", "/usr/bin/nsenter"},
	{"mount", "/usr/bin/mount"},
	{"gcc", "/usr/bin/gcc"},
	{"libc6-dev", "/usr/include/stdio.h"},
	{"libseccomp-dev", "/usr/include/seccomp.h"},
	{"pkg-config", "/usr/bin/pkg-config"},
	{"ca-certificates", "/etc/ssl/certs/ca-certificates.crt"},
}

// installPackages installs what is missing with apt-get, or names it where that cannot be done. Runs with one cache take turns, because
// apt-get update fails where another one runs.
func installPackages(ctx context.Context, log *progress.Log, cache string) error {
	missing, err := missingPackages(ctx)
	if err != nil || len(missing) == 0 {
		return err
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return fmt.Errorf("create cache: %w", err)
	}
	unlock, err := filelock.Wait(ctx, filepath.Join(cache, ".packages.lock"))
	if err != nil {
		return err
	}
	defer unlock()
	// Another run may have installed them meanwhile.
	if missing, err = missingPackages(ctx); err != nil || len(missing) == 0 {
		return err
	}
	if _, err := exec.LookPath("apt-get"); err != nil || os.Geteuid() != 0 {
		return fmt.Errorf("install Debian packages %s: needs root and apt-get", strings.Join(missing, " "))
	}
	log.Say("installing Debian packages: %s", strings.Join(missing, " "))
	if err := aptGet(ctx, log, "update", "-q"); err != nil {
		return err
	}
	return aptGet(ctx, log, append([]string{"install", "-y", "-q", "--no-install-recommends"}, missing...)...)
}

func missingPackages(ctx context.Context) ([]string, error) {
	installed, err := installedPackages(ctx)
	if err != nil && !errors.Is(err, errNoDpkg) {
		return nil, err
	}
	var missing []string
	for _, wanted := range debianPackages {
		if installed[wanted.name] {
			continue
		}
		// A file of the right name serves as well: another distribution, or a package that replaces this one.
		if _, err := os.Stat(wanted.file); err != nil {
			missing = append(missing, wanted.name)
		}
	}
	return missing, nil
}

func installedPackages(ctx context.Context) (map[string]bool, error) {
	if _, err := exec.LookPath("dpkg-query"); err != nil {
		return nil, errNoDpkg
	}
	out, err := exec.CommandContext(ctx, "dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n").Output()
	if err != nil {
		return nil, fmt.Errorf("list installed Debian packages: %w", err)
	}
	installed := map[string]bool{}
	for line := range strings.Lines(string(out)) {
		name, status, _ := strings.Cut(strings.TrimSpace(line), " ")
		installed[name] = status == "installed"
	}
	return installed, nil
}

func aptGet(ctx context.Context, log *progress.Log, args ...string) error {
	cmd := exec.CommandContext(ctx, "apt-get", args...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	var output lastLine
	cmd.Stdout, cmd.Stderr = &output, &output
	stop := log.Beat(func() string { return "apt-get " + args[0] + ": " + output.last() })
	defer stop()
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("apt-get %s: %w\n%s", args[0], err, output.tail())
	}
	return nil
}

// lastLine keeps the end of what is written to it and counts lines; it is safe for concurrent use.
type lastLine struct {
	text  atomic.Pointer[[]byte]
	lines atomic.Int64
}

const keptOutput = 8 << 10

func (l *lastLine) Write(p []byte) (int, error) {
	var kept []byte
	if before := l.text.Load(); before != nil {
		kept = bytes.Clone(*before)
	}
	kept = append(kept, p...)
	kept = kept[max(0, len(kept)-keptOutput):]
	l.text.Store(&kept)
	l.lines.Add(int64(bytes.Count(p, []byte("\n"))))
	return len(p), nil
}

func (l *lastLine) tail() string {
	if text := l.text.Load(); text != nil {
		return strings.TrimSpace(string(*text))
	}
	return ""
}

func (l *lastLine) last() string {
	tail := l.tail()
	return tail[strings.LastIndexByte(tail, '\n')+1:]
}
