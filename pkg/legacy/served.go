// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"errors"
	"slices"
	"sync"

	"k8s.io/klog/v2"
)

// served is one extended resource that is registered with kubelet.
type served struct {
	*Plugin
	resource string

	mu sync.Mutex
	// notReady is why the resource is not served now; nil if it is.
	notReady error
	// own is the path of the current socket.
	own string
}

// ready is as Plugin.Ready.
func (s *served) ready() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.notReady
}

func (s *served) setNotReady(reason error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.notReady = reason
}

func (s *served) ownSocket() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.own
}

func (s *served) setOwn(path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.own = path
}

// serve keeps each resource that has a list registered, until ctx is done.
func (p *Plugin) serve(ctx context.Context, dir *directory) {
	var running sync.WaitGroup
	defer running.Wait()
	stops := map[string]func(){}
	for {
		changed := p.lists.changed.Changed()
		names := p.lists.names()
		for name, stop := range stops {
			if !slices.Contains(names, name) {
				klog.FromContext(ctx).Info("Ending a resource that has no devices", "resource", name)
				stop()
				delete(stops, name)
			}
		}
		for _, name := range names {
			if stops[name] == nil {
				stops[name] = p.start(ctx, &running, name, dir)
			}
		}
		p.setNotReady(nil)
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// start serves one resource until ctx is done or stop is called, which waits for the end.
func (p *Plugin) start(ctx context.Context, running *sync.WaitGroup, resource string, dir *directory) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	s := &served{Plugin: p, resource: resource, notReady: errNotStarted}
	p.mu.Lock()
	p.served[resource] = s
	p.mu.Unlock()
	ended := make(chan struct{})
	running.Go(func() {
		defer close(ended)
		defer cancel()
		s.keepRegistered(ctx, dir)
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.served, resource)
	})
	return func() {
		cancel()
		<-ended
	}
}

var errNotStarted = errors.New("not started")
