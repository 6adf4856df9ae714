// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// On a host with SELinux, clients in containers may use the volumes only with a label of container files.
func TestVolumesAreLabelled(t *testing.T) {
	for name, test := range map[string]struct {
		filesystems, want string
	}{
		"with SELinux":    {"nodev\tsysfs\nnodev\tselinuxfs\n\text4\n", "system_u:object_r:container_file_t:s0"},
		"without SELinux": {"nodev\tsysfs\n\text4\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			mounts, proc := t.TempDir(), t.TempDir()
			for _, dir := range []string{ClientPipeDir, ClientLogDir, shmDir} {
				if err := os.MkdirAll(filepath.Join(mounts, dir), 0o777); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.WriteFile(filepath.Join(proc, "filesystems"), []byte(test.filesystems), 0o600); err != nil {
				t.Fatal(err)
			}
			daemon := Daemon{Dir: t.TempDir(), Volumes: "/pods/uid", PipeDir: ClientPipeDir, LogDir: ClientLogDir, Mounts: mounts, proc: proc}
			if err := daemon.prepareVolumes(t.Context()); err != nil {
				t.Fatal(err)
			}
			for _, dir := range []string{ClientPipeDir, shmDir} {
				if got := labelOf(t, filepath.Join(mounts, dir)); got != test.want {
					t.Errorf("%s has label %q, want %q", dir, got, test.want)
				}
			}
		})
	}
}

// labelOf returns the SELinux label of a file, empty for none. A kernel without SELinux stores labels and ignores them.
func labelOf(t *testing.T, path string) string {
	t.Helper()
	label := make([]byte, 256)
	n, err := unix.Lgetxattr(path, "security.selinux", label)
	switch err {
	case nil:
		return strings.TrimRight(string(label[:n]), "\x00")
	case unix.ENODATA, unix.EOPNOTSUPP:
		return ""
	default:
		t.Fatal(err)
		return ""
	}
}
