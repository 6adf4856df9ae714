// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"cmp"
	"context"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// clientLabel lets containers of every pod use a volume: the type of container files, without the categories of one pod. Files in the
// volume inherit the type (container-selinux; podman's :z).
const clientLabel = "system_u:object_r:container_file_t:s0"

// labelVolumes labels what clients get, if the kernel has SELinux. The container runtime labels volumes for their own pod only, and not at
// all for a privileged one. It logs an error and goes on: SELinux may be permissive, or the host's policy may have no such type.
//
// The kernel's list of file systems is asked, because a container does not see /sys/fs/selinux, by which
// github.com/opencontainers/selinux decides.
func (d Daemon) labelVolumes(ctx context.Context, dirs ...string) {
	filesystems, err := os.ReadFile(filepath.Join(cmp.Or(d.proc, "/proc"), "filesystems"))
	if err != nil || !strings.Contains(string(filesystems), "\tselinuxfs\n") {
		return
	}
	for _, dir := range dirs {
		if err := unix.Lsetxattr(dir, "security.selinux", []byte(clientLabel), 0); err != nil {
			klog.FromContext(ctx).Error(err, "Cannot set the SELinux label of a volume; clients in confined containers cannot reach the MPS daemon",
				"directory", dir, "label", clientLabel)
		}
	}
}
