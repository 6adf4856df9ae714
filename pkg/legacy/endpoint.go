// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/stats"
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
	// serving waits for the goroutine that serves.
	serving sync.WaitGroup
	// stopping is closed to end the streams.
	stopping chan struct{}
	// calls in progress and open connections.
	calls, connections *semaphore.Weighted

	streams atomic.Int32
	// up is closed when the first stream begins, and down when the last one ends.
	up, down           chan struct{}
	closeUp, closeDown func()

	// sent is the list that was sent last; nil for none.
	sent     atomic.Pointer[listing]
	sentMore broadcast.Signal
}

// streamWorkers is how many calls of an endpoint run on goroutines that are reused: kubelet's stream, another reader, and its calls, which
// come one at a time. Reused goroutines have a grown stack. A new one grows its own during Allocate, which costs a fifth of the call.
const streamWorkers = 4

// openEndpoint listens on an unused path and serves.
func (r *registrar) openEndpoint(ctx context.Context, path string) (*endpoint, error) {
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on device plugin socket: %w", err)
	}
	e := &endpoint{
		path:     path,
		logger:   klog.FromContext(ctx),
		stopping: make(chan struct{}),
		calls:    semaphore.NewWeighted(math.MaxInt64), connections: semaphore.NewWeighted(math.MaxInt64),
		up:   make(chan struct{}),
		down: make(chan struct{}),
	}
	e.server = grpc.NewServer(grpc.WaitForHandlers(true), grpc.NumStreamWorkers(streamWorkers), grpc.StatsHandler(callCounter{e.calls}))
	e.closeUp = sync.OnceFunc(func() { close(e.up) })
	e.closeDown = sync.OnceFunc(func() { close(e.down) })
	// The next check notices a missing file.
	e.file, _ = identify(path)
	pluginapi.RegisterDevicePluginServer(e.server, &service{registrar: r, endpoint: e})
	e.serving.Go(func() {
		// Serve returns when close stops the server. After any other reason the streams end or do not begin, which is watched.
		_ = e.server.Serve(&countingListener{Listener: listener, connections: e.connections})
	})
	return e, nil
}

// close waits for calls in progress for at most callDrain, ends the streams, waits for kubelet to disconnect, and removes the socket. It
// returns once all handlers have. kubelet up to 1.36 disconnects the current plugin when an old stream ends, so it must have
// disconnected from this endpoint before the next one registers; disconnectDrain bounds that wait.
func (e *endpoint) close(callDrain, disconnectDrain time.Duration) {
	awaitNone(e.calls, callDrain)
	close(e.stopping)
	awaitNone(e.connections, disconnectDrain)
	e.server.Stop()
	e.serving.Wait()
}

// leave is close where no endpoint follows: it asks kubelet to disconnect, once all answers are written. limit bounds that.
func (e *endpoint) leave(callDrain, limit time.Duration) {
	awaitNone(e.calls, callDrain)
	close(e.stopping)
	late := time.AfterFunc(limit, e.server.Stop)
	defer late.Stop()
	e.server.GracefulStop()
	e.serving.Wait()
}

// awaitNone waits until nothing is counted. What begins meanwhile does not count.
func awaitNone(counted *semaphore.Weighted, limit time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	_ = counted.Acquire(ctx, math.MaxInt64) // it is never used again
}

// callCounter counts each call other than a stream until gRPC has queued its answer. The handler returns earlier. kubelet drops an answer
// that comes after the end of ListAndWatch.
type callCounter struct{ calls *semaphore.Weighted }

// countedCall is in the context of one call.
type countedCall struct{ counted bool }

type countedCallKey struct{}

func (c callCounter) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context {
	return context.WithValue(ctx, countedCallKey{}, &countedCall{})
}

func (c callCounter) HandleRPC(ctx context.Context, event stats.RPCStats) {
	call, tagged := ctx.Value(countedCallKey{}).(*countedCall)
	if !tagged {
		return
	}
	switch event := event.(type) {
	case *stats.Begin:
		call.counted = !event.IsServerStream && c.calls.TryAcquire(1)
	case *stats.End:
		if call.counted {
			c.calls.Release(1)
		}
	}
}

func (c callCounter) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (c callCounter) HandleConn(context.Context, stats.ConnStats)                       {}

// countingListener counts open connections. gRPC closes a connection when it finds that the peer has.
type countingListener struct {
	net.Listener
	connections *semaphore.Weighted
}

func (l *countingListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if !l.connections.TryAcquire(1) {
		return conn, nil
	}
	return &countedConn{Conn: conn, leave: sync.OnceFunc(func() { l.connections.Release(1) })}, nil
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
	found, err := sockets(directory)
	for _, socket := range found {
		path := filepath.Join(directory, socket.name)
		if !ownName(socket.name) || alive(path) {
			continue
		}
		if failed := os.Remove(path); failed != nil && !os.IsNotExist(failed) {
			err = errors.Join(err, failed)
		}
	}
	if err != nil {
		return fmt.Errorf("remove stale sockets: %w", err)
	}
	return nil
}

// socketFile distinguishes a socket from its successor under the same name.
type socketFile struct {
	name string
	file fileID
}

func sockets(directory string) (found []socketFile, err error) {
	entries, err := os.ReadDir(directory)
	for _, entry := range entries {
		if entry.Type()&os.ModeSocket == 0 {
			continue
		}
		if file, err := identify(filepath.Join(directory, entry.Name())); err == nil {
			found = append(found, socketFile{entry.Name(), file})
		}
	}
	return found, err
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

// directoryInterval is how often the directory is checked while inotify fails.
const directoryInterval = time.Second

// watchDirectory reports changes of kubelet's device-plugins directory until ctx is done. Readers read the files: events get lost.
func (p *Plugin) watchDirectory(ctx context.Context) error {
	directory := p.config.Directory
	watcher := filewatch.New(ctx, filewatch.Options{Dirs: []string{directory}, Interval: directoryInterval})
	defer watcher.Close()
	for {
		if gone(directory) {
			return fmt.Errorf("%s: %w", directory, errDirectoryGone)
		}
		p.filesChanged.Notify()
		select {
		case <-ctx.Done():
			return nil
		case <-watcher.C:
		}
	}
}

// gone reports whether the directory was removed. A mount of a removed directory can still be read.
func gone(path string) bool {
	var stat syscall.Stat_t
	err := syscall.Stat(path, &stat)
	return err != nil || stat.Nlink == 0
}

// kubeletSocket is where kubelet's device manager takes registrations.
func (p *Plugin) kubeletSocket() string { return filepath.Join(p.config.Directory, "kubelet.sock") }

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

// service answers kubelet on one socket.
type service struct {
	pluginapi.UnsafeDevicePluginServer
	registrar *registrar
	endpoint  *endpoint
}

// options are sent with Register and again when kubelet asks. PreStartRequired is set only where it is needed: kubelet requires it for
// pods whose GPUs come from a claim as well, and finds no devices for them.
func (r *registrar) options() *pluginapi.DevicePluginOptions {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true, PreStartRequired: r.config.asksBeforeStart()}
}

func (s *service) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return s.registrar.options(), nil
}

func (s *service) GetPreferredAllocation(_ context.Context, request *pluginapi.PreferredAllocationRequest,
) (*pluginapi.PreferredAllocationResponse, error) {
	defer func(start time.Time) { s.registrar.metrics.preferred.Observe(time.Since(start).Seconds()) }(time.Now())
	return s.registrar.Preferred(s.registrar.resource, request), nil
}

func (s *service) Allocate(ctx context.Context, request *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	defer func(start time.Time) { s.registrar.metrics.allocate.Observe(time.Since(start).Seconds()) }(time.Now())
	return s.registrar.Allocate(klog.NewContext(ctx, s.endpoint.logger), s.registrar.resource, request)
}

// PreStartContainer checks that the pod's namespace may share the container's GPUs, and hands them over. After an error kubelet tries again,
// as after a container that failed; it waits for 30 s (k8s.io/kubelet pkg/apis/deviceplugin/v1beta1,
// KubeletPreStartContainerRPCTimeoutInSecs).
func (s *service) PreStartContainer(ctx context.Context, request *pluginapi.PreStartContainerRequest,
) (*pluginapi.PreStartContainerResponse, error) {
	if err := s.registrar.beforeStart(ctx, s.registrar.resource, request.GetDevicesIds()); err != nil {
		return nil, err
	}
	return &pluginapi.PreStartContainerResponse{}, nil
}

func invalid(format string, args ...any) error {
	return status.Errorf(codes.InvalidArgument, format, args...)
}
