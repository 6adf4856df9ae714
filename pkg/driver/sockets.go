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
	"time"

	"github.com/tandem-gpu/tandem/internal/filewatch"
)

// maxSocketPath is the longest path of a Unix socket in bytes (unix(7), sun_path).
const maxSocketPath = 107

// registryDir is watched by kubelet for registration sockets.
func (c *Config) registryDir() string { return filepath.Join(c.KubeletDir, "plugins_registry") }

// pluginDir has the socket that serves claims.
func (c *Config) pluginDir() string { return filepath.Join(c.KubeletDir, "plugins", c.DriverName) }

// registrationSocket has the helper library's default name.
func (c *Config) registrationSocket() string {
	return filepath.Join(c.registryDir(), c.DriverName+"-reg.sock")
}

// prepareDirectories creates the directories that kubelet may not have created yet. KubeletDir itself must exist: no kubelet watches
// a misspelt one.
func (d *Driver) prepareDirectories() error {
	info, err := os.Stat(d.KubeletDir)
	if err != nil {
		return fmt.Errorf("find kubelet directory (has this node another one?): %w", err)
	}
	if !info.IsDir() {
		return fmt.Errorf("find kubelet directory: %s is not a directory", d.KubeletDir)
	}
	for _, dir := range []string{d.registryDir(), d.pluginDir()} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return fmt.Errorf("create directory for sockets: %w", err)
		}
	}
	return nil
}

// ownSocket is a listening Unix socket. It removes only its own file; the helper's listener would remove a socket that replaced it
// (TestConflictingDriverThatComesLater).
type ownSocket struct {
	*net.UnixListener
	path string
	file fileID
}

type fileID struct{ dev, inode uint64 }

// listenOwn removes the socket of an earlier agent and listens. waitUntilAlone has found that no process listens there.
func listenOwn(path string) (*ownSocket, error) {
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
	return &ownSocket{UnixListener: listener, path: path, file: file}, nil
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

// inPlace reports whether the path still leads to this socket.
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

// sockets are the two sockets of one session.
type sockets struct{ registration, service *ownSocket }

// listenInto returns what the helper calls for one of its endpoints.
func listenInto(socket **ownSocket) func(context.Context, string) (net.Listener, error) {
	return func(_ context.Context, path string) (net.Listener, error) {
		own, err := listenOwn(path)
		if err != nil {
			return nil, err
		}
		*socket = own
		return own, nil
	}
}

func (s *sockets) inPlace() bool { return s.registration.inPlace() && s.service.inPlace() }

// owns reports whether path leads to one of the two sockets. Nil owns none.
func (s *sockets) owns(path string) bool {
	if s == nil {
		return false
	}
	return (path == s.registration.path && s.registration.inPlace()) || (path == s.service.path && s.service.inPlace())
}

// watchSockets reports changes in the two directories with sockets.
func (d *Driver) watchSockets(ctx context.Context) *filewatch.Watcher {
	return filewatch.New(ctx, filewatch.Options{Dirs: []string{d.registryDir(), d.pluginDir()}, Interval: d.CheckInterval})
}

// waitForSockets returns true after a change or the CheckInterval, and false when ctx is done.
func (d *Driver) waitForSockets(ctx context.Context, watch *filewatch.Watcher) bool {
	timer := time.NewTimer(d.CheckInterval)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
	case <-watch.C:
	}
	return true
}
