// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// errReconfigured ends an agent whose configuration has changed: main starts it anew, in the same process, and no pod notices.
var errReconfigured = errors.New("the node's configuration has changed")

// settings follow the configuration of one node: its file and its label.
type settings struct {
	*agent
	self *podstate.Node
	// inventory of the moment.
	inventory func() device.Inventory
	// edited is signalled when the file may have changed.
	edited chan struct{}
	// rejected is what the newest configuration is refused for, to say it once.
	rejected string
}

func (a *agent) newSettings(self *podstate.Node, inventory func() device.Inventory) *settings {
	return &settings{agent: a, self: self, inventory: inventory, edited: make(chan struct{}, 1)}
}

// run calls serve with the node's configuration, or where that is wrong with one that gives nothing to anybody new, and ends with
// errReconfigured when there is another one.
func (s *settings) run(ctx context.Context, serve func(context.Context, config.Config) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.watchFile(ctx) })
	group.Go(func() error {
		if !s.awaitNode(ctx) {
			return nil
		}
		current, err := s.config.ForNode(s.self.Label(config.ModeLabel))
		if err == nil {
			err = current.CheckContradictions(s.inventory())
		}
		if err != nil {
			s.status.Waiting("mode", err)
			group.Go(func() error { return s.follow(ctx, nil) })
			// kubelet cannot end a pod whose claims are not unprepared.
			return serve(ctx, s.config.ServingNothing())
		}
		s.begin(ctx, current)
		group.Go(func() error { return s.follow(ctx, &current) })
		return serve(ctx, current)
	})
	return group.Wait()
}

// begin says how the node is served.
func (s *settings) begin(ctx context.Context, current config.Config) {
	s.status.Waiting("mode", nil)
	s.metrics.modes.WithLabelValues(string(current.Mode)).Set(1)
	from := "configuration"
	if _, labelled := s.self.Label(config.ModeLabel); labelled {
		from = "node label"
	}
	klog.FromContext(ctx).Info("Serving", "mode", current.Mode, "from", from)
	// No reason to serve none of the GPUs that are there.
	for severity, err := range map[string]error{
		corev1.EventTypeWarning: current.CheckDevices(s.inventory()),
		corev1.EventTypeNormal:  current.CheckDynamic(s.inventory()),
	} {
		if err != nil {
			klog.FromContext(ctx).Info("A rule about devices has no effect for now", "reason", err.Error())
			s.recorder.Event(nodeReference(s.config.NodeName), severity, "ConfigMatchesNothing", err.Error())
		}
	}
}

func (s *settings) watchFile(ctx context.Context) error {
	if s.config.ConfigFile == "" {
		return nil
	}
	return config.Watch(ctx, s.config.ConfigFile, func() {
		select {
		case s.edited <- struct{}{}:
		default: // one is waiting already
		}
	})
}

// awaitNode waits for the node's object: no API is served before the API server has listed the node's pods anyway.
func (s *settings) awaitNode(ctx context.Context) bool {
	for {
		changed := s.self.Changed()
		if s.self.UID() != "" {
			return true
		}
		s.status.Waiting("mode", fmt.Errorf("the API server does not know node %s, whose labels may set the mode (is the node name right?)", s.config.NodeName))
		select {
		case <-ctx.Done():
			return false
		case <-changed:
		}
	}
}

// follow returns errReconfigured as soon as the configuration is another one than current (nil: any) and right. A wrong one
// changes nothing.
func (s *settings) follow(ctx context.Context, current *config.Config) error {
	for {
		changed := s.self.Changed()
		// A deleted node object has no label, which is no request for another mode.
		if s.self.UID() != "" {
			next, err := s.next(current)
			s.judge(ctx, current != nil, err)
			if err == nil && (current == nil || !next.Equal(*current)) {
				return errReconfigured
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-s.edited:
		}
	}
}

// next is the configuration as file and label are now.
func (s *settings) next(current *config.Config) (config.Config, error) {
	next, err := s.reload()
	if err != nil {
		return config.Config{}, err
	}
	if next, err = next.ForNode(s.self.Label(config.ModeLabel)); err != nil {
		return config.Config{}, err
	}
	switch {
	case current == nil:
		return next, next.CheckContradictions(s.inventory())
	case next.Equal(*current):
		return next, nil
	default:
		return next, next.CheckDevices(s.inventory())
	}
}

// judge says, once, that the newest configuration is not used, and why.
func (s *settings) judge(ctx context.Context, serving bool, err error) {
	reason := ""
	if err != nil {
		reason = err.Error()
	}
	if reason == s.rejected {
		return
	}
	s.rejected = reason
	if err == nil {
		s.metrics.refused.Set(0)
		klog.FromContext(ctx).Info("The node's configuration is right again")
		return
	}
	s.metrics.refused.Set(1)
	klog.FromContext(ctx).Info("Refusing the node's configuration", "reason", reason)
	consequence := "The node is served as before"
	if !serving {
		consequence = "No GPU of the node is given to new pods"
	}
	s.recorder.Eventf(nodeReference(s.config.NodeName), corev1.EventTypeWarning, "ConfigRejected", "%s, because its configuration is wrong: %v", consequence, err)
}
