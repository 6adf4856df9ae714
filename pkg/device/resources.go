// SPDX-License-Identifier: Apache-2.0

package device

import (
	"cmp"
	"slices"
	"strings"
)

// MIGStrategy is how limits see MIG partitions. Names and rules are those of NVIDIA's device plugin (k8s-device-plugin,
// flags.migStrategy).
type MIGStrategy string

const (
	// MIGStrategyNone offers every GPU as a whole, also one that is partitioned.
	MIGStrategyNone MIGStrategy = "none"
	// MIGStrategySingle offers partitions under the name of GPUs, on a node where all are alike.
	MIGStrategySingle MIGStrategy = "single"
	// MIGStrategyMixed offers GPUs that are not partitioned, and partitions under a name for each profile.
	MIGStrategyMixed MIGStrategy = "mixed"
)

// MIGStrategies are all that there are.
var MIGStrategies = []MIGStrategy{MIGStrategyNone, MIGStrategySingle, MIGStrategyMixed}

// Resources are the extended resources by which limits ask for the devices of a node. The zero Strategy is MIGStrategyNone.
type Resources struct {
	// GPU is the resource of whole GPUs, "nvidia.com/gpu". Those of partitions have the same domain.
	GPU      string
	Strategy MIGStrategy
}

// Of is the resource of partitions of a profile where each has its own: "nvidia.com/mig-1g.10gb.me" for 1g.10gb+me
// (k8s-device-plugin, internal/rm). One that takes part of its GPU instance, which NVIDIA's plugin refuses to serve, is named in
// the same way: "nvidia.com/mig-1c.3g.40gb".
func (r Resources) Of(profile string) string {
	return r.prefix() + strings.Map(func(c rune) rune {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '-':
			return c
		default:
			return '.'
		}
	}, profile)
}

// Has reports whether a resource is one of them, by any strategy.
func (r Resources) Has(name string) bool {
	return name != "" && (name == r.GPU || name == r.GPU+SharedSuffix || strings.HasPrefix(name, r.prefix()))
}

func (r Resources) prefix() string {
	domain, _, _ := strings.Cut(r.GPU, "/")
	return domain + "/mig-"
}

// Offer is a device, or one of its replicas, that limits can ask for by a resource.
type Offer struct {
	Resource string
	Device   Device
	// Share is what a replica is; the whole where the device has none.
	Share   Share
	replica int
}

// LeftOut is a device that limits have no resource for.
type LeftOut struct {
	Device Device
	// Reason has the words of NVIDIA's plugin where that ends for it.
	Reason string
}

// Why devices are left out.
const (
	leftOutEmpty   = "has no MIG devices configured"
	leftOutTypes   = "more than one MIG device type present on node"
	leftOutEnabled = "all devices on the node must be configured with the same migEnabled value"
	leftOutUnknown = "its MIG profile is not known"
	// The limits of a container may be for several GPUs, and it can be the client of one daemon.
	leftOutForClaims = "it is shared by MPS among claims only: it has no replicas"
)

// Offers are the devices of some GPUs that limits may get, in the order of the GPUs and of their partitions, and those that are
// left out: an administrator's mistake with one GPU is no reason to serve none. No two of them have hardware in common but the
// replicas of one device.
// Partitions that were made for claims are neither, and so is a GPU that is partitioned for claims. It is pure; called by
// everybody who must know what a device is to limits.
func (r Resources) Offers(gpus []GPU) (offers []Offer, leftOut []LeftOut) {
	same := whole
	if r.Strategy == MIGStrategySingle {
		same = commonest(gpus)
	}
	add := func(d Device) {
		resource, reason := r.name(d, same)
		if reason == "" {
			var more []Offer
			more, reason = r.shared(resource, d)
			offers = append(offers, more...)
		}
		if reason != "" {
			leftOut = append(leftOut, LeftOut{d, reason})
		}
	}
	parts := r.Strategy == MIGStrategySingle || r.Strategy == MIGStrategyMixed
	for _, g := range gpus {
		switch fixed := g.fixed(); {
		case !g.MIGEnabled, !parts && !g.Dynamic:
			add(Device{GPU: g})
		case !parts:
		case len(fixed) == 0 && !g.Dynamic:
			leftOut = append(leftOut, LeftOut{Device{GPU: g}, leftOutEmpty})
		default:
			for _, p := range fixed {
				add(Device{g, p})
			}
		}
	}
	return offers, leftOut
}

// name is the resource of a device, or why it has none. same is what all have to be by MIGStrategySingle.
func (r Resources) name(d Device, same string) (resource, leftOut string) {
	single := r.Strategy == MIGStrategySingle
	switch {
	case !d.Whole() && d.Partition.Profile == "":
		return "", leftOutUnknown
	case single && d.Partition.Profile == same, !single && d.Whole():
		return r.GPU, ""
	case !single:
		return r.Of(d.Partition.Profile), ""
	case d.Whole() || same == whole:
		return "", leftOutEnabled
	default:
		return "", leftOutTypes
	}
}

// whole stands for the profile of a GPU that is not partitioned.
const whole = ""

// commonest is the profile, or whole, that most of the GPUs have. A dynamic GPU without an administrator's partitions counts
// as whole also while it is partitioned: what claims make does not change what a resource means.
func commonest(gpus []GPU) string {
	votes := map[string]int{}
	for _, g := range gpus {
		parts := g.fixed()
		if !g.MIGEnabled || g.Dynamic && len(parts) == 0 {
			votes[whole]++
		}
		profiles := map[string]bool{}
		for _, p := range parts {
			profiles[p.Profile] = p.Profile != ""
		}
		for profile, known := range profiles {
			if known {
				votes[profile]++
			}
		}
	}
	best := whole
	for profile, n := range votes {
		if n > votes[best] || n == votes[best] && cmp.Less(profile, best) {
			best = profile
		}
	}
	return best
}

// fixed are the partitions that an administrator made.
func (g GPU) fixed() []Partition {
	return slices.DeleteFunc(slices.Clone(g.Partitions), func(p Partition) bool { return p.Made || p.UUID == "" })
}
