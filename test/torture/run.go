// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
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
	// settlePatience is how long pods may take to come to rest once pressure has ended, and everything to be free again once all
	// is deleted: kubelet's own retry of a Prepare comes after 60 to 90 s.
	settlePatience = 150 * time.Second
	lookAgain      = 500 * time.Millisecond
	heartbeat      = 10 * time.Second
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
	// Out gets a line for each event and every ten seconds one of progress.
	Out io.Writer
}

// run is one run at work.
type run struct {
	Options
	cluster *cluster.Cluster
	client  kubernetes.Interface
	tally   *tally
	watch   *watch
	heals   *heals
	faults  *saboteur
	auditor auditor
	scraper *scraper
	trace   *trace

	// controller is whether there is one to strike.
	controller bool
	started    time.Time
	// mu keeps two doubles found at once from writing the state together.
	mu sync.Mutex
}

// Run plays the rounds that are left, and returns what they came to. ErrFaults and ErrNothingTested are verdicts on a run that
// ended; any other error cut it short, and what State says in Dir is where another Run goes on.
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
	group.Go(func() error {
		defer stop()
		return r.rounds(watching)
	})
	if err := group.Wait(); err != nil {
		return r.tally.now(), err
	}
	if err := context.Cause(ctx); err != nil {
		return r.tally.now(), err
	}
	counters := r.tally.now()
	return counters, counters.Verdict()
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
	r := &run{Options: o, cluster: c, client: client, tally: &tally{counters: o.State.Counters}, trace: trace, started: time.Now()}
	r.heals = &heals{tally: r.tally, known: map[string]bool{}}
	r.watch = newWatch(client, node, gpusANode, r.tally, r.heals)
	r.watch.trace, r.watch.found = r.trace, r.doubleFound
	r.heals.ownerOf = r.watch.ownerOfClaim
	r.scraper = newScraper(client, c, r.tally)
	r.faults = &saboteur{cluster: c, node: node, client: client, before: func(ctx context.Context, _ string) { r.scraper.scrape(ctx) }}
	r.auditor = auditor{cluster: c, node: node, client: client, dynamic: objects, gpus: gpusANode}
	return r, nil
}

// rounds plays what is left, from a quiet point to the next.
func (r *run) rounds(ctx context.Context) error {
	for r.State.Next*r.State.RoundSize < r.State.Ops && !r.over() {
		size := min(r.State.RoundSize, r.State.Ops-r.State.Next*r.State.RoundSize)
		round := PlanRound(r.State.Seed, r.State.Next, r.State.RoundSize, r.Mix)
		round.Ops = round.Ops[:size]
		if err := r.round(ctx, round); err != nil {
			return err
		}
		r.State.Next++
		r.State.Counters = r.tally.now()
		if err := r.State.Write(r.Dir); err != nil {
			return err
		}
		if r.State.Counters.faults() > 0 {
			r.trace.say("ending: %s", r.State.Counters.Verdict())
			return nil
		}
	}
	return nil
}

// over reports whether the budget leaves no time for another round.
func (r *run) over() bool {
	return !r.Deadline.IsZero() && time.Until(r.Deadline) < quietReserve+time.Minute
}

// begin makes sure that the cluster is as it was after its installation, whatever an interrupted run has left.
func (r *run) begin(ctx context.Context) error {
	if err := r.faults.mend(ctx); err != nil {
		return fmt.Errorf("mend the cluster: %w", err)
	}
	if err := r.clearAll(ctx); err != nil {
		return err
	}
	var err error
	if r.controller, err = hasController(ctx, r.client); err != nil {
		return err
	}
	if r.auditor.specs, err = r.auditor.list(cdiDir); err != nil {
		return err
	}
	lines, _, err := r.awaitFree(ctx)
	if err == nil && len(lines) > 0 {
		err = fmt.Errorf("the cluster is not empty to begin with:\n%s", strings.Join(lines, "\n"))
	}
	return err
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
	r.trace.say("round %d: operations %d to %d", round.Number, round.Ops[0].Index, round.Ops[len(round.Ops)-1].Index)
	if err := u.settle(ctx); err != nil {
		return err
	}
	if err := r.pressure(ctx, u, round); err != nil {
		return err
	}
	if r.UntilFault && r.tally.now().faults() > 0 {
		return nil
	}
	if err := r.settle(ctx, u); err != nil {
		return err
	}
	if err := u.clear(ctx, round.Clean); err != nil {
		return err
	}
	lines, missing, err := r.awaitFree(ctx)
	if err != nil {
		return err
	}
	if missing > 0 {
		r.tally.add(func(c *Counters) { c.Leaked += missing })
		r.trace.say("LEAKED: %s", strings.Join(lines, "; "))
		r.keepEvidence(ctx, "leaked", lines)
	}
	r.watch.forget(u.namespace)
	r.heals.forget()
	return nil
}

// pressure plays a round's operations, several in flight at once. Each takes a place, in the order of the plan, and waits
// there for those before it that touch the same workload.
func (r *run) pressure(ctx context.Context, u user, round Round) error {
	limited := ctx
	if !r.Deadline.IsZero() {
		var cancel context.CancelFunc
		limited, cancel = context.WithDeadline(ctx, r.Deadline.Add(-quietReserve))
		defer cancel()
	}
	group, inFlight := errgroup.WithContext(ctx)
	places := make(chan struct{}, r.State.InFlight)
	last := map[string]<-chan struct{}{}
	for _, op := range round.Ops {
		select {
		case places <- struct{}{}:
		case <-inFlight.Done():
		case <-limited.Done():
		}
		if limited.Err() != nil || inFlight.Err() != nil || r.UntilFault && r.tally.now().faults() > 0 {
			break
		}
		var before []<-chan struct{}
		finished := make(chan struct{})
		for _, name := range op.touches() {
			if earlier := last[name]; earlier != nil {
				before = append(before, earlier)
			}
			last[name] = finished
		}
		group.Go(func() error {
			defer func() { <-places }()
			defer close(finished)
			for _, earlier := range before {
				<-earlier
			}
			return r.play(inFlight, u, op)
		})
	}
	return group.Wait()
}

// play carries out one operation and stays for its dwell.
func (r *run) play(ctx context.Context, u user, op Op) error {
	if op.Component == controllerName && !r.controller {
		return nil
	}
	started := time.Now()
	r.trace.note("begin %s", op)
	var err error
	if op.IsFault() {
		err = r.strike(ctx, op)
	} else {
		err = u.do(ctx, op)
	}
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("operation %s: %w", op, err)
	}
	r.trace.note("end   %05d after %s", op.Index, time.Since(started).Round(time.Millisecond))
	r.tally.add(func(c *Counters) { c.Ops++ })
	rest(ctx, op.Dwell)
	return nil
}

func (r *run) strike(ctx context.Context, op Op) error {
	r.trace.say("fault: %s", op)
	ended := r.tally.striking(op.recovery())
	defer ended()
	// A fault that has begun is ended, whoever interrupts: a frozen process must not stay so.
	did, err := r.faults.strike(context.WithoutCancel(ctx), op)
	if did.skipped != "" {
		r.trace.note("fault %05d came to nothing: %s", op.Index, did.skipped)
	}
	r.tally.add(func(c *Counters) { c.Kills += did.kills })
	return err
}

// settle waits until everything is at rest; each pod that is not when patience ends is stuck.
func (r *run) settle(ctx context.Context, u user) error {
	ended := time.Now()
	problems, err := r.awaitRest(ctx, u)
	if err != nil {
		return err
	}
	r.trace.say("at rest after %s", time.Since(ended).Round(100*time.Millisecond))
	if len(problems) == 0 {
		if problems, err = r.disagreements(ctx, u); err != nil || len(problems) == 0 {
			return err
		}
	}
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(problems)) {
		lines = append(lines, name+" "+problems[name])
	}
	r.tally.add(func(c *Counters) { c.Stuck += len(lines) })
	r.trace.say("STUCK: %s", strings.Join(lines, "; "))
	r.keepEvidence(ctx, "stuck", lines)
	return nil
}

// awaitRest wants two looks in a row at which nothing is restless.
func (r *run) awaitRest(ctx context.Context, u user) (problems map[string]string, err error) {
	deadline := time.Now().Add(settlePatience)
	calm := 0
	for {
		var now snapshot
		if now, err = r.snapshot(ctx, u); err == nil {
			problems = now.restless()
			calm++
			if len(problems) > 0 {
				calm = 0
			}
			r.trace.waiting(problems)
		}
		if calm == 2 || time.Now().After(deadline) && err == nil {
			return problems, nil
		}
		if time.Now().After(deadline.Add(opPatience)) {
			return nil, err
		}
		rest(ctx, lookAgain)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
}

// disagreements compares what kubelet believes to have given to the running pods with what their containers see. It asks once
// things are at rest: while pods are admitted the question does harm.
func (r *run) disagreements(ctx context.Context, u user) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, opPatience)
	defer cancel()
	for {
		granted, err := oracle.Granted(ctx, r.auditor.node)
		var now snapshot
		if err == nil {
			now, err = r.snapshot(ctx, u)
		}
		if err == nil {
			return now.disagree(granted), nil
		}
		rest(ctx, lookAgain)
		if ctx.Err() != nil {
			return nil, err
		}
	}
}

func (r *run) snapshot(ctx context.Context, u user) (snapshot, error) {
	ctx, cancel := context.WithTimeout(ctx, callPatience)
	defer cancel()
	pods, err := r.client.CoreV1().Pods(u.namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return snapshot{}, fmt.Errorf("list pods: %w", err)
	}
	claims, err := r.client.ResourceV1().ResourceClaims(u.namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return snapshot{}, fmt.Errorf("list ResourceClaims: %w", err)
	}
	deployments, err := r.client.AppsV1().Deployments(u.namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return snapshot{}, fmt.Errorf("list Deployments: %w", err)
	}
	return snapshot{pods: pods.Items, claims: claims.Items, deployments: deployments.Items, seen: r.watch.sights(), gpus: gpusANode}, nil
}

// awaitFree waits until nothing is left of what was deleted, and answers what is when patience ends.
func (r *run) awaitFree(ctx context.Context) (lines []string, missing int, err error) {
	deadline := time.Now().Add(settlePatience)
	for {
		call, cancel := context.WithTimeout(ctx, 2*callPatience)
		lines, missing, err = r.auditor.leaks(call)
		cancel()
		if err == nil && (len(lines) == 0 || time.Now().After(deadline)) {
			return lines, missing, nil
		}
		if time.Now().After(deadline.Add(opPatience)) {
			return nil, 0, err
		}
		rest(ctx, lookAgain)
		if ctx.Err() != nil {
			return nil, 0, ctx.Err()
		}
	}
}

// doubleFound writes the fault down at once: an interruption must not lose it.
func (r *run) doubleFound(ctx context.Context, double oracle.Double) {
	r.keepEvidence(ctx, "doubly-owned", []string{double.String()})
	r.mu.Lock()
	defer r.mu.Unlock()
	state := r.State
	state.Counters.DoublyOwned = r.tally.now().DoublyOwned
	if err := state.Write(r.Dir); err != nil {
		r.trace.say("state: %v", err)
	}
}

// progress says every ten seconds how far the run has come.
func (r *run) progress(ctx context.Context) error {
	before := r.State.Counters.Ops
	for {
		rest(ctx, heartbeat)
		if ctx.Err() != nil {
			return nil
		}
		running, waiting, looks := r.watch.counts()
		now := r.tally.now()
		eta := "?"
		if done := now.Ops - before; done > 0 {
			left := time.Duration(float64(time.Since(r.started)) / float64(done) * float64(r.State.Ops-now.Ops))
			eta = left.Round(time.Second).String()
			if !r.Deadline.IsZero() && left > time.Until(r.Deadline) {
				eta = time.Until(r.Deadline).Round(time.Second).String()
			}
		}
		r.trace.say("ops %d/%d  running %d  pending %d  faults %d  kills %d  contended %d  conflicts %d  healed %d  failed admissions %d  looks %d  ETA %s",
			now.Ops, r.State.Ops, running, waiting, now.Faults, now.Kills, now.Contended, now.Conflicts, now.Healed, now.FailedAdmissions, looks, eta)
	}
}
