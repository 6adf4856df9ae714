// SPDX-License-Identifier: Apache-2.0

// Package badparameters has claim parameters that are wrong, each with where the mistake is: one list for all tests that need
// authors who err.
package badparameters

import (
	_ "embed"
	"fmt"

	"sigs.k8s.io/yaml"
)

// Case is one mistake that an author may make.
type Case struct {
	// Name is good for names of objects.
	Name string
	// Parameters are what the author wrote.
	Parameters map[string]any
	// Fields are the paths of the mistakes below the parameters, in order, and Says is part of the first one's message.
	Fields []string
	Says   string
}

//go:embed cases.yaml
var text []byte

// All are the cases, the same for each call. Every one of them passes the API server's own validation.
func All() ([]Case, error) {
	var all []Case
	if err := yaml.UnmarshalStrict(text, &all); err != nil {
		return nil, fmt.Errorf("read cases: %w", err)
	}
	return all, nil
}
