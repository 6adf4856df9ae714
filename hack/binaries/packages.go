// SPDX-License-Identifier: Apache-2.0

package binaries

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/tandem-gpu/tandem/hack/apt"
	"github.com/tandem-gpu/tandem/hack/progress"
)

// debianPackages maps each Debian package the cluster needs to a file by which it is recognized where there is no dpkg.
var debianPackages = []struct{ name, file string }{
	{"containernetworking-plugins", cniDir + "/ptp"},
	{"crun", "/usr/bin/crun"},
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

// installPackages installs what is missing, or names it where that cannot be done.
func installPackages(ctx context.Context, log *progress.Log) error {
	missing, err := missingPackages(ctx)
	if err != nil || len(missing) == 0 {
		return err
	}
	if !apt.Available() {
		return fmt.Errorf("install Debian packages %s: needs root and apt-get", strings.Join(missing, " "))
	}
	return apt.Install(ctx, log, func() ([]string, error) { return missingPackages(ctx) })
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
