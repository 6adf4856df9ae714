// SPDX-License-Identifier: Apache-2.0

// Package reconcile keeps the ledger in step with the node. At start it restores the holds that kubelet's state contains. Then it
// records which pods have which holds, and ends a hold once no container can use its device. It never takes a hold for a new
// holder.
package reconcile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/internal/filewatch"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// Claims reads a ResourceClaim from the API server, as client-go's ResourceV1().ResourceClaims(namespace) does.
type Claims interface {
	Get(ctx context.Context, name string, o metav1.GetOptions) (*resourceapi.ResourceClaim, error)
}

// KubeletResources is kubelet's pod resources endpoint.
type KubeletResources interface {
	List(ctx context.Context, counts func(resource string) bool, driver string) ([]podstate.UsedDevice, []podstate.KubeletClaim, error)
}

// Ledger keeps the holds. *ledger.Ledger implements it.
type Ledger interface {
	Holds() []ledger.Hold
	Changed() <-chan struct{}
	Expect(h ledger.Hold) error
	Identify(h ledger.Hold, pod ledger.Pod) error
	SetState(h ledger.Hold, state ledger.State) error
	SetPods(h ledger.Hold, pods []ledger.Pod) error
	SetDeserted(h ledger.Hold, deserted bool)
	SetCounted(h ledger.Hold)
	SetWait(h ledger.Hold, waitsFor string, since time.Time)
	Release(h ledger.Hold) error
	Repair() error
	Conflicts() []ledger.Conflict
	ClearConflict(uid string)
	Withhold(source string, reason error)
}

// Config of a Reconciler. All fields but Turn are required.
type Config struct {
	Ledger Ledger
	// Pods runs in another goroutine. No hold ends before its first list has arrived.
	Pods      *podstate.Pods
	Cgroups   *podstate.Cgroups
	Resources KubeletResources
	// Claims of a namespace.
	Claims     func(namespace string) Claims
	Inventory  device.Source
	KubeletDir string
	// ProcRoot is the host's proc.
	ProcRoot   string
	NodeName   string
	DriverName string
	// Limits are the node's extended resources.
	Limits     device.Resources
	Partitions Partitions
	Settings   Settings
	// Recorder receives events on claims and on the node.
	Recorder record.EventRecorder
	// AddPlaceholders receives the CDI names in kubelet's claim state, before either API is served (cdi.Specs.AddPlaceholders).
	AddPlaceholders func(names []string)
	// Registerer receives the metrics.
	Registerer prometheus.Registerer
	// Turn, where set, is called before each attempt of Clear to do what is named. A simulation orders concurrent attempts by it.
	Turn func(ctx context.Context, what string)
}

// Reconciler restores and ends holds.
type Reconciler struct {
	Config
	times times
	freed *freed
	// leaving is since when a hold has been waiting for processes to end.
	leaving map[holdKey]time.Time
	// unconfirmed records holds that kubelet or the API server has not confirmed, since when, and when they were last checked.
	unconfirmed map[holdKey]*unconfirmed
	// conflictsChecked is when the API server was last asked about conflicts.
	conflictsChecked time.Time
	// unused is signalled when a partition, or a claim's settings, may have lost the last user.
	unused broadcast.Signal
	// late are claims with devices that were not in the inventory when they were restored, and latePodHolds such holds of pods.
	// lateMu guards them and what follows; lateAdded is signalled when Adopt adds one.
	lateMu       sync.Mutex
	lateAdded    broadcast.Signal
	late         []podstate.KubeletClaim
	latePodHolds []podstate.PodDevice
	// unasked has the UIDs of claims whose devices were held without the API server's answer.
	unasked sync.Map
	// unlisted is since when kubelet has not listed a late device of which no pod is known.
	unlisted map[podstate.PodDevice]time.Time
	// settled are the devices of claims that need no hold, or come late, as the API server has answered. unexplained is since when an admitted
	// pod has requested more devices than holds name it.
	settled     map[string][]podstate.PoolDevice
	unexplained time.Time
	// unprepared is since when AdoptClaims has found a claim without devices in kubelet's state.
	unprepared map[string]time.Time
	// unknownBefore is what was reported last of devices that no GPU is known for.
	unknownBefore string
}

// holdKey distinguishes a hold from the next one of the same holder on the same device.
type holdKey struct {
	holder     ledger.Holder
	device     device.Ref
	generation uint64
}

func keyOf(h ledger.Hold) holdKey { return holdKey{h.Holder, h.Device, h.Generation} }

// times are the protocol's durations, which tests shorten.
type times struct {
	// leaving is the first interval of cgroup checks while a hold waits for processes to end, leavingLast the longest: cgroup
	// files of version 1 do not notify.
	leaving, leavingLast time.Duration
	// verify is the interval, and the delay before the first check, of a hold that kubelet does not confirm: at most one GET of a claim
	// a minute. kubelet's own reconcile loop runs every 60 s.
	verify time.Duration
	// ending replaces verify for a claim's hold that is draining or overdue, and bounds the time between two looks at what has to be
	// cleared: neither may wait for a change that is not announced. It sends no request while a process keeps a hold that is ending.
	ending time.Duration
	// waitShown is how long a hold waits before GPUNode says for what, waitReported before an event does. Both are re-examined every
	// waitReported.
	waitShown, waitReported time.Duration
	// podHoldCheck is the time between the two checks after which a pod's hold that kubelet does not list is released.
	podHoldCheck time.Duration
	// prepare is how long kubelet may wait for a driver to prepare a claim (pkg/kubelet/cm/dra/plugin: 45 s).
	prepare time.Duration
	// call bounds one call to kubelet or the API server, restore all such calls at start together.
	call, restore time.Duration
	// retry is the delay after an error. It grows up to retryMost.
	retry, retryMost time.Duration
	// rest is how long a GPU stays in MIG mode without a partition.
	rest time.Duration
	// gather limits passes to a hundred a second under load, verifyGather limits verification to once a second.
	gather, verifyGather time.Duration
}

func defaultTimes() times {
	return times{
		leaving:      100 * time.Millisecond,
		leavingLast:  2 * time.Second,
		verify:       time.Minute,
		ending:       5 * time.Second,
		waitShown:    2 * time.Second,
		waitReported: 10 * time.Second,
		podHoldCheck: 30 * time.Second,
		prepare:      50 * time.Second,
		call:         5 * time.Second,
		restore:      10 * time.Second,
		retry:        time.Second,
		retryMost:    15 * time.Second,
		rest:         5 * time.Second,
		gather:       10 * time.Millisecond,
		verifyGather: time.Second,
	}
}

// New registers the metrics, and panics if they are registered already. It has no other visible effect.
func New(c Config) *Reconciler {
	if c.Turn == nil {
		c.Turn = func(context.Context, string) {}
	}
	return &Reconciler{
		Config: c, times: defaultTimes(), freed: newMetrics(c), leaving: map[holdKey]time.Time{}, unconfirmed: map[holdKey]*unconfirmed{},
		conflictsChecked: time.Now(),
	}
}

// Run follows changes until ctx is done. Restore comes before. Call it once.
func (r *Reconciler) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { r.follow(ctx); return nil })
	group.Go(func() error { r.verifyAll(ctx); return nil })
	group.Go(func() error { r.restoreLate(ctx); return nil })
	group.Go(func() error { r.describeWaits(ctx); return nil })
	group.Go(func() error { return r.Clear(ctx) })
	return group.Wait()
}

// Verify checks unconfirmed holds and conflicts, and returns when to check again if nothing changes.
func (r *Reconciler) Verify(ctx context.Context) (time.Duration, error) {
	forHolds, err := r.verify(ctx)
	forConflicts, conflictsErr := r.checkConflicts(ctx)
	return min(forHolds, forConflicts), errors.Join(err, conflictsErr)
}

func (r *Reconciler) follow(ctx context.Context) {
	files := r.watchKubeletFiles(ctx)
	defer files.Close()
	complaint := &complaint{message: "Cannot bring all holds up to date, retrying"}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		podsChanged, ledgerChanged := r.Pods.Changed(), r.Ledger.Changed()
		wait, err := r.Settle(ctx)
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
		broadcast.Sleep(ctx, r.times.gather) // merges a burst of changes into one pass
	}
}

// never is the wait of a hold whose next step is triggered by a change.
const never = time.Duration(1<<63 - 1)

// Settle makes one pass over all holds, and returns after how long to make the next if nothing changes. It calls no server. Run calls it.
// Simulations do not use Run: they call Settle, Verify and RestoreLate, one at a time.
func (r *Reconciler) Settle(ctx context.Context) (time.Duration, error) {
	holds := r.Ledger.Holds()
	r.freed.look(holds)
	wait := r.clearConflict()
	r.Pods.Sweep(holds)
	errs := []error{r.Ledger.Repair(), r.Partitions.Repair(), r.Settings.Repair()}
	if !r.Pods.Synced() {
		return wait, errors.Join(errs...)
	}
	checkpoint, err := podstate.ReadDeviceCheckpoint(r.KubeletDir)
	if err != nil {
		errs = append(errs, err)
	}
	again, lostErr := r.expectLost(ctx, checkpoint)
	wait, errs = min(wait, again), append(errs, lostErr)
	now := time.Now()
	leaving := map[holdKey]time.Time{}
	for _, h := range holds {
		if h.Holder.Kind == ledger.KindPod && err != nil {
			continue // it may have been given to another pod since it was last read
		}
		again, err := r.settle(h, holds, checkpoint)
		errs = append(errs, err)
		if again == untilLeft {
			since := cmp.Or(r.leaving[keyOf(h)], now)
			leaving[keyOf(h)] = since
			again = min(max(now.Sub(since)/10, r.times.leaving), r.times.leavingLast)
		}
		wait = min(wait, again)
	}
	r.leaving = leaving
	return wait, errors.Join(errs...)
}

// untilLeft is the wait for processes to end, which the kernel does not report.
const untilLeft = time.Duration(-1)

// settle changes the state of one hold, or ends it, and returns when to check it again.
func (r *Reconciler) settle(h ledger.Hold, holds []ledger.Hold, checkpoint podstate.DeviceCheckpoint) (time.Duration, error) {
	if h.Holder.Kind == ledger.KindClaim {
		return r.settleClaim(h)
	}
	if h.Unreadable {
		return never, nil // unknown since when; verify ends it
	}
	if uid, ok := r.identify(h, checkpoint); ok {
		// The change of the ledger triggers the next pass.
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
		// Its pod is back, or has ended without a process and the hold is recent. In neither case it blocks the next pod.
		return never, r.Ledger.SetState(h, ledger.StateHeld)
	}
	if young := podstate.Unsettled(h); len(h.Pods) > 0 && young > 0 {
		return young, nil
	}
	return never, nil
}

// manyPods is how many pods a claim's hold may name before pods that are gone are removed: many pods may use a shared claim over
// time.
const manyPods = 8

func (r *Reconciler) settleClaim(h ledger.Hold) (time.Duration, error) {
	if h.State != ledger.StateDraining {
		r.Ledger.SetDeserted(h, r.Pods.Deserted(h))
	}
	switch {
	case h.Unreadable:
		return never, nil
	case h.State != ledger.StateDraining && len(h.Pods) > manyPods:
		// Without a pod the hold would count as unknown.
		if users := r.Pods.Users(h); len(users) > 0 && len(users) < len(h.Pods) {
			return never, r.Ledger.SetPods(h, users)
		}
		return never, nil
	case h.State != ledger.StateDraining:
		return never, nil
	}
	podState := r.Pods.PodState(h)
	if podState == ledger.Gone {
		if r.hasCleanup(h) {
			r.unused.Notify()
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
	return r.times.ending, nil
}

func (r *Reconciler) release(h ledger.Hold) error {
	err := r.Ledger.Release(h)
	if err == nil {
		r.freed.observe(h)
	}
	return err
}

// unreadable returns why the cgroups of a hold's pods cannot be read. The pod state does not contain the reason, and an operator
// needs it to see why the hold does not end.
func (r *Reconciler) unreadable(h ledger.Hold) error {
	for _, pod := range h.Pods {
		if _, err := r.Cgroups.Pod(pod.UID); err != nil {
			return fmt.Errorf("determine the pod state of the hold of %s on %s: %w", h, h.Device, err)
		}
	}
	return nil
}

// identify returns the pod of a pod's hold from kubelet's checkpoint, if it is new. The checkpoint names the previous pod until
// kubelet has written the new one, which follows the answer to Allocate. So identify ignores a checkpoint older than the hold,
// and a pod that had ended before.
func (r *Reconciler) identify(h ledger.Hold, checkpoint podstate.DeviceCheckpoint) (podUID string, ok bool) {
	i := slices.IndexFunc(checkpoint.Devices, func(d podstate.PodDevice) bool {
		return d.Resource == h.Resource && d.ID == h.Holder.ID
	})
	if i < 0 || r.predates(checkpoint, h) {
		return "", false
	}
	uid := checkpoint.Devices[i].PodUID
	if uid == "" || namesPod(h, uid) || h.State == ledger.StateHeld && r.Pods.EndedBy(uid, h.Began) {
		return "", false
	}
	return uid, true
}

// predates reports whether a hold was taken after the checkpoint was written.
func (r *Reconciler) predates(checkpoint podstate.DeviceCheckpoint, h ledger.Hold) bool {
	return h.State == ledger.StateHeld && r.Pods.Predates(checkpoint, h)
}

// isReplaced reports whether the pod of a hold was allocated all its devices again later. A kubelet that lost its checkpoint
// allocates again for pods that it had not started, and counts their earlier devices as free. The agent cannot tell whether the
// pod uses the earlier device, so the hold drains with the pod and the device is not offered.
func (r *Reconciler) isReplaced(h ledger.Hold, holds []ledger.Hold) bool {
	if len(h.Pods) != 1 {
		return false
	}
	uid, later := h.Pods[0].UID, 0
	for _, o := range holds {
		if o.Holder.Kind == ledger.KindPod && o.Resource == h.Resource && namesPod(o, uid) && o.Began.After(h.Began) && podstate.Unsettled(o) == 0 {
			later++
		}
	}
	asks := r.Pods.Asks(uid, h.Resource)
	return asks > 0 && later >= asks
}

func namesPod(h ledger.Hold, uid string) bool {
	return slices.ContainsFunc(h.Pods, func(p ledger.Pod) bool { return p.UID == uid })
}

// watchKubeletFiles reports when kubelet writes its device checkpoint or its record of claims, also after its directories were
// removed and created again.
func (r *Reconciler) watchKubeletFiles(ctx context.Context) *filewatch.Watcher {
	return filewatch.New(ctx, filewatch.Options{
		Dirs:     []string{r.KubeletDir, filepath.Dir(podstate.DeviceCheckpointPath(r.KubeletDir))},
		Interval: r.times.retry,
		Relevant: func(event fsnotify.Event) bool { return relevant(r.KubeletDir, event) },
	})
}

// relevant excludes most changes in kubelet's directory.
func relevant(kubeletDir string, event fsnotify.Event) bool {
	checkpoint := podstate.DeviceCheckpointPath(kubeletDir)
	switch event.Name {
	case checkpoint, filepath.Dir(checkpoint), podstate.ClaimStatePath(kubeletDir), kubeletDir:
		return event.Op != fsnotify.Chmod
	}
	return false
}

// complaint logs an error once, until it changes, and its end.
type complaint struct{ message, said string }

func (c *complaint) say(ctx context.Context, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	switch {
	case text == c.said:
	case err != nil:
		klog.FromContext(ctx).Error(err, c.message)
	default:
		klog.FromContext(ctx).Info("Succeeded again", "after", c.message, "err", c.said)
	}
	c.said = text
}
