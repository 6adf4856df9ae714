// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
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
	// answered is when the last call ended, in nanoseconds since 1970.
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
		kubeletplugin.HealthService(false),
		kubeletplugin.GRPCInterceptor(s.intercept),
	)
	if err != nil {
		return fmt.Errorf("start servers for kubelet: %w", err)
	}
	defer func() { d.set(&d.kubelet, notRegistered(d.Config)) }()
	defer helper.Stop()
	defer s.finishCalls()

	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return d.publish(ctx) })
	group.Go(func() error { return s.guardSockets(ctx) })
	group.Go(func() error { return d.writeConditions(ctx) })
	if d.Strict {
		group.Go(func() error { return d.confirmAllocations(ctx) })
	}
	err = group.Wait()
	// Calls that wait for a device fail now.
	cancel(err)
	if cause := context.Cause(s.ctx); err == nil && cause != nil {
		err = cause
	}
	return err
}

// guardSockets ends the session when its sockets are gone or another driver with our name appears.
func (s *session) guardSockets(ctx context.Context) (err error) {
	s.watchSockets(ctx, []*ownSocket{&s.registration, &s.service}, func(conflicting error) bool {
		if err = conflicting; err == nil && !(s.registration.inPlace() && s.service.inPlace()) {
			err = errSocketLost
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
	defer func() { s.answered.Store(time.Now().UnixNano()) }()
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

// WatchHealthStatus is called by the helper; health reaches kubelet in a later version.
func (s *session) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return kubeletplugin.ErrHealthNotSupported
}

// writeTime is how long gRPC may take to write an answer to the socket after its handler returned. Stop discards what is not
// written by then, as a crash would, and kubelet repeats the call to the next agent.
const writeTime = 20 * time.Millisecond

// finishCalls refuses further calls and waits until those in flight are answered.
func (s *session) finishCalls() {
	s.calls.Lock()
	time.Sleep(writeTime - time.Since(time.Unix(0, s.answered.Load())))
}
