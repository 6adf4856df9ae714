// SPDX-License-Identifier: Apache-2.0

// Package legacy serves extended resources ("nvidia.com/gpu: 1" in a container's limits) through kubelet's DevicePlugin v1beta1 API: it
// registers with kubelet, sends device lists and answers Allocate. The ledger decides who gets a device, and the inventory comes from
// pkg/nvml.
package legacy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Plugin serves the extended resources of whole GPUs and of partitions, each on an endpoint of its own. Make it with New and use
// it with Run; its other methods are safe for concurrent use.
type Plugin struct {
	config  Config
	times   times
	node    *corev1.ObjectReference
	metrics *metrics
	lists   *lists
	probes  *probes
	running atomic.Bool

	mu sync.Mutex
	// notReady is why no resource is served; nil if some are.
	notReady error
	// served resources, by name.
	served map[string]*served
}

// times are the protocol's durations, which tests shorten.
type times struct {
	returnDelay    time.Duration // a device must be free this long before it is offered again
	retireAfter    time.Duration // a device must be gone this long before it is listed no more
	firstRetry     time.Duration // after a failed registration, doubled up to lastRetry
	lastRetry      time.Duration
	streamWait     time.Duration // from Register's answer to the ListAndWatch stream
	steady         time.Duration // a registration that lived this long clears the back-off
	drain          time.Duration // for kubelet to disconnect from an old socket before the next registration
	stopDrain      time.Duration // the same when the plugin stops and registers no successor
	pluginProbe    time.Duration // for another plugin's first device list
	pluginInterval time.Duration // between looks at another plugin that stands in the way
	confirmFirst   time.Duration // from a list to the first question whether kubelet has it, doubled up to confirmPoll
	confirmPoll    time.Duration
	confirmLimit   time.Duration // after which an unconfirmed list means registering again, doubled each time
}

func defaultTimes() times {
	return times{
		returnDelay:    100 * time.Millisecond,
		retireAfter:    10 * time.Minute,
		firstRetry:     100 * time.Millisecond,
		lastRetry:      5 * time.Second,
		streamWait:     5 * time.Second,
		steady:         10 * time.Second,
		drain:          500 * time.Millisecond,
		stopDrain:      30 * time.Millisecond,
		pluginProbe:    time.Second,
		pluginInterval: 10 * time.Second,
		confirmFirst:   20 * time.Millisecond,
		confirmPoll:    time.Second,
		confirmLimit:   10 * time.Second,
	}
}

// New validates the configuration and makes a Plugin. It touches neither disk nor network.
func New(config Config) (*Plugin, error) {
	config, err := config.complete()
	if err != nil {
		return nil, fmt.Errorf("configure limits: %w", err)
	}
	p := &Plugin{
		config: config,
		times:  defaultTimes(),
		// kubectl describe node finds events by the node's name as UID, as kubelet records them.
		node:     &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: config.NodeName, UID: types.UID(config.NodeName)},
		metrics:  newMetrics(),
		probes:   newProbes(),
		notReady: errNotStarted,
		served:   map[string]*served{},
	}
	p.lists = newLists(config, p.metrics)
	return p, nil
}

// Run serves and keeps registered until ctx is done, then closes its sockets and returns nil. It returns an error if the metrics are
// registered already or kubelet's directory is missing. Call it once.
func (p *Plugin) Run(ctx context.Context) (err error) {
	if p.running.Swap(true) {
		return errors.New("serve limits: they are served already")
	}
	unregister, err := p.metrics.register(p.config.Registerer)
	if err != nil {
		return fmt.Errorf("serve limits: register metrics: %w", err)
	}
	defer unregister()
	if _, err := os.Stat(p.config.Directory); err != nil {
		return fmt.Errorf("serve limits: open kubelet's device-plugins directory: %w", err)
	}
	dir := &directory{path: p.config.Directory}
	defer p.setNotReady(errors.New("stopped"))
	if err := removeStale(p.config.Directory); err != nil {
		// Stale sockets are harmless.
		klog.FromContext(ctx).Error(err, "Stale sockets stay")
	}

	p.lists.returnDelay, p.lists.retireAfter = p.times.returnDelay, p.times.retireAfter
	p.lists.refresh(time.Now())
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return dir.run(ctx) })
	group.Go(func() error { p.lists.run(ctx); return nil })
	group.Go(func() error { p.serve(ctx, dir); return nil })
	group.Go(func() error { p.reportExcluded(ctx); return nil })
	if err := group.Wait(); err != nil {
		return fmt.Errorf("serve limits: %w", err)
	}
	return nil
}

// Look reads inventory and ledger again. It returns the device lists for kubelet by resource and, if it delays a device, after how long to
// call it again. Simulations call it instead of Run, one call at a time.
func (p *Plugin) Look(now time.Time) (lists map[string]*pluginapi.ListAndWatchResponse, again time.Duration) {
	p.lists.returnDelay, p.lists.retireAfter = p.times.returnDelay, p.times.retireAfter
	again = p.lists.refresh(now)
	lists = map[string]*pluginapi.ListAndWatchResponse{}
	for _, name := range p.lists.names() {
		lists[name] = p.lists.current(name).response
	}
	return lists, again
}

// Ready returns nil while kubelet is registered for every resource and reads its device list. Otherwise the error says what is
// missing.
func (p *Plugin) Ready() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	errs := []error{p.notReady}
	for _, name := range slices.Sorted(maps.Keys(p.served)) {
		if err := p.served[name].ready(); err != nil {
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
		if s.ownSocket() == path {
			return true
		}
	}
	return false
}
