// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"

	"golang.org/x/sys/unix"
)

// kinds of namespaces that startIn enters; the cgroup namespace comes later (joinGroup).
var kinds = []struct {
	file string
	flag int
}{
	{"ipc", unix.CLONE_NEWIPC}, {"uts", unix.CLONE_NEWUTS}, {"net", unix.CLONE_NEWNET},
	{"pid", unix.CLONE_NEWPID}, {"mnt", unix.CLONE_NEWNS},
}

// inThread runs work on a thread of its own, which ends with it, whatever namespaces it has entered.
func inThread(work func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The runtime never ends the first thread, and to others it stands for the whole process (/proc/self): keep it
			// busy, so that the next goroutine gets another one.
			defer runtime.UnlockOSThread()
			done <- inThread(work)
			return
		}
		// Never unlocked: the runtime ends a locked thread with its goroutine.
		done <- work()
	}()
	return <-done
}

// startIn starts a command in the namespaces of the machine that the holder keeps. The command is a direct child.
func startIn(holder process, cmd *exec.Cmd) error {
	return inThread(func() error {
		// A thread that shares its root directory with others may not change its mount namespace.
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return fmt.Errorf("unshare file system attributes: %w", err)
		}
		files := make([]*os.File, len(kinds))
		for i, kind := range kinds {
			file, err := os.Open(fmt.Sprintf("/proc/%d/ns/%s", holder.Pid, kind.file))
			if err != nil {
				return fmt.Errorf("open %s namespace: %w", kind.file, err)
			}
			defer file.Close()
			files[i] = file
		}
		if !holder.alive() {
			return fmt.Errorf("enter machine: process %d: %w", holder.Pid, errGone)
		}
		for i, kind := range kinds {
			if err := unix.Setns(int(files[i].Fd()), kind.flag); err != nil {
				return fmt.Errorf("enter %s namespace: %w", kind.file, err)
			}
		}
		return cmd.Start()
	})
}

// dialIn opens a connection from within the network namespace of the machine that the holder keeps.
func dialIn(ctx context.Context, holder process, network, address string) (net.Conn, error) {
	var conn net.Conn
	err := inNetwork(holder, func() (err error) {
		// A numeric address is dialled on this very thread; names would be looked up on others.
		conn, err = (&net.Dialer{}).DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// listenIn opens a socket within the network namespace of the machine that the holder keeps. It stays there: any thread may use it.
func listenIn(ctx context.Context, holder process, network, address string) (net.Listener, error) {
	var listener net.Listener
	err := inNetwork(holder, func() (err error) {
		listener, err = (&net.ListenConfig{}).Listen(ctx, network, address)
		return err
	})
	return listener, err
}

func inNetwork(holder process, work func() error) error {
	return inThread(func() error {
		file, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", holder.Pid))
		if err != nil {
			return fmt.Errorf("open network namespace: %w", err)
		}
		defer file.Close()
		if !holder.alive() {
			return fmt.Errorf("enter machine: process %d: %w", holder.Pid, errGone)
		}
		if err := unix.Setns(int(file.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace: %w", err)
		}
		return work()
	})
}
