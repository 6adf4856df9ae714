// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Options of a ledger.
type Options struct {
	// Dir is the run directory. It should lie on a tmpfs that ends with the boot.
	Dir string
	// BootID is the kernel's boot ID; records of another boot are dropped.
	BootID string
	// PodStates returns the pod state of a conflicting hold.
	PodStates PodStates

	// Queue, where set, is asked before a claim takes devices that limits may use.
	Queue Queue

	// Now is the clock that stamps the files of kubelet's directory. The default is the kernel's; a simulation has its own.
	Now func() time.Time
	// Step, where set, is told what is about to happen on disk, with the ledger locked: a simulation ends the process there.
	Step func(string)
	// Turn, where set, is called before each attempt of a ReserveClaim and of a DrainClaim, with its context: a simulation lets
	// one at a time go on.
	Turn func(context.Context)
}

// Ledger is the one truth about who holds what. All methods are safe for concurrent use. What a method has answered
// survives the death of the process.
type Ledger struct {
	podstate PodStates
	queue    Queue
	now      func() time.Time
	turn     func(context.Context)
	lock     *os.File
	// locked identifies the locked file. No other file has its inode number while it is open.
	locked unix.Stat_t

	mu       sync.Mutex
	disk     directory
	holds    map[key]*Hold
	byGPU    map[string]map[key]*Hold
	byHolder map[Holder]map[key]*Hold
	// newer are records of a newer version, which stay on disk as they are until they are removed.
	newer map[key]bool
	// unrecorded are holds that a full disk has no record of.
	unrecorded map[key]bool
	changed    chan struct{}
	// announcing is set from a change until changed is closed for it.
	announcing bool
	// conflicts are claims that were refused, by UID.
	conflicts map[string]Conflict
	// serial is the last generation given out.
	serial uint64

	claims claimCalls
}

type key struct {
	holder Holder
	device device.Ref
}

func keyOf(h Hold) key { return key{h.Holder, h.Device} }

// Open takes the lock on the run directory and loads what is recorded there. It returns an error that wraps ErrLocked when
// another process holds the lock. Records that cannot be read are logged, and hold.
func Open(ctx context.Context, o Options) (*Ledger, error) {
	if o.Dir == "" || o.BootID == "" || o.PodStates == nil {
		return nil, errors.New("open ledger: Dir, BootID and Evidence are required")
	}
	if o.Now == nil {
		o.Now = now
	}
	if o.Turn == nil {
		o.Turn = func(context.Context) {}
	}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("open ledger: %w", err)
	}
	lock, err := takeLock(filepath.Join(o.Dir, "lock"))
	if err != nil {
		return nil, fmt.Errorf("open ledger in %s: %w", o.Dir, err)
	}
	l := &Ledger{
		podstate:  o.PodStates,
		queue:     o.Queue,
		now:       o.Now,
		turn:      o.Turn,
		lock:      lock,
		disk:      directory{root: o.Dir, bootID: o.BootID, now: o.Now, step: o.Step},
		holds:     map[key]*Hold{},
		byGPU:     map[string]map[key]*Hold{},
		byHolder:  map[Holder]map[key]*Hold{},
		conflicts: map[string]Conflict{},

		unrecorded: map[key]bool{},
		changed:    make(chan struct{}),
		claims:     claimCalls{byUID: map[string][]*claimCall{}},
	}
	holds, newer, problems, err := l.disk.load()
	if err == nil {
		err = unix.Fstat(int(lock.Fd()), &l.locked)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open ledger in %s: %w", o.Dir, err), lock.Close())
	}
	l.newer = newer
	for _, p := range problems {
		klog.FromContext(ctx).Error(p.err, "Ledger file is not as it should be", "file", p.name)
	}
	for _, h := range holds {
		l.serial = max(l.serial, h.Generation)
		l.put(h)
	}
	return l, nil
}

func takeLock(path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = ErrLocked
		}
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// Close gives up the lock. The records stay; whatever would change one fails from now on, as another process may own them.
func (l *Ledger) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.disk.closed = true
	return l.lock.Close()
}

// Provision reserves space for the records of n limits, so that no full disk can fail their Allocate. Called whenever the
// number of device IDs offered changes, and again after an error; idempotent. IDs that are no longer offered but still
// held count too.
func (l *Ledger) Provision(n int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.onDisk(func() error { return l.disk.provision(n) })
}

// Holds returns a copy of every hold, sorted by device, then holder.
func (l *Ledger) Holds() []Hold {
	l.mu.Lock()
	holds := make([]Hold, 0, len(l.holds))
	for _, h := range l.holds {
		holds = append(holds, *h)
	}
	l.mu.Unlock()
	slices.SortFunc(holds, compareHolds)
	return holds
}

func compareHolds(a, b Hold) int {
	return cmp.Or(
		cmp.Compare(a.Device.GPU, b.Device.GPU),
		cmp.Compare(a.Device.Placement.Start, b.Device.Placement.Start),
		cmp.Compare(a.Device.Placement.Size, b.Device.Placement.Size),
		cmp.Compare(a.Holder.Kind, b.Holder.Kind),
		cmp.Compare(a.Holder.ID, b.Holder.ID))
}

// Changed returns a channel that is closed at the next change of a hold or conflict. Take it before calling Holds or Conflicts.
func (l *Ledger) Changed() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.changed
}

// Expect restores a hold that kubelet's state or pod resources contain. Startup calls it. A holder that has the device already
// keeps its state, and gets the fields that only h contains. If another holder has the device, both hold it from then on, as they
// do on the node, and Expect returns a *ConflictError for the caller to report. After any other error the device is held too, but
// a restart forgets it until Record succeeds.
func (l *Ledger) Expect(h Hold) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if known, ok := l.holds[keyOf(h)]; ok {
		return l.complete(known, h)
	}
	conflicts := l.blockers(h.Holder, h.Device, h.Share)
	l.serial++
	h.Generation = l.serial
	h.State = StateRestored
	h.Since = l.now()
	h.Pods = slices.Clone(h.Pods)
	h.Unreadable = false
	err := l.onDisk(func() error { return l.disk.create(h) })
	l.put(h)
	l.announce()
	if err != nil {
		l.unrecorded[keyOf(h)] = true
		return fmt.Errorf("expect %s: %w", h.Device, err)
	}
	if len(conflicts) > 0 {
		return &ConflictError{Holds: conflicts}
	}
	return nil
}

// Record writes the records that Expect could not write. The caller of Expect repeats it until it returns nil. It is cheap when
// there is nothing to write.
func (l *Ledger) Record() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	for k := range l.unrecorded {
		errs = append(errs, l.rewrite(l.holds[k], *l.holds[k]))
	}
	return errors.Join(errs...)
}

func (l *Ledger) complete(known *Hold, h Hold) error {
	updated := *known
	if updated.Unreadable {
		updated.Unreadable, updated.Since = false, l.now()
	}
	updated.Namespace = cmp.Or(updated.Namespace, h.Namespace)
	updated.Name = cmp.Or(updated.Name, h.Name)
	updated.Resource = cmp.Or(updated.Resource, h.Resource)
	updated.Pods = mergePods(updated.Pods, h.Pods)
	if updated.State == StateRestored && updated.Share.Whole() {
		updated.Share = h.Share
	}
	if updated.equal(*known) {
		return nil
	}
	return l.change(known, updated)
}

func (h Hold) equal(other Hold) bool {
	return h.State == other.State && h.Share == other.Share && h.Namespace == other.Namespace && h.Name == other.Name && h.Resource == other.Resource &&
		h.Unreadable == other.Unreadable && slices.Equal(h.Pods, other.Pods)
}

// mergePods adds pods by UID, and the names of those known by UID alone.
func mergePods(known, more []Pod) []Pod {
	merged := slices.Clone(known)
	for _, pod := range more {
		i := slices.IndexFunc(merged, func(p Pod) bool { return p.UID == pod.UID })
		switch {
		case i < 0:
			merged = append(merged, pod)
		case merged[i].Name == "":
			merged[i] = pod
		}
	}
	return merged
}

// Identify tells which pod kubelet gave a limit to. A hold that has been given out again since (another generation) is left
// alone.
func (l *Ledger) Identify(h Hold, pod Pod) error {
	return l.amend(h, func(updated *Hold) { updated.Pods = []Pod{pod} })
}

// SetPods says which pods use a hold, where some of those that did are gone. A hold that has been given out again since is
// left alone.
func (l *Ledger) SetPods(h Hold, pods []Pod) error {
	return l.amend(h, func(updated *Hold) { updated.Pods = slices.Clone(pods) })
}

// SetState moves a hold between held and draining as evidence about its pods comes and goes. A hold that has been given out
// again since is left alone.
func (l *Ledger) SetState(h Hold, state State) error {
	return l.amend(h, func(updated *Hold) { updated.State = state })
}

func (l *Ledger) amend(h Hold, amend func(*Hold)) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	current, ok := l.holds[keyOf(h)]
	if !ok || current.Generation != h.Generation {
		return nil
	}
	updated := *current
	amend(&updated)
	if updated.equal(*current) {
		return nil
	}
	return l.change(current, updated)
}

// change updates a hold, on disk first. It does not rewrite unreadable records and those of a newer version, which would lose
// fields.
func (l *Ledger) change(current *Hold, updated Hold) error {
	if updated.Unreadable || l.newer[keyOf(updated)] {
		l.replace(current, updated)
		return nil
	}
	return l.rewrite(current, updated)
}

func (l *Ledger) rewrite(current *Hold, updated Hold) error {
	if err := l.onDisk(func() error { return l.disk.update(updated) }); err != nil {
		return err
	}
	delete(l.newer, keyOf(updated))
	delete(l.unrecorded, keyOf(updated))
	l.replace(current, updated)
	return nil
}

// replace updates a hold in memory. Its pods may change, so it gets a new generation, which invalidates pod states determined for
// the old one.
func (l *Ledger) replace(current *Hold, updated Hold) {
	if updated.Generation == current.Generation && (updated.Unreadable != current.Unreadable || !slices.Equal(updated.Pods, current.Pods)) {
		l.serial++
		updated.Generation = l.serial
	}
	*current = updated
	l.announce()
}

// Release ends a hold whose end is proven. A hold that has been given out again since is left alone. Idempotent.
func (l *Ledger) Release(h Hold) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.release(h)
}

func (l *Ledger) release(h Hold) error {
	k := keyOf(h)
	current, ok := l.holds[k]
	if !ok || current.Generation != h.Generation {
		return nil
	}
	if err := l.onDisk(func() error { return l.disk.remove(*current) }); err != nil {
		return err
	}
	delete(l.holds, k)
	delete(l.newer, k)
	delete(l.unrecorded, k)
	deleteFrom(l.byGPU, k.device.GPU, k)
	deleteFrom(l.byHolder, k.holder, k)
	l.announce()
	return nil
}

func (l *Ledger) put(h Hold) {
	k := keyOf(h)
	l.holds[k] = &h
	insertInto(l.byGPU, k.device.GPU, k, &h)
	insertInto(l.byHolder, k.holder, k, &h)
}

func insertInto[I comparable](index map[I]map[key]*Hold, i I, k key, h *Hold) {
	if index[i] == nil {
		index[i] = map[key]*Hold{}
	}
	index[i][k] = h
}

func deleteFrom[I comparable](index map[I]map[key]*Hold, i I, k key) {
	delete(index[i], k)
	if len(index[i]) == 0 {
		delete(index, i)
	}
}

// announceDelay keeps those who watch the ledger from competing with the answer to kubelet that a change is part of. What
// they do about it, an API write, takes many times as long.
const announceDelay = time.Millisecond

// announce closes the channel of Changed in a moment, once for all changes until then. Under l.mu.
func (l *Ledger) announce() {
	if l.announcing {
		return
	}
	l.announcing = true
	time.AfterFunc(announceDelay, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.announcing = false
		close(l.changed)
		l.changed = make(chan struct{})
	})
}

// blockers are the holds of others, and of those that are about to be, that keep the holder from having the device, or that share
// of it.
func (l *Ledger) blockers(holder Holder, ref device.Ref, share device.Share, also ...Hold) []Hold {
	request := availability.Use[device.Ref]{Holder: availability.Holder(holder), Device: ref, Share: share}
	found := availability.Conflicts(request, func(yield func(Hold) bool) {
		for _, h := range l.byGPU[ref.GPU] {
			if !yield(*h) {
				return
			}
		}
		for _, h := range also {
			if !yield(h) {
				return
			}
		}
	})
	slices.SortFunc(found, compareHolds)
	return found
}

// holdsOf are the holds of one holder, sorted.
func (l *Ledger) holdsOf(holder Holder) []Hold {
	var found []Hold
	for h := range maps.Values(l.byHolder[holder]) {
		found = append(found, *h)
	}
	slices.SortFunc(found, compareHolds)
	return found
}

// now is the clock by which the kernel stamps files, so that a stamp of a later write is never earlier.
func now() time.Time {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &t); err != nil {
		return time.Now()
	}
	return time.Unix(t.Unix())
}
