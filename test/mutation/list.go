// SPDX-License-Identifier: Apache-2.0

package mutation

// Mutation is one mistake that a user or an operator would meet.
type Mutation struct {
	Name string
	// What is the mistake, and Harm what follows from it.
	What, Harm string
	Changes    []Change
	// Tier is the first tier that detects it. By is the test that does, in a package such as "./pkg/ledger".
	Tier        Tier
	Package, By string
}

// Tier is a tier of the tests, named by its make target.
type Tier string

const (
	Test     Tier = "make test"
	TestLong Tier = "make test-long"
)

// List returns the mutations, one or two for a package of the product. A reader of the product chose them without its tests. Those of the
// torture are beside them: its oracle must detect them.
func List() []Mutation {
	return []Mutation{
		{
			Name: "half-reserved", Tier: Test, Package: "./pkg/ledger", By: "TestHalfOfAReservation",
			What: "the ledger keeps the first holds of a reservation whose last one cannot be written",
			Harm: "a claim that was refused keeps a GPU",
			Changes: []Change{Edit("pkg/ledger", "Ledger", "take",
				"l.undo(holds[:i])", "l.undo(holds[i:])")},
		},
		{
			Name: "share-without-memory", Tier: Test, Package: "./cli/explain", By: "TestExplainShares",
			What: "a holder's share without memory of its own counts as the whole device",
			Harm: "a shared GPU is shown as held, and a pod is told to wait",
			Changes: []Change{Edit("pkg/availability", "", "NewNode",
				"h.Shared || h.Memory > 0", "h.Memory > 0")},
		},
		{
			Name: "lesser-fault", Tier: Test, Package: "./pkg/device", By: "TestHealthOfPartition",
			What: "of several faults only the worst decides whether pods are evicted",
			Harm: "a second fault keeps pods on a GPU whose first fault evicts them",
			Changes: []Change{Edit("pkg/device", "", "Worst",
				"worst.XID, worst.Evict = xid.XID, evict", "worst.XID = xid.XID")},
		},
		{
			Name: "other-claims-of-a-call", Tier: Test, Package: "./pkg/driver", By: "TestPrepareAllClaimsOfACallOrNone",
			What: "after a failed Prepare only the claim that failed loses its reservation",
			Harm: "the pod's other claims keep GPUs that kubelet was not given",
			Changes: []Change{Edit("pkg/driver", "Driver", "PrepareResourceClaims",
				"if !ok && !p.keepOnError", "if p.err != nil && !p.keepOnError")},
		},
		{
			Name: "ended-registration", Tier: Test, Package: "./pkg/legacy", By: "TestAcknowledge",
			What: "the end of a registration does not end what kubelet was reported to list",
			Harm: "the scheduler sends pods to the node, and kubelet fails them",
			Changes: []Change{Edit("pkg/legacy", "registrar", "register",
				"defer r.config.Acknowledge(r.resource, nil, false)", "")},
		},
		{
			Name: "unlisted-once", Tier: Test, Package: "./pkg/reconcile", By: "TestHoldThatKubeletListsBetweenTwoChecks",
			What: "the two checks after which a pod's hold ends need not follow each other",
			Harm: "the GPU of a pod that kubelet is admitting is given away",
			Changes: []Change{Edit("pkg/reconcile", "Reconciler", "checkPodHold",
				"d.unlisted = 0\n", "")},
		},
		{
			Name: "unreadable-claims", Tier: Test, Package: "./pkg/podstate", By: "TestKubeletStillHasTheDevices",
			What: "an unreadable claim state of kubelet counts as one without the claim",
			Harm: "a GPU is given away while kubelet may start a pod with it",
			Changes: []Change{Edit("pkg/podstate", "Pods", "evidenceOf",
				"e.prepared = remembered || err != nil", "e.prepared = remembered || err != nil && false")},
		},
		{
			Name: "same-uuid", Tier: Test, Package: "./pkg/cdi", By: "TestRemadeWithOtherNodes",
			What: "the CDI device of a partition stays if one with the same UUID and other device nodes is made",
			Harm: "a container gets the device nodes of another partition",
			Changes: []Change{Edit("pkg/cdi", "Specs", "keep",
				" || f.of.Caps != p.Caps", "")},
		},
		{
			Name: "used-again", Tier: Test, Package: "./pkg/sharing", By: "TestMPS",
			What: "a device whose settings were to be reverted stays unused after it is prepared again",
			Harm: "the MPS daemon of a running claim ends with the claim's other device",
			Changes: []Change{Edit("pkg/sharing", "Manager", "setGroup",
				"delete(m.unused, key)", "_ = key")},
		},
		{
			Name: "retracted-late", Tier: Test, Package: "./pkg/mps", By: "TestADaemonWithAClientEnds",
			What: "a daemon ends before the file is removed by which it is ready",
			Harm: "a container is connected to a daemon that has ended, and CUDA fails",
			Changes: []Change{Edit("pkg/mps", "Daemon", "hold",
				"errors.Join(holder.Retract(), d.end(ctx, program, process))", "errors.Join(d.end(ctx, program, process), holder.Retract())")},
		},
		{
			Name: "other-profile", Tier: Test, Package: "./pkg/partition", By: "TestAnotherProfileAtThePlacement",
			What: "a partition of another profile at the same placement counts as the requested one",
			Harm: "a claim gets a partition without what its profile promises",
			Changes: []Change{Edit("pkg/partition", "Maker", "find",
				" || p.ProfileID != want.ProfileID", "")},
		},
		{
			Name: "negative-counter", Tier: Test, Package: "./pkg/mig", By: "TestForeignInstances",
			What: "more than a GPU has can be taken from its counters",
			Harm: "the scheduler ignores a pool with a negative counter, so the GPU's other partitions are not allocated",
			Changes: []Change{Edit("pkg/mig", "Geometry", "Left",
				"max(left[name]-n, 0)", "left[name] - n")},
		},
		{
			Name: "endless-resets", Tier: Test, Package: "./pkg/health", By: "TestResetWhenIdle",
			What: "a GPU whose fault does not end is reset for ever",
			Harm: "XIDs of the node's other GPUs are missed during each reset",
			Changes: []Change{Edit("pkg/health", "resets", "begin",
				" || before.reported >= mostResets", "")},
		},
		{
			Name: "reset-of-a-held-gpu", Tier: Test, Package: "./pkg/handover", By: "TestHolderBeforeAResetBegins",
			What: "a reset does not look again for a holder after it waited for the handover",
			Harm: "the first process of a new holder is ended by the reset",
			Changes: []Change{Edit("pkg/handover", "Cleaner", "ResetIdle",
				"defer unlock()\n\tif len(c.holders()[uuid]) > 0 {\n\t\treturn false, nil\n\t}", "defer unlock()")},
		},
		{
			Name: "unlimited-writes", Tier: Test, Package: "./pkg/gpunode", By: "TestPace",
			What: "a write of a status does not count after the one before it",
			Harm: "agents write as often as something changes, and the API server is overloaded",
			Changes: []Change{Edit("pkg/gpunode", "Pace", "Took",
				"latest(p.paid, now).Add(p.Interval)", "now.Add(p.Interval)")},
		},
		{
			Name: "forgotten-eviction", Tier: Test, Package: "./pkg/controller", By: "TestEvictionCountsBeforeAnError",
			What: "an eviction is not recorded if the next pod of the claim cannot be evicted",
			Harm: "pods of one owner are evicted in a loop",
			Changes: []Change{Edit("pkg/controller", "healer", "carryOut",
				"if err != nil {\n\t\t\treturn err", "if err != nil {\n\t\t\tevictedAny = false\n\t\t\treturn err")},
		},
		{
			Name: "untrusted-certificate", Tier: Test, Package: "./pkg/webhook", By: "TestNextWaitsUntilItIsTrusted",
			What: "the next certificate is served before the API servers trust its authority",
			Harm: "no object is validated until they do",
			Changes: []Change{Edit("pkg/webhook", "contents", "rotate",
				"trusts && now.Sub", "now.Sub")},
		},
		{
			Name: "xid-after-a-reset", Tier: Test, Package: "./pkg/nvml", By: "TestResetEndsXIDs",
			What: "a reset does not report that the GPU's XIDs have ended",
			Harm: "a GPU stays withdrawn after the reset if its driver has no recovery actions",
			Changes: []Change{Edit("pkg/nvml", "Node", "reset",
				"n.endXIDs(g, gpu.NoInstance)", "_ = g")},
		},
		{
			Name: "first-page", Tier: Test, Package: "./pkg/nodelabels", By: "TestRemoveFromAll",
			What: "labels are removed from the first page of the list of nodes only",
			Harm: "a node behind the first hundred keeps its labels after Tandem was uninstalled",
			Changes: []Change{Edit("pkg/nodelabels", "", "RemoveFromAll",
				"options.Continue = list.Continue; options.Continue == \"\"", "options.Continue = list.Continue; true")},
		},
		{
			Name: "all-but-one", Tier: Test, Package: "./cli/explain", By: "TestWhyOfClaims",
			What: "a request for all devices of a node counts as satisfied by those that are free",
			Harm: "kubectl gpu why says that a node has room for a pod that waits for one device",
			Changes: []Change{Edit("cli/explain", "stock", "satisfies",
				" && len(blocked) == 0", " && len(blocked) >= 0")},
		},
		{
			Name: "free-once", Tier: Test, Package: "./cli/drain", By: "TestRun",
			What: "the time that a GPU has been free goes on while it has a holder again",
			Harm: "kubectl gpu drain calls a GPU free while a claim for it may be on its way",
			Changes: []Change{Edit("cli/drain", "Drainer", "await",
				"case err != nil || left > 0:\n\t\t\tfreeSince = time.Time{}", "case err != nil || left > 0:")},
		},
		{
			Name: "added-lists", Tier: Test, Package: "./internal/config", By: "TestPrecedence",
			What: "a list in a flag is added to the one in the environment",
			Harm: "containers get devices in a way that the administrator has replaced",
			Changes: []Change{Edit("internal/config", "", "apply",
				"list.isSet = false", "_ = list")},
		},
		{
			Name: "empty-record", Tier: Test, Package: "./internal/records", By: "TestFullDisk",
			What: "the file of a record stays although its contents could not be written",
			Harm: "the next agent takes a claim that was refused for a holder",
			Changes: []Change{Edit("internal/records", "Store", "put",
				"err = errors.Join(err, s.remove(s.options.Name(key)))", "return err")},
		},
		{
			Name: "lost-claim-state", Tier: Test, Package: "./pkg/agent", By: "TestUnreadableClaimStateWithoutADriver",
			What: "an unreadable claim state of kubelet counts as one without claims",
			Harm: "on a node that lost its driver, pods with claims cannot end",
			Changes: []Change{Edit("pkg/agent", "Agent", "holdsAny",
				"claims, err := podstate.ReadClaimState(a.config.KubeletDir, a.config.DriverName)\n\treturn err != nil || len(claims) > 0",
				"claims, _ := podstate.ReadClaimState(a.config.KubeletDir, a.config.DriverName)\n\treturn len(claims) > 0")},
		},
		{
			Name: "claims-without-health", Tier: Test, Package: "./test/simulation", By: "TestSimulation",
			What: "the DRA front-end has the inventory without the decided health",
			Harm: "a GPU with a fault is published, and a claim gets it",
			Changes: []Change{Edit("pkg/wiring", "Parts", "claimsConfig",
				"Inventory: p.Views.Offered", "Inventory: p.Views.Configured")},
		},
		{
			Name: "limits-without-health", Tier: Test, Package: "./test/simulation", By: "TestSimulation",
			What: "the device plugin has the inventory without the decided health",
			Harm: "a GPU with a fault is listed as healthy, and a pod gets it",
			Changes: []Change{Edit("pkg/wiring", "Parts", "limitsConfig",
				"Inventory: p.offeredToLimits(c)", "Inventory: p.Views.Configured")},
		},
		{
			Name: "no-hand-over", Tier: Test, Package: "./pkg/wiring", By: "TestClaimsAreHandedOver",
			What: "the driver does not hand GPUs over to claims",
			Harm: "a claim starts with the clocks and processes of the holder before",
			Changes: []Change{Edit("pkg/wiring", "Parts", "claimsConfig",
				"HandOver: p.Handover.Ensure", "HandOver: p.Partitions.EnsureWhole")},
		},
		{
			Name: "no-adoption", Tier: Test, Package: "./pkg/agent", By: "TestPodsAdmittedBeforeTheStart",
			What: "the agent does not adopt pods that kubelet had admitted before it started",
			Harm: "a GPU that another device plugin gave away is given to a second pod",
			Changes: []Change{Edit("pkg/wiring", "Parts", "Adopt",
				"err := p.Reconciler.Adopt(ctx)", "var err error")},
		},
		{
			Name: "partition-outlives-its-hold", Tier: Test, Package: "./pkg/wiring", By: "TestPartitionsEndBeforeTheirHolds",
			What: "the ledger does not know that a hold has a partition",
			Harm: "the hold ends for another holder, who gets a GPU in MIG mode",
			Changes: []Change{Edit("pkg/wiring", "Parts", "cleanupPending",
				"p.records.Partitions.Made(h.Device) || ", "")},
		},
		{
			Name: "second-snapshot", Tier: Test, Package: "./pkg/driver", By: "TestOneSnapshotOfACall",
			What: "each claim of a call is planned by a snapshot of its own",
			Harm: "a change of the inventory between two claims fails a pod that kubelet could have started",
			Changes: []Change{Edit("pkg/driver", "Driver", "planAll",
				"d.plan(ctx, claim, inv, podsFirst)", "d.plan(ctx, claim, d.Inventory.Inventory(), podsFirst)")},
		},
	}
}
