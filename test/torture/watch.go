// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/test/oracle"
)

const (
	// fastest is the shortest time between two looks; dutyCycle is how many times longer than a look it rests, and slowest the longest
	// rest: a look that takes long has mostly waited for a processor.
	fastest   = 20 * time.Millisecond
	dutyCycle = 12
	slowest   = 250 * time.Millisecond
	// confirmPause is the time between two tries to read the API server's objects, confirmTries their number.
	confirmPause, confirmTries = 500 * time.Millisecond, 240
)

// podHistory is what is known of one of our pods, from its first sight on. It stays when the object is gone.
type podHistory struct {
	pod   *corev1.Pod
	ask   ask
	since time.Time
	owner string
	// replaced at once: its owner makes another pod without a pause, as a Job does not.
	replaced  bool
	deleted   bool
	placed    bool
	contended bool
	failed    bool
	// shared: it was seen with a GPU that others may have too.
	shared bool
	// unschedulable: the scheduler has said that there is no GPU for it.
	unschedulable bool
	// evicted: the Eviction API has deleted it. gpus are the minors of the GPUs that the pod was seen with.
	evicted bool
	gpus    map[int]bool
	// over is when the API server first had it as ended, being deleted or gone.
	over time.Time
}

// waits reports whether the pod has not got its GPUs yet and is still to get them.
func (l *podHistory) waits() bool {
	return !l.deleted && !l.placed && !l.failed && l.pod.DeletionTimestamp == nil && l.pod.Status.Phase == corev1.PodPending
}

// watch looks at node and API server all the time. It is safe for concurrent use.
type watch struct {
	client  kubernetes.Interface
	lookout *oracle.Lookout
	memory  *oracle.Memory
	// room answers what the node has.
	room       func() room
	statistics *statistics
	heals      *heals
	// holds reads the ledger's records; false if they cannot be read. drains is used under mu.
	holds  func() (map[string]hold, bool)
	drains *drains
	// found is called with each device that had two owners.
	found func(ctx context.Context, double oracle.Double)
	trace *trace

	mu           sync.Mutex
	podHistories map[string]*podHistory
	// seen are the devices in the containers of each pod, at the last look.
	seen map[string][]oracle.Device
	// suspected has the keys of all suspicions so far. unjudged are those that judge has not taken yet. A value in arrived wakes judge.
	suspected map[string]bool
	unjudged  []oracle.Suspicion
	arrived   chan struct{}
	looks     int
	// unusable is since when no device can be given to a container; zero while devices can.
	unusable time.Time
	// evicting are the minors of the GPUs that a taint evicts pods from, with the time when it ended; zero while it has not.
	evicting map[int]time.Time
	// wrongs are what pods have suffered that none should.
	wrongs []string
}

// newWatch returns a watch. shared says which GPUs are shared, and how.
func newWatch(
	client kubernetes.Interface, node *cluster.Node, shared map[int]oracle.Sharing, room func() room, t *statistics, h *heals,
) *watch {
	return &watch{
		client: client, lookout: oracle.NewLookout(node, shared), memory: oracle.NewMemory(), room: room, statistics: t, heals: h,
		holds:        func() (map[string]hold, bool) { return readHolds(node) },
		podHistories: map[string]*podHistory{}, seen: map[string][]oracle.Device{}, suspected: map[string]bool{}, evicting: map[int]time.Time{},
		arrived: make(chan struct{}, 1),
	}
}

// run watches until ctx is done.
func (w *watch) run(ctx context.Context) error {
	factory := informers.NewSharedInformerFactory(w.client, 0)
	pods := factory.Core().V1().Pods().Informer()
	claims := factory.Resource().V1().ResourceClaims().Informer()
	if _, err := pods.AddEventHandler(onEach(w.podSeen, w.podGone)); err != nil {
		return fmt.Errorf("watch pods: %w", err)
	}
	if _, err := claims.AddEventHandler(onEach(w.memory.Claim, w.memory.Claim)); err != nil {
		return fmt.Errorf("watch ResourceClaims: %w", err)
	}
	factory.Start(ctx.Done())
	defer factory.Shutdown()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return w.lookAround(ctx) })
	group.Go(func() error { return w.judge(ctx) })
	return group.Wait()
}

// onEach calls seen for what is added or changed, and gone for what is deleted.
func onEach[T any](seen, gone func(*T)) cache.ResourceEventHandler {
	call := func(f func(*T), object any) {
		if unknown, ok := object.(cache.DeletedFinalStateUnknown); ok {
			object = unknown.Obj
		}
		if typed, ok := object.(*T); ok {
			f(typed)
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(object any) { call(seen, object) },
		UpdateFunc: func(_, object any) { call(seen, object) },
		DeleteFunc: func(object any) { call(gone, object) },
	}
}

// lookAround looks at the node as often as it may without taking the machine from those who are watched.
func (w *watch) lookAround(ctx context.Context) error {
	for ctx.Err() == nil {
		started := time.Now()
		glimpse, err := w.lookout.Look()
		if err != nil {
			return err
		}
		w.keep(glimpse)
		w.lookAtHolds(started)
		w.suspect(glimpse.Suspicions())
		broadcast.Sleep(ctx, min(max(fastest, dutyCycle*time.Since(started)), slowest))
	}
	return nil
}

// judge decides until ctx is done, by the objects of the API server, whether suspected pods may have their device at once. They may if they
// share a claim for it, or if their shares of it fit. One refresh serves all suspicions that arose before it. With one for each, the
// client's rate limit would delay the informers' requests, and the informers would miss claims that come and go.
func (w *watch) judge(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.arrived:
		}
		suspicions := w.takeSuspicions()
		if len(suspicions) == 0 {
			continue // the last round took what this value of arrived is about
		}
		if err := w.refresh(ctx); err != nil {
			return fmt.Errorf("judge %s: %w", suspicions[0], err)
		}
		for _, s := range suspicions {
			switch double, judgement := w.memory.Judge(s); {
			case ctx.Err() != nil:
			case judgement == oracle.Guilty:
				w.statistics.add(func(c *Counters) { c.DoublyOwned++ })
				w.trace.say("DOUBLY OWNED: %s; %s", double, s)
				w.found(ctx, double)
			case judgement == oracle.Undecided:
				w.statistics.add(func(c *Counters) { c.Undecided++ })
				w.trace.say("undecided, because a claim came and went unseen: %s; %s", double, s)
			}
		}
	}
}

// suspect hands new suspicions to judge.
func (w *watch) suspect(suspicions []oracle.Suspicion) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range suspicions {
		if !w.suspected[s.Key()] {
			w.suspected[s.Key()] = true
			w.unjudged = append(w.unjudged, s)
		}
	}
	if len(w.unjudged) > 0 {
		select {
		case w.arrived <- struct{}{}:
		default:
		}
	}
}

func (w *watch) takeSuspicions() []oracle.Suspicion {
	w.mu.Lock()
	defer w.mu.Unlock()
	taken := w.unjudged
	w.unjudged = nil
	return taken
}

// refresh reads the API server's objects. It returns nil without them if ctx is done.
func (w *watch) refresh(ctx context.Context) (err error) {
	for range confirmTries {
		call, cancel := context.WithTimeout(ctx, callPatience)
		err = w.memory.Refresh(call, w.client)
		cancel()
		if err == nil || ctx.Err() != nil {
			return nil
		}
		broadcast.Sleep(ctx, confirmPause)
	}
	return err
}

func (w *watch) keep(glimpse oracle.Glimpse) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.looks++
	w.seen = glimpse.Pods()
	for uid, devices := range w.seen {
		if l := w.podHistories[uid]; l != nil {
			for _, d := range devices {
				l.gpus[d.Minor()] = true
			}
		}
	}
	room := w.room()
	if room.memory != nil {
		w.countShares()
	}
	w.compare(room)
}

// lookAtHolds looks at the ledger's records after a look at the containers that began at a time.
func (w *watch) lookAtHolds(began time.Time) {
	holds, ok := w.holds()
	if !ok {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.drains.look(began, holds, func(uid string) bool { return len(w.seen[uid]) > 0 }, func(uid string) time.Time {
		if l := w.podHistories[uid]; l != nil {
			return l.over
		}
		return time.Time{}
	})
}

// countShares counts the pods that have a GPU beside others, or might have. Under mu.
func (w *watch) countShares() {
	for uid, devices := range w.seen {
		l := w.podHistories[uid]
		if l == nil || l.shared {
			continue
		}
		for _, d := range devices {
			switch p := policies[d.Minor()]; {
			case l.shared:
			case l.ask.api == oracle.Limits && p.replicas > 0:
				l.shared = true
				w.statistics.add(func(c *Counters) { c.PlacedReplicas++ })
			case l.ask.api == oracle.Claim && l.ask.mib > 0 && p.memory:
				l.shared = true
				w.statistics.add(func(c *Counters) { c.PlacedShares++ })
			case l.ask.api == oracle.Claim && p.way() == equal:
				l.shared = true
				w.statistics.add(func(c *Counters) { c.PlacedEqual++ })
			case l.ask.api == oracle.Claim && p.way() == unlimited:
				l.shared = true
				w.statistics.add(func(c *Counters) { c.PlacedUnlimited++ })
			}
		}
	}
}

// compare counts the pods that wait while the other API has what they would need. Under mu.
func (w *watch) compare(room room) {
	taken := map[oracle.API]bool{}
	var all []place
	shares := parts{}
	for uid, devices := range w.seen {
		all = append(all, placesOf(devices)...)
		l := w.podHistories[uid]
		if l != nil && len(devices) > 0 {
			taken[l.ask.api] = true
		}
		if l != nil && room.memory != nil {
			shares.add(room.seenBy(holderOf(l.pod), l.ask, devices))
		}
	}
	fits := func(a ask) bool {
		if room.memory != nil {
			return room.fitsBeside(a, shares)
		}
		return room.fits(a, all)
	}
	for _, l := range w.podHistories {
		other := oracle.Claim
		if l.ask.api == oracle.Claim {
			other = oracle.Limits
		}
		if !l.contended && l.waits() && taken[other] && !fits(l.ask) {
			l.contended = true
			w.statistics.add(func(c *Counters) { c.Contended++ })
		}
	}
}

func (w *watch) podSeen(pod *corev1.Pod) {
	w.memory.Pod(pod)
	asked, ours := askOf(pod)
	if !ours {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	l := w.podHistories[string(pod.UID)]
	if l == nil {
		l = &podHistory{ask: asked, since: time.Now(), gpus: map[int]bool{}}
		if owner := controllerOf(pod); owner != nil {
			l.owner, l.replaced = string(owner.UID), owner.Kind == "ReplicaSet"
		}
		w.podHistories[string(pod.UID)] = l
	}
	l.pod = pod
	if finished := pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed; l.over.IsZero() &&
		(finished || pod.DeletionTimestamp != nil) {
		l.over = time.Now()
	}
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Reason == corev1.PodReasonUnschedulable {
			l.unschedulable = true
		}
	}
	if !l.placed && hasStarted(pod) {
		l.placed = true
		w.statistics.placed(l.ask.api)
		w.heals.placed(l, time.Now())
	}
	// Kubelet makes a pod that is being deleted fail at its end.
	if !l.failed && pod.Status.Phase == corev1.PodFailed && pod.DeletionTimestamp == nil {
		l.failed = true
		if l.placed {
			w.statistics.add(func(c *Counters) { c.Ended++ })
		} else {
			w.statistics.add(func(c *Counters) { c.FailedAdmissions++ })
			w.trace.note("failed admission: %s/%s: %s: %s", pod.Namespace, pod.Name, pod.Status.Reason, pod.Status.Message)
			w.failedInVain(l)
		}
	}
	if !l.evicted && evicted(pod) {
		l.evicted = true
		w.trace.note("evicted: %s/%s, seen with GPUs %v", pod.Namespace, pod.Name, slices.Sorted(maps.Keys(l.gpus)))
		switch {
		case asked.api == oracle.Limits && w.tainted(l): // for a taint Kubernetes deletes pods with claims without the Eviction API
			w.statistics.add(func(c *Counters) { c.EvictedByTaint++ })
		case asked.api != oracle.Claim || !replaces(pod):
			w.statistics.add(func(c *Counters) { c.WronglyEvicted++ })
			w.wrong("WRONGLY EVICTED: %s/%s, seen with GPUs %v: it has limits and no taint evicts from them, or it has a claim and no owner replaces it", pod.Namespace, pod.Name,
				slices.Sorted(maps.Keys(l.gpus)))
		}
	}
}

// evictionLag is how long after the end of a taint an eviction may still be due to it. The controller and the API server may each be frozen, and
// the API server may be down.
const evictionLag = 2*maxFreeze + maxDown

// tainted reports whether a taint may have evicted the pod. One that was not seen yet may have had any GPU. Under mu.
func (w *watch) tainted(l *podHistory) bool {
	for gpu, ended := range w.evicting {
		if (l.gpus[gpu] || len(l.gpus) == 0) && (ended.IsZero() || time.Since(ended) < evictionLag) {
			return true
		}
	}
	return false
}

// setEvicting notes that a taint begins to evict the pods of a GPU, or that it has ended.
func (w *watch) setEvicting(gpu int, evicts bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.evicting[gpu] = time.Time{}
	if !evicts {
		w.evicting[gpu] = time.Now()
	}
}

// evicted reports whether a pod was deleted by the Eviction API (k8s.io/kubernetes pkg/registry/core/pod/storage, addConditionAndDeletePod).
func evicted(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.DisruptionTarget && c.Reason == "EvictionByEvictionAPI"
	})
}

// refusals are words of Tandem's answers to Allocate where no device can be given to a container, or no holder be recorded.
var refusals = []string{"cannot be given to a container", "reserve devices for a pod"}

// unusableGrace is how long Tandem may take to find that a directory is read-only, and kubelet and the scheduler to be told. The agent looks
// every two seconds.
const unusableGrace = 6 * time.Second

// failedInVain counts a pod that Tandem refused for good, although it could have known long ago that no device can be given: such a pod was
// to wait. Under mu.
func (w *watch) failedInVain(l *podHistory) {
	if w.unusable.IsZero() || l.pod.CreationTimestamp.Time.Before(w.unusable.Add(unusableGrace)) {
		return
	}
	if message := l.pod.Status.Message; slices.ContainsFunc(refusals, func(words string) bool { return strings.Contains(message, words) }) {
		w.statistics.add(func(c *Counters) { c.FailedUnusable++ })
		w.wrong("FAILED BY AN UNUSABLE DEVICE: %s/%s: %s", l.pod.Namespace, l.pod.Name, message)
	}
}

// setUnusable notes that from now on no device can be given to a container, or that one can again.
func (w *watch) setUnusable(unusable bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.unusable = time.Time{}
	if unusable {
		w.unusable = time.Now()
	}
}

// wrong notes what a pod has suffered. Under mu.
func (w *watch) wrong(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	w.wrongs = append(w.wrongs, text)
	w.trace.say("%s", text)
}

// takeWrongs answers what pods have suffered since it was asked last.
func (w *watch) takeWrongs() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	wrongs := w.wrongs
	w.wrongs = nil
	return wrongs
}

// present answers the pods that are there, in the order of their creation.
func (w *watch) present() []victim {
	return w.those(func(*podHistory) bool { return true })
}

// victims answers the pods that are not being deleted and of which a container can see a GPU.
func (w *watch) victims() []victim {
	return w.those(func(l *podHistory) bool { return l.pod.DeletionTimestamp == nil && len(w.seen[string(l.pod.UID)]) > 0 })
}

func (w *watch) those(are func(*podHistory) bool) []victim {
	w.mu.Lock()
	defer w.mu.Unlock()
	var some []*corev1.Pod
	for _, l := range w.podHistories {
		if !l.deleted && are(l) {
			some = append(some, l.pod)
		}
	}
	slices.SortFunc(some, func(a, b *corev1.Pod) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	var found []victim
	for _, pod := range some {
		found = append(found, victim{string(pod.UID), pod.Namespace, pod.Name, pod.Labels[workloadLabel]})
	}
	return found
}

func (w *watch) podGone(pod *corev1.Pod) {
	w.podSeen(pod)
	w.mu.Lock()
	defer w.mu.Unlock()
	if l := w.podHistories[string(pod.UID)]; l != nil {
		l.deleted = true
		if l.over.IsZero() {
			l.over = time.Now()
		}
	}
}

// hasStarted reports whether a container of the pod has run: it had its GPUs then.
func hasStarted(pod *corev1.Pod) bool {
	for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		if status.State.Running != nil || status.State.Terminated != nil || status.LastTerminationState.Terminated != nil {
			return true
		}
	}
	return false
}

// userOf answers a pod that uses a claim; nil where none is known yet.
func (w *watch) userOf(namespace, claim string) *podHistory {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range w.podHistories {
		if l.pod.Namespace == namespace && claimOf(l.pod) == claim {
			return &podHistory{pod: l.pod, since: l.since, owner: l.owner}
		}
	}
	return nil
}

// sights answers the devices in the containers of each pod at the last look.
func (w *watch) sights() map[string][]oracle.Device {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.seen)
}

// counts answers how many of our pods run and how many wait.
func (w *watch) counts() (running, waiting, looks int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range w.podHistories {
		switch {
		case l.deleted:
		case l.pod.Status.Phase == corev1.PodRunning:
			running++
		case l.waits():
			waiting++
		}
	}
	return running, waiting, w.looks
}

// count answers how many pods of a workload are as is says.
func (w *watch) count(namespace, workload string, is func(*podHistory) bool) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, l := range w.podHistories {
		if l.pod.Namespace == namespace && l.pod.Labels[workloadLabel] == workload && is(l) {
			n++
		}
	}
	return n
}

// forget drops a namespace's pods and claims when nothing of them is left.
func (w *watch) forget(namespace string) {
	w.memory.Forget(namespace)
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.DeleteFunc(w.podHistories, func(_ string, l *podHistory) bool { return l.pod.Namespace == namespace && l.deleted })
	clear(w.suspected)
}
