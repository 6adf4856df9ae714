// SPDX-License-Identifier: Apache-2.0

package device

import (
	"slices"
	"strings"
)

// MIGStrategy is how extended resources offer partitions. Names and rules are those of NVIDIA's device plugin (k8s-device-plugin,
// flags.migStrategy).
type MIGStrategy string

const (
	// MIGStrategyNone offers every GPU as a whole, with or without partitions.
	MIGStrategyNone MIGStrategy = "none"
	// MIGStrategySingle offers partitions under the resource of GPUs, on a node whose GPUs all have the same ones.
	MIGStrategySingle MIGStrategy = "single"
	// MIGStrategyMixed offers GPUs without partitions, and partitions under a resource for each profile.
	MIGStrategyMixed MIGStrategy = "mixed"
)

// MIGStrategies are all strategies.
var MIGStrategies = []MIGStrategy{MIGStrategyNone, MIGStrategySingle, MIGStrategyMixed}

// Resources are the extended resources of a node's devices. The zero Strategy is MIGStrategyNone.
type Resources struct {
	// GPU is the resource of whole GPUs, "nvidia.com/gpu". Those of partitions have the same domain.
	GPU      string
	Strategy MIGStrategy
}

// Of returns the resource of a profile's partitions with MIGStrategyMixed: "nvidia.com/mig-1g.10gb.me" for 1g.10gb+me
// (k8s-device-plugin, internal/rm). A partition with part of a GPU instance, which NVIDIA's plugin refuses to serve, has the same
// form: "nvidia.com/mig-1c.3g.40gb".
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

// Has reports whether it is one of these resources, with any strategy.
func (r Resources) Has(name string) bool {
	return name != "" && (name == r.GPU || name == r.GPU+SharedSuffix || strings.HasPrefix(name, r.prefix()))
}

func (r Resources) prefix() string {
	domain, _, _ := strings.Cut(r.GPU, "/")
	return domain + "/mig-"
}

// Offer is a device, or a replica of one, under its resource.
type Offer struct {
	Resource string
	Device   Device
	// Share is a replica's share; zero for a whole device.
	Share   Share
	replica int
}

// LeftOut is a device without a resource.
type LeftOut struct {
	Device Device
	// Reason has the words of NVIDIA's plugin, which ends in this case.
	Reason string
}

// Reasons of LeftOut.
const (
	leftOutEmpty   = "has no MIG devices configured"
	leftOutTypes   = "more than one MIG device type present on node"
	leftOutEnabled = "all devices on the node must be configured with the same migEnabled value"
	leftOutUnknown = "its MIG profile is not known"
	// A container may request several GPUs, and it can be the client of one daemon only.
	leftOutForClaims = "it is shared by MPS among claims only: it has no replicas"
)

// Offers returns the devices that pods can request, in the order of the GPUs and of their partitions, and the devices without a
// resource: an administrator's mistake with one GPU must not exclude all. No two offers have hardware in common, except replicas
// of one device. Partitions that were created for claims are in neither list, nor are GPUs that claims have partitioned. It is
// pure. Everything that counts pods' devices calls it.
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
		switch fixed := g.Fixed(); {
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

// name returns the resource of a device, or why it has none. same is the kind that MIGStrategySingle requires.
func (r Resources) name(d Device, same string) (resource, leftOut string) {
	single := r.Strategy == MIGStrategySingle
	switch {
	case !d.Whole() && !d.Partition.Known():
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

// whole is the kind of a GPU without partitions.
const whole = ""

// commonest returns the profile, or whole, that most of the GPUs have. A dynamic GPU without static partitions always counts as
// whole: claims must not change the meaning of a resource.
func commonest(gpus []GPU) string {
	votes := map[string]int{}
	for _, g := range gpus {
		parts := g.Fixed()
		if !g.MIGEnabled || g.Dynamic && len(parts) == 0 {
			votes[whole]++
		}
		profiles := map[string]bool{}
		for _, p := range parts {
			if p.Known() && !profiles[p.Profile] {
				profiles[p.Profile] = true
				votes[p.Profile]++
			}
		}
	}
	best := whole
	for profile, n := range votes {
		if n > votes[best] || n == votes[best] && profile < best {
			best = profile
		}
	}
	return best
}

// Fixed returns the static partitions: those of the administrator that can be used.
func (g GPU) Fixed() []Partition {
	return slices.DeleteFunc(slices.Clone(g.Partitions), func(p Partition) bool { return p.Made || p.UUID == "" })
}
