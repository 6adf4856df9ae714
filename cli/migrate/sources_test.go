// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// inBothOrders translates two documents, which must become the same whichever comes first.
func inBothOrders(t *testing.T, one, other, values string, has, lacks []string) {
	t.Helper()
	for _, text := range []string{one + "\n---\n" + other, other + "\n---\n" + one} {
		wantValues(t, translated(t, "file", text), values, has, lacks)
	}
}

// A source that turns a program off says nothing about the one that another source runs. NVIDIA's README installs GPU Feature Discovery by a
// release without the device plugin, GPU Operator leaves the plugin to its own chart for MPS, and the DRA driver serves ComputeDomains beside both.
func TestProgramThatOneSourceTurnsOff(t *testing.T) {
	const (
		plugin = "{migStrategy: mixed, failOnInitError: true}"
		labels = "{devicePlugin: {enabled: false}, gfd: {enabled: true, sleepInterval: 5m}, migStrategy: none, nodeSelector: {labels: here}, " +
			"priorityClassName: low}"
		operator = "{toolkit: {enabled: true}, mig: {strategy: mixed}, cdi: {enabled: true}}"
		domains  = "{resources: {gpus: {enabled: false}}, kubeletPlugin: {nodeSelector: {domain: here}, priorityClassName: low, " +
			"containers: {gpus: {env: [{name: A, value: b}]}}}, logVerbosity: 6}"
		set = "{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: plugin}, spec: {template: {spec: " +
			"{containers: [{name: nvidia-device-plugin-ctr}]}}}}"
		shares    = "{migStrategy: none, config: {map: {m: 'version: v1'}, default: m}}"
		claimsToo = "{devicePlugin: {enabled: false}, gpuCluster: {deployCR: true}, mig: {strategy: none}, daemonsets: {tolerations: [{key: a}]}}"
	)
	unused := "devicePlugin.enabled: file has false, and another source serves GPUs. " +
		"Not used of it: devicePlugin.enabled, migStrategy, nodeSelector, priorityClassName"
	for name, test := range map[string]struct {
		one, other, values string
		has, lacks         []string
	}{
		"GPU Feature Discovery beside the plugin": {
			plugin, labels, "{migStrategy: mixed, gfd: {noTimestamp: false, sleepInterval: 5m}}", []string{unused}, nil,
		},
		"GPU Feature Discovery beside a DaemonSet": {set, labels, "{gfd: {noTimestamp: false, sleepInterval: 5m}}", []string{unused}, nil},
		"GPU Feature Discovery beside GPU Operator": {
			operator, labels, "{migStrategy: mixed, gfd: {noTimestamp: false, sleepInterval: 5m}}", []string{unused}, nil,
		},
		"GPU Feature Discovery beside the DRA driver": {
			"{kubeletPlugin: {nodeSelector: {claims: here}}}", labels,
			"{devicePlugin: {enabled: false}, gfd: {noTimestamp: false, sleepInterval: 5m}, migStrategy: none, priorityClassName: low, " +
				"nodeSelector: {claims: here, kubernetes.io/os: linux}}",
			[]string{"Not used of it: nodeSelector"}, nil,
		},
		"GPU Operator beside the plugin": {
			"{toolkit: {enabled: true}, devicePlugin: {enabled: false}}", plugin, "{migStrategy: mixed}",
			[]string{"Not used of it: migStrategy"}, []string{"Tandem serves nvidia.com/gpu limits all the same"},
		},
		"GPU Operator with a configuration that it does not use": {
			"{devicePlugin: {enabled: false, config: {name: old, default: any}}, cdi: {enabled: false}, hostPaths: {driverInstallDir: /opt/driver}}", shares,
			"{migStrategy: none, config: {map: {m: 'version: v1'}, default: m}, driverRoot: /opt/driver}",
			[]string{"deviceListStrategy: it is not set", "Not used of it: config, migStrategy"}, []string{"cdi.enabled"},
		},
		"GPU Operator with CDI beside the plugin": {
			"{devicePlugin: {enabled: false}, cdi: {enabled: true}, mig: {strategy: none}}", plugin, "{migStrategy: mixed}",
			[]string{"deviceListStrategy: it is not set"}, nil,
		},
		"GPU Operator with the DRA driver beside the plugin": {
			claimsToo, "{migStrategy: mixed, tolerations: [{key: a}]}", "{migStrategy: mixed, tolerations: [{key: a}]}",
			[]string{"deviceClasses.create"}, []string{"Tandem serves nvidia.com/gpu limits"},
		},
		"GPU Operator beside the DRA driver": {
			"{toolkit: {enabled: true}, devicePlugin: {enabled: false}, daemonsets: {tolerations: [{key: a}]}}",
			"{kubeletPlugin: {nodeSelector: {claims: here}}}", "{migStrategy: single, nodeSelector: {claims: here, kubernetes.io/os: linux}}",
			[]string{"Tandem serves nvidia.com/gpu limits all the same"}, nil,
		},
		"ComputeDomains beside the plugin": {
			plugin, domains, "{migStrategy: mixed, resources: {gpus: {enabled: false}}, logVerbosity: 6}",
			[]string{"Not used of it: kubeletPlugin.containers.gpus.env, kubeletPlugin.nodeSelector, kubeletPlugin.priorityClassName"}, nil,
		},
		"ComputeDomains beside the DRA driver": {
			"{kubeletPlugin: {priorityClassName: high}}", domains, "{priorityClassName: high, logVerbosity: 6}",
			[]string{"Not used of it: kubeletPlugin.containers"}, nil,
		},
		"GPU Feature Discovery of the plugin's chart beside GPU Operator": {
			"{toolkit: {enabled: true}, mig: {strategy: none}, gfd: {enabled: false}}", "{migStrategy: none, gfd: {enabled: true}}",
			"{migStrategy: none, gfd: {noTimestamp: false}}", nil, []string{"gfd.enabled"},
		},
	} {
		t.Run(name, func(t *testing.T) { inBothOrders(t, test.one, test.other, test.values, test.has, test.lacks) })
	}
}

// The ConfigMap that only a disabled plugin names is in the cluster. Another release may name one of the same name.
func TestConfigMapOfATurnedOffPlugin(t *testing.T) {
	off := map[string]any{"devicePlugin": map[string]any{"enabled": false, "config": map[string]any{"name": "shares", "default": "any"}}}
	on := map[string]any{"config": map[string]any{"name": "shares", "default": "a"}}
	secret := func(namespace, chart string, values map[string]any) runtime.Object {
		return release(t, namespace, chart, map[string]any{
			"name": chart, "config": values, "chart": map[string]any{"metadata": map[string]any{"name": chart}},
		})
	}
	operators := podOn("b", "operator", &plugin)
	operators.Namespace = "gpu-operator"
	slices := timeSlicing("shares")
	slices.Namespace = operators.Namespace
	used := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: plugin.Namespace, Name: "shares"}, Data: map[string]string{"a": "version: v1"}}
	result := cluster(t, operators, slices, used, secret("gpu-operator", "gpu-operator", off), secret(plugin.Namespace, "nvidia-device-plugin", on))
	wantValues(t, result, "{config: {map: {a: 'version: v1'}, default: a}}", []string{"config: ConfigMap gpu-operator/shares is not used"}, nil)
}

// No GPU would be served, and Tandem's chart refuses it.
func TestSourcesThatServeNoGPU(t *testing.T) {
	sources, err := Read("", "file", []byte("{devicePlugin: {enabled: false}, gfd: {enabled: true}, migStrategy: null}\n---\n"+
		"{resources: {gpus: {enabled: false}}, kubeletPlugin: {}}"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err = Translate(sources...); err == nil || !strings.Contains(err.Error(), "devicePlugin.enabled and resources.gpus.enabled are both false") {
		t.Errorf("error %v", err)
	}
}

// Where each source has a placement of its own, the keys of one must not take the agents off the nodes of the other.
func TestPlacementOfSeveralSources(t *testing.T) {
	const (
		plugin      = "{migStrategy: mixed}" // on all nodes with GPUs
		driver      = "{kubeletPlugin: {nodeSelector: {claims: here}, tolerations: [{key: claims, operator: Exists}]}, logVerbosity: 6}"
		pool        = "{migStrategy: none, nodeSelector: {pool: gpu}}"
		poolOfDRA   = "{kubeletPlugin: {nodeSelector: {pool: gpu}}}"
		slices      = "{migStrategy: none, nodeSelector: {pool: t4}, config: {default: ts, map: {ts: 'version: v1'}}}"
		unavailable = "left out, because not all sources have the same"
	)
	notSet := []string{"affinity: it has NVIDIA's default", "tolerations: it has NVIDIA's default", "tolerations: they replace", "which is not used"}
	for name, test := range map[string]struct {
		one, other, values string
		has, lacks         []string
	}{
		"the DRA driver on some nodes": {
			plugin, driver, "{migStrategy: mixed, logVerbosity: 6}",
			[]string{"affinity, nodeSelector, tolerations: " + unavailable, "logVerbosity: only file has it"}, notSet,
		},
		"GPU Operator, and the DRA driver on some nodes": {
			"{toolkit: {}, mig: {strategy: mixed}, daemonsets: {tolerations: [{key: a}]}}", driver, "{migStrategy: mixed, logVerbosity: 6}",
			[]string{unavailable}, notSet,
		},
		"the plugin and its configuration on some nodes": {
			slices, "{kubeletPlugin: {}}", "{migStrategy: none, config: {default: ts, map: {ts: 'version: v1'}}}",
			[]string{unavailable, "config, migStrategy: only file has it, for the nodes of its nodeSelector or affinity. It applies to all nodes now"}, notSet,
		},
		"the same nodes": {
			pool, poolOfDRA, "{migStrategy: none, nodeSelector: {pool: gpu}}", nil, []string{"left out", "which is not used", "affinity: it has"},
		},
		"the same nodes with other tolerations": {
			"{migStrategy: none, nodeSelector: {pool: gpu}, tolerations: [{key: a}]}", "{migStrategy: none, nodeSelector: {pool: gpu}}",
			"{migStrategy: none, nodeSelector: {pool: gpu}}", []string{"tolerations: left out, because the sources have different ones"},
			[]string{"affinity: it has", "tolerations: they replace", "tolerations: it has"},
		},
		"Linux only": {
			"{migStrategy: none, nodeSelector: {kubernetes.io/os: linux}}", "{kubeletPlugin: {}}", "{migStrategy: none}", nil, []string{"left out"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, text := range []string{test.one + "\n---\n" + test.other, test.other + "\n---\n" + test.one} {
				result := translated(t, "file", text)
				if selector, ok := result.Values["nodeSelector"].(map[string]any); ok {
					delete(selector, "kubernetes.io/os")
				}
				wantValues(t, result, test.values, test.has, test.lacks)
			}
		})
	}
	elsewhere := "{migStrategy: mixed, affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: " +
		"[{matchExpressions: [{key: claims, operator: NotIn, values: [here]}]}]}}}}"
	for _, text := range []string{pool + "\n---\n" + slices, elsewhere + "\n---\n" + driver, plugin + "\n---\n" + pool + "\n---\n" + slices} {
		sources, err := Read("", "file", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		_, err = Translate(sources...)
		if err == nil || !strings.Contains(err.Error(), "different nodeSelector or affinity (file) serve different nodes: translate each alone") {
			t.Errorf("%s: error %v", text, err)
		}
	}
}
