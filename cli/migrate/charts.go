// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	_ "embed"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
)

//go:embed charts.yaml
var chartsText []byte

// chart has the facts about a chart of NVIDIA's. charts.yaml explains the fields.
type chart struct {
	Newest   string           `json:"newest"`
	Keys     map[string][]any `json:"keys"`
	Kept     map[string]any   `json:"kept"`
	Moved    []row            `json:"moved"`
	Lost     []row            `json:"lost"`
	Unneeded []row            `json:"unneeded"`
	Others   []string         `json:"others"`
}

// decided returns the values below a path without those that are defaults of the chart. What is left is a decision of the user, or of those who
// changed the chart.
func (c chart) decided(values map[string]any, above string) map[string]any {
	left := map[string]any{}
	for key, value := range values {
		path := above + key
		if slices.ContainsFunc(c.Keys[path], func(usual any) bool { return reflect.DeepEqual(plain(usual), plain(value)) }) {
			continue
		}
		if inside, ok := value.(map[string]any); ok && len(inside) > 0 {
			if inside = c.decided(inside, path+"."); len(inside) == 0 {
				continue
			}
			value = inside
		}
		left[key] = value
	}
	return left
}

// Decided returns the values of a chart without those that are NVIDIA's defaults.
func Decided(name string, values map[string]any) (map[string]any, error) {
	t, err := theTable()
	return t.charts[chartKinds[name]].decided(values, ""), err
}

// knows reports whether a key of the chart is path, above it, or below it.
func (c chart) knows(path string) bool {
	isNear := func(key string) bool { return strings.HasPrefix(path+".", key+".") || strings.HasPrefix(key, path+".") }
	for key := range c.Keys {
		if isNear(key) {
			return true
		}
	}
	for _, rows := range [][]row{c.Moved, c.Lost, c.Unneeded} {
		for _, r := range rows {
			if slices.ContainsFunc(r.paths(), isNear) {
				return true
			}
		}
	}
	return slices.ContainsFunc(c.Others, isNear)
}

// chartOf returns the chart that values are for: the one with the fewest keys that it does not know.
func (t table) chartOf(values map[string]any) (Kind, error) {
	paths := leaves(values, "")
	var found []string
	fewest := len(paths)
	for _, kind := range slices.Sorted(maps.Keys(t.charts)) {
		unknown := 0
		for _, path := range paths {
			if !t.charts[kind].knows(path) {
				unknown++
			}
		}
		if unknown < fewest {
			found, fewest = nil, unknown
		}
		if unknown == fewest {
			found = append(found, string(kind))
		}
	}
	if len(found) != 1 {
		return "", fmt.Errorf("its keys (%s) do not say whether it is for %s: name the chart, as in -f %s=FILE",
			strings.Join(paths[:min(len(paths), 5)], ", "), strings.Join(found, " or "), found[0])
	}
	return Kind(found[0]), nil
}

// leaves returns the paths of all keys with a value that is no map, or an empty one. They are sorted.
func leaves(values map[string]any, above string) (paths []string) {
	for _, key := range slices.Sorted(maps.Keys(values)) {
		if inside, ok := values[key].(map[string]any); ok && len(inside) > 0 {
			paths = append(paths, leaves(inside, above+key+".")...)
		} else {
			paths = append(paths, above+key)
		}
	}
	return paths
}

// IsChart reports whether name is that of a chart of NVIDIA's.
func IsChart(name string) bool {
	_, ok := chartKinds[name]
	return ok
}
