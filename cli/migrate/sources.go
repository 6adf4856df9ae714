// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// pluginIsOff reports whether a source turns its device plugin off: a release that has only GPU Feature Discovery, or GPU Operator beside
// another device plugin or NVIDIA's DRA driver.
func (s Source) pluginIsOff() bool {
	return s.withoutPlugin || s.Kind == DevicePlugin && at(s.Values, "devicePlugin.enabled") == false
}

// servesLimits reports whether a source runs a device plugin.
func (s Source) servesLimits() bool {
	return (s.Kind == DevicePlugin || s.Kind == Operator) && !s.pluginIsOff()
}

// servesClaims reports whether a source runs a DRA driver for GPUs.
func (s Source) servesClaims() bool {
	return s.claims || s.Kind == DRADriver && at(s.Values, "resources.gpus.enabled") != false
}

// writesLabels reports whether a source runs GPU Feature Discovery. GPU Operator does by default.
func (s Source) writesLabels() bool {
	enabled := at(s.Values, "gfd.enabled")
	return enabled == true || s.Kind == Operator && !s.partial && enabled != false
}

// Of GPU Operator without a device plugin, operatorsOthers are for its other programs as well, and operatorsDriver for the DRA driver, if it
// runs one.
var (
	operatorsOthers = []string{"nvidiaDriverRoot", "kubeletPlugin.kubeletPluginsDirectoryPath"}
	operatorsDriver = []string{"tolerations", "priorityClassName", "podAnnotations", "updateStrategy"}
)

// placement are the keys that say on which nodes agents run.
var placement = []string{"affinity", "nodeSelector", "tolerations"}

// names reports whether a source takes its node configurations from a ConfigMap that was read.
func (s Source) names(configMap Source) bool {
	return at(s.Values, "config.name") == configMap.configMap && (configMap.release == "" || configMap.release == s.release)
}

// unusedKeys returns which keys of a source do not count, because another source runs the program that they are for. What a source says about
// a program that it turns off must not decide about the one that runs.
func unusedKeys(s Source, others []Source) func(path string) bool {
	has := func(is func(Source) bool) bool { return slices.ContainsFunc(others, is) }
	limits, claims, labels := has(Source.servesLimits), has(Source.servesClaims), has(Source.writesLabels)
	isBelow := func(path string, keys ...string) bool {
		return slices.ContainsFunc(keys, func(key string) bool { return strings.HasPrefix(path+".", key+".") })
	}
	return func(path string) bool {
		switch {
		case path == "gfd.enabled":
			return labels && at(s.Values, path) == false
		case s.Kind == Configuration:
			names := func(other Source) bool { return other.names(s) }
			return limits && has(names) && !has(func(other Source) bool { return names(other) && !other.pluginIsOff() })
		case s.pluginIsOff() && limits && isBelow(path, "gfd", "nfd"):
			return false
		case s.pluginIsOff() && limits && s.Kind == Operator:
			return !isBelow(path, operatorsOthers...) && !(s.claims && isBelow(path, operatorsDriver...))
		case s.pluginIsOff():
			return limits || claims && !s.claims && isBelow(path, placement...)
		case s.Kind == DRADriver && !s.servesClaims() && (limits || claims): // it serves ComputeDomains only
			return path == "resources.gpus.enabled" && claims || isBelow(path, "kubeletPlugin") && path != "kubeletPlugin.kubeletPluginsDirectoryPath"
		}
		return false
	}
}

// reportUnused says which keys of a source do not count.
func (t *translation) reportUnused(keys []string) {
	switch s := t.source; {
	case len(keys) == 0:
	case s.Kind == Configuration:
		t.change("config", s.Name+" is not used: only a source that turns its device plugin off names it, and another source has a device plugin")
	case s.Kind == DRADriver:
		t.change("resources.gpus.enabled", s.Name+" has false, and another source serves GPUs. Not used of it: "+strings.Join(keys, ", "))
	case s.pluginIsOff():
		t.change("devicePlugin.enabled", s.Name+" has false, and another source serves GPUs. Not used of it: "+strings.Join(keys, ", "))
	}
}

// places reports whether a source says on which nodes agents run, by its keys or by their absence: without a node selector and an affinity,
// NVIDIA's software runs on all nodes with GPUs.
func (s Source) places() bool {
	return s.Kind != Configuration && !s.partial && (s.servesLimits() || s.servesClaims())
}

// place makes the placement of the sources one. Keys of one source must not take the agents off the nodes of another. left are the keys that it
// leaves out for that reason. An error means that no placement is right: settings of one source would reach the nodes of the other.
func (r *Result) place(all []*translation) (left []string, err error) {
	var placed []*translation
	for _, one := range all {
		if one.source.places() {
			placed = append(placed, one)
		}
	}
	if len(placed) < 2 {
		return nil, nil
	}
	differ := func(of []*translation, keys ...string) bool {
		return slices.ContainsFunc(of, func(one *translation) bool {
			return slices.ContainsFunc(keys, func(key string) bool { return !reflect.DeepEqual(one.placed(key), of[0].placed(key)) })
		})
	}
	restricted := slices.DeleteFunc(slices.Clone(placed), func(one *translation) bool {
		return one.placed("nodeSelector") == nil && one.placed("affinity") == nil
	})
	switch {
	case differ(restricted, "affinity", "nodeSelector"):
		var names []string
		for _, one := range restricted {
			names = append(names, one.source.Name)
		}
		return nil, fmt.Errorf("sources with different nodeSelector or affinity (%s) serve different nodes: translate each alone with -f, "+
			"and join the results by hand", strings.Join(slices.Compact(slices.Sorted(slices.Values(names))), ", "))
	case differ(placed, "affinity", "nodeSelector"):
		left = placement
		r.Changes = append(r.Changes, "affinity, nodeSelector, tolerations: left out, because not all sources have the same, and NVIDIA's software of one "+
			"of them runs on all nodes with GPUs. Tandem's agents run on every Linux node, and tolerate every taint")
		for _, one := range restricted {
			one.reportEverywhere(all)
		}
	case differ(placed, "tolerations"):
		left = []string{"tolerations"}
		r.Changes = append(r.Changes, "tolerations: left out, because the sources have different ones. Tandem's agents tolerate every taint")
	}
	for i, one := range placed {
		for _, key := range placement {
			if i > 0 || slices.Contains(left, key) {
				delete(one.out, key)
				one.changes = slices.DeleteFunc(one.changes, func(line string) bool { return line == key+": "+one.rows[key].Note })
			}
		}
	}
	return left, nil
}

// placed returns a key of the placement; nil if it does not restrict the nodes more than Tandem's default.
func (t *translation) placed(key string) any {
	value := t.out[key]
	if labels, ok := value.(map[string]any); ok && key == "nodeSelector" {
		labels = maps.Clone(labels)
		maps.DeleteFunc(labels, func(label string, value any) bool { return label == corev1.LabelOSStable && value == "linux" })
		value = labels
	}
	if isEmpty(value) {
		return nil
	}
	return plain(value)
}

// reportEverywhere names the settings that a source had for some nodes only, and that all nodes get now.
func (t *translation) reportEverywhere(all []*translation) {
	var keys []string
	for _, key := range slices.Sorted(maps.Keys(t.out)) {
		ofAgents := !slices.Contains(placement, key) && !slices.Contains([]string{"controller", "webhook", "imagePullSecrets"}, key)
		if ofAgents && !slices.ContainsFunc(all, func(other *translation) bool { return other != t && other.source.places() && other.out[key] != nil }) {
			keys = append(keys, key)
		}
	}
	if len(keys) > 0 {
		t.change(strings.Join(keys, ", "), "only "+t.source.Name+" has it, for the nodes of its nodeSelector or affinity. It applies to all nodes now")
	}
}

// merge adds values to into. Where both have a key, into keeps its value; merge returns those that differ.
func merge(into, values map[string]any, from Source, above string) (changes []string) {
	for _, key := range slices.Sorted(maps.Keys(values)) {
		at, value := above+key, values[key]
		old, ok := into[key]
		inside, isMap := value.(map[string]any)
		oldInside, wasMap := old.(map[string]any)
		switch {
		case !ok:
			into[key] = value
		case isMap && wasMap && at != "affinity" && at != "nodeSelector":
			changes = append(changes, merge(oldInside, inside, from, at+".")...)
		case fmt.Sprint(old) != fmt.Sprint(value): // a variable has numbers as text
			changes = append(changes, fmt.Sprintf("%s: %s has %s, which is not used: an earlier source sets it to %s",
				at, from.Name, brief(at, value), brief(at, old)))
		}
	}
	return changes
}

// brief describes a value in a message. It does not show environment variables, because they may be secret.
func brief(path string, value any) string {
	if strings.HasSuffix(strings.ToLower(path), "env") {
		return "a list of variables"
	}
	text, err := json.Marshal(value)
	if err != nil {
		return fmt.Sprint(value)
	}
	return string(text)
}
