// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/capacity"
)

// waits explains a pod that the scheduler has not placed.
func (f Facts) waits(ctx context.Context, a *Answer, claims []claimOf, needs []need, b bounds) {
	if len(f.Pod.Spec.SchedulingGates) > 0 {
		a.Cause, a.Summary = CauseGated, gated(f.Pod)
		return
	}
	if err := f.tooMany(needs); err != nil {
		a.Cause, a.Summary = CauseNotEvaluated, "waits: not evaluated: "+err.Error()
		return
	}
	match := newMatcher(f, b)
	if f.lacks(ctx, a, claims, needs, match) {
		return
	}
	ofClaim := func(n need) bool { return n.resource == "" }
	if slices.ContainsFunc(claims, f.unread) {
		a.Cause, a.Summary = CauseUnreadable, "waits for GPUs: which ones its claims request cannot be told without the rights below"
		return
	}
	if f.missing(KindGPUNodes) || f.missing(KindClasses) && slices.ContainsFunc(needs, ofClaim) {
		a.Cause, a.Summary = CauseUnreadable, "waits for GPUs: which nodes have them cannot be told without the rights below"
		return
	}
	f.byNode = f.published()
	answers := f.nodeAnswers(ctx, match, claims, needs)
	f.show(a, answers)
	has := func(is func(NodeAnswer) bool) bool { return slices.ContainsFunc(answers, is) }
	isUnknown := func(n NodeAnswer) bool { return n.Fit == FitUnknown }
	isKnown := func(n NodeAnswer) bool { return n.Fit == FitFull || n.Fit == FitAgent }
	in := Bounded(strings.Join(requestsOf(needs), " and "), mostText)
	switch {
	case has(func(n NodeAnswer) bool { return n.Fit == FitFails }):
		f.fails(a, answers[0])
	case has(func(n NodeAnswer) bool { return n.Fit == FitRoom }):
		a.Cause = CauseRoom
		switch others, all := f.otherResources(); {
		case all:
			a.Summary = fmt.Sprintf("waits: the scheduler says %s; %s has free GPUs for it", others, answers[0].Names[0])
		case others != "":
			a.Summary = fmt.Sprintf("waits, although %s has free GPUs for it: the scheduler says %s", answers[0].Names[0], Bounded(a.Scheduler, mostText))
		default:
			a.Summary = "waits, although " + answers[0].Names[0] + " has free GPUs for it: the scheduler waits for something else, or has not tried again yet"
		}
	case has(isUnknown) || match.ended != nil && !has(isKnown):
		a.Cause, a.Summary = CauseNotEvaluated, "waits: not evaluated: "+cmp.Or(match.ended, f.foreign(needs), errSearch).Error()
	case has(func(n NodeAnswer) bool { return n.Fit == FitFull }):
		a.Cause = CauseFull
		if !has(func(n NodeAnswer) bool { return n.Fit == FitFull && n.mayBeHeld() }) {
			a.Cause = CauseUnhealthy
		}
		no := "no node"
		if has(func(n NodeAnswer) bool { return n.offers }) {
			no = "no node that may run it"
		}
		a.Summary = "waits: " + cmp.Or(f.counted(needs), no+" has "+in+" free")
		if i := slices.IndexFunc(answers, func(n NodeAnswer) bool { return n.together }); i >= 0 && answers[i].Fit == FitFull {
			a.Summary = fmt.Sprintf("waits: %s has %s free: %s: %s", no, in, answers[i].Names[0], answers[i].Reason)
		}
	case has(func(n NodeAnswer) bool { return n.Fit == FitAgent }):
		a.Cause, a.Summary = CauseAgent, "waits: no node is known to have "+in+", and the agents of some nodes serve no GPU"
		a.Frees = append(a.Frees, "an agent that serves the GPUs of these nodes: see the agent's log and the events of the node")
	case len(needs) == 0 || has(func(n NodeAnswer) bool { return n.unless != "" }):
		f.excluded(a, answers, needs)
	default:
		f.never(a, answers, needs, match)
	}
}

func gated(pod *corev1.Pod) string {
	var names []string
	for _, gate := range pod.Spec.SchedulingGates {
		names = append(names, gate.Name)
	}
	return "waits until its scheduling gates are removed: " + strings.Join(names, ", ")
}

func requestsOf(needs []need) (texts []string) {
	for _, n := range needs {
		texts = append(texts, n.String())
	}
	return texts
}

// counted is whyNone's sentence for a pod with one request.
func (f Facts) counted(needs []need) string {
	if len(needs) != 1 || len(needs[0].others) > 0 {
		return ""
	}
	mayRun := MayRun(f.Pod)
	all, onlyNames := f.nodes()
	may := make(map[string]bool, len(all))
	for i := range all {
		may[all[i].Name] = onlyNames || mayRun(&all[i])
	}
	var nodes []v1alpha1.GPUNode
	for _, n := range f.GPUNodes {
		if may[n.Name] {
			nodes = append(nodes, n)
		}
	}
	n := needs[0]
	class, known := f.class(n.class)
	whole := known && ofWholeGPUs(class, f.Driver)
	switch {
	case n.resource != "" && (whole || f.offersGPUs(n.resource)):
		return whyNone(nodes, request{Devices: n.count, Limits: n.resource})
	case n.resource != "":
		return whyNone(nodes, request{Devices: n.count, Resource: n.resource})
	case n.all || !whole || len(n.selectors)-len(n.own) > 1 || slices.ContainsFunc(n.own, func(own string) bool { return own != ofShared }):
		return "" // it is not known which devices the selectors select
	default:
		return whyNone(nodes, request{Devices: n.count, Memory: n.capacity[capacity.Memory], Shares: n.capacity[capacity.Shares]})
	}
}

// ofShared is the selector of GPUs that claims share.
const ofShared = "device.allowMultipleAllocations"

// offersGPUs reports whether an extended resource is that of the GPUs of a node, or the usual one.
func (f Facts) offersGPUs(resource string) bool {
	return resource == usualResources.GPU ||
		slices.ContainsFunc(f.GPUNodes, func(n v1alpha1.GPUNode) bool { return n.Status.ExtendedResource == resource })
}

// lacks explains a pod whose request cannot be satisfied whatever the nodes have. It reports whether there is such a reason.
func (f Facts) lacks(ctx context.Context, a *Answer, claims []claimOf, needs []need, match *matcher) bool {
	deleted := func(of claimOf) bool { return of.name != "" && of.claim == nil && !f.missing(KindClaims) }
	for _, of := range claims {
		switch {
		case (of.name == "" || deleted(of)) && of.template != "" && f.Templates[of.template] == nil && !f.missing(KindTemplates):
			a.Cause, a.Summary = CauseNoClaim, fmt.Sprintf("waits: ResourceClaimTemplate %s does not exist", of.template)
			a.Frees = append(a.Frees, "the template: create it")
		case deleted(of) && of.template == "":
			a.Cause, a.Summary = CauseNoClaim, fmt.Sprintf("waits: ResourceClaim %s does not exist", of.name)
			a.Frees = append(a.Frees, "the claim: create it")
		case of.name == "" || of.claim == nil:
			refused := f.lastEvent(claimNotCreated)
			if quota := exceededQuota.FindStringSubmatch(refused); quota != nil {
				a.Cause, a.Summary = CauseQuota, Bounded(fmt.Sprintf("waits: quota %s has no room for %s: requested %s, used %s, limited %s",
					quota[1], of, quota[2], quota[3], quota[4]), mostText)
				a.Frees = append(a.Frees, "room in the quota: the claim is created once there is, without a change to the pod")
				// The answer has what these events say.
				a.Events = slices.DeleteFunc(a.Events, func(text string) bool { return strings.HasPrefix(text, claimNotCreated) })
			} else if refused != "" {
				a.Cause, a.Summary = CauseNoClaim, Bounded("waits: "+of.String()+" could not be created: "+refused, mostText)
			} else if deleted(of) {
				// resourceclaim.Controller of kube-controller-manager (handleClaim).
				a.Cause, a.Summary = CauseNoClaim, fmt.Sprintf("waits: claim %s was deleted: kube-controller-manager creates another of template %s", of.name, of.template)
			}
		}
		if a.Cause != "" {
			return true
		}
	}
	for _, n := range needs {
		for _, alternative := range n.alternatives() {
			if _, known := f.class(alternative.class); alternative.resource == "" && !known && !f.missing(KindClasses) {
				ours := f.ourClasses()
				a.Cause, a.Summary = CauseNoClass, fmt.Sprintf("waits: DeviceClass %s of %s does not exist%s", alternative.class, alternative.claim,
					didYouMean(alternative.class, slices.Values(ours)))
				exist := "no class of Tandem's exists"
				if len(ours) > 0 {
					exist = "Tandem's are " + list(ours, func(name string) string { return name })
				}
				a.Frees = append(a.Frees, "a claim with another class, or the class: "+exist)
				return true
			}
			if expression, err := match.broken(ctx, alternative.selectors); err != nil {
				a.Cause, a.Summary = CauseSelector, fmt.Sprintf("waits: a selector of class %s or of %s has a mistake: %s: %s",
					alternative.class, cmp.Or(alternative.claim, "the class"), Bounded(OneLine(expression), mostExpression), Bounded(OneLine(err.Error()), mostText))
				return true
			}
		}
	}
	return false
}

// ourClasses are the names of the classes that name the driver.
func (f Facts) ourClasses() (known []string) {
	for _, class := range f.Classes {
		if f.ours(class) && names(class, f.Driver) {
			known = append(known, class.Name)
		}
	}
	slices.Sort(known)
	return known
}
