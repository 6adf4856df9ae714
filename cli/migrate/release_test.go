// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
)

// cluster translates the releases and DaemonSets of a cluster. It adds a pod by which the namespace of the plugin counts as administered.
func cluster(t *testing.T, objects ...runtime.Object) Result {
	t.Helper()
	client := fake.NewClientset(append(objects, podOn("a", "plugin", &plugin))...)
	releases, err := ReadReleases(t.Context(), client, "")
	if err != nil {
		t.Fatal(err)
	}
	sets, err := ReadDaemonSets(t.Context(), client, "", releases)
	if err != nil {
		t.Fatal(err)
	}
	result, err := Translate(append(releases, sets...)...)
	if err != nil {
		t.Fatal(err)
	}
	return result
}

// pluginSet is a DaemonSet of NVIDIA's device plugin, of a Helm release if that has a name.
func pluginSet(release string, pod corev1.PodSpec) *appsv1.DaemonSet {
	set := plugin.DeepCopy()
	set.Name, set.UID, set.Spec.Template.Spec = "nvidia-device-plugin", "", pod
	if release != "" {
		set.Annotations = map[string]string{releaseAnnotation: release, releaseNamespaceAnnotation: set.Namespace}
	}
	return set
}

// A DaemonSet says on which nodes it runs, and which flags it has, if the release that wrote it was not read. Helm stores the alias of a
// dependency as its name.
func TestDaemonSetsOfReleases(t *testing.T) {
	set := pluginSet("stack", corev1.PodSpec{
		NodeSelector: map[string]string{"pool": "gpu"},
		Containers: []corev1.Container{{
			Name: "nvidia-device-plugin-ctr", Args: []string{"--unknown"}, Env: []corev1.EnvVar{{Name: "DEVICE_LIST_STRATEGY", Value: "envvar"}},
			EnvFrom: []corev1.EnvFromSource{{}},
		}},
	})
	secret := func(namespace, name, chart string, values map[string]any, dependencies ...any) runtime.Object {
		return release(t, namespace, name, map[string]any{"name": name, "config": map[string]any{}, "chart": map[string]any{
			"metadata": map[string]any{"name": chart, "version": "0.1.0", "dependencies": dependencies}, "values": values,
		}})
	}
	dependency := map[string]any{"name": "nvidia-device-plugin", "version": "0.19.3"}
	low := map[string]any{"priorityClassName": "low", "global": map[string]any{"a": "b"}}
	for name, test := range map[string]struct {
		secret     runtime.Object
		values     string
		has, lacks []string
	}{
		"of the chart": {
			secret(set.Namespace, "stack", "nvidia-device-plugin", map[string]any{"priorityClassName": "low"}),
			"{priorityClassName: low, deviceListStrategy: envvar}", nil, []string{"--unknown", "envFrom"},
		},
		"of the chart in another release": {
			secret(set.Namespace, "other", "nvidia-device-plugin", map[string]any{"priorityClassName": "low"}),
			"{priorityClassName: low, deviceListStrategy: envvar}", []string{"args (--unknown)", "envFrom", "nodeSelector, tolerations: left out"}, nil,
		},
		"of a chart with a dependency": {
			secret(set.Namespace, "stack", "stack", map[string]any{"nvidia-device-plugin": low}, map[string]any{"name": "postgres"}, dependency),
			"{priorityClassName: low, deviceListStrategy: envvar}", nil, []string{"--unknown", "envFrom", "global"},
		},
		"of a chart with a dependency that has an alias": {
			secret(set.Namespace, "stack", "stack", map[string]any{"plugin": low}, map[string]any{"name": "plugin", "alias": "plugin"}),
			"{deviceListStrategy: envvar, nodeSelector: {pool: gpu}}", []string{"args (--unknown)", "envFrom"}, nil,
		},
		"of a chart with a dependency that is disabled": {
			secret(set.Namespace, "stack", "stack", map[string]any{"nvidia-device-plugin": low}),
			"{deviceListStrategy: envvar, nodeSelector: {pool: gpu}}", []string{"args (--unknown)", "envFrom"}, nil,
		},
		"of another chart of NVIDIA's": {
			secret(set.Namespace, "stack", "dra-driver-nvidia-gpu", nil),
			"{deviceListStrategy: envvar}", []string{"args (--unknown)", "envFrom", "nodeSelector, tolerations: left out"}, nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			wantValues(t, cluster(t, test.secret, set.DeepCopy()), test.values, test.has, test.lacks)
		})
	}
}

// A DaemonSet from which no value is read is a source all the same: what is lost is reported.
func TestDaemonSetWithLossesOnly(t *testing.T) {
	set := pluginSet("", corev1.PodSpec{Containers: []corev1.Container{{Name: "nvidia-device-plugin-ctr", EnvFrom: []corev1.EnvFromSource{{}}}}})
	wantValues(t, cluster(t, set), "{}", []string{"envFrom: set its variables"}, nil)
}

// Two charts of NVIDIA's are dependencies. The user's values win over those of the chart.
func TestDependenciesOfRelease(t *testing.T) {
	result := cluster(t, release(t, plugin.Namespace, "stack", map[string]any{
		"name": "stack", "config": map[string]any{"nvidia-device-plugin": map[string]any{"priorityClassName": "high"}},
		"chart": map[string]any{
			"metadata": map[string]any{"name": "stack", "dependencies": []any{
				map[string]any{"name": "gpu-operator"}, map[string]any{"name": "nvidia-device-plugin"},
			}},
			"values": map[string]any{
				"gpu-operator":         map[string]any{"mig": map[string]any{"strategy": "mixed"}},
				"nvidia-device-plugin": map[string]any{"priorityClassName": "low", "runtimeClassName": "nvidia"},
			},
		},
	}))
	wantValues(t, result, "{migStrategy: mixed, priorityClassName: high, runtimeClassName: nvidia}", nil, nil)
}

// A file has no releases, so a DaemonSet in it counts as a whole, also one that a release wrote.
func TestDaemonSetOfReleaseInFile(t *testing.T) {
	wantValues(t, translated(t, "file", `{apiVersion: apps/v1, kind: DaemonSet,
		metadata: {name: plugin, annotations: {meta.helm.sh/release-name: stack}},
		spec: {template: {spec: {nodeSelector: {pool: gpu}, containers: [{name: nvidia-device-plugin-ctr, args: [--unknown]}]}}}}`),
		"{nodeSelector: {pool: gpu}}", []string{"args (--unknown)"}, nil)
}
