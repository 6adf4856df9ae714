// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/broadcast"
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

// close waits for calls in progress, ends the streams, waits for kubelet to disconnect, and removes the socket. Calls get at most
// callDrain. kubelet up to 1.36 disconnects the current plugin when an old stream ends, so it must have disconnected from this
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
