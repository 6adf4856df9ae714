// SPDX-License-Identifier: Apache-2.0

// The sockets on which kubelet finds the driver, and the sessions of its servers.

package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/runtime/schema"
	metadatav1alpha1 "k8s.io/dynamic-resource-allocation/api/metadata/v1alpha1"
	metadatav1beta1 "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/tandem-gpu/tandem/internal/filewatch"
)

// errSocketLost ends a session of which another process removed a socket: kubelet drops the driver then
// (TestRemovedSocketsComeBack).
var errSocketLost = errors.New("a socket of the driver was removed")

// session is one run of the two gRPC servers.
type session struct {
	*Driver
	ctx                   context.Context
	cancel                context.CancelCauseFunc
	registration, service ownSocket
	// calls is locked for reading by each call in flight: the helper's Stop waits for no handler
	// (TestStopFinishesWaitingCallsAndLeavesNothing).
	calls sync.RWMutex
	// answered is when the helper's handler last returned for a call about claims, in nanoseconds since 1970. Prepares that HeldOnly
	// refuses do not count, because kubelet repeats them. Registrations do not either: service does not see their answers.
	answered atomic.Int64
}

// serve runs the servers and the publisher until ctx is done or one of them fails.
func (d *Driver) serve(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s := &session{Driver: d, ctx: ctx, cancel: cancel}
	d.set(&d.kubelet, notRegistered(d.Config))
	// The helper stops at once when its context ends. Calls in flight should be answered first.
	helper, err := kubeletplugin.Start(context.WithoutCancel(ctx), s,
		kubeletplugin.DriverName(d.DriverName),
		kubeletplugin.KubeClient(d.KubeClient),
		kubeletplugin.NodeName(d.NodeName),
		kubeletplugin.RegistrarDirectoryPath(d.registryDir()),
		kubeletplugin.PluginDataDirectoryPath(d.pluginDir()),
		kubeletplugin.RegistrarListener(s.registration.listen),
		kubeletplugin.PluginListener(s.service.listen),
		// This process owns the ledger, which orders the calls for one claim.
		kubeletplugin.Serialize(false),
		kubeletplugin.GRPCInterceptor(s.intercept),
		// An older consumer may not know the newer version (kubeletplugin.EnableDeviceMetadata).
		kubeletplugin.EnableDeviceMetadata(d.MetadataDir != "",
			[]schema.GroupVersion{metadatav1beta1.SchemeGroupVersion, metadatav1alpha1.SchemeGroupVersion}),
		kubeletplugin.CDIDirectory(d.MetadataDir),
	)
	if err != nil {
		return fmt.Errorf("start servers for kubelet: %w", err)
	}
	defer func() { d.set(&d.kubelet, notRegistered(d.Config)) }()
	defer helper.Stop()
	defer s.finishCalls()

	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.guardSockets(ctx) })
	if d.HeldOnly == nil {
		group.Go(func() error { return d.publish(ctx) })
		group.Go(func() error { return d.writeConditions(ctx) })
		if d.Strict {
			group.Go(func() error { return d.confirmAllocations(ctx) })
		}
	}
	err = group.Wait()
	// Calls that wait for a device fail now.
	cancel(err)
	return cmp.Or(err, context.Cause(s.ctx))
}

// guardSockets ends the session when its sockets are gone or another driver with our name appears. While the other driver is
// there, pods with limits get no device: the session may end late, because a call in flight waits for the driver of NVIDIA.
func (s *session) guardSockets(ctx context.Context) (err error) {
	s.watchSockets(ctx, []*ownSocket{&s.registration, &s.service}, func(conflicting error) bool {
		if err = conflicting; err == nil && !(s.registration.inPlace() && s.service.inPlace()) {
			err = errSocketLost
		}
		if conflicting != nil && ctx.Err() == nil {
			_ = s.withhold(ctx, conflicting)
		}
		return err != nil
	})
	return err
}

// intercept handles every call of kubelet to both servers.
func (s *session) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if !s.calls.TryRLock() {
		return nil, status.Error(codes.Unavailable, "the driver is stopping")
	}
	defer s.calls.RUnlock()
	prepare := strings.HasSuffix(info.FullMethod, "/NodePrepareResources")
	if prepare && s.HeldOnly != nil {
		// At once: the helper would first get the claims, and wait for an API server that hangs.
		return nil, status.Errorf(codes.Unavailable, "prepare claims: %v; kubelet retries", s.HeldOnly)
	}
	// A call ends with the session, too.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(s.ctx, func() { cancel(context.Cause(s.ctx)) })()

	start := time.Now()
	resp, err := handler(ctx, req)
	switch {
	case prepare:
		s.answered.Store(time.Now().UnixNano())
		observe(s.metrics.prepare, start, err == nil && prepareSucceeded(resp))
	case strings.HasSuffix(info.FullMethod, "/NodeUnprepareResources"):
		s.answered.Store(time.Now().UnixNano())
		observe(s.metrics.unprepare, start, err == nil)
	case strings.HasSuffix(info.FullMethod, "/NotifyRegistrationStatus"):
		if status, ok := req.(*registerapi.RegistrationStatus); ok {
			s.registrationChanged(ctx, status)
		}
	}
	return resp, err
}

// prepareSucceeded reports whether an answer has no claim with an error. kubelet 1.34 and newer call v1.
func prepareSucceeded(resp any) bool {
	answer, _ := resp.(*drapbv1.NodePrepareResourcesResponse)
	for _, claim := range answer.GetClaims() {
		if claim.GetError() != "" {
			return false
		}
	}
	return true
}

// registrationChanged records kubelet's answer for Ready and makes the publisher compare with the API server.
func (s *session) registrationChanged(ctx context.Context, status *registerapi.RegistrationStatus) {
	if !status.PluginRegistered {
		s.set(&s.kubelet, fmt.Errorf("kubelet refuses driver %s: %s", s.DriverName, status.Error))
		klog.FromContext(ctx).Info("kubelet refuses the driver", "reason", status.Error)
		return
	}
	s.set(&s.kubelet, nil)
	s.metrics.registrations.Inc()
	klog.FromContext(ctx).Info("kubelet registered the driver", "driverName", s.DriverName)
	s.kubeletRegistered.Store(true)
	s.publishAgain.Notify()
}

// HandleError is called by the helper when a server failed. That ends the session.
func (s *session) HandleError(ctx context.Context, err error, msg string) {
	if errors.Is(err, kubeletplugin.ErrRecoverable) {
		klog.FromContext(ctx).Error(err, "The plugin helper reports a recoverable error", "message", msg)
		return
	}
	s.cancel(fmt.Errorf("%s: %w", msg, err))
}

const (
	// firstWriteTime is how long gRPC may take to start writing an answer after its handler returned, writeTime how long it may take to
	// finish. Stop discards what is not written by then, as a crash would, and kubelet repeats the call to the next agent.
	firstWriteTime = time.Second
	writeTime      = 20 * time.Millisecond
)

// finishCalls refuses further calls, waits for those in flight, and gives gRPC time to write their answers. It cannot see which answer
// was written: the helper takes no stats handler, with which pkg/legacy counts answers. So it waits until something was written after the
// last handler returned, and then nothing for writeTime.
func (s *session) finishCalls() {
	s.calls.Lock()
	answered := s.answered.Load()
	// The clock may have been set back.
	since := func(nanoseconds int64) time.Duration { return max(0, time.Since(time.Unix(0, nanoseconds))) }
	for stopped := time.Now(); time.Since(stopped) < firstWriteTime; time.Sleep(time.Millisecond) {
		written := s.service.written.Load()
		begun := written >= answered || since(answered) >= firstWriteTime
		if begun && since(max(answered, written)) >= writeTime {
			return
		}
	}
}

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
	// written is when something was last written to one of its connections, in nanoseconds since 1970.
	written atomic.Int64
}

// Accept returns a connection whose writes update written.
func (s *ownSocket) Accept() (net.Conn, error) {
	conn, err := s.UnixListener.Accept()
	if err != nil {
		return nil, err
	}
	return &acceptedConn{conn, &s.written}, nil
}

// acceptedConn notes when it was last written to.
type acceptedConn struct {
	net.Conn
	written *atomic.Int64
}

func (c *acceptedConn) Write(data []byte) (int, error) {
	n, err := c.Conn.Write(data)
	c.written.Store(time.Now().UnixNano())
	return n, err
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
	return fmt.Sprintf("another process serves DRA driver %s on this node at %s: uninstall one of the two (NVIDIA's DRA driver?)",
		e.DriverName, e.Socket)
}

// waitUntilAlone returns once no other process serves our driver name, or ctx is done.
func (d *Driver) waitUntilAlone(ctx context.Context) {
	alone := func(conflicting error) bool {
		conflicting = d.withhold(ctx, conflicting)
		if ctx.Err() != nil {
			return true
		}
		d.setWaiting(ctx, "ConflictingDriver", conflicting)
		return conflicting == nil
	}
	// Without a watch first: the kernel takes 10 ms to close one (figure start_to_getinfo).
	if !alone(d.findConflicting(ctx, nil, map[string]fs.FileInfo{})) {
		d.watchSockets(ctx, nil, alone)
	}
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
		if !isOurs(path) && d.listening(ctx, path) {
			return &ConflictingDriverError{DriverName: d.DriverName, Socket: path}
		}
	}
	// A driver may register under any file name, also below a directory. An unreadable or removed file serves nothing.
	return filepath.WalkDir(d.registryDir(), func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.Type()&fs.ModeSocket == 0 || isOurs(path) {
			return nil
		}
		file, err := entry.Info()
		if err != nil || asked[path] != nil && sameSocket(asked[path], file) {
			return nil
		}
		info, err := d.pluginInfo(ctx, path)
		switch {
		case err != nil && d.conflicted(path) && d.listening(ctx, path):
			return &ConflictingDriverError{DriverName: d.DriverName, Socket: path}
		case err != nil:
			return nil
		case info.Type == registerapi.DRAPlugin && info.Name == d.DriverName:
			return &ConflictingDriverError{DriverName: d.DriverName, Socket: path}
		}
		asked[path] = file
		return nil
	})
}

// sameSocket reports whether two FileInfos of a path describe the same socket. A new socket often gets the inode of the removed one, so
// sameSocket compares the modification times as well.
func sameSocket(a, b fs.FileInfo) bool { return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) }

// listening reports whether a process listens on the socket.
func (d *Driver) listening(ctx context.Context, path string) bool {
	dialer := net.Dialer{Timeout: d.socketTimeout}
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
func (d *Driver) pluginInfo(ctx context.Context, path string) (*registerapi.PluginInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, d.socketTimeout)
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
