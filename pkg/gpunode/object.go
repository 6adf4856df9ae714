// SPDX-License-Identifier: Apache-2.0

// Package gpunode is the agent's side of this node's GPUNode object: it makes the object and keeps it while the node lives,
// writes into its status who has which GPU, and reads from its spec which GPUs the scheduler has given to claims. All of it
// may be late or missing, and the agent serves both APIs without it: the ledger alone decides who owns a GPU.
package gpunode

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// Node is this node's own object.
type Node interface {
	// UID is empty while there is no node object.
	UID() types.UID
	// Changed returns a channel that is closed at the next change; take it before reading.
	Changed() <-chan struct{}
}

// Ledger knows who holds which device, and which claims lost theirs.
type Ledger interface {
	Holds() []ledger.Hold
	Conflicts() []ledger.Conflict
	// Changed returns a channel that is closed at the next change of either; take it before reading.
	Changed() <-chan struct{}
}

// Inventory tells which GPUs the node has.
type Inventory interface {
	Inventory() device.Inventory
	// Changed returns a channel that is closed at the next change; take it before reading.
	Changed() <-chan struct{}
}

// Sharing knows which MPS daemons are to run. *sharing.Manager implements it.
type Sharing interface {
	Daemons() []sharing.Daemon
	// UnknownDaemons are the names of those that may run besides.
	UnknownDaemons() []string
	// Changed returns a channel that is closed at the next change; take it before reading.
	Changed() <-chan struct{}
}

// Config of an Object. Fields without a stated default are required.
type Config struct {
	// REST says how the API server is reached. Its content type does not matter.
	REST *rest.Config
	// Claims returns the reader of a namespace. Nil means that the spec is believed for ever.
	Claims     func(namespace string) Claims
	DriverName string
	NodeName   string
	// Mode of the node, as the status shows it.
	Mode string
	// Limits are the extended resources that are served, zero for none.
	Limits device.Resources
	// OfferedToPods tells the GPUs that limits can ask for; nil means all. It must be pure.
	OfferedToPods func(device.GPU) bool
	// Excluded tells the GPUs that are nobody's; nil means none. It must be pure.
	Excluded func(device.GPU) bool

	Node       Node
	Ledger     Ledger
	Inventory  Inventory
	Registerer prometheus.Registerer
	// Sharing may be nil where no daemon is ever wanted.
	Sharing Sharing
}

// times are the durations, shortened by tests.
type times struct {
	settle      time.Duration // from the first of several changes to the write of all of them
	interval    time.Duration // between two writes of the status, in the mean
	gather      time.Duration // from a change to the look at it
	firstRetry  time.Duration // after a failed write, doubled up to the last
	lastRetry   time.Duration // where the API server may be back at any moment
	lastRefused time.Duration // where somebody has to change something first
	doubt       time.Duration // between two looks at a claim that nothing confirms
}

func defaultTimes() times {
	return times{
		settle:      50 * time.Millisecond,
		interval:    time.Second,
		gather:      5 * time.Millisecond,
		firstRetry:  500 * time.Millisecond,
		lastRetry:   5 * time.Second,
		lastRefused: 30 * time.Second,
		doubt:       time.Minute,
	}
}

// Object is this node's GPUNode. Make it with New, use it with Run; its other methods are safe for concurrent use.
type Object struct {
	config  Config
	times   times
	client  rest.Interface
	metrics *metrics
	view    *view
	running atomic.Bool

	allocated allocated
}

// New makes no request.
func New(c Config) (*Object, error) {
	if c.REST == nil || c.NodeName == "" || c.Node == nil || c.Ledger == nil || c.Inventory == nil || c.Registerer == nil {
		return nil, errors.New("configure GPUNode: REST, NodeName, Node, Ledger, Inventory and Registerer are required")
	}
	if c.Claims != nil && c.DriverName == "" {
		return nil, errors.New("configure GPUNode: DriverName is required to look at claims")
	}
	client, err := newClient(c.REST)
	if err != nil {
		return nil, fmt.Errorf("configure GPUNode: %w", err)
	}
	return &Object{config: c, times: defaultTimes(), client: client, metrics: newMetrics(), view: newView()}, nil
}

// Run keeps the object until ctx is done, and leaves it, with a last word that limits are served no more: it is gone with its
// Node, and who reads it meanwhile wants to see what was last known. Call it once. An API server that is away, or does not serve
// GPUNodes, or refuses them, is no error.
func (o *Object) Run(ctx context.Context) error {
	if o.running.Swap(true) {
		return errors.New("keep GPUNode: it is kept already")
	}
	unregister, err := o.metrics.register(o.config.Registerer)
	if err != nil {
		return fmt.Errorf("keep GPUNode: register metrics: %w", err)
	}
	defer unregister()
	group, running := errgroup.WithContext(ctx)
	group.Go(func() error { return o.watch(running) })
	group.Go(func() error { o.write(running); return nil })
	if o.config.Claims != nil {
		group.Go(func() error { o.doubt(running); return nil })
	}
	err = group.Wait()
	o.leave(context.WithoutCancel(ctx))
	return err
}

// Claims returns the claims that are allocated devices of this node by the object's spec, also those whose pods are not bound
// yet, without those that are known to have let go. It answers from memory, and while the API server is away what it said last.
func (o *Object) Claims() []v1alpha1.AllocatedClaim {
	return slices.DeleteFunc(slices.Clone(o.view.acting().Spec.Claims), func(c v1alpha1.AllocatedClaim) bool {
		return o.view.disbelieved(c.UID)
	})
}

// Acknowledge takes what kubelet's device manager itself calls allocatable of a resource, by device ID; known is false while it
// has not said, or what it said no longer counts. Called by the front-end for limits; idempotent, and it does not block.
func (o *Object) Acknowledge(resource string, ids []string, known bool) {
	o.view.acknowledge(resource, ids, known)
}

// DaemonTrouble is what the controller says about why the pod of an MPS daemon does not run; empty where it says nothing. It answers
// from memory.
func (o *Object) DaemonTrouble(name string) string {
	for _, d := range o.view.acting().Spec.Daemons {
		if d.Name == name {
			return d.Message
		}
	}
	return ""
}

// Synced reports whether the API server has said what the object's spec is, or that there is none. Where it does not serve
// GPUNodes that never comes. Once true it stays so.
func (o *Object) Synced() bool {
	_, synced := o.view.current()
	return synced
}

// Changed returns a channel that is closed when the object next changes; take it before Allocated, Claims or Synced.
func (o *Object) Changed() <-chan struct{} { return o.view.Changed() }
