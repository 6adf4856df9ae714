// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/version"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/oracle"
)

// policy says how the configuration of the node shares a GPU.
type policy struct {
	// replicas is the number of devices that limits see for the GPU; zero if they see the GPU itself.
	replicas int
	// renamed replicas have a resource of their own.
	renamed bool
	// At most one of these is set. memory lets claims request a part of the GPU's memory, shares is its number of equal shares for claims,
	// and unlimited lets any number of claims have it.
	memory    bool
	shares    int
	unlimited bool
	// mps shares the GPU by a daemon. Limits get only its replicas.
	mps bool
}

// limits returns the number of devices that limits see for the GPU.
func (p policy) limits() int {
	if p.mps {
		return p.replicas
	}
	return max(1, p.replicas)
}

// way says how a claim has a GPU if it requests no amount.
type way string

const (
	alone     way = "alone"
	equal     way = "equal"
	unlimited way = "unlimited"
)

func (p policy) way() way {
	switch {
	case p.shares > 0:
		return equal
	case p.unlimited:
		return unlimited
	default:
		return alone
	}
}

// policies of a run with sharing, by the GPUs' minors. The other GPUs are not shared. They must be the last three, because limits are given
// these first (race).
var policies = map[int]policy{
	0: {replicas: 4, memory: true}, 1: {memory: true, mps: true},
	2: {replicas: 2, shares: 4}, 3: {replicas: 4, renamed: true, mps: true}, 4: {unlimited: true},
}

// gpusOf returns the minors of the GPUs that claims have in this way.
func gpusOf(w way) (gpus []string) {
	for gpu := range gpusANode {
		if policies[gpu].way() == w {
			gpus = append(gpus, strconv.Itoa(gpu))
		}
	}
	return gpus
}

// valuesOfPolicies returns the chart's values for policies. Renamed replicas are configured as for NVIDIA's device plugin, because Tandem's
// rules cannot rename.
func valuesOfPolicies() string {
	rules, renamed := "", ""
	for _, gpu := range slices.Sorted(maps.Keys(policies)) {
		p := policies[gpu]
		if p.renamed {
			renamed += fmt.Sprintf("      - {name: %s, devices: [\"%d\"], replicas: %d}\n", install.ResourceName, gpu, p.replicas)
			continue
		}
		sharing := "strategy: TimeSlicing"
		if p.mps {
			sharing = "strategy: MPS"
		}
		for _, key := range []struct {
			is   bool
			text string
		}{
			{p.replicas > 0, fmt.Sprintf("replicas: %d", p.replicas)}, {p.memory, "memoryShares: true"},
			{p.shares > 0, fmt.Sprintf("shares: %d", p.shares)}, {p.unlimited, "unlimited: true"},
		} {
			if key.is {
				sharing += ", " + key.text
			}
		}
		rules += fmt.Sprintf("    - {match: {index: %d}, sharing: {%s}}\n", gpu, sharing)
	}
	return "config:\n  version: v1\n  sharing:\n    mps:\n      renameByDefault: true\n      resources:\n" + renamed +
		"  tandem:\n    devices:\n" + rules
}

// sharingOfGPUs returns what the oracle must know of policies.
func sharingOfGPUs() map[int]oracle.Sharing {
	shared := map[int]oracle.Sharing{}
	for gpu, p := range policies {
		shared[gpu] = oracle.Sharing{Replicas: max(1, p.replicas), Shares: p.shares}
	}
	return shared
}

const (
	memoryCapacity = "memory"
	sharesCapacity = "shares"
	mibibytes      = 1 << 20
	mibAGib        = 1 << 10
	// renamedResource is the resource of renamed replicas.
	renamedResource = install.ResourceName + ".shared"
)

// part is what a holder has of a GPU: MiB of its memory, and a number of its equal shares. A claim without a limit may have neither.
type part struct {
	// all means that the holder has the GPU alone.
	all         bool
	mib, shares int
}

// String returns for example "all", "10240", "2 shares", "2 shares with 10240" or "no limit".
func (p part) String() string {
	var words []string
	if p.shares > 0 {
		words = append(words, fmt.Sprintf("%d shares", p.shares))
	}
	if p.mib > 0 {
		words = append(words, strconv.Itoa(p.mib))
	}
	switch {
	case p.all:
		return "all"
	case len(words) == 0:
		return "no limit"
	default:
		return strings.Join(words, " with ")
	}
}

// times returns n such parts together.
func (p part) times(n int) part { return part{all: p.all, mib: n * p.mib, shares: n * p.shares} }

// parts records what holders have of GPUs, by the GPU's minor and by holder.
type parts map[int]map[string]part

// give records a part. If a holder already has one of the GPU, the larger of both counts.
func (p parts) give(gpu int, holder string, has part) {
	if p[gpu] == nil {
		p[gpu] = map[string]part{}
	}
	if before := p[gpu][holder]; before.all || has.all {
		has = part{all: true}
	} else {
		has = part{mib: max(has.mib, before.mib), shares: max(has.shares, before.shares)}
	}
	p[gpu][holder] = has
}

// add records all parts of others.
func (p parts) add(others parts) {
	for gpu, holders := range others {
		for holder, has := range holders {
			p.give(gpu, holder, has)
		}
	}
}

// fit returns how many times the part one is free of a GPU. whole is all that the GPU has.
func (p parts) fit(gpu int, whole, one part) int {
	if one.all {
		return 1 - min(1, len(p[gpu]))
	}
	for _, has := range p[gpu] {
		if has.all {
			return 0
		}
		whole.mib -= has.mib
		whole.shares -= has.shares
	}
	times := math.MaxInt
	if one.mib > 0 {
		times = min(times, max(0, whole.mib/one.mib))
	}
	if one.shares > 0 {
		times = min(times, max(0, whole.shares/one.shares))
	}
	return times
}

// String returns for example "0: a has 10240, b has all".
func (p parts) String() string {
	var gpus []string
	for _, gpu := range slices.Sorted(maps.Keys(p)) {
		var holders []string
		for _, holder := range slices.Sorted(maps.Keys(p[gpu])) {
			holders = append(holders, fmt.Sprintf("%s has %s", holder, p[gpu][holder]))
		}
		gpus = append(gpus, fmt.Sprintf("%d: %s", gpu, strings.Join(holders, ", ")))
	}
	return strings.Join(gpus, "; ")
}

// whole returns all that a GPU has.
func (r room) whole(gpu int) part { return part{mib: r.memory[gpu], shares: policies[gpu].shares} }

// one returns what a GPU gives for one unit of a request; false if it gives nothing.
func (r room) one(gpu int, asked ask) (part, bool) {
	p := policies[gpu]
	limits := asked.api == oracle.Limits
	switch {
	case limits && (asked.renamed != p.renamed || p.limits() == 0), asked.mib > r.memory[gpu], asked.shares > p.shares,
		asked.of != "" && asked.of != p.way():
		return part{}, false
	case limits && p.replicas > 0 && p.shares > 0:
		return part{shares: max(1, p.shares/p.replicas)}, true
	case limits && p.replicas > 0:
		return part{mib: r.memory[gpu] / p.replicas}, true
	case limits, p.way() == alone && (asked.mib == 0 || !p.memory):
		return part{all: true}, true
	default:
		return part{mib: asked.mib, shares: min(p.shares, max(1, asked.shares))}, true
	}
}

// seenBy returns the parts of the devices that a pod sees, by what the pod requested. If it sees several shared GPUs, it has at least one
// part of each. Only kubelet or the scheduler knows of which it has more.
func (r room) seenBy(holder string, asked ask, devices []oracle.Device) parts {
	found, several := parts{}, parts{}
	units := asked.gpus
	for _, d := range devices {
		if one, ok := r.one(d.Minor(), asked); ok && !one.all {
			several.give(d.Minor(), holder, one)
		} else {
			found.give(d.Minor(), holder, part{all: true})
			units--
		}
	}
	for gpu, one := range several {
		if len(several) > 1 {
			units = 1
		}
		found.give(gpu, holder, one[holder].times(max(1, units)))
	}
	return found
}

// fitsBeside is fits for a run with shared GPUs.
func (r room) fitsBeside(asked ask, taken parts) bool {
	units := 0
	for gpu := range gpusANode {
		units += r.sharedUnits(gpu, asked, taken)
	}
	return units >= asked.gpus
}

// sharedUnits returns how many units of a request are free on a GPU.
func (r room) sharedUnits(gpu int, asked ask, taken parts) int {
	one, ok := r.one(gpu, asked)
	switch {
	case !ok:
		return 0
	case asked.api == oracle.Limits:
		return taken.fit(gpu, r.whole(gpu), one)
	default:
		// From 1.37 on, the scheduler gives a request each device at most once (allocateOne continues after the last device).
		return min(1, taken.fit(gpu, r.whole(gpu), one))
	}
}

// serves reports whether these GPUs satisfy the request.
func (r room) serves(asked ask, places []place) bool {
	units := 0
	for _, at := range places {
		one, ok := r.one(at.gpu, asked)
		if at.size > 0 || !ok {
			return false
		}
		units += min(asked.gpus, parts{}.fit(at.gpu, r.whole(at.gpu), one))
	}
	return len(places) > 0 && len(places) <= asked.gpus && units >= asked.gpus
}

// partsOf returns the parts that a claim has been allocated.
func partsOf(claim resourceapi.ResourceClaim) parts {
	found := parts{}
	if claim.Status.Allocation == nil {
		return found
	}
	sums := map[int]part{}
	for _, result := range claim.Status.Allocation.Devices.Results {
		at, ok := placeNamed(result.Device)
		if !ok || result.Driver != install.DriverName {
			continue
		}
		memory, counted := result.ConsumedCapacity[memoryCapacity]
		if !counted || result.ShareID == nil {
			found.give(at.gpu, claim.Name, part{all: true})
			continue
		}
		shares, sum := result.ConsumedCapacity[sharesCapacity], sums[at.gpu]
		sums[at.gpu] = part{mib: sum.mib + int(memory.Value()/mibibytes), shares: sum.shares + int(shares.Value())}
	}
	for gpu, sum := range sums {
		found.give(gpu, claim.Name, sum)
	}
	return found
}

// holderOf returns the holder of what a pod sees: its claim, or the pod.
func holderOf(pod *corev1.Pod) string { return cmp.Or(claimOf(pod), string(pod.UID)) }

// parts returns what containers see and what claims in use have. It is unknown what a pod that is gone may still have: that counts as the
// whole GPU.
func (s snapshot) parts() parts {
	taken := parts{}
	exact := map[string]bool{}
	for _, claim := range s.claims {
		if len(claim.Status.ReservedFor) > 0 {
			exact[claim.Name] = true
			taken.add(partsOf(claim))
		}
	}
	taken.add(s.seenParts(exact))
	return taken
}

// seenParts returns what containers see, without what these claims have.
func (s snapshot) seenParts(except map[string]bool) parts {
	taken := parts{}
	pods := map[string]*corev1.Pod{}
	for i := range s.pods {
		pods[string(s.pods[i].UID)] = &s.pods[i]
	}
	for uid, devices := range s.seen {
		pod := pods[uid]
		if pod == nil {
			for _, d := range devices {
				taken.give(d.Minor(), uid, part{all: true})
			}
			continue
		}
		asked, _ := askOf(pod)
		if holder := holderOf(pod); !except[holder] {
			taken.add(s.room.seenBy(holder, asked, devices))
		}
	}
	return taken
}

// crowded reports whether running containers leave too little of a GPU for what a claim has been allocated.
func (s snapshot) crowded(claim resourceapi.ResourceClaim) bool {
	others := s.seenParts(map[string]bool{claim.Name: true})
	for gpu, holders := range partsOf(claim) {
		if others.fit(gpu, s.room.whole(gpu), holders[claim.Name]) < 1 {
			return true
		}
	}
	return false
}

// withoutReplicas are the names of hardware behind names of which some are those of replicas, "<uuid>::<n>", each once.
func withoutReplicas(names []string) []string {
	var found []string
	for _, name := range names {
		if uuid, _, _ := strings.Cut(name, "::"); !slices.Contains(found, uuid) {
			found = append(found, uuid)
		}
	}
	return found
}

// Shares reports whether a version of Kubernetes gives claims parts of GPUs (KEP-5075, beta in 1.36).
func Shares(kubernetes string) bool {
	v, err := version.ParseGeneric(kubernetes)
	return err == nil && v.AtLeast(version.MustParseGeneric("1.36"))
}
