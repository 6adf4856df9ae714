// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/internal/filewatch"
)

// endpoint is one socket with a server, for one registration. kubelet 1.37 can never use a path again that was registered twice,
// so a path lives exactly as long as its endpoint.
type endpoint struct {
	path   string
	logger klog.Logger
	file   fileID
	server *grpc.Server
	served chan struct{} // closed when the server has ended
	// stopping is closed to end the streams.
	stopping chan struct{}
	// connections and calls in progress.
	connections, calls inFlight

	mu      sync.Mutex
	streams int
	firstUp chan struct{} // closed when the first stream begins
	allDown chan struct{} // closed when the last stream ends

	// sent is the list that was sent last; nil for none.
	sent     atomic.Pointer[listing]
	sentMore broadcast.Signal
}

// streamWorkers is how many calls of an endpoint run on goroutines that are reused: kubelet's stream, another reader, and its calls, which
// come one at a time.
const streamWorkers = 4

// openEndpoint listens on an unused path and serves.
func (r *registrar) openEndpoint(ctx context.Context, path string) (*endpoint, error) {
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on device plugin socket: %w", err)
	}
	e := &endpoint{
		path:   path,
		logger: klog.FromContext(ctx),
		// Workers have a grown stack. A new goroutine grows its own during Allocate, which costs a fifth of the call.
		server:   grpc.NewServer(grpc.WaitForHandlers(true), grpc.NumStreamWorkers(streamWorkers)),
		served:   make(chan struct{}),
		stopping: make(chan struct{}),
		firstUp:  make(chan struct{}),
		allDown:  make(chan struct{}),
	}
	// The next check notices a missing file.
	e.file, _ = identify(path)
	pluginapi.RegisterDevicePluginServer(e.server, &service{registrar: r, endpoint: e})
	go func() {
		defer close(e.served)
		// Serve returns when close stops the server. After any other reason the streams end or do not begin, which is watched.
		_ = e.server.Serve(&countingListener{Listener: listener, connections: &e.connections})
	}()
	return e, nil
}

// close waits for calls in progress for at most callDrain, ends the streams, waits for kubelet to disconnect, and removes the socket. It
// returns once all handlers have. kubelet up to 1.36 disconnects the current plugin when an old stream ends, so it must have disconnected from this
// endpoint before the next one registers; disconnectDrain bounds that wait.
func (e *endpoint) close(callDrain, disconnectDrain time.Duration) {
	await := func(done <-chan struct{}, limit time.Duration) {
		select {
		case <-done:
		case <-time.After(limit):
		}
	}
	await(e.calls.empty(), callDrain)
	close(e.stopping)
	await(e.connections.empty(), disconnectDrain)
	e.server.Stop()
	<-e.served
}

func (e *endpoint) streamStarted() (ended func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.streams++
	closeOnce(e.firstUp)
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.streams--; e.streams == 0 {
			closeOnce(e.allDown)
		}
	}
}

// closeOnce closes a channel that may be closed already. Callers hold the lock that guards it.
func closeOnce(c chan struct{}) {
	select {
	case <-c:
	default:
		close(c)
	}
}

// countingListener counts open connections. gRPC closes a connection when it finds that the peer has.
type countingListener struct {
	net.Listener
	connections *inFlight
}

func (l *countingListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &countedConn{Conn: conn, leave: l.connections.enter()}, nil
}

type countedConn struct {
	net.Conn
	leave func()
}

func (c *countedConn) Close() error {
	defer c.leave()
	return c.Conn.Close()
}

const (
	socketPrefix = "tandem-"
	socketSuffix = ".sock"
	nonceLength  = 12
	// longestStem is how much of a resource's name a socket's name keeps, so that the path fits for every profile.
	longestStem = 24
)

// longestSocketPath is sizeof(sockaddr_un.sun_path) less the closing NUL (unix(7)).
const longestSocketPath = 107

// newSocketName returns "tandem-<resource>-<nonce>.sock", with more randomness than one boot can use up.
func newSocketName(resource string) string {
	stem := filepath.Base(resource)
	return socketPrefix + stem[:min(len(stem), longestStem)] + "-" + rand.Text()[:nonceLength] + socketSuffix
}

// ownName reports whether newSocketName made the file name.
func ownName(name string) bool {
	stem, prefixed := strings.CutPrefix(name, socketPrefix)
	stem, suffixed := strings.CutSuffix(stem, socketSuffix)
	at := len(stem) - nonceLength - 1
	return prefixed && suffixed && at > 0 && at <= longestStem && stem[at] == '-'
}

// removeStale removes sockets of an earlier process of ours. A socket that answers is not stale.
func removeStale(directory string) error {
	entries, err := os.ReadDir(directory)
	if err != nil {
		return fmt.Errorf("remove stale sockets: %w", err)
	}
	for _, entry := range entries {
		path := filepath.Join(directory, entry.Name())
		if entry.Type()&os.ModeSocket == 0 || !ownName(entry.Name()) || alive(path) {
			continue
		}
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			return fmt.Errorf("remove stale socket: %w", err)
		}
	}
	return nil
}

// alive reports whether a process listens on the socket.
func alive(path string) bool {
	conn, err := net.DialTimeout("unix", path, time.Second)
	if err != nil {
		return false
	}
	// Nothing was sent, so nothing is lost.
	_ = conn.Close()
	return true
}

// errDirectoryGone ends Run. If kubelet's directory is removed and created again, a running container never sees the new one. kubelet then
// restarts the container, which mounts it.
var errDirectoryGone = errors.New("kubelet's device-plugins directory was removed")

// directory reports changes in kubelet's device-plugins directory. Its readers read the files: events get lost, files do not.
type directory struct {
	path    string
	changes broadcast.Signal
}

// checkEvery is how often the directory is checked while inotify fails.
const checkEvery = time.Second

// run reports changes until ctx is done.
func (d *directory) run(ctx context.Context) error {
	watcher := filewatch.New(ctx, filewatch.Options{Dirs: []string{d.path}, Interval: checkEvery})
	defer watcher.Close()
	for {
		if gone(d.path) {
			return fmt.Errorf("%s: %w", d.path, errDirectoryGone)
		}
		d.changes.Notify()
		select {
		case <-ctx.Done():
			return nil
		case <-watcher.C:
		}
	}
}

// changed returns a channel that is closed at the next change. Take it before reading.
func (d *directory) changed() <-chan struct{} { return d.changes.Changed() }

// gone reports whether the directory was removed. A mount of a removed directory can still be read.
func gone(path string) bool {
	var stat syscall.Stat_t
	err := syscall.Stat(path, &stat)
	return err != nil || stat.Nlink == 0
}

// kubeletSocket is where kubelet's device manager takes registrations.
func (d *directory) kubeletSocket() string { return filepath.Join(d.path, "kubelet.sock") }

// fileID distinguishes a file from a later one of the same name. The zero value is no file.
type fileID struct {
	device, inode uint64
	// A file system may reuse an inode at once.
	modified syscall.Timespec
}

func identify(path string) (fileID, error) {
	var stat syscall.Stat_t
	if err := syscall.Lstat(path, &stat); err != nil {
		return fileID{}, &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	return fileID{device: uint64(stat.Dev), inode: stat.Ino, modified: stat.Mtim}, nil
}

// is reports whether the file under the path is still this one.
func (id fileID) is(path string) bool {
	now, err := identify(path)
	return err == nil && now == id
}

// service answers kubelet on one socket.
type service struct {
	pluginapi.UnsafeDevicePluginServer
	registrar *registrar
	endpoint  *endpoint
}

// options are sent with Register and again when kubelet asks. PreStartRequired stays false: kubelet would require it for pods
// whose GPUs come from a claim, and find no devices for them.
func options() *pluginapi.DevicePluginOptions {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true}
}

func (s *service) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return options(), nil
}

func (s *service) GetPreferredAllocation(_ context.Context, request *pluginapi.PreferredAllocationRequest,
) (*pluginapi.PreferredAllocationResponse, error) {
	defer s.endpoint.calls.enter()()
	defer func(start time.Time) { s.registrar.metrics.preferred.Observe(time.Since(start).Seconds()) }(time.Now())
	return s.registrar.Preferred(s.registrar.resource, request), nil
}

func (s *service) Allocate(ctx context.Context, request *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	defer s.endpoint.calls.enter()()
	defer func(start time.Time) { s.registrar.metrics.allocate.Observe(time.Since(start).Seconds()) }(time.Now())
	return s.registrar.Allocate(klog.NewContext(ctx, s.endpoint.logger), s.registrar.resource, request)
}

// PreStartContainer reports whether the devices exist. kubelet does not call it, because options do not require it.
func (s *service) PreStartContainer(_ context.Context, request *pluginapi.PreStartContainerRequest,
) (*pluginapi.PreStartContainerResponse, error) {
	defer s.endpoint.calls.enter()()
	if _, err := s.registrar.lookup(s.registrar.resource, request.GetDevicesIds(), make(map[string]bool)); err != nil {
		return nil, status.Errorf(status.Code(err), "invalid pre-start request for %q: %s", s.registrar.resource, reason(err))
	}
	return &pluginapi.PreStartContainerResponse{}, nil
}

// reason returns the message of a gRPC error without its code.
func reason(err error) string { return status.Convert(err).Message() }

func invalid(format string, args ...any) error {
	return status.Errorf(codes.InvalidArgument, format, args...)
}

// inFlight counts calls or connections, and lets callers wait until there is none. The zero value is ready to use.
type inFlight struct {
	mu    sync.Mutex
	count int
	none  chan struct{}
}

// enter counts one call until the returned function is called, which is idempotent.
func (t *inFlight) enter() (leave func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.count++
	return sync.OnceFunc(t.leave)
}

func (t *inFlight) leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.count--
	if t.count == 0 && t.none != nil {
		close(t.none)
		t.none = nil
	}
}

// empty returns a channel that is closed once no call is in progress.
func (t *inFlight) empty() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.count == 0 {
		closed := make(chan struct{})
		close(closed)
		return closed
	}
	if t.none == nil {
		t.none = make(chan struct{})
	}
	return t.none
}
