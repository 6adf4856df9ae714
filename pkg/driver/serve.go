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
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drapbv1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
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
	s := &session{Driver: d, ctx: ctx, cancel: cancel, sockets: &sockets{}}
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
	signal(s.refresh)
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

// callGate knows the calls in flight: the helper's Stop does not wait for handlers.
type callGate struct {
	mu     sync.Mutex
	closed bool
	calls  sync.WaitGroup
	// left is when one of them last was done.
	left time.Time
}

func (g *callGate) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return false
	}
	g.calls.Add(1)
	return true
}

func (g *callGate) leave() {
	g.mu.Lock()
	g.left = time.Now()
	g.mu.Unlock()
	g.calls.Done()
}

// onItsWay is how long an answer may take from its handler to the socket on a busy node, of which nobody tells; the helper's Stop drops what is
// in between.
const onItsWay = 250 * time.Millisecond

// close refuses further calls and waits for those in flight, so that their answers still go out.
func (g *callGate) close() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.wait()
	g.mu.Lock()
	left := g.left
	g.mu.Unlock()
	time.Sleep(time.Until(left.Add(onItsWay)))
}

func (g *callGate) wait() { g.calls.Wait() }
