// SPDX-License-Identifier: Apache-2.0

package dropin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/hack/binaries"
	"github.com/tandem-gpu/tandem/internal/config"
)

const chart = "../../deployments/helm/tandem"

// helm is the program's path.
var helm = sync.OnceValues(func() (string, error) {
	return binaries.Helm().Ensure(context.Background(), os.Stderr)
})

// render renders a template of the chart.
func render(t *testing.T, template string, args ...string) (string, error) {
	t.Helper()
	program, err := helm()
	if err != nil {
		t.Fatal(err)
	}
	args = append([]string{"template", "tandem", chart, "--namespace", "tandem-system", "--set", "image.repository=registry.example.com/tandem", "-s", "templates/" + template}, args...)
	out, err := exec.Command(program, args...).CombinedOutput()
	return string(out), err
}

// The chart refuses the configurations that the agent refuses, and no others. Neither of these has a key twice, which helm cannot see.
func TestChartAndAgentAgree(t *testing.T) {
	const count = 400
	g := generator{Rand: drawn(t), tandem: true}
	configs := map[string]any{}
	values := map[string]any{"config": map[string]any{"map": configs, "default": "c000"}}
	refused := map[string]error{}
	texts := map[string]string{}
	add := func(name, text string) {
		_, err := config.Load([]string{"--node-name=n", "--config=" + valuesText(t, text)}, func(string) (string, bool) { return "", false }, io.Discard)
		configs[name], texts[name], refused[name] = text, text, err
	}
	for i := range count {
		text, err := json.Marshal(g.file())
		if err != nil {
			t.Fatal(err)
		}
		add(fmt.Sprintf("c%03d", i), string(text))
	}
	for i, text := range []string{
		"---\nversion: v1\n---\n", "version: v1\r\n---\r\nflags: {}", " version: v1\n---\n flags: {}", "version: v1\n--- # two\nflags: {}", "%YAML 1.1\n---\nversion: v1",
		"# one\n---\n# two\nversion: v1\n", "--- {version: v1}\n", "--- {version: v1}\n--- {flags: {}}\n", "{", "",
	} {
		add(fmt.Sprintf("c%d", count+i), text)
	}
	out, _ := render(t, "daemonset.yaml", "-f", valuesFile(t, values))
	byChart := map[string]string{}
	for _, line := range regexp.MustCompile(`(?m)^config\.map\.(c[0-9]+).*$`).FindAllStringSubmatch(out, -1) {
		byChart[line[1]] += line[0] + "\n"
	}
	right := 0
	for name, err := range refused {
		if err == nil {
			right++
		}
		if (err != nil) != (byChart[name] != "") {
			t.Errorf("%s\nagent: %v\nchart: %s", texts[name], err, byChart[name])
		}
	}
	if right == 0 || right == count || len(byChart) == 0 {
		t.Errorf("%d of %d are right: too few to compare\n%.2000s", right, count, out)
	}
	t.Logf("configurations=%d accepted=%d", count, right)
}

func valuesFile(t *testing.T, values any) string {
	t.Helper()
	text, err := yaml.Marshal(values)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// agentOf returns the agent that a rendering has, with what it makes of its arguments and environment.
func agentOf(t *testing.T, args ...string) (appsv1.DaemonSet, config.Config) {
	t.Helper()
	out, err := render(t, "daemonset.yaml", args...)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var set appsv1.DaemonSet
	if err := yaml.UnmarshalStrict([]byte(out), &set); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	container := set.Spec.Template.Spec.Containers[0]
	env := map[string]string{"NODE_NAME": "n"}
	for i, v := range container.Env {
		if slices.ContainsFunc(container.Env[:i], func(before corev1.EnvVar) bool { return before.Name == v.Name }) {
			t.Errorf("%v: two variables %s", args, v.Name)
		}
		if v.Value != "" {
			env[v.Name] = v.Value
		}
	}
	if i := slices.Index(container.Args, "--config=/etc/tandem/config.yaml"); i >= 0 {
		out, err := render(t, "configmap.yaml", args...)
		var configs corev1.ConfigMap
		if err = errors.Join(err, yaml.UnmarshalStrict([]byte(out), &configs)); err != nil {
			t.Fatal(err)
		}
		container.Args[i] = "--config=" + valuesText(t, configs.Data["config.yaml"])
	}
	if slices.Contains(container.Args, "--config-dir=/etc/tandem") {
		container.Args = append(container.Args, "--run-dir="+t.TempDir())
	}
	c, err := config.Load(container.Args, func(name string) (string, bool) { value, ok := env[name]; return value, ok }, os.Stderr)
	if err != nil {
		t.Fatalf("%v: %v", container.Args, err)
	}
	return set, c
}

// theirValues is the values file of NVIDIA's device plugin, from its module.
func theirValues(t *testing.T) string {
	t.Helper()
	return filepath.Join(nvidiaDir(t), "deployments/helm/nvidia-device-plugin/values.yaml")
}

// The values files of both charts of NVIDIA work unchanged, apart from the image.
func TestValuesOfNVIDIAsCharts(t *testing.T) {
	const image = "image.repository=registry.example.com/tandem"
	t.Run("nvidia-device-plugin", func(t *testing.T) {
		set, c := agentOf(t, "-f", theirValues(t), "--set", image)
		want := config.Defaults()
		if !slices.Equal(c.DeviceListStrategies, want.DeviceListStrategies) || c.Mode != want.Mode || c.MIGStrategy != want.MIGStrategy || c.ConfigDir != "" || c.NodeLabels {
			t.Errorf("configured is %+v", c)
		}
		if terms := set.Spec.Template.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution; len(terms.NodeSelectorTerms) != 3 {
			t.Errorf("affinity %+v", terms)
		}
		if got := len(set.Spec.Template.Spec.Tolerations); got != 2 {
			t.Errorf("%d tolerations, want the file's 2", got)
		}
	})
	t.Run("dra-driver-nvidia-gpu", func(t *testing.T) {
		set, c := agentOf(t, "-f", "testdata/dra-driver.values.yaml", "--set", image)
		if c.DriverRoot != "/" || c.Verbosity != 4 || c.Mode != config.ModeDual {
			t.Errorf("configured is %+v", c)
		}
		pod := set.Spec.Template.Spec
		if len(pod.Tolerations) != 1 || pod.Tolerations[0].Key != "nvidia.com/gpu" || pod.Affinity.NodeAffinity == nil {
			t.Errorf("tolerations %+v, affinity %+v", pod.Tolerations, pod.Affinity)
		}
		if got := set.Spec.UpdateStrategy.RollingUpdate.MaxUnavailable.String(); got != "100%" {
			t.Errorf("maxUnavailable %s, want the file's 100%%", got)
		}
	})
}

// Each key of NVIDIA's charts does what README.md of the chart says.
func TestKeysOfNVIDIAsCharts(t *testing.T) {
	for text, does := range map[string]func(appsv1.DaemonSet, config.Config) bool{
		"{compatWithCPUManager: true}": func(_ appsv1.DaemonSet, c config.Config) bool { return c.PassDeviceSpecs },
		"{failOnInitError: false}":     func(_ appsv1.DaemonSet, c config.Config) bool { return len(c.Unused) == 0 },
		"{deviceListStrategy: envvar}": func(_ appsv1.DaemonSet, c config.Config) bool {
			return slices.Equal(c.DeviceListStrategies, []string{"envvar"})
		},
		"{deviceListStrategy: [envvar, volume-mounts]}": func(_ appsv1.DaemonSet, c config.Config) bool { return len(c.DeviceListStrategies) == 2 },
		"{deviceIDStrategy: index}":                     func(_ appsv1.DaemonSet, c config.Config) bool { return c.DeviceIDStrategy == "index" },
		"{deviceDiscoveryStrategy: nvml}": func(set appsv1.DaemonSet, _ config.Config) bool {
			return slices.Contains(set.Spec.Template.Spec.Containers[0].Env, corev1.EnvVar{Name: "DEVICE_DISCOVERY_STRATEGY", Value: "nvml"})
		},
		"{config: {flags: {nvidiaDriverRoot: /opt/driver, nvidiaDevRoot: /}}}": func(_ appsv1.DaemonSet, c config.Config) bool {
			return c.DriverRoot == "/opt/driver" && c.DevRoot == "/"
		},
		"{compatWithCPUManager: true, kubeletPlugin: {containers: {gpus: {env: [{name: PASS_DEVICE_SPECS, value: \"false\"}]}}}}": func(_ appsv1.DaemonSet, c config.Config) bool {
			return !c.PassDeviceSpecs
		},
		"{updateStrategy: null, resources: null, unknownConfigKeys: null, config: null}": func(set appsv1.DaemonSet, c config.Config) bool {
			return set.Spec.UpdateStrategy.RollingUpdate.MaxUnavailable.String() == "10%" && c.UnknownKeys == "Error"
		},
		"{gdrcopyEnabled: true, gdsEnabled: true, mofedEnabled: true}": func(_ appsv1.DaemonSet, c config.Config) bool {
			return c.GDRCopy && c.GDS && c.MOFED
		},
		"{gdsEnabled: false, config: {flags: {gdsEnabled: true}}}": func(_ appsv1.DaemonSet, c config.Config) bool { return !c.GDS },
		"{nvidiaDriverRoot: /run/nvidia/driver, nvidiaDevRoot: /}": func(_ appsv1.DaemonSet, c config.Config) bool {
			return c.DriverRoot == "/run/nvidia/driver" && c.DevRoot == "/"
		},
		"{nvidiaDriverRoot: /run/nvidia/driver, simulated: {profile: h100x8}}": func(_ appsv1.DaemonSet, c config.Config) bool {
			return c.DriverRoot == "/run/nvidia/simulated/driver"
		},
		"{cdi: {nvidiaHookPath: /usr/bin/nvidia-ctk, featureFlags: enable-coherent-annotations}}": func(_ appsv1.DaemonSet, c config.Config) bool {
			return c.CDIHook == "/usr/bin/nvidia-ctk" && slices.Equal(c.CDIFeatures, []string{"enable-coherent-annotations"})
		},
		"{nvidiaCDIHookPath: /usr/bin/nvidia-cdi-hook}": func(_ appsv1.DaemonSet, c config.Config) bool { return c.CDIHook == "/usr/bin/nvidia-cdi-hook" },
		"{devicePlugin: {enabled: false}}":              func(_ appsv1.DaemonSet, c config.Config) bool { return c.Mode == config.ModeClaimsOnly },
		"{resources: {gpus: {enabled: false}}}":         func(_ appsv1.DaemonSet, c config.Config) bool { return c.Mode == config.ModeDevicePluginOnly },
		"{migStrategy: mixed}":                          func(_ appsv1.DaemonSet, c config.Config) bool { return c.MIGStrategy == "mixed" },
		"{gfd: {enabled: false}}":                       func(_ appsv1.DaemonSet, c config.Config) bool { return !c.NodeLabels },
		"{gfd: {enabled: true, noTimestamp: false, sleepInterval: infinite}}": func(_ appsv1.DaemonSet, c config.Config) bool {
			return c.NodeLabels && !c.NoTimestamp && c.LabelInterval > 24*time.Hour
		},
		"{nfd: {enableNodeFeatureApi: true, master: {}}}": func(_ appsv1.DaemonSet, c config.Config) bool { return c.UseNodeFeatureAPI },
		"{nfd: {enableNodeFeatureApi: false}, config: {flags: {useNodeFeatureAPI: true}}}": func(_ appsv1.DaemonSet, c config.Config) bool {
			return !c.UseNodeFeatureAPI
		},
		"{config: {flags: {useNodeFeatureAPI: true}}}":            func(_ appsv1.DaemonSet, c config.Config) bool { return c.UseNodeFeatureAPI },
		"{namespaceOverride: gpu}":                                func(set appsv1.DaemonSet, _ config.Config) bool { return set.Namespace == "gpu" },
		"{unknownConfigKeys: Warn, config: {flags: {old: true}}}": func(set appsv1.DaemonSet, c config.Config) bool { return c.UnknownKeys == "Warn" },
		"{updateStrategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: 3}}}": func(set appsv1.DaemonSet, _ config.Config) bool {
			return set.Spec.UpdateStrategy.RollingUpdate.MaxUnavailable.IntValue() == 3
		},
		"{kubeletPlugin: {priorityClassName: low, nodeSelector: {gpu: here}, podAnnotations: {a: b}, kubeletPluginsDirectoryPath: /var/lib/k0s/kubelet/plugins}}": func(set appsv1.DaemonSet, c config.Config) bool {
			pod := set.Spec.Template
			return pod.Spec.PriorityClassName == "low" && pod.Spec.NodeSelector["gpu"] == "here" && pod.Spec.NodeSelector["kubernetes.io/os"] == "linux" && pod.Annotations["a"] == "b" && c.KubeletDir == "/var/lib/k0s/kubelet"
		},
		"{kubeletPlugin: {containers: {gpus: {env: [{name: PASS_DEVICE_SPECS, value: \"true\"}], resources: {limits: {memory: 1Gi}}}}}}": func(set appsv1.DaemonSet, c config.Config) bool {
			return c.PassDeviceSpecs && set.Spec.Template.Spec.Containers[0].Resources.Limits.Memory().String() == "1Gi"
		},
		"{config: {name: configs, default: a, fallbackStrategies: [empty]}}": func(set appsv1.DaemonSet, c config.Config) bool {
			return c.ConfigDir == "/etc/tandem" && c.DefaultConfig == "a" && slices.Equal(c.FallbackStrategies, []string{"empty"}) &&
				slices.ContainsFunc(set.Spec.Template.Spec.Volumes, func(v corev1.Volume) bool { return v.ConfigMap != nil && v.ConfigMap.Name == "configs" })
		},
		"{config: {map: {a: \"version: v1\", default: {version: v1}}}}": func(set appsv1.DaemonSet, c config.Config) bool {
			return c.ConfigDir == "/etc/tandem" && c.DefaultConfig == "" && slices.Equal(c.FallbackStrategies, []string{"named", "single"})
		},
	} {
		set, c := agentOf(t, "-f", valuesText(t, text))
		if !does(set, c) {
			t.Errorf("%s: has another effect: %+v", text, c)
		}
	}
}

// helm refuses contradictory values, and says what to change.
func TestMistakesInValues(t *testing.T) {
	for text, want := range map[string]string{
		"{driverRoot: /opt, nvidiaDriverRoot: /run/nvidia/driver}":                                                          `driverRoot and nvidiaDriverRoot are two names of one setting, with the values "/opt" and "/run/nvidia/driver"`,
		"{nodeSelector: {a: b}, kubeletPlugin: {nodeSelector: {c: d}}}":                                                     "nodeSelector and kubeletPlugin.nodeSelector are two names of one setting",
		"{devicePlugin: {enabled: false}, resources: {gpus: {enabled: false}}}":                                             "devicePlugin.enabled and resources.gpus.enabled are both false",
		"{config: {name: a, map: {b: \"\"}}}":                                                                               "config.name and config.map are both set",
		"{config: {map: {a: \"\", b: \"\"}}}":                                                                               "no configuration of config.map is used by a node without the label",
		"{config: {default: a}}":                                                                                            "config.default is a, which has no effect without config.name or config.map",
		"{config: {version: v1, default: a}}":                                                                               "config.default is a, which has no effect without config.name or config.map",
		"{config: {fallbackStrategies: [empty]}}":                                                                           "config.fallbackStrategies has no effect without config.name or config.map",
		"{config: {map: {a: \"\"}, default: b}}":                                                                            "config.default is b, which config.map does not have (only a)",
		"{config: {map: {a: \"\"}, version: v1}}":                                                                           "config has keys of a node configuration (version) beside name or map",
		"{config: {map: {a: \"flags: {migStrategy: both}\"}}}":                                                              `config.map.a.flags.migStrategy: "both" is not one of "none", "single", "mixed"`,
		"{config: {flags: {plugin: {passDevicesSpecs: true}}}}":                                                             "config.flags.plugin.passDevicesSpecs: unknown key",
		"{kubeletPlugin: {kubeletPluginsDirectoryPath: /var/lib/kubelet}}":                                                  "which does not end in /plugins",
		"{resources: {limits: {memory: 128Mi}}, kubeletPlugin: {containers: {gpus: {resources: {limits: {memory: 1Gi}}}}}}": "resources.limits and kubeletPlugin.containers.gpus.resources.limits are two names",
		"{devicePlugin: {enabled: false}, config: {tandem: {mode: DevicePluginOnly}}}":                                      "config.tandem.mode is DevicePluginOnly, but devicePlugin.enabled: false means mode ClaimsOnly",
		"{config: {map: {default: \"version: v1\\n---\\nflags: {}\"}}}":                                                     "config.map.default: more than one YAML document",
		"{devicePlugin: {enabled: false}, config: {map: {default: \"tandem: {mode: DevicePluginOnly}\"}}}":                  "config.map.default.tandem.mode is DevicePluginOnly, but devicePlugin.enabled: false means mode ClaimsOnly",
		"{config: {map: {.hidden: \"\"}, default: .hidden}}":                                                                ".hidden",
		"{config: {name: a, fallbackStrategies: []}}":                                                                       "/config/fallbackStrategies",
		"{deviceListStrategy: cdi}":                                                                                         "/deviceListStrategy",
		"{kubeletPlugin: {container: {}}}":                                                                                  "container",
		"{updateStrategy: {type: OnDelete}}":                                                                                "/updateStrategy/type",
	} {
		out, err := render(t, "daemonset.yaml", "-f", valuesText(t, text))
		if err == nil || !strings.Contains(out, want) {
			t.Errorf("%s:\ngot  %.600s\nwant %s", text, out, want)
		}
	}
}

// The notes after an installation name the keys without effect.
func TestNotesNameKeysWithoutEffect(t *testing.T) {
	program, err := helm()
	if err != nil {
		t.Fatal(err)
	}
	notes := func(file string) string {
		out, err := exec.Command(program, "install", "tandem", chart, "--dry-run=client", "--namespace", "tandem-system", "-f", file, "--set", "image.repository=registry.example.com/tandem").CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		_, text, _ := strings.Cut(string(out), "NOTES:")
		return text
	}
	const heading = "These values of NVIDIA's charts have no effect here:"
	if text := notes(valuesText(t, "{}")); strings.Contains(text, heading) {
		t.Errorf("without any such key: %s", text)
	}
	if text := notes(valuesText(t, "{gfd: {nameOverride: labels}, failOnInitError: true}")); !strings.Contains(text, "gfd (nameOverride): the agent writes the labels") || !strings.Contains(text, "failOnInitError: ") {
		t.Errorf("notes %s", text)
	}
	text := notes("testdata/dra-driver.values.yaml")
	for _, want := range []string{heading, "resources.computeDomains (enabled, imex): Tandem has no ComputeDomains", "controller (containers, leaderElection, metrics, podAnnotations,", "controller.networkPolicy (enabled): networkPolicy is for all of Tandem", "kubeletPlugin.containers (computeDomains, init): the agent has one container"} {
		if !strings.Contains(text, want) {
			t.Errorf("%s is missing in %s", want, text)
		}
	}
}

func valuesText(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}
