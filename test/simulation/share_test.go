// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// memory of each GPU in MiB, in worlds that share them.
const memory = 80 << 10

// policy says how a GPU of such a world is shared.
type policy struct {
	// replicas is the number of devices that limits see for the GPU; zero if they see the GPU itself.
	replicas int
	// claims says how claims share it. shares is the number of equal shares.
	claims device.ClaimShares
	shares int
}

// The policies of worlds, by the GPUs' minors. If there are more GPUs than policies, the policies repeat.
var (
	byMemory    = []policy{{replicas: 4, claims: device.ByMemory}, {claims: device.ByMemory}, {replicas: 3}, {}}
	equalShares = []policy{
		{replicas: 2, claims: device.ByCount, shares: 5}, {claims: device.ByCount, shares: 2}, {replicas: 4, claims: device.ByMemory}, {},
	}
	noLimit = []policy{
		{replicas: 3, claims: device.Unlimited}, {claims: device.Unlimited}, {replicas: 2, claims: device.ByCount, shares: 2}, {},
	}
)

// firstShares is the version of Kubernetes that first shares GPUs out to claims.
const firstShares = 36

// shareGPUs sets the policy of a world.
func (s *simulation) shareGPUs() {
	for i := range s.inventory.GPUs {
		gpu := &s.inventory.GPUs[i]
		gpu.MemoryBytes = memory << 20
		p := s.profile.sharing[i%len(s.profile.sharing)]
		if p.replicas == 0 && p.claims == "" {
			continue
		}
		gpu.Sharing = device.Sharing{Strategy: device.TimeSlicing, Claims: p.claims, Shares: p.shares}
		if s.profile.mps {
			gpu.Sharing.Strategy, gpu.ComputeCapability = device.MPS, "9.0"
		}
		if p.replicas > 0 {
			gpu.Sharing.Replicas = map[string]device.Replicas{"": {Count: p.replicas}}
		}
	}
}

// amount is what a holder has of a GPU, or requests. A claim of a GPU without a limit may have neither memory nor equal shares.
type amount struct {
	// all means the whole GPU.
	all bool
	// slices are the memory slices of a partition, one bit each.
	slices uint
	// mib is memory in MiB. shares are equal shares, of is how many the GPU has.
	mib, shares, of int
}

// excludes reports whether no GPU has room for both, whatever else it has.
func (a amount) excludes(other amount) bool {
	return a.all || other.all || a.slices&other.slices != 0
}

func (a amount) plus(other amount) amount {
	return amount{all: a.all || other.all, mib: a.mib + other.mib, shares: a.shares + other.shares, of: max(a.of, other.of)}
}

// A string says what a pod has: "gpu-0" is a whole GPU, "gpu-0=20480" is that many MiB of it, and "gpu-0=20480+2/5" is two of five equal
// shares as well. A partition has its published name.

func part(gpu string, a amount) string {
	if a.all {
		return gpu
	}
	return gpu + "=" + a.String()
}

// String formats the amount for the trace and for part.
func (a amount) String() string {
	switch {
	case a.all:
		return "all"
	case a.slices != 0:
		return fmt.Sprintf("slices %08b", a.slices)
	case a.of == 0:
		return strconv.Itoa(a.mib)
	default:
		return fmt.Sprintf("%d+%d/%d", a.mib, a.shares, a.of)
	}
}

func gpuOf(part string) string {
	name, _, _ := strings.Cut(part, "=")
	return device.GPUName(name)
}

func amountOf(part string) (a amount) {
	_, text, isPart := strings.Cut(part, "=")
	if place, partition := placeOf(part); partition {
		return amount{slices: (1<<place.Size - 1) << place.Start}
	}
	if !isPart {
		return amount{all: true}
	}
	_, _ = fmt.Sscanf(text, "%d+%d/%d", &a.mib, &a.shares, &a.of) // without "+", there are no equal shares
	return a
}

// gpusOf are the names of GPUs and partitions, each once.
func gpusOf(parts []string) []string {
	var gpus []string
	for _, p := range parts {
		name, _, _ := strings.Cut(p, "=")
		gpus = append(gpus, name)
	}
	slices.Sort(gpus)
	return slices.Compact(gpus)
}

func minorOf(gpu string) int {
	minor, _ := strconv.Atoi(strings.TrimPrefix(gpu, "gpu-")) //nolint:errcheck // the names are ours
	return minor
}

// policyOf returns the policy of a GPU. Claims do not share it in versions of Kubernetes before firstShares.
func (s *simulation) policyOf(gpu string) policy {
	if s.profile.sharing == nil {
		return policy{}
	}
	p := s.profile.sharing[minorOf(gpu)%len(s.profile.sharing)]
	if s.version < firstShares {
		p.claims = ""
	}
	return p
}

// replicas returns the number of devices that limits see for a GPU; zero if they see the GPU itself.
func (s *simulation) replicas(gpu string) int { return s.policyOf(gpu).replicas }

// replica returns the amount of one replica. How limits share a GPU does not depend on the version of Kubernetes.
func (s *simulation) replica(gpu string) amount {
	p := s.profile.sharing[minorOf(gpu)%len(s.profile.sharing)]
	if p.claims == device.ByCount {
		return amount{shares: max(1, p.shares/p.replicas), of: p.shares}
	}
	return amount{mib: memory / p.replicas}
}

// amountOn returns what a claim has of a GPU if it requests this amount.
func (s *simulation) amountOn(gpu string, asked amount) amount {
	switch p := s.policyOf(gpu); {
	case p.claims == "", p.claims == device.ByMemory && asked.mib == 0:
		return amount{all: true}
	case p.claims == device.ByCount:
		return amount{mib: asked.mib, shares: max(1, asked.shares), of: p.shares}
	default:
		return amount{mib: asked.mib}
	}
}

// published returns what the slice offers of a GPU without holders.
func (s *simulation) published(gpu string) amount {
	p := s.policyOf(gpu)
	return amount{all: p.claims == "", mib: memory, shares: p.shares, of: p.shares}
}

// forClaimsOnly reports whether limits never see a GPU: its daemon would have to end first.
func (s *simulation) forClaimsOnly(gpu string) bool {
	return s.profile.mps && s.replicas(gpu) == 0 && s.profile.sharing[minorOf(gpu)%len(s.profile.sharing)].claims != ""
}

// slots is how many devices limits see when nothing is given out.
func (s *simulation) slots() (n int) {
	for i := range s.host.gpus {
		if gpu := fmt.Sprintf("gpu-%d", i); !s.forClaimsOnly(gpu) {
			n += max(1, s.replicas(gpu))
		}
	}
	return n
}

// partsOf is what a claim has of GPUs; the claim may be gone.
func (s *simulation) partsOf(uid string, gpus []string) []string {
	var parts []string
	for _, gpu := range gpus {
		if _, partition := placeOf(gpu); partition {
			parts = append(parts, gpu)
			continue
		}
		parts = append(parts, part(gpu, s.amountOn(gpu, s.wanted[uid])))
	}
	return parts
}

// newClaim returns a claim. In a world that shares GPUs it often requests a part, otherwise no amount.
func (s *simulation) newClaim(k claim) *claim {
	if s.profile.sharing != nil && !s.chance(4) {
		// If the world has equal shares, the claim often requests some, at times with memory. Otherwise it requests memory.
		if divided := func(p policy) bool { return p.shares > 0 }; slices.ContainsFunc(s.profile.sharing, divided) && !s.chance(3) {
			k.asks.shares = 1 + s.rand.IntN(2)
		}
		if k.asks.shares == 0 || s.chance(4) {
			k.asks.mib = []int{10, 20, 30, 40}[s.rand.IntN(4)] << 10
		}
		s.wanted[k.uid] = k.asks
	}
	if s.profile.mig && !s.chance(4) {
		k.profile = migProfiles[s.rand.IntN(len(migProfiles))].Name
	}
	if s.profile.mps {
		if k.ownDaemon = k.asks.mib == 0 && s.chance(3); k.asks.mib > 0 {
			k.count = 1 // a client sees the GPU of its daemon only
		}
	}
	return &k
}

// allocatedTo are what a pod has by IDs of kubelet's device manager, the replicas of a GPU together.
func (s *simulation) allocatedTo(ids []string) []string {
	has := map[string]amount{}
	for _, id := range ids {
		uuid, _, replica := strings.Cut(id, "::")
		gpu := s.gpuOfID(uuid)
		if replica {
			has[gpu] = has[gpu].plus(s.replica(gpu))
		} else {
			has[gpu] = amount{all: true}
		}
	}
	var parts []string
	for _, gpu := range sorted(has) {
		parts = append(parts, part(gpu, has[gpu]))
	}
	return parts
}

// having records the amount that each owner has of each GPU.
type having map[string]map[string]amount

func (h having) give(owner string, parts []string) {
	for _, p := range parts {
		gpu, has := gpuOf(p), amountOf(p)
		if h[gpu] == nil {
			h[gpu] = map[string]amount{}
		}
		if before := h[gpu][owner]; before.all || has.all {
			has = amount{all: true}
		} else {
			has = amount{slices: has.slices | before.slices, mib: max(has.mib, before.mib), shares: max(has.shares, before.shares), of: max(has.of, before.of)}
		}
		h[gpu][owner] = has
	}
}

// fit returns how many times this amount of a GPU is free beside the holders other than except.
func (h having) fit(gpu, except string, one amount) int {
	if one.all {
		if h.others(gpu, except) {
			return 0
		}
		return 1
	}
	mib, shares := memory, one.of
	for owner, has := range h[gpu] {
		switch {
		case owner == except:
		case has.excludes(one):
			return 0
		default:
			mib -= has.mib
			shares -= has.shares
		}
	}
	times := math.MaxInt
	if one.mib > 0 {
		times = min(times, max(0, mib/one.mib))
	}
	if one.shares > 0 {
		times = min(times, max(0, shares/one.shares))
	}
	return times
}

// others reports whether another holder has a part of a GPU.
func (h having) others(gpu, except string) bool {
	_, mine := h[gpu][except]
	return len(h[gpu]) > 1 || len(h[gpu]) == 1 && !mine
}

// hasRoom reports whether no other holder prevents a holder from using its parts.
func (h having) hasRoom(owner string, parts []string) bool {
	return !slices.ContainsFunc(parts, func(p string) bool { return h.fit(gpuOf(p), owner, amountOf(p)) == 0 })
}

// takenNow is what pods on the machine have, and what drains; promised is that and what claims are allocated.
func (s *simulation) takenNow() (taken, promised having) {
	taken, promised = having{}, having{}
	for _, uid := range sorted(s.host.pods) {
		for _, g := range s.host.pods[uid].grants {
			taken.give(g.owner, g.parts)
			promised.give(g.owner, g.parts)
		}
	}
	// A GPU whose policy has changed takes no new holder until the last one has ended (docs/design/0013-sharing.md). That is counted, and
	// no fault.
	for _, gpu := range s.policyWaits() {
		s.hit(keptByOldPolicy)
		taken.give("the policy", []string{gpu})
		promised.give("the policy", []string{gpu})
	}
	s.takenByUnknown(taken, promised)
	for ref := range s.host.mig.foreign {
		taken.give("the administrator", s.namesOf(ref)[:1])
		promised.give("the administrator", s.namesOf(ref)[:1])
	}
	// A pod with a limit and claims has what kubelet allocated to it while its claims are not prepared.
	for _, p := range all[*pod](s.api.objects) {
		if p.limits() && len(p.claims) > 0 && p.bound && !p.terminal() {
			taken.give(p.uid, s.kubelet.devicesOf(p.uid))
			promised.give(p.uid, s.kubelet.devicesOf(p.uid))
		}
	}
	for _, k := range all[*claim](s.api.objects) {
		promised.give(k.uid, s.partsOf(k.uid, k.devices()))
	}
	return taken, promised
}

// fitsPods reports whether a limit fits beside the other holders.
func (s *simulation) fitsPods(beside having, count int) bool {
	units := -s.countedAgain()
	for i := range s.host.gpus {
		gpu := fmt.Sprintf("gpu-%d", i)
		switch {
		case s.forClaimsOnly(gpu):
		case s.replicas(gpu) > 0:
			units += beside.fit(gpu, "", s.replica(gpu))
		default:
			units += beside.fit(gpu, "", amount{all: true})
		}
	}
	return units >= count
}

// takeClaim gives a claim the first GPUs or partitions beside the other holders that have room; false where there are too few.
func (s *simulation) takeClaim(beside having, k *claim) bool {
	left := k.count
	for _, gpu := range s.choices(k) {
		parts := s.partsOf(k.uid, []string{gpu})
		// A claim that requests equal shares gets only GPUs that have equal shares.
		able := k.asks.shares == 0 || s.version < firstShares || s.policyOf(gpu).claims == device.ByCount
		if left > 0 && able && beside.hasRoom(k.uid, parts) {
			beside.give(k.uid, parts)
			left--
		}
	}
	return left == 0
}

func (h having) clone() having {
	c := having{}
	for gpu, owners := range h {
		c[gpu] = maps.Clone(owners)
	}
	return c
}
