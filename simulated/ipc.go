// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// IPC is something that a container talks to a daemon of the driver through: its path in the driver root.
type IPC string

// What nvcdi mounts into containers where it is there.
const (
	// PersistencedSocket is nvidia-persistenced's.
	PersistencedSocket IPC = "run/nvidia-persistenced/socket"
	// FabricManagerSocket is the fabric manager's.
	FabricManagerSocket IPC = "run/nvidia-fabricmanager/socket"
	// MPSDirectory is the pipe directory of an MPS daemon that an administrator started.
	MPSDirectory IPC = "tmp/nvidia-mps"
)

// SetIPC makes what is named exist in the driver root of the machine in dir, and removes the rest, as daemons do that start and stop.
// Nothing answers on the sockets.
func SetIPC(dir string, there ...IPC) error {
	for _, ipc := range []IPC{PersistencedSocket, FabricManagerSocket, MPSDirectory} {
		at := filepath.Join(dir, DriverDir, string(ipc))
		if slices.Contains(there, ipc) {
			if err := makeIPC(ipc, at); err != nil {
				return fmt.Errorf("make %s of the machine in %s: %w", ipc, dir, err)
			}
			continue
		}
		if err := os.RemoveAll(at); err != nil {
			return fmt.Errorf("remove %s of the machine in %s: %w", ipc, dir, err)
		}
	}
	return nil
}

func makeIPC(ipc IPC, at string) error {
	if ipc == MPSDirectory {
		return os.MkdirAll(at, 0o755)
	}
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		return err
	}
	if err := unix.Mknod(at, unix.S_IFSOCK|0o666, 0); !errors.Is(err, unix.EEXIST) {
		return err
	}
	return nil
}

// selinuxEnforce is where sysfs says whether SELinux is enforcing.
const selinuxEnforce = "fs/selinux/enforce"

// SetSELinux makes the sysfs of the machine in dir say that SELinux is enforcing, or that the kernel has none.
func SetSELinux(dir string, enforcing bool) error {
	f := file{path: path.Join(SysfsDir, selinuxEnforce), content: []byte("1"), mode: 0o644}
	if enforcing {
		return f.ensure(dir)
	}
	if err := os.Remove(filepath.Join(dir, f.path)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("switch SELinux off in %s: %w", dir, err)
	}
	return nil
}
