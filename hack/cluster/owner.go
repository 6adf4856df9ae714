// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/hack/filelock"
)

// ownerFile is locked by the process that has made the directory, and so as long as that runs.
const ownerFile = "owner.lock"

// owned keeps the locks: a file that is not referred to any more would be closed.
var owned sync.Map

// OwnedDir makes a directory in os.TempDir for clusters that shall not outlive this process. The caller stops them and removes it; where the
// process is killed, the next OwnedDir with the same prefix does, and tells progress, which may be nil.
func OwnedDir(ctx context.Context, prefix string, progress io.Writer) (string, error) {
	if err := sweep(ctx, prefix, progress); err != nil {
		return "", err
	}
	// Under another name until it is locked: another process's sweep does not find it.
	hidden, err := os.MkdirTemp("", "."+prefix)
	if err != nil {
		return "", fmt.Errorf("make directory of clusters: %w", err)
	}
	unlock, err := filelock.Wait(ctx, filepath.Join(hidden, ownerFile))
	dir := filepath.Join(filepath.Dir(hidden), strings.TrimPrefix(filepath.Base(hidden), "."))
	if err == nil {
		err = os.Rename(hidden, dir)
	}
	if err != nil {
		return "", errors.Join(fmt.Errorf("make directory of clusters: %w", err), os.RemoveAll(hidden))
	}
	owned.Store(dir, unlock)
	return dir, nil
}

// sweep removes what OwnedDir has made for processes that have ended, with the clusters in it.
func sweep(ctx context.Context, prefix string, progress io.Writer) error {
	files, err := filepath.Glob(filepath.Join(os.TempDir(), prefix+"*", ownerFile))
	if err != nil {
		return fmt.Errorf("look for clusters of ended processes: %w", err)
	}
	for _, file := range files {
		unlock, ok, err := filelock.Try(file)
		if errors.Is(err, fs.ErrNotExist) || err == nil && !ok {
			continue
		}
		if err == nil {
			err = removeOwned(ctx, filepath.Dir(file), progress)
			unlock()
		}
		if err != nil {
			return fmt.Errorf("remove clusters of ended processes: %w", err)
		}
	}
	return nil
}

// removeOwned removes a directory whose lock the caller has.
func removeOwned(ctx context.Context, dir string, progress io.Writer) error {
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	sayer(progress)("removing %s, which a process that was killed has left", dir)
	configs, err := filepath.Glob(filepath.Join(dir, "*", configFile))
	if err != nil {
		return err
	}
	for _, config := range configs {
		c, err := Open(filepath.Dir(config), nil)
		if err != nil {
			return err
		}
		if err := c.endVisitors(ctx); err != nil {
			return err
		}
		if err := c.Stop(ctx); err != nil {
			return err
		}
	}
	if err := unmountBelow(dir); err != nil {
		return err
	}
	return removeDisk(dir)
}

// endVisitors ends all processes in the networks of the cluster's machines: also those of Command, which belong to the host and do not end
// with a machine.
func (c *Cluster) endVisitors(ctx context.Context) error {
	networks := map[string]bool{}
	for _, m := range c.machines() {
		holder, err := m.holder()
		if errors.Is(err, errDown) {
			continue
		}
		if err != nil {
			return err
		}
		network, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", holder.Pid))
		if err != nil {
			return fmt.Errorf("find network of %s: %w", m.name, err)
		}
		networks[network] = true
	}
	links, err := filepath.Glob("/proc/[0-9]*/ns/net")
	if err != nil {
		return err
	}
	for _, link := range links {
		// Processes may end meanwhile.
		if network, err := os.Readlink(link); err != nil || !networks[network] {
			continue
		}
		pid, err := strconv.Atoi(strings.Split(link, "/")[2])
		if err != nil {
			return fmt.Errorf("read process ID of %s: %w", link, err)
		}
		visitor, err := identify(pid)
		if err == nil {
			err = visitor.kill(ctx)
		}
		if err != nil && !errors.Is(err, errGone) {
			return err
		}
	}
	return nil
}

// unmountBelow unmounts what an ended process has mounted below a directory.
func unmountBelow(dir string) error {
	mounts, err := mountPoints()
	if err != nil {
		return err
	}
	for _, mount := range slices.Backward(mounts) {
		if !strings.HasPrefix(mount, dir+"/") {
			continue
		}
		if err := unix.Unmount(mount, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount %s: %w", mount, err)
		}
	}
	return nil
}
