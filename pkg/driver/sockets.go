// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
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
	path  string
	file  fileID
	calls *callGate
}

type fileID struct{ dev, inode uint64 }

// listenOwn removes the socket of an earlier agent and listens. waitUntilAlone has found that no process listens there.
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
type sockets struct {
	registration, service *ownSocket
	calls                 *callGate
}

// listen returns what the helper calls for one of its endpoints.
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

// owns reports whether path leads to one of the two sockets. Nil owns none.
func (s *sockets) owns(path string) bool {
	if s == nil {
		return false
	}
	return (path == s.registration.path && s.registration.inPlace()) || (path == s.service.path && s.service.inPlace())
}

// countedConn reports to a callGate which HTTP/2 streams kubelet opened and the server has not ended yet. gRPC has no other
// report of an answer that reached the socket: its stats handlers run before the write.
type countedConn struct {
	net.Conn
	gate *callGate

	mu      sync.Mutex
	in, out http2Frames
	open    map[uint32]bool
}

func newCountedConn(conn net.Conn, gate *callGate) *countedConn {
	return &countedConn{Conn: conn, gate: gate, in: http2Frames{skip: len(http2Preface)}, open: map[uint32]bool{}}
}

// Read implements net.Conn.
func (c *countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.count(&c.in, b[:n], c.opened)
	return n, err
}

func (c *countedConn) opened(kind, _ byte, stream uint32) {
	switch kind {
	case http2Headers:
		c.open[stream] = true
	case http2Reset:
		delete(c.open, stream)
	}
}

// Write implements net.Conn.
func (c *countedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.count(&c.out, b[:n], c.ended)
	return n, err
}

func (c *countedConn) ended(kind, flags byte, stream uint32) {
	if kind == http2Reset || kind == http2Headers && flags&http2EndStream != 0 {
		delete(c.open, stream)
	}
}

// Close implements net.Conn.
func (c *countedConn) Close() error {
	c.count(nil, nil, nil)
	return c.Conn.Close()
}

// count applies the frames that begin in b; without frames it forgets all streams.
func (c *countedConn) count(frames *http2Frames, b []byte, apply func(kind, flags byte, stream uint32)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := len(c.open)
	if frames == nil {
		clear(c.open)
	} else {
		frames.read(b, apply)
	}
	if difference := len(c.open) - before; difference != 0 {
		c.gate.countStreams(difference)
	}
}

// RFC 9113, sections 3.4, 4.1, 6.2 and 6.4.
const (
	http2Preface   = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	http2Headers   = 0x1
	http2Reset     = 0x3
	http2EndStream = 0x1

	http2HeaderSize = 9
)

// http2Frames finds the headers of frames in one direction of a connection.
type http2Frames struct {
	skip   int
	header []byte
}

func (f *http2Frames) read(b []byte, apply func(kind, flags byte, stream uint32)) {
	for len(b) > 0 {
		if f.skip > 0 {
			n := min(f.skip, len(b))
			f.skip, b = f.skip-n, b[n:]
			continue
		}
		n := min(http2HeaderSize-len(f.header), len(b))
		f.header, b = append(f.header, b[:n]...), b[n:]
		if len(f.header) == http2HeaderSize {
			h := f.header
			f.skip = int(h[0])<<16 | int(h[1])<<8 | int(h[2])
			apply(h[3], h[4], binary.BigEndian.Uint32(h[5:])&0x7fffffff)
			f.header = f.header[:0]
		}
	}
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
