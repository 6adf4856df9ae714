// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/internal/golden"
)

var charts = []string{"nvidia-device-plugin", "dra-driver-nvidia-gpu", "gpu-operator"}

// translatedFor translates values of a chart; chosen are those of them that the user of a release set.
func translatedFor(t *testing.T, chart string, values map[string]any, chosen ...map[string]any) Result {
	t.Helper()
	text, err := yaml.Marshal(values)
	if err != nil {
		t.Fatal(err)
	}
	sources, err := Read(chart, "file", text)
	if err != nil {
		t.Fatal(err)
	}
	for _, of := range chosen {
		if sources[0].Kind != Operator {
			sources[0].Chosen = of
		}
	}
	result, err := Translate(sources...)
	if err != nil {
		t.Fatal(err)
	}
	return result
}

// examples are values for keys that cannot have any text. The others that they need are beside them.
var examples = map[string]string{
	"config.name": "{config: {name: a}}", "config.map": "{config: {map: {a: 'version: v1'}}}", "config.default": "{config: {name: a, default: b}}",
	"config.fallbackStrategies": "{config: {name: a, fallbackStrategies: [empty]}}", "resources": "{resources: {limits: {cpu: 1}}}",
	"affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms": "{affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: " +
		"{nodeSelectorTerms: [{matchExpressions: [{key: a, operator: Exists}]}]}}}}",
	"kubeletPlugin.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms": "{kubeletPlugin: {affinity: {nodeAffinity: " +
		"{requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: a, operator: Exists}]}]}}}}}",
	"kubeletPlugin.nodeSelector":                "{kubeletPlugin: {nodeSelector: {a: b}}}",
	"kubeletPlugin.containers.gpus.resources":   "{kubeletPlugin: {containers: {gpus: {resources: {limits: {cpu: 1}}}}}}",
	"kubeletPlugin.containers.gpus.env":         "{kubeletPlugin: {containers: {gpus: {env: [{name: A, value: b}]}}}}",
	"kubeletPlugin.kubeletPluginsDirectoryPath": "{kubeletPlugin: {kubeletPluginsDirectoryPath: /kubelet/plugins}}",
	"devicePlugin.env":                          "{devicePlugin: {env: [{name: A, value: b}]}}", "devicePlugin.args": "{devicePlugin: {args: [--mig-strategy=mixed]}}",
	"devicePlugin.config.name": "{devicePlugin: {config: {name: a}}}", "devicePlugin.config.default": "{devicePlugin: {config: {name: a, default: b}}}",
	"devicePlugin.config.data":   "{devicePlugin: {config: {create: true, name: a, data: {a: 'version: v1'}}}}",
	"devicePlugin.config.create": "{devicePlugin: {config: {create: true}}}", "devicePlugin.resources": "{devicePlugin: {resources: {limits: {cpu: 1}}}}",
	"gfd.env": "{gfd: {env: [{name: GFD_NO_TIMESTAMP, value: 'true'}]}}",
}

// without are the values that an example adds its key to.
func without(t *testing.T, key string, values map[string]any) map[string]any {
	t.Helper()
	if key != "config.default" && key != "devicePlugin.config.default" && key != "config.fallbackStrategies" {
		return map[string]any{}
	}
	section := strings.TrimSuffix(strings.TrimSuffix(key, ".default"), ".fallbackStrategies")
	less := map[string]any{}
	put(less, section+".name", at(values, section+".name"))
	return less
}

// outcome says what becomes of a key: carried, lost or without meaning, and where to, or why. It is the worst of both values of a boolean.
func outcome(t *testing.T, chart, key string) (what, where string) {
	t.Helper()
	values := map[string]any{}
	put(values, key, "changed")
	if text := examples[key]; text != "" {
		clear(values)
		if err := yaml.Unmarshal([]byte(text), &values); err != nil || at(values, key) == nil {
			t.Fatalf("%s: the example %s, %v", key, text, err)
		}
	}
	tries := []any{at(values, key)}
	if strings.HasSuffix(key, ".enabled") {
		tries = []any{false, true}
	}
	found := map[string][]string{}
	for _, value := range tries {
		put(values, key, value)
		what, where := outcomeOf(t, chart, key, values)
		found[what] = append(found[what], where)
	}
	for _, what := range []string{"lost", "carried", "without meaning"} {
		if len(found[what]) > 0 {
			return what, strings.Join(slices.Compact(found[what]), ", ")
		}
	}
	t.Errorf("%s: %s is not carried, and nothing says that it is lost or without meaning", chart, key)
	return "", ""
}

// outcomeOf is outcome for values that a user set. It is empty for what both charts do by default.
func outcomeOf(t *testing.T, chart, key string, values map[string]any) (what, where string) {
	t.Helper()
	before, after := translatedFor(t, chart, without(t, key, values)), translatedFor(t, chart, values, values)
	added := func(is, was []string) string {
		for _, line := range is {
			if !slices.Contains(was, line) {
				return line
			}
		}
		return ""
	}
	if strings.HasPrefix(key, "resources.computeDomains.") {
		before.Lost = nil // the default is lost
	}
	lost, unneeded := added(after.Lost, before.Lost), added(after.Unneeded, before.Unneeded)
	switch {
	case strings.HasSuffix(lost+unneeded, "unknown key"):
		t.Errorf("%s: %s is unknown", chart, key)
	case !reflect.DeepEqual(before.Values, after.Values):
		var to []string
		for _, path := range leaves(after.Values, "") {
			if path != "config.fallbackStrategies" && !reflect.DeepEqual(at(after.Values, path), at(before.Values, path)) || path == key {
				to = append(to, "`"+strings.NewReplacer(".limits.cpu", "", "nodeSelector.a", "nodeSelector", "config.map.a", "config.map").Replace(path)+"`")
			}
		}
		return "carried", strings.Join(to, ", ")
	case lost != "":
		_, why, _ := strings.Cut(lost, ": ")
		return "lost", why
	case unneeded != "":
		_, why, _ := strings.Cut(unneeded, ": ")
		return "without meaning", why
	}
	return "", ""
}

// TestKeysOfTheCharts: each key of the values files of NVIDIA's charts is carried, or listed as lost or without meaning. To compare the keys and
// the defaults with the charts, name a directory with CHART.yaml, the values files, in NVIDIA_CHARTS; -update rewrites the lists of keys.
func TestKeysOfTheCharts(t *testing.T) {
	for _, chart := range charts {
		file := filepath.Join("testdata/keys", chart+".txt")
		if dir := os.Getenv("NVIDIA_CHARTS"); dir != "" {
			text, err := os.ReadFile(filepath.Join(dir, chart+".yaml"))
			if err != nil {
				t.Fatal(err)
			}
			values, err := parse(text)
			if err != nil {
				t.Fatal(err)
			}
			golden.Compare(t, file, []byte(strings.Join(leaves(values, ""), "\n")+"\n"))
			onlyDefaults(t, chart, values)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		keys := strings.Fields(string(text))
		if len(keys) < 50 {
			t.Errorf("%s: %d keys", chart, len(keys))
		}
		count := map[string]int{}
		for _, key := range keys {
			what, _ := outcome(t, chart, key)
			count[what]++
		}
		t.Logf("%s: %v", chart, count)
	}
}

// onlyDefaults checks that values with nothing but defaults of the chart become what no values become.
func onlyDefaults(t *testing.T, chart string, values map[string]any) {
	t.Helper()
	before, after := translatedFor(t, chart, map[string]any{}), translatedFor(t, chart, values)
	// Images have other versions in each release of GPU Operator, and the Operator uses its other keys.
	after.Unneeded = slices.DeleteFunc(after.Unneeded, func(line string) bool {
		return strings.Contains(line, "(version): ") || strings.HasPrefix(line, "image: ") || strings.HasSuffix(line, ": GPU Operator still uses this")
	})
	after.Changes = slices.DeleteFunc(after.Changes, func(line string) bool { return strings.HasPrefix(line, "deviceListStrategy: ") })
	before.Changes = slices.DeleteFunc(before.Changes, func(line string) bool { return strings.HasPrefix(line, "deviceListStrategy: ") })
	if diff := cmp.Diff(before, after, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("%s: defaults become (-without +with):\n%s", chart, diff)
	}
}

// A default of NVIDIA's charts is no decision of a user, in any version of the chart. Set beside another value, it changes nothing either.
func TestDefaultsAreNoDecisions(t *testing.T) {
	known, err := theTable()
	if err != nil {
		t.Fatal(err)
	}
	for _, chart := range charts {
		for version := range 2 {
			values := map[string]any{}
			for _, key := range slices.Sorted(maps.Keys(known.charts[chartKinds[chart]].Keys)) {
				if usual := known.charts[chartKinds[chart]].Keys[key]; len(usual) > 0 {
					put(values, key, usual[min(version, len(usual)-1)])
				}
			}
			onlyDefaults(t, chart, values)
		}
	}
	if got := translatedFor(t, "nvidia-device-plugin", map[string]any{"tolerations": []any{map[string]any{"key": "a"}}, "gfd": map[string]any{"enabled": false}}).Values; !reflect.DeepEqual(
		got, map[string]any{"tolerations": []any{map[string]any{"key": "a"}}}) {
		t.Errorf("a list of tolerations and a default: %v", got)
	}
}

// mostSet are the keys that users set most: from the charts' documentation, issues, and values files in public repositories.
var mostSet = map[string][]string{
	"nvidia-device-plugin": {
		"affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms", "compatWithCPUManager", "config.default", "config.map", "config.name",
		"deviceIDStrategy", "deviceListStrategy", "failOnInitError", "gdsEnabled", "gfd.enabled", "image.repository", "image.tag", "imagePullSecrets", "migStrategy",
		"nodeSelector", "nvidiaDriverRoot", "priorityClassName", "resources", "runtimeClassName", "tolerations",
	},
	"dra-driver-nvidia-gpu": {
		"controller.affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution", "controller.priorityClassName", "controller.tolerations", "featureGates",
		"gpuResourcesEnabledOverride", "image.repository", "image.tag", "imagePullSecrets",
		"kubeletPlugin.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms", "kubeletPlugin.containers.gpus.env",
		"kubeletPlugin.containers.gpus.resources", "kubeletPlugin.kubeletPluginsDirectoryPath", "kubeletPlugin.nodeSelector", "kubeletPlugin.priorityClassName",
		"kubeletPlugin.tolerations", "logVerbosity", "nvidiaDriverRoot", "resources.computeDomains.enabled", "resources.gpus.enabled", "webhook.enabled",
	},
	"gpu-operator": {
		"cdi.enabled", "daemonsets.tolerations", "dcgmExporter.enabled", "dcgmExporter.serviceMonitor.enabled", "devicePlugin.config.default", "devicePlugin.config.name",
		"devicePlugin.enabled", "devicePlugin.env", "driver.enabled", "driver.rdma.enabled", "driver.version", "gdrcopy.enabled", "gds.enabled", "gfd.enabled",
		"hostPaths.driverInstallDir", "mig.strategy", "migManager.config.name", "nfd.enabled", "toolkit.enabled", "toolkit.env",
	},
}

// TestKeysPage: docs/user/migrate-keys.md says what becomes of the keys that users set most.
func TestKeysPage(t *testing.T) {
	var page strings.Builder
	page.WriteString(`# Keys of NVIDIA's charts

What ` + "`kubectl gpu migrate`" + ` makes of the 20 keys that users set most in each of NVIDIA's charts ([Move from NVIDIA's
drivers](migrate.md)). Carried: the key keeps its name or becomes another one. Lost: Tandem has nothing like it.
Without meaning: Tandem does not need it. ` + "`migrate`" + ` drops NVIDIA's defaults, unless you set them for a release. It
prints the same for each key in your files. A test writes this page.
`)
	for _, chart := range charts {
		fmt.Fprintf(&page, "\n## %s\n\n| key | | in Tandem's chart, or why |\n|---|---|---|\n", chart)
		if !slices.IsSorted(mostSet[chart]) || len(mostSet[chart]) != 20 {
			t.Errorf("%s: %d keys", chart, len(mostSet[chart]))
		}
		for _, key := range mostSet[chart] {
			what, where := outcome(t, chart, key)
			fmt.Fprintf(&page, "| `%s` | %s | %s |\n", key, what, where)
		}
	}
	golden.Compare(t, "../../docs/user/migrate-keys.md", []byte(page.String()))
}
