// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/runtime"
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

	// release is the namespace and name of the Helm release that Values come from, or that names the ConfigMap that they are from.
	release string
	// configMap is the name of the ConfigMap that Values are from.
	configMap string
	// lost are keys that the conversion to Values left out, with reasons. changes are differences that it made.
	lost    []lostKeys
	changes []string
	// cdi is set if GPU Operator's device plugin passes devices by CDI.
	cdi bool
	// byVariables is set if GPU Operator's device plugin passes devices by environment variables, because cdi.enabled is false.
	byVariables bool
	// claims is set if GPU Operator runs NVIDIA's DRA driver, and withoutPlugin if it runs no device plugin.
	claims, withoutPlugin bool
	// partial is set if Values are only what a DaemonSet has in its environment and arguments.
	partial bool
}

// Read returns the sources in a file with one or more YAML documents: values of NVIDIA's charts, configuration files of the device
// plugin, ConfigMaps with such files, a ClusterPolicy, or DaemonSets of NVIDIA's. chart is the name of the chart whose values they are; if it
// is empty, the keys say. name is for messages.
func Read(chart, name string, text []byte) ([]Source, error) {
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
		source, err := sourceOf(name, chartKinds[chart], values)
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
		return nil, errors.New("it is not a YAML map")
	}
	return values, nil
}

func sourceOf(name string, chart Kind, values map[string]any) (Source, error) {
	// `helm get values` writes a heading.
	delete(values, "USER-SUPPLIED VALUES")
	delete(values, "COMPUTED VALUES")
	switch kind := values["kind"]; kind {
	case nil:
	case "ConfigMap":
		return configMapSource(name, values)
	case "ClusterPolicy":
		spec, _ := values["spec"].(map[string]any)
		return operatorSource(name, spec, nil)
	case "DaemonSet":
		var set appsv1.DaemonSet
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(values, &set); err != nil {
			return Source{}, fmt.Errorf("read DaemonSet: %w", err)
		}
		return daemonSetSource(name, &set, nil)
	default:
		return Source{}, fmt.Errorf("kind %v: want values of a chart, a configuration file, a ConfigMap, a ClusterPolicy or a DaemonSet", kind)
	}
	has := func(key string) bool { _, ok := values[key]; return ok }
	if chart == "" && slices.ContainsFunc([]string{"version", "flags", "sharing", "imex"}, has) {
		return Source{Name: name, Kind: Configuration, Values: map[string]any{"config": values}}, nil
	}
	t, err := theTable()
	if chart == "" && err == nil {
		chart, err = t.chartOf(values)
	}
	if err != nil {
		return Source{}, err
	}
	if chart == Operator {
		return operatorSource(name, values, t.charts[Operator].Kept)
	}
	return Source{Name: name, Kind: chart, Values: values}, nil
}

func configMapSource(name string, values map[string]any) (Source, error) {
	data, _ := values["data"].(map[string]any)
	if len(data) == 0 {
		return Source{}, errors.New("the ConfigMap has no data")
	}
	configMap, _ := at(values, "metadata.name").(string)
	return Source{Name: name, Kind: Configuration, configMap: configMap, Values: map[string]any{"config": map[string]any{"map": data}}}, nil
}

// operatorSource reads the keys of GPU Operator that concern the device plugin. The Operator still uses the others. usual are
// defaults of its chart for keys that are missing.
func operatorSource(name string, spec, usual map[string]any) (Source, error) {
	t, err := theTable()
	if err != nil {
		return Source{}, err
	}
	s := Source{Name: name, Kind: Operator, Values: map[string]any{}, cdi: at(spec, "cdi.enabled") == true}
	var variables, flags []any
	var others []string
	t.operator.visit(t.charts[Operator].decided(spec, ""), func(key string, r row, value any) {
		list, _ := value.([]any)
		switch {
		case isUnset(value) || r.does == moved && r.To == "":
		case r.To == variablesPath:
			var differ []string
			variables, differ = addVariables(variables, list)
			for _, name := range differ {
				s.changes = append(s.changes, fmt.Sprintf("extraEnv: %s has another value for %s than devicePlugin.env, which is used", key, name))
			}
		case r.To == argumentsPath:
			var words []string
			for _, one := range list {
				words = append(words, fmt.Sprint(one))
			}
			ofFlags, left := t.argumentsAsVariables(words)
			flags = append(flags, ofFlags...)
			if len(left) > 0 {
				s.lost = append(s.lost, lostKeys{path: key, keys: left, why: r.Why})
			}
		case r.does == moved:
			put(s.Values, r.To, value)
		case r.does == kept && !hasNothing(value):
			others = append(others, r.Key)
		default:
			s.lost = addLost(s.lost, key, r, value)
		}
	}, func(key string, value any) { s.lost = addLost(s.lost, key, unknownKey, value) })
	for key, value := range usual {
		if at(spec, key) == nil {
			put(s.Values, t.operator.rows[key].To, value)
		}
	}
	if others = slices.Compact(others); len(others) > 0 {
		s.lost = append(s.lost, lostKeys{path: strings.Join(others, ", "), why: "GPU Operator still uses this", unneeded: true})
	}
	if variables = append(variables, flags...); len(variables) > 0 {
		put(s.Values, variablesPath, variables)
	}
	s.settle(spec)
	return s, nil
}

// settle corrects the values of GPU Operator that depend on others.
func (s *Source) settle(spec map[string]any) {
	if settings, ok := s.Values["config"].(map[string]any); ok {
		switch creates := at(spec, "devicePlugin.config.create") == true; {
		case settings["map"] != nil && creates:
			delete(settings, "name")
		case settings["map"] != nil:
			delete(settings, "map")
			s.lost = append(s.lost, lostKeys{path: "devicePlugin.config.data", why: "the Operator uses it only with devicePlugin.config.create", unneeded: true})
		}
		if settings["name"] != nil || settings["map"] != nil {
			// The Operator's DaemonSet sets this strategy.
			settings["fallbackStrategies"] = []any{"empty"}
		}
	}
	// The Operator has names of Secrets where charts have objects (ClusterPolicySpec, DevicePluginSpec).
	if secrets, ok := s.Values["imagePullSecrets"].([]any); ok {
		secrets = slices.Clone(secrets)
		for i, secret := range secrets {
			if name, isName := secret.(string); isName {
				secrets[i] = map[string]any{"name": name}
			}
		}
		s.Values["imagePullSecrets"] = secrets
	}
	if text, ok := at(s.Values, "updateStrategy.rollingUpdate.maxUnavailable").(string); ok {
		if number, err := strconv.Atoi(text); err == nil {
			put(s.Values, "updateStrategy.rollingUpdate.maxUnavailable", int64(number))
		}
	}
	if root, _ := at(spec, "hostPaths.kubeletRootDir").(string); root != "" {
		put(s.Values, "kubeletPlugin.kubeletPluginsDirectoryPath", path.Join(root, "plugins"))
	}
	if at(s.Values, "gdsEnabled") == true {
		put(s.Values, "mofedEnabled", true)
	}
	s.byVariables = at(spec, "cdi.enabled") == false
	if s.claims = at(spec, "gpuCluster.deployCR") == true; s.claims && at(spec, "draDriver.computeDomains.enabled") != false {
		s.lost = append(s.lost, lostKeys{path: "draDriver.computeDomains", why: "Tandem has no ComputeDomains; NVIDIA's driver can serve them beside it"})
	}
	s.withoutPlugin = at(spec, "devicePlugin.enabled") == false
}
