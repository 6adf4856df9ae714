// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/driverroot"
)

// The daemon shares memory volumes of its pod with its clients, and not directories of the host: a client that fills one, or leaves
// links there, harms this daemon only. kubelet limits their size and removes them with the pod. The daemon's directory on the host has a
// link to each (docs/design/0013-sharing.md).

// Names of the volumes in the pod. They are those of the links in the daemon's directory.
const (
	PipeVolume = PipeDir
	LogVolume  = LogDir
	ShmVolume  = ShmLink
)

// shmDir is the mount of ShmVolume in the containers of daemon and clients.
const shmDir = "/dev/shm"

// prepareVolumes links the volumes, and removes what clients of an earlier daemon left: links that the daemon would follow, and so much
// that it could not start. Files of /dev/shm and the log stay as long as there is room.
func (d Daemon) prepareVolumes(ctx context.Context) error {
	for _, name := range []string{PipeVolume, LogVolume, ShmVolume} {
		if err := d.link(name); err != nil {
			return err
		}
	}
	d.distrustClients(ctx)
	pipe, log, shm := filepath.Join(d.Mounts, d.PipeDir), filepath.Join(d.Mounts, d.LogDir), filepath.Join(d.Mounts, shmDir)
	if err := empty(pipe, removalTimeout); err != nil {
		return fmt.Errorf("empty the pipe directory of MPS daemon: %w", err)
	}
	for _, dir := range []string{log, shm} {
		if free, err := room(dir); errors.Is(err, fs.ErrNotExist) || err == nil && free > 0.25 {
			continue
		}
		if err := empty(dir, removalTimeout); err != nil {
			klog.FromContext(ctx).Error(err, "Cannot make room for the MPS daemon, starting it anyway", "directory", dir)
		}
	}
	// kubelet makes volumes that any user can write to (pkg/volume/emptydir). Clients connect to the pipes and create none.
	for dir, mode := range map[string]fs.FileMode{pipe: 0o755, log: 0o755, shm: 0o777 | fs.ModeSticky} {
		if err := os.Chmod(dir, mode); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("set the mode of a volume of MPS daemon: %w", err)
		}
	}
	d.labelVolumes(ctx, pipe, shm)
	return nil
}

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

// distrusted are what the daemon's mounts of its clients' volumes must have. Clients write to the volumes while the daemon starts, so that
// emptying them is not enough: the daemon is root and would write through a link to a file of the driver's root, or to a disk by a device
// node, which a client that is root can create. Linux has MS_NOSYMFOLLOW from 5.10 on.
const distrusted = unix.MS_NOSYMFOLLOW | unix.MS_NODEV | unix.MS_NOSUID

// distrustClients makes the daemon's mounts of the volumes that clients write to follow no links and open no devices. The mounts of clients
// stay as they are. It needs SYS_ADMIN, which only a privileged pod has, and starts the daemon without as well: docs/user/sharing.md says
// what remains.
func (d Daemon) distrustClients(ctx context.Context) {
	logger := klog.FromContext(ctx)
	for _, root := range slices.Compact([]string{d.Mounts, d.Root}) {
		for _, dir := range []string{d.PipeDir, shmDir} {
			// In a pod both are mounts. A link of the driver's root must not lead elsewhere.
			path, err := driverroot.Resolve(root, dir)
			if err == nil {
				path = filepath.Join(root, path)
				err = distrust(path)
			}
			switch {
			case err == nil, errors.Is(err, fs.ErrNotExist):
			case errors.Is(err, unix.EPERM):
				logger.Info("The MPS daemon follows links that a client plants while it starts: its pod is not privileged", "directory", path, "err", err)
			default:
				logger.Error(err, "The MPS daemon follows links that a client plants while it starts", "directory", path)
			}
		}
	}
}

// distrust adds the flags to a mount and keeps those that it has.
func distrust(dir string) error {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	flags := uintptr(unix.MS_REMOUNT | unix.MS_BIND | distrusted)
	for has, flag := range map[int64]uintptr{
		unix.ST_RDONLY: unix.MS_RDONLY, unix.ST_NOEXEC: unix.MS_NOEXEC, unix.ST_NOATIME: unix.MS_NOATIME, unix.ST_NODIRATIME: unix.MS_NODIRATIME,
		unix.ST_RELATIME: unix.MS_RELATIME,
	} {
		if s.Flags&has != 0 {
			flags |= flag
		}
	}
	if err := unix.Mount("", dir, "", flags, ""); err != nil {
		return &os.PathError{Op: "remount", Path: dir, Err: err}
	}
	// An older kernel ignores the flag.
	if err := unix.Statfs(dir, &s); err != nil {
		return &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	if s.Flags&stNoSymFollow == 0 {
		err := errors.New("the kernel follows links all the same (it can do without from Linux 5.10 on)")
		return &os.PathError{Op: "remount", Path: dir, Err: err}
	}
	return nil
}

// stNoSymFollow is ST_NOSYMFOLLOW of linux/statfs.h, which x/sys/unix lacks.
const stNoSymFollow = 0x2000

// link links a volume on the host into the daemon's directory.
func (d Daemon) link(name string) error {
	temporary, link := filepath.Join(d.Dir, "."+name+"-new"), filepath.Join(d.Dir, name)
	err := os.RemoveAll(temporary)
	if err == nil {
		err = os.Symlink(filepath.Join(d.Volumes, name), temporary)
	}
	// A directory is from an agent of an earlier version, or from the runtime of a client's container that started without a daemon. A
	// client may have written to it.
	if info, statErr := os.Lstat(link); err == nil && statErr == nil && info.IsDir() {
		err = remove(link, removalTimeout)
	}
	if err == nil {
		err = os.Rename(temporary, link)
	}
	if err != nil {
		return fmt.Errorf("link volume %s of MPS daemon: %w", name, err)
	}
	return nil
}

// room returns which part of a file system is free, of its bytes or of its files, whichever is less.
func room(dir string) (float64, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return 0, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	free := 1.0
	if s.Blocks > 0 {
		free = float64(s.Bavail) / float64(s.Blocks)
	}
	if s.Files > 0 { // some file systems do not count them
		free = min(free, float64(s.Ffree)/float64(s.Files))
	}
	return free, nil
}

// errFull means that a client has filled the pipe directory, which only the daemon should write to.
var errFull = errors.New("the pipe directory is full: a client has written to it")

// pipesFit returns errFull if the daemon cannot create another pipe.
func (d Daemon) pipesFit() error {
	free, err := room(filepath.Join(d.Mounts, d.PipeDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil && free == 0 {
		err = errFull
	}
	return err
}
