// SPDX-License-Identifier: Apache-2.0

package wiring

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/driver"
	"github.com/tandem-gpu/tandem/pkg/gpunode"
	"github.com/tandem-gpu/tandem/pkg/legacy"
)

// Serving is how the APIs of a node serve.
type Serving struct {
	// Config is the node's, with its mode label.
	Config config.Config
	// HeldOnly is why only what is held is served. Nil serves everything.
	HeldOnly error
	// NoDriver and Waiting return why new pods and claims get no GPU. GPUNode's status.waiting names NoDriver's reason first, then the ledger's,
	// then that of Waiting. Both may be nil.
	NoDriver, Waiting func() error
	// Unread, where set, reports whether no GPU can be read now. While that is so, a GPU that is held and not in the inventory does not count as
	// lost: its pods are not evicted, and it needs no repair.
	Unread func() bool
	// Registerer receives the metrics.
	Registerer prometheus.Registerer
}

// APIs are what serves a node's GPUs.
type APIs struct {
	// GPUNode is nil if Hooks.Allocations is set.
	GPUNode *gpunode.Object
	Claims  *driver.Driver
	Limits  *legacy.Plugin
}

// NewAPIs makes the components that serve the node. It needs Connect, and may be called again with another Registerer.
func (p *Parts) NewAPIs(s Serving) (apis APIs, err error) {
	none := func() error { return nil }
	if s.NoDriver == nil {
		s.NoDriver = none
	}
	if s.Waiting == nil {
		s.Waiting = none
	}
	allocations, acknowledge, daemonTrouble := p.Hooks.Allocations, func(string, []string, bool) {}, p.Hooks.DaemonTrouble
	if allocations == nil {
		if apis.GPUNode, err = gpunode.New(p.gpuNodeConfig(s)); err != nil {
			return APIs{}, err
		}
		allocations, acknowledge, daemonTrouble = apis.GPUNode, apis.GPUNode.Acknowledge, apis.GPUNode.DaemonTrouble
	}
	claims := p.claimsConfig(s)
	claims.Allocations, claims.DaemonTrouble = allocations, daemonTrouble
	if apis.GPUNode != nil {
		claims.Placed = apis.GPUNode.Place
	}
	if apis.Claims, err = driver.New(claims); err != nil {
		return APIs{}, err
	}
	limits := p.limitsConfig(s)
	limits.Allocations, limits.Acknowledge = allocations, acknowledge
	apis.Limits, err = legacy.New(limits)
	return apis, err
}

func (p *Parts) gpuNodeConfig(s Serving) gpunode.Config {
	c := s.Config
	config := gpunode.Config{
		REST: p.REST, DriverName: c.DriverName, NodeName: c.NodeName,
		Facts:  gpunode.Facts{Mode: string(c.Mode), Excluded: c.Excluded, FaultAction: c.FaultAction, BootID: p.BootID},
		Claims: func(namespace string) gpunode.Claims { return p.Client.ResourceV1().ResourceClaims(namespace) },
		Node:   p.Node, Ledger: p.Ledger, Inventory: p.Views.Offered, Sharing: p.Sharing, Recorder: p.Recorder, Registerer: s.Registerer,
		Waiting: func() string {
			reason := errors.Join(s.NoDriver(), p.Ledger.Withheld(), s.Waiting())
			if reason == nil {
				return ""
			}
			return strings.ReplaceAll(reason.Error(), "\n", "; ")
		},
		Unread: s.Unread,
	}
	if c.Mode.Limits() {
		config.Facts.Limits, config.Facts.OfferedToPods = c.Resources(), c.OfferedToPods
		config.Inventory = p.offeredToLimits(c)
	}
	return config
}

// offeredToLimits returns the view for pods with limits. Where they get their GPUs without CDI, the health of CDI specs does not count.
func (p *Parts) offeredToLimits(c config.Config) device.Source {
	if slices.ContainsFunc(c.DeviceListStrategies, func(s string) bool { return !WithoutCDI(s) }) {
		return p.Views.Offered
	}
	return p.Views.OfferedWithoutCDI
}

// WithoutCDI reports whether a device list strategy gives containers their GPUs without CDI.
func WithoutCDI(strategy string) bool { return strategy == "envvar" || strategy == "volume-mounts" }

// Strict reports whether claims reserve their devices before their pods are bound. Only in Dual could the other API take the devices
// before the claim does.
func Strict(c config.Config) bool { return c.Strict && c.Mode == config.ModeDual }

func (p *Parts) claimsConfig(s Serving) driver.Config {
	c := s.Config
	config := driver.Config{
		DriverName: c.DriverName, NodeName: c.NodeName, KubeClient: p.Client, KubeletDir: c.KubeletDir,
		Node: p.Node, Ledger: p.ledger(), Inventory: p.Views.Offered, Partitions: p.Partitions, HandOver: p.Handover.Ensure, Specs: p.specs(), Pods: p.Pods,
		Sharing: p.Sharing, Policy: p.Policy, Adopt: p.Reconciler.AdoptClaims,
		Recorder: p.Recorder, Registerer: s.Registerer,
		OfferedToClaims: c.OfferedToClaims, OfferedToPods: c.OfferedToPods, Limits: c.Resources(),
		PublishNothing: !c.Mode.Claims(), HeldOnly: s.HeldOnly, Strict: Strict(c), PartitionUUIDs: c.PartitionUUIDs,
	}
	if c.DeviceMetadata {
		config.MetadataDir = c.CDIDir
	}
	if wrap := p.Hooks.Pods; wrap != nil {
		config.Pods = wrap(p.Pods)
	}
	if wrap := p.Hooks.Sharing; wrap != nil {
		config.Sharing = wrap(p.Sharing)
	}
	if wrap := p.Hooks.Policy; wrap != nil {
		config.Policy = wrap(p.Policy)
	}
	return config
}

func (p *Parts) limitsConfig(s Serving) legacy.Config {
	c := s.Config
	config := legacy.Config{
		Resources: c.Resources(), NodeName: c.NodeName, Directory: filepath.Join(c.KubeletDir, "device-plugins"),
		IndexIDs: c.DeviceIDStrategy == "index", AnnotationPrefix: c.CDIAnnotationPrefix,
		PassDeviceSpecs: c.PassDeviceSpecs, Packed: c.AllocationPolicy == "packed", FailRequestsGreaterThanOne: c.FailRequestsGreaterThanOne,
		Inventory: p.offeredToLimits(c), Offered: c.OfferedToPods, HeldOnly: s.HeldOnly,
		// Under HeldOnly a pod that has a device needs it listed as healthy: a kubelet that restarts refuses the pod's stopped containers otherwise.
		Retiring: !c.Mode.Limits() && s.HeldOnly == nil,
		Ledger:   p.ledger(), Specs: p.specs(), Kubelet: p.kubelet(), Sharing: p.Policy, Requesters: p.Pods,
		Adopt: p.Reconciler.Adopt, Excluded: c.Excluded, Recorder: p.Recorder, Registerer: s.Registerer,
		DevRoot: p.Hardware.DevRoot, IMEXChannels: c.IMEXChannels, Env: map[string]string{},
	}
	if c.ResetGPUs {
		config.HandOver = p.Handover.Ensure
	}
	if c.ChecksNamespaces() {
		config.NamespaceOf = p.Pods.NamespaceOf
	}
	// NVIDIA's container runtime reads them, and its device plugin sets them with CDI as well.
	for name, on := range map[string]bool{"NVIDIA_GDS": c.GDS, "NVIDIA_GDRCOPY": c.GDRCopy, "NVIDIA_MOFED": c.MOFED} {
		if on {
			config.Env[name] = "enabled"
		}
	}
	for _, strategy := range c.DeviceListStrategies {
		config.Strategies = append(config.Strategies, legacy.Strategy(strategy))
	}
	return config
}
