// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// freeBuckets are seconds, from a millisecond to what a stuck process may take.
var freeBuckets = []float64{.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30, 60, 300, 1800}

var (
	holdsDescription = prometheus.NewDesc("tandem_holds",
		"Devices with a holder, by the kind of holder (claim, pod) and by state (restored, held, draining).",
		[]string{"kind", "state"}, nil)
	oldestDescription = prometheus.NewDesc("tandem_oldest_hold_age_seconds",
		"Age of the oldest hold: a restored one since the agent read it, a draining one since it began to drain (a pod's: since Allocate).",
		[]string{"kind", "state"}, nil)
	waitingDescription = prometheus.NewDesc("tandem_waiting_holds",
		"Holds whose holder ended over two seconds ago and that wait for processes or for kubelet (GPUNode, waitsFor), by kind of holder.",
		[]string{"kind"}, nil)
	longestWaitDescription = prometheus.NewDesc("tandem_longest_wait_seconds",
		"How long the oldest waiting hold has been waiting; 0 if there is none.", []string{"kind"}, nil)
	conflictsDescription = prometheus.NewDesc("tandem_conflicting_claims",
		"Claims that are not prepared because another holder has their device: pending eviction, or waiting.",
		[]string{"state"}, nil)
)

// book counts the ledger's holds when metrics are collected.
type book struct{ Ledger }

func (b book) Describe(descriptions chan<- *prometheus.Desc) {
	prometheus.DescribeByCollect(b, descriptions)
}

func (b book) Collect(metrics chan<- prometheus.Metric) {
	type group struct {
		kind  ledger.Kind
		state ledger.State
	}
	count, age := map[group]int{}, map[group]time.Duration{}
	waiting, longest := map[ledger.Kind]int{}, map[ledger.Kind]time.Duration{}
	for _, h := range b.Holds() {
		g := group{h.Holder.Kind, h.State}
		count[g]++
		age[g] = max(age[g], time.Since(h.Since))
		if h.WaitsFor != "" {
			waiting[g.kind]++
			longest[g.kind] = max(longest[g.kind], time.Since(h.WaitsSince))
		}
	}
	gauge := func(description *prometheus.Desc, value float64, labels ...string) {
		metrics <- prometheus.MustNewConstMetric(description, prometheus.GaugeValue, value, labels...)
	}
	for _, kind := range []ledger.Kind{ledger.KindClaim, ledger.KindPod} {
		gauge(waitingDescription, float64(waiting[kind]), string(kind))
		gauge(longestWaitDescription, longest[kind].Seconds(), string(kind))
		for _, state := range []ledger.State{ledger.StateRestored, ledger.StateHeld, ledger.StateDraining} {
			g := group{kind, state}
			gauge(holdsDescription, float64(count[g]), string(kind), string(state))
			if state != ledger.StateHeld {
				gauge(oldestDescription, age[g].Seconds(), string(kind), string(state))
			}
		}
	}
	conflicts := map[bool]int{}
	for _, conflict := range b.Conflicts() {
		conflicts[conflict.PendingEviction]++
	}
	gauge(conflictsDescription, float64(conflicts[true]), "pending_eviction")
	gauge(conflictsDescription, float64(conflicts[false]), "waiting")
}

// freed measures how long devices stay held after their pod's end could first be detected.
type freed struct {
	pods  *podstate.Pods
	times *prometheus.HistogramVec
	// mu guards seen: holds end in several loops.
	mu sync.Mutex
	// seen are the holds of the last look, in any generation.
	seen map[holdKey]ledger.Hold
}

func newMetrics(c Config) *freed {
	c.Registerer.MustRegister(book{c.Ledger}, holders{c})
	f := &freed{
		pods: c.Pods,
		times: promauto.With(c.Registerer).NewHistogramVec(prometheus.HistogramOpts{
			Name:    "tandem_time_to_free_seconds",
			Help:    "Time from the end of a holder (its pod is gone or terminal, its claim is unprepared) to the release of its device, by the kind of holder.",
			Buckets: freeBuckets,
		}, []string{"kind"}),
		seen: map[holdKey]ledger.Hold{},
	}
	for _, kind := range []ledger.Kind{ledger.KindClaim, ledger.KindPod} {
		f.times.WithLabelValues(string(kind)) // starts at zero, so that the first release is an increase
	}
	return f
}

// look finds the holds that were released since the last call, by a later Allocate or by Unprepare.
func (f *freed) look(holds []ledger.Hold) {
	f.mu.Lock()
	defer f.mu.Unlock()
	current := make(map[holdKey]ledger.Hold, len(holds))
	for _, h := range holds {
		k := holdKey{holder: h.Holder, device: h.Device}
		current[k] = h
		delete(f.seen, k)
	}
	for _, h := range f.seen {
		f.count(h)
	}
	f.seen = current
}

// observe counts a hold that has just been released.
func (f *freed) observe(h ledger.Hold) {
	f.mu.Lock()
	delete(f.seen, holdKey{holder: h.Holder, device: h.Device})
	f.mu.Unlock()
	f.count(h)
}

func (f *freed) count(h ledger.Hold) {
	if ended, ok := f.endOf(h); ok {
		f.times.WithLabelValues(string(h.Holder.Kind)).Observe(time.Since(ended).Seconds())
	}
}

// endOf returns when the holder ended; not ok if the watch did not report it.
func (f *freed) endOf(h ledger.Hold) (ended time.Time, ok bool) {
	if h.Holder.Kind == ledger.KindClaim {
		if h.State == ledger.StateDraining {
			return h.Began, true
		}
		return time.Now(), true
	}
	for _, pod := range h.Pods {
		at := f.pods.EndedAt(pod.UID)
		if at.IsZero() {
			return time.Time{}, false
		}
		if at.After(ended) {
			ended = at
		}
	}
	return ended, len(h.Pods) > 0
}
