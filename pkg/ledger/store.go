// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/internal/fileclock"
	"github.com/tandem-gpu/tandem/internal/records"
	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Options of a ledger.
type Options struct {
	// Dir is the run directory. It should lie on a tmpfs that ends with the boot.
	Dir string
	// BootID is the kernel's boot ID. Records of another boot are removed.
	BootID string
	// PodStates returns the pod state of a conflicting hold.
	PodStates PodStates
	// CleanupPending, where set, reports whether a partition or sharing settings of a hold still exist. Such a hold is not released for
	// another holder when its pods are gone: the reconciler cleans up first and then releases it.
	CleanupPending func(Hold) bool

	// Queue, where set, returns the pods that come before claims.
	Queue Queue

	// Now is the clock that stamps the files of kubelet's directory. The default is the kernel's; a simulation has its own.
	Now func() time.Time
	// Step, where set, is called before each change of the disk, with the ledger locked: a simulation ends the process there.
	Step func(string)
	// Turn, where set, is called before each attempt of a ReserveClaim and of a DrainClaim, with its context: a simulation runs
	// one at a time.
	Turn func(context.Context)
}

// Ledger decides who holds which device. All methods are safe for concurrent use. Holds survive the death of the process. Of a hold
// from ReservePod, only holder and device survive until its record's contents are written, about a millisecond later.
type Ledger struct {
	options Options
	changed broadcast.Signal

	mu       sync.Mutex
	records  *records.Store[key, Hold]
	holds    map[key]*Hold
	byGPU    map[string]map[key]*Hold
	byHolder map[Holder]map[key]*Hold
	// announcing is set from a change until the watchers are notified.
	announcing bool
	// conflicts are claims that were refused, by UID.
	conflicts map[string]Conflict
	// unwritable is why a new record cannot be written.
	unwritable error
	// withheld are the reasons why no new hold is taken, by source.
	withheld map[string]error
	// serial is the last generation given out.
	serial uint64

	claims claimCalls
}

type key struct {
	holder Holder
	device device.Ref
}

func keyOf(h Hold) key { return key{h.Holder, h.Device} }

// Open locks the records in the run directory and loads them. It returns an error that wraps ErrLocked when another process has them
// open. It logs records that cannot be read; they hold their devices.
func Open(ctx context.Context, o Options) (*Ledger, error) {
	if o.Dir == "" || o.BootID == "" || o.PodStates == nil {
		return nil, errors.New("open ledger: Dir, BootID and PodStates are required")
	}
	if o.Now == nil {
		o.Now = fileclock.Now
	}
	if o.CleanupPending == nil {
		o.CleanupPending = func(Hold) bool { return false }
	}
	if o.Queue == nil {
		o.Queue = noPods{}
	}
	if o.Turn == nil {
		o.Turn = func(context.Context) {}
	}
	l := &Ledger{
		options:   o,
		records:   newRecords(filepath.Join(o.Dir, "holds"), o),
		holds:     map[key]*Hold{},
		byGPU:     map[string]map[key]*Hold{},
		byHolder:  map[Holder]map[key]*Hold{},
		conflicts: map[string]Conflict{},
		withheld:  map[string]error{},
		claims:    claimCalls{byUID: map[string][]*claimCall{}},
	}
	if err := l.load(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("open ledger: %w", err), l.records.Close())
	}
	return l, nil
}

// load reads the holds of an earlier process.
func (l *Ledger) load(ctx context.Context) error {
	problems, err := l.records.Load()
	if err != nil {
		return err
	}
	for _, problem := range problems {
		klog.FromContext(ctx).Error(problem, "Unreadable record of a hold; its device stays held")
	}
	for _, k := range l.records.Keys() {
		h, _ := l.records.Get(k)
		h.Holder, h.Device = k.holder, k.device
		h.Began = time.Now().Add(-max(0, l.options.Now().Sub(h.Since)))
		l.serial = max(l.serial, h.Generation)
		l.put(h)
	}
	return nil
}

// Close unlocks the records. Later calls that would change one fail, because another process may have them open.
func (l *Ledger) Close() error { return l.records.Close() }

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

// Changed returns a channel that is closed after the next change of a hold or conflict, or of whether new holds can be recorded. Take it
// before calling Holds, Conflicts or Unwritable.
func (l *Ledger) Changed() <-chan struct{} { return l.changed.Changed() }

// Expect restores a hold that kubelet's state or pod resources contain. The reconciler calls it. A holder that has the device already
// keeps its state, and gets the fields that only h contains. If another holder has the device, both hold it from then on, as they
// do on the node, and Expect returns a *ConflictError for the caller to report. After any other error the device is held too, but
// a restart forgets it until Repair succeeds.
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
	h.Since, h.Began = l.options.Now(), time.Time{}
	h.Pods = slices.Clone(h.Pods)
	h.Unreadable = false
	err := l.write(h)
	l.put(h)
	l.announce()
	if err != nil {
		return fmt.Errorf("expect %s: %w", h.Device, err)
	}
	if len(conflicts) > 0 {
		return &ConflictError{Holds: conflicts}
	}
	return nil
}

// Repair writes records that the disk had no room for or that another process removed. The caller of Expect repeats it until it
// returns nil.
func (l *Ledger) Repair() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	errs := []error{l.records.Repair()}
	for k, h := range l.holds {
		if _, recorded := l.records.Get(k); !recorded {
			errs = append(errs, l.write(*h))
		}
	}
	return errors.Join(errs...)
}

func (l *Ledger) write(h Hold) error {
	if err := checkName(keyOf(h)); err != nil {
		return err
	}
	err := l.records.PutName(keyOf(h), h)
	if err != nil {
		l.setUnwritable(err)
	}
	return err
}

func (l *Ledger) complete(known *Hold, h Hold) error {
	updated := *known
	if updated.Unreadable {
		updated.Unreadable = false
		l.begin(&updated)
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
	if err := l.change(known, updated); err != nil {
		// The pods use the device whether or not a record names them.
		l.replace(known, updated)
		return fmt.Errorf("expect %s: %w", h.Device, err)
	}
	return nil
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

// Identify records the pod of a pod's hold, as kubelet's checkpoint names it. It does nothing if the hold has another generation.
func (l *Ledger) Identify(h Hold, pod Pod) error {
	return l.amend(h, func(updated *Hold) { updated.Pods = []Pod{pod} })
}

// SetPods records which pods use a hold. It does nothing if the hold has another generation.
func (l *Ledger) SetPods(h Hold, pods []Pod) error {
	return l.amend(h, func(updated *Hold) { updated.Pods = slices.Clone(pods) })
}

// SetState moves a hold between held and draining as the state of its pods changes. It does nothing if the hold has another
// generation.
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

// change updates a hold, on disk first. It does not rewrite unreadable records: what they contain may still be of use to an
// administrator.
func (l *Ledger) change(current *Hold, updated Hold) error {
	if updated.Unreadable {
		l.replace(current, updated)
		return nil
	}
	return l.rewrite(current, updated)
}

func (l *Ledger) rewrite(current *Hold, updated Hold) error {
	if err := l.records.PutName(keyOf(updated), updated); err != nil {
		return err
	}
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

// Release ends a hold whose pods are gone. It does nothing if the hold has another generation. It is idempotent.
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
	if err := l.records.Drop(k); err != nil {
		return err
	}
	delete(l.holds, k)
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

// announceDelay keeps the watchers of the ledger from competing with the answer to kubelet that a change is part of: they write to the
// API server, which takes many times as long (figure allocate_p99 of make bench).
const announceDelay = time.Millisecond

// announce writes the contents of new records and notifies the watchers, once for all changes within announceDelay. Under l.mu.
func (l *Ledger) announce() {
	if l.announcing {
		return
	}
	l.announcing = true
	time.AfterFunc(announceDelay, func() {
		l.mu.Lock()
		l.announcing = false
		// The reconciler calls Repair after each change, and logs the error if it persists.
		_ = l.records.Flush()
		l.mu.Unlock()
		l.changed.Notify()
	})
}

// blockers returns the holds, and the holds in also, that keep the holder from getting the device or that share of it.
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

// holdsOf returns the holds of one holder, sorted.
func (l *Ledger) holdsOf(holder Holder) []Hold {
	var found []Hold
	for h := range maps.Values(l.byHolder[holder]) {
		found = append(found, *h)
	}
	slices.SortFunc(found, compareHolds)
	return found
}

// begin sets when the hold was taken, or began to drain, to this moment.
func (l *Ledger) begin(h *Hold) { h.Since, h.Began = l.options.Now(), time.Now() }

// newRecords returns the holds on disk, one file for each: <kind>~<holder>~<device>. An empty or unreadable file still holds its
// device. A later version may add fields to a record and kinds of holders; this version ignores the fields, and such a holder holds.
func newRecords(dir string, o Options) *records.Store[key, Hold] {
	return records.New(records.Options[key, Hold]{
		What: "hold", Dir: dir, BootID: o.BootID, Exclusive: true, Step: o.Step,
		Name: recordName, Parse: parseRecordName, Check: checkRecord,
		Unreadable: func(k key) Hold {
			return Hold{Holder: k.holder, Device: k.device, State: StateRestored, Since: o.Now(), Unreadable: true}
		},
	})
}

const nameSeparator = "~"

func recordName(k key) string {
	return strings.Join([]string{string(k.holder.Kind), escape(k.holder.ID), escape(k.device.String())}, nameSeparator)
}

func escape(s string) string { return strings.ReplaceAll(url.PathEscape(s), nameSeparator, "%7E") }

// parseRecordName accepts any kind: holders of a kind that a later version adds hold as well.
func parseRecordName(name string) (key, error) {
	kind, rest, _ := strings.Cut(name, nameSeparator)
	id, ref, _ := strings.Cut(rest, nameSeparator)
	id, err := url.PathUnescape(id)
	if err != nil || kind == "" || id == "" {
		return key{}, fmt.Errorf("%q is not <kind>~<holder>~<device>", name)
	}
	if ref, err = url.PathUnescape(ref); err != nil {
		return key{}, fmt.Errorf("%q is not <kind>~<holder>~<device>: %w", name, err)
	}
	parsed, err := device.ParseRef(ref)
	return key{Holder{Kind: Kind(kind), ID: id}, parsed}, err
}

// checkName returns an error if a record of k could not be read again.
func checkName(k key) error {
	name := recordName(k)
	if parsed, err := parseRecordName(name); err != nil || parsed != k {
		return fmt.Errorf("record name %q does not identify device %#v", name, k.device)
	}
	return nil
}

func checkRecord(k key, h Hold) error {
	if k.holder.Kind != KindClaim && k.holder.Kind != KindPod {
		return fmt.Errorf("unknown kind %q", k.holder.Kind)
	}
	if !h.Share.Fits() {
		return fmt.Errorf("share of %d of %d bytes and %d of %d shares", h.Share.Bytes, h.Share.Of, h.Share.Count, h.Share.OfCount)
	}
	switch h.State {
	case StateRestored, StateHeld, StateDraining:
		return nil
	}
	return fmt.Errorf("unknown state %q", h.State)
}
