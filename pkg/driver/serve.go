// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drapbv1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/tandem-gpu/tandem/internal/broadcast"
)

// errSocketLost means that somebody removed one of our sockets; kubelet has dropped the driver or soon will.
var errSocketLost = errors.New("a socket of the driver was removed")

// session is one life of the two gRPC servers.
type session struct {
	*Driver
	// cancel ends the session, with the cause.
	cancel  context.CancelCauseFunc
	ctx     context.Context
	sockets *sockets
	calls   callGate
}

// serve runs the servers and the publisher until ctx is done or one of them cannot go on.
func (d *Driver) serve(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s := &session{Driver: d, ctx: ctx, cancel: cancel}
	s.sockets = &sockets{calls: &s.calls}
	d.resetRegistration()
	// The helper stops as soon as its context ends, with calls in flight; stopping is ours.
	helper, err := kubeletplugin.Start(context.WithoutCancel(ctx), s,
		kubeletplugin.DriverName(d.DriverName),
		kubeletplugin.KubeClient(d.KubeClient),
		kubeletplugin.NodeName(d.NodeName),
		kubeletplugin.RegistrarDirectoryPath(d.registryDir()),
		kubeletplugin.PluginDataDirectoryPath(d.pluginDir()),
		kubeletplugin.RegistrarListener(s.sockets.listen(&s.sockets.registration)),
		kubeletplugin.PluginListener(s.sockets.listen(&s.sockets.service)),
		// Safe because the ledger is locked by this process and orders calls for one claim itself.
		kubeletplugin.Serialize(false),
		kubeletplugin.HealthService(false),
		kubeletplugin.GRPCInterceptor(s.intercept),
	)
	if err != nil {
		return fmt.Errorf("start servers for kubelet: %w", err)
	}
	defer d.resetRegistration()
	defer s.calls.wait()
	defer helper.Stop()
	defer s.calls.close()

	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return newPublisher(d).run(ctx) })
	group.Go(func() error { return s.guardSockets(ctx) })
	group.Go(func() error { return d.conditions.run(ctx) })
	if d.Strict {
		group.Go(func() error { return newConfirmations(d).run(ctx) })
	}
	err = group.Wait()
	// Calls that wait for a device give up now, the others are short.
	cancel(err)
	if cause := context.Cause(s.ctx); err == nil && cause != nil {
		err = cause
	}
	return err
}

func (d *Driver) resetRegistration() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.registered, d.registerError = false, ""
}

// guardSockets ends the session when its sockets are gone or another driver with our name appears.
func (s *session) guardSockets(ctx context.Context) error {
	watch := s.watchSockets(ctx)
	defer watch.close()
	look := lookout{Driver: s.Driver, ours: s.sockets}
	for {
		if foreign := look.findForeign(ctx); foreign != nil && ctx.Err() == nil {
			return foreign
		}
		if !s.sockets.inPlace() {
			return errSocketLost
		}
		if !watch.await(ctx, s.ForeignInterval) {
			return nil
		}
	}
}

// intercept sees every call of kubelet, of both servers.
func (s *session) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if !s.calls.enter() {
		return nil, status.Error(codes.Unavailable, "the driver is stopping")
	}
	defer s.calls.leave()
	// Calls end with the session; the helper's servers only know the client's context.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(s.ctx, func() { cancel(context.Cause(s.ctx)) })()

	start := time.Now()
	resp, err := handler(ctx, req)
	switch {
	case strings.HasSuffix(info.FullMethod, "/NodePrepareResources"):
		observe(s.metrics.prepare, start, err == nil && prepareSucceeded(resp))
	case strings.HasSuffix(info.FullMethod, "/NodeUnprepareResources"):
		observe(s.metrics.unprepare, start, err == nil)
	case strings.HasSuffix(info.FullMethod, "/NotifyRegistrationStatus"):
		if status, ok := req.(*registerapi.RegistrationStatus); ok {
			s.registrationChanged(ctx, status)
		}
	}
	return resp, err
}

// prepareSucceeded looks for errors of single claims, in an answer of either version.
func prepareSucceeded(resp any) bool {
	switch answer := resp.(type) {
	case *drapbv1.NodePrepareResourcesResponse:
		return noErrors(answer.GetClaims())
	case *drapbv1beta1.NodePrepareResourcesResponse:
		return noErrors(answer.GetClaims())
	}
	return true
}

func noErrors[T interface{ GetError() string }](claims map[string]T) bool {
	for _, claim := range claims {
		if claim.GetError() != "" {
			return false
		}
	}
	return true
}

// registrationChanged publishes again: a kubelet that starts removes all slices of its node before it registers drivers.
func (s *session) registrationChanged(ctx context.Context, status *registerapi.RegistrationStatus) {
	s.mu.Lock()
	s.registered, s.registerError = status.PluginRegistered, status.Error
	s.mu.Unlock()
	if !status.PluginRegistered {
		klog.FromContext(ctx).Info("kubelet refuses the driver", "reason", status.Error)
		return
	}
	s.metrics.registrations.Inc()
	klog.FromContext(ctx).Info("kubelet registered the driver", "driverName", s.DriverName)
	s.kubeletRegistered.Notify()
}

// PrepareResourceClaims is called by the helper, see kubeletplugin.DRAPlugin, and by simulations. Idempotent; safe for
// concurrent use.
func (d *Driver) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	return d.prepareClaims(ctx, claims), nil
}

// UnprepareResourceClaims is called by the helper, see kubeletplugin.DRAPlugin, and by simulations. Idempotent; safe for
// concurrent use.
func (d *Driver) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	return d.unprepareClaims(ctx, claims), nil
}

// HandleError is called by the helper when a server ends by itself, which nothing here can mend.
func (s *session) HandleError(ctx context.Context, err error, msg string) {
	if errors.Is(err, kubeletplugin.ErrRecoverable) {
		klog.FromContext(ctx).Error(err, "Helper of the driver", "message", msg)
		return
	}
	s.cancel(fmt.Errorf("%s: %w", msg, err))
}

// WatchHealthStatus is called by the helper; health reaches kubelet in a later version.
func (s *session) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return kubeletplugin.ErrHealthNotSupported
}

// callGate counts the calls in flight. The helper's Stop waits neither for handlers nor for answers that gRPC has not written to
// the socket yet (TestStopFinishesWaitingCallsAndLeavesNothing, TestStopDoesNotSleep).
type callGate struct {
	mu       sync.Mutex
	closed   bool
	handlers sync.WaitGroup
	// streams counts kubelet's calls without a complete answer on the socket; answered is notified when it becomes zero.
	streams  int
	answered broadcast.Signal
}

func (g *callGate) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return false
	}
	g.handlers.Add(1)
	return true
}

func (g *callGate) leave() { g.handlers.Done() }

func (g *callGate) countStreams(difference int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.streams += difference; g.streams == 0 {
		g.answered.Notify()
	}
}

// writeAnswerTimeout bounds the wait for a kubelet that does not read its answers.
const writeAnswerTimeout = 250 * time.Millisecond

// close refuses further calls and waits until those in flight are answered.
func (g *callGate) close() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.wait()
	timeout := time.NewTimer(writeAnswerTimeout)
	defer timeout.Stop()
	for {
		answered := g.answered.Changed()
		g.mu.Lock()
		streams := g.streams
		g.mu.Unlock()
		if streams == 0 {
			return
		}
		select {
		case <-answered:
		case <-timeout.C:
			return
		}
	}
}

func (g *callGate) wait() { g.handlers.Wait() }

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
