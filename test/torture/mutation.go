// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/test/mutation"
)

// Mutation switches off what the product is protected by, while it is compiled.
type Mutation struct {
	Name string
	// What is switched off, in words.
	What string
	// Mix meets what is switched off often.
	Mix     Mix
	changes []mutation.Change
}

// expectsNoPod keeps the reconciler's passes from taking the holds of pods that have none: what other protections leave out would be there again
// before a second owner comes.
var expectsNoPod = mutation.Replace("pkg/reconcile", "Reconciler", "expectLost", `
	return never, nil
`)

// Mutations are those that the oracle must find.
func Mutations() []Mutation {
	crossing := Usual()
	crossing.BurstEvery, crossing.Ambush, crossing.Demand = [2]int{3, 6}, 80, [2]int{1, 3}
	crossing.FaultEvery, crossing.Faults = [2]int{8, 14}, []Fault{{Kill, controllerName, 1}}
	crossing.Frozen = []Fault{{Freeze, controllerName, 3}, {Freeze, agentName, 2}, {Freeze, cluster.Kubelet, 1}}
	forgetful := Usual()
	forgetful.FaultEvery, forgetful.Force, forgetful.Linger, forgetful.Demand = [2]int{8, 16}, 5, 0, [2]int{8, 16}
	forgetful.Faults = []Fault{{Kill, agentName, 5}, {Upgrade, agentName, 2}}
	trusting := Usual()
	trusting.Force, trusting.Linger = 80, 90
	partitioned := crossing.WithMIG()
	// often meets one kind of fault again and again on a busy node, and little else.
	often := func(every [2]int, faults ...Fault) Mix {
		m := Usual()
		m.FaultEvery, m.Faults, m.FreezeEvery, m.Demand = every, faults, [2]int{30, 50}, [2]int{6, 14}
		return m
	}
	// listed often freezes the agent when a burst of pods starts: Allocate hangs while other pods end and their devices are listed.
	listed := often([2]int{3, 5}, Fault{ListPods, "pod-resources", 1})
	listed.Linger, listed.BurstEvery, listed.Ambush, listed.Demand = 0, [2]int{3, 6}, 80, [2]int{2, 5}
	listed.FreezeEvery, listed.Frozen = [2]int{4, 8}, []Fault{{Freeze, agentName, 1}}
	// foreign leaves free GPUs for the foreign plugin to give away.
	foreign := often([2]int{8, 12}, Fault{ForeignPlugin, "device-plugin", 1})
	foreign.Demand, foreign.BurstEvery = [2]int{3, 6}, [2]int{25, 40}
	owned := crossing
	owned.Workflows = true
	shared := crossing.WithSharing()
	return []Mutation{
		{
			Name: "cross-api", What: "the ledger does not compare claims with limits", Mix: crossing,
			changes: []mutation.Change{mutation.Replace("pkg/ledger", "Ledger", "blockers", `
	var same []Hold
	for _, h := range l.Honestblockers(holder, ref, share, also...) {
		if h.Holder.Kind == holder.Kind {
			same = append(same, h)
		}
	}
	return same
`)},
		},
		{
			Name: "start-up", What: "the agent starts with an empty ledger, and finds no holder later", Mix: forgetful,
			changes: []mutation.Change{
				mutation.Replace("pkg/ledger", "Ledger", "load", `
	err := l.Honestload(ctx)
	for _, h := range l.Holds() {
		err = errors.Join(err, l.Release(h))
	}
	return err
`),
				mutation.Replace("pkg/reconcile", "Reconciler", "Restore", `
	return nil
`),
				mutation.Replace("pkg/reconcile", "Reconciler", "Adopt", `
	return nil
`),
				expectsNoPod,
				mutation.Replace("pkg/reconcile", "Reconciler", "expectUsed", `
	return nil
`),
			},
		},
		{
			Name: "release", What: "a pod counts as gone while its control group is still there", Mix: trusting,
			changes: []mutation.Change{mutation.Replace("pkg/podstate", "Cgroups", "Pod", `
	return CgroupAbsent, nil
`)},
		},
		{
			Name: "parts", What: "a GPU and its partitions do not exclude each other", Mix: partitioned,
			changes: []mutation.Change{mutation.Replace("pkg/device", "Ref", "Overlaps", `
	return r == other
`)},
		},
		{
			Name: "shares", What: "the ledger does not count how much of a GPU's memory is given out", Mix: shared,
			changes: []mutation.Change{mutation.Replace("pkg/ledger", "Ledger", "blockers", `
	var whole []Hold
	for _, h := range l.Honestblockers(holder, ref, share, also...) {
		if share.Whole() || h.Share.Whole() {
			whole = append(whole, h)
		}
	}
	return whole
`)},
		},
		{
			Name: "equal-shares", What: "the number of equal shares of a GPU is not counted", Mix: shared,
			changes: []mutation.Change{mutation.Replace("pkg/device", "Share", "Fits", `
	return s.Bytes <= s.Of
`)},
		},
		{
			Name: "destroy", What: "a partition counts as destroyed while it is still there", Mix: Usual().WithMIG(),
			changes: []mutation.Change{mutation.Replace("pkg/partition", "Maker", "Destroy", `
	return m.store.Drop(ref)
`)},
		},
		{
			Name: "reuse", What: "a device ID that kubelet gives again is reuse inside a pod, whichever pod asks, and kubelet gets no preferred allocation", Mix: listed,
			changes: []mutation.Change{
				mutation.Replace("pkg/ledger", "Ledger", "reuses", `
	return podState != Orphaned && h.State != StateDraining && !h.Unreadable
`),
				mutation.Replace("pkg/legacy", "registrar", "options", `
	options := r.Honestoptions()
	options.GetPreferredAllocationAvailable = false
	return options
`),
			},
		},
		{
			Name: "foreign", What: "neither a foreign device plugin nor its pods are seen", Mix: foreign,
			changes: []mutation.Change{expectsNoPod, mutation.Replace("pkg/legacy", "Plugin", "checkConflicting", `
	return nil, true
`)},
		},
		{
			Name: "unknown", What: "a pod's device ID that does not tell its GPU is ignored", Mix: foreign,
			changes: []mutation.Change{mutation.Replace("pkg/reconcile", "Reconciler", "unknown", `
	return nil
`)},
		},
		{
			Name: "hung", What: "a pod that was deleted counts as gone after five seconds, whatever runs", Mix: often([2]int{4, 7}, Fault{HangPod, "process", 1}),
			changes: []mutation.Change{mutation.Replace("pkg/podstate", "Pods", "PodState", `
	podState := p.HonestPodState(h)
	if podState == ledger.Orphaned && time.Since(h.Since) > 5*time.Second {
		return ledger.Gone
	}
	return podState
`)},
		},
		{
			Name: "overdue", What: "the GPU of a hung claim is offered to claims", Mix: Usual(),
			changes: []mutation.Change{mutation.Replace("pkg/ledger", "Hold", "Overdue", `
	return false
`)},
		},
		{
			Name: "vanished", What: "a claim whose GPU was lost is retried for ever", Mix: Usual(),
			changes: []mutation.Change{mutation.Replace("pkg/driver", "Driver", "recordUnusable", ``)},
		},
		{
			Name: "owners", What: "pods of every owner are evicted", Mix: owned,
			changes: []mutation.Change{mutation.Replace("internal/owner", "", "WhyNot", `
	if metav1.GetControllerOfNoCopy(pod) != nil {
		return ""
	}
	return HonestWhyNot(pod)
`)},
		},
		{
			Name: "neighbours", What: "pods are evicted from all GPUs when one has a taint", Mix: Usual(),
			changes: []mutation.Change{
				mutation.Replace("pkg/controller", "", "endsPods", `
	return true
`),
				mutation.Replace("pkg/controller", "", "PlanRemoval", `
	r = HonestPlanRemoval(node, pod, limits, now)
	for _, d := range node.Status.Devices {
		for _, taint := range d.Taints {
			if r.Device == "" && taint.Effect == v1alpha1.TaintNoExecute {
				r.Device, r.Taint, r.Due = d.Name, taint, now
			}
		}
	}
	return r
`),
			},
		},
		{
			Name: "unusable", What: "devices stay healthy that no container can be given, or whose holders cannot be recorded",
			Mix: often([2]int{5, 8}, Fault{ReadOnly, cdiDir, 1}, Fault{ReadOnly, recordsOfAgent, 1}),
			changes: []mutation.Change{
				mutation.Replace("pkg/cdi", "Specs", "Problem", `
	return nil
`),
				mutation.Replace("pkg/ledger", "Ledger", "Unwritable", `
	return nil
`),
			},
		},
	}
}
