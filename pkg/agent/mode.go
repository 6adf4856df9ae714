// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/filewatch"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// errReconfigured ends an agent whose configuration has changed: main executes the program again, unnoticed by pods.
var errReconfigured = errors.New("the node's configuration has changed")

// settings follow the configuration of one node: its files and its labels.
type settings struct {
	*Agent
	self *podstate.Node
	// devices are those of the node. The rules about devices are checked against them.
	devices device.Source
	// edited receives a value when the file may have changed; nil without a file.
	edited <-chan struct{}
	// rejected is why the newest configuration was rejected, so that each reason is reported once. unused are the settings without effect
	// that were reported last.
	rejected string
	unused   []string
	// postponed is whether a new configuration waits for a driver call, which was reported.
	postponed bool
}

const (
	// fileInterval is how often the file is read where inotify is exhausted.
	fileInterval = 10 * time.Second
	// fileSettle merges the steps in which kubelet replaces the files of a ConfigMap.
	fileSettle = 100 * time.Millisecond
)

// newSettings returns settings that notice changes until ctx is done and close is called.
func (a *Agent) newSettings(ctx context.Context, self *podstate.Node, devices device.Source) (s *settings, closeAll func()) {
	s = &settings{Agent: a, self: self, devices: devices}
	dir := a.config.ConfigDir
	if dir == "" && a.config.ConfigFile != "" {
		dir = filepath.Dir(a.config.ConfigFile)
	}
	if dir == "" {
		return s, func() {}
	}
	// kubelet replaces the files of a ConfigMap through a symbolic link in their directory.
	watcher := filewatch.New(ctx, filewatch.Options{Dirs: []string{dir}, Interval: fileInterval, Settle: fileSettle})
	s.edited = watcher.C
	return s, watcher.Close
}

// choose follows the configuration until serveConfigured does, which needs the node's GPUs: the configuration says where the driver is. It
// ends with errReconfigured once a valid configuration differs from the agent's, or the first one is selected.
func (a *Agent) choose(ctx context.Context, self *podstate.Node) error {
	s, closeAll := a.newSettings(ctx, self, noDevices{})
	defer closeAll()
	if s.edited == nil || !broadcast.Await(ctx, self.Changed, func() bool { return a.nodeKnown(self) }) {
		return nil
	}
	current, err := s.atStart()
	s.status.Waiting("mode", err)
	if err != nil {
		return s.follow(ctx, nil)
	}
	s.unused = current.Unused // serveConfigured reports them
	return s.follow(ctx, &current)
}

// noDevices is the inventory before the driver is open.
type noDevices struct{}

func (noDevices) Inventory() device.Inventory { return device.Inventory{} }
func (noDevices) Changed() <-chan struct{}    { return nil }

// serveConfigured calls serve with the node's configuration, and ends with errReconfigured when a valid one differs from it. With an
// invalid configuration the node offers no device to new claims and pods, but kubelet can end the pods that have one.
func (a *Agent) serveConfigured(
	ctx context.Context, self *podstate.Node, devices device.Source, serve func(context.Context, config.Config) error,
) error {
	s, closeAll := a.newSettings(ctx, self, devices)
	defer closeAll()
	if !broadcast.Await(ctx, self.Changed, func() bool { return a.nodeKnown(self) }) {
		return nil
	}
	group, ctx := errgroup.WithContext(ctx)
	current, err := s.atStart()
	s.status.Waiting("mode", err)
	if err == nil {
		s.reportMode(ctx, current)
		group.Go(func() error { return s.follow(ctx, &current) })
	} else {
		current = s.config.ServingNothing()
		group.Go(func() error { return s.follow(ctx, nil) })
	}
	group.Go(func() error { return serve(ctx, current) })
	return group.Wait()
}

// errUnchosen is why a node without a chosen configuration gives no device to new claims and pods.
var errUnchosen = errors.New("no valid configuration is selected for this node, so no GPU is given to new pods: check the node label " +
	config.ConfigLabel + " and the event ConfigRejected")

// atStart returns the configuration that the agent was started with, with the node's mode label.
func (s *settings) atStart() (config.Config, error) {
	if s.config.Unchosen {
		return config.Config{}, errUnchosen
	}
	current, err := s.config.ForNode(s.self.Label(config.ModeLabel))
	if err != nil {
		return config.Config{}, err
	}
	return current, current.CheckContradictions(s.devices.Inventory())
}

// reportUnused reports settings that have no effect, each list once.
func (s *settings) reportUnused(ctx context.Context, current config.Config) {
	if slices.Equal(current.Unused, s.unused) {
		return
	}
	s.unused = current.Unused
	if len(s.unused) > 0 {
		klog.FromContext(ctx).Info("Settings have no effect", "settings", s.unused)
		s.event(corev1.EventTypeWarning, "ConfigWithoutEffect", "These settings of the node's configuration, flags or environment are ignored, and can be removed: "+strings.Join(s.unused, "; "))
	}
}

// reportMode reports the mode, and rules and settings without effect.
func (s *settings) reportMode(ctx context.Context, current config.Config) {
	s.metrics.modes.WithLabelValues(string(current.Mode)).Set(1)
	_, labelled := s.self.Label(config.ModeLabel)
	klog.FromContext(ctx).Info("Serving", "mode", current.Mode, "byNodeLabel", labelled)
	s.reportUnused(ctx, current)
	// The node serves its other GPUs.
	for severity, err := range map[string]error{
		corev1.EventTypeWarning: current.CheckDevices(s.devices.Inventory()),
		corev1.EventTypeNormal:  errors.Join(current.CheckEffect(s.devices.Inventory()), current.CheckSharing(s.devices.Inventory())),
	} {
		if err != nil {
			klog.FromContext(ctx).Info("A rule about devices has no effect for now", "reason", err.Error())
			s.event(severity, "ConfigMatchesNothing", err.Error())
		}
	}
}

// nodeKnown reports whether the API server has reported the node, and otherwise that the agent waits for it.
func (a *Agent) nodeKnown(self *podstate.Node) bool {
	if self.UID() != "" {
		return true
	}
	a.status.Waiting("mode", fmt.Errorf("the API server has not reported node %s. Its labels may select the configuration and the mode, so the agent waits (is the node name right?)", a.config.NodeName))
	return false
}

// follow returns errReconfigured as soon as there is a valid configuration other than current (nil: any), and no driver call keeps the agent
// from starting again. It reports an invalid one, which changes nothing.
func (s *settings) follow(ctx context.Context, current *config.Config) error {
	for {
		changed, devices := s.self.Changed(), s.devices.Changed()
		var again <-chan time.Time
		// A deleted node object has no label, which is no request for another mode.
		if s.self.UID() != "" {
			next, err := s.next(current)
			s.report(ctx, current != nil, err)
			if err == nil {
				err = next.Record()
				switch {
				case err != nil:
					klog.FromContext(ctx).Error(err, "Cannot record the new configuration. The node is served as before, and the agent tries again", "config", next.ConfigName, "after", fileInterval)
					again = time.After(fileInterval)
				case current == nil || !next.Equal(*current):
					if !s.postpone(ctx) {
						return errReconfigured
					}
					again = time.After(fileInterval)
				default:
					s.postponed = false
					s.reportUnused(ctx, next.Config)
				}
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-again:
		case <-changed:
		case <-devices:
		case <-s.edited:
		}
	}
}

// postpone reports whether a driver call that does not return keeps the agent from starting again: execve would not return either, and the
// node would have no agent. It reports the first such wait.
func (s *settings) postpone(ctx context.Context) bool {
	threads := s.stuck(ctx)
	if len(threads) == 0 {
		return false
	}
	if !s.postponed {
		s.postponed = true
		klog.FromContext(ctx).Info("The new configuration waits for a driver call that does not return", "threads", threads)
		s.event(corev1.EventTypeWarning, "ConfigPostponed", "The node is served as before, because a call of the agent to the driver does not return. "+
			"The agent starts again with the new configuration when the call returns, or when the node is rebooted. "+
			"Look in the kernel's log (dmesg) for the GPU that hangs. Reset it, or reboot the node")
	}
	return true
}

// next returns the configuration that files and labels have now.
func (s *settings) next(current *config.Config) (config.Chosen, error) {
	name, err := s.config.ChooseConfig(s.self.Label(config.ConfigLabel))
	if err != nil {
		return config.Chosen{}, err
	}
	next, err := s.reload(name)
	if err != nil {
		return config.Chosen{}, err
	}
	if next.Config, err = next.ForNode(s.self.Label(config.ModeLabel)); err != nil {
		return config.Chosen{}, err
	}
	switch {
	case current == nil:
		return next, next.CheckContradictions(s.devices.Inventory())
	case next.Equal(*current):
		return next, nil
	default:
		return next, next.CheckDevices(s.devices.Inventory())
	}
}

// report reports once that the newest configuration is rejected, and why, or that it is valid again.
func (s *settings) report(ctx context.Context, serving bool, err error) {
	reason := ""
	if err != nil {
		reason = err.Error()
	}
	if reason == s.rejected {
		return
	}
	s.rejected = reason
	if err == nil {
		s.metrics.rejected.Set(0)
		klog.FromContext(ctx).Info("The node's configuration is valid again")
		return
	}
	s.metrics.rejected.Set(1)
	klog.FromContext(ctx).Info("Rejecting the node's configuration", "reason", reason)
	consequence := "The node is served as before"
	if !serving {
		consequence = "No GPU of the node is given to new pods"
	}
	s.event(corev1.EventTypeWarning, "ConfigRejected", fmt.Sprintf("%s, because its configuration is wrong: %v", consequence, err))
}
