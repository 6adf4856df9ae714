// SPDX-License-Identifier: Apache-2.0

// Package reconcile brings the ledger and the world together: at start it restores the holds that evidence knows of, and
// from then on it learns which pods hold limits and ends holds whose end is proven. It never gives a device to anybody.
package reconcile

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sync/errgroup"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/evidence"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Claims gets a ResourceClaim from the API server; client-go's ResourceV1().ResourceClaims(namespace) is one.
type Claims interface {
	Get(ctx context.Context, name string, o metav1.GetOptions) (*resourceapi.ResourceClaim, error)
}

// KubeletResources is kubelet's pod resources endpoint.
type KubeletResources interface {
	List(ctx context.Context, resource, driver string) ([]evidence.UsedDevice, []evidence.UsedClaim, error)
}

// Config of a Reconciler. Everything is required.
type Config struct {
	Ledger    *ledger.Ledger
	Pods      *evidence.Pods
	Cgroups   *evidence.Cgroups
	Resources KubeletResources
	// Claims of a namespace.
	Claims func(namespace string) Claims
	// Inventory resolves the names of published devices.
	Inventory  func() device.Inventory
	KubeletDir string
	NodeName   string
	DriverName string
	Resource   string
}

// Reconciler restores and ends holds.
type Reconciler struct {
	Config
	// unconfirmed remembers holds that kubelet's state does not confirm, since when, and when they were last looked into.
	unconfirmed map[unconfirmedKey]*doubt
}

type unconfirmedKey struct {
	holder     ledger.Holder
	device     device.Ref
	generation uint64
}

type doubt struct {
	since, checked time.Time
	// clean counts successive looks in which kubelet knew nothing of the hold.
	clean int
}

// New does nothing visible.
func New(c Config) (*Reconciler, error) {
	if c.Ledger == nil || c.Pods == nil || c.Cgroups == nil || c.Resources == nil || c.Claims == nil || c.Inventory == nil ||
		c.KubeletDir == "" || c.NodeName == "" || c.DriverName == "" || c.Resource == "" {
		return nil, errors.New("create reconciler: every field of the configuration is required")
	}
	return &Reconciler{Config: c, unconfirmed: map[unconfirmedKey]*doubt{}}, nil
}

const (
	// leavingInterval is how often the kernel is asked while a hold waits for processes to end: cgroup files of version 1
	// do not notify.
	leavingInterval = 100 * time.Millisecond
	// doubtAfter and doubtInterval: a hold that kubelet does not confirm is looked into after a minute, then at most once a
	// minute (design: at most one claim GET a minute a stale hold). Kubelet's own reconcile loop runs every 60 s.
	doubtAfter    = time.Minute
	doubtInterval = time.Minute
	// limitDoubtInterval is the time between two looks at a limit that no pod was ever found for.
	limitDoubtInterval = 30 * time.Second
	callTimeout        = 5 * time.Second
	// gatherInterval bounds the looks to a hundred a second under load.
	gatherInterval = 10 * time.Millisecond
)

// Run follows the world until ctx is done. It also runs the informer behind Pods.
func (r *Reconciler) Run(ctx context.Context) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch kubelet's state: %w", err)
	}
	defer watcher.Close()
	for _, dir := range []string{r.KubeletDir, filepath.Join(r.KubeletDir, "device-plugins")} {
		if err := watcher.Add(dir); err != nil {
			return fmt.Errorf("watch kubelet's state in %s: %w", dir, err)
		}
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return r.Pods.Run(ctx) })
	group.Go(func() error { return r.follow(ctx, watcher) })
	return group.Wait()
}

func (r *Reconciler) follow(ctx context.Context, watcher *fsnotify.Watcher) error {
	logger := klog.FromContext(ctx)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		podsChanged, ledgerChanged := r.Pods.Changed(), r.Ledger.Changed()
		wait, err := r.pass(ctx)
		if err != nil {
			logger.Error(err, "Reconciling holds")
			wait = min(wait, time.Second)
		}
		timer.Reset(wait)
		select {
		case <-ctx.Done():
			return nil
		case <-podsChanged:
		case <-ledgerChanged:
		case <-timer.C:
		case <-watcher.Events:
		case err := <-watcher.Errors:
			logger.Error(err, "Watching kubelet's state")
		}
		if !gather(ctx, watcher.Events) {
			return nil
		}
	}
}

// gather lets a burst of changes become one look. It reports whether ctx is still alive.
func gather(ctx context.Context, events <-chan fsnotify.Event) bool {
	timer := time.NewTimer(gatherInterval)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-events:
		case <-timer.C:
			return true
		}
	}
}

// never is a wait that something else will end.
const never = time.Duration(1<<63 - 1)

// pass looks at every hold once, and says when to look again if nothing happens before.
func (r *Reconciler) pass(ctx context.Context) (time.Duration, error) {
	holds := r.Ledger.Holds()
	r.Pods.Sweep(holds)
	if len(holds) == 0 || !r.Pods.Synced() {
		return never, nil
	}
	checkpoint, err := evidence.ReadDeviceCheckpoint(r.KubeletDir)
	if err != nil {
		return never, err
	}
	var errs []error
	wait := never
	for _, h := range holds {
		again, err := r.settle(h, checkpoint)
		errs = append(errs, err)
		wait = min(wait, again)
	}
	again, err := r.doubt(ctx)
	return min(wait, again), errors.Join(append(errs, err)...)
}

// settle moves one hold as far as evidence goes.
func (r *Reconciler) settle(h ledger.Hold, checkpoint evidence.DeviceCheckpoint) (time.Duration, error) {
	if h.Holder.Kind == ledger.KindLimit {
		if pod, ok := identify(h, checkpoint, time.Now()); ok && !namesPod(h, pod) {
			return leavingInterval, r.Ledger.Identify(h, r.Pods.Name(pod))
		}
		if len(h.Pods) == 1 && h.Pods[0].Name == "" {
			if named := r.Pods.Name(h.Pods[0].UID); named.Name != "" {
				return leavingInterval, r.Ledger.Identify(h, named)
			}
		}
	}
	switch verdict := r.Pods.Verdict(h); {
	case verdict == ledger.Gone && (h.Holder.Kind == ledger.KindLimit || h.State == ledger.StateDraining):
		return never, r.Ledger.Release(h)
	case h.State == ledger.StateDraining && h.Holder.Kind == ledger.KindClaim:
		return leavingInterval, nil
	case verdict == ledger.Orphaned:
		return leavingInterval, r.Ledger.SetState(h, ledger.StateDraining)
	case h.State == ledger.StateDraining && verdict == ledger.Running:
		return never, r.Ledger.SetState(h, ledger.StateHeld)
	case h.State == ledger.StateExpected && h.Holder.Kind == ledger.KindLimit && len(h.Pods) > 0 && verdict == ledger.Running:
		return never, r.Ledger.SetState(h, ledger.StateHeld)
	default:
		return never, nil
	}
}

// staleAfter is how long a checkpoint written in the same clock tick as the Allocate must wait before it is believed: it
// may still name the pod before.
const staleAfter = 2 * time.Second

// identify finds the pod of a limit in kubelet's checkpoint. The checkpoint still names the pod before until kubelet has
// written the new one, which is after the Allocate was answered: an older file says nothing.
func identify(h ledger.Hold, checkpoint evidence.DeviceCheckpoint, now time.Time) (podUID string, ok bool) {
	if checkpoint.Written.Before(h.Since) && h.State == ledger.StateHeld {
		return "", false
	}
	if checkpoint.Written.Equal(h.Since) && now.Sub(h.Since) < staleAfter {
		return "", false
	}
	i := slices.IndexFunc(checkpoint.Devices, func(d evidence.PodDevice) bool {
		return d.Resource == h.Resource && d.ID == h.Holder.ID
	})
	if i < 0 {
		return "", false
	}
	return checkpoint.Devices[i].PodUID, true
}

func namesPod(h ledger.Hold, uid string) bool {
	return slices.ContainsFunc(h.Pods, func(p ledger.Pod) bool { return p.UID == uid })
}
