// SPDX-License-Identifier: Apache-2.0

package monitoring

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/hack/binaries"
	"github.com/tandem-gpu/tandem/internal/version"
)

const (
	files     = "../../deployments/helm/tandem/files"
	reference = "../../docs/reference/metrics.md"
	page      = "../../docs/user/monitoring.md"
)

type rules struct {
	Groups []ruleGroup `json:"groups"`
}

type ruleGroup struct {
	Name  string `json:"name"`
	Rules []rule `json:"rules"`
}

type rule struct {
	Record      string            `json:"record,omitempty"`
	Alert       string            `json:"alert,omitempty"`
	Expr        string            `json:"expr"`
	For         string            `json:"for,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func alerts(t *testing.T) (all rules) {
	t.Helper()
	if err := yaml.UnmarshalStrict([]byte(read(t, filepath.Join(files, "alerts.yaml"))), &all); err != nil {
		t.Fatal(err)
	}
	return all
}

// promtool runs a command of promtool on rules and, if the command is test, on the tests of the alerts.
func promtool(t *testing.T, tool, command string, all rules) (output string, err error) {
	t.Helper()
	dir := t.TempDir()
	data, err := yaml.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"alerts.yaml": string(data), "tests.yaml": read(t, "testdata/alerts.yaml")} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), tool, command, "rules", map[string]string{"check": "alerts.yaml", "test": "tests.yaml"}[command])
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func ensurePromtool(t *testing.T) string {
	t.Helper()
	tool, err := binaries.Promtool().Ensure(t.Context(), os.Stdout)
	if err != nil {
		t.Fatal(err)
	}
	return tool
}

func TestAlerts(t *testing.T) {
	tool := ensurePromtool(t)
	all := alerts(t)
	for _, command := range []string{"check", "test"} {
		if out, err := promtool(t, tool, command, all); err != nil {
			t.Errorf("promtool %s rules: %v\n%s", command, err, out)
		}
	}
	sections := read(t, page)
	for _, r := range all.Groups[0].Rules {
		if !strings.Contains(sections, "\n### "+r.Alert+"\n") || r.Annotations["runbook_url"] != version.Page("dev", "docs/user/monitoring.md#"+strings.ToLower(r.Alert)) {
			t.Errorf("%s has no section of that name in docs/user/monitoring.md, or its runbook_url %q is not that section", r.Alert, r.Annotations["runbook_url"])
		}
		for _, key := range []string{"summary", "description"} {
			if r.Annotations[key] == "" {
				t.Errorf("%s has no %s", r.Alert, key)
			}
		}
	}
	// Some test of each alert fails if the alert never fires, and one if it always does.
	for _, expr := range []string{"vector(1) > 1", "vector(1)"} {
		mutated := rules{Groups: []ruleGroup{{Name: "mutated", Rules: slices.Clone(all.Groups[0].Rules)}}}
		for i := range mutated.Groups[0].Rules {
			mutated.Groups[0].Rules[i].Expr, mutated.Groups[0].Rules[i].For = expr, ""
		}
		failed, err := promtool(t, tool, "test", mutated)
		if err == nil {
			t.Fatalf("no test fails where each alert is %q", expr)
		}
		for _, r := range all.Groups[0].Rules {
			if !regexp.MustCompile(r.Alert + `\b`).MatchString(failed) {
				t.Errorf("no test fails where %s is %q", r.Alert, expr)
			}
		}
	}
}

type dashboard struct {
	Panels     []panel `json:"panels"`
	Templating struct {
		List []struct{ Name, Type string } `json:"list"`
	} `json:"templating"`
}

type panel struct {
	ID                       int
	Type, Title, Description string
	Datasource               struct{ UID string }
	GridPos                  struct{ X, Y, W, H int }
	Targets                  []struct {
		Expr       string
		Datasource struct{ UID string }
	}
}

// variables are values for those of the dashboard.
var variables = strings.NewReplacer("$__rate_interval", "2m", "$node", ".*", "$namespace", ".*")

func board(t *testing.T) (d dashboard) {
	t.Helper()
	if err := json.Unmarshal([]byte(read(t, filepath.Join(files, "dashboard.json"))), &d); err != nil {
		t.Fatal(err)
	}
	return d
}

func TestDashboard(t *testing.T) {
	tool := ensurePromtool(t)
	d := board(t)
	queries := rules{Groups: []ruleGroup{{Name: "dashboard"}}}
	ids, cells := map[int]bool{}, map[[2]int]string{}
	for _, p := range d.Panels {
		if ids[p.ID] {
			t.Errorf("two panels have the ID %d", p.ID)
		}
		ids[p.ID] = true
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				cell := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
				if other := cells[cell]; other != "" {
					t.Fatalf("panels %q and %q overlap", p.Title, other)
				}
				cells[cell] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if p.Description == "" || p.Datasource.UID != "${datasource}" || len(p.Targets) == 0 || p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("panel %q lacks a description, the variable data source or a query, or is too wide: %+v", p.Title, p)
		}
		for _, target := range p.Targets {
			if target.Datasource.UID != "${datasource}" {
				t.Errorf("a query of panel %q has the data source %q", p.Title, target.Datasource.UID)
			}
			name := fmt.Sprintf("query_%d", len(queries.Groups[0].Rules))
			queries.Groups[0].Rules = append(queries.Groups[0].Rules, rule{Record: name, Expr: variables.Replace(target.Expr)})
			if strings.Contains(variables.Replace(target.Expr), "$") {
				t.Errorf("panel %q uses an unknown variable: %s", p.Title, target.Expr)
			}
		}
	}
	if out, err := promtool(t, tool, "check", queries); err != nil {
		t.Errorf("promtool check: %v\n%s", err, out)
	}
	var names []string
	for _, v := range d.Templating.List {
		names = append(names, v.Name+" "+v.Type)
	}
	if want := []string{"datasource datasource", "node query", "namespace query"}; !slices.Equal(names, want) {
		t.Errorf("variables are %v, want %v", names, want)
	}
}

var metricName = regexp.MustCompile(`\btandem_[a-z_]+`)

// The reference has every metric, and every metric of the dashboard and the alerts is in the reference.
func TestMetricsReference(t *testing.T) {
	documented := map[string]bool{}
	for line := range strings.Lines(read(t, reference)) {
		if row, ok := strings.CutPrefix(line, "| `tandem_"); ok {
			names, _, _ := strings.Cut("`tandem_"+row, " |")
			for _, name := range metricName.FindAllString(names, -1) {
				documented[name] = true
			}
		}
	}
	made := map[string]bool{}
	for _, dir := range []string{"cmd", "pkg", "internal"} {
		err := filepath.WalkDir(filepath.Join("../..", dir), func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			for _, match := range regexp.MustCompile(`"(tandem_[a-z_]+)"`).FindAllStringSubmatch(read(t, path), -1) {
				made[match[1]] = true
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if missing := slices.DeleteFunc(slices.Sorted(maps.Keys(made)), func(name string) bool { return documented[name] }); len(missing) > 0 {
		t.Errorf("docs/reference/metrics.md does not explain %v", missing)
	}
	if gone := slices.DeleteFunc(slices.Sorted(maps.Keys(documented)), func(name string) bool { return made[name] }); len(gone) > 0 {
		t.Errorf("docs/reference/metrics.md explains %v, which no program has", gone)
	}
	used := read(t, filepath.Join(files, "alerts.yaml"))
	for _, p := range board(t).Panels {
		for _, target := range p.Targets {
			used += " " + target.Expr
		}
	}
	for _, name := range metricName.FindAllString(used, -1) {
		if !documented[name] && !documented[strings.TrimSuffix(name, "_bucket")] {
			t.Errorf("the dashboard or an alert uses %s, which docs/reference/metrics.md does not explain", name)
		}
	}
}
