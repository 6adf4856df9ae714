// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/broadcast"
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
	error
	cause cause
}

func (e *ended) Unwrap() error { return e.error }

func endedBy(c cause, format string, args ...any) error {
	return &ended{fmt.Errorf(format, args...), c}
}

// registrar keeps one extended resource registered with kubelet.
type registrar struct {
	*Plugin
	resource string
	// cause of the next registration.
	cause        cause
	failures     int
	confirmLimit time.Duration

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
		kubelet, _ := identify(r.kubeletSocket())
		began := time.Now()
		err := r.register(ctx, kubelet)
		if err == nil || ctx.Err() != nil {
			return
		}
		end, ok := errors.AsType[*ended](err)
		if !ok {
			end = &ended{err, causeRefused}
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
	delay := min(r.times.lastRetry, r.times.firstRetry<<min(r.failures-1, 15))
	end := time.Now().Add(delay)
	r.await(ctx, delay, func() bool {
		if r.replaced(kubelet) {
			r.failures, r.cause = 0, causeKubeletRestarted
			return true
		}
		return !time.Now().Before(end)
	})
}

// await calls done now, after each change in kubelet's directory and at the interval, until it returns true. It returns false when
// ctx is done.
func (r *registrar) await(ctx context.Context, interval time.Duration, done func() bool) bool {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		changed := r.filesChanged.Changed()
		if done() {
			return ctx.Err() == nil
		}
		select {
		case <-ctx.Done():
			return false
		case <-changed:
		case <-ticker.C:
		}
	}
}

// replaced reports whether kubelet has made another socket.
func (r *registrar) replaced(kubelet fileID) bool {
	now, err := identify(r.kubeletSocket())
	return err == nil && now != kubelet
}

// awaitKubelet waits until kubelet's socket exists; false when ctx is done.
func (r *registrar) awaitKubelet(ctx context.Context) bool {
	return r.await(ctx, directoryInterval, func() bool {
		_, err := identify(r.kubeletSocket())
		if err == nil {
			return true
		}
		r.setNotReady(fmt.Errorf("wait for kubelet: %w", err))
		if r.cause != causeStart {
			r.cause = causeKubeletRestarted
		}
		return false
	})
}

// awaitNoConflicting waits until no other plugin serves our GPUs or resources. It returns false when ctx is done.
func (r *registrar) awaitNoConflicting(ctx context.Context) bool {
	reported := ""
	return r.await(ctx, r.times.pluginInterval, func() bool {
		conflicting, _ := r.withhold(ctx)
		if conflicting == nil {
			return true
		}
		r.setNotReady(conflicting)
		if reported != conflicting.Error() && ctx.Err() == nil {
			reported = conflicting.Error()
			klog.FromContext(ctx).Info("Serving nothing new beside another device plugin", "reason", reported)
			r.config.warn("OtherDevicePlugin", "Not serving %s: %s", r.resource, reported)
		}
		return false
	})
}

// register serves on a new socket, registers it, and returns an *ended when that registration ends; nil when ctx is done.
func (r *registrar) register(ctx context.Context, kubelet fileID) error {
	path := filepath.Join(r.config.Directory, newSocketName(r.resource))
	// Set before the socket exists: the registrars of other resources look for other plugins' sockets.
	r.setSocket(path)
	defer r.setSocket("")
	e, err := r.openEndpoint(ctx, path)
	if err != nil {
		return endedBy(causeRefused, "%w", err)
	}
	defer func() {
		if ctx.Err() != nil {
			e.leave(r.times.callDrain, r.times.stopDrain)
		} else {
			e.close(r.times.callDrain, r.times.drain)
		}
	}()
	// kubelet takes every device of an ended endpoint for unhealthy, and soon reports so.
	defer r.config.Acknowledge(r.resource, nil, false)
	r.setNotReady(errors.New("register with kubelet: no answer yet"))
	group, running := errgroup.WithContext(ctx)
	group.Go(func() error { return r.watchFiles(running, e, kubelet) })
	group.Go(func() error {
		if err := r.introduce(running, e); err != nil {
			return err
		}
		group.Go(func() error {
			select {
			case <-running.Done():
				return nil
			case <-e.down:
				return endedBy(causeStreamEnded, "kubelet stopped listening")
			}
		})
		return r.confirm(running, e)
	})
	return group.Wait()
}

// introduce calls Register and waits for kubelet's stream. It returns nil once kubelet listens or ctx is done.
func (r *registrar) introduce(ctx context.Context, e *endpoint) error {
	conn, err := dial(r.kubeletSocket())
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
		Options:      r.options(),
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
	case <-e.up:
	}
	klog.FromContext(ctx).Info("Registered with kubelet", "socket", e.path, "cause", r.cause)
	r.setNotReady(nil)
	return nil
}

// probeAttempts is how often a socket that does not answer is probed.
const probeAttempts = 5

// watchFiles returns when our socket was removed, when kubelet's was replaced, or when another plugin for our GPUs appears. It
// ignores the removal of kubelet's socket: a kubelet that ends also ends its stream, and one that lives keeps it.
func (r *registrar) watchFiles(ctx context.Context, e *endpoint, kubelet fileID) error {
	// A directory that cannot be read has no sockets here. Another plugin may have come since awaitNoConflicting looked, or may not
	// have listened or answered then (TestPluginThatListensLate).
	known, _ := sockets(r.config.Directory)
	looks, look := probeAttempts, time.After(r.times.pluginProbe)
	for {
		changed := r.filesChanged.Changed()
		if r.replaced(kubelet) {
			return endedBy(causeKubeletRestarted, "kubelet made a new socket")
		}
		if now, err := identify(e.path); err != nil || now != e.file {
			return endedBy(causeSocketRemoved, "socket %s was removed", e.path)
		}
		if now, _ := sockets(r.config.Directory); !slices.Equal(now, known) {
			// Not at once: a socket exists before its process answers on it.
			known, looks, look = now, probeAttempts, time.After(r.times.pluginProbe)
		}
		if len(r.foreignOfKubelet(ctx)) > 0 {
			// kubelet already has devices of another plugin.
			if conflicting, _ := r.withhold(ctx); conflicting != nil {
				return &ended{conflicting, causeConflicting}
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-look:
			looks--
			conflicting, settled := r.withhold(ctx)
			if conflicting != nil {
				return &ended{conflicting, causeConflicting}
			}
			look = nil
			if !settled && looks > 0 {
				look = time.After(r.times.pluginProbe)
			}
		}
	}
}

const (
	// After confirmErrors in a row the list is not confirmed; the next list is another chance.
	confirmErrors = 10
	// confirmLimitMax bounds the limit, which grows each time another registration did not help.
	confirmLimitMax = 10 * time.Minute
)

// confirm compares kubelet's allocatable devices with each list that was sent. It returns when kubelet does not adopt a list:
// kubelet has lost this endpoint then, although the stream exists. It does not ask again once a list is confirmed.
func (r *registrar) confirm(ctx context.Context, e *endpoint) error {
	var confirmed *listing
	for {
		more := e.sentMore.Changed()
		if list := e.sent.Load(); list != nil && list != confirmed {
			var err error
			if confirmed, err = r.awaitConfirmed(ctx, e); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-more:
		}
	}
}

// awaitConfirmed returns the list that kubelet confirmed or that it gave up on. kubelet adopts a list within milliseconds.
func (r *registrar) awaitConfirmed(ctx context.Context, e *endpoint) (*listing, error) {
	began, failures, delay := time.Now(), 0, r.times.confirmFirst
	for last := (*listing)(nil); ; {
		if !broadcast.Sleep(ctx, delay) {
			return nil, nil
		}
		list := e.sent.Load()
		settled := list == last
		last = list
		allocatable, err := r.allocatable(ctx)
		if delay = min(2*delay, r.times.confirmPoll); !settled {
			delay = r.times.confirmFirst
		}
		if err == nil {
			failures = 0
			r.config.Acknowledge(r.resource, allocatable, true)
		}
		switch {
		case err != nil:
			delay = r.times.confirmPoll
			if failures++; failures == confirmErrors {
				klog.FromContext(ctx).Info("Cannot read kubelet's allocatable devices", "reason", err.Error())
				r.config.Acknowledge(r.resource, nil, false)
				return list, nil
			}
			began = time.Now()
		case slices.Equal(allocatable, list.healthy):
			r.confirmLimit = r.times.confirmLimit
			return list, nil
		case settled && time.Since(began) >= r.confirmLimit:
			r.confirmLimit = min(2*r.confirmLimit, confirmLimitMax)
			return nil, endedBy(causeUnconfirmed, "kubelet has %d of %d devices allocatable %s after they were sent",
				len(allocatable), len(list.healthy), time.Since(began).Round(time.Second))
		}
	}
}

// allocatable asks kubelet, for as long as kubelet has to confirm a list.
func (r *registrar) allocatable(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, r.times.confirmLimit)
	defer cancel()
	all, err := r.config.Kubelet.Allocatable(ctx)
	if err != nil {
		return nil, err
	}
	return slices.Sorted(slices.Values(all[r.resource])), nil
}
