// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"

	"github.com/tandem-gpu/tandem/pkg/device"
)

const root = "../.."

// notEvents are names in the packages that report events, in the same form as reasons: kinds, and reasons of conditions and containers.
var notEvents = []string{
	"AllHealthy", "ContainerCreating", "DaemonSet", "DeviceClass", "DeviceTaintRule", "DeviceTaintRules", "GPUNode", "GPURepairNeeded", "GPUsHealthy", "MemoryLimit", "NoFault", "NodeFeature", "NotServed", "OutOf",
	"PodDisruptionBudget", "PodInitializing", "ResourceClaim", "ResourceClaimTemplate", "ResourceSlice", "SeveralFaults", "SharingApplied", "UnexpectedAdmissionError",
	"ValidatingWebhookConfiguration",
}

// TestEvents: the table has the events of the sources, and no others.
func TestEvents(t *testing.T) {
	files, err := sources(root)
	if err != nil {
		t.Fatal(err)
	}
	packages := regexp.MustCompile(`^(cmd/controller|pkg/(agent|wiring|controller|webhook|driver|gpunode|health|legacy|nodelabels|reconcile))$`)
	reason := regexp.MustCompile(`^[A-Z]+[a-z]*[A-Z]+[a-z]*[A-Za-z]*$`)
	used := map[string]string{}
	for _, f := range files {
		if packages.MatchString(f.pkg) {
			literals(f.file, func(s string) {
				if reason.MatchString(s) && strings.ToUpper(s) != s && !slices.Contains(notEvents, s) {
					used[s] = component(f.pkg)
				}
			})
		}
	}
	for section, listed := range events {
		for _, e := range listed {
			if by := used[e.reason]; by == "" {
				t.Errorf("%s is in the table, and not in the sources", e.reason)
			} else if !strings.Contains(section, by) {
				t.Errorf("%s is in the section %q, and the %s reports it", e.reason, section, by)
			}
			delete(used, e.reason)
		}
	}
	for name, by := range used {
		t.Errorf("the sources of the %s have %s: add it to events if it is an event, and to notEvents otherwise", by, name)
	}
}

// TestValuesHaveTheComments: each word of the comments of values.yaml is in the page.
func TestValuesHaveTheComments(t *testing.T) {
	page, err := values(root)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(root, chart, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		comment, is := strings.CutPrefix(strings.TrimSpace(line), "#")
		if m := option.FindStringSubmatch(comment); m != nil {
			comment = m[2]
		}
		if is && !strings.Contains(page, strings.ReplaceAll(prose(comment), "|", `\|`)) {
			t.Errorf("the page lacks the comment: %s", comment)
		}
	}
}

func TestMetrics(t *testing.T) {
	read := func(t *testing.T, text string) ([]metric, error) {
		t.Helper()
		file, err := parser.ParseFile(token.NewFileSet(), "metrics.go", "package p\n"+text, 0)
		if err != nil {
			t.Fatal(err)
		}
		return registered([]source{{"pkg/driver", "metrics.go", file}})
	}
	found, err := read(t, `
	var held = prometheus.NewDesc("tandem_held", "Held " + "devices.", []string{"kind"}, nil)
	func newMetrics(r prometheus.Registerer) {
		counter := func(name, help, label string) *prometheus.CounterVec {
			return promauto.With(r).NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label, "result"})
		}
		counter("tandem_a_total", "A.", "node")
		use(counter("tandem_b_total", "B.", "pod"))
		prometheus.NewHistogram(prometheus.HistogramOpts{Name: "tandem_c_seconds", Help: "C.", Buckets: buckets})
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "tandem_free", Help: "D."}, now)
	}`)
	if err != nil {
		t.Fatal(err)
	}
	want := []metric{
		{"tandem_a_total", "counter", "A.", "agent", []string{"node", "result"}},
		{"tandem_b_total", "counter", "B.", "agent", []string{"pod", "result"}},
		{"tandem_c_seconds", "histogram", "C.", "agent", nil},
		{"tandem_free", "gauge", "D.", "agent", nil},
		{"tandem_held", "gauge", "Held devices.", "agent", []string{"kind"}},
	}
	if diff := cmp.Diff(want, found, cmp.AllowUnexported(metric{})); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	for name, text := range map[string]string{
		"a variable as name": `func f(name string) { prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: "Help."}) }`,
		"a name elsewhere":   `var name = "tandem_hidden_total"`,
	} {
		if found, err := read(t, text); err == nil {
			t.Errorf("%s: no error, and %v", name, found)
		}
	}
}

// TestCountersEndInTotal: the suffix and the type of each metric agree, as Prometheus recommends.
func TestCountersEndInTotal(t *testing.T) {
	files, err := sources(root)
	if err != nil {
		t.Fatal(err)
	}
	all, err := registered(files)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		if strings.HasSuffix(m.name, "_total") != (m.kind == "counter") || !strings.HasSuffix(m.help, ".") {
			t.Errorf("%+v", m)
		}
	}
}

// TestMeaning: the description of a field begins without the field's name in Go, where the rest is a description by itself.
func TestMeaning(t *testing.T) {
	for text, want := range map[string]string{
		"WaitsFor is what the device waits for.": "What the device waits for.",
		"WaitsFor are pods.":                     "Pods.",
		"WaitsFor of the holder.":                "WaitsFor of the holder.",
		"Waits is another word.":                 "Waits is another word.",
		"":                                       "",
	} {
		if got := meaning("waitsFor", &schema{Description: text}); got != want {
			t.Errorf("%q is %q, want %q", text, got, want)
		}
	}
}

// TestAttributes: each example of a selector is true for a device that has the attribute, and the page has all that the driver can publish.
func TestAttributes(t *testing.T) {
	kinds, shared, err := published()
	if err != nil {
		t.Fatal(err)
	}
	attributes, capacities := properties(kinds, shared[device.ByCount])
	for _, p := range attributes {
		selects(t, p.selector, kinds[p.on[0]])
	}
	kinds["shared GPUs"] = shared[device.ByCount]
	for _, p := range capacities {
		selects(t, strings.ReplaceAll(p.selector, "<n>", "0"), kinds[p.on[0]])
	}
	selects(t, guard, kinds[wholeGPU])
	selects(t, "!"+guard, kinds[static])
	source, err := os.ReadFile(filepath.Join(root, "pkg", "driver", "attributes.go"))
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile(`\b[ac](?:\.(?:text|version|number|amount)\(|\[)"(\w+)"`).FindAllStringSubmatch(string(source), -1)
	if len(names) < 15 {
		t.Fatalf("the sources have %v", names)
	}
	for _, name := range names {
		if attributes[name[1]] == nil && capacities[name[1]] == nil {
			t.Errorf("the example of the page has no %s", name[1])
		}
	}
}

func selects(t *testing.T, expression string, d resourceapi.Device) {
	t.Helper()
	compiled := cel.GetCompiler(cel.Features{EnableConsumableCapacity: true}).CompileCELExpression(expression, cel.Options{})
	if compiled.Error != nil {
		t.Errorf("%s: %v", expression, compiled.Error)
		return
	}
	match, _, err := compiled.DeviceMatches(t.Context(), cel.Device{
		Driver: "gpu.nvidia.com", AllowMultipleAllocations: d.AllowMultipleAllocations, Attributes: d.Attributes, Capacity: d.Capacity,
	})
	if !match || err != nil {
		t.Errorf("%s does not select %s: %v", expression, d.Name, err)
	}
}

// TestReactions: the table of reactions in docs/user/health.md names events, metrics, fields, conditions and taints that exist.
func TestReactions(t *testing.T) {
	read := func(path string) string {
		data, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	_, table, found := strings.Cut(read("docs/user/health.md"), "## All reactions in one table")
	if table, _, _ = strings.Cut(table, "\n## "); !found {
		t.Fatal("there is no such table")
	}
	events, metrics, fields := read("docs/reference/events.md"), read("docs/reference/metrics.md"), read("docs/reference/gpunode.md")
	code := read("pkg/controller/condition.go") + read("pkg/device/health.go") + read("pkg/driver/offer.go")
	exists := map[int]func(string) bool{ // by column
		2: func(taint string) bool { return strings.Contains(code, `"`+taint+`"`) },
		5: func(event string) bool { return strings.Contains(events, "\n### "+event+"\n") },
		6: func(field string) bool { return strings.Contains(fields, "`status.devices[]."+field) },
		7: func(event string) bool { return strings.Contains(events, "\n### "+event+"\n") },
		8: func(metric string) bool { return strings.Contains(metrics, "`"+metric+"`") },
		9: func(condition string) bool { return strings.Contains(code, `"`+condition+`"`) },
	}
	checked := 0
	for line := range strings.Lines(table) {
		cells := strings.Split(line, "|")
		if len(cells) != 12 {
			continue
		}
		for column, is := range exists {
			for _, name := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cells[column], -1) {
				if checked++; !is(name[1]) {
					t.Errorf("%s of column %d does not exist", name[1], column)
				}
			}
		}
	}
	if checked < 30 {
		t.Errorf("the table has %d names", checked)
	}
}
