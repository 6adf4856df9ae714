// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// definition is what the page needs of a CustomResourceDefinition.
type definition struct {
	Spec struct {
		Group    string `json:"group"`
		Versions []struct {
			Name   string `json:"name"`
			Schema struct {
				OpenAPIV3Schema *schema `json:"openAPIV3Schema"`
			} `json:"schema"`
		} `json:"versions"`
	} `json:"spec"`
}

// gpuNode has a row for each field of the definition that the chart installs, except those that all objects have.
func gpuNode(root string) (string, error) {
	const file = chart + "/files/tandem-gpu.dev_gpunodes.yaml"
	data, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		return "", err
	}
	if data, err = yaml.YAMLToJSON(data); err != nil {
		return "", err
	}
	var d definition
	if err := json.Unmarshal(data, &d); err != nil {
		return "", err
	}
	if len(d.Spec.Versions) != 1 {
		return "", errors.New("the definition does not have exactly one version")
	}
	version := d.Spec.Versions[0]
	object := version.Schema.OpenAPIV3Schema
	var page strings.Builder
	page.WriteString(header("GPUNode", file, fmt.Sprintf("API version `%s/%s`. %s", d.Spec.Group, version.Name, prose(object.Description)),
		"`kubectl explain gpunode --recursive` shows the same on a cluster. [How to read it](../user/gpunode.md)."))
	for _, part := range []string{"spec", "status"} {
		t := newTable("field", "type", "meaning")
		fieldRows(t, part, object.Properties[part])
		fmt.Fprintf(&page, "\n## %s\n\n%s\n\n%s", part, wrap(prose(object.Properties[part].Description)), t)
	}
	return page.String(), nil
}

func fieldRows(t *table, prefix string, of *schema) {
	for _, name := range slices.Sorted(maps.Keys(of.Properties)) {
		field, path := of.Properties[name], prefix+"."+name
		words, below := field.words(), field
		if field.Items != nil {
			below, path, words = field.Items, path+"[]", "list of "+field.Items.words()
		}
		t.row(code(path), words, meaning(name, field))
		fieldRows(t, path, below)
	}
}

// copula is the beginning of a comment of Go: "UnhealthyReason is …".
var copula = regexp.MustCompile(`^([A-Z]\w*) (?:is|are) (\w)`)

// meaning is the description of a field, without the name that its comment in Go begins with.
func meaning(name string, field *schema) string {
	text := prose(field.Description)
	if m := copula.FindStringSubmatch(text); m != nil && strings.EqualFold(m[1], name) {
		return strings.ToUpper(m[2]) + text[len(m[0]):]
	}
	return text
}
