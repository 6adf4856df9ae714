// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
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
