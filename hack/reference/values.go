// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

const chart = "deployments/helm/tandem"

// values has a row for each key of values.yaml, with its comment and with the type of the schema.
func values(root string) (string, error) {
	data, err := os.ReadFile(filepath.Join(root, chart, "values.yaml"))
	if err != nil {
		return "", err
	}
	var document yaml.Node
	if err := yaml.Unmarshal(data, &document); err != nil {
		return "", err
	}
	schema, err := readSchema(filepath.Join(root, chart, "values.schema.json"))
	if err != nil {
		return "", err
	}
	t := newTable("value", "type", "default", "meaning")
	if err := valueRows(t, "", document.Content[0], schema); err != nil {
		return "", err
	}
	return header("Values of the chart", chart+"/values.yaml and values.schema.json",
		"`helm` refuses other keys and other types. It accepts the keys of NVIDIA's charts as well ([what they do here](../../"+chart+
			"/README.md#values-of-nvidias-charts)). The [page of the chart](../../"+chart+"/README.md) says what to set on which cluster.") + "\n" + t.String(), nil
}

// valueRows adds the keys of a map. A map has a row of its own if it has a comment or no keys.
func valueRows(t *table, prefix string, of *yaml.Node, in *schema) error {
	for i := 0; i < len(of.Content); i += 2 {
		key, value := of.Content[i], of.Content[i+1]
		name := prefix + key.Value
		known, found := in.property(key.Value)
		if !found {
			return fmt.Errorf("value %s is in values.yaml and not in values.schema.json", name)
		}
		comment := valueComment(key.HeadComment)
		// The keys of a map that the schema does not list are an example of the user's own.
		nested := value.Kind == yaml.MappingNode && len(value.Content) > 0 && known.lists(value.Content[0].Value)
		switch {
		case !nested:
			standard, err := oneLine(value)
			if err != nil {
				return err
			}
			t.row(code(name), known.words(), code(standard), comment)
		case comment != "":
			t.row(code(name), "", "", comment)
		}
		if nested {
			if err := valueRows(t, name+".", value, known); err != nil {
				return err
			}
		}
	}
	return nil
}

// oneLine is a default as in YAML's flow style.
func oneLine(value *yaml.Node) (string, error) {
	flow := *value
	flow.Style |= yaml.FlowStyle
	flow.HeadComment, flow.LineComment, flow.FootComment = "", "", ""
	text, err := yaml.Marshal(&flow)
	return strings.Join(strings.Fields(string(text)), " "), err
}

// option is a line of a comment that explains one of several settings: two spaces, the setting, and what it means.
var option = regexp.MustCompile(`^ {3}(\S+) {2,}(\S.*)$`)

func valueComment(comment string) string {
	text, between := "", ""
	for line := range strings.Lines(comment) {
		line = strings.TrimPrefix(strings.TrimRight(line, "\n"), "#")
		if m := option.FindStringSubmatch(line); m != nil {
			text += fmt.Sprintf("<br>%s: %s", code(m[1]), prose(m[2]))
			between = "<br>"
		} else if words := prose(line); words != "" {
			text += between + words
			between = " "
		}
	}
	return text
}

// schema is a part of a JSON schema that the tables need.
type schema struct {
	Ref         string             `json:"$ref"`
	Type        any                `json:"type"`
	Description string             `json:"description"`
	Enum        []any              `json:"enum"`
	AnyOf       []*schema          `json:"anyOf"`
	Items       *schema            `json:"items"`
	Properties  map[string]*schema `json:"properties"`
	Definitions map[string]*schema `json:"definitions"`
	root        *schema
}

func readSchema(path string) (*schema, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	s := &schema{}
	if err := json.Unmarshal(data, s); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	s.root = s
	return s, nil
}

func (s *schema) resolved() *schema {
	if name, is := strings.CutPrefix(s.Ref, "#/definitions/"); is && s.root.Definitions[name] != nil {
		found := *s.root.Definitions[name]
		found.root = s.root
		return &found
	}
	return s
}

func (s *schema) property(name string) (*schema, bool) {
	found := s.resolved().Properties[name]
	if found == nil {
		return nil, false
	}
	next := *found
	next.root = s.root
	return &next, true
}

func (s *schema) lists(key string) bool {
	_, found := s.property(key)
	return found
}

// words names the type, or lists the allowed values. What null and "" mean is in the comment of a value.
func (s *schema) words() string {
	s = s.resolved()
	if len(s.Enum) > 0 {
		var allowed []string
		for _, value := range s.Enum {
			if value != nil && value != "" && value != false { // YAML reads off as false
				allowed = append(allowed, code(fmt.Sprint(value)))
			}
		}
		return strings.Join(allowed, ", ")
	}
	var types []string
	switch t := s.Type.(type) {
	case string:
		types = append(types, t)
	case []any:
		for _, one := range t {
			types = append(types, fmt.Sprint(one))
		}
	}
	for _, one := range s.AnyOf {
		types = append(types, (&schema{Ref: one.Ref, Type: one.Type, Enum: one.Enum, root: s.root}).words())
	}
	types = slices.DeleteFunc(types, func(t string) bool { return t == "null" || t == "" })
	return strings.Join(types, " or ")
}
