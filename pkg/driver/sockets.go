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
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

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
	if _, err := os.Stat(d.KubeletDir); err != nil {
		return fmt.Errorf("find kubelet directory (has this node another one?): %w", err)
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
	file fs.FileInfo
}

// unnamedSocket is a name that kubelet's plugin watcher ignores, because it starts with a dot (k8s.io/kubernetes,
// pkg/kubelet/pluginmanager/pluginwatcher).
const unnamedSocket = ".tandem.sock"

// listen is what the helper calls for one of its endpoints. It replaces the socket of an earlier agent: waitUntilAlone has found that
// no process listens there. The socket gets its name once it listens: a kubelet that is refused waits a second before it connects again.
func (s *ownSocket) listen(_ context.Context, path string) (net.Listener, error) {
	unnamed := filepath.Join(filepath.Dir(path), unnamedSocket)
	if err := os.Remove(unnamed); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove stale socket: %w", err)
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: unnamed, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on socket: %w", err)
	}
	listener.SetUnlinkOnClose(false)
	if err := os.Rename(unnamed, path); err != nil {
		return nil, errors.Join(fmt.Errorf("name socket: %w", err), listener.Close(), os.Remove(unnamed))
	}
	file, err := os.Lstat(path)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("identify socket: %w", err), listener.Close())
	}
	s.UnixListener, s.path, s.file = listener, path, file
	return s, nil
}

// Close stops listening and removes the socket if it is still ours.
func (s *ownSocket) Close() error {
	var err error
	if s.inPlace() {
		err = os.Remove(s.path)
	}
	return errors.Join(err, s.UnixListener.Close())
}

// inPlace reports whether the path still leads to this socket.
func (s *ownSocket) inPlace() bool {
	file, err := os.Lstat(s.path)
	return err == nil && os.SameFile(file, s.file)
}

// watchSockets looks for another process that serves our driver name, at once and after changes, until done returns true or ctx is
// done. ours are the sockets of the session, if there is one.
func (d *Driver) watchSockets(ctx context.Context, ours []*ownSocket, done func(conflicting error) bool) {
	watch := filewatch.New(ctx, filewatch.Options{Dirs: []string{d.registryDir(), d.pluginDir()}, Interval: d.CheckInterval})
	defer watch.Close()
	tick := time.NewTicker(d.CheckInterval)
	defer tick.Stop()
	asked := map[string]fs.FileInfo{}
	for {
		conflicting := d.findConflicting(ctx, ours, asked)
		if ctx.Err() != nil || done(conflicting) {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-watch.C:
		}
	}
}

// ConflictingDriverError means that another process serves our driver name on this node. kubelet would use the one that registered
// last, and neither would know what the other prepared. Ready returns it.
type ConflictingDriverError struct {
	DriverName string
	// Socket on which the other process answers.
	Socket string
}

// Error names the socket and the remedy.
func (e *ConflictingDriverError) Error() string {
	return fmt.Sprintf("another process serves DRA driver %s on this node at %s: uninstall it (NVIDIA's DRA driver?), or give one of the two another driver name", e.DriverName, e.Socket)
}

// socketTimeout bounds one request to a socket. kubelet allows a second for GetInfo.
const socketTimeout = time.Second

// waitUntilAlone returns once no other process serves our driver name, or ctx is done.
func (d *Driver) waitUntilAlone(ctx context.Context) {
	d.watchSockets(ctx, nil, func(conflicting error) bool {
		d.setWaiting(ctx, "ConflictingDriver", conflicting)
		return conflicting == nil
	})
}

// findConflicting returns a *ConflictingDriverError for the first live socket of our driver name that is not ours, or nil. Only one
// agent owns the ledger, so no live socket belongs to an earlier agent; a dead one (connection refused) is ignored. asked remembers
// the sockets of other drivers: they are asked once, because some plugins log every call (TestOtherDriversAreAskedOnce).
func (d *Driver) findConflicting(ctx context.Context, ours []*ownSocket, asked map[string]fs.FileInfo) error {
	isOurs := func(path string) bool {
		return slices.ContainsFunc(ours, func(s *ownSocket) bool { return s.path == path && s.inPlace() })
	}
	// The helper library names the socket dra.sock, and for rolling updates dra-<pod UID>.sock. Any listener there conflicts.
	services, _ := filepath.Glob(filepath.Join(d.pluginDir(), "dra*.sock")) // the pattern is valid
	for _, path := range append(services, d.registrationSocket()) {
		if !isOurs(path) && listening(ctx, path) {
			return &ConflictingDriverError{DriverName: d.DriverName, Socket: path}
		}
	}
	// A driver may register under any file name, also below a directory. An unreadable or removed file serves nothing.
	return filepath.WalkDir(d.registryDir(), func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.Type()&fs.ModeSocket == 0 || isOurs(path) {
			return nil
		}
		file, err := entry.Info()
		if err != nil || asked[path] != nil && os.SameFile(asked[path], file) {
			return nil
		}
		info, err := pluginInfo(ctx, path)
		switch {
		case err != nil:
			return nil
		case info.Type == registerapi.DRAPlugin && info.Name == d.DriverName:
			return &ConflictingDriverError{DriverName: d.DriverName, Socket: path}
		}
		asked[path] = file
		return nil
	})
}

// listening reports whether a process listens on the socket.
func listening(ctx context.Context, path string) bool {
	dialer := net.Dialer{Timeout: socketTimeout}
	conn, err := dialer.DialContext(ctx, "unix", path)
	if err != nil {
		// A full backlog belongs to a live process that does not accept.
		timeout, ok := errors.AsType[net.Error](err)
		return ok && timeout.Timeout() && ctx.Err() == nil
	}
	_ = conn.Close() // nothing was written
	return true
}

// pluginInfo asks a registration socket for its driver, as kubelet does.
func pluginInfo(ctx context.Context, path string) (*registerapi.PluginInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, socketTimeout)
	defer cancel()
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("dial registration socket %s: %w", path, err)
	}
	defer conn.Close()
	info, err := registerapi.NewRegistrationClient(conn).GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil {
		return nil, fmt.Errorf("get info from registration socket %s: %w", path, err)
	}
	return info, nil
}
