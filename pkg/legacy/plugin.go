// SPDX-License-Identifier: Apache-2.0

// Package legacy serves extended resources ("nvidia.com/gpu: 1" in a container's limits) through kubelet's DevicePlugin v1beta1 API: it
// registers with kubelet, sends device lists and answers Allocate. An Inventory finds the devices, and the ledger decides who gets one.
package legacy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/broadcast"
)

// Plugin serves the extended resources of whole GPUs and of partitions, each on an endpoint of its own. Make it with New and use
// it with Run; its other methods are safe for concurrent use.
type Plugin struct {
	config  Config
	times   times
	metrics *metrics
	lists   *lists
	// turn lets one call of withhold run at a time. It guards probes of the sockets of other plugins, by path. withholds is set from a
	// conflicting plugin's appearance until it is taken over from.
	turn      sync.Mutex
	probes    map[string]probe
	withholds atomic.Bool
	// filesChanged reports changes in kubelet's device-plugins directory.
	filesChanged broadcast.Signal

	mu sync.Mutex
	// notReady is why no resource is served; nil if some are.
	notReady error
	// served resources, by name.
	served map[string]*registrar
	// foreign are device IDs that kubelet had registered for one of our resources and that this plugin never listed, with the resource.
	// They identify the socket of their plugin also while kubelet has none of them as healthy.
	foreign map[string]string
}

// times are the protocol's durations, which tests shorten.
type times struct {
	retireAfter    time.Duration // a device must be gone this long before it is listed no more
	firstRetry     time.Duration // after a failed registration, doubled up to lastRetry
	lastRetry      time.Duration
	streamWait     time.Duration // from Register's answer to the ListAndWatch stream
	steady         time.Duration // a registration that lived this long clears the back-off
	callDrain      time.Duration // for calls in flight: an Allocate may wait for the watch of pods and for Settling
	drain          time.Duration // for kubelet to disconnect from an old socket before the next registration
	stopDrain      time.Duration // for kubelet to take the last answers and disconnect when the plugin stops
	pluginProbe    time.Duration // for another plugin's first device list
	pluginInterval time.Duration // between two checks whether a conflicting device plugin still runs
	takeOver       time.Duration // from a conflicting device plugin's end to the adoption of its pods
	confirmFirst   time.Duration // from a list to the first question whether kubelet has it, doubled up to confirmPoll
	confirmPoll    time.Duration
	confirmLimit   time.Duration // after which an unconfirmed list means registering again, doubled each time
}

var defaultTimes = times{
	retireAfter:    10 * time.Minute,
	firstRetry:     100 * time.Millisecond,
	lastRetry:      5 * time.Second,
	streamWait:     5 * time.Second,
	steady:         10 * time.Second,
	callDrain:      6 * time.Second,
	drain:          500 * time.Millisecond,
	stopDrain:      30 * time.Millisecond,
	pluginProbe:    time.Second,
	pluginInterval: 10 * time.Second,
	takeOver:       time.Second,
	confirmFirst:   20 * time.Millisecond,
	confirmPoll:    time.Second,
	confirmLimit:   10 * time.Second,
}

var errNotStarted = errors.New("not started")

// New makes a Plugin. It touches neither disk nor network. It returns an error if the path of Directory is too long for sockets.
func New(config Config) (*Plugin, error) {
	if path := filepath.Join(config.Directory, newSocketName(strings.Repeat("x", longestStem))); len(path) > longestSocketPath {
		return nil, fmt.Errorf("configure limits: sockets below %q would exceed the %d bytes that a socket's path can have",
			config.Directory, longestSocketPath)
	}
	p := &Plugin{
		config:   config,
		times:    defaultTimes,
		metrics:  newMetrics(config.Registerer),
		notReady: errNotStarted,
		probes:   map[string]probe{},
		served:   map[string]*registrar{},
		foreign:  map[string]string{},
	}
	p.lists = &lists{Config: &p.config, metrics: p.metrics, pendingSince: map[pendingClaim]time.Time{}}
	p.lists.table.Store(&deviceTable{})
	p.withholds.Store(config.Ledger.Withholds(sourceConflicting)) // a Plugin of before may have withheld: this one takes over
	return p, nil
}

// Run serves and keeps registered until ctx is done, then closes its sockets and returns nil. It returns an error if kubelet's directory
// is missing. It may be called again once it has returned.
func (p *Plugin) Run(ctx context.Context) error {
	if _, err := os.Stat(p.config.Directory); err != nil {
		return fmt.Errorf("serve limits: open kubelet's device-plugins directory: %w", err)
	}
	defer p.setNotReady(errors.New("stopped"))
	if err := removeStale(p.config.Directory); err != nil {
		// Stale sockets are harmless.
		klog.FromContext(ctx).Error(err, "Stale sockets stay")
	}

	p.Refresh(time.Now())
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return p.watchDirectory(ctx) })
	group.Go(func() error { p.lists.run(ctx); return nil })
	group.Go(func() error { p.serve(ctx); return nil })
	if err := group.Wait(); err != nil {
		return fmt.Errorf("serve limits: %w", err)
	}
	return nil
}

// Refresh reads inventory and ledger again. It returns the device lists for kubelet by resource and, if it delays a device, after how long to
// call it again. Simulations call it instead of Run, one call at a time.
func (p *Plugin) Refresh(now time.Time) (lists map[string]*pluginapi.ListAndWatchResponse, again time.Duration) {
	p.lists.retireAfter = p.times.retireAfter
	p.lists.rebuild(now)
	again = p.lists.publish(now)
	lists = map[string]*pluginapi.ListAndWatchResponse{}
	for resource, list := range p.lists.current() {
		lists[resource] = list.response
	}
	return lists, again
}

// Ready returns nil while kubelet is registered for every resource and reads its device list, and devices are given to new pods.
// Otherwise the error says what is missing.
func (p *Plugin) Ready() error {
	withheld := p.config.Ledger.Withheld()
	p.mu.Lock()
	defer p.mu.Unlock()
	errs := []error{p.notReady, withheld}
	for _, name := range slices.Sorted(maps.Keys(p.served)) {
		if err := p.served[name].notReady; err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

func (p *Plugin) setNotReady(reason error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.notReady = reason
}

// owns reports whether a socket belongs to this process.
func (p *Plugin) owns(path string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.served {
		if s.socket == path {
			return true
		}
	}
	return false
}

// serve keeps each resource that has a list registered, until ctx is done.
func (p *Plugin) serve(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	stops := map[string]func(){}
	for {
		changed := p.lists.changed.Changed()
		lists := p.lists.current()
		for name, stop := range stops {
			if lists[name] == nil {
				klog.FromContext(ctx).Info("Ending a resource that has no devices", "resource", name)
				stop()
				delete(stops, name)
			}
		}
		for name := range lists {
			if stops[name] == nil {
				stops[name] = p.start(ctx, &running, name)
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
func (p *Plugin) start(ctx context.Context, running *sync.WaitGroup, resource string) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	r := &registrar{Plugin: p, resource: resource, cause: causeStart, confirmLimit: p.times.confirmLimit, notReady: errNotStarted}
	p.mu.Lock()
	p.served[resource] = r
	p.mu.Unlock()
	ended := make(chan struct{})
	running.Go(func() {
		defer close(ended)
		defer cancel()
		r.run(ctx)
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.served, resource)
	})
	return func() {
		cancel()
		<-ended
	}
}
