// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drapbv1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// errSocketLost ends a session of which another process removed a socket: kubelet drops the driver then
// (TestRemovedSocketsComeBack).
var errSocketLost = errors.New("a socket of the driver was removed")

// session is one run of the two gRPC servers.
type session struct {
	*Driver
	ctx     context.Context
	cancel  context.CancelCauseFunc
	sockets sockets
	calls   callGate
}

// serve runs the servers and the publisher until ctx is done or one of them fails.
func (d *Driver) serve(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s := &session{Driver: d, ctx: ctx, cancel: cancel}
	d.resetRegistration()
	// The helper stops at once when its context ends. Calls in flight should be answered first.
	helper, err := kubeletplugin.Start(context.WithoutCancel(ctx), s,
		kubeletplugin.DriverName(d.DriverName),
		kubeletplugin.KubeClient(d.KubeClient),
		kubeletplugin.NodeName(d.NodeName),
		kubeletplugin.RegistrarDirectoryPath(d.registryDir()),
		kubeletplugin.PluginDataDirectoryPath(d.pluginDir()),
		kubeletplugin.RegistrarListener(listenInto(&s.sockets.registration)),
		kubeletplugin.PluginListener(listenInto(&s.sockets.service)),
		// This process owns the ledger, which orders the calls for one claim.
		kubeletplugin.Serialize(false),
		kubeletplugin.HealthService(false),
		kubeletplugin.GRPCInterceptor(s.intercept),
	)
	if err != nil {
		return fmt.Errorf("start servers for kubelet: %w", err)
	}
	defer d.resetRegistration()
	defer helper.Stop()
	defer s.calls.close()

	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return newPublisher(d).run(ctx) })
	group.Go(func() error { return s.guardSockets(ctx) })
	group.Go(func() error { return d.writeConditions(ctx) })
	if d.Strict {
		group.Go(func() error { return newConfirmations(d).run(ctx) })
	}
	err = group.Wait()
	// Calls that wait for a device fail now.
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
	defer watch.Close()
	check := conflictCheck{Driver: s.Driver, ours: &s.sockets}
	for {
		if conflicting := check.find(ctx); conflicting != nil && ctx.Err() == nil {
			return conflicting
		}
		if !s.sockets.inPlace() {
			return errSocketLost
		}
		if !s.waitForSockets(ctx, watch) {
			return nil
		}
	}
}

// intercept handles every call of kubelet to both servers.
func (s *session) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if !s.calls.enter() {
		return nil, status.Error(codes.Unavailable, "the driver is stopping")
	}
	defer s.calls.leave()
	// A call ends with the session, too.
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

// prepareSucceeded reports whether an answer of either version has no claim with an error.
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

// registrationChanged records kubelet's answer for Ready and makes the publisher compare with the API server.
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

// HandleError is called by the helper when a server failed. That ends the session.
func (s *session) HandleError(ctx context.Context, err error, msg string) {
	if errors.Is(err, kubeletplugin.ErrRecoverable) {
		klog.FromContext(ctx).Error(err, "The plugin helper reports a recoverable error", "message", msg)
		return
	}
	s.cancel(fmt.Errorf("%s: %w", msg, err))
}

// WatchHealthStatus is called by the helper; health reaches kubelet in a later version.
func (s *session) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return kubeletplugin.ErrHealthNotSupported
}

// callGate counts the calls in flight: the helper's Stop waits for no handler (TestStopFinishesWaitingCallsAndLeavesNothing).
type callGate struct {
	mu       sync.Mutex
	closed   bool
	handlers sync.WaitGroup
	// answered is when the last handler returned.
	answered time.Time
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

func (g *callGate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.answered = time.Now()
	g.handlers.Done()
}

// writeTime is how long gRPC may take to write an answer to the socket after its handler returned. Stop discards what is not
// written by then, as a crash would, and kubelet repeats the call to the next agent.
const writeTime = 20 * time.Millisecond

// close refuses further calls and waits until those in flight are answered.
func (g *callGate) close() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.handlers.Wait()
	time.Sleep(writeTime - time.Since(g.answered))
}
