// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"

	"github.com/tandem-gpu/tandem/hack/cluster"
)

// Mutation is a way to break the product while it is compiled: what the product is protected by is switched off in a copy of
// its sources, so that the product itself needs no switch.
type Mutation struct {
	Name string
	// What is switched off, in words.
	What string
	// Mix meets what is switched off often.
	Mix     Mix
	changes []change
}

// change replaces a method, or a function where receiver is empty. The body may call the old one by its name with "Honest" before it.
type change struct {
	dir, receiver, method string
	// body is the new one, between the braces; parameters keep their names.
	body string
}

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
	foreign := often([2]int{8, 12}, Fault{ForeignPlugin, "device-plugin", 1})
	owned := crossing
	owned.Workflows = true
	shared := crossing.WithSharing()
	return []Mutation{
		{
			Name: "cross-api", What: "the ledger does not compare claims with limits", Mix: crossing,
			changes: []change{{"pkg/ledger", "Ledger", "blockers", `
	var same []Hold
	for _, h := range l.Honestblockers(holder, ref, share, also...) {
		if h.Holder.Kind == holder.Kind {
			same = append(same, h)
		}
	}
	return same
`}},
		},
		{
			Name: "start-up", What: "the agent starts with an empty ledger", Mix: forgetful,
			changes: []change{
				{"pkg/ledger", "Ledger", "load", `
	err := l.Honestload(ctx)
	for _, h := range l.Holds() {
		err = errors.Join(err, l.Release(h))
	}
	return err
`},
				{"pkg/reconcile", "Reconciler", "Restore", `
	return nil
`},
				{"pkg/reconcile", "Reconciler", "Adopt", `
	return nil
`},
			},
		},
		{
			Name: "release", What: "a pod counts as gone while its control group is still there", Mix: trusting,
			changes: []change{{"pkg/podstate", "Cgroups", "Pod", `
	return CgroupAbsent, nil
`}},
		},
		{
			Name: "parts", What: "a GPU and its partitions do not exclude each other", Mix: partitioned,
			changes: []change{{"pkg/device", "Ref", "Overlaps", `
	return r == other
`}},
		},
		{
			Name: "shares", What: "the ledger does not count how much of a GPU's memory is given out", Mix: shared,
			changes: []change{{"pkg/ledger", "Ledger", "blockers", `
	var whole []Hold
	for _, h := range l.Honestblockers(holder, ref, share, also...) {
		if share.Whole() || h.Share.Whole() {
			whole = append(whole, h)
		}
	}
	return whole
`}},
		},
		{
			Name: "equal-shares", What: "the number of equal shares of a GPU is not counted", Mix: shared,
			changes: []change{{"pkg/device", "Share", "Fits", `
	return s.Bytes <= s.Of
`}},
		},
		{
			Name: "destroy", What: "a partition counts as destroyed while it is still there", Mix: Usual().WithMIG(),
			changes: []change{{"pkg/partition", "Maker", "Destroy", `
	return m.store.Drop(ref)
`}},
		},
		{
			Name: "reuse", What: "a device ID that kubelet gives again is reuse inside a pod, whichever pod asks, and kubelet gets no preferred allocation", Mix: listed,
			changes: []change{
				{"pkg/ledger", "Ledger", "reuses", `
	return podState != Orphaned && h.State != StateDraining && !h.Unreadable
`},
				{"pkg/legacy", "registrar", "options", `
	options := r.Honestoptions()
	options.GetPreferredAllocationAvailable = false
	return options
`},
			},
		},
		{
			Name: "foreign", What: "a foreign device plugin is not seen", Mix: foreign,
			changes: []change{{"pkg/legacy", "Plugin", "checkConflicting", `
	return nil, true
`}},
		},
		{
			Name: "unknown", What: "a pod's device ID that does not tell its GPU is ignored", Mix: foreign,
			changes: []change{{"pkg/reconcile", "Reconciler", "unknown", `
	return nil
`}},
		},
		{
			Name: "hung", What: "a pod that was deleted counts as gone after five seconds, whatever runs", Mix: often([2]int{4, 7}, Fault{HangPod, "process", 1}),
			changes: []change{{"pkg/podstate", "Pods", "PodState", `
	podState := p.HonestPodState(h)
	if podState == ledger.Orphaned && time.Since(h.Since) > 5*time.Second {
		return ledger.Gone
	}
	return podState
`}},
		},
		{
			Name: "overdue", What: "the GPU of a hung claim is offered to claims", Mix: Usual(),
			changes: []change{{"pkg/ledger", "Hold", "Overdue", `
	return false
`}},
		},
		{
			Name: "vanished", What: "a claim whose GPU was lost is retried for ever", Mix: Usual(),
			changes: []change{{"pkg/driver", "Driver", "recordUnusable", ``}},
		},
		{
			Name: "owners", What: "pods of every owner are evicted", Mix: owned,
			changes: []change{{"internal/owner", "", "WhyNot", `
	if metav1.GetControllerOfNoCopy(pod) != nil {
		return ""
	}
	return HonestWhyNot(pod)
`}},
		},
		{
			Name: "unusable", What: "devices stay healthy that no container can be given, or whose holders cannot be recorded",
			Mix: often([2]int{5, 8}, Fault{ReadOnly, cdiDir, 1}, Fault{ReadOnly, recordsOfAgent, 1}),
			changes: []change{
				{"pkg/cdi", "Specs", "Problem", `
	return nil
`},
				{"pkg/ledger", "Ledger", "Unwritable", `
	return nil
`},
			},
		},
	}
}

// overlay writes the changed sources below dir and answers the file for go build -overlay.
func (s Mutation) overlay(root, dir string) (string, error) {
	replace := map[string]string{}
	for i, c := range s.changes {
		path, text, err := c.apply(root)
		if err != nil {
			return "", fmt.Errorf("mutation %s: %w", s.Name, err)
		}
		changed := filepath.Join(dir, fmt.Sprintf("%s-%d.go", s.Name, i))
		if err := os.WriteFile(changed, []byte(text), 0o644); err != nil {
			return "", fmt.Errorf("mutation %s: %w", s.Name, err)
		}
		replace[path] = changed
	}
	data, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", fmt.Errorf("mutation %s: %w", s.Name, err)
	}
	file := filepath.Join(dir, s.Name+".json")
	return file, os.WriteFile(file, data, 0o644)
}

// apply finds the method and answers its file with the method replaced.
func (c change) apply(root string) (path, text string, err error) {
	files, err := filepath.Glob(filepath.Join(root, c.dir, "*.go"))
	if err != nil {
		return "", "", err
	}
	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		source, err := os.ReadFile(path)
		if err != nil {
			return "", "", err
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, path, source, 0)
		if err != nil {
			return "", "", err
		}
		for _, declared := range file.Decls {
			if method, ok := declared.(*ast.FuncDecl); ok && c.is(method) {
				return path, c.replace(string(source), set, method), nil
			}
		}
	}
	return "", "", fmt.Errorf("%s has no method %s.%s any more", c.dir, c.receiver, c.method)
}

func (c change) is(method *ast.FuncDecl) bool {
	if method.Name.Name != c.method || (method.Recv == nil) != (c.receiver == "") {
		return false
	}
	if method.Recv == nil {
		return true
	}
	receiver := method.Recv.List[0].Type
	if star, ok := receiver.(*ast.StarExpr); ok {
		receiver = star.X
	}
	name, ok := receiver.(*ast.Ident)
	return ok && name.Name == c.receiver
}

// replace renames the method and adds the new one, with the same head, at the end of the file.
func (c change) replace(source string, set *token.FileSet, method *ast.FuncDecl) string {
	at := func(p token.Pos) int { return set.Position(p).Offset }
	name := at(method.Name.Pos())
	head := source[at(method.Pos()):at(method.Body.Lbrace)]
	return source[:name] + "Honest" + source[name:] + "\n" + head + "{" + c.body + "}\n"
}
