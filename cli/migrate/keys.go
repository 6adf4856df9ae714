// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"

	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/deployments/helm"
)

// row is a row of the chart's files/nvidia-keys.yaml, which explains its fields.
type row struct {
	Key     string         `json:"key"`
	Keys    []string       `json:"keys"`
	To      string         `json:"to"`
	Default any            `json:"default"`
	Add     map[string]any `json:"add"`
	Parent  string         `json:"parent"`
	Only    []any          `json:"only"`
	Why     string         `json:"why"`
	Note    string         `json:"note"`
	Name    string         `json:"name"`
	Lost    bool           `json:"lost"`
	// does is the list that the row is in.
	does effect
}

type effect int

const (
	kept effect = iota
	moved
	unneeded
	lost
	refused
)

// paths returns the keys of a row.
func (r row) paths() []string {
	if len(r.Keys) == 0 {
		return []string{r.Key}
	}
	var paths []string
	for _, key := range r.Keys {
		paths = append(paths, r.Key+"."+key)
	}
	return paths
}

// table has the rows by path, and the values of the chart without any key set.
type table struct {
	rows     map[string]row
	defaults map[string]any
	// variables are the keys that variables of the environment of NVIDIA's programs set.
	variables map[string]string
	// charts are NVIDIA's, and operator has the rows of GPU Operator's keys.
	charts   map[Kind]chart
	operator *table
}

// rowList is a list of rows, and what those do.
type rowList struct {
	rows []row
	does effect
}

func (t *table) add(lists []rowList) error {
	for _, list := range lists {
		for _, r := range list.rows {
			r.does = list.does
			if r.Lost {
				r.does = lost
			}
			for _, path := range r.paths() {
				if _, twice := t.rows[path]; twice {
					return fmt.Errorf("read the keys of NVIDIA's charts: %s is listed twice", path)
				}
				t.rows[path] = r
			}
		}
	}
	return nil
}

// theTable reads the chart's files and charts.yaml, which are embedded in the program.
var theTable = sync.OnceValues(func() (table, error) {
	var lists struct{ Moved, Variables, Unused, Refused, Own, Same []row }
	if err := yaml.Unmarshal(helm.NVIDIAKeys, &lists); err != nil {
		return table{}, fmt.Errorf("read nvidia-keys.yaml of the chart: %w", err)
	}
	t := table{rows: map[string]row{}, variables: maps.Clone(moreVariables), operator: &table{rows: map[string]row{}}}
	if err := yaml.Unmarshal(helm.Values, &t.defaults); err != nil {
		return table{}, fmt.Errorf("read values.yaml of the chart: %w", err)
	}
	if err := yaml.UnmarshalStrict(chartsText, &t.charts); err != nil {
		return table{}, fmt.Errorf("read charts.yaml: %w", err)
	}
	for _, r := range lists.Variables {
		t.variables[r.Name] = r.Key
	}
	operator := t.charts[Operator]
	var others []row
	for _, key := range operator.Others {
		others = append(others, row{Key: key})
	}
	return t, errors.Join(
		t.operator.add([]rowList{{operator.Moved, moved}, {operator.Lost, lost}, {operator.Unneeded, unneeded}, {others, kept}}),
		t.add([]rowList{
			{lists.Moved, moved}, {lists.Variables, kept}, {lists.Unused, unneeded}, {lists.Refused, refused}, {lists.Own, unneeded}, {lists.Same, kept},
			{t.charts[DevicePlugin].Unneeded, unneeded}, {t.charts[DRADriver].Unneeded, unneeded},
		}))
})

// below reports whether a key below path has a row of its own.
func (t table) below(path string) bool {
	for key := range t.rows {
		if strings.HasPrefix(key, path+".") || path == "" {
			return true
		}
	}
	return false
}

// visit calls do for each key of values that has a row, or a row above it, and unknown for each other key. The order is by name.
func (t table) visit(values map[string]any, do func(path string, r row, value any), unknown func(path string, value any)) {
	var walk func(path string, above *row, value any)
	walk = func(path string, above *row, value any) {
		if r, ok := t.rows[path]; ok {
			above = &r
		}
		if inside, isMap := value.(map[string]any); isMap && t.below(path) {
			for _, key := range slices.Sorted(maps.Keys(inside)) {
				walk(strings.TrimPrefix(path+"."+key, "."), above, inside[key])
			}
			return
		}
		switch {
		case above != nil:
			do(path, *above, value)
		case !t.below(path) || !isEmpty(value):
			unknown(path, value)
		}
	}
	walk("", nil, values)
}

// at returns what a value has at a path; nil if it has nothing there.
func at(value any, path string) any {
	for key := range strings.SplitSeq(path, ".") {
		inside, _ := value.(map[string]any)
		value = inside[key]
	}
	return value
}

// put sets the value at a path.
func put(values map[string]any, path string, value any) {
	keys := strings.Split(path, ".")
	for _, key := range keys[:len(keys)-1] {
		inside, ok := values[key].(map[string]any)
		if !ok {
			inside = map[string]any{}
			values[key] = inside
		}
		values = inside
	}
	values[keys[len(keys)-1]] = value
}

// isEmpty reports whether a value sets nothing: it is null, false, zero, or has only such values.
func isEmpty(value any) bool {
	return hasOnly(value, func(one any) bool { return isUnset(one) || reflect.ValueOf(one).IsZero() })
}

// hasNothing reports whether a value and all in it are not set.
func hasNothing(value any) bool { return hasOnly(value, isUnset) }

// hasOnly reports whether is holds for a value or, in a map, for all values.
func hasOnly(value any, is func(any) bool) bool {
	inside, ok := value.(map[string]any)
	if !ok {
		return is(value)
	}
	for _, one := range inside {
		if !hasOnly(one, is) {
			return false
		}
	}
	return true
}

// isUnset reports whether the chart's templates treat a value as not set. False and 0 are set.
func isUnset(value any) bool {
	switch v := value.(type) {
	case nil:
		return true
	case string:
		return v == ""
	case map[string]any:
		return len(v) == 0
	case []any:
		return len(v) == 0
	}
	return false
}
