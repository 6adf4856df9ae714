// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/capacity"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// candidate is a device of a node that a request of a claim may get.
type candidate struct {
	published resourceapi.Device
	pool      string
	// partly is set if no slice has the device, so that its attributes are known in part.
	partly bool
}

// stock are the devices of one node, and what is left of them while a pod's needs are taken one after the other.
type stock struct {
	match    *matcher
	nodeName string
	// slices are those of the node. unread is set if the viewer may not read them.
	slices []resourceapi.ResourceSlice
	unread bool
	// matched are the results of match: a device is tried for a need several times.
	matched  map[selected]bool
	node     availability.Node
	status   v1alpha1.GPUNodeStatus
	claims   []v1alpha1.AllocatedClaim
	rules    []v1alpha1.RuleTaint
	devices  []candidate
	uses     []use
	counters map[counterSet]map[string]int64
	// full are the counters without any holder.
	full map[counterSet]map[string]int64
	// unoffered reports whether kubelet offers none of an extended resource, as far as the Node says.
	unoffered func(resource string) bool
	// empty takes devices as if none had a holder or a fault.
	empty bool
	taken map[string]bool
	// units are those taken of each extended resource's device.
	units map[string]int64
}

type use = availability.Use[availability.Name]

type counterSet struct{ pool, name string }

type selected struct{ expression, device string }

// newStock collects the devices of a node. like are published devices of the cluster by model.
func newStock(m *matcher, n v1alpha1.GPUNode, published []resourceapi.ResourceSlice, like map[alike]*resourceapi.Device, unread bool) *stock {
	s := &stock{
		match: m, nodeName: n.Name, slices: published, unread: unread, matched: map[selected]bool{}, status: n.Status, claims: n.Spec.Claims, rules: n.Spec.Taints, node: availability.NewNode(n.Status, n.Spec.Claims),
		counters: map[counterSet]map[string]int64{}, full: map[counterSet]map[string]int64{},
	}
	s.uses = slices.Clone(s.node.Held)
	for _, allocated := range s.node.Allocated {
		if !slices.ContainsFunc(s.node.Held, func(h use) bool { return h.Holder == allocated.Holder && h.Device == allocated.Device }) {
			s.uses = append(s.uses, allocated)
		}
	}
	has := map[string]bool{}
	for _, slice := range published {
		for _, set := range slice.Spec.SharedCounters {
			of := map[string]int64{}
			for name, counter := range set.Counters {
				of[name] = counter.Value.Value()
			}
			s.counters[counterSet{slice.Spec.Pool.Name, set.Name}] = of
		}
		for _, d := range slice.Spec.Devices {
			has[d.Name] = true
			s.devices = append(s.devices, candidate{published: d, pool: slice.Spec.Pool.Name})
		}
	}
	for set, of := range s.counters {
		s.full[set] = maps.Clone(of)
	}
	for _, c := range s.devices {
		for set, takes := range c.consumes() {
			if s.full[set] == nil {
				continue
			}
			for name, amount := range takes {
				s.full[set][name] = max(s.full[set][name], amount)
			}
		}
	}
	// The scheduler subtracts every allocated device that a slice has.
	for _, claim := range n.Spec.Claims {
		for _, c := range s.devices {
			if c.allocatedTo(claim) {
				s.consume(c)
			}
		}
	}
	split := map[string]bool{}
	for _, d := range n.Status.Devices {
		split[d.Parent] = true
	}
	for _, d := range n.Status.Devices {
		if !has[d.Name] && !d.Excluded && !split[d.Name] && forClaims(n.Status.Mode, d) {
			s.devices = append(s.devices, described(d, like[alike{d.Model, d.Profile}]))
		}
	}
	return s
}

// forClaims reports whether a node in this mode gives a device to claims, now or once it has no holder.
func forClaims(mode string, d v1alpha1.DeviceStatus) bool {
	return mode != string(config.ModeDevicePluginOnly) && (mode != string(config.ModeSplit) || d.ExtendedResource == "")
}

// use records that the pod takes a whole device.
func (s *stock) use(name availability.Name) {
	s.uses = append(slices.Clip(s.uses), use{Holder: availability.Holder{ID: "the pod"}, Device: name, Reason: availability.Allocated})
}

func (c candidate) consumes() map[counterSet]map[string]int64 {
	takes := map[counterSet]map[string]int64{}
	for _, consumed := range c.published.ConsumesCounters {
		of := map[string]int64{}
		for name, counter := range consumed.Counters {
			of[name] = counter.Value.Value()
		}
		takes[counterSet{c.pool, consumed.CounterSet}] = of
	}
	return takes
}

func (s *stock) consume(c candidate) {
	for set, takes := range c.consumes() {
		for name, amount := range takes {
			if of := s.counters[set]; of != nil {
				of[name] = max(0, of[name]-amount)
			}
		}
	}
}

func (s *stock) countersSuffice(c candidate) bool {
	for set, takes := range c.consumes() {
		for name, amount := range takes {
			if s.counters[set][name] < amount {
				return false
			}
		}
	}
	return true
}

// again returns the stock with nothing taken; empty, as if no device had a holder or a fault.
func (s *stock) again(empty bool) *stock {
	fresh := *s
	fresh.empty, fresh.taken, fresh.units = empty, map[string]bool{}, map[string]int64{}
	if empty {
		fresh.counters, fresh.uses = s.full, nil
	}
	return fresh.clone()
}

// shortage is a need that a node cannot satisfy.
type shortage struct {
	need
	// total is how many such devices the node has, free how many of them it can give away.
	total, free int64
	// blocked are the devices that match and cannot be given away now.
	blocked []blocked
	// never is set if the node could not satisfy it without holders and faults either.
	never bool
	// noClaims is set if the node's mode serves no claims.
	noClaims bool
}

// reason is why a node does not satisfy the need.
func (s shortage) reason() string {
	what := s.resource
	if what == "" {
		what = "devices that match " + s.claim
	}
	others := ""
	if s.never && s.total >= s.count || !s.never && s.free >= s.count {
		others = " besides its other requests"
	}
	without := ""
	for _, of := range []struct {
		reason availability.Reason
		what   string
	}{{availability.Unhealthy, "unhealthy"}, {availability.Maintenance, "under maintenance"}, {availability.Tainted, "tainted"}} {
		n := 0
		for _, b := range s.blocked {
			if b.reason == of.reason {
				n++
			}
		}
		if n > 0 {
			without += fmt.Sprintf(", and %d %s", n, of.what)
		}
	}
	switch {
	case s.total == 0 && s.noClaims && s.resource == "":
		return "its mode DevicePluginOnly serves no claims"
	case s.total == 0:
		return "it has no " + what
	case s.never:
		return fmt.Sprintf("it has %d %s in all; the pod requests %d%s", s.total, what, s.count, others)
	default:
		return fmt.Sprintf("%d of %d %s are free%s; the pod requests %d%s", s.free, s.total, what, without, s.count, others)
	}
}

// reasons joins the reasons of shortages.
func reasons(short []shortage) string {
	var texts []string
	for _, of := range short {
		texts = append(texts, of.reason())
	}
	return Bounded(strings.Join(texts, "; "), mostText)
}

// blocked is a device that matches a need and is not free.
type blocked struct {
	device string
	reason availability.Reason
	// detail says more than the reason, such as the fault.
	detail string
}

// shortages returns the needs that the node cannot satisfy, and whether it could if nothing had a holder or a fault.
func (s *stock) shortages(ctx context.Context, needs []need) (short []shortage, ever bool) {
	ever = true
	now, idle := s.again(false), s.again(true)
	for _, n := range needs {
		if !idle.satisfies(ctx, n) {
			ever = false
			of := s.shortage(ctx, n)
			of.never = true
			short = append(short, of)
		} else if !now.satisfies(ctx, n) {
			short = append(short, s.shortage(ctx, n))
		}
	}
	return short, ever
}

// satisfies takes the devices of the first alternative for which there are enough, and otherwise none.
func (s *stock) satisfies(ctx context.Context, n need) bool {
	for _, alternative := range n.alternatives() {
		attempt := s.clone()
		got, blocked := attempt.take(ctx, alternative, alternative.count)
		if alternative.all && got > 0 && len(blocked) == 0 || !alternative.all && got >= alternative.count {
			*s = *attempt
			return true
		}
	}
	return false
}

// clone returns a copy from which devices can be taken without a change to s.
func (s *stock) clone() *stock {
	c := *s
	c.taken, c.units, c.uses = maps.Clone(s.taken), maps.Clone(s.units), slices.Clip(s.uses)
	c.counters = map[counterSet]map[string]int64{}
	for set, counters := range s.counters {
		c.counters[set] = maps.Clone(counters)
	}
	return &c
}

// shortage counts what the node has for one need alone.
func (s *stock) shortage(ctx context.Context, n need) shortage {
	short := shortage{need: n, noClaims: s.status.Mode == string(config.ModeDevicePluginOnly)}
	for _, alternative := range n.alternatives() {
		total, _ := s.again(true).take(ctx, alternative, math.MaxInt64)
		free, blocked := s.again(false).take(ctx, alternative, math.MaxInt64)
		short.total, short.free, short.count = max(short.total, total), max(short.free, free), min(short.count, alternative.count)
		short.blocked = append(short.blocked, blocked...)
	}
	return short
}

// take takes as many devices for a need as there are, up to most.
func (s *stock) take(ctx context.Context, n need, most int64) (got int64, not []blocked) {
	if !s.match.goesOn(ctx) {
		return 0, nil
	}
	if n.all {
		most = math.MaxInt64
	}
	if s.ofKubelet(n) {
		return s.takeUnits(n, most)
	}
	for _, c := range s.devices {
		if got >= most {
			break
		}
		if s.taken[c.published.Name] || !s.matches(ctx, n.selectors, c) || !c.has(n.capacity) {
			continue
		}
		if why, ok := s.free(c, n); !ok {
			not = append(not, why)
			continue
		}
		s.taken[c.published.Name] = true
		if !n.admin {
			s.consume(c)
			s.use(availability.NameOf(c.published.Name))
		}
		got++
	}
	return got, not
}

// matches reports whether all selectors match a device.
func (s *stock) matches(ctx context.Context, selectors []string, c candidate) bool {
	return !slices.ContainsFunc(selectors, func(expression string) bool {
		of := selected{expression, c.published.Name}
		match, known := s.matched[of]
		if !known {
			match = s.match.matches(ctx, expression, c)
			s.matched[of] = match
		}
		return !match
	})
}

// has reports whether the device has the requested capacity at all.
func (c candidate) has(requested map[resourceapi.QualifiedName]int64) bool {
	for name, amount := range requested {
		of, known := c.published.Capacity[name]
		lacks := !known && !c.partly || known && of.Value.Value() < amount && !(name == capacity.Memory && c.partly)
		// What a shared device publishes may be what is left of it: its GPUNode has the rest.
		if lacks && !ptr.Deref(c.published.AllowMultipleAllocations, false) {
			return false
		}
	}
	return true
}

// free reports whether a device can be given to the pod, and if not, why.
func (s *stock) free(c candidate, n need) (blocked, bool) {
	name := availability.NameOf(c.published.Name)
	status, known := s.node.Status(c.published.Name)
	if s.empty {
		taken := slices.ContainsFunc(s.uses, func(u use) bool { return u.Device.Overlaps(name) })
		if of := status.Sharing; known && of != nil && of.Claims != "" {
			taken = taken || of.Memory < n.capacity[capacity.Memory] || of.Shares < n.capacity[capacity.Shares]
		}
		return blocked{}, !taken && s.countersSuffice(c) && (!known || !status.Excluded)
	}
	if n.admin {
		return blocked{}, true
	}
	if why, out := whyOut(c.published.Name, status); known && out {
		return why, false
	}
	if why, out := s.tainted(c, n); out && why.reason == availability.Tainted {
		return why, false
	}
	if known && status.Sharing != nil && status.Sharing.Claims != "" && status.Name == c.published.Name {
		left := s.node.Left(status, s.uses)
		request := request{Memory: n.capacity[capacity.Memory], Shares: n.capacity[capacity.Shares]}
		if request.fits(status, left) {
			return blocked{}, true
		}
		return blocked{c.published.Name, availability.HeldByClaim, describeLeft(status, left)}, false
	}
	if reason := availability.Check(true, use{Device: name}, slices.Values(s.uses)); reason != availability.Available {
		return blocked{c.published.Name, reason, ""}, false
	}
	if !s.countersSuffice(c) {
		return blocked{device.GPUName(c.published.Name), availability.HeldByClaim, "no room for it"}, false
	}
	why, out := s.tainted(c, n)
	return why, !out
}

// tainted returns the taint that keeps a need from a device.
func (s *stock) tainted(c candidate, n need) (why blocked, out bool) {
	for _, taint := range c.published.Taints {
		if taint.Effect == resourceapi.DeviceTaintEffectNone || tolerated(taint, n.tolerations) {
			continue
		}
		for _, t := range s.rules {
			if deviceTaint(t.Taint) == taint && (c.partly || t.Selects(c.pool, c.published.Name)) {
				return blocked{c.published.Name, availability.Tainted, v1alpha1.DeviceTaint{Rule: t.Rule, Taint: t.Taint}.String()}, true
			}
		}
		text := v1alpha1.Taint{Key: taint.Key, Value: taint.Value, Effect: v1alpha1.TaintEffect(taint.Effect)}.String()
		why, out = blocked{c.published.Name, availability.Unhealthy, "taint " + text}, true
	}
	return why, out
}

// whyOut returns why no pod gets a device, other than its holders and what it tolerates. The device is named as given.
func whyOut(name string, d v1alpha1.DeviceStatus) (why blocked, out bool) {
	switch {
	case d.Excluded:
		return blocked{name, availability.Unhealthy, "the configuration excludes it"}, true
	case d.UnhealthyReason != "":
		return blocked{name, availability.Unhealthy, d.UnhealthyReason}, true
	case d.Maintenance != nil:
		return blocked{name, availability.Maintenance, d.Maintenance.Reason}, true
	}
	return blocked{}, false
}

// whyOutUntolerated is whyOut for a pod that tolerates no taint, as pods with limits.
func whyOutUntolerated(name string, d v1alpha1.DeviceStatus) (why blocked, out bool) {
	if why, out := whyOut(name, d); out || len(d.Taints) == 0 {
		return why, out
	}
	return blocked{name, availability.Tainted, d.Taints[0].String()}, true
}

func describeLeft(d v1alpha1.DeviceStatus, left device.Share) string {
	if d.Sharing.Shares > 0 {
		return fmt.Sprintf("%d of %s left", left.Count, equalShares(d.Sharing.Shares))
	}
	return fmt.Sprintf("%s of %s left", Mebibytes(int64(left.Bytes)), Mebibytes(d.Sharing.Memory))
}

func tolerated(taint resourceapi.DeviceTaint, tolerations []resourceapi.DeviceToleration) bool {
	return slices.ContainsFunc(tolerations, func(t resourceapi.DeviceToleration) bool {
		return resourceclaim.ToleratesTaint(t, taint)
	})
}
