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

// change replaces a method. The body may call the old one by its name with "Honest" before it.
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
			Name: "destroy", What: "a partition counts as destroyed while it is still there", Mix: Usual().WithMIG(),
			changes: []change{{"pkg/partition", "Maker", "Destroy", `
	return m.store.Drop(ref)
`}},
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
	if method.Recv == nil || method.Name.Name != c.method {
		return false
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
