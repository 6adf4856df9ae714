// SPDX-License-Identifier: Apache-2.0

// Package migrate moves a cluster from NVIDIA's device plugin and DRA driver to Tandem and back. Translate turns NVIDIA's configuration
// into values of Tandem's chart. Nodes moves nodes, one after the other, while their pods run.
package migrate

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path"
	"reflect"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/terminal"
)

// Result is a translation.
type Result struct {
	// From names the sources.
	From []string
	// Values are for Tandem's chart. They have no image.
	Values map[string]any
	// Changes are differences in behaviour, Lost are keys without equivalent, and Unneeded are keys without meaning for Tandem. Each is a
	// line "key: what or why". They are sorted.
	Changes, Lost, Unneeded []string
}

// YAML returns a values file, with the changes and losses as comments.
func (r Result) YAML() ([]byte, error) {
	values, err := yaml.Marshal(r.Values)
	if err != nil {
		return nil, fmt.Errorf("write values: %w", err)
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, "# Values of Tandem's chart, from %s. Set image.repository as well.\n", terminal.Plain(strings.Join(r.From, ", "), false))
	for _, part := range []struct {
		title string
		lines []string
	}{{"What changes:", r.Changes}, {"What is lost:", r.Lost}, {"What has no meaning here:", r.Unneeded}} {
		if len(part.lines) == 0 {
			part.lines = []string{"nothing"}
		}
		fmt.Fprintf(&out, "#\n# %s\n", part.title)
		for _, line := range part.lines {
			fmt.Fprintf(&out, "#   %s\n", terminal.Plain(strings.ReplaceAll(line, "\n", " "), false))
		}
	}
	out.Write(values)
	return out.Bytes(), nil
}

// Translate returns the values with which Tandem's chart does what the sources do, as far as it can. It is pure. An error means that the
// sources contradict themselves, or that Tandem's agents would refuse a configuration.
func Translate(sources ...Source) (Result, error) {
	t, err := theTable()
	if err != nil {
		return Result{}, err
	}
	result := Result{Values: map[string]any{}}
	all := make([]*translation, len(sources))
	for i, s := range sources {
		all[i] = &translation{table: t, source: s, out: map[string]any{}, unused: unusedKeys(s, slices.Concat(sources[:i], sources[i+1:]))}
		if err := all[i].run(); err != nil {
			return Result{}, fmt.Errorf("%s: %w", s.Name, err)
		}
	}
	unplaced, err := result.place(all)
	if err != nil {
		return Result{}, err
	}
	for _, one := range all {
		result.From = append(result.From, fmt.Sprintf("%s (%s)", one.source.Name, one.source.Kind))
		result.Changes = append(result.Changes, one.changes...)
		for _, l := range one.lost {
			if l.unneeded {
				result.Unneeded = append(result.Unneeded, l.String())
			} else {
				result.Lost = append(result.Lost, l.String())
			}
		}
		result.Changes = append(result.Changes, merge(result.Values, one.out, one.source, "")...)
	}
	if err := result.settleMap(); err != nil {
		return Result{}, err
	}
	if at(result.Values, "devicePlugin.enabled") == false && at(result.Values, "resources.gpus.enabled") == false {
		return Result{}, errors.New("devicePlugin.enabled and resources.gpus.enabled are both false, so no GPU would be served: " +
			"add what serves the GPUs of this cluster, or remove one of the two keys")
	}
	result.settleResources(t.defaults)
	result.compareDefaults(t, sources, unplaced)
	for _, lines := range []*[]string{&result.Changes, &result.Lost, &result.Unneeded} {
		slices.Sort(*lines)
		*lines = slices.Compact(*lines)
	}
	return result, nil
}

// settleMap removes what contradicts a ConfigMap's configurations, and makes sure that a node without a label has a configuration.
func (r *Result) settleMap() error {
	settings, _ := r.Values["config"].(map[string]any)
	configs, _ := settings["map"].(map[string]any)
	name, named := settings["name"]
	if len(configs) == 0 && !named {
		for _, key := range []string{"default", "fallbackStrategies"} {
			if _, ok := settings[key]; ok {
				delete(settings, key)
				r.Unneeded = append(r.Unneeded, "config."+key+": it needs config.name or config.map")
			}
		}
		if settings != nil && len(settings) == 0 {
			delete(r.Values, "config")
		}
		return nil
	}
	if named && len(configs) > 0 {
		delete(settings, "name") // the ConfigMap was read
	} else if named {
		r.Changes = append(r.Changes, fmt.Sprintf("config.name: the ConfigMap %v must exist in Tandem's namespace; pass its manifest to migrate to check its configurations", name))
	}
	if name, ok := settings["default"]; len(configs) == 0 || ok {
		if _, found := configs[fmt.Sprint(name)]; ok && !found && len(configs) > 0 {
			return fmt.Errorf("config.default: no such configuration: %v (only %s)", name, strings.Join(slices.Sorted(maps.Keys(configs)), ", "))
		}
		return nil
	}
	strategies, ok := settings["fallbackStrategies"].([]any)
	if !ok {
		strategies = []any{"named", "single"}
	}
	_, hasDefault := configs["default"]
	if slices.Contains(strategies, any("empty")) || slices.Contains(strategies, any("named")) && hasDefault || slices.Contains(strategies, any("single")) && len(configs) == 1 {
		return nil
	}
	settings["fallbackStrategies"] = append(slices.Clone(strategies), "empty")
	r.Changes = append(r.Changes, "config.fallbackStrategies: empty is added, because no configuration applies to nodes without the label "+config.ConfigLabel+
		". NVIDIA's plugin does not start on them; Tandem uses its defaults there")
	return nil
}

// translation of one source.
type translation struct {
	table
	source Source
	// unused reports whether a key does not count beside the other sources.
	unused  func(path string) bool
	out     map[string]any
	changes []string
	lost    []lostKeys
	errs    []error
}

func (t *translation) run() error {
	t.lost, t.changes = slices.Clone(t.source.lost), slices.Clone(t.source.changes)
	values := runtime.DeepCopyJSON(t.source.Values)
	if t.source.byVariables && !t.unused("deviceListStrategy") {
		put(values, "deviceListStrategy", "envvar")
		t.change("deviceListStrategy", "envvar, because cdi.enabled of the Operator is false. NVIDIA's container runtime must stay the default")
	}
	if t.source.withoutPlugin && !t.unused("devicePlugin.enabled") {
		t.lost = append(t.lost, lostKeys{
			path: "devicePlugin.enabled", why: "Tandem serves nvidia.com/gpu limits all the same; the value config.tandem.mode=ClaimsOnly prevents it",
		})
	}
	for _, key := range []string{"affinity", "kubeletPlugin.affinity"} {
		if affinity := at(values, key); !isUnset(affinity) {
			put(values, key, withoutExclusion(affinity))
		}
	}
	t.source.Chosen = runtime.DeepCopyJSON(t.source.Chosen)
	if variables, _ := at(values, variablesPath).([]any); len(variables) > 0 {
		left, lost, changes := t.applyVariables(values, t.source.Chosen, variables)
		put(values, variablesPath, left)
		changes = slices.DeleteFunc(changes, func(line string) bool { key, _, _ := strings.Cut(line, ": "); return t.unused(key) })
		t.lost, t.changes = append(t.lost, lost...), append(t.changes, changes...)
	}
	if t.source.Kind != Operator {
		decided := t.charts[t.source.Kind].decided(values, "")
		// What a user set for a release counts: Tandem's default may be another one than NVIDIA's. The affinity that is NVIDIA's default
		// needs labels that go with the release.
		t.visit(t.source.Chosen, func(path string, r row, _ any) {
			if value := at(values, path); value != nil && (r.does == kept || r.does == moved) && !strings.Contains(path, "affinity") {
				put(decided, path, value)
			}
		}, func(string, any) {})
		values = decided
	}
	var moves []func()
	var unused []string
	t.visit(values, func(path string, r row, value any) {
		if (r.does == kept || r.does == moved) && !isUnset(value) && t.unused(path) {
			unused = append(unused, path)
			return
		}
		switch r.does {
		case kept:
			t.keep(path, r, value)
		case moved:
			moves = append(moves, func() { t.move(path, r, value) })
		case refused:
			if !slices.ContainsFunc(r.Only, func(only any) bool { return fmt.Sprint(only) == fmt.Sprint(value) }) {
				t.lose(path, r, value)
			}
		case lost, unneeded:
			t.lose(path, r, value)
		}
	}, func(path string, value any) { t.lose(path, unknownKey, value) })
	for _, move := range moves {
		move()
	}
	t.reportUnused(unused)
	for _, above := range []string{"", "kubeletPlugin."} {
		if kind := at(values, above+"updateStrategy.type"); at(t.out, "updateStrategy.maxUnavailable") != nil && !isUnset(kind) && kind != "RollingUpdate" {
			delete(t.out, "updateStrategy")
			t.lost = append(t.lost, lostKeys{path: above + "updateStrategy.rollingUpdate.maxUnavailable", why: "it needs updateStrategy.type RollingUpdate", unneeded: true})
		}
	}
	t.checkConfigs()
	return errors.Join(t.errs...)
}

var unknownKey = row{Why: "unknown key", does: lost}

// lostKeys are keys that have no effect, for one reason.
type lostKeys struct {
	// path is that of the key, or of the common parent of several keys.
	path string
	// keys are relative to path. Without keys, path itself is the key.
	keys []string
	// why is the reason.
	why string
	// unneeded is set if a user misses nothing.
	unneeded bool
}

func (l lostKeys) String() string {
	if len(l.keys) == 0 {
		return l.path + ": " + l.why
	}
	return l.path + " (" + strings.Join(l.keys, ", ") + "): " + l.why
}

// lose reports a key without effect, if it is set and a user set it.
func (t *translation) lose(path string, r row, value any) {
	if r.Why == "" || t.source.Chosen != nil && at(t.source.Chosen, path) == nil {
		return
	}
	t.lost = addLost(t.lost, path, r, value)
}

// addLost adds a key without effect. Keys of one row have one line. A user who turns off what Tandem does not have loses nothing.
func addLost(list []lostKeys, path string, r row, value any) []lostKeys {
	if hasNothing(value) {
		return list
	}
	one := lostKeys{path: path, why: r.Why, unneeded: r.does == unneeded || isEmpty(value)}
	if len(r.Keys) == 0 {
		return append(list, one)
	}
	key := strings.TrimPrefix(path, r.Key+".")
	if last := len(list) - 1; last >= 0 && list[last].path == r.Key && list[last].why == r.Why && list[last].unneeded == one.unneeded && len(list[last].keys) > 0 {
		list[last].keys = append(list[last].keys, key)
		return list
	}
	one.path, one.keys = r.Key, []string{key}
	return append(list, one)
}

func (t *translation) change(path, what string) { t.changes = append(t.changes, path+": "+what) }

func (t *translation) fail(path, format string, args ...any) {
	t.errs = append(t.errs, fmt.Errorf("%s: %w", path, fmt.Errorf(format, args...)))
}

// keep copies a key, unless it has the chart's default.
func (t *translation) keep(path string, r row, value any) {
	usual := at(t.defaults, path)
	if usual == nil {
		usual = r.Default
	}
	if inside, ok := value.(map[string]any); ok && path == "config" {
		value = withoutUsual(inside, usual)
	}
	if _, isMap := value.(map[string]any); isMap && isUnset(value) || isUnset(value) && isUnset(usual) || reflect.DeepEqual(plain(value), plain(usual)) {
		return
	}
	if len(r.Only) > 0 && !slices.Contains(r.Only, value) {
		t.lose(path, r, value)
		return
	}
	put(t.out, path, value)
	if r.Note != "" {
		t.change(path, r.Note)
	}
}

// withoutUsual leaves out the keys of several configurations that are not set.
func withoutUsual(values map[string]any, usual any) map[string]any {
	defaults, _ := usual.(map[string]any)
	left := map[string]any{}
	for key, value := range values {
		if several := slices.Contains([]string{"name", "map", "default", "fallbackStrategies"}, key); !several ||
			!isUnset(value) && !reflect.DeepEqual(plain(value), plain(defaults[key])) {
			left[key] = value
		}
	}
	return left
}

// plain returns a value with the types that JSON gives it.
func plain(value any) (same any) {
	text, err := json.Marshal(value)
	if err != nil || json.Unmarshal(text, &same) != nil {
		return value
	}
	return same
}

// move gives a key the name that it has in Tandem's chart, as templates/_nvidia.tpl does.
func (t *translation) move(from string, r row, value any) {
	if isUnset(value) {
		return
	}
	if inside, ok := value.(map[string]any); ok && len(r.Add) > 0 {
		inside = maps.Clone(inside)
		for key, more := range r.Add {
			if isUnset(inside[key]) {
				inside[key] = more
			}
		}
		value = inside
	}
	if r.Parent != "" {
		text := path.Clean(fmt.Sprint(value)) // NVIDIA's charts accept a slash at the end, Tandem's does not
		if path.Base(text) != r.Parent {
			t.fail(from, "%q does not end in /%s, so %s cannot be derived from it: set %s in Tandem's values", text, r.Parent, r.To, r.To)
			return
		}
		value = path.Dir(text)
	}
	if r.To == "updateStrategy.maxUnavailable" && slices.Contains([]string{"0", "0%"}, fmt.Sprint(value)) {
		t.lost = append(t.lost, lostKeys{path: from, why: "an update must stop an agent before it starts the next one, because only one may run on a node"})
		return
	}
	is := at(t.out, r.To)
	if !isUnset(is) && !reflect.DeepEqual(plain(is), plain(value)) {
		t.fail(from, "is %s, but %s, another name of the setting, is %s: remove one of them", brief(from, value), r.To, brief(r.To, is))
		return
	}
	if reflect.DeepEqual(plain(value), plain(r.Default)) {
		return
	}
	if inside, ok := value.(map[string]any); ok {
		inside = maps.Clone(inside)
		usual, _ := r.Default.(map[string]any)
		for key := range usual {
			if _, has := inside[key]; !has {
				inside[key] = nil // Helm would add the chart's
			}
		}
		value = inside
	}
	put(t.out, r.To, value)
	if note := t.rows[r.To].Note; note != "" {
		t.change(r.To, note)
	}
}

// configs returns the texts of the node configurations by their paths in the values.
func configs(values map[string]any) (map[string]string, error) {
	settings, _ := values["config"].(map[string]any)
	several, _ := settings["map"].(map[string]any)
	found := map[string]any{}
	for name, one := range several {
		found["config.map."+name] = one
	}
	// Without all keys of several configurations.
	if one := withoutUsual(settings, settings); len(several) == 0 && settings["name"] == nil && (len(one) > 0 || len(settings) == 0 && settings != nil) {
		found["config"] = one
	}
	texts := map[string]string{}
	for at, one := range found {
		text, isText := one.(string)
		if !isText {
			asYAML, err := yaml.Marshal(one)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", at, err)
			}
			text = string(asYAML)
		}
		texts[at] = text
	}
	return texts, nil
}

// checkConfigs validates the node configurations as the agents will.
func (t *translation) checkConfigs() {
	texts, err := configs(t.out)
	if err != nil {
		t.errs = append(t.errs, err)
	}
	for _, at := range slices.Sorted(maps.Keys(texts)) {
		text := texts[at]
		without, err := config.CheckFile([]byte(text), config.UnknownKeysError)
		if err != nil {
			lenient, still := config.CheckFile([]byte(text), config.UnknownKeysWarn)
			if still != nil {
				t.fail(at, "Tandem's agents would refuse it: %w", still)
				continue
			}
			without = lenient
			put(t.out, "unknownConfigKeys", config.UnknownKeysWarn)
		}
		for _, line := range without {
			key, why, _ := strings.Cut(line, ": ")
			if unknown, isUnknown := strings.CutPrefix(line, "unknown field "); isUnknown {
				key, why = strings.Trim(unknown, `"`), "unknown key"
			}
			t.lost = append(t.lost, lostKeys{path: at + "." + key, why: why})
		}
		parsed, err := parse([]byte(text))
		if err != nil {
			t.fail(at, "%w", err)
			continue
		}
		t.compare(at, parsed)
	}
}

// compare reports what a node configuration does differently here.
func (t *translation) compare(above string, parsed map[string]any) {
	if path := "flags.useNodeFeatureAPI"; at(parsed, path) == true {
		t.change(above+"."+path, t.rows["nfd.enableNodeFeatureApi"].Note)
	}
	sharing, _ := parsed["sharing"].(map[string]any)
	for strategy, section := range sharing {
		path := above + ".sharing." + strategy
		if strategy == "mps" && !isEmpty(section) {
			t.change(path, "Tandem's controller starts a pod with an MPS daemon for each GPU that needs one, instead of a DaemonSet")
		}
		resources, _ := at(section, "resources").([]any)
		for _, one := range resources {
			if devices := at(one, "devices"); devices != nil && devices != "all" {
				t.change(path+".resources[].devices", "only these devices are shared; NVIDIA's plugin ignores the list and shares all")
			}
		}
	}
}

// usesVariables reports whether devices are passed to containers by a strategy without CDI, on any node. A variable overrides the
// configurations.
func (r *Result) usesVariables(texts map[string]string) bool {
	strategies := []any{r.Values["deviceListStrategy"]}
	if strategies[0] == nil {
		for _, text := range texts {
			if values, err := parse([]byte(text)); err == nil {
				strategies = append(strategies, at(values, "flags.plugin.deviceListStrategy"))
			}
		}
	}
	return slices.ContainsFunc(strategies, func(one any) bool {
		text := fmt.Sprint(one)
		return strings.Contains(text, "envvar") || strings.Contains(text, "volume-mounts")
	})
}

// compareDefaults reports differences between the defaults of NVIDIA's charts and Tandem's, and what depends on several keys. unplaced is the
// result of place.
func (r *Result) compareDefaults(t table, sources []Source, unplaced []string) {
	texts, _ := configs(r.Values) // they were valid
	configured := func(path string) bool {
		for _, text := range texts {
			if values, err := parse([]byte(text)); err == nil && !isUnset(at(values, path)) {
				return true
			}
		}
		return false
	}
	variables, _ := r.Values["extraEnv"].([]any)
	// isSet reports whether a key is set, by a variable or in the configuration as well.
	isSet := func(key, path string) bool {
		return at(r.Values, key) != nil || configured(path) || slices.ContainsFunc(variables, func(one any) bool {
			name, _ := at(one, "name").(string)
			return t.variables[name] == key
		})
	}
	change := func(path, what string) { r.Changes = append(r.Changes, path+": "+what) }
	has := func(is func(Source) bool) bool { return slices.ContainsFunc(sources, is) }
	had := func(kinds ...Kind) bool {
		return has(func(s Source) bool { return slices.Contains(kinds, s.Kind) })
	}
	limits, claims := had(DevicePlugin, Operator, Configuration), had(DRADriver) || has(func(s Source) bool { return s.claims })
	serves := func(path string) bool { return at(r.Values, path) != false }
	byCDI := has(func(s Source) bool { return s.cdi && s.servesLimits() })
	ofOperator := has(func(s Source) bool { return s.Kind == Operator && s.servesLimits() })
	if ofOperator && r.usesVariables(texts) && !isSet("compatWithCPUManager", "") {
		put(r.Values, "compatWithCPUManager", true)
		change("compatWithCPUManager", "true, as in GPU Operator's DaemonSet, whose PASS_DEVICE_SPECS is true by default")
	}
	if limits && serves("devicePlugin.enabled") && !byCDI && !isSet("deviceListStrategy", "flags.plugin.deviceListStrategy") {
		change("deviceListStrategy", "it is not set. NVIDIA's default is envvar, Tandem's is cdi-cri: the runtime needs CDI, and containers see NVIDIA_VISIBLE_DEVICES=void")
	}
	if serves("devicePlugin.enabled") && serves("resources.gpus.enabled") && !configured("tandem.mode") {
		switch {
		case !claims:
			change("config.tandem.mode", "nodes serve ResourceClaims as well (Dual); DevicePluginOnly prevents it")
		case !limits:
			change("config.tandem.mode", "nodes serve nvidia.com/gpu limits by a device plugin as well (Dual); ClaimsOnly prevents it")
		}
	}
	if claims {
		change("deviceClasses.create", "set it to false while NVIDIA's release owns the DeviceClasses gpu.nvidia.com and mig.nvidia.com")
		if at(r.Values, "webhook.enabled") == nil && !has(func(s Source) bool { return at(s.Values, "webhook.enabled") == true }) {
			change("webhook.enabled", "it has NVIDIA's default, false, or is not set. Tandem has a webhook, which needs no cert-manager; false turns it off")
		}
		if has(func(s Source) bool {
			return s.Kind == DRADriver && at(s.Values, "resources.computeDomains.enabled") != false
		}) {
			r.Lost = append(r.Lost, "resources.computeDomains: "+t.rows["resources.computeDomains"].Why)
		}
	}
	plugin := func(is func(any) bool) bool {
		return has(func(s Source) bool { return s.Kind == DevicePlugin && is(at(s.Values, "gfd.enabled")) })
	}
	switch {
	case plugin(func(enabled any) bool { return enabled == true }):
		if !isSet("gfd.noTimestamp", "flags.gfd.noTimestamp") {
			put(r.Values, "gfd.noTimestamp", false)
			change("gfd.noTimestamp", "false writes the label nvidia.com/gfd.timestamp as GPU Feature Discovery does; remove the key to leave the label out")
		}
	case at(r.Values, "gfd.enabled") == nil && plugin(func(any) bool { return true }) && !had(Operator):
		change("gfd.enabled", "it is false in NVIDIA's chart by default. Tandem's agents write the labels of GPU Feature Discovery, unless others own them; false prevents it")
	}
	if at(r.Values, "updateStrategy.maxUnavailable") == nil {
		switch {
		case had(DevicePlugin, Operator):
			change("updateStrategy.maxUnavailable", "it has NVIDIA's default, or is not set. An upgrade restarts Tandem's agents on 10% of the nodes at a time, and NVIDIA's on one node at a time")
		case claims:
			change("updateStrategy.maxUnavailable", "it has NVIDIA's default, or is not set. An upgrade restarts Tandem's agents on 10% of the nodes at a time, and NVIDIA's on all nodes at once")
		}
	}
	if had(DevicePlugin, DRADriver, Operator) {
		r.comparePlacement(unplaced, change)
	}
}

// comparePlacement reports on which nodes Tandem's agents run but NVIDIA's do not, and what they need there. It does not report keys in unplaced.
func (r *Result) comparePlacement(unplaced []string, change func(path, what string)) {
	placed, _ := json.Marshal([]any{r.Values["nodeSelector"], at(r.Values, "affinity.nodeAffinity")})
	if string(placed) == "[null,null]" && !slices.Contains(unplaced, "affinity") {
		change("affinity", "it has NVIDIA's default, or is not set. By default, NVIDIA's software runs only on nodes with labels of Node Feature Discovery or GPU Operator. Tandem's agents run "+
			"on every Linux node, and do nothing on one without GPUs")
	}
	for _, label := range []struct{ prefix, advice string }{
		{"feature.node.kubernetes.io/", "Node Feature Discovery writes them. If NVIDIA's release installed it, install it by itself before you uninstall that release"},
		{"nvidia.com/", "Tandem's agent writes most of them, but only where it runs. Write them yourself before you uninstall NVIDIA's release"},
	} {
		if strings.Contains(string(placed), `"`+label.prefix) {
			change("affinity, nodeSelector", "the agents run only on nodes with labels "+label.prefix+"*. "+label.advice+", or remove the keys: agents may run on every node")
		}
	}
	if r.Values["tolerations"] == nil && !slices.Contains(unplaced, "tolerations") {
		change("tolerations", "it has NVIDIA's default, or is not set. By default, NVIDIA's agents tolerate only the taint nvidia.com/gpu and a few others. Tandem's agents tolerate every taint")
	}
}
