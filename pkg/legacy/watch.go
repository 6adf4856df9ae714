// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/klog/v2"
)

// probeAttempts is how often a new socket that does not answer is probed again.
const probeAttempts = 5

// watchFiles returns when our socket was removed, when kubelet's was replaced, or when another plugin for our GPUs appears. It
// ignores the removal of kubelet's socket: a kubelet that ends also ends its stream, and one that lives keeps it.
func (r *registrar) watchFiles(ctx context.Context, e *endpoint, kubelet fileID) *ended {
	var (
		known = sockets(r.dir.path)
		looks int
		look  <-chan time.Time
	)
	if r.unsettled {
		looks, look = probeAttempts, time.After(r.times.pluginProbe)
	}
	for {
		changed := r.dir.changed()
		if now, err := identify(r.dir.kubeletSocket()); err == nil && now != kubelet {
			return endedBy(causeKubeletRestarted, "kubelet made a new socket")
		}
		if !e.file.is(e.path) {
			return endedBy(causeSocketRemoved, "socket %s was removed", e.path)
		}
		if now := sockets(r.dir.path); !slices.Equal(now, known) {
			// Not at once: a socket exists before its process answers on it.
			known, looks, look = now, probeAttempts, time.After(r.times.pluginProbe)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-look:
			looks--
			settled, err := r.checkConflicting(ctx)
			if conflicting, ok := errors.AsType[*ConflictingPluginError](err); ok {
				return &ended{cause: causeConflicting, err: conflicting}
			}
			look = nil
			if !settled && looks > 0 {
				look = time.After(r.times.pluginProbe)
			}
		}
	}
}

// socketFile distinguishes a socket from its successor under the same name.
type socketFile struct {
	name string
	file fileID
}

// sockets lists the sockets in a directory, none when it cannot be read.
func sockets(directory string) []socketFile {
	entries, err := os.ReadDir(directory)
	if err != nil {
		return nil
	}
	var found []socketFile
	for _, entry := range entries {
		if entry.Type()&os.ModeSocket == 0 {
			continue
		}
		if file, err := identify(filepath.Join(directory, entry.Name())); err == nil {
			found = append(found, socketFile{entry.Name(), file})
		}
	}
	return found
}

const (
	// After confirmErrors in a row the list is not confirmed; the next list is another chance.
	confirmErrors = 10
	// confirmLimitMax bounds the limit, which grows each time another registration did not help.
	confirmLimitMax = 10 * time.Minute
)

// confirm compares kubelet's allocatable devices with each list that was sent. It returns when kubelet does not adopt a list:
// kubelet has lost this endpoint then, although the stream exists. It does not ask again once a list is confirmed.
func (r *registrar) confirm(ctx context.Context, e *endpoint) *ended {
	if r.config.Kubelet == nil {
		<-ctx.Done()
		return nil
	}
	var confirmed *listing
	for ctx.Err() == nil {
		more := e.sentMore.Changed()
		if list := e.sent.Load(); list == nil || list == confirmed {
			select {
			case <-ctx.Done():
			case <-more:
			}
			continue
		}
		var end *ended
		if confirmed, end = r.awaitConfirmed(ctx, e); end != nil {
			return end
		}
	}
	return nil
}

// awaitConfirmed returns the list that kubelet confirmed or that it gave up on. kubelet adopts a list within milliseconds.
func (r *registrar) awaitConfirmed(ctx context.Context, e *endpoint) (*listing, *ended) {
	began, failures, delay := time.Now(), 0, r.times.confirmFirst
	for last := (*listing)(nil); ; {
		select {
		case <-ctx.Done():
			return nil, nil
		case <-time.After(delay):
		}
		list := e.sent.Load()
		settled := list == last
		last = list
		allocatable, err := r.allocatable(ctx)
		if delay = min(2*delay, r.times.confirmPoll); !settled {
			delay = r.times.confirmFirst
		}
		if err == nil {
			r.config.Acknowledge(r.resource, allocatable, true)
		}
		switch {
		case err != nil:
			delay = r.times.confirmPoll
			if failures++; failures == confirmErrors {
				klog.FromContext(ctx).Info("Kubelet does not say which devices are allocatable", "reason", err.Error())
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
