// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"
)

// wantValues checks the values, and that the report has and lacks some text.
func wantValues(t *testing.T, result Result, values string, has, lacks []string) {
	t.Helper()
	var want map[string]any
	if err := yaml.Unmarshal([]byte(values), &want); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, plain(result.Values)); diff != "" {
		t.Errorf("values (-want +got):\n%s", diff)
	}
	text, err := result.YAML()
	if err != nil {
		t.Fatal(err)
	}
	comments, _, _ := strings.Cut(string(text), "\n"+"values")
	for _, part := range has {
		if !strings.Contains(comments, part) {
			t.Errorf("without %q:\n%s", part, text)
		}
	}
	for _, part := range lacks {
		if strings.Contains(comments, part) {
			t.Errorf("with %q:\n%s", part, text)
		}
	}
}

// Settings by environment variables and flags are those of the keys, in all that migrate compares.
func TestVariablesAreSettings(t *testing.T) {
	for _, test := range []struct {
		text, values string
		has, lacks   []string
	}{
		{
			text: "{toolkit: {enabled: true}, devicePlugin: {env: [{name: DEVICE_LIST_STRATEGY, value: volume-mounts}]}}",
			// mig.strategy is a default that nodes with partitions would miss.
			values: "{deviceListStrategy: volume-mounts, compatWithCPUManager: true, migStrategy: single}",
			lacks:  []string{"deviceListStrategy: it is not set"},
		},
		{
			text: "{toolkit: {}, mig: {strategy: mixed}, devicePlugin: {args: ['--device-list-strategy=envvar,cdi-cri', --unknown], env: [{name: MIG_STRATEGY, value: none}, " +
				"{name: PASS_DEVICE_SPECS, value: \"true\"}, {name: A, value: b}, {name: NVIDIA_DRIVER_ROOT, value: /opt/driver}]}}",
			values: "{deviceListStrategy: [envvar, cdi-cri], migStrategy: none, compatWithCPUManager: true, driverRoot: /opt/driver, extraEnv: [{name: A, value: b}]}",
			has:    []string{"migStrategy: the environment variable MIG_STRATEGY overrides it", "devicePlugin.args (--unknown): set these flags"},
			lacks:  []string{"deviceListStrategy: it is not set"},
		},
		{
			text:   "{toolkit: {}, mig: {}, devicePlugin: {env: [{name: DEVICE_LIST_STRATEGY, valueFrom: {configMapKeyRef: {name: a, key: b}}}]}}",
			values: "{migStrategy: single, extraEnv: [{name: DEVICE_LIST_STRATEGY, valueFrom: {configMapKeyRef: {name: a, key: b}}}]}",
			lacks:  []string{"deviceListStrategy: it is not set"},
		},
		{
			text:   "{kubeletPlugin: {containers: {gpus: {env: [{name: LOG_VERBOSITY, value: \"6\"}, {name: FEATURE_GATES, value: \"MPSSupport=true\"}, {name: NVIDIA_VISIBLE_DEVICES, value: void}]}}}}",
			values: `{logVerbosity: "6"}`, has: []string{"featureGates: the configuration turns"},
		},
		{
			text:   "{gfd: {enabled: true, env: [{name: GFD_NO_TIMESTAMP, value: \"true\"}, {name: GFD_SLEEP_INTERVAL, value: 5m}]}, driver: {}}",
			values: "{migStrategy: single, gfd: {noTimestamp: true, sleepInterval: 5m}}",
		},
		{
			text: `{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: plugin}, spec: {template: {spec: {nodeSelector: {gpu: here}, runtimeClassName: nvidia, tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}],
				containers: [{name: nvidia-device-plugin-ctr, args: ["--fail-on-init-error=false", "--config-file=/a"], env: [{name: MIG_STRATEGY, value: mixed}]}]}}}}`,
			values: "{migStrategy: mixed, runtimeClassName: nvidia, nodeSelector: {gpu: here}, tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]}",
			has:    []string{"args (--config-file=/a): set these flags"},
		},
		// A flag and its value are two words, unless the flag is boolean. Words that are not understood are lost.
		{
			text:   "{toolkit: {}, mig: {}, devicePlugin: {args: [--mig-strategy, mixed, --pass-device-specs, more, --unknown, value, --device-list-strategy]}}",
			values: "{migStrategy: mixed, compatWithCPUManager: true}", has: []string{"devicePlugin.args (more, --unknown, value, --device-list-strategy): set these flags"},
		},
		{
			text: `{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: plugin}, spec: {template: {spec: {containers: [{name: nvidia-device-plugin-ctr,
				command: [nvidia-device-plugin, "--mig-strategy=mixed", --nvidia-driver-root, /opt, --a], args: ["--config-file=/a"], envFrom: [{configMapRef: {name: more}}]}]}}}}`,
			values: "{migStrategy: mixed, driverRoot: /opt}", has: []string{"args (--a, --config-file=/a): set these flags", "envFrom: set its variables"},
		},
		{
			text: `{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: plugin}, spec: {template: {spec: {containers: [{name: nvidia-device-plugin-ctr,
				args: [nvidia-device-plugin, "--config-file=/a"]}]}}}}`,
			values: "{}", has: []string{"args (--config-file=/a): set these flags"},
		},
		{
			text: `{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: plugin}, spec: {template: {spec: {containers: [{name: nvidia-device-plugin-ctr,
				command: [sh, -c], args: [nvidia-device-plugin --mig-strategy=mixed]}]}}}}`,
			values: "{}", has: []string{"args (-c, nvidia-device-plugin --mig-strategy=mixed): set these flags"},
		},
		{
			text: `{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: driver}, spec: {template: {spec: {containers: [{name: gpus, command: [bash, -c],
				args: ["exec gpu-kubelet-plugin -v $(LOG_VERBOSITY)"], env: [{name: LOG_VERBOSITY, value: "6"}]}]}}}}`,
			values: `{logVerbosity: "6"}`, lacks: []string{"args ("},
		},
	} {
		wantValues(t, translated(t, "file", test.text), test.values, test.has, test.lacks)
	}
}

// comments are those of a values file, without the values.
func comments(t *testing.T, result Result) string {
	t.Helper()
	text, err := Result{Changes: result.Changes, Lost: result.Lost, Unneeded: result.Unneeded}.YAML()
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// NVIDIA's maintainers advise to hide GPUs from Kubernetes by this variable of the plugin (k8s-device-plugin#81, #197, #236). Some of its values
// hide none.
func TestVariableThatHidesGPUs(t *testing.T) {
	for variable, lost := range map[string]bool{
		`value: "0,1"`: true, `value: GPU-1`: true, `valueFrom: {configMapKeyRef: {name: a, key: b}}`: true,
		`value: all`: false, `value: void`: false, `value: none`: false, `value: ""`: false,
	} {
		for source, text := range map[string]string{
			"DaemonSet": `{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: plugin}, spec: {template: {spec: {containers: [
				{name: nvidia-device-plugin-ctr, env: [{name: NVIDIA_VISIBLE_DEVICES, ` + variable + `}, {name: MIG_STRATEGY, value: mixed}]}]}}}}`,
			"operator": `{toolkit: {}, devicePlugin: {env: [{name: NVIDIA_VISIBLE_DEVICES, ` + variable + `}]}}`,
			"driver":   `{kubeletPlugin: {containers: {gpus: {env: [{name: NVIDIA_VISIBLE_DEVICES, ` + variable + `}]}}}}`,
		} {
			result := translated(t, "file", text)
			got := strings.Contains(strings.Join(result.Lost, "\n"), "NVIDIA_VISIBLE_DEVICES: it hides GPUs from NVIDIA's software")
			if got != lost || result.Values["extraEnv"] != nil {
				t.Errorf("%s with %s:\n%s\nextraEnv %v", source, variable, comments(t, result), result.Values["extraEnv"])
			}
		}
	}
}

// Variables that charts of NVIDIA's have as keys, that the agent reads itself, or that are lost with another value than that of the charts.
func TestVariablesOfDaemonSets(t *testing.T) {
	const driver, devicePlugin = "gpus", "nvidia-device-plugin-ctr"
	for name, test := range map[string]struct {
		container, variables, values string
		has, lacks                   []string
	}{
		"kubelet's directory": {
			driver, "{name: KUBELET_PLUGINS_DIRECTORY_PATH, value: /var/lib/k0s/kubelet/plugins}", "{kubeletDir: /var/lib/k0s/kubelet}", nil, nil,
		},
		"kubelet's usual directory": {driver, "{name: KUBELET_PLUGINS_DIRECTORY_PATH, value: /var/lib/kubelet/plugins}", "{}", nil, nil},
		"prefix of annotations": {
			devicePlugin, "{name: DEVICE_LIST_STRATEGY, value: cdi-annotations}, {name: CDI_ANNOTATION_PREFIX, value: nvidia.cdi.k8s.io/}",
			"{deviceListStrategy: cdi-annotations, extraEnv: [{name: CDI_ANNOTATION_PREFIX, value: nvidia.cdi.k8s.io/}]}", nil, nil,
		},
		"shares":             {driver, `{name: CONSUMABLE_SHARES, value: memory}`, "{consumableShares: memory}", nil, nil},
		"directory for CDI":  {driver, "{name: CDI_ROOT, value: /etc/cdi}", "{}", []string{"CDI_ROOT: cdiDir of Tandem's chart"}, nil},
		"usual directory":    {driver, "{name: CDI_ROOT, value: /var/run/cdi}", "{}", nil, []string{"CDI_ROOT"}},
		"XIDs":               {driver, `{name: ADDITIONAL_XIDS_TO_IGNORE, value: "44"}`, `{extraEnv: [{name: ADDITIONAL_XIDS_TO_IGNORE, value: "44"}]}`, nil, nil},
		"of NVIDIA's images": {driver, "{name: IMAGE_PULL_POLICY, value: Always}", "{}", nil, []string{"IMAGE_PULL_POLICY"}},
	} {
		t.Run(name, func(t *testing.T) {
			wantValues(t, translated(t, "file", `{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: a}, spec: {template: {spec: {containers: [
				{name: `+test.container+`, args: [gpu-kubelet-plugin], env: [`+test.variables+`]}]}}}}`), test.values, test.has, test.lacks)
		})
	}
}

// NVIDIA's DaemonSets say where kubelet's directory is by what they mount.
func TestKubeletDirectoryOfDaemonSets(t *testing.T) {
	for name, test := range map[string]struct{ container, variables, mounts, values string }{
		"plugin":          {"nvidia-device-plugin-ctr", "", "/var/lib/k0s/kubelet/device-plugins", "{kubeletDir: /var/lib/k0s/kubelet}"},
		"with a slash":    {"nvidia-device-plugin-ctr", "", "/var/lib/k0s/kubelet/device-plugins/", "{kubeletDir: /var/lib/k0s/kubelet}"},
		"usual":           {"nvidia-device-plugin-ctr", "", "/var/lib/kubelet/device-plugins", "{}"},
		"others":          {"nvidia-device-plugin-ctr", "", "/var/lib/k0s/kubelet/pods", "{}"},
		"DRA driver":      {"gpus", "", "/var/lib/k0s/kubelet/plugins_registry", "{kubeletDir: /var/lib/k0s/kubelet}"},
		"variable counts": {"gpus", "{name: KUBELET_PLUGINS_DIRECTORY_PATH, value: /a/plugins/}", "/var/lib/kubelet/plugins_registry", "{kubeletDir: /a}"},
	} {
		t.Run(name, func(t *testing.T) {
			wantValues(t, translated(t, "file", `{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: a}, spec: {template: {spec: {
				containers: [{name: `+test.container+`, args: [gpu-kubelet-plugin], env: [`+test.variables+`]}],
				volumes: [{name: a, hostPath: {path: /sys}}, {name: b, hostPath: {path: `+test.mounts+`}}]}}}}`), test.values, nil, nil)
		})
	}
}

// GPU Operator's DaemonSet has PASS_DEVICE_SPECS=true unless a user set it: NVIDIA's other charts have false. With CDI nothing depends on it.
func TestDeviceSpecsOfOperator(t *testing.T) {
	config := func(strategy string) string {
		return "{mig: {strategy: none}, cdi: {enabled: true}, devicePlugin: {config: {create: true, name: a, default: a, data: " +
			"{a: 'version: v1\n\nflags: {plugin: {deviceListStrategy: [" + strategy + "]}}'}}}}"
	}
	const set = "{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: a, ownerReferences: [{apiVersion: a, kind: ClusterPolicy, name: a, uid: a, " +
		"controller: true}]}, spec: {template: {spec: {containers: [{name: nvidia-device-plugin, env: [{name: PASS_DEVICE_SPECS, value: 'true'}, " +
		"{name: DEVICE_LIST_STRATEGY, value: volume-mounts}]}]}}}}"
	for text, want := range map[string]any{
		"{cdi: {enabled: false}}": true,
		"{cdi: {enabled: false}, devicePlugin: {env: [{name: PASS_DEVICE_SPECS, value: 'false'}]}}":                                  false,
		"{cdi: {enabled: false}, devicePlugin: {env: [{name: PASS_DEVICE_SPECS, valueFrom: {configMapKeyRef: {name: a, key: b}}}]}}": nil,
		"{cdi: {enabled: true}}": nil,
		"{cdi: {enabled: false}, devicePlugin: {args: [--device-list-strategy=cdi-cri]}}": nil,
		"{toolkit: {}, devicePlugin: {args: ['--device-list-strategy=cdi-cri,envvar']}}":  true,
		config("volume-mounts"): true, config("cdi-cri"): nil, set: true,
		"{migStrategy: none, deviceListStrategy: envvar}":                                                               nil, // the plugin's chart
		"{cdi: {enabled: false}, devicePlugin: {enabled: false}}\n---\n{migStrategy: none, deviceListStrategy: envvar}": nil,
	} {
		if got := translated(t, "file", text).Values["compatWithCPUManager"]; got != want {
			t.Errorf("%s: compatWithCPUManager %v, want %v", text, got, want)
		}
	}
}

// The same variable in both of GPU Operator's lists is one variable of Tandem's agent. The device plugin's counts.
func TestVariableInBothListsOfOperator(t *testing.T) {
	for name, test := range map[string]struct {
		plugin, labels, values string
		differs                bool
	}{
		"equal":   {"{name: HTTPS_PROXY, value: s3cret}", "{name: HTTPS_PROXY, value: s3cret}", "extraEnv: [{name: HTTPS_PROXY, value: s3cret}]", false},
		"others":  {"{name: A, value: b}", "{name: C, value: d}", "extraEnv: [{name: A, value: b}, {name: C, value: d}]", false},
		"differ":  {"{name: HTTPS_PROXY, value: s3cret}", "{name: HTTPS_PROXY, value: s3cret2}", "extraEnv: [{name: HTTPS_PROXY, value: s3cret}]", true},
		"setting": {"{name: NVIDIA_DRIVER_ROOT, value: /a}", "{name: NVIDIA_DRIVER_ROOT, value: /b}", "driverRoot: /a", true},
		"own":     {"{name: NVIDIA_DRIVER_CAPABILITIES, value: a}", "{name: NVIDIA_DRIVER_CAPABILITIES, value: b}", "", false},
	} {
		t.Run(name, func(t *testing.T) {
			result := translated(t, "file", "{toolkit: {}, mig: {strategy: none}, devicePlugin: {env: ["+test.plugin+"]}, gfd: {env: ["+test.labels+"]}}")
			wantValues(t, result, "{migStrategy: none, "+test.values+"}", nil, nil)
			said := comments(t, result)
			if strings.Contains(said, "extraEnv: gfd.env has another value for ") != test.differs || strings.Contains(said, "s3cret") {
				t.Errorf("report:\n%s", said)
			}
		})
	}
}

// Flags that are set several times: NVIDIA's programs add up lists (cli.StringSliceFlag), and of others use the last one.
func TestRepeatedFlags(t *testing.T) {
	for name, test := range map[string]struct{ args, values string }{
		"list": {`"--device-list-strategy=envvar", --device-list-strategy, cdi-cri`, "{deviceListStrategy: [envvar, cdi-cri]}"},
		"lists of a list": {
			`"--device-list-strategy=envvar,cdi-cri", "--device-list-strategy=volume-mounts"`, "{deviceListStrategy: [envvar, cdi-cri, volume-mounts]}",
		},
		"text": {`"--mig-strategy=single", "--mig-strategy=mixed"`, "{migStrategy: mixed}"},
	} {
		t.Run(name, func(t *testing.T) {
			wantValues(t, translated(t, "file", `{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: plugin}, spec: {template: {spec: {containers: [
				{name: nvidia-device-plugin-ctr, args: [`+test.args+`]}]}}}}`), test.values, nil, nil)
		})
	}
}

// Values that have a meaning only with another one.
func TestDependentValues(t *testing.T) {
	for _, test := range []struct {
		text, values string
		has          []string
	}{
		{text: "{operator: {}, driver: {enabled: false}, hostPaths: {driverInstallDir: /run/nvidia/driver}}", values: "{migStrategy: single}"},
		{text: "{operator: {}, driver: {enabled: false}, hostPaths: {driverInstallDir: /home/kubernetes/bin/nvidia}}", values: "{migStrategy: single, driverRoot: /home/kubernetes/bin/nvidia}"},
		{text: "{operator: {}, hostPaths: {kubeletRootDir: /var/lib/k0s/kubelet}}", values: "{migStrategy: single, kubeletDir: /var/lib/k0s/kubelet}"},
		{
			text: "{mig: {}, devicePlugin: {config: {name: a, data: {b: 'version: v1'}}}}", values: "{migStrategy: single, config: {name: a, fallbackStrategies: [empty]}}",
			has: []string{"devicePlugin.config.data: the Operator uses it only with devicePlugin.config.create"},
		},
		{text: "{mig: {}, devicePlugin: {config: {default: a}}}", values: "{migStrategy: single}", has: []string{"config.default: it needs config.name or config.map"}},
		{text: "{migStrategy: none, config: {default: a, fallbackStrategies: [empty]}}", values: "{migStrategy: none}", has: []string{"config.default: it needs", "config.fallbackStrategies: it needs"}},
		{
			text: "{mig: {strategy: none}, cdi: {enabled: false}}", values: "{migStrategy: none, deviceListStrategy: envvar, compatWithCPUManager: true}",
			has: []string{"deviceListStrategy: envvar, because", "compatWithCPUManager: true, as in GPU Operator's DaemonSet"},
		},
		{
			text: "{mig: {strategy: none}, gpuCluster: {deployCR: true}}", values: "{migStrategy: none}",
			has: []string{"draDriver.computeDomains: Tandem has no ComputeDomains", "deviceClasses.create: set it to false while"},
		},
		{
			text: "{migStrategy: none, updateStrategy: {type: OnDelete, rollingUpdate: {maxUnavailable: 3}}}", values: "{migStrategy: none}",
			has: []string{"updateStrategy.type: agents are", "updateStrategy.rollingUpdate.maxUnavailable: it needs updateStrategy.type"},
		},
		{
			text:   "{migStrategy: none, updateStrategy: {type: RollingUpdate, rollingUpdate: {maxSurge: 1, maxUnavailable: 0}}}",
			values: "{migStrategy: none}",
			has:    []string{"lost:\n#   updateStrategy.rollingUpdate.maxSurge: ", "#   updateStrategy.rollingUpdate.maxUnavailable: an update"},
		},
		{
			text:   "{kubeletPlugin: {updateStrategy: {rollingUpdate: {maxUnavailable: 0%}}}}",
			values: "{}", has: []string{"kubeletPlugin.updateStrategy.rollingUpdate.maxUnavailable: an update"},
		},
		{
			text:   `{mig: {}, daemonsets: {rollingUpdate: {maxUnavailable: "0"}}}`,
			values: "{migStrategy: single}", has: []string{"updateStrategy.rollingUpdate.maxUnavailable: an update"},
		},
		{text: "{kubeletPlugin: {kubeletPluginsDirectoryPath: /var/lib/k0s/kubelet/plugins/}}", values: "{kubeletDir: /var/lib/k0s/kubelet}"},
		{text: "{kubeletPlugin: {kubeletPluginsDirectoryPath: /var/lib//kubelet/plugins/}}", values: "{}"},
		{
			text: "{mig: {}, daemonsets: {updateStrategy: OnDelete, rollingUpdate: {maxUnavailable: 3}}}", values: "{migStrategy: single}",
			has: []string{"updateStrategy.rollingUpdate.maxUnavailable: it needs updateStrategy.type"},
		},
	} {
		wantValues(t, translated(t, "file", test.text), test.values, test.has, nil)
	}
}

// Which chart a file is for.
func TestChartOfValues(t *testing.T) {
	for text, want := range map[string]Kind{
		"{devicePlugin: {config: {name: shares, default: four}}, mig: {strategy: single}}": Operator,
		"{mig: {strategy: single}}": Operator, "{daemonsets: {}}": Operator, "{devicePlugin: {config: {name: a}}}": Operator,
		"{migStrategy: single}": DevicePlugin, "{config: {name: a}}": DevicePlugin, "{tolerations: []}": DevicePlugin,
		"{resources: {gpus: {enabled: true}}}": DRADriver, "{kubeletPlugin: {}}": DRADriver, "{featureGates: {}}": DRADriver, "{resources: {limits: {cpu: 1}}}": DevicePlugin,
		"{webhook: {enabled: true}}": DRADriver, "{logVerbosity: 6}": DRADriver, "{failOnInitError: false, nvidiaDriverRoot: /}": DevicePlugin,
	} {
		sources, err := Read("", "file", []byte(text))
		if err != nil || sources[0].Kind != want {
			t.Errorf("%s: %v, %v; want %s", text, sources, err, want)
		}
	}
	for _, text := range []string{"{nvidiaDriverRoot: /a}", "{gfd: {enabled: false}}", "{gfd: {enabled: true}}", "{devicePlugin: {enabled: false}}", "{a: b}"} {
		if _, err := Read("", "file", []byte(text)); err == nil || !strings.Contains(err.Error(), "name the chart, as in -f ") {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// A release with the default affinity of NVIDIA's chart, whose labels go with the release; values in Git, with the term that migrate asks for;
// and affinity that the user wrote.
func TestAffinityWithLabelsOfTheRelease(t *testing.T) {
	known, err := theTable()
	if err != nil {
		t.Fatal(err)
	}
	path := "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"
	usual := func() map[string]any {
		values := map[string]any{}
		put(values, path, plain(known.charts[DevicePlugin].Keys[path][0]))
		return values
	}
	inGit := usual()
	for _, term := range at(inGit, path).([]any) {
		term := term.(map[string]any)
		term["matchExpressions"] = append(term["matchExpressions"].([]any), plain(exclusion))
	}
	of := func(name string, values map[string]any, version string) *corev1.Secret {
		return release(t, "nvidia", name, map[string]any{"name": name, "config": values, "chart": map[string]any{
			"metadata": map[string]any{"name": "nvidia-device-plugin", "version": version}, "values": usual(),
		}})
	}
	for _, values := range []map[string]any{{"gfd": map[string]any{"enabled": true}}, inGit} {
		sources, err := ReadReleases(t.Context(), fake.NewClientset(of("nvdp", values, "0.19.3"), podOn("a", "plugin", &plugin)), "")
		if err != nil {
			t.Fatal(err)
		}
		result, err := Translate(sources...)
		if err != nil || result.Values["affinity"] != nil {
			t.Errorf("affinity %v, %v", result.Values["affinity"], err)
		}
		if text := strings.Join(result.Changes, "\n"); !strings.Contains(text, "affinity: it has NVIDIA's default, or is not set") || strings.Contains(text, "has version") {
			t.Errorf("changes:\n%s", text)
		}
	}
	sources, err := ReadReleases(t.Context(), fake.NewClientset(of("nvdp", map[string]any{}, "0.99.0"), podOn("a", "plugin", &plugin)), "")
	if err != nil {
		t.Fatal(err)
	}
	result, err := Translate(sources...)
	if err != nil || !strings.Contains(strings.Join(result.Changes, "\n"), "release nvidia/nvdp: its chart has version 0.99.0") {
		t.Errorf("%v, %v", result.Changes, err)
	}
	own := translated(t, "file", "{migStrategy: null, nodeSelector: {feature.node.kubernetes.io/pci-10de.present: \"true\", nvidia.com/gpu.product: A100}}")
	for _, labels := range []string{"feature.node.kubernetes.io/*", "nvidia.com/*"} {
		if !strings.Contains(strings.Join(own.Changes, "\n"), "the agents run only on nodes with labels "+labels) {
			t.Errorf("changes:\n%s", strings.Join(own.Changes, "\n"))
		}
	}
}

// DaemonSets of the cluster: settings that no release has, and none of what GPU Operator always sets.
func TestReadDaemonSets(t *testing.T) {
	set := func(name string, of *metav1.OwnerReference, variables ...corev1.EnvVar) *appsv1.DaemonSet {
		d := plugin.DeepCopy()
		d.Name, d.UID = name, ""
		d.Spec.Template.Spec = corev1.PodSpec{Containers: []corev1.Container{{Name: "nvidia-device-plugin", Env: variables}}}
		if of != nil {
			d.OwnerReferences = []metav1.OwnerReference{*of}
		} else {
			d.Annotations = map[string]string{releaseAnnotation: "nvdp", releaseNamespaceAnnotation: d.Namespace}
		}
		return d
	}
	yes := true
	policy := &metav1.OwnerReference{Kind: "ClusterPolicy", Name: "cluster-policy", Controller: &yes}
	usual := []corev1.EnvVar{
		{Name: "PASS_DEVICE_SPECS", Value: "true"}, {Name: "DEVICE_LIST_STRATEGY", Value: "envvar"}, {Name: "NVIDIA_VISIBLE_DEVICES", Value: "all"}, {Name: "CDI_ENABLED", Value: "true"},
		{Name: "NVIDIA_CDI_HOOK_PATH", Value: "/usr/local/nvidia/toolkit/nvidia-cdi-hook"}, {Name: "MIG_STRATEGY", Value: "mixed"},
	}
	tenants := set("tenants", nil, corev1.EnvVar{Name: "MIG_STRATEGY", Value: "single"})
	tenants.Namespace = "aaa-tenant"
	client := fake.NewClientset(podOn("a", "plugin", &plugin), tenants, set("helm", nil, corev1.EnvVar{Name: "NVIDIA_DRIVER_ROOT", Value: "/opt/driver"}), set("operator", policy, usual...),
		set("with-cdi", policy, corev1.EnvVar{Name: "DEVICE_LIST_STRATEGY", Value: operatorsCDI}))
	sources, err := ReadDaemonSets(t.Context(), client, "", nil)
	if err != nil || len(sources) != 3 {
		t.Fatalf("%v, %v", sources, err)
	}
	result, err := Translate(sources...)
	if err != nil {
		t.Fatal(err)
	}
	wantValues(t, result, "{migStrategy: mixed, driverRoot: /opt/driver}", nil, []string{"deviceListStrategy: it is not set"})
}

// Flags in a ClusterPolicy are among the arguments of GPU Operator's DaemonSet, where no release has them. The Operator's script is no flag.
func TestArgumentsOfOperatorsDaemonSet(t *testing.T) {
	for name, test := range map[string]struct {
		words      []string
		values     string
		has, lacks []string
	}{
		"Operator's": {[]string{"/bin/entrypoint.sh"}, "{}", nil, []string{"devicePlugin.args"}},
		"user's": {
			[]string{"--mig-strategy=mixed", "--unknown"}, "{migStrategy: mixed}", []string{"devicePlugin.args (--unknown): set these flags"}, nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			set := pluginSet("", corev1.PodSpec{Containers: []corev1.Container{
				{Name: "nvidia-device-plugin", Command: []string{"/bin/sh", "-c"}, Args: test.words},
			}})
			set.OwnerReferences = []metav1.OwnerReference{{Kind: "ClusterPolicy", Name: "cluster-policy", Controller: ptr.To(true)}}
			wantValues(t, cluster(t, set), test.values, test.has, test.lacks)
		})
	}
}

// What a user set for a release counts, although it is NVIDIA's default: Tandem's is another.
func TestChosenDefaults(t *testing.T) {
	tolerations := []any{
		map[string]any{"key": "CriticalAddonsOnly", "operator": "Exists"}, map[string]any{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
	}
	for _, test := range []struct {
		chart, about string
		chosen       map[string]any
	}{
		{"nvidia-device-plugin", "gfd.enabled: ", map[string]any{"gfd": map[string]any{"enabled": false}}},
		{"nvidia-device-plugin", "tolerations: it has", map[string]any{"tolerations": tolerations}},
		{"dra-driver-nvidia-gpu", "webhook.enabled: ", map[string]any{"webhook": map[string]any{"enabled": false}}},
	} {
		result := translatedFor(t, test.chart, test.chosen, test.chosen)
		if diff := cmp.Diff(test.chosen, result.Values); diff != "" {
			t.Errorf("values (-chosen +got):\n%s", diff)
		}
		if text := strings.Join(result.Changes, "\n"); strings.Contains(text, test.about) {
			t.Errorf("changes:\n%s", text)
		}
		if left := translatedFor(t, test.chart, test.chosen, map[string]any{}); len(left.Values) > 0 || !strings.Contains(strings.Join(left.Changes, "\n"), test.about) {
			t.Errorf("defaults become %v\n%s", left.Values, strings.Join(left.Changes, "\n"))
		}
	}
}
