// SPDX-License-Identifier: Apache-2.0

// Package handover makes a GPU clean between two holders: no process outside its holders and monitors uses it, and its settings are what they
// were before the last holder. Where the node configuration asks for it, the GPU is reset as well. A GPU that cannot be cleaned is withdrawn
// until it can be. The ledger decides who may have a GPU, and ends a hold without waiting for the Cleaner.
//
// Only a GPU without any hold is handed over: holders of partitions or shares come and go while others use the GPU.
package handover

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/internal/keylock"
	"github.com/tandem-gpu/tandem/internal/regarding"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Hardware is the driver. *nvml.Node implements it.
type Hardware interface {
	// Processes returns the processes with a CUDA context, and those with a graphics context only.
	Processes(ctx context.Context, uuid string) (compute, graphics []int, err error)
	Settings(ctx context.Context, uuid string) (device.Settings, error)
	RestoreSettings(ctx context.Context, uuid string, wanted device.Settings) error
	Reset(ctx context.Context, uuid string) error
}

// Ledger has the holds. *ledger.Ledger implements it.
type Ledger interface {
	Holds() []ledger.Hold
	Changed() <-chan struct{}
}

// Pods are the node's pods. *podstate.Pods implements it. AwaitSync returns false if ctx is done before they are known.
type Pods interface {
	Synced() bool
	AwaitSync(ctx context.Context) bool
}

// Options of a Cleaner. All are required.
type Options struct {
	Pods     Pods
	Hardware Hardware
	// Inventory does not have the health that a Cleaner decides.
	Inventory device.Source
	Ledger    Ledger
	// Records must be loaded.
	Records *Records
	// Outsiders returns those of the processes that exist and run in no living pod of this node that may use the GPU. Of the processes for
	// graphics it returns only those in pods: a display server of the host stays. Before the pods are known, only ResetIdle calls it.
	Outsiders func(uuid string, compute, graphics []int) []Outsider
	// Managed reports whether Tandem itself sets the compute mode of a GPU, for clients of MPS.
	Managed func(uuid string) bool
	// Reset reports whether each handover resets the GPU.
	Reset func(uuid string) bool
	// Report is called when a GPU that is healthy otherwise turns out not to be clean, once until it is clean again. Detail says more of the
	// error.
	Report func(uuid string, err error)
}

// Cleaner hands GPUs over. All methods are safe for concurrent use.
type Cleaner struct {
	options Options
	// retry is how long after a failure the next attempt begins.
	retry time.Duration
	// patience limits one attempt of Run.
	patience time.Duration
	// turns allow one handover of a GPU at a time, by UUID. A hung GPU delays no other.
	turns keylock.Locks[string]
	// resets is locked during a reset.
	resets keylock.Locks[struct{}]

	mu sync.Mutex
	// users are the holders since the GPU was last clean, by UUID.
	users map[string]map[user]bool
	// unclean says why the last attempt failed, by UUID.
	unclean map[string]error
	// reported are the GPUs of unclean that Report was called for.
	reported map[string]bool
	// cleaning are the GPUs with a handover in Run.
	cleaning map[string]bool
	changed  broadcast.Signal
}

// user is a holder. The time of a pod's Allocate distinguishes it from the next pod that gets the same device ID. kubelet may prepare one
// claim several times.
type user struct {
	holder ledger.Holder
	taken  int64
}

func userOf(h ledger.Hold) user {
	if h.Holder.Kind == ledger.KindClaim {
		return user{holder: h.Holder}
	}
	return user{h.Holder, h.Since.UnixNano()}
}

const (
	retryDelay = time.Second
	// driverPatience is longer than a reset takes.
	driverPatience = 45 * time.Second
)

var (
	errNoAnswer    = errors.New("the driver does not answer")
	errPodsUnknown = errors.New("the node's pods are not known yet: the GPU's processes may belong to ended pods")
	errBefore      = errors.New("it was not clean before the agent started")
)

// New has no visible effect.
func New(o Options) *Cleaner {
	c := &Cleaner{
		options: o, retry: retryDelay, patience: driverPatience,
		users: map[string]map[user]bool{}, unclean: map[string]error{}, reported: map[string]bool{}, cleaning: map[string]bool{},
	}
	for _, uuid := range o.Records.Keys() {
		if record, _ := o.Records.Get(uuid); record.Unclean {
			c.users[uuid], c.unclean[uuid] = noHolder, errBefore
		}
	}
	return c
}

// Unclean returns why a GPU is not clean, and so gets no new holder; nil if it is.
func (c *Cleaner) Unclean(uuid string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.unclean[uuid]
}

// Changed returns a channel that is closed when Unclean answers differently. It is taken before the call.
func (c *Cleaner) Changed() <-chan struct{} { return c.changed.Changed() }

// Run hands each GPU over once its last hold has ended and the node's pods are known, until ctx is done. Call it once.
func (c *Cleaner) Run(ctx context.Context) error {
	var group errgroup.Group
	c.options.Pods.AwaitSync(ctx)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		holdsChanged := c.options.Ledger.Changed()
		due, wait := c.due()
		for _, uuid := range due {
			group.Go(func() error {
				if err := c.attempt(ctx, uuid); err != nil && ctx.Err() == nil {
					klog.FromContext(ctx).V(2).Info("A GPU is not clean yet", "gpu", uuid, "reason", err.Error())
				}
				c.finish(uuid)
				return nil
			})
		}
		timer.Reset(wait)
		select {
		case <-ctx.Done():
		case <-holdsChanged:
		case <-timer.C:
		}
	}
	return group.Wait()
}

// attempt hands a GPU over. It gives up if the driver does not answer.
func (c *Cleaner) attempt(ctx context.Context, uuid string) error {
	limited, cancel := context.WithTimeoutCause(ctx, c.patience, errNoAnswer)
	defer cancel()
	err := c.handOver(limited, uuid, false)
	if err != nil && ctx.Err() == nil && limited.Err() != nil {
		return c.failed(ctx, uuid, errNoAnswer)
	}
	return err
}

// due returns the GPUs whose holders have changed and that have no handover in Run, and how long Run waits if no hold changes.
func (c *Cleaner) due() (due []string, wait time.Duration) {
	holds := c.holders()
	c.mu.Lock()
	defer c.mu.Unlock()
	// A GPU that had a holder is in users, or has a record.
	candidates := slices.Concat(slices.Collect(maps.Keys(holds)), slices.Collect(maps.Keys(c.users)), c.options.Records.Keys())
	slices.Sort(candidates)
	for _, uuid := range slices.Compact(candidates) {
		if !c.cleaning[uuid] && (len(holds[uuid]) == 0 || !maps.Equal(c.users[uuid], holds[uuid])) {
			c.cleaning[uuid] = true
			due = append(due, uuid)
		}
	}
	if len(c.unclean)+len(c.cleaning) > 0 {
		return due, c.retry
	}
	return due, time.Duration(1<<63 - 1)
}

func (c *Cleaner) finish(uuid string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.cleaning, uuid)
}

// holders returns the present holders by GPU.
func (c *Cleaner) holders() map[string]map[user]bool {
	holders := map[string]map[user]bool{}
	for _, h := range c.options.Ledger.Holds() {
		if holders[h.Device.GPU] == nil {
			holders[h.Device.GPU] = map[user]bool{}
		}
		holders[h.Device.GPU][userOf(h)] = true
	}
	return holders
}

// Ensure hands a GPU over to its present holders, if that was not done yet. The driver and the device plugin call it after the holder has
// the GPU and before its first container starts. Idempotent. It waits for a handover that is running, at most until ctx is done. The
// error says what makes the GPU unclean; the caller retries.
func (c *Cleaner) Ensure(ctx context.Context, uuid string) error { return c.handOver(ctx, uuid, true) }

// handOver cleans a GPU whose former holders are all gone, and records the settings before the first of the present ones. starting means
// that no container of a present holder runs.
func (c *Cleaner) handOver(ctx context.Context, uuid string, starting bool) error {
	unlock, err := c.turns.Lock(ctx, uuid)
	if err != nil {
		return fmt.Errorf("hand over GPU %s: wait for the handover that is running: %w", uuid, err)
	}
	defer unlock()
	now := c.holders()[uuid]
	former, shared := c.formerUsers(uuid, now)
	_, recorded := c.options.Records.Get(uuid)
	switch {
	case shared || !former && len(now) > 0 && recorded:
		// The holders are those of before a restart, or use the GPU beside others: nothing to clean.
	case (former || recorded) && (len(now) == 0 || starting || !c.options.Reset(uuid)):
		c.recordUnclean(ctx, uuid) // clean removes the record
		if err := c.clean(ctx, uuid); err != nil {
			if len(now) == 0 {
				c.setUsers(uuid, noHolder)
			}
			return c.failed(ctx, uuid, err)
		}
	case former:
		return nil // a reset would end the new holder's containers; Ensure comes before they start
	}
	if len(now) > 0 {
		if err := c.recordSettings(ctx, uuid); err != nil {
			klog.FromContext(ctx).Error(err, "Cannot record the settings of a GPU, so they will not be restored after its holder", "gpu", uuid)
		}
	}
	c.adopt(ctx, uuid, now)
	return nil
}

// formerUsers reports whether holders of a GPU are gone, and whether one that remains has used it beside them.
func (c *Cleaner) formerUsers(uuid string, now map[user]bool) (former, shared bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for u := range c.users[uuid] {
		former = former || !now[u]
		shared = shared || now[u]
	}
	return former, shared
}

// noHolder replaces the users of a GPU that could not be cleaned after its last holder. So a former holder that takes the GPU again counts
// as a new one (TestPreparedAgainBesideAProcess).
var noHolder = map[user]bool{{}: true}

func (c *Cleaner) setUsers(uuid string, users map[user]bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.users[uuid] = users
}

func (c *Cleaner) adopt(ctx context.Context, uuid string, now map[user]bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(now) > 0 {
		c.users[uuid] = now
	} else {
		delete(c.users, uuid)
	}
	if c.unclean[uuid] != nil {
		klog.FromContext(ctx).Info("GPU is clean again", "gpu", uuid)
		delete(c.unclean, uuid)
		delete(c.reported, uuid)
		c.changed.Notify()
	}
}

func (c *Cleaner) failed(ctx context.Context, uuid string, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("hand over GPU %s: %w", uuid, err)
	}
	g, found := c.options.Inventory.Inventory().ByUUID(uuid)
	c.mu.Lock()
	known := c.unclean[uuid]
	c.unclean[uuid] = err
	// While the GPU is not offered for another reason, that one is reported.
	report := found && g.Health.Healthy() && !c.reported[uuid]
	if report {
		c.reported[uuid] = true
	}
	c.mu.Unlock()
	if known == nil || known.Error() != err.Error() {
		c.changed.Notify()
	}
	if report {
		klog.FromContext(ctx).Info("GPU is not clean", "gpu", uuid, "reason", Detail(err))
		c.options.Report(uuid, err)
	}
	return fmt.Errorf("hand over GPU %s: %w", uuid, err)
}

// clean fails while a process that may not use the GPU uses it, and before the pods are known. It resets the GPU, if configured, and restores
// its settings.
func (c *Cleaner) clean(ctx context.Context, uuid string) error {
	if !c.options.Pods.Synced() {
		return errPodsUnknown
	}
	if err := c.free(ctx, uuid); err != nil {
		return err
	}
	if c.options.Reset(uuid) {
		if err := c.reset(ctx, uuid); err != nil {
			return err
		}
	}
	record, recorded := c.options.Records.Get(uuid)
	if !recorded {
		return nil
	}
	if c.options.Managed(uuid) {
		record.Settings.ComputeMode = ""
	}
	if err := c.options.Hardware.RestoreSettings(ctx, uuid, record.Settings); err != nil && !errors.Is(err, device.ErrUnsupported) {
		return err
	}
	return c.options.Records.Drop(uuid)
}

// free returns an *InUseError while a process uses the GPU that is neither its holder's nor a monitor's.
func (c *Cleaner) free(ctx context.Context, uuid string) error {
	compute, graphics, err := c.options.Hardware.Processes(ctx, uuid)
	if err != nil || len(compute)+len(graphics) == 0 {
		return err
	}
	if outsiders := c.options.Outsiders(uuid, compute, graphics); len(outsiders) > 0 {
		return &InUseError{Processes: outsiders}
	}
	return nil
}

// ResetIdle resets a GPU that has no holder and that no process uses except those of monitors. It does nothing if the GPU has a holder.
// pkg/health calls it for a GPU with a fault, which no new holder gets. Idempotent. An error says why the GPU was not reset.
func (c *Cleaner) ResetIdle(ctx context.Context, uuid string) (done bool, err error) {
	if len(c.holders()[uuid]) > 0 {
		return false, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, c.patience, errNoAnswer)
	defer cancel()
	unlock, err := c.turns.Lock(ctx, uuid)
	if err != nil {
		return false, fmt.Errorf("reset GPU %s: wait for its handover: %w", uuid, err)
	}
	defer unlock()
	if len(c.holders()[uuid]) > 0 {
		return false, nil
	}
	// A GPU that needs a reset may not list its processes. The driver refuses to reset one that is used.
	if inUse := (*InUseError)(nil); errors.As(c.free(ctx, uuid), &inUse) {
		return false, fmt.Errorf("reset GPU %s: %w", uuid, inUse)
	}
	if ctx.Err() != nil {
		return false, fmt.Errorf("reset GPU %s: list its processes: %w", uuid, context.Cause(ctx))
	}
	if err := c.reset(ctx, uuid); err != nil {
		return false, fmt.Errorf("reset GPU %s because of a fault: %w", uuid, err)
	}
	return true, nil
}

// reset resets one GPU at a time: the driver refuses while this process uses it for another one.
func (c *Cleaner) reset(ctx context.Context, uuid string) error {
	unlock, err := c.resets.Lock(ctx, struct{}{})
	if err != nil {
		return fmt.Errorf("wait for the reset of another GPU: %w", err)
	}
	defer unlock()
	return c.options.Hardware.Reset(ctx, uuid)
}

// recordSettings records the settings of a GPU that has no record.
func (c *Cleaner) recordSettings(ctx context.Context, uuid string) error {
	if _, recorded := c.options.Records.Get(uuid); recorded {
		return nil
	}
	settings, err := c.options.Hardware.Settings(ctx, uuid)
	if err != nil {
		return err
	}
	if c.options.Managed(uuid) {
		settings.ComputeMode = ""
	}
	return c.options.Records.Put(uuid, before{Settings: settings})
}

// recordUnclean records that a GPU is not known to be clean, so that a new agent does not take its next holder for an earlier one.
func (c *Cleaner) recordUnclean(ctx context.Context, uuid string) {
	record, _ := c.options.Records.Get(uuid)
	if record.Unclean {
		return
	}
	record.Unclean = true
	if err := c.options.Records.Put(uuid, record); err != nil {
		klog.FromContext(ctx).Error(err, "Cannot record that a GPU is not known to be clean, so an agent that starts now would offer it", "gpu", uuid)
	}
}

// Outsider is a process that uses a GPU and may not.
type Outsider struct {
	// Description names a pod by its UID only: events on claims and pods of other namespaces contain it.
	Description string
	// Pod is the namespace and name of its pod, for administrators; empty if it is in no living pod.
	Pod string
}

// InUseError means that processes use a GPU whose pods do not hold it, or that are in no running pod. Tenants may read it.
type InUseError struct{ Processes []Outsider }

// most bounds how many processes an error names.
const most = 5

func (e *InUseError) Error() string {
	return e.text(func(o Outsider) string { return o.Description })
}

func (e *InUseError) text(describe func(Outsider) string) string {
	names := make([]string, len(e.Processes))
	for i, o := range e.Processes {
		names[i] = describe(o)
	}
	return "used by " + regarding.First(names, most) + ": end the process"
}

// Detail returns the text of an error of a Cleaner with the names of pods, which only administrators may read.
func Detail(err error) string {
	inUse, ok := errors.AsType[*InUseError](err)
	if !ok {
		return err.Error()
	}
	return strings.Replace(err.Error(), inUse.Error(), inUse.text(func(o Outsider) string {
		if o.Pod == "" {
			return o.Description
		}
		return o.Description + " (" + o.Pod + ")"
	}), 1)
}
