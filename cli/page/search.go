// SPDX-License-Identifier: Apache-2.0

package page

import (
	"cmp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/cli/explain"
	"github.com/tandem-gpu/tandem/cli/overview"
)

// Bounds of a view. Pages and the filter reach what is beyond them.
const (
	mostNodes = 50
	// mostParts bounds the GPUs that the nodes of a page draw. A GPU with partitions counts as partsOfGPU.
	mostParts  = 600
	partsOfGPU = 8
	// mostOpen is the largest number of nodes that are shown with their devices at first, and mostOpened that of rows which the viewer opens.
	mostOpen   = 4
	mostOpened = 8
	// mostOwners bounds the owners of waiting pods. Without a filter they are few, so that the nodes follow soon.
	mostOwners     = 50
	mostOwnersHere = 10
	// mostPods bounds the pods of one owner, and mostProblems what is said of one node.
	mostPods     = 100
	mostProblems = 3
	mostQuery    = 200
)

// States in a filter besides those of devices.
const (
	withProblem = "problem"
	notServing  = "not-serving"
	inConflict  = "conflict"
	isWaiting   = "waiting"
)

// term is a word of a filter. Its key says what it is about; empty for any text.
type term struct{ key, word string }

// The keys of a filter. A word without one of them is looked for in all texts.
const (
	byNode      = "node"
	byPod       = "pod"
	byNamespace = "namespace"
	byState     = "state"
)

type filter []term

func filterOf(text string) (f filter) {
	for _, word := range strings.Fields(strings.ToLower(text)) {
		switch key, value, _ := strings.Cut(word, ":"); {
		case value != "" && slices.Contains([]string{byNode, byPod, byNamespace, byState}, key):
			f = append(f, term{key, value})
		default:
			f = append(f, term{"", word})
		}
	}
	return f
}

// matches reports whether each term is in a text of its key. A namespace and a state are whole words. The texts are those that the viewer may
// see.
func (f filter) matches(texts func(key string) []string) bool {
	return !slices.ContainsFunc(f, func(t term) bool {
		return !slices.ContainsFunc(texts(t.key), func(text string) bool {
			text = strings.ToLower(text)
			if t.key == byNamespace || t.key == byState {
				return text == t.word
			}
			return strings.Contains(text, t.word)
		})
	})
}

// textsOf returns the texts of a key by which a node is found.
func textsOf(n overview.Node, key string) (texts []string) {
	switch key {
	case byNode:
		return []string{n.Name}
	case byNamespace:
		return n.Namespaces()
	case byState:
		return statesOf(n)
	case "":
		texts = append(texts, n.Name, n.Mode, n.Problem)
		for _, c := range n.Conflicts {
			texts = append(texts, c.String())
		}
	}
	for _, d := range n.Devices {
		for _, h := range d.Holders { // Describe has a few of many
			for _, pod := range h.Pods {
				texts = append(texts, pod.Namespace+"/"+pod.Name)
			}
			if h.Claim != nil && key == "" {
				texts = append(texts, h.Claim.String())
			}
		}
		if key == "" {
			holders, _ := d.Describe(n)
			texts = append(texts, d.Name, d.UUID, d.Model, d.Profile, string(d.State), holders, d.WhyOut(), d.Slowdown)
		}
	}
	return texts
}

// statesOf are the states of a node and of its devices, for a filter.
func statesOf(n overview.Node) (states []string) {
	for _, d := range n.Devices {
		states = append(states, string(d.State))
	}
	return append(states, problemStates(n)...)
}

// problemStates are the states of a node itself.
func problemStates(n overview.Node) (states []string) {
	if n.Problem != "" {
		states = append(states, notServing)
	}
	if len(n.Conflicts) > 0 {
		states = append(states, inConflict)
	}
	if rank(n) < ranks {
		states = append(states, withProblem)
	}
	return states
}

// ranks is the rank of a node without a problem.
const ranks = 4

// rank orders nodes: the smaller, the more urgent.
func rank(n overview.Node) int {
	is := func(state overview.State) bool {
		return slices.ContainsFunc(n.Devices, func(d overview.Device) bool { return d.State == state })
	}
	switch {
	case n.Problem != "":
		return 0
	case len(n.Conflicts) > 0:
		return 1
	case is(overview.Unhealthy):
		return 2
	case is(overview.Maintenance), is(overview.Tainted):
		return 3
	}
	return ranks
}

// search returns the nodes that match, those with a problem first.
func (f filter) search(nodes []overview.Node) []overview.Node {
	var byRank [ranks + 1][]overview.Node
	for _, n := range nodes {
		if f.matches(func(key string) []string { return textsOf(n, key) }) {
			at := rank(n)
			byRank[at] = append(byRank[at], n)
		}
	}
	for _, found := range byRank {
		slices.SortFunc(found, func(a, b overview.Node) int { return cmp.Compare(a.Name, b.Name) })
	}
	return slices.Concat(byRank[:]...)
}

// pageOf returns where a page of the nodes begins and ends, its number, which is between 1 and the number of pages, and that.
func pageOf(nodes []overview.Node, number int) (from, to, _, pages int) {
	starts, parts := []int{0}, 0
	for i, n := range nodes {
		has := partsOf(n)
		if i-starts[len(starts)-1] == mostNodes || parts > 0 && parts+has > mostParts {
			starts, parts = append(starts, i), 0
		}
		parts += has
	}
	number = min(max(number, 1), len(starts))
	from, to = starts[number-1], len(nodes)
	if number < len(starts) {
		to = starts[number]
	}
	return from, to, number, len(starts)
}

// partsOf bounds the parts by which a node's GPUs are drawn.
func partsOf(n overview.Node) (parts int) {
	divided := map[string]bool{}
	for _, d := range n.Devices {
		if d.Parent == "" {
			parts++
		} else if !divided[d.Parent] {
			divided[d.Parent] = true
			parts += partsOfGPU - 1
		}
	}
	return parts
}

// waiting returns the pods that wait for what may be GPUs, by their owners, and how many pods wait without the filter.
func (f filter) waiting(queue *explain.Queue, pods []*corev1.Pod) (found []explain.Group, all int) {
	found = queue.Groups(pods)
	var kept []*corev1.Pod
	for _, g := range found {
		all += len(g.Pods)
		for _, pod := range g.Pods {
			if f.matches(func(key string) []string { return textsOfWaiting(g, pod, queue, key) }) {
				kept = append(kept, pod)
			}
		}
	}
	if len(kept) < all {
		found = queue.Groups(kept)
	}
	return found, all
}

// textsOfWaiting returns the texts of a key by which a pod of a group is found.
func textsOfWaiting(g explain.Group, pod *corev1.Pod, queue *explain.Queue, key string) []string {
	name := pod.Namespace + "/" + pod.Name
	switch key {
	case byNode:
		return []string{pod.Spec.NodeName}
	case byPod:
		return []string{name}
	case byNamespace:
		return []string{pod.Namespace}
	case byState:
		return []string{isWaiting}
	}
	return append([]string{name, g.Owner(), queue.Reason(pod)}, g.Requests...)
}
