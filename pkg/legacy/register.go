// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// cause is why a registration is necessary: the label of the metric.
type cause string

const (
	causeStart            cause = "start"
	causeKubeletRestarted cause = "kubelet_restarted"
	causeSocketRemoved    cause = "socket_removed"
	causeStreamEnded      cause = "stream_ended"
	causeNoStream         cause = "no_stream"
	causeRefused          cause = "refused"
	causeUnconfirmed      cause = "unconfirmed"
	causeConflicting      cause = "conflicting_plugin"
)

// ended is why a registration ended. Ready returns it until the next registration.
type ended struct {
	cause cause
	err   error
}

func (e *ended) Error() string { return e.err.Error() }
func (e *ended) Unwrap() error { return e.err }

func endedBy(c cause, format string, args ...any) *ended {
	return &ended{cause: c, err: fmt.Errorf(format, args...)}
}

// registrar keeps one extended resource registered with kubelet.
type registrar struct {
	*Plugin
	resource string
	// cause of the next registration.
	cause        cause
	failures     int
	confirmLimit time.Duration
	// unsettled means that a live socket has not answered yet which devices it serves.
	unsettled bool

	// notReady is why the resource is not served now; nil if it is. Plugin.mu guards it and socket.
	notReady error
	// socket is the path of the current socket.
	socket string
}

func (r *registrar) setNotReady(reason error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.notReady = reason
}

func (r *registrar) setSocket(path string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.socket = path
}

// run keeps the resource registered, each time under another socket name, until ctx is done.
func (r *registrar) run(ctx context.Context) {
	logger := klog.FromContext(ctx).WithValues("resource", r.resource)
	ctx = klog.NewContext(ctx, logger)
	for ctx.Err() == nil {
		if !r.awaitKubelet(ctx) || !r.awaitNoConflicting(ctx) {
			return
		}
		kubelet, _ := identify(r.dir.kubeletSocket())
		began := time.Now()
		end := r.register(ctx, kubelet)
		if end == nil || ctx.Err() != nil {
			return
		}
		r.setNotReady(end)
		logger.Info("Registration with kubelet is over", "cause", end.cause, "reason", end.Error())
		r.account(end.cause, time.Since(began))
		r.backOff(ctx, kubelet)
	}
}

// account records why and after how long a registration ended, which decides when the next one begins.
func (r *registrar) account(c cause, lived time.Duration) {
	if c != causeRefused { // that registration never began, so its cause still applies
		r.cause = c
	}
	switch {
	case c == causeKubeletRestarted || c == causeConflicting:
		r.failures = 0
	case c == causeSocketRemoved || lived >= r.times.steady:
		r.failures = 1
	default:
		r.failures++
	}
}

// backOff waits before the next attempt. A new kubelet ends the wait.
func (r *registrar) backOff(ctx context.Context, kubelet fileID) {
	if r.failures == 0 {
		return
	}
	delay := r.times.lastRetry
	if doublings := r.failures - 1; doublings < 16 {
		delay = min(delay, r.times.firstRetry<<doublings)
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	for over := false; ; {
		changed := r.dir.changed()
		if now, err := identify(r.dir.kubeletSocket()); err == nil && now != kubelet {
			r.failures = 0
			r.cause = causeKubeletRestarted
			return
		}
		if over {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			over = true // and a look at kubelet's socket, for which a busy node may have left no time
		case <-changed:
		}
	}
}

// awaitKubelet waits until kubelet's socket exists; false when ctx is done.
func (r *registrar) awaitKubelet(ctx context.Context) bool {
	for {
		changed := r.dir.changed()
		_, err := identify(r.dir.kubeletSocket())
		if err == nil {
			return true
		}
		r.setNotReady(fmt.Errorf("wait for kubelet: %w", err))
		if r.cause != causeStart {
			r.cause = causeKubeletRestarted
		}
		select {
		case <-ctx.Done():
			return false
		case <-changed:
		}
	}
}

// awaitNoConflicting waits until no other plugin serves our GPUs. It returns false when ctx is done.
func (r *registrar) awaitNoConflicting(ctx context.Context) bool {
	for reported := ""; ; {
		changed := r.dir.changed()
		settled, err := r.checkConflicting(ctx)
		r.unsettled = !settled
		conflicting, ok := errors.AsType[*ConflictingPluginError](err)
		if !ok {
			// Not being able to read the directory is no reason to withhold the GPUs.
			return ctx.Err() == nil
		}
		r.setNotReady(conflicting)
		if reported != conflicting.Socket {
			reported = conflicting.Socket
			klog.FromContext(ctx).Info("Not registering beside another device plugin", "socket", conflicting.Socket, "devices", conflicting.Devices)
			r.config.Recorder.Eventf(r.node, corev1.EventTypeWarning, "OtherDevicePlugin", "Not serving %s: %s", r.resource, conflicting)
		}
		select {
		case <-ctx.Done():
			return false
		case <-changed:
		case <-time.After(r.times.pluginInterval):
		}
	}
}

// register serves on a new socket, registers it, and returns when that registration ends; nil when ctx is done.
func (r *registrar) register(ctx context.Context, kubelet fileID) *ended {
	path := filepath.Join(r.config.Directory, newSocketName(r.resource))
	// Set before the socket exists: the registrars of other resources look for other plugins' sockets.
	r.setSocket(path)
	defer r.setSocket("")
	e, err := r.openEndpoint(ctx, path)
	if err != nil {
		return endedBy(causeRefused, "%w", err)
	}
	defer func() {
		disconnectDrain := r.times.drain
		if ctx.Err() != nil {
			disconnectDrain = r.times.stopDrain
		}
		e.close(r.times.drain, disconnectDrain)
	}()
	// kubelet takes every device of an ended endpoint for unhealthy, and soon reports so.
	defer r.config.Acknowledge(r.resource, nil, false)
	r.setNotReady(errors.New("register with kubelet: no answer yet"))
	return firstOf(ctx,
		func(ctx context.Context) *ended { return r.watchFiles(ctx, e, kubelet) },
		func(ctx context.Context) *ended {
			if end := r.introduce(ctx, e); end != nil || ctx.Err() != nil {
				return end
			}
			return firstOf(ctx,
				func(ctx context.Context) *ended {
					select {
					case <-ctx.Done():
						return nil
					case <-e.allDown:
						return endedBy(causeStreamEnded, "kubelet stopped listening")
					}
				},
				func(ctx context.Context) *ended { return r.confirm(ctx, e) })
		})
}

// firstOf runs watchers until one returns, stops the others, and returns its result.
func firstOf(ctx context.Context, watchers ...func(context.Context) *ended) *ended {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	results := make(chan *ended, len(watchers))
	for _, watch := range watchers {
		go func() { results <- watch(ctx) }()
	}
	first := <-results
	cancel()
	for range len(watchers) - 1 {
		<-results
	}
	return first
}

// introduce calls Register and waits for kubelet's stream. It returns nil once kubelet listens or ctx is done.
func (r *registrar) introduce(ctx context.Context, e *endpoint) *ended {
	conn, err := dial(r.dir.kubeletSocket())
	if err != nil {
		return endedBy(causeRefused, "register with kubelet: %w", err)
	}
	// The answer has been read by then.
	defer func() { _ = conn.Close() }()
	// Without a deadline: a frozen kubelet that wakes up to a Register whose socket is gone fails to connect to it seconds later,
	// and up to 1.36 forgets the current plugin then.
	_, err = pluginapi.NewRegistrationClient(conn).Register(ctx, &pluginapi.RegisterRequest{
		Version:      pluginapi.Version,
		Endpoint:     filepath.Base(e.path),
		ResourceName: r.resource,
		Options:      options(),
	})
	if err != nil {
		return endedBy(causeRefused, "register with kubelet: %w", err)
	}
	r.metrics.registrations.WithLabelValues(string(r.cause)).Inc()
	r.setNotReady(errors.New("registered with kubelet, which does not listen yet"))
	select {
	case <-ctx.Done():
		return nil
	case <-time.After(r.times.streamWait):
		return endedBy(causeNoStream, "kubelet took the registration but did not list devices within %s", r.times.streamWait)
	case <-e.firstUp:
	}
	klog.FromContext(ctx).Info("Registered with kubelet", "socket", e.path, "cause", r.cause)
	r.setNotReady(nil)
	return nil
}
