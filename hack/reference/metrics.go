// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"cmp"
	"fmt"
	"go/ast"
	"regexp"
	"slices"
	"strings"
)

// metric is one that a program registers.
type metric struct {
	name, kind, help, component string
	labels                      []string
}

var metricName = regexp.MustCompile(`^tandem_[a-z_]+[a-z]$`)

// metrics has a row for each metric.
func metrics(root string) (string, error) {
	files, err := sources(root)
	if err != nil {
		return "", err
	}
	all, err := registered(files)
	if err != nil {
		return "", err
	}
	var page strings.Builder
	page.WriteString(header("Metrics", "the calls that register them",
		"The agent of each node and the controller serve these metrics at `/metrics` on port 8080. They also serve the metrics of the Go runtime "+
			"and of the process, and the controller those of controller-runtime. [Monitoring](../user/monitoring.md) describes scraping, the "+
			"dashboard and the alerts. "+
			"A histogram has the series `_bucket`, `_sum` and `_count`."))
	for _, program := range []string{"agent", "controller"} {
		t := newTable("metric", "type", "labels", "meaning")
		for _, m := range all {
			if m.component == program {
				t.row(code(m.name), m.kind, code(strings.Join(m.labels, ",")), prose(m.help))
			}
		}
		fmt.Fprintf(&page, "\n## Of the %s\n\n%s", program, t)
	}
	return page.String(), nil
}

// registered finds the metrics by the calls that make them. It is an error if the code has the name of another one.
func registered(files []source) ([]metric, error) {
	var found []metric
	for _, f := range files {
		reader := &metricReader{source: f}
		for _, declaration := range f.file.Decls {
			reader.read(declaration, nil)
		}
		if reader.err != nil {
			return nil, reader.err
		}
		found = append(found, reader.found...)
	}
	for _, f := range files {
		var missing string
		literals(f.file, func(s string) {
			if metricName.MatchString(s) && !slices.ContainsFunc(found, func(m metric) bool { return m.name == s }) {
				missing = s
			}
		})
		if missing != "" {
			return nil, fmt.Errorf("%s has the metric %s, and no call that registers it is understood", f.path, missing)
		}
	}
	slices.SortFunc(found, func(a, b metric) int {
		return cmp.Or(cmp.Compare(a.component, b.component), cmp.Compare(a.name, b.name))
	})
	return found, nil
}

// maker matches the functions of client_golang, and of promauto, that make a metric.
var maker = regexp.MustCompile(`^New(Counter|Gauge|Histogram|Summary)(Vec|Func)?$`)

type metricReader struct {
	source
	found []metric
	err   error
}

// arguments are what the parameters of a closure are in one call of it.
type arguments map[string]ast.Expr

// read finds the metrics that are made within a node. A closure such as counter(name, help) is read once for each of its calls.
func (r *metricReader) read(in ast.Node, given arguments) {
	closures := map[string]*ast.FuncLit{}
	ast.Inspect(in, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.AssignStmt:
			for i, value := range n.Rhs {
				closure, is := value.(*ast.FuncLit)
				name, named := n.Lhs[i].(*ast.Ident)
				if is && named && closure.Type.Params.NumFields() > 0 {
					closures[name.Name] = closure
					return false
				}
			}
		case *ast.CallExpr:
			if name, is := n.Fun.(*ast.Ident); is && closures[name.Name] != nil {
				r.read(closures[name.Name].Body, bind(closures[name.Name], n))
				return true
			}
			if function, is := n.Fun.(*ast.SelectorExpr); is {
				r.call(function.Sel.Name, n.Args, given)
			}
		}
		return true
	})
}

func bind(closure *ast.FuncLit, call *ast.CallExpr) arguments {
	given, i := arguments{}, 0
	for _, field := range closure.Type.Params.List {
		for _, name := range field.Names {
			if i < len(call.Args) {
				given[name.Name] = call.Args[i]
			}
			i++
		}
	}
	return given
}

func (r *metricReader) call(function string, args []ast.Expr, given arguments) {
	if function == "NewDesc" && len(args) >= 3 { // only gauges are made in this way
		r.add(given, "gauge", args[0], args[1], args[2])
		return
	}
	made := maker.FindStringSubmatch(function)
	if made == nil || len(args) == 0 {
		return
	}
	options, is := args[0].(*ast.CompositeLit)
	if !is {
		return
	}
	fields := map[string]ast.Expr{}
	for _, element := range options.Elts {
		if pair, is := element.(*ast.KeyValueExpr); is {
			if key, is := pair.Key.(*ast.Ident); is {
				fields[key.Name] = pair.Value
			}
		}
	}
	var labels ast.Expr
	if made[2] == "Vec" && len(args) > 1 {
		labels = args[1]
	}
	r.add(given, strings.ToLower(made[1]), fields["Name"], fields["Help"], labels)
}

func (r *metricReader) add(given arguments, kind string, name, help, labels ast.Expr) {
	resolve := func(e ast.Expr) ast.Expr {
		if id, is := e.(*ast.Ident); is && given[id.Name] != nil {
			return given[id.Name]
		}
		return e
	}
	m := metric{kind: kind, component: component(r.pkg)}
	var hasName, hasHelp bool
	m.name, hasName = text(resolve(name))
	m.help, hasHelp = text(resolve(help))
	if list, is := labels.(*ast.CompositeLit); is {
		for _, e := range list.Elts {
			label, known := text(resolve(e))
			hasHelp = hasHelp && known
			m.labels = append(m.labels, label)
		}
	}
	if !hasName || !hasHelp || !metricName.MatchString(m.name) {
		r.err = fmt.Errorf("%s: metric %q: its name, help or labels are not literals", r.path, m.name)
		return
	}
	r.found = append(r.found, m)
}
