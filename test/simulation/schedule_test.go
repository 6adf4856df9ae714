// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing/synctest"
	"time"
)

// schedule owns everything that happens: at each step it picks one of the events whose time has come. Nothing else runs, apart
// from calls into the product that wait for a channel or a timer; those come back by parking.
type schedule struct {
	// prompt is set in worlds without slow messages.
	prompt bool
	rand   *rand.Rand
	events []*event
	serial uint64
	steps  int
	hash   uint64
	last   []string
	rows   map[row]int
	// current is the call that runs; nil while the schedule itself or a timer of the product does.
	current atomic.Pointer[call]
	// slowness is how many times as long as usual messages take.
	slowness time.Duration
	// faultsArmed is called with each event just before it happens, and may delay it; nil for none.
	faultsArmed func(*event) time.Duration
	// fault is what ends the run.
	fault string

	mu    sync.Mutex
	parks []*parked
	wake  chan struct{}
}

// process is one process from its start to its death. Its events die with it.
type process struct {
	name   string
	over   bool
	frozen time.Time
	calls  map[*call]bool
	ctx    context.Context
	end    context.CancelFunc
}

type event struct {
	at      time.Time
	process *process
	name    string
	run     func()
	// late has been put off once.
	late bool
}

const keptLines = 90

func newSchedule(seed uint64) *schedule {
	return &schedule{
		rand: rand.New(rand.NewPCG(seed, 0x7461_6e64_656d)), hash: 14695981039346656037, rows: map[row]int{}, slowness: 1,
		wake: make(chan struct{}, 1),
	}
}

func newProcess(name string) *process {
	ctx, end := context.WithCancel(context.Background())
	return &process{name: name, calls: map[*call]bool{}, ctx: ctx, end: end}
}

// after has something happen in a life, not before a delay.
func (s *schedule) after(l *process, delay time.Duration, name string, run func()) {
	s.events = append(s.events, &event{at: time.Now().Add(delay), process: l, name: name, run: run})
}

// between draws a duration.
func (s *schedule) between(least, most time.Duration) time.Duration {
	return least + time.Duration(s.rand.Int64N(int64(most-least)+1))
}

// latency is that of a message: mostly short, by the measure of its world.
func (s *schedule) latency() time.Duration { return min(s.quickly()*s.slowness, slowest) }

// slowest is the longest that a message takes.
const slowest = 20 * time.Second

func (s *schedule) quickly() time.Duration {
	most := 200
	if s.prompt {
		most = 190
	}
	switch n := s.rand.IntN(most); {
	case n < 150:
		return s.between(0, 3*time.Millisecond)
	case n < 190:
		return s.between(0, 40*time.Millisecond)
	case n < 199:
		return s.between(0, 400*time.Millisecond)
	default:
		return s.between(0, 2*time.Second)
	}
}

func (s *schedule) chance(oneIn int) bool { return s.rand.IntN(oneIn) == 0 }

func (s *schedule) hit(r row) {
	s.rows[r]++
	s.note("    row " + string(r))
}

// note adds to the trace without being a step.
func (s *schedule) note(line string) {
	for i := range len(line) {
		s.hash = (s.hash ^ uint64(line[i])) * 1099511628211
	}
	if *traceFlag {
		fmt.Println(line)
	}
	s.last = append(s.last, line)
	if len(s.last) >= 2*keptLines {
		s.last = slices.Delete(s.last, 0, keptLines)
	}
}

func (s *schedule) fail(format string, args ...any) {
	if s.fault == "" {
		s.fault = fmt.Sprintf(format, args...)
		s.note("FAULT " + s.fault)
	}
}

func (s *schedule) trace() string {
	return strings.Join(s.last[max(0, len(s.last)-keptLines):], "\n")
}

// step lets one thing happen. It moves the clock to the next event where none is due; false when that is after the limit.
func (s *schedule) step(limit time.Time) bool {
	for {
		now := time.Now()
		s.events = slices.DeleteFunc(s.events, func(e *event) bool { return e.process.over })
		due := make([]int, 0, 16)
		next := limit
		for i, e := range s.events {
			at := e.at
			if e.process.frozen.After(at) {
				at = e.process.frozen
			}
			if !at.After(now) {
				due = append(due, i)
			} else if at.Before(next) {
				next = at
			}
		}
		if len(due) > 0 {
			i := due[s.rand.IntN(len(due))]
			e := s.events[i]
			s.events = slices.Delete(s.events, i, i+1)
			s.steps++
			s.note(fmt.Sprintf("%8d %12.4fs %-10s %s", s.steps, time.Since(epoch).Seconds(), e.process.name, e.name))
			if s.faultsArmed != nil && !e.late {
				if late := s.faultsArmed(e); late > 0 {
					e.at, e.late = time.Now().Add(late), true
					s.events = append(s.events, e)
					return true
				}
			}
			if !e.process.over {
				e.run()
			}
			s.settle()
			return true
		}
		if !now.Before(limit) {
			return false
		}
		select {
		case <-s.wake:
		default:
		}
		timer := time.NewTimer(next.Sub(now))
		select {
		case <-timer.C:
		case <-s.wake: // a call has come back by a timer of its own
		}
		timer.Stop()
		s.settle()
	}
}

// epoch is when every bubble's clock starts (testing/synctest).
var epoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// settle waits until every call is parked or waits for time or another call, and lines up those that have parked.
func (s *schedule) settle() {
	synctest.Wait()
	s.current.Store(nil)
	s.mu.Lock()
	parks := s.parks
	s.parks = nil
	s.mu.Unlock()
	slices.SortFunc(parks, (*parked).compare)
	for _, p := range parks {
		s.after(p.process, p.delay, p.name+": "+p.where, func() {
			s.current.Store(p.call)
			s.forget(p)
			p.resume <- struct{}{}
		})
	}
}

// forget takes a goroutine out of those that are parked.
func (s *schedule) forget(p *parked) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(p.waiting, p)
}

// call is a call into the product, which the schedule lets run from one park to the next.
type call struct {
	id      uint64
	s       *schedule
	process *process
	name    string
	// waiting are its goroutines that are parked. The schedule's lock guards it while the product runs.
	waiting map[*parked]bool
}

// parked is one goroutine of a call: the product starts some of its own. Those of one call have names of their own for where they
// park, so that it does not matter which is first.
type parked struct {
	*call
	where  string
	resume chan struct{}
	// delay is how long it wants to be parked at least.
	delay time.Duration
}

func (p *parked) compare(other *parked) int {
	return cmp.Or(cmp.Compare(p.id, other.id), cmp.Compare(p.where, other.where))
}

// spawn starts a call. It is the last thing that an event does.
func (s *schedule) spawn(l *process, name string, body func(*call)) *call {
	s.serial++
	c := &call{id: s.serial, s: s, process: l, name: name, waiting: map[*parked]bool{}}
	s.mu.Lock()
	l.calls[c] = true
	s.mu.Unlock()
	s.current.Store(c)
	go func() {
		body(c)
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(l.calls, c)
	}()
	return c
}

// park gives the turn back and waits for the next. A call whose process has died ends here.
func (c *call) park(where string) { c.sleep(0, where) }

// sleep parks for a time.
func (c *call) sleep(length time.Duration, where string) {
	if c.process.over {
		runtime.Goexit()
	}
	p := &parked{call: c, where: where, resume: make(chan struct{}), delay: length}
	c.s.mu.Lock()
	c.s.parks = append(c.s.parks, p)
	c.waiting[p] = true
	c.s.mu.Unlock()
	select {
	case c.s.wake <- struct{}{}:
	default:
	}
	<-p.resume
	if c.process.over {
		runtime.Goexit()
	}
}

type callKey struct{}

func (c *call) context(ctx context.Context) context.Context {
	return context.WithValue(ctx, callKey{}, c)
}

// turn parks the call whose context it is.
func turn(ctx context.Context, where string) {
	if c, ok := ctx.Value(callKey{}).(*call); ok {
		c.park(where)
	}
}

// pause parks the call that runs, if one does.
func (s *schedule) pause(where string) {
	if c := s.current.Load(); c != nil {
		c.park(where)
	}
}

// kill ends a process: nothing of it happens any more.
func (s *schedule) kill(l *process) {
	if l.over {
		return
	}
	l.over = true
	l.end()
	s.settle()
	// What waits for time ends when it parks.
	var waiting []*parked
	s.mu.Lock()
	for c := range l.calls {
		waiting = slices.AppendSeq(waiting, maps.Keys(c.waiting))
	}
	s.mu.Unlock()
	for _, p := range slices.SortedFunc(slices.Values(waiting), (*parked).compare) {
		s.forget(p)
		p.resume <- struct{}{}
		s.settle()
	}
	s.settle()
}

func keys[K comparable, V any](m map[K]V) func(func(K) bool) {
	return func(yield func(K) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

func sorted[K ~string, V any](m map[K]V) []K {
	return slices.Sorted(keys(m))
}
