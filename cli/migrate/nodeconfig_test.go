// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"
)

const slicing = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}"

// withConfigs is a DaemonSet whose config-manager takes configurations from a ConfigMap, as in NVIDIA's chart and in GPU Operator.
func withConfigs(release, configMap string) *appsv1.DaemonSet {
	mounts := []corev1.VolumeMount{{Name: "config", MountPath: "/config"}, {Name: "configs", MountPath: "/available-configs"}}
	return pluginSet(release, corev1.PodSpec{
		Containers: []corev1.Container{
			{Name: "nvidia-device-plugin-ctr", VolumeMounts: mounts, Env: []corev1.EnvVar{{Name: "CONFIG_FILE", Value: "/config/config.yaml"}}},
			{Name: "nvidia-device-plugin-sidecar", Command: []string{"config-manager"}, VolumeMounts: mounts, Env: []corev1.EnvVar{
				{Name: "CONFIG_FILE_SRCDIR", Value: "/available-configs"}, {Name: "DEFAULT_CONFIG", Value: "any"}, {Name: "FALLBACK_STRATEGIES", Value: "empty"},
			}},
		},
		Volumes: []corev1.Volume{{Name: "config"}, {Name: "configs", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
			LocalObjectReference: corev1.LocalObjectReference{Name: configMap},
		}}}},
	})
}

func timeSlicing(name string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: plugin.Namespace, Name: name}, Data: map[string]string{"any": slicing}}
}

// GPU Operator's documentation sets the ConfigMap of time-slicing in the ClusterPolicy (kubectl patch), so no release names it.
func TestConfigMapsOfDaemonSets(t *testing.T) {
	secret := func(name, chart string, values map[string]any) runtime.Object {
		return release(t, plugin.Namespace, name, map[string]any{
			"name": name, "config": values, "chart": map[string]any{"metadata": map[string]any{"name": chart}},
		})
	}
	ofOperator := withConfigs("", "shares")
	ofOperator.OwnerReferences = []metav1.OwnerReference{{Kind: "ClusterPolicy", Name: "cluster-policy", Controller: ptr.To(true)}}
	twice := withConfigs("", "shares")
	twice.Name = "twice"
	shares := fmt.Sprintf("{default: any, fallbackStrategies: [empty], map: {any: %q}}", slicing)
	for name, test := range map[string]struct {
		objects    []runtime.Object
		values     string
		has, lacks []string
	}{
		"of a ClusterPolicy": {
			[]runtime.Object{ofOperator, timeSlicing("shares"), secret("operator", "gpu-operator", map[string]any{
				"mig": map[string]any{"strategy": "mixed"},
			})},
			"{migStrategy: mixed, config: " + shares + "}", nil, []string{"CONFIG_FILE"},
		},
		"of a ClusterPolicy whose release names another": {
			[]runtime.Object{ofOperator, timeSlicing("shares"), timeSlicing("former"), secret("operator", "gpu-operator", map[string]any{
				"mig": map[string]any{"strategy": "none"}, "devicePlugin": map[string]any{"config": map[string]any{"name": "former", "default": "any"}},
			})},
			"{migStrategy: none, config: " + shares + "}",
			[]string{`nvidia-device-plugin has "shares", which is not used: an earlier source sets it to "former"`}, nil,
		},
		"of a release": {
			[]runtime.Object{withConfigs("nvdp", "nvdp-configs"), secret("nvdp", "nvidia-device-plugin", map[string]any{
				"config": map[string]any{"default": "any", "fallbackStrategies": []any{"empty"}, "map": map[string]any{"any": slicing}},
			})},
			"{config: " + shares + "}", nil, []string{"CONFIG_FILE", "nvdp-configs"},
		},
		"of no release": {
			[]runtime.Object{withConfigs("", "shares"), timeSlicing("shares")}, "{config: " + shares + "}", nil, []string{"CONFIG_FILE"},
		},
		"of two DaemonSets": {
			[]runtime.Object{withConfigs("", "shares"), twice, timeSlicing("shares")}, "{config: " + shares + "}", nil, []string{"not used"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			result := cluster(t, test.objects...)
			wantValues(t, result, test.values, test.has, test.lacks)
			if once := slices.Compact(slices.Sorted(slices.Values(result.From))); len(once) < len(result.From) {
				t.Errorf("sources %s", result.From)
			}
		})
	}
}

// Without its ConfigMap, a DaemonSet's configurations stay a reference, and the report asks for the ConfigMap.
func TestConfigMapThatIsNotRead(t *testing.T) {
	client := fake.NewClientset(podOn("a", "plugin", &plugin), withConfigs("", "shares"))
	sources, err := ReadDaemonSets(t.Context(), client, "", nil)
	if err == nil || !strings.Contains(err.Error(), "get ConfigMap nvidia/shares: ") {
		t.Errorf("error %v", err)
	}
	result, err := Translate(sources...)
	if err != nil {
		t.Fatal(err)
	}
	wantValues(t, result, "{config: {name: shares, default: any, fallbackStrategies: [empty]}}",
		[]string{"config.name: the ConfigMap shares must exist"}, nil)
}

// A DaemonSet in a file: its ConfigMap may be in another one.
func TestConfigFileOfManifest(t *testing.T) {
	manifest := func(more string) string {
		return `{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: plugin}, spec: {template: {spec: {
			containers: [{name: nvidia-device-plugin-ctr, env: [{name: CONFIG_FILE, value: /config/config.yaml}]` + more + `}}}}`
	}
	lost := []string{"CONFIG_FILE: pass the file, or the ConfigMap"}
	const manager = `}], initContainers: [{name: nvidia-device-plugin-init,
		env: [{name: CONFIG_FILE_SRCDIR, value: /available-configs}, {name: FALLBACK_STRATEGIES, value: "named, single"}],
		volumeMounts: [{name: a, mountPath: /available-configs/}]}], volumes: [{name: a, configMap: {name: shares`
	for name, test := range map[string]struct {
		text, values string
		has, lacks   []string
	}{
		"of config-manager": {
			manifest(manager + `}}]`), "{config: {name: shares}}", []string{"config.name: the ConfigMap shares must exist"}, []string{"CONFIG_FILE"},
		},
		"with its ConfigMap": {
			manifest(manager+`}}]`) + "\n---\n{kind: ConfigMap, metadata: {name: shares}, data: {a: 'version: v1'}}",
			"{config: {map: {a: 'version: v1'}}}", nil, []string{"CONFIG_FILE", "config.name"},
		},
		"of config-manager with some keys": {manifest(manager + `, items: [{key: a, path: b}]}}]`), "{}", lost, nil},
		"of the host": {
			manifest(`, volumeMounts: [{name: a, mountPath: /config}]}], volumes: [{name: a, hostPath: {path: /etc/a}}]`), "{}", lost, nil,
		},
		"of an image": {manifest(`}]`), "{}", lost, nil},
		"of GPU Operator's env": {
			"{toolkit: {}, mig: {strategy: none}, devicePlugin: {env: [{name: CONFIG_FILE, value: /a}]}}", "{migStrategy: none}", lost, nil,
		},
	} {
		t.Run(name, func(t *testing.T) { wantValues(t, translated(t, "file", test.text), test.values, test.has, test.lacks) })
	}
}
