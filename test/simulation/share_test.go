// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// memory of each GPU in MiB, in worlds that share them.
const memory = 80 << 10

// replicasOf and sharesOf are how the GPUs of such a world are shared, by their minors: as how many limits see each, and whether
// claims can have a part of the memory. Further GPUs are as these.
var (
	replicasOf = []int{4, 0, 3, 0}
	sharesOf   = []bool{true, true, false, false}
)

// firstShares is the version of Kubernetes that first shares GPUs out to claims.
const firstShares = 36

// shareGPUs sets the policy of a world.
func (s *simulation) shareGPUs() {
	for i := range s.inventory.GPUs {
		gpu := &s.inventory.GPUs[i]
		gpu.MemoryBytes = memory << 20
		replicas, shares := replicasOf[i%len(replicasOf)], sharesOf[i%len(sharesOf)]
		if replicas == 0 && !shares {
			continue
		}
		gpu.Sharing = device.Sharing{Strategy: device.TimeSlicing}
		if shares {
			gpu.Sharing.Claims = device.ByMemory
		}
		if s.profile.mps {
			gpu.Sharing.Strategy, gpu.ComputeCapability = device.MPS, "9.0"
		}
		if replicas > 0 {
			gpu.Sharing.Replicas = map[string]device.Replicas{"": {Count: replicas}}
		}
	}
}

// What a pod has is a GPU by its name, or a part of it: "gpu-0=20480" is so many MiB of it.

func part(gpu string, mib int) string {
	if mib == 0 {
		return gpu
	}
	return fmt.Sprintf("%s=%d", gpu, mib)
}

func gpuOf(part string) string {
	gpu, _, _ := strings.Cut(part, "=")
	return gpu
}

// mibOf is zero for all of it.
func mibOf(part string) int {
	_, amount, _ := strings.Cut(part, "=")
	mib, _ := strconv.Atoi(amount) //nolint:errcheck // zero where there is none
	return mib
}

// gpusOf are the names of GPUs, each once.
func gpusOf(parts []string) []string {
	var gpus []string
	for _, p := range parts {
		gpus = append(gpus, gpuOf(p))
	}
	slices.Sort(gpus)
	return slices.Compact(gpus)
}

func minorOf(gpu string) int {
	minor, _ := strconv.Atoi(strings.TrimPrefix(gpu, "gpu-")) //nolint:errcheck // the names are ours
	return minor
}

// replicas is as how many limits see a GPU; zero where they see it as it is.
func (s *simulation) replicas(gpu string) int {
	if !s.profile.sharing {
		return 0
	}
	return replicasOf[minorOf(gpu)%len(replicasOf)]
}

// shared reports whether claims have parts of a GPU.
func (s *simulation) shared(gpu string) bool {
	return s.profile.sharing && s.version >= firstShares && sharesOf[minorOf(gpu)%len(sharesOf)]
}

// forClaimsOnly reports whether limits never see a GPU: its daemon would have to end first.
func (s *simulation) forClaimsOnly(gpu string) bool {
	return s.profile.mps && s.replicas(gpu) == 0 && sharesOf[minorOf(gpu)%len(sharesOf)]
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
		mib := 0
		if s.shared(gpu) {
			mib = s.wanted[uid]
		}
		parts = append(parts, part(gpu, mib))
	}
	return parts
}

// newClaim asks for all of a GPU, or in a world that shares them, often for a part.
func (s *simulation) newClaim(k claim) *claim {
	if s.profile.sharing && !s.chance(4) {
		k.memory = []int{10, 20, 30, 40}[s.rand.IntN(4)] << 10
		s.wanted[k.uid] = k.memory
	}
	if s.profile.mps {
		if k.ownDaemon = k.memory == 0 && s.chance(3); k.memory > 0 {
			k.count = 1 // a client sees the GPU of its daemon only
		}
	}
	return &k
}

// allocatedTo are what a pod has by IDs of kubelet's device manager, the replicas of a GPU together.
func (s *simulation) allocatedTo(ids []string) []string {
	mib := map[string]int{}
	for _, id := range ids {
		uuid, _, replica := strings.Cut(id, "::")
		gpu := "gpu-" + uuid[len("GPU-"):]
		if replica {
			mib[gpu] += memory / s.replicas(gpu)
		} else {
			mib[gpu] = 0
		}
	}
	var parts []string
	for _, gpu := range sorted(mib) {
		parts = append(parts, part(gpu, mib[gpu]))
	}
	return parts
}

// having is who has what of GPUs, in MiB; zero is all of one.
type having map[string]map[string]int

func (h having) give(owner string, parts []string) {
	for _, p := range parts {
		gpu, mib := gpuOf(p), mibOf(p)
		if h[gpu] == nil {
			h[gpu] = map[string]int{}
		}
		if before, known := h[gpu][owner]; known && (before == 0 || mib == 0) {
			mib = 0
		} else {
			mib = max(mib, before)
		}
		h[gpu][owner] = mib
	}
}

// left returns the memory that no other holder has.
func (h having) left(gpu, except string) int {
	left := memory
	for owner, mib := range h[gpu] {
		switch {
		case owner == except:
		case mib == 0:
			return 0
		default:
			left -= mib
		}
	}
	return max(0, left)
}

// others reports whether another holder has a part of a GPU.
func (h having) others(gpu, except string) bool {
	_, mine := h[gpu][except]
	return len(h[gpu]) > 1 || len(h[gpu]) == 1 && !mine
}

// hasRoom reports whether no other holder prevents a holder from using its parts.
func (h having) hasRoom(owner string, parts []string) bool {
	return !slices.ContainsFunc(parts, func(p string) bool {
		mib := mibOf(p)
		return mib == 0 && h.others(gpuOf(p), owner) || h.left(gpuOf(p), owner) < mib
	})
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
	units := 0
	for i := range s.host.gpus {
		gpu := fmt.Sprintf("gpu-%d", i)
		switch replicas := s.replicas(gpu); {
		case s.forClaimsOnly(gpu):
		case replicas > 0:
			units += beside.left(gpu, "") / (memory / replicas)
		case !beside.others(gpu, ""):
			units++
		}
	}
	return units >= count
}

// takeClaim gives a claim the first GPUs beside the other holders that have room; false where there are too few.
func (s *simulation) takeClaim(beside having, k *claim) bool {
	left := k.count
	for i := range s.host.gpus {
		parts := s.partsOf(k.uid, []string{fmt.Sprintf("gpu-%d", i)})
		if left > 0 && beside.hasRoom(k.uid, parts) {
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
