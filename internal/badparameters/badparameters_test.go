// SPDX-License-Identifier: Apache-2.0

package badparameters

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
)

// Each case is wrong in the places, and for the reason, that it says.
func TestCases(t *testing.T) {
	all, err := All()
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 30 {
		t.Errorf("only %d cases", len(all))
	}
	names := map[string]bool{}
	for _, c := range all {
		if names[c.Name] || len(validation.IsDNS1123Label(c.Name)) > 0 {
			t.Errorf("%q is no name of its own", c.Name)
		}
		names[c.Name] = true
		raw, err := json.Marshal(c.Parameters)
		if err != nil {
			t.Fatal(err)
		}
		_, wrong := parametersv1beta1.Decode(raw, field.NewPath("at"))
		var fields []string
		for _, w := range wrong {
			fields = append(fields, strings.TrimPrefix(w.Field, "at."))
		}
		if diff := cmp.Diff(c.Fields, fields); diff != "" {
			t.Errorf("%s: fields (-want +got):\n%s", c.Name, diff)
		} else if !strings.Contains(wrong[0].Error(), c.Says) {
			t.Errorf("%s: %s does not say %q", c.Name, wrong[0], c.Says)
		}
	}
}
