// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/version"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/oracle"
)

// policy is how the configuration of the node shares a GPU.
type policy struct {
	// replicas is as how many devices limits see it; zero where they see it as it is.
	replicas int
	// renamed ones have a resource of their own.
	renamed bool
	// memory tells that claims can ask for a part of it.
	memory bool
	// mps has a daemon for all who have a part of it. Limits get its replicas only.
	mps bool
}

// limits is as how many devices limits see the GPU.
func (p policy) limits() int {
	if p.mps {
		return p.replicas
	}
	return max(1, p.replicas)
}

// policies of a run with sharing by the GPUs' minors; the others are not shared. The last three have to be those that limits are
// given first (race).
var policies = map[int]policy{
	0: {replicas: 4, memory: true}, 1: {memory: true, mps: true},
	2: {memory: true}, 3: {replicas: 4, renamed: true, mps: true}, 4: {replicas: 2},
}

// valuesOfPolicies are the chart's: by Tandem's rules, and what is renamed in NVIDIA's words, which rules have none for.
func valuesOfPolicies() string {
	rules, renamed := "", ""
	for _, gpu := range slices.Sorted(maps.Keys(policies)) {
		p := policies[gpu]
		if p.renamed {
			renamed += fmt.Sprintf("      - {name: %s, devices: [\"%d\"], replicas: %d}\n", install.ResourceName, gpu, p.replicas)
			continue
		}
		more := ""
		if p.replicas > 0 {
			more = fmt.Sprintf(", replicas: %d", p.replicas)
		}
		strategy := "TimeSlicing"
		if p.mps {
			strategy = "MPS"
		}
		rules += fmt.Sprintf("    - {match: {index: %d}, sharing: {strategy: %s, memoryShares: %t%s}}\n", gpu, strategy, p.memory, more)
	}
	return "config:\n  version: v1\n  sharing:\n    mps:\n      renameByDefault: true\n      resources:\n" + renamed +
		"  tandem:\n    devices:\n" + rules
}

// sharingOfGPUs is what the oracle has to be told.
func sharingOfGPUs() map[int]oracle.Sharing {
	shared := map[int]oracle.Sharing{}
	for gpu, p := range policies {
		shared[gpu] = oracle.Sharing{Replicas: max(1, p.replicas)}
	}
	return shared
}

const (
	memoryCapacity = "memory"
	mibibytes      = 1 << 20
	mibAGib        = 1 << 10
	// renamedResource is by which limits ask for replicas of renamed GPUs.
	renamedResource = install.ResourceName + ".shared"
)

// parts are what holders have of GPUs: MiB by the GPU's minor and by holder, zero for all of it.
type parts map[int]map[string]int

// give notes a part; the most that is known of a holder counts.
func (p parts) give(gpu int, holder string, mib int) {
	if p[gpu] == nil {
		p[gpu] = map[string]int{}
	}
	if before, known := p[gpu][holder]; known && (before == 0 || mib == 0) {
		mib = 0
	} else {
		mib = max(mib, before)
	}
	p[gpu][holder] = mib
}

// add notes all that others have.
func (p parts) add(others parts) {
	for gpu, holders := range others {
		for holder, mib := range holders {
			p.give(gpu, holder, mib)
		}
	}
}

// left returns the memory of a GPU that is not allocated.
func (p parts) left(gpu, memory int) int {
	for _, mib := range p[gpu] {
		if mib == 0 {
			return 0
		}
		memory -= mib
	}
	return max(0, memory)
}

// String is "0: a has 10240, b has all".
func (p parts) String() string {
	var gpus []string
	for _, gpu := range slices.Sorted(maps.Keys(p)) {
		var holders []string
		for _, holder := range slices.Sorted(maps.Keys(p[gpu])) {
			amount := "all"
			if mib := p[gpu][holder]; mib > 0 {
				amount = fmt.Sprint(mib)
			}
			holders = append(holders, holder+" has "+amount)
		}
		gpus = append(gpus, fmt.Sprintf("%d: %s", gpu, strings.Join(holders, ", ")))
	}
	return strings.Join(gpus, "; ")
}

// seenBy are the parts of what a pod sees that asked for so much. Of several GPUs that are shared each has one part at least: which
// has more, only kubelet or the scheduler knows.
func (r room) seenBy(holder string, asked ask, devices []oracle.Device) parts {
	found := parts{}
	var several []int
	units := asked.gpus
	for _, d := range devices {
		gpu := d.Minor()
		p := policies[gpu]
		switch {
		case asked.api == oracle.Limits && p.replicas > 0, asked.api == oracle.Claim && asked.mib > 0 && p.memory:
			several = append(several, gpu)
		default:
			found.give(gpu, holder, 0)
			units--
		}
	}
	for _, gpu := range several {
		one := asked.mib
		if asked.api == oracle.Limits {
			one = r.replica(gpu)
		}
		if len(several) > 1 {
			units = 1
		}
		found.give(gpu, holder, one*max(1, units))
	}
	return found
}

// replica is what one replica of a GPU has.
func (r room) replica(gpu int) int { return r.memory[gpu] / policies[gpu].replicas }

// fitsBeside is fits where GPUs are shared.
func (r room) fitsBeside(asked ask, taken parts) bool {
	units := 0
	for gpu := range gpusANode {
		units += r.sharedUnits(gpu, asked, taken)
	}
	return units >= asked.gpus
}

// sharedUnits is how often a GPU has what is asked for.
func (r room) sharedUnits(gpu int, asked ask, taken parts) int {
	p, left, whole := policies[gpu], taken.left(gpu, r.memory[gpu]), 0
	if len(taken[gpu]) == 0 {
		whole = 1
	}
	switch {
	case asked.api == oracle.Limits && (asked.renamed != p.renamed || p.limits() == 0):
		return 0
	case asked.api == oracle.Limits && p.replicas > 0:
		return left / r.replica(gpu)
	case asked.api == oracle.Limits || asked.mib == 0:
		return whole
	case p.memory:
		// Schedulers from 1.37 on give a request a device once (allocateOne continues after the last one).
		return min(1, left/asked.mib)
	case asked.mib > r.memory[gpu]:
		return 0
	default:
		return whole
	}
}

// serves reports whether these GPUs can be what was asked for.
func (r room) serves(asked ask, places []place) bool {
	units := 0
	for _, at := range places {
		p := policies[at.gpu]
		switch {
		case at.size > 0, asked.api == oracle.Limits && (asked.renamed != p.renamed || p.limits() == 0):
			return false
		case asked.api == oracle.Limits:
			units += p.limits()
		case asked.mib > 0 && p.memory:
			units += r.memory[at.gpu] / asked.mib
		default:
			units++
		}
	}
	return len(places) > 0 && len(places) <= asked.gpus && units >= asked.gpus
}

// partsOf are what a claim has been allocated.
func partsOf(claim resourceapi.ResourceClaim) parts {
	found := parts{}
	if claim.Status.Allocation == nil {
		return found
	}
	sums := map[int]int{}
	for _, result := range claim.Status.Allocation.Devices.Results {
		at, ok := placeNamed(result.Device)
		if !ok || result.Driver != install.DriverName {
			continue
		}
		if consumed, counted := result.ConsumedCapacity[memoryCapacity]; counted && result.ShareID != nil {
			sums[at.gpu] += int(consumed.Value() / mibibytes)
		} else {
			found.give(at.gpu, claim.Name, 0)
		}
	}
	for gpu, mib := range sums {
		found.give(gpu, claim.Name, mib)
	}
	return found
}

// holderOf is who has what a pod sees: its claim, or itself.
func holderOf(pod *corev1.Pod) string { return cmp.Or(claimOf(pod), string(pod.UID)) }

// parts are what containers see and what claims in use have. What a pod that is gone may still have is unknown: it counts as the
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

// seenParts are what containers see, but for what these claims have.
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
				taken.give(d.Minor(), uid, 0)
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

// crowded reports whether those whose containers run leave too little of some GPU for what a claim has been allocated.
func (s snapshot) crowded(claim resourceapi.ResourceClaim) bool {
	others := s.seenParts(map[string]bool{claim.Name: true})
	for gpu, holders := range partsOf(claim) {
		mib := holders[claim.Name]
		if mib == 0 && len(others[gpu]) > 0 || others.left(gpu, s.room.memory[gpu]) < mib {
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
