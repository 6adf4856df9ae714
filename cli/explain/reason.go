// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	resourcehelper "k8s.io/component-helpers/resource"
	"k8s.io/utils/ptr"
)

// failure is a selector that fails on a device, so that the scheduler gives up the pod.
type failure struct {
	need               need
	expression, device string
	// message is CEL's.
	message string
}

// allocatorError is how the scheduler's allocator names a selector that fails (selectorsMatch of its package).
var allocatorError = regexp.MustCompile(`selector #(\d+) on device [^ ]+/([^/ ]+): CEL runtime error: `)

// failureOf finds the selector of an error of the allocator; nil if the error has another cause. The error names a selector of a claim, and not
// the request.
func (s *stock) failureOf(ctx context.Context, err error, needs []need) *failure {
	named := allocatorError.FindStringSubmatch(err.Error())
	if named == nil {
		return nil
	}
	number, _ := strconv.Atoi(named[1])
	for _, c := range s.devices {
		if c.published.Name != named[2] || c.partly {
			continue
		}
		for _, n := range needs {
			for _, alternative := range n.alternatives() {
				of := alternative.own
				if strings.HasPrefix(err.Error(), "class ") {
					of = alternative.selectors[:len(alternative.selectors)-len(alternative.own)]
				}
				if number >= len(of) {
					continue
				}
				if _, failed := s.match.evaluate(ctx, of[number], c); failed != nil && strings.Contains(err.Error(), failed.Error()) {
					return &failure{n, of[number], c.published.Name, OneLine(failed.Error())}
				}
			}
		}
	}
	return nil
}

// fails explains a pod that the scheduler gives up because of an error on one node, whatever the other nodes have.
func (f Facts) fails(a *Answer, n NodeAnswer) {
	if n.failure == nil {
		a.Cause, a.Summary = CauseGivenUp, fmt.Sprintf("waits: an error on %s makes the scheduler give up on all nodes: %s", n.Names[0], Bounded(OneLine(n.failed.Error()), mostText))
		return
	}
	message := n.failure.message
	if key, missing := strings.CutPrefix(message, "no such key: "); missing {
		message += didYouMean(key, maps.Keys(f.offers(n.failure.expression).keys))
	}
	a.Cause = CauseSelector
	a.Summary = fmt.Sprintf("waits: a selector of %s fails on %s of %s, so the scheduler tries no other node: %s: %s",
		cmp.Or(n.failure.need.claim, "class "+n.failure.need.class), n.failure.device, n.Names[0], Bounded(message, mostText),
		Bounded(OneLine(n.failure.expression), mostExpression))
	a.Frees = append(a.Frees, "a selector that fails on no device: use has(), or .? with orValue(), for a key that some devices lack")
}

// offer is what the nodes' devices have of what a selector asks for.
type offer struct {
	// keys are those of all devices, without their domains.
	keys map[string]bool
	// values by the keys in the selector, in its order; literals are its strings.
	asked    []string
	values   map[string]map[string]bool
	literals []string
	// shared is set if the selector asks for devices that claims share, and share if there is one.
	shared, share bool
}

var (
	keyInSelector     = regexp.MustCompile(`(?:attributes|capacity)\s*\[\s*\??\s*["'][^"']*["']\s*\]\s*(?:\.\s*\??\s*|\[\s*\??\s*["'])([A-Za-z0-9_]+)`)
	literalInSelector = regexp.MustCompile(`"([^"\\]*)"|'([^'\\]*)'`)
)

const (
	// mostValues bounds the values of one key that are collected.
	mostValues = 64
	// mostAsked bounds the keys and the strings of a selector that are compared with them. A selector may have hundreds.
	mostAsked = 16
)

// offers returns what the published devices have of what a selector asks for.
func (f Facts) offers(expression string) offer {
	o := offer{keys: map[string]bool{}, values: map[string]map[string]bool{}, shared: strings.Contains(expression, ofShared)}
	for _, found := range keyInSelector.FindAllStringSubmatch(expression, -1) {
		if o.values[found[1]] == nil && len(o.asked) < mostAsked {
			o.asked, o.values[found[1]] = append(o.asked, found[1]), map[string]bool{}
		}
	}
	for _, found := range literalInSelector.FindAllStringSubmatch(expression, -1) {
		if literal := found[1] + found[2]; len(o.literals) < mostAsked && !slices.Contains(o.literals, literal) {
			o.literals = append(o.literals, literal)
		}
	}
	add := func(name resourceapi.QualifiedName, value string) {
		_, key, qualified := strings.Cut(string(name), "/")
		if !qualified {
			key = string(name)
		}
		o.keys[key] = true
		if of := o.values[key]; of != nil && value != "" && len(of) < mostValues {
			of[value] = true
		}
	}
	for _, slices := range f.published() {
		for _, slice := range slices {
			for _, d := range slice.Spec.Devices {
				o.share = o.share || ptr.Deref(d.AllowMultipleAllocations, false)
				for name, of := range d.Attributes {
					add(name, attributeText(of))
				}
				for name, of := range d.Capacity {
					text := of.Value.String()
					if bytes := of.Value.Value(); bytes >= 1<<30 {
						text = Mebibytes(bytes)
					}
					add(name, text)
				}
			}
		}
	}
	return o
}

func attributeText(of resourceapi.DeviceAttribute) string {
	switch {
	case of.StringValue != nil:
		return *of.StringValue
	case of.VersionValue != nil:
		return *of.VersionValue
	case of.IntValue != nil:
		return fmt.Sprint(*of.IntValue)
	case of.BoolValue != nil:
		return fmt.Sprint(*of.BoolValue)
	default:
		return ""
	}
}

// String returns what the nodes offer of what the selector asks for, and near misses, such as "; the nodes offer architecture Hopper".
func (o offer) String() string {
	var texts []string
	hint := ""
	for _, key := range o.asked {
		values := slices.Sorted(maps.Keys(o.values[key]))
		if len(values) == 0 {
			texts = append(texts, "no "+key)
			hint += didYouMean(key, maps.Keys(o.keys))
			continue
		}
		texts = append(texts, key+" "+list(values, func(value string) string { return Bounded(OneLine(value), mostExpression) }))
		for _, literal := range o.literals {
			if !o.values[key][literal] {
				hint += didYouMean(literal, slices.Values(values))
			}
		}
	}
	if o.shared && !o.share {
		return "; no node shares its GPUs among claims"
	}
	if len(texts) == 0 {
		return ""
	}
	return "; the nodes offer " + strings.Join(texts, ", and ") + hint
}

// didYouMean returns " (did you mean x?)" for the candidate that is nearest to a word, if one is near.
func didYouMean(word string, candidates iter.Seq[string]) string {
	best, least := "", 0
	for candidate := range candidates {
		if max(len(word)-len(candidate), len(candidate)-len(word)) > max(1, len(word)/4) {
			continue
		}
		if d := distance(strings.ToLower(word), strings.ToLower(candidate)); candidate != word && d <= max(1, len(word)/4) &&
			(best == "" || d < least || d == least && candidate < best) {
			best, least = candidate, d
		}
	}
	if best == "" {
		return ""
	}
	return " (did you mean " + OneLine(best) + "?)"
}

// distance is the number of characters to insert, to delete or to replace. Long words are too far from each other.
func distance(a, b string) int {
	const longest = 64
	if len(a) > longest || len(b) > longest {
		return longest
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replaced := before
			if a[i] != b[j] {
				replaced++
			}
			before = row[j+1]
			row[j+1] = min(replaced, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// never explains a pod that no node could run without any holder or fault.
func (f Facts) never(a *Answer, answers []NodeAnswer, needs []need, match *matcher) {
	a.Cause = CauseNever
	for _, n := range needs {
		most, impossible := int64(0), true
		for _, answer := range answers {
			if answer.stock == nil {
				continue
			}
			i := slices.IndexFunc(answer.short, func(s shortage) bool {
				return s.never && s.total < s.count && s.claim == n.claim && s.request == n.request && s.resource == n.resource
			})
			if impossible = impossible && i >= 0; i >= 0 {
				most = max(most, answer.short[i].total)
			}
		}
		if !impossible {
			continue
		}
		var texts []string
		for _, alternative := range n.alternatives() {
			if text := f.neverOf(alternative, most, match); !slices.Contains(texts, text) {
				texts = append(texts, text)
			}
		}
		a.Summary = "cannot run: " + Bounded(list(texts, func(text string) string { return text }), mostText)
		return
	}
	a.Summary = "cannot run: no node has " + Bounded(strings.Join(requestsOf(needs), " and "), mostText)
	if i := slices.IndexFunc(answers, func(n NodeAnswer) bool { return n.together }); i >= 0 {
		a.Summary += fmt.Sprintf(": %s: %s", answers[i].Names[0], answers[i].Reason)
	} else if len(needs) > 1 {
		a.Summary += " at the same time"
	}
}

// neverOf is why no node has what a need requests. most is the largest number of such devices on a node.
func (f Facts) neverOf(n need, most int64, match *matcher) string {
	for i, expression := range n.selectors {
		of := match.counts[expression]
		if of.evaluated == 0 || of.matched > 0 {
			continue
		}
		if own := i - (len(n.selectors) - len(n.own)); own >= 0 {
			besides := ""
			if own > 0 {
				besides = " together with the selectors before it"
			}
			return fmt.Sprintf("no device matches %s of %s%s%s", Bounded(OneLine(expression), mostExpression), n.claim, besides, f.offers(expression))
		}
		return fmt.Sprintf("no device is of class %s%s", n.class, f.offers(expression))
	}
	offered := f.offeredResources()
	switch {
	case n.resource != "" && most == 0 && n.class == "" && !slices.Contains(offered, n.resource):
		text := "no node offers " + n.resource + didYouMean(n.resource, slices.Values(offered))
		if usualResources.Has(n.resource) && n.resource != usualResources.GPU {
			text += f.noPartitions(n.resource)
		}
		if len(offered) > 0 {
			text += "; the nodes offer " + list(offered, func(name string) string { return name })
		}
		return text
	case most > 0 && n.all:
		return "no node has " + n.String()
	case most > 0:
		return fmt.Sprintf("no node has %s: the most on one node is %d", n, most)
	default:
		return "no node has " + n.String()
	}
}

// offeredResources are the extended resources of Tandem's devices on all nodes.
func (f Facts) offeredResources() []string {
	names := map[string]bool{}
	for _, n := range f.GPUNodes {
		for _, d := range n.Status.Devices {
			if d.ExtendedResource != "" && !d.Excluded {
				names[d.ExtendedResource] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// strategyLabel is what GPU Feature Discovery writes, and Tandem as well.
const strategyLabel = "nvidia.com/mig.strategy"

// noPartitions is why no node offers the extended resource of partitions.
func (f Facts) noPartitions(resource string) string {
	if strings.HasSuffix(resource, ".shared") {
		return ""
	}
	for _, n := range f.GPUNodes {
		for _, d := range n.Status.Devices {
			if d.Profile != "" && usualResources.Of(d.Profile) == resource {
				if d.ExtendedResource != "" {
					return ": with migStrategy single, the partitions of " + n.Name + " are offered as " + d.ExtendedResource
				}
				return ": migStrategy is none on " + n.Name + ", which has such partitions"
			}
		}
	}
	strategies := map[string]bool{}
	for _, n := range f.Nodes {
		if n.Labels[GPULabels[0]] == "true" {
			strategies[cmp.Or(n.Labels[strategyLabel], "none")] = true
		}
	}
	if len(strategies) == 1 && strategies["none"] {
		return ": migStrategy is none"
	}
	return ": no node has such partitions"
}

// cannotAllocate is what the scheduler says of nodes whose devices do not satisfy the pod's claims.
const cannotAllocate = "cannot allocate all claims"

// otherResources returns what the scheduler says besides GPUs, and besides what an answer has for each node. all reports whether that is so of
// all nodes, as far as the scheduler's counts tell.
func (f Facts) otherResources() (texts string, all bool) {
	total, said, usual := strings.Cut(f.scheduler(), " nodes are available: ")
	if !usual {
		return Bounded(total, mostText), total != "" // from another scheduler, or from a plugin of the scheduler
	}
	said, _, _ = strings.Cut(said, ". ")
	offered, every, some := f.offered(), false, false
	var others []string
	for text := range strings.SplitSeq(strings.TrimSuffix(said, "."), ", ") {
		ours := false
		for word := range strings.FieldsSeq(text) {
			ours = ours || offered(strings.TrimRight(word, ".,"))
		}
		for _, known := range []string{cannotAllocate, "untolerated taint", "Pod's node affinity", "unschedulable"} {
			ours = ours || strings.Contains(text, known)
		}
		if some = some || ours; text != "" && !ours {
			count, _, _ := strings.Cut(text, " ")
			every = every || "0/"+count == total
			others = append(others, text)
		}
	}
	return Bounded(strings.Join(others, ", "), mostText), len(others) > 0 && (every || !some)
}

// exceeds returns which resource of a node is smaller than the pod's request even without other pods.
func exceeds(pod *corev1.Pod, node *corev1.Node) (reason, unless string) {
	requests := resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{})
	for _, name := range slices.Sorted(maps.Keys(requests)) {
		requested := requests[name]
		has, known := node.Status.Allocatable[name]
		if known && !strings.Contains(string(name), "/") && requested.Cmp(has) > 0 {
			return fmt.Sprintf("it has only %s of %s, and the pod requests %s", has.String(), name, requested.String()),
				fmt.Sprintf("with a request of at most %s of %s", has.String(), name)
		}
	}
	return "", ""
}

// excluded explains a pod that may not run where its devices are.
func (f Facts) excluded(a *Answer, answers []NodeAnswer, needs []need) {
	a.Cause = CauseExcluded
	first, others := -1, 0
	for i, n := range answers {
		switch {
		case n.unless == "":
		case first < 0:
			first = i
		default:
			others++
		}
	}
	if first < 0 {
		a.Summary = "cannot run: it may not run on the node that has its claims' devices"
		return
	}
	which := answers[first].Names[0]
	if answers[first].offers {
		which += ", which has " + Bounded(strings.Join(requestsOf(needs), " and "), mostText)
	}
	a.Summary = fmt.Sprintf("cannot run on %s: %s", which, answers[first].Reason)
	if others > 0 {
		a.Summary += fmt.Sprintf("; nor on %s with such GPUs", Number(others, "other node"))
	}
}

// misspelled returns the pod's resource whose name is nearly that of a GPU resource, or has its domain, and that no node offers. It is empty if
// the viewer may not read what the nodes offer.
func (f Facts) misspelled() string {
	if f.missing(KindNodes) || f.missing(KindGPUNodes) {
		return ""
	}
	offered := f.offeredResources()
	if len(offered) == 0 {
		offered = []string{usualResources.GPU}
	}
	domains := map[string]bool{}
	for _, name := range offered {
		domain, _, _ := strings.Cut(name, "/")
		domains[domain] = true
	}
	limits := resourcehelper.PodLimits(f.Pod, resourcehelper.PodResourcesOptions{})
	for _, name := range slices.Sorted(maps.Keys(limits)) {
		known := slices.ContainsFunc(f.Nodes, func(n corev1.Node) bool { _, has := n.Status.Allocatable[name]; return has })
		domain, _, qualified := strings.Cut(string(name), "/")
		if known || !qualified {
			continue
		}
		hint := didYouMean(string(name), slices.Values(offered))
		switch {
		case hint != "":
			return fmt.Sprintf(": no node offers %s%s", name, hint)
		case domains[domain]:
			return fmt.Sprintf(": no node offers %s; the nodes offer %s", name, list(offered, func(name string) string { return name }))
		}
	}
	return ""
}
