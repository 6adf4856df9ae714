// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
)

// maxSocketPath is the longest path of a Unix socket on Linux (sun_path less its terminating zero).
const maxSocketPath = 107

// registryDir is where kubelet's plugin watcher looks for registration sockets.
func (c *Config) registryDir() string { return filepath.Join(c.KubeletDir, "plugins_registry") }

// pluginDir is where the driver's own socket lies.
func (c *Config) pluginDir() string { return filepath.Join(c.KubeletDir, "plugins", c.DriverName) }

// registrationSocket is named as the helper library names it by default.
func (c *Config) registrationSocket() string {
	return filepath.Join(c.registryDir(), c.DriverName+"-reg.sock")
}

// prepareDirectories makes what kubelet may not have made yet, below a directory that must exist: a misspelt kubelet
// directory must not be created, because no kubelet would ever look there.
func (d *Driver) prepareDirectories() error {
	info, err := os.Stat(d.KubeletDir)
	if err != nil {
		return fmt.Errorf("look for kubelet directory (is it another one on this node?): %w", err)
	}
	if !info.IsDir() {
		return fmt.Errorf("look for kubelet directory: %s is not a directory", d.KubeletDir)
	}
	for _, dir := range []string{d.registryDir(), d.pluginDir()} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return fmt.Errorf("make directory for sockets: %w", err)
		}
	}
	return nil
}

// ownSocket is a listening Unix socket that knows its own file, and removes no other: the helper's listener would take
// away the socket of whoever replaced ours.
type ownSocket struct {
	*net.UnixListener
	path  string
	file  fileID
	calls *callGate
}

type fileID struct{ dev, inode uint64 }

// listenOwn removes a stale socket and listens. Whether the socket is stale was settled by findForeign.
func listenOwn(path string, calls *callGate) (*ownSocket, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove stale socket: %w", err)
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on socket: %w", err)
	}
	listener.SetUnlinkOnClose(false)
	file, err := identify(path)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("identify socket: %w", err), listener.Close())
	}
	return &ownSocket{UnixListener: listener, path: path, file: file, calls: calls}, nil
}

// Accept implements net.Listener.
func (s *ownSocket) Accept() (net.Conn, error) {
	conn, err := s.UnixListener.Accept()
	if err != nil {
		return nil, err
	}
	return newCountedConn(conn, s.calls), nil
}

// Close stops listening and removes the socket if it is still ours.
func (s *ownSocket) Close() error {
	err := s.UnixListener.Close()
	if !s.inPlace() {
		return err
	}
	if removeErr := os.Remove(s.path); removeErr != nil && !errors.Is(removeErr, fs.ErrNotExist) {
		err = errors.Join(err, fmt.Errorf("remove socket: %w", removeErr))
	}
	return err
}

// inPlace reports whether the file at the socket's path is still this socket.
func (s *ownSocket) inPlace() bool {
	file, err := identify(s.path)
	return err == nil && file == s.file
}

func identify(path string) (fileID, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return fileID{}, err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fileID{}, fmt.Errorf("stat of %s has no inode", path)
	}
	return fileID{dev: stat.Dev, inode: stat.Ino}, nil
}

// sockets are the two of one session.
type sockets struct {
	registration, service *ownSocket
	calls                 *callGate
}

// listen is what the helper calls for each of its two endpoints.
func (s *sockets) listen(into **ownSocket) func(context.Context, string) (net.Listener, error) {
	return func(_ context.Context, path string) (net.Listener, error) {
		own, err := listenOwn(path, s.calls)
		if err != nil {
			return nil, err
		}
		*into = own
		return own, nil
	}
}

func (s *sockets) inPlace() bool { return s.registration.inPlace() && s.service.inPlace() }

// owns reports whether path is one of ours, as opposed to a socket that took its place.
func (s *sockets) owns(path string) bool {
	if s == nil {
		return false
	}
	return (path == s.registration.path && s.registration.inPlace()) || (path == s.service.path && s.service.inPlace())
}
