// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// systemDirs are the directories of a root file system that hold programs; all but usr are links on a merged system.
var systemDirs = []string{"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"}

// systemTrees answers which of them are real directories here, to be shown read-only in each machine.
func systemTrees() ([]string, error) {
	var trees []string
	for _, name := range systemDirs {
		info, err := os.Lstat("/" + name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("look at system directory: %w", err)
		}
		if info.IsDir() {
			trees = append(trees, name)
		}
	}
	return trees, nil
}

// hostFiles below /etc that programs of the machine read; the rest of the host's configuration is not its business.
var hostFiles = []string{"alternatives", "passwd", "group", "nsswitch.conf", "protocols", "services", "ethertypes", "rpc",
	"ld.so.cache", "ld.so.conf", "ld.so.conf.d", "os-release", "debian_version", "ssl", "ca-certificates", "iproute2", "xtables",
	"localtime", "login.defs", "shells"}

// makeDisk lays out a machine's root file system: directories, links, and what /etc needs.
func makeDisk(root, hostname string) error {
	for _, dir := range []string{"proc", "sys", "dev", "run", "etc", "opt", "srv", "mnt", "home", "media", "boot",
		"var/lib", "var/log/pods", "var/log/containers", "var/cache", "var/spool", "usr/local"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			return fmt.Errorf("make directory of machine: %w", err)
		}
	}
	for dir, mode := range map[string]fs.FileMode{"root": 0o700, "tmp": 0o777 | fs.ModeSticky, "var/tmp": 0o777 | fs.ModeSticky} {
		path := filepath.Join(root, dir)
		if err := errors.Join(os.MkdirAll(path, 0o700), os.Chmod(path, mode)); err != nil {
			return fmt.Errorf("make directory of machine: %w", err)
		}
	}
	if err := os.Symlink("/run", filepath.Join(root, "var/run")); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("link /var/run of machine: %w", err)
	}
	for _, name := range systemDirs {
		if err := copyEntry("/"+name, filepath.Join(root, name), false); err != nil {
			return err
		}
	}
	for _, name := range hostFiles {
		if err := copyEntry(filepath.Join("/etc", name), filepath.Join(root, "etc", name), true); err != nil {
			return err
		}
	}
	id := make([]byte, 16)
	rand.Read(id)
	for name, content := range map[string]string{
		"hostname": hostname + "\n", "machine-id": fmt.Sprintf("%x\n", id), "resolv.conf": "",
		"hosts": "127.0.0.1 localhost\n127.0.1.1 " + hostname + "\n",
	} {
		if err := os.WriteFile(filepath.Join(root, "etc", name), []byte(content), 0o644); err != nil {
			return fmt.Errorf("write /etc/%s of machine: %w", name, err)
		}
	}
	return nil
}

// copyEntry copies a link, a file, or a directory (with its content only where deep). What does not exist is skipped, and so is what another
// program removes meanwhile.
func copyEntry(from, to string, deep bool) error {
	info, err := os.Lstat(from)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look at %s: %w", from, err)
	}
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		target, err := os.Readlink(from)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil {
			if err = os.Symlink(target, to); errors.Is(err, fs.ErrExist) {
				err = nil
			}
		}
		if err != nil {
			return fmt.Errorf("copy link %s: %w", from, err)
		}
	case info.IsDir():
		if err := os.MkdirAll(to, 0o755); err != nil {
			return fmt.Errorf("make directory of machine: %w", err)
		}
		if !deep {
			return nil
		}
		entries, err := os.ReadDir(from)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("list %s: %w", from, err)
		}
		for _, entry := range entries {
			// Private keys of the host stay where they are.
			if entry.Name() == "private" {
				continue
			}
			if err := copyEntry(filepath.Join(from, entry.Name()), filepath.Join(to, entry.Name()), true); err != nil {
				return err
			}
		}
	case info.Mode().IsRegular():
		content, err := os.ReadFile(from)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil {
			err = os.WriteFile(to, content, info.Mode().Perm())
		}
		if err != nil {
			return fmt.Errorf("copy %s: %w", from, err)
		}
	}
	return nil
}

// removeDisk removes a directory, and refuses where anything is mounted below it: then it would empty what is mounted.
func removeDisk(dir string) error {
	mounts, err := mountPoints()
	if err != nil {
		return err
	}
	for _, mount := range mounts {
		if mount == dir || strings.HasPrefix(mount, dir+"/") {
			return fmt.Errorf("remove %s: %s is mounted", dir, mount)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove %s: %w", dir, err)
	}
	return nil
}

// mountPoints lists what is mounted in this mount namespace, in the order of the mounts.
func mountPoints() ([]string, error) {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	var points []string
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); len(fields) > 4 {
			points = append(points, fields[4])
		}
	}
	return points, nil
}
