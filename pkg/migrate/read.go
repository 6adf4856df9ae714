// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"

	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// Kind is what a Source configures.
type Kind string

const (
	// DevicePlugin is the chart nvidia-device-plugin.
	DevicePlugin Kind = "nvidia-device-plugin"
	// DRADriver is the chart dra-driver-nvidia-gpu, which was called nvidia-dra-driver-gpu.
	DRADriver Kind = "dra-driver-nvidia-gpu"
	// Configuration is a configuration file of the device plugin (version v1), or a ConfigMap with such files.
	Configuration Kind = "device plugin configuration"
	// Operator is the device plugin's part of a ClusterPolicy, or of the values of the chart gpu-operator.
	Operator Kind = "gpu-operator"
)

// Source is a configuration of NVIDIA's software.
type Source struct {
	// Name says in messages where the source is from.
	Name string
	Kind Kind
	// Values are those of NVIDIA's charts. Read converts other sources to them.
	Values map[string]any
	// Chosen is the part of Values that a user set; nil means all. Only these are reported as lost.
	Chosen map[string]any

	// configMap is the name of the ConfigMap that Values are from.
	configMap string
	// lost are keys that the conversion to Values left out, with reasons.
	lost []lostKeys
}

// Read returns the sources in a file with one or more YAML documents: values of NVIDIA's charts, configuration files of the device
// plugin, ConfigMaps with such files, or a ClusterPolicy. name is for messages.
func Read(name string, text []byte) ([]Source, error) {
	var sources []Source
	for documents := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text))); ; {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", name, err)
		}
		values, err := parse(document)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", name, err)
		}
		if values == nil {
			continue
		}
		source, err := sourceOf(name, values)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", name, err)
		}
		sources = append(sources, source)
	}
	if len(sources) == 0 {
		return nil, fmt.Errorf("read %s: it has no values", name)
	}
	return sources, nil
}

// parse returns a YAML document with whole numbers as int64; nil if it is empty.
func parse(text []byte) (map[string]any, error) {
	asJSON, err := yaml.YAMLToJSON(text)
	if err != nil {
		return nil, err
	}
	var values map[string]any
	if err := kjson.UnmarshalCaseSensitivePreserveInts(asJSON, &values); err != nil {
		return nil, fmt.Errorf("it is not a YAML map: %w", err)
	}
	return values, nil
}

func sourceOf(name string, values map[string]any) (Source, error) {
	// `helm get values` writes a heading.
	delete(values, "USER-SUPPLIED VALUES")
	delete(values, "COMPUTED VALUES")
	switch kind := values["kind"]; kind {
	case nil:
	case "ConfigMap":
		return configMapSource(name, values)
	case "ClusterPolicy":
		spec, _ := values["spec"].(map[string]any)
		return operatorSource(name, spec), nil
	default:
		return Source{}, fmt.Errorf("kind %v: want values of a chart, a configuration file, a ConfigMap or a ClusterPolicy", kind)
	}
	has := func(keys ...string) bool {
		return slices.ContainsFunc(keys, func(key string) bool { _, ok := values[key]; return ok })
	}
	switch {
	case has("version", "flags", "sharing", "imex"):
		return Source{Name: name, Kind: Configuration, Values: map[string]any{"config": values}}, nil
	case has("operator", "daemonsets", "toolkit", "dcgmExporter"):
		return operatorSource(name, values), nil
	case has("kubeletPlugin", "featureGates", "gpuResourcesEnabledOverride") || at(values, "resources.gpus") != nil || at(values, "resources.computeDomains") != nil:
		return Source{Name: name, Kind: DRADriver, Values: values}, nil
	}
	return Source{Name: name, Kind: DevicePlugin, Values: values}, nil
}

func configMapSource(name string, values map[string]any) (Source, error) {
	data, _ := values["data"].(map[string]any)
	if len(data) == 0 {
		return Source{}, errors.New("the ConfigMap has no data")
	}
	configMap, _ := at(values, "metadata.name").(string)
	return Source{Name: name, Kind: Configuration, configMap: configMap, Values: map[string]any{"config": map[string]any{"map": data}}}, nil
}

// operatorKeys are keys of a ClusterPolicy's spec, which are those of the chart gpu-operator too, and the same keys of NVIDIA's other
// charts (gpu-operator, api/nvidia/v1/clusterpolicy_types.go).
var operatorKeys = map[string]string{
	"devicePlugin.config.name":                "config.name",
	"devicePlugin.config.data":                "config.map",
	"devicePlugin.config.default":             "config.default",
	"devicePlugin.resources":                  "resources",
	"devicePlugin.mps.root":                   "mps.root",
	"devicePlugin.imagePullSecrets":           "imagePullSecrets",
	"mig.strategy":                            "migStrategy",
	"daemonsets.tolerations":                  "tolerations",
	"daemonsets.priorityClassName":            "priorityClassName",
	"daemonsets.annotations":                  "podAnnotations",
	"daemonsets.updateStrategy":               "updateStrategy.type",
	"daemonsets.rollingUpdate.maxUnavailable": "updateStrategy.rollingUpdate.maxUnavailable",
	"hostPaths.driverInstallDir":              "nvidiaDriverRoot",
}

// operatorSource reads the keys that concern the device plugin. The Operator still uses the others.
func operatorSource(name string, spec map[string]any) Source {
	s := Source{Name: name, Kind: Operator, Values: map[string]any{}}
	for from, to := range operatorKeys {
		if value := at(spec, from); !isUnset(value) {
			put(s.Values, to, value)
		}
	}
	if at(s.Values, "config.name") != nil || at(s.Values, "config.map") != nil {
		if at(s.Values, "config.map") != nil && at(spec, "devicePlugin.config.create") == true {
			delete(s.Values["config"].(map[string]any), "name")
		}
		// The Operator's DaemonSet sets this strategy.
		put(s.Values, "config.fallbackStrategies", []any{"empty"})
	}
	if text, ok := at(s.Values, "updateStrategy.rollingUpdate.maxUnavailable").(string); ok {
		if number, err := strconv.Atoi(text); err == nil {
			put(s.Values, "updateStrategy.rollingUpdate.maxUnavailable", int64(number))
		}
	}
	if variables, _ := at(spec, "devicePlugin.env").([]any); len(variables) > 0 {
		// These tell NVIDIA's container runtime what the plugin's own container gets.
		isRuntimes := func(variable any) bool {
			v, _ := variable.(map[string]any)
			return v["name"] == "NVIDIA_VISIBLE_DEVICES" || v["name"] == "NVIDIA_DRIVER_CAPABILITIES"
		}
		put(s.Values, "kubeletPlugin.containers.gpus.env", slices.DeleteFunc(slices.Clone(variables), isRuntimes))
	}
	if arguments := at(spec, "devicePlugin.args"); !isEmpty(arguments) {
		s.lost = append(s.lost, lostKeys{path: "devicePlugin.args", why: "set these flags in the configuration or in extraArgs"})
	}
	return s
}
