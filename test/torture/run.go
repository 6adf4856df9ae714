// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/test/oracle"
)

const (
	// settlePatience is how long pods may take to come to rest once pressure has ended: kubelet's own retry of a Prepare comes after
	// 60 to 90 s, and may come twice. freePatience is how long everything may take to be free again once all is deleted.
	settlePatience = 4 * time.Minute
	freePatience   = 150 * time.Second
	// controllerPatience is how long the ReplicaSet controller may take to create a pod: it waits five minutes for the event of a pod
	// whose creation and deletion its watch missed (k8s.io/kubernetes, pkg/controller, ExpectationsTimeout).
	controllerPatience = 6 * time.Minute
	lookAgain          = 500 * time.Millisecond
	heartbeat          = 10 * time.Second
	// quietReserve is kept of a budget for the last quiet point.
	quietReserve = 2 * time.Minute
	gpusANode    = 8
)

// Options of a run on a cluster that is up, with Tandem installed.
type Options struct {
	// Dir keeps state, trace and evidence.
	Dir   string
	State State
	Mix   Mix
	// Deadline ends pressure early; zero is none.
	Deadline time.Time
	// UntilFault ends the run at the first fault instead of the end of its round, without waiting for anything.
	UntilFault bool
	// Newer is the image of a newer agent, which the node has; empty for none.
	Newer string
	// Out gets a line for each event and every ten seconds one of progress.
	Out io.Writer
}

// run is one run at work.
type run struct {
	Options
	cluster    *cluster.Cluster
	client     kubernetes.Interface
	statistics *statistics
	watch      *watch
	heals      *heals
	faults     *injector
	broken     *broken
	auditor    auditor
	scraper    *scraper
	// hardware and administrator are nil without MIG.
	hardware      *hardware
	administrator *administrator
	trace         *trace

	// memory of each GPU in MiB, by its minor; nil without sharing.
	memory map[int]int
	// controller is whether there is one to strike.
	controller bool
	started    time.Time
	// mu keeps two doubles found at once from writing the state together.
	mu sync.Mutex
}

// Run plays the remaining rounds and returns their counters. ErrFaults and ErrNothingTested are results of a run that ended.
// After any other error another Run continues from the State in Dir.
func Run(ctx context.Context, c *cluster.Cluster, o Options) (Counters, error) {
	r, err := newRun(ctx, c, o)
	if err != nil {
		return o.State.Counters, err
	}
	defer r.trace.close()
	// Before the watch begins, or it would count what an interrupted run has left.
	if err := r.begin(ctx); err != nil {
		return o.State.Counters, err
	}
	watching, stop := context.WithCancel(ctx)
	group, watching := errgroup.WithContext(watching)
	group.Go(func() error { return r.watch.run(watching) })
	group.Go(func() error { return r.heals.run(watching, r.auditor.dynamic) })
	group.Go(func() error { return r.scraper.run(watching) })
	group.Go(func() error { return r.progress(watching) })
	if r.hardware != nil {
		group.Go(func() error { return r.hardware.run(watching) })
	}
	group.Go(func() error {
		defer stop()
		return r.rounds(watching)
	})
	err = group.Wait()
	// An interruption makes other things fail.
	if err = cmp.Or(context.Cause(ctx), err); err != nil {
		return r.statistics.now(), err
	}
	counters := r.statistics.now()
	err = counters.Err()
	if errors.Is(err, ErrFaults) {
		err = fmt.Errorf("%w\n  %s", err, r.trace.findings())
	}
	return counters, err
}

func newRun(ctx context.Context, c *cluster.Cluster, o Options) (*run, error) {
	config, err := c.RESTConfig()
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make client: %w", err)
	}
	objects, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make client: %w", err)
	}
	trace, err := openTrace(o.Dir, o.Out)
	if err != nil {
		return nil, err
	}
	node := c.Nodes()[0]
	r := &run{Options: o, cluster: c, client: client, statistics: &statistics{counters: o.State.Counters}, trace: trace, started: time.Now()}
	r.broken = &broken{root: node.Root}
	r.heals = &heals{statistics: r.statistics, trace: trace, known: map[string]bool{}}
	r.statistics.counters.MIG, r.statistics.counters.Sharing = o.State.MIG, o.State.Sharing
	if o.State.MIG {
		r.hardware = &hardware{root: node.Root, statistics: r.statistics, trace: trace, touched: r.unmanagedChanged}
		r.administrator = &administrator{hardware: r.hardware, broken: r.broken, used: r.used}
	}
	var shared map[int]oracle.Sharing
	if o.State.Sharing {
		shared = sharingOfGPUs()
	}
	r.watch = newWatch(client, node, shared, r.room, r.statistics, r.heals)
	r.watch.trace, r.watch.found = r.trace, r.doubleFound
	r.watch.drains = &drains{statistics: r.statistics, trace: trace, now: time.Now, open: map[string]*drain{}}
	r.heals.userOf = r.watch.userOf
	r.scraper = newScraper(client, c, r.statistics)
	r.faults = &injector{
		cluster: c, node: node, client: client, before: r.scraper.scrape, newer: o.Newer, administrator: r.administrator, broken: r.broken,
		auditor: &r.auditor, trace: trace, pods: r.watch.present, victims: r.watch.victims, used: r.used, changed: r.heals.noteUserChange,
		unusable: r.watch.setUnusable, evicting: r.watch.setEvicting,
	}
	r.auditor = auditor{cluster: c, node: node, client: client, dynamic: objects, hardware: r.hardware, sharing: o.State.Sharing}
	return r, nil
}

// rounds plays what is left, from a quiet point to the next. However long the start took, the first round is played.
func (r *run) rounds(ctx context.Context) error {
	for r.State.Next*r.State.RoundSize < r.State.Ops && (r.State.Next == 0 || !r.over()) {
		size := min(r.State.RoundSize, r.State.Ops-r.State.Next*r.State.RoundSize)
		round := PlanRound(r.State.Seed, r.State.Next, r.State.RoundSize, r.Mix)
		round.Ops = round.Ops[:size]
		if err := r.round(ctx, round); err != nil {
			return err
		}
		r.State.Next++
		r.State.Counters = r.statistics.now()
		if err := r.State.Write(r.Dir); err != nil {
			return err
		}
		if r.State.Counters.faults() > 0 {
			r.trace.say("ending: %s", r.State.Counters.Err())
			return nil
		}
	}
	return nil
}

// over reports whether the budget leaves no time for another round.
func (r *run) over() bool {
	return !r.Deadline.IsZero() && time.Until(r.Deadline) < quietReserve+time.Minute
}

// begin makes sure that the cluster is as empty as after its installation, whatever an interrupted run has left.
func (r *run) begin(ctx context.Context) error {
	if err := errors.Join(r.clearAll(ctx), r.faults.serve(ctx)); err != nil {
		return err
	}
	// What the node offers now is what it has to offer later, so no hold may be left of the pods that were removed.
	err := persist(ctx, "wait for the end of all holds", func(context.Context) error {
		holds, err := r.auditor.list(holdsDir)
		if err == nil && len(holds) > 0 {
			err = fmt.Errorf("the ledger has %v", holds)
		}
		return err
	})
	if err != nil {
		return err
	}
	if r.controller, err = hasController(ctx, r.client); err != nil {
		return err
	}
	if r.auditor.specs, err = r.auditor.list(cdiDir); err != nil {
		return err
	}
	if r.hardware != nil {
		if err := r.hardware.begin(); err != nil {
			return err
		}
	}
	if r.auditor.offered, err = r.awaitOffer(ctx); err != nil {
		return err
	}
	if r.State.Sharing {
		if r.memory, err = memoryOf(r.auditor.node); err != nil {
			return err
		}
	}
	lines, _, err := r.awaitFree(ctx)
	if err == nil && len(lines) > 0 {
		err = fmt.Errorf("the cluster is not empty to begin with:\n%s", strings.Join(lines, "\n"))
	}
	return err
}

// room is what the node has for those who ask.
func (r *run) room() room {
	if r.memory != nil {
		return room{memory: r.memory}
	}
	return r.hardware.room()
}

// memoryOf answers the memory of the GPUs in MiB, as the node's own files tell.
func memoryOf(node *cluster.Node) (map[int]int, error) {
	root, err := node.Root()
	if err != nil {
		return nil, err
	}
	gpus, err := oracle.GPUs(root)
	if err != nil {
		return nil, err
	}
	found := map[int]int{}
	for gpu := range gpusANode {
		if found[gpu] = int(gpus[gpu].Memory / mibibytes); found[gpu] == 0 {
			return nil, fmt.Errorf("the files of %s do not tell the memory of GPU %d", node.Name(), gpu)
		}
	}
	return found, nil
}

// clearAll removes the namespaces that an interrupted run has left, and returns when they are gone: their names come again.
func (r *run) clearAll(ctx context.Context) error {
	return persist(ctx, "remove what an interrupted run has left", func(ctx context.Context) error {
		list, err := r.client.CoreV1().Namespaces().List(ctx, metav1.ListOptions{LabelSelector: namespaceLabel})
		if err != nil || len(list.Items) == 0 {
			return err
		}
		for _, namespace := range list.Items {
			if err := (user{r.client, namespace.Name}).clear(ctx, Forced); err != nil {
				return err
			}
		}
		return fmt.Errorf("%d namespaces are still there", len(list.Items))
	})
}

// round plays one round to its quiet point.
func (r *run) round(ctx context.Context, round Round) error {
	u := user{r.client, fmt.Sprintf("torture-%04d", round.Number)}
	r.trace.say("round %d: operations %d to %d; newer agent to begin with: %t", round.Number, round.Ops[0].Index,
		round.Ops[len(round.Ops)-1].Index, round.Newer)
	if err := r.faults.provide(ctx, round.Newer, fmt.Sprintf("round-%d", round.Number)); err != nil {
		return err
	}
	if err := u.settle(ctx); err != nil {
		return err
	}
	if err := r.pressure(ctx, u, round); err != nil {
		return err
	}
	if wrongs := r.watch.takeWrongs(); len(wrongs) > 0 {
		r.keepLogs(ctx, "wrong", wrongs)
	}
	if r.UntilFault && r.statistics.now().faults() > 0 {
		return nil
	}
	if err := r.settle(ctx, u); err != nil {
		return err
	}
	if err := r.handOver(ctx, u); err != nil {
		return err
	}
	if err := r.settle(ctx, u); err != nil {
		return err
	}
	if err := u.clear(ctx, round.Clean); err != nil {
		return err
	}
	if r.administrator != nil {
		if err := r.administrator.tidy(ctx); err != nil {
			return err
		}
	}
	if err := r.freed(ctx); err != nil {
		return err
	}
	r.forget(u)
	if r.State.Sharing && r.statistics.now().faults() == 0 {
		if err := r.eachPart(ctx, user{r.client, u.namespace + "-parts"}); err != nil {
			return err
		}
	}
	if !r.controller || r.statistics.now().faults() > 0 {
		return nil
	}
	if err := r.besideBroken(ctx, user{r.client, u.namespace + "-broken"}); err != nil || r.UntilFault || r.statistics.now().faults() > 0 {
		return err
	}
	return r.race(ctx, user{r.client, u.namespace + "-race"})
}

// freed returns when all is free again that was given out; what is not when patience ends has leaked.
func (r *run) freed(ctx context.Context) error {
	lines, missing, err := r.awaitFree(ctx)
	if err == nil && missing > 0 {
		r.statistics.add(func(c *Counters) { c.Leaked += missing })
		r.trace.say("LEAKED: %s", strings.Join(lines, "; "))
		r.keepLogs(ctx, "leaked", lines)
	}
	return err
}

// used is what containers see and claims have.
func (r *run) used(ctx context.Context) ([]place, error) {
	ctx, cancel := context.WithTimeout(ctx, callPatience)
	defer cancel()
	claims, err := r.client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list ResourceClaims: %w", err)
	}
	all := snapshot{claims: claims.Items}.allocated()
	for _, devices := range r.watch.sights() {
		all = append(all, placesOf(devices)...)
	}
	return all, nil
}

func (r *run) unmanagedChanged(ctx context.Context, what string) {
	r.keepLogs(ctx, "unmanaged-changed", []string{what})
}

// finish deletes what one check on an empty node has made, and returns when all is free again.
func (r *run) finish(ctx context.Context, u user) error {
	if err := u.clear(ctx, PodsOwn); err != nil {
		return err
	}
	if err := r.freed(ctx); err != nil {
		return err
	}
	r.forget(u)
	return nil
}

func (r *run) forget(u user) {
	r.watch.forget(u.namespace)
	r.heals.forget()
}

// doubleFound writes the fault down at once: an interruption must not lose it.
func (r *run) doubleFound(ctx context.Context, double oracle.Double) {
	r.keepLogs(ctx, "doubly-owned", []string{double.String()})
	r.mu.Lock()
	defer r.mu.Unlock()
	state := r.State
	state.Counters.DoublyOwned = r.statistics.now().DoublyOwned
	if err := state.Write(r.Dir); err != nil {
		r.trace.say("state: %v", err)
	}
}
