// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/hack/cluster"
)

// fillDir is the directory whose existence keeps a file system full, with the file that fills it.
const (
	fillDir  = ".filler"
	fillFile = fillDir + "/zeros"
)

// Filler keeps a file system full.
type Filler struct {
	node  *cluster.Node
	dir   string
	ended chan error
}

// Fill fills a node's file system, by one of its directories, and what becomes free in it, until Stop. The caller awaits that it is full.
func Fill(ctx context.Context, node *cluster.Node, dir string) (*Filler, error) {
	// The loop ends with its directory, so that another process can end it.
	cmd, err := node.Command(context.WithoutCancel(ctx), "sh", "-c", `cd $0 && mkdir -p `+fillDir+` &&
		while [ -d `+fillDir+` ]; do cat /dev/zero >> `+fillFile+`; sleep 0.05; done 2> /dev/null; true`, dir)
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, fmt.Errorf("fill %s of %s: %w", dir, node.Name(), err)
	}
	f := &Filler{node: node, dir: dir, ended: make(chan error, 1)}
	go func() {
		f.ended <- cmd.Wait()
		close(f.ended)
	}()
	return f, nil
}

// Take removes files, given by a pattern of the shell, and at once fills what becomes free. The owner of the files may find the room
// between the two, and write them again: call Take until the effect of the loss is seen.
func (f *Filler) Take(ctx context.Context, files string) error {
	_, err := run(ctx, f.node, "sh", "-c", "rm -f "+files+"; cat /dev/zero >> "+filepath.Join(f.dir, fillFile)+" 2> /dev/null; true")
	return err
}

// Full reports whether the file system has no free block.
func (f *Filler) Full(ctx context.Context) (bool, error) {
	free, err := run(ctx, f.node, "stat", "-f", "-c", "%f", f.dir)
	return strings.TrimSpace(free) == "0", err
}

// Stop frees what was filled. It is idempotent, and works after the context of Fill is done.
func (f *Filler) Stop(ctx context.Context) error {
	err := Empty(context.WithoutCancel(ctx), f.node, f.dir)
	<-f.ended // how a loop ends whose directory is gone does not matter
	return err
}

// Empty ends what Fill began for a directory of a node, also in another process. It is idempotent.
func Empty(ctx context.Context, node *cluster.Node, dir string) error {
	// Renamed first: the loop would make its file again in a directory that is being removed.
	_, err := run(ctx, node, "sh", "-c", `cd $0 && { [ ! -d `+fillDir+` ] || mv `+fillDir+` `+fillDir+`.gone; } && rm -rf `+fillDir+`.gone`, dir)
	return err
}

// SetReadOnly makes the mount of a container's directory read-only, or writable again. The container is that of all processes of a name
// on the node; the directory is a mount of it. Other mounts of the same directory do not change, and a container that starts later has a
// writable one. It returns how many processes it found.
func SetReadOnly(ctx context.Context, node *cluster.Node, program, dir string, readOnly bool) (found int, err error) {
	root, err := node.Root()
	if err != nil {
		return 0, err
	}
	pids, err := run(ctx, node, "sh", "-c", "pgrep -x $0 || true", program)
	if err != nil {
		return 0, err
	}
	flags := uintptr(unix.MS_REMOUNT | unix.MS_BIND)
	if readOnly {
		flags |= unix.MS_RDONLY
	}
	for _, pid := range strings.Fields(pids) {
		err := inMounts(filepath.Join(root, "proc", pid, "ns/mnt"), func() error { return unix.Mount("", dir, "", flags, "") })
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // it has ended
		}
		if err != nil {
			return found, fmt.Errorf("remount %s of %s on %s: %w", dir, program, node.Name(), err)
		}
		found++
	}
	return found, nil
}

// inMounts calls a function that sees the mounts of a mount namespace.
func inMounts(namespace string, call func() error) error {
	file, err := os.Open(namespace)
	if err != nil {
		return err
	}
	defer file.Close()
	ended := make(chan error, 1)
	go func() {
		// The thread keeps that view, so it ends with the goroutine: it is never unlocked.
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			ended <- fmt.Errorf("leave the process's root directory: %w", err)
			return
		}
		if err := unix.Setns(int(file.Fd()), unix.CLONE_NEWNS); err != nil {
			ended <- fmt.Errorf("enter %s: %w", namespace, err)
			return
		}
		ended <- call()
	}()
	return <-ended
}
