// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/test/oracle"
)

// Counters are what a run has come to. They are kept over interruptions.
type Counters struct {
	Ops          int `json:"ops"`
	PlacedClaims int `json:"placedClaims"`
	PlacedPods   int `json:"placedLimits"`
	// Contended counts pods that waited while the GPUs that were free were too few for them and the other API had some.
	Contended int `json:"contended"`
	// Kills counts processes ended with SIGKILL, a reboot as one; Faults all faults, frozen processes included.
	Kills  int `json:"kills"`
	Faults int `json:"faults"`
	// DoublyOwned counts devices that two containers of different owners could see at one moment.
	DoublyOwned int `json:"doublyOwned"`
	// Undecided counts devices that several containers could see, where what one of them had was not seen.
	Undecided int `json:"undecided,omitempty"`
	// Stuck counts pods neither running nor rightly pending when they should have come to rest; Leaked counts GPUs, and other
	// things, that were not free again when everything was deleted.
	Stuck  int `json:"stuck"`
	Leaked int `json:"leaked"`
	// EvictedByTaint counts pods with limits that were evicted from a GPU with a taint of a DeviceTaintRule. WronglyEvicted counts pods with
	// limits that were evicted without such a taint, and pods with claims that no owner replaces. FailedUnusable counts those that Tandem
	// refused for good although it could have known that no device could be given to them.
	EvictedByTaint int `json:"evictedByTaint"`
	WronglyEvicted int `json:"wronglyEvicted"`
	FailedUnusable int `json:"failedUnusable"`
	// Conflicts is how often the ledger refused a device, by the agent's own metrics.
	Conflicts       int `json:"conflicts"`
	PendingEviction int `json:"pendingEviction"`
	Healed          int `json:"healed"`
	// HealTimes are those of heals that a free GPU and no fault met, MadeTimes how much of each had passed when the next pod was
	// made: the rest is Kubernetes' time to start a pod. StruckTimes are those of heals that a fault met.
	HealTimes   Times `json:"healTimes,omitempty"`
	MadeTimes   Times `json:"madeTimes,omitempty"`
	StruckTimes Times `json:"struckTimes,omitempty"`
	// DrainTimes are how long the ledger kept holds after the end of their last pod, StruckDrains those that a fault met.
	DrainTimes   Times `json:"drainTimes,omitempty"`
	StruckDrains Times `json:"struckDrains,omitempty"`
	// FailedAdmissions counts pods that failed without ever having run; Ended those that failed after they had, as kubelet makes
	// the pods of the old boot that use the device plugin fail.
	FailedAdmissions int `json:"failedAdmissions"`
	Ended            int `json:"ended"`
	// MIG is whether the machine had partitions: PartitionsMade and PartitionsDestroyed count those that were not an
	// administrator's, UnmanagedChanged those that another component removed.
	MIG                 bool `json:"mig,omitempty"`
	PartitionsMade      int  `json:"partitionsMade,omitempty"`
	PartitionsDestroyed int  `json:"partitionsDestroyed,omitempty"`
	UnmanagedChanged    int  `json:"unmanagedChanged,omitempty"`
	// Sharing says whether GPUs were shared. PlacedShares counts the pods that were seen with a GPU of which their claims have a part of the
	// memory. PlacedEqual counts pods with claims on a GPU of equal shares, and PlacedUnlimited those on a GPU without a limit. PlacedReplicas
	// counts pods with limits on a GPU with replicas.
	Sharing         bool `json:"sharing,omitempty"`
	PlacedShares    int  `json:"placedShares,omitempty"`
	PlacedEqual     int  `json:"placedEqual,omitempty"`
	PlacedUnlimited int  `json:"placedUnlimited,omitempty"`
	PlacedReplicas  int  `json:"placedReplicas,omitempty"`
}

// Line is a run's last line.
func (c Counters) Line(seed uint64) string {
	line := fmt.Sprintf("torture: seed=%d ops=%d placed_claims=%d placed_limits=%d contended=%d kills=%d doubly_owned=%d stuck=%d leaked=%d "+
		"conflicts=%d healed=%d heal_p50=%s heal_p99=%s drains=%d drain_p50=%s drain_p99=%s failed_admissions=%d evicted_by_taint=%d wrongly_evicted=%d failed_unusable=%d undecided=%d", seed, c.Ops, c.PlacedClaims, c.PlacedPods, c.Contended,
		c.Kills, c.DoublyOwned, c.Stuck, c.Leaked, c.Conflicts, c.Healed, c.HealTimes.percentile(50), c.HealTimes.percentile(99),
		len(c.DrainTimes), c.DrainTimes.percentile(50), c.DrainTimes.percentile(99), c.FailedAdmissions, c.EvictedByTaint, c.WronglyEvicted, c.FailedUnusable, c.Undecided)
	if c.MIG {
		line += fmt.Sprintf(" partitions_made=%d partitions_destroyed=%d unmanaged_changed=%d", c.PartitionsMade, c.PartitionsDestroyed, c.UnmanagedChanged)
	}
	if c.Sharing {
		line += fmt.Sprintf(" placed_shares=%d placed_equal=%d placed_unlimited=%d placed_replicas=%d",
			c.PlacedShares, c.PlacedEqual, c.PlacedUnlimited, c.PlacedReplicas)
	}
	return line
}

// HealLine describes the heals that Line counts.
func (c Counters) HealLine() string {
	return fmt.Sprintf("heals in peace: %s, of which until the next pod was made p50=%s p99=%s; met by a fault: %s; not timed: %d",
		c.HealTimes, c.MadeTimes.percentile(50), c.MadeTimes.percentile(99), c.StruckTimes, c.Healed-len(c.HealTimes)-len(c.StruckTimes))
}

// DrainLine describes the ends of holds: those that Line has, and those that a fault met.
func (c Counters) DrainLine() string {
	return fmt.Sprintf("holds after their last pod's end, in peace: %s; met by a fault: %s; failed admissions for 1000 contended placements: %d",
		c.DrainTimes, c.StruckDrains, c.FailedAdmissions*1000/max(c.Contended, 1))
}

// Times are how long healing or draining took.
type Times []time.Duration

// String has their number and what they come to.
func (t Times) String() string {
	return fmt.Sprintf("%d p50=%s p99=%s max=%s", len(t), t.percentile(50), t.percentile(99), t.percentile(100))
}

// percentile is by nearest rank.
func (t Times) percentile(percent int) time.Duration {
	if len(t) == 0 {
		return 0
	}
	rank := (len(t)*percent + 99) / 100
	return slices.Sorted(slices.Values(t))[max(rank, 1)-1].Round(time.Millisecond)
}

// ErrFaults means that the product failed the test.
var ErrFaults = errors.New("faults were found")

// ErrNothingTested means that a run proves nothing, since something that it should have met never came.
var ErrNothingTested = errors.New("the run proves nothing")

// Err is nil for a run that met everything and found no fault.
func (c Counters) Err() error {
	if c.faults() > 0 {
		return fmt.Errorf("%w: %s", ErrFaults, c.Found())
	}
	var missing []string
	for _, must := range []struct {
		name   string
		played bool
		count  int
	}{
		{"placed_claims", true, c.PlacedClaims}, {"placed_limits", true, c.PlacedPods}, {"contended", true, c.Contended}, {"kills", true, c.Kills},
		{"partitions_destroyed", c.MIG, c.PartitionsDestroyed},
		{"placed_shares", c.Sharing, c.PlacedShares}, {"placed_equal", c.Sharing, c.PlacedEqual},
		{"placed_unlimited", c.Sharing, c.PlacedUnlimited}, {"placed_replicas", c.Sharing, c.PlacedReplicas},
	} {
		if must.played && must.count == 0 {
			missing = append(missing, must.name+"=0")
		}
	}
	if c.Undecided*100 > c.PlacedClaims+c.PlacedPods {
		missing = append(missing, fmt.Sprintf("undecided=%d", c.Undecided))
	}
	if len(missing) > 0 {
		return fmt.Errorf("%w: %s", ErrNothingTested, strings.Join(missing, " "))
	}
	return nil
}

// Found are the figures that have to be zero.
func (c Counters) Found() string {
	return fmt.Sprintf("doubly_owned=%d stuck=%d leaked=%d unmanaged_changed=%d wrongly_evicted=%d failed_unusable=%d",
		c.DoublyOwned, c.Stuck, c.Leaked, c.UnmanagedChanged, c.WronglyEvicted, c.FailedUnusable)
}

func (c Counters) faults() int {
	return c.DoublyOwned + c.Stuck + c.Leaked + c.UnmanagedChanged + c.WronglyEvicted + c.FailedUnusable
}

// statistics is the counters of a run at work. It is safe for concurrent use.
type statistics struct {
	mu       sync.Mutex
	counters Counters
	// faultTimes are the times of the faults so far.
	faultTimes []*inject
}

// inject is a fault's time, until its effects are over.
type inject struct{ from, to time.Time }

func (t *statistics) add(change func(*Counters)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	change(&t.counters)
}

func (t *statistics) now() Counters {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.counters
	for _, times := range []*Times{&now.HealTimes, &now.MadeTimes, &now.StruckTimes, &now.DrainTimes, &now.StruckDrains} {
		*times = slices.Clone(*times)
	}
	return now
}

func (t *statistics) placed(api oracle.API) {
	t.add(func(c *Counters) {
		if api == oracle.Claim {
			c.PlacedClaims++
		} else {
			c.PlacedPods++
		}
	})
}

// faultBegins notes that a fault is at work until it is ended and its effects are over a while later.
func (t *statistics) faultBegins(recovery time.Duration) (ended func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := &inject{from: time.Now()}
	t.faultTimes = append(t.faultTimes, s)
	t.counters.Faults++
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		s.to = time.Now().Add(recovery)
	}
}

// healed counts a heal. It records the time of heals that a fault delayed separately.
func (t *statistics) healed(from, made, to time.Time, fair bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.counters.Healed++
	if !fair {
		return
	}
	took := max(0, to.Sub(from))
	if t.struck(from, to) {
		t.counters.StruckTimes = append(t.counters.StruckTimes, took)
		return
	}
	t.counters.HealTimes = append(t.counters.HealTimes, took)
	t.counters.MadeTimes = append(t.counters.MadeTimes, max(0, made.Sub(from)))
}

// struck reports whether a fault was at work, or had just been, in a span of time. Under mu.
func (t *statistics) struck(from, to time.Time) bool {
	return slices.ContainsFunc(t.faultTimes, func(s *inject) bool { return s.from.Before(to) && (s.to.IsZero() || s.to.After(from)) })
}

// drained counts a hold that was kept from its last pod's end until its release.
func (t *statistics) drained(from, to time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	times := &t.counters.DrainTimes
	if t.struck(from, to) {
		times = &t.counters.StruckDrains
	}
	*times = append(*times, max(0, to.Sub(from)))
}
