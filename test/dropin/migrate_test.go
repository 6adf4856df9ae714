// SPDX-License-Identifier: Apache-2.0

package dropin

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/cli/migrate"
	deployed "github.com/tandem-gpu/tandem/deployments/helm"
)

// manifests renders the whole chart.
func manifests(t *testing.T, file string) (string, error) {
	t.Helper()
	program, err := helm()
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(program, "template", "tandem", chart, "--namespace", "tandem-system", "--set", "image.repository=registry.example.com/tandem", "-f", file).CombinedOutput()
	return string(out), err
}

// ofMigrate returns a values file with what migrate makes of values of a chart.
func ofMigrate(t *testing.T, chart, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	sources, err := migrate.Read(chart, file, text)
	if err != nil {
		t.Fatal(err)
	}
	result, err := migrate.Translate(sources...)
	if err != nil {
		t.Fatal(err)
	}
	values, err := result.YAML()
	if err != nil {
		t.Fatal(err)
	}
	return valuesText(t, string(values))
}

// What migrate prints installs.
func TestMigratedValuesInstall(t *testing.T) {
	files, err := filepath.Glob("../../cli/migrate/testdata/*.golden")
	if err != nil || len(files) < 20 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		if out, err := manifests(t, file); err != nil {
			t.Errorf("%s: %v\n%.2000s", file, err, out)
		}
	}
	t.Logf("configurations=%d", len(files))
}

// The chart makes the same of NVIDIA's values and of what migrate makes of them, apart from NVIDIA's defaults. One of these is NVIDIA's with
// migrate only: the label of the time (docs/design/0017-node-labels.md).
func TestMigratedValuesDoTheSame(t *testing.T) {
	same := func(t *testing.T, chart, file string) {
		t.Helper()
		theirs, err := manifests(t, withoutDefaults(t, chart, file))
		if err != nil {
			t.Fatalf("%v\n%.2000s", err, theirs)
		}
		migrated := ofMigrate(t, chart, file)
		ours, err := manifests(t, migrated)
		if err != nil {
			t.Fatalf("%v\n%.2000s", err, ours)
		}
		if diff := cmp.Diff(theirs, ours); diff != "" {
			values, _ := os.ReadFile(file)
			after, _ := os.ReadFile(migrated)
			t.Fatalf("values\n%s\nbecome\n%s\nwhich differ (-theirs +migrated):\n%s", values, after, diff)
		}
	}
	t.Run("nvidia-device-plugin", func(t *testing.T) { same(t, "nvidia-device-plugin", theirValues(t)) })
	t.Run("dra-driver-nvidia-gpu", func(t *testing.T) { same(t, "dra-driver-nvidia-gpu", "testdata/dra-driver.values.yaml") })
	for kind, examples := range map[string]map[string][]string{"nvidia-device-plugin": pluginExamples, "dra-driver-nvidia-gpu": driverExamples} {
		t.Run("random "+kind, func(t *testing.T) {
			g := drawn(t)
			for range 12 {
				var values []string
				for _, path := range slices.Sorted(maps.Keys(examples)) {
					if texts := examples[path]; g.IntN(3) > 0 {
						values = append(values, nested(path, texts[g.IntN(len(texts))]))
					}
				}
				same(t, kind, valuesText(t, together(t, values)))
			}
		})
	}
}

// withoutDefaults are the values that are no default of NVIDIA's chart, with the default of it that Tandem's has otherwise, where the chart runs
// GPU Feature Discovery.
func withoutDefaults(t *testing.T, chart, file string) string {
	t.Helper()
	var values map[string]any
	text, err := os.ReadFile(file)
	if err == nil {
		err = yaml.Unmarshal(text, &values)
	}
	if err == nil {
		values, err = migrate.Decided(chart, values)
	}
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	if gfd, _ := values["gfd"].(map[string]any); gfd["enabled"] == true && gfd["noTimestamp"] == nil {
		gfd["noTimestamp"] = false
	}
	return valuesText(t, marshal(t, values))
}

func marshal(t *testing.T, values map[string]any) string {
	t.Helper()
	text, err := yaml.Marshal(values)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// nested returns a YAML map with one value at a path.
func nested(path, value string) string {
	keys := strings.Split(path, ".")
	return "{" + strings.Join(keys, ": {") + ": " + value + strings.Repeat("}", len(keys))
}

// together merges YAML maps.
func together(t *testing.T, texts []string) string {
	t.Helper()
	all := map[string]any{}
	for _, text := range texts {
		var one map[string]any
		if err := yaml.Unmarshal([]byte(text), &one); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		add(all, one)
	}
	return marshal(t, all)
}

func add(to, from map[string]any) {
	for key, value := range from {
		inside, isMap := value.(map[string]any)
		if below, wasMap := to[key].(map[string]any); isMap && wasMap {
			add(below, inside)
		} else {
			to[key] = value
		}
	}
}

// Values of the keys of NVIDIA's charts that Tandem's chart accepts.
var (
	pluginExamples = map[string][]string{
		"nvidiaDriverRoot": {"/", "/run/nvidia/driver", `""`, "null"}, "nvidiaDevRoot": {"/", "/dev/root", "null"},
		"cdi.nvidiaHookPath": {"/usr/bin/nvidia-ctk", "null"}, "cdi.featureFlags": {"enable-coherent-annotations", `""`, "[a, b]"},
		"updateStrategy.type": {"RollingUpdate"}, "updateStrategy.rollingUpdate.maxUnavailable": {"1", "10%", "50%"}, "updateStrategy.rollingUpdate.maxSurge": {"0"},
		"compatWithCPUManager": {"true", "false", "null"}, "failOnInitError": {"true", "false", "null"},
		"deviceListStrategy": {"envvar", "[envvar, cdi-cri]", "null", `""`}, "deviceIDStrategy": {"uuid", "index", "null"},
		"gdrcopyEnabled": {"true", "false"}, "gdsEnabled": {"true", "null"}, "mofedEnabled": {"true", "false"},
		"deviceDiscoveryStrategy": {"auto", "nvml", "null"}, "gfd.enabled": {"true", "false"}, "gfd.noTimestamp": {"true"}, "gfd.sleepInterval": {"30s"},
		"gfd.nameOverride": {"labels"}, "gfd.enableHostNetwork": {"true"}, "gfd.namespaceOverride": {"gpu"}, "gfd.securityContext": {"{privileged: true}"}, "allowDefaultNamespace": {"true", "false"},
		"selectorLabelsOverride": {"{}", "{a: b}"}, "podSecurityContext": {"{}", "{runAsUser: 0}"}, "securityContext": {"{privileged: true}"},
		"nfd.enableNodeFeatureApi": {"true", "false", "null"}, "nfd.enabled": {"true", "false"}, "nfd.image": {"{tag: a}"}, "nfd.imagePullSecrets": {"[]"},
		"nfd.nameOverride": {"node-feature-discovery"}, "nfd.fullnameOverride": {"a"}, "nfd.namespaceOverride": {"a"}, "nfd.featureGates": {"{}"},
		"nfd.priorityClassName": {"a"}, "nfd.master": {"{}", "{config: {extraLabelNs: [nvidia.com]}}"}, "nfd.worker": {"{tolerations: []}"},
		"nfd.topologyUpdater": {"{enable: true}"}, "nfd.gc": {"{enable: true}"}, "nfd.prometheus": {"{enable: true}"}, "nfd.tls": {"{enable: true}"},
		"mps.root": {"/run/mps"}, "mps.enableHostPID": {"true", "false"}, "mps.enableHostNetwork": {"true"},
		"devicePlugin.enabled": {"true", "false"}, "devicePlugin.enableHostNetwork": {"true", "null"},
		"config":         {"{}", "null", "{name: configs}", "{map: {a: \"version: v1\"}}", "{version: v1, flags: {migStrategy: mixed, plugin: {passDeviceSpecs: true}}}", "{name: configs, default: a, fallbackStrategies: [named, empty]}"},
		"migStrategy":    {"none", "single", "mixed", `""`, "null"},
		"podAnnotations": {"{}", "{a: b}"}, "nodeSelector": {"{}", "{gpu: here}"}, "affinity": {"{}", "{nodeAffinity: {}}"},
		"tolerations": {"[]", "[{operator: Exists}]", "[{key: a, operator: Exists}]"}, "priorityClassName": {"system-node-critical", "low", `""`},
		"runtimeClassName": {"null", "nvidia"}, "resources.requests": {"{}", "{cpu: 10m, memory: 64Mi}", "{cpu: 1}"}, "resources.limits": {"{memory: 1Gi}", "{cpu: 1}"},
		"imagePullSecrets": {"[]", "[{name: a}]"},
	}
	driverExamples = map[string][]string{
		"nvidiaDriverRoot": {"/", "/run/nvidia/driver", `""`}, "nvidiaCDIHookPath": {"/usr/bin/nvidia-cdi-hook", `""`},
		"kubeletPlugin.priorityClassName": {"system-node-critical", "low", `""`}, "kubeletPlugin.nodeSelector": {"{}", "{gpu: here}", "{kubernetes.io/os: linux}"},
		"kubeletPlugin.affinity": {"{}", "{nodeAffinity: {}}"}, "kubeletPlugin.tolerations": {"[]", "[{operator: Exists}]", "[{key: a, operator: Exists}]"},
		"kubeletPlugin.podAnnotations": {"{}", "{a: b}"}, "kubeletPlugin.containers.gpus.env": {"[]", "[{name: A, value: b}]"},
		"kubeletPlugin.updateStrategy.type": {"RollingUpdate"}, "kubeletPlugin.updateStrategy.rollingUpdate.maxUnavailable": {"100%", "10%", "2"},
		"kubeletPlugin.updateStrategy.rollingUpdate.maxSurge": {"0"},
		"kubeletPlugin.containers.gpus.resources.requests":    {"{}", "{cpu: 1}", "{cpu: 10m, memory: 64Mi}"}, "kubeletPlugin.containers.gpus.resources.limits": {"{cpu: 1}", "{memory: 256Mi}"},
		"kubeletPlugin.kubeletPluginsDirectoryPath": {"/var/lib/kubelet/plugins", "/var/lib/k0s/kubelet/plugins"},
		"gpuResourcesEnabledOverride":               {"true", "false"}, "resources.computeDomains": {"{enabled: true}", "{enabled: false}"}, "resources.gpus.enabled": {"true", "false"},
		"resourceApiVersion": {`""`, "resource.k8s.io/v1beta1"}, "featureGates": {"{}", "{MPSSupport: true}"}, "altProcDevices": {`""`, "/proc/x"}, "consumableShares": {`""`},
		"webhook.replicas": {"1"}, "webhook.servicePort": {"443"}, "webhook.containerPort": {"443"}, "webhook.priorityClassName": {"a"}, "webhook.strategy": {"{}"},
		"webhook.podAnnotations": {"{}"}, "webhook.podSecurityContext": {"{}"}, "webhook.nodeSelector": {"{}"}, "webhook.tolerations": {"[]"}, "webhook.affinity": {"{}"},
		"webhook.containers": {"{}"}, "webhook.serviceAccount": {"{}"}, "webhook.failurePolicy": {"Fail"}, "webhook.tls": {"{}"}, "webhook.enabled": {"true", "false"},
		"controller.leaderElection": {"{}"}, "controller.metrics": {"{enabled: true}"}, "controller.podAnnotations": {"{}"}, "controller.podSecurityContext": {"{}"},
		"controller.containers": {"{}"}, "controller.networkPolicy": {"{enabled: false}"}, "controller.replicas": {"1", "2", "0"}, "controller.priorityClassName": {"a", "system-cluster-critical"},
		"controller.nodeSelector": {"{}", "{a: b}"}, "controller.tolerations": {"[]", "[{key: a, operator: Exists}]"}, "controller.affinity": {"{}", "{nodeAffinity: {}}"},
		"kubeletPlugin.metrics": {"{}"}, "kubeletPlugin.podSecurityContext": {"{}"}, "kubeletPlugin.networkPolicy": {"{}"}, "kubeletPlugin.kubeletRegistrarDirectoryPath": {"/var/lib/kubelet/plugins_registry"},
		"kubeletPlugin.containers.init": {"{}"}, "kubeletPlugin.containers.computeDomains": {"{}"}, "kubeletPlugin.containers.gpus.securityContext": {"{}"},
		"kubeletPlugin.containers.gpus.healthcheckPort": {"51516"}, "logVerbosity": {`"4"`, "4", "2"},
	}
)

// Every key in the chart's list has an example, apart from those that are another release's own; and every key of NVIDIA's values is in
// the list.
func TestKeysOfMigrateAreComplete(t *testing.T) {
	var lists map[string][]struct {
		Key  string
		Keys []string
	}
	if err := yaml.Unmarshal(deployed.NVIDIAKeys, &lists); err != nil {
		t.Fatal(err)
	}
	rows := 0
	for list, keys := range lists {
		for _, row := range keys {
			paths := []string{row.Key}
			if row.Keys != nil {
				paths = nil
			}
			for _, key := range row.Keys {
				paths = append(paths, row.Key+"."+key)
			}
			for _, path := range paths {
				rows++
				if list != "own" && pluginExamples[path] == nil && driverExamples[path] == nil {
					t.Errorf("%s has no example", path)
				}
			}
		}
	}
	if rows < 80 {
		t.Errorf("only %d keys", rows)
	}
	for chart, file := range map[string]string{"nvidia-device-plugin": theirValues(t), "dra-driver-nvidia-gpu": "testdata/dra-driver.values.yaml"} {
		text, err := os.ReadFile(ofMigrate(t, chart, file))
		if err != nil {
			t.Fatal(err)
		}
		if unknown := regexp.MustCompile(`(?m)^#.*unknown key$`).FindAllString(string(text), -1); unknown != nil {
			t.Errorf("%s: %v", file, unknown)
		}
	}
}
