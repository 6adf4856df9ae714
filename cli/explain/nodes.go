// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	schedulinghelper "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// Fit is whether a pod fits a node.
type Fit string

// From best to worst.
const (
	FitRoom    Fit = "room"    // the node has what the pod requests
	FitFull    Fit = "full"    // it would have it without its holders and faults
	FitUnknown Fit = "unknown" // not evaluated: a bound was reached before
	FitAgent   Fit = "agent"   // its agent serves no GPU, so that it is not known
	FitNever   Fit = "never"   // it does not have it
	FitFails   Fit = "fails"   // the scheduler fails there, and gives up the pod on all nodes
)

// Words returns the fit for users.
func (f Fit) Words() string {
	return map[Fit]string{
		FitRoom: "has room", FitFull: "is full", FitUnknown: "not evaluated", FitAgent: "serves no GPU", FitNever: "cannot run it",
		FitFails: "makes the scheduler give up",
	}[f]
}

// NodeAnswer is why one node, or several for the same reason, does not run the pod.
type NodeAnswer struct {
	Names []string `json:"names"`
	// Count is the number of nodes; Names may have fewer.
	Count  int    `json:"count"`
	Fit    Fit    `json:"fit"`
	Reason string `json:"reason"`
	// Holders of the devices that the pod could have.
	Holders []string `json:"holders,omitempty"`

	// failed is the scheduler's error with FitFails, and failure the selector that causes it.
	failed  error
	failure *failure
	// together says that the reason is about all requests at the same time.
	together bool
	// stock and short are the facts for Holders and for Answer.Frees, which are computed only for nodes in the answer.
	stock *stock
	short []shortage
	// unless is what would let the pod run on a node that excludes the pod and may have the requested devices. offers is set if the node has
	// them now.
	unless string
	offers bool
}

// Which names the nodes, such as "a, b and 3 more".
func (n NodeAnswer) Which() string {
	names := strings.Join(n.Names, ", ")
	if more := n.Count - len(n.Names); more > 0 {
		names += fmt.Sprintf(" and %d more", more)
	}
	return names
}

// lack is how many devices a node lacks.
func (n NodeAnswer) lack() (lack int64) {
	for _, s := range n.short {
		lack += max(0, s.count-s.free)
	}
	return lack
}

// nodeAnswers answers for each node, the most promising first. Nodes that are left when the matcher ends are not evaluated: those that
// exclude the pod come last.
func (f Facts) nodeAnswers(ctx context.Context, match *matcher, claims []claimOf, needs []need) []NodeAnswer {
	published := f.published()
	like := map[alike]*resourceapi.Device{}
	for _, of := range published {
		for _, slice := range of {
			for i, d := range slice.Spec.Devices {
				like[alike{attribute(d, "productName"), attribute(d, "profile")}] = &slice.Spec.Devices[i]
			}
		}
	}
	byName := make(map[string]v1alpha1.GPUNode, len(f.GPUNodes))
	for _, n := range f.GPUNodes {
		byName[n.Name] = n
	}
	allocate, foreign := f.toAllocate(claims), f.foreign(needs)
	affinity := nodeaffinity.GetRequiredNodeAffinity(f.Pod)
	nodes, onlyNames := f.nodes()
	excludes, unlesses := make([]string, len(nodes)), make([]string, len(nodes))
	for i := range nodes {
		switch {
		case !match.goesOn(ctx):
		case onlyNames:
			excludes[i], unlesses[i] = elsewhere(&nodes[i], claims, true)
		default:
			excludes[i], unlesses[i] = whyNot(f.Pod, affinity, &nodes[i], claims)
		}
	}
	order := make([]int, len(nodes))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(Count(excludes[i] != ""), Count(excludes[j] != "")) })
	answers := make([]NodeAnswer, 0, len(nodes))
	for _, i := range order {
		node, excluded, unless := &nodes[i], excludes[i], unlesses[i]
		answer := NodeAnswer{Names: []string{node.Name}, Count: 1, Fit: FitNever}
		gpuNode, reported := byName[node.Name]
		switch {
		case !reported && !HasGPUs(node) && len(published[node.Name]) == 0 && len(needs) > 0:
			answer.Reason = noGPU
		case !match.goesOn(ctx):
			answer.unknown(match)
		case excluded != "" && !reported:
			answer.Reason = excluded
		default:
			gpuNode.Name = node.Name
			s := newStock(match, gpuNode, published[node.Name], like, f.missing(KindSlices))
			s.unoffered = func(resource string) bool {
				allocatable := node.Status.Allocatable[corev1.ResourceName(resource)]
				return !onlyNames && allocatable.IsZero()
			}
			switch {
			case gpuNode.Status.Waiting != "":
				answer.unserved(ctx, s, allocate, needs, WhyUnserved(gpuNode.Status))
			case !reported && len(needs) > 0:
				answer.unserved(ctx, s, allocate, needs, "it has GPUs and "+NoGPUNode)
			default:
				answer.fit(ctx, s, allocate, needs)
			}
		}
		if foreign != nil && (answer.Fit == FitFull || answer.Fit == FitNever) {
			answer = NodeAnswer{Names: answer.Names, Count: 1, Fit: FitUnknown, Reason: foreign.Error()}
		}
		if excluded != "" && answer.Reason != noGPU {
			answer.exclude(excluded, unless)
		}
		answers = append(answers, answer)
	}
	slices.SortStableFunc(answers, func(x, y NodeAnswer) int {
		return cmp.Or(
			cmp.Compare(rank(x.Fit), rank(y.Fit)), cmp.Compare(Count(y.offers), Count(x.offers)), strings.Compare(y.unless, x.unless),
			cmp.Compare(Count(x.Reason == noGPU), Count(y.Reason == noGPU)), cmp.Compare(x.lack(), y.lack()), cmp.Compare(x.Names[0], y.Names[0]))
	})
	return answers
}

// exclude says that the pod may not run on the node, and why, besides what the node lacks.
func (n *NodeAnswer) exclude(why, unless string) {
	switch n.Fit {
	case FitRoom:
		n.offers, n.unless = true, unless
	case FitFails:
		n.unless = unless
	case FitFull:
		n.unless = unless + ", and once enough of its devices are free"
		why += ", and " + n.Reason
	case FitAgent:
		n.unless = unless + ", and once its agent serves GPUs"
		why += ", and " + n.Reason
	}
	n.Fit, n.Reason = FitNever, why
}

// nodes returns the nodes. If the viewer may not read them, it returns those with a GPUNode, of which only the names are known.
func (f Facts) nodes() (nodes []corev1.Node, onlyNames bool) {
	if !f.missing(KindNodes) {
		return f.Nodes, false
	}
	for _, n := range f.GPUNodes {
		nodes = append(nodes, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name}})
	}
	return nodes, true
}

const noGPU = "it has no GPU"

// NoGPUNode says what it means that a node has no GPUNode. An agent that waits for the driver creates none. Every view shows it.
const NoGPUNode = "no GPUNode: Tandem's agent does not run there, or has served no GPU there yet"

func rank(fit Fit) int {
	return slices.Index([]Fit{FitFails, FitRoom, FitFull, FitUnknown, FitAgent, FitNever}, fit)
}

// ofNodeController begins the keys of the taints with which Kubernetes marks what is wrong with a node. A toleration would not cure that.
const ofNodeController = "node.kubernetes.io/"

// whyNot returns why the pod may not run on a node, apart from its GPUs, and what would let it.
func whyNot(pod *corev1.Pod, affinity nodeaffinity.RequiredNodeAffinity, node *corev1.Node, claims []claimOf) (reason, unless string) {
	if node.Spec.Unschedulable {
		cordon := &corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}
		if !schedulinghelper.TolerationsTolerateTaint(klog.Background(), pod.Spec.Tolerations, cordon, false) {
			return "it is cordoned", "once it is uncordoned"
		}
	}
	if match, err := affinity.Match(node); err != nil || !match {
		return "the pod's node selector or node affinity excludes it", "with a node selector and a node affinity that allow it"
	}
	if taint, repelled := untolerated(pod, node); repelled {
		switch text := taint.ToString(); {
		case taint.Key == corev1.TaintNodeNotReady, taint.Key == corev1.TaintNodeUnreachable:
			return "it is not ready", "once it is ready"
		case strings.HasPrefix(taint.Key, ofNodeController):
			return "it has the taint " + text, "once it no longer has the taint " + text
		default:
			return "the pod does not tolerate its taint " + text, "with a toleration of its taint " + text
		}
	}
	if reason, unless := elsewhere(node, claims, false); reason != "" {
		return reason, unless
	}
	return exceeds(pod, node)
}

// elsewhere returns which claim has its devices on another node, and what would let the pod run. onlyName says that the node's labels are not
// known.
func elsewhere(node *corev1.Node, claims []claimOf, onlyName bool) (reason, unless string) {
	for _, of := range claims {
		if of.claim == nil || of.claim.Status.Allocation == nil || of.claim.Status.Allocation.NodeSelector == nil {
			continue
		}
		terms := of.claim.Status.Allocation.NodeSelector
		if onlyName && slices.ContainsFunc(terms.NodeSelectorTerms, func(t corev1.NodeSelectorTerm) bool { return len(t.MatchExpressions) > 0 }) {
			continue
		}
		selector, err := nodeaffinity.NewNodeSelector(terms)
		if err == nil && !selector.Match(node) {
			return fmt.Sprintf("%s has its devices on another node", of), fmt.Sprintf("with another claim than %s", of)
		}
	}
	return "", ""
}

// unknown says why the node is not evaluated.
func (n *NodeAnswer) unknown(m *matcher) { n.Fit, n.Reason = FitUnknown, m.ended.Error() }

// mayBeHeld reports whether a device that the pod could have has a holder, or none is known that is unhealthy.
func (n NodeAnswer) mayBeHeld() bool {
	known := slices.ContainsFunc(n.short, func(s shortage) bool { return len(s.blocked) > 0 })
	return !known || slices.ContainsFunc(n.short, func(s shortage) bool {
		return slices.ContainsFunc(s.blocked, func(b blocked) bool { return b.reason.ByHolder() })
	})
}

// show adds nodes to the answer: those that are full with their holders, the others together if the reason is the same. It adds what would
// free devices of the nodes that it shows.
func (f Facts) show(a *Answer, answers []NodeAnswer) {
	at := map[string]int{}
	for _, n := range answers {
		i, known := at[n.Reason]
		switch {
		case known && n.Fit == a.Nodes[i].Fit && n.Fit != FitFull:
		case len(a.Nodes) < mostNodes || n.Reason == noGPU:
			f.describe(a, &n)
			i = len(a.Nodes)
			at[n.Reason] = i
			a.Nodes = append(a.Nodes, NodeAnswer{Fit: n.Fit, Reason: n.Reason, Holders: n.Holders})
		default:
			i = slices.IndexFunc(a.Nodes, func(of NodeAnswer) bool { return of.Fit == n.Fit && of.Reason == otherReasons })
			if i < 0 {
				i = len(a.Nodes)
				a.Nodes = append(a.Nodes, NodeAnswer{Fit: n.Fit, Reason: otherReasons})
			}
		}
		a.Nodes[i].Count++
		if len(a.Nodes[i].Names) < namedNodes {
			a.Nodes[i].Names = append(a.Nodes[i].Names, n.Names...)
		}
	}
	a.Frees = FirstOf(uniq(a.Frees), mostFrees, "and %d more")
}

// describe adds the holders on a node to its answer, and what would free devices to the pod's.
func (f Facts) describe(a *Answer, n *NodeAnswer) {
	if n.unless != "" {
		a.Frees = append(a.Frees, n.Names[0]+", "+n.unless)
	}
	if n.Fit != FitFull {
		return
	}
	for _, s := range n.short {
		holders, frees := f.blockers(n.stock, s, n.Names[0])
		n.Holders = append(n.Holders, holders...)
		a.Frees = append(a.Frees, frees...)
	}
	n.Holders = uniq(n.Holders)
}

const otherReasons = "for reasons like those above"

// GPULabels are "true" on nodes with GPUs: the labels of GPU Feature Discovery, which Tandem writes as well, and of Node Feature Discovery.
var GPULabels = []string{"nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present"}

// HasGPUs reports whether a node has GPUs as far as its Node object says: by a label or by an extended resource. It is a pure function.
func HasGPUs(node *corev1.Node) bool {
	for _, label := range GPULabels {
		if node.Labels[label] == "true" {
			return true
		}
	}
	for name, quantity := range node.Status.Capacity {
		if usualResources.Has(string(name)) && !quantity.IsZero() {
			return true
		}
	}
	return false
}

// published returns the devices of the driver's pools by node, each pool in its latest generation, with the taints of DeviceTaintRules.
func (f Facts) published() map[string][]resourceapi.ResourceSlice {
	if f.byNode != nil {
		return f.byNode
	}
	latest := map[string]int64{}
	for _, s := range f.Slices {
		if s.Spec.Driver == f.Driver {
			latest[s.Spec.Pool.Name] = max(latest[s.Spec.Pool.Name], s.Spec.Pool.Generation)
		}
	}
	rules := map[string][]v1alpha1.RuleTaint{}
	for _, n := range f.GPUNodes {
		rules[n.Name] = n.Spec.Taints
	}
	byNode := map[string][]resourceapi.ResourceSlice{}
	for _, s := range f.Slices {
		if s.Spec.Driver == f.Driver && s.Spec.NodeName != nil && s.Spec.Pool.Generation == latest[s.Spec.Pool.Name] {
			byNode[*s.Spec.NodeName] = append(byNode[*s.Spec.NodeName], withRules(s, rules[*s.Spec.NodeName]))
		}
	}
	for _, of := range byNode {
		slices.SortStableFunc(of, func(a, b resourceapi.ResourceSlice) int {
			return cmp.Or(cmp.Compare(a.Spec.Pool.Name, b.Spec.Pool.Name), cmp.Compare(a.Name, b.Name))
		})
	}
	return byNode
}

// withRules returns a slice with the taints that the scheduler adds to its devices (k8s.io/dynamic-resource-allocation/resourceslice/tracker).
func withRules(s resourceapi.ResourceSlice, rules []v1alpha1.RuleTaint) resourceapi.ResourceSlice {
	if len(rules) > 0 {
		s.Spec.Devices = slices.Clone(s.Spec.Devices)
	}
	for i := range s.Spec.Devices {
		d := &s.Spec.Devices[i]
		for _, t := range rules {
			if t.Selects(s.Spec.Pool.Name, d.Name) {
				d.Taints = append(slices.Clip(d.Taints), deviceTaint(t.Taint))
			}
		}
	}
	return s
}

func deviceTaint(t v1alpha1.Taint) resourceapi.DeviceTaint {
	return resourceapi.DeviceTaint{Key: t.Key, Value: t.Value, Effect: resourceapi.DeviceTaintEffect(t.Effect)}
}
