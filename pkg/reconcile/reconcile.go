// SPDX-License-Identifier: Apache-2.0

// Package reconcile brings the ledger and the world together: at start it restores the holds that evidence knows of, and
// from then on it learns which pods hold limits and ends holds whose end is proven. It never gives a device to anybody.
package reconcile

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// Claims gets a ResourceClaim from the API server; client-go's ResourceV1().ResourceClaims(namespace) is one.
type Claims interface {
	Get(ctx context.Context, name string, o metav1.GetOptions) (*resourceapi.ResourceClaim, error)
}

// KubeletResources is kubelet's pod resources endpoint.
type KubeletResources interface {
	List(ctx context.Context, counts func(resource string) bool, driver string) ([]podstate.UsedDevice, []podstate.UsedClaim, error)
}

// Inventory resolves the names of published devices. Changed is taken before Inventory is read.
type Inventory interface {
	Inventory() device.Inventory
	Changed() <-chan struct{}
}

// Ledger keeps the holds. *ledger.Ledger implements it.
type Ledger interface {
	Holds() []ledger.Hold
	Changed() <-chan struct{}
	Expect(h ledger.Hold) error
	Identify(h ledger.Hold, pod ledger.Pod) error
	SetState(h ledger.Hold, state ledger.State) error
	SetPods(h ledger.Hold, pods []ledger.Pod) error
	Release(h ledger.Hold) error
	Repair() error
	Conflicts() []ledger.Conflict
	ClearConflict(uid string)
}

// Config of a Reconciler. Everything is required that is not said to be optional.
type Config struct {
	Ledger Ledger
	// Pods runs elsewhere; until its first list has arrived nothing is ended.
	Pods      *podstate.Pods
	Cgroups   *podstate.Cgroups
	Resources KubeletResources
	// Claims of a namespace.
	Claims     func(namespace string) Claims
	Inventory  Inventory
	KubeletDir string
	NodeName   string
	DriverName string
	// Limits are the resources by which limits ask for the node's devices.
	Limits device.Resources
	// Partitions and Recorder may be nil where no partition is made for a claim, Settings where nothing is set for one.
	Partitions Partitions
	Settings   Settings
	// Recorder receives events on claims.
	Recorder record.EventRecorder
	// AddPlaceholders receives the CDI names that kubelet remembers of claims, before either API is served (cdi.Specs.AddPlaceholders). Optional.
	AddPlaceholders func(names []string)
	// Registerer receives the metrics. Optional.
	Registerer prometheus.Registerer
}

// Reconciler restores and ends holds.
type Reconciler struct {
	Config
	times times
	freed *freed
	// leaving remembers since when a hold has been waiting for processes to end.
	leaving map[holdKey]time.Time
	// unconfirmed records holds that kubelet or the API server has not confirmed, since when, and when they were last checked.
	unconfirmed map[holdKey]*unconfirmed
	// asked is when the API server was last asked about a conflict, by the claim's UID.
	asked map[string]time.Time
	// unused is signalled when a partition, or what was set for a claim, has lost its last user.
	unused chan struct{}
	// late are claims with devices that were not in the inventory when they were restored, and latePodHolds such limits.
	late         []podstate.KubeletClaim
	latePodHolds []podstate.PodDevice
}

// holdKey tells a hold from the next one of the same holder on the same device.
type holdKey struct {
	holder     ledger.Holder
	device     device.Ref
	generation uint64
}

func keyOf(h ledger.Hold) holdKey { return holdKey{h.Holder, h.Device, h.Generation} }

// times are the durations of the protocol, shortened by tests.
type times struct {
	// leaving is how often the kernel is asked at first while a hold waits for processes to end, leavingLast in the end:
	// cgroup files of version 1 do not notify.
	leaving, leavingLast time.Duration
	// A hold that kubelet does not confirm is checked after verifyAfter, and then at intervals of verify: at most one GET of a claim
	// a minute. kubelet's own reconcile loop runs every 60 s.
	verifyAfter, verify time.Duration
	// podHoldCheck is the time between the two checks after which a pod's hold that kubelet does not list is released.
	podHoldCheck time.Duration
	// call bounds one call to kubelet or the API server, restore all such calls at start together.
	call, restore time.Duration
	// retry follows an error; what fails again and again is tried ever more rarely, in the end after retryMost.
	retry, retryMost time.Duration
	// rest is how long a GPU stays in MIG mode without a partition.
	rest time.Duration
	// gather bounds the looks to a hundred a second under load, verifyGather those that doubt to one a second.
	gather, verifyGather time.Duration
}

func defaultTimes() times {
	return times{
		leaving:      100 * time.Millisecond,
		leavingLast:  2 * time.Second,
		verifyAfter:  time.Minute,
		verify:       time.Minute,
		podHoldCheck: 30 * time.Second,
		call:         5 * time.Second,
		restore:      10 * time.Second,
		retry:        time.Second,
		retryMost:    15 * time.Second,
		rest:         5 * time.Second,
		gather:       10 * time.Millisecond,
		verifyGather: time.Second,
	}
}

// New does nothing visible.
func New(c Config) (*Reconciler, error) {
	if c.Ledger == nil || c.Pods == nil || c.Cgroups == nil || c.Resources == nil || c.Claims == nil || c.Inventory == nil ||
		c.KubeletDir == "" || c.NodeName == "" || c.DriverName == "" || c.Limits.GPU == "" {
		return nil, errors.New("create reconciler: every field of the configuration is required")
	}
	freed, err := newMetrics(c)
	if err != nil {
		return nil, fmt.Errorf("create reconciler: %w", err)
	}
	return &Reconciler{Config: c, times: defaultTimes(), freed: freed, leaving: map[holdKey]time.Time{}, unconfirmed: map[holdKey]*unconfirmed{}, unused: make(chan struct{}, 1)}, nil
}

// Run follows the world until ctx is done, after Restore. Call it once.
func (r *Reconciler) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { r.follow(ctx); return nil })
	group.Go(func() error { r.verifyAll(ctx); return nil })
	group.Go(func() error { r.restoreLate(ctx); return nil })
	group.Go(func() error { return r.clearAll(ctx) })
	return group.Wait()
}

// Settle looks at every hold once and ends or moves those that evidence speaks about; it returns when to look again if nothing
// changes before. Run does so by itself: this, Doubt and RestoreLate are for simulations, which call them instead of Run, one at a
// time.
func (r *Reconciler) Settle() (time.Duration, error) { return r.pass() }

// Verify checks unconfirmed holds and conflicts, and returns when to check again if nothing changes.
func (r *Reconciler) Verify(ctx context.Context) (time.Duration, error) {
	forHolds, err := r.verify(ctx)
	forConflicts, conflictsErr := r.checkConflicts(ctx)
	return min(forHolds, forConflicts), errors.Join(err, conflictsErr)
}

func (r *Reconciler) follow(ctx context.Context) {
	files := r.watchKubeletFiles(ctx)
	defer files.Close()
	complaint := &complaint{message: "Reconciling holds"}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		podsChanged, ledgerChanged := r.Pods.Changed(), r.Ledger.Changed()
		wait, err := r.pass()
		if err != nil {
			wait = min(wait, r.times.retry)
		}
		complaint.say(ctx, err)
		timer.Reset(wait)
		select {
		case <-ctx.Done():
		case <-podsChanged:
		case <-ledgerChanged:
		case <-timer.C:
		case <-files.C:
		}
		pause(ctx, r.times.gather)
	}
}

// pause lets a burst of changes become one look.
func pause(ctx context.Context, length time.Duration) {
	timer := time.NewTimer(length)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// never is a wait that something else will end.
const never = time.Duration(1<<63 - 1)

// pass looks at every hold once, and says when to look again if nothing happens before. It asks memory, the kernel and
// kubelet's files only.
func (r *Reconciler) pass() (time.Duration, error) {
	holds := r.Ledger.Holds()
	r.freed.look(holds)
	wait := r.clearConflict()
	r.Pods.Sweep(holds)
	errs := []error{r.Ledger.Repair()}
	if r.Partitions != nil {
		errs = append(errs, r.Partitions.Repair())
	}
	if r.Settings != nil {
		errs = append(errs, r.Settings.Repair())
	}
	if len(holds) == 0 || !r.Pods.Synced() {
		return wait, errors.Join(errs...)
	}
	checkpoint, err := podstate.ReadDeviceCheckpoint(r.KubeletDir)
	if err != nil {
		errs = append(errs, err)
	}
	now := time.Now()
	leaving := map[holdKey]time.Time{}
	for _, h := range holds {
		if h.Holder.Kind == ledger.KindPod && err != nil {
			continue // it may have been given to another pod since it was last read
		}
		again, err := r.settle(h, holds, checkpoint)
		errs = append(errs, err)
		if again == untilLeft {
			since, ok := r.leaving[keyOf(h)]
			if !ok {
				since = now
			}
			leaving[keyOf(h)] = since
			again = min(max(now.Sub(since)/10, r.times.leaving), r.times.leavingLast)
		}
		wait = min(wait, again)
	}
	r.leaving = leaving
	return wait, errors.Join(errs...)
}

// untilLeft means waiting for processes to end, which the kernel does not report.
const untilLeft = time.Duration(-1)

// settle moves one hold as far as evidence goes, and says when to look again.
func (r *Reconciler) settle(h ledger.Hold, holds []ledger.Hold, checkpoint podstate.DeviceCheckpoint) (time.Duration, error) {
	if h.Holder.Kind == ledger.KindClaim {
		return r.settleClaim(h)
	}
	if h.Unreadable {
		return never, nil // unknown since when; verify ends it
	}
	if uid, ok := r.identify(h, checkpoint); ok {
		// The change of the ledger brings the next look.
		return never, r.Ledger.Identify(h, r.Pods.Name(uid))
	}
	if len(h.Pods) == 1 && h.Pods[0].Name == "" && r.Pods.Known(h.Pods[0].UID) {
		return never, r.Ledger.Identify(h, r.Pods.Name(h.Pods[0].UID))
	}
	podState := r.Pods.PodState(h)
	switch {
	case podState == ledger.Gone:
		return never, r.release(h)
	case podState == ledger.Orphaned:
		return untilLeft, errors.Join(r.Ledger.SetState(h, ledger.StateDraining), r.unreadable(h))
	case r.isReplaced(h, holds):
		return never, r.Ledger.SetState(h, ledger.StateDraining)
	case podState == ledger.Running && h.State == ledger.StateRestored && len(h.Pods) > 0:
		return never, r.Ledger.SetState(h, ledger.StateHeld)
	case h.State == ledger.StateDraining:
		// Its pod is back, or has left nothing behind and the hold must only settle: neither keeps the next pod away.
		return never, r.Ledger.SetState(h, ledger.StateHeld)
	}
	if young := podstate.Unsettled(h); len(h.Pods) > 0 && young > 0 {
		return young, nil
	}
	return never, nil
}

// manyPods is how many pods a claim's hold may name before those that are gone are struck off: one that is shared for long may
// see any number of them.
const manyPods = 8

func (r *Reconciler) settleClaim(h ledger.Hold) (time.Duration, error) {
	switch {
	case h.Unreadable:
		return never, nil
	case h.State != ledger.StateDraining && len(h.Pods) > manyPods:
		// Without a pod the hold would look as if nothing were known about it.
		if users := r.Pods.Users(h); len(users) > 0 && len(users) < len(h.Pods) {
			return never, r.Ledger.SetPods(h, users)
		}
		return never, nil
	case h.State != ledger.StateDraining:
		return never, nil
	}
	podState := r.Pods.PodState(h)
	if podState == ledger.Gone {
		if r.made(h.Device) || r.applied(h) {
			signal(r.unused)
			return never, nil
		}
		return never, r.release(h)
	}
	if _, added, _ := r.Pods.AddedPods(h); len(added) > 0 {
		return never, r.Ledger.SetPods(h, append(slices.Clone(h.Pods), added...))
	}
	if podState == ledger.Orphaned {
		return untilLeft, r.unreadable(h)
	}
	return never, nil
}

// signal wakes the receiver of the channel, now or at its next receive.
func signal(channel chan struct{}) {
	select {
	case channel <- struct{}{}:
	default: // one is waiting already
	}
}

func (r *Reconciler) release(h ledger.Hold) error {
	err := r.Ledger.Release(h)
	if err == nil {
		r.freed.observe(h)
	}
	return err
}

// unreadable returns why the kernel gives no answer about the pods of a hold. The pod state does not contain that reason, and an
// operator needs it to see why the hold does not end.
func (r *Reconciler) unreadable(h ledger.Hold) error {
	for _, pod := range h.Pods {
		if _, err := r.Cgroups.Pod(pod.UID); err != nil {
			return fmt.Errorf("judge the hold of %s on %s: %w", h, h.Device, err)
		}
	}
	return nil
}

// identify finds the pod of a limit in kubelet's checkpoint, if it is news. The checkpoint still names the pod before until
// kubelet has written the new one, which is after the Allocate was answered: an older file says nothing, and neither does
// a pod that had ended before.
func (r *Reconciler) identify(h ledger.Hold, checkpoint podstate.DeviceCheckpoint) (podUID string, ok bool) {
	i := slices.IndexFunc(checkpoint.Devices, func(d podstate.PodDevice) bool {
		return d.Resource == h.Resource && d.ID == h.Holder.ID
	})
	if i < 0 || predates(checkpoint, h) {
		return "", false
	}
	uid := checkpoint.Devices[i].PodUID
	if uid == "" || namesPod(h, uid) || h.State == ledger.StateHeld && r.Pods.EndedBefore(uid, h.Since) {
		return "", false
	}
	return uid, true
}

// predates reports whether a hold was given out after the checkpoint was written. Both times come from the clock that
// stamps files.
func predates(checkpoint podstate.DeviceCheckpoint, h ledger.Hold) bool {
	return h.State == ledger.StateHeld && checkpoint.Written.Before(h.Since)
}

// isReplaced reports whether the pod of a limit was given all that it asks for later. A kubelet that has lost its checkpoint asks
// anew for the pods that it had not started, and takes what they had before for free: it must not offer that to others. That the
// pod does not use it cannot be told where it has processes, and so it drains with the pod.
func (r *Reconciler) isReplaced(h ledger.Hold, holds []ledger.Hold) bool {
	if len(h.Pods) != 1 {
		return false
	}
	uid, later := h.Pods[0].UID, 0
	for _, o := range holds {
		if o.Holder.Kind == ledger.KindPod && o.Resource == h.Resource && namesPod(o, uid) && o.Since.After(h.Since) && podstate.Unsettled(o) == 0 {
			later++
		}
	}
	asks := r.Pods.Asks(uid, h.Resource)
	return asks > 0 && later >= asks
}

func namesPod(h ledger.Hold, uid string) bool {
	return slices.ContainsFunc(h.Pods, func(p ledger.Pod) bool { return p.UID == uid })
}
