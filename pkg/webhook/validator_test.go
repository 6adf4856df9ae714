// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/internal/badparameters"
)

const testDriver = "gpu.nvidia.com"

// places are where parameters stand: an object around entries, in YAML, and the path of its first entry that is ours.
var places = map[string]struct{ object, path string }{
	kindClaim: {
		"metadata: {name: o}\nspec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}], config: %s}}",
		"spec.devices.config[1].opaque.parameters",
	},
	kindTemplate: {
		"metadata: {name: o}\nspec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}], config: %s}}}",
		"spec.spec.devices.config[1].opaque.parameters",
	},
	kindClass: {"metadata: {name: o}\nspec: {config: %s}", "spec.config[1].opaque.parameters"},
}

// placed is an object of a kind, in JSON, with another driver's entry and then one of a driver.
func placed(t testing.TB, kind, driver, parameters string) []byte {
	t.Helper()
	other := `{"opaque":{"driver":"nic.example.com","parameters":{"strategy":"mps"}}}`
	return toJSON(t, fmt.Sprintf(places[kind].object, fmt.Sprintf(`[%s,{"opaque":{"driver":"%s","parameters":%s}}]`, other, driver, parameters)))
}

func toJSON(t testing.TB, text string) []byte {
	t.Helper()
	raw, err := yaml.YAMLToJSON([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func valueOf(t testing.TB, m prometheus.Metric) float64 {
	t.Helper()
	var written dto.Metric
	if err := m.Write(&written); err != nil {
		t.Fatal(err)
	}
	return written.GetCounter().GetValue() + written.GetGauge().GetValue()
}

func newValidator() *validator {
	return &validator{driver: testDriver, requests: newRequests(prometheus.NewRegistry())}
}

func review(kind string, object, before []byte) admission.Request {
	request := admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
		UID: "u", Kind: metav1.GroupVersionKind{Group: "resource.k8s.io", Version: "v1", Kind: kind}, Operation: admissionv1.Create,
		Object: runtime.RawExtension{Raw: object}, OldObject: runtime.RawExtension{Raw: before},
	}}
	if before != nil {
		request.Operation = admissionv1.Update
	}
	return request
}

// causes are the fields that an answer complains of; nil if it does not.
func causes(response admission.Response) []string {
	if response.Allowed {
		return nil
	}
	fields := []string{}
	if response.Result.Details != nil {
		for _, c := range response.Result.Details.Causes {
			fields = append(fields, c.Field)
		}
	}
	return fields
}

// Every mistake is told in every kind of object, with the whole path, as an invalid object.
func TestMistakesAreTold(t *testing.T) {
	cases, err := badparameters.All()
	if err != nil {
		t.Fatal(err)
	}
	j := newValidator()
	for kind, place := range places {
		for _, c := range cases {
			raw, err := json.Marshal(c.Parameters)
			if err != nil {
				t.Fatal(err)
			}
			response := j.Handle(t.Context(), review(kind, placed(t, kind, testDriver, string(raw)), nil))
			var want []string
			for _, f := range c.Fields {
				want = append(want, place.path+"."+f)
			}
			if diff := cmp.Diff(want, causes(response)); diff != "" {
				t.Errorf("%s in a %s (-want +got):\n%s", c.Name, kind, diff)
				continue
			}
			status := response.Result
			if status.Code != http.StatusUnprocessableEntity || status.Reason != metav1.StatusReasonInvalid || status.Details.Name != "o" ||
				!strings.Contains(status.Message, kind) || !strings.Contains(status.Message, want[0]) || !strings.Contains(status.Message, c.Says) {
				t.Errorf("%s in a %s: %+v", c.Name, kind, status)
			}
			if response := j.Handle(t.Context(), review(kind, placed(t, kind, "gpu.example.com", string(raw)), nil)); !response.Allowed {
				t.Errorf("%s of another driver in a %s: %+v", c.Name, kind, response.Result)
			}
		}
	}
	for result, want := range map[string]int{denied: 3 * len(cases), allowed: 3 * len(cases), unreadable: 0} {
		if got := valueOf(t, j.requests.WithLabelValues(result)); got != float64(want) {
			t.Errorf("%v requests counted as %s, want %d", got, result, want)
		}
	}
}

const (
	good     = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing"}}`
	bad      = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"time"}}`
	sameBad  = `{"kind":"GpuConfig", "sharing":{"strategy":"time"}, "apiVersion":"resource.nvidia.com/v1beta1"}`
	otherBad = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"slices"}}`
)

// What was there already can lose its finalizer, or be changed elsewhere; what says something new is judged.
func TestUpdates(t *testing.T) {
	for kind := range places {
		for name, c := range map[string]struct {
			before, after string
			allowed       bool
		}{
			"the same":             {bad, bad, true},
			"in another order":     {bad, sameBad, true},
			"another mistake":      {bad, otherBad, false},
			"a first mistake":      {good, bad, false},
			"corrected":            {bad, good, true},
			"nothing was readable": {"7", bad, false},
		} {
			before := placed(t, kind, testDriver, c.before)
			if c.before == "7" {
				before = []byte("7")
			}
			if response := newValidator().Handle(t.Context(), review(kind, placed(t, kind, testDriver, c.after), before)); response.Allowed != c.allowed {
				t.Errorf("%s, %s: %+v", kind, name, response)
			}
		}
	}
	class := func(selector, config string) []byte {
		return toJSON(t, fmt.Sprintf(`{metadata: {name: c}, spec: {selectors: [{cel: {expression: %q}}], config: [%s{opaque: {driver: %s, parameters: %s}}]}}`,
			selector, config, testDriver, bad))
	}
	const other = "{opaque: {driver: nic.example.com, parameters: {}}}, "
	if response := newValidator().Handle(t.Context(), review(kindClass, class("false", other), class("true", ""))); !response.Allowed {
		t.Errorf("a class that says the same to us as before: %+v", response.Result)
	}
}

// What is wrong only beside the claim's requests.
func TestLimitsBeyondTheDevices(t *testing.T) {
	const mps = `{apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: {strategy: MPS, mpsConfig: {defaultPerDevicePinnedMemoryLimit: {"0": 1Gi, "3": 1Gi, "2": 1Gi, GPU-a: 1Gi}}}}`
	exactly := func(name, more string) string {
		return fmt.Sprintf("{name: %s, exactly: {deviceClassName: c%s}}", name, more)
	}
	for name, c := range map[string]struct {
		requests, named string
		want            []string
	}{
		"one device":         {exactly("a", ""), "", []string{"2", "3"}},
		"said to be one":     {exactly("a", ", allocationMode: ExactCount, count: 1"), "", []string{"2", "3"}},
		"three":              {exactly("a", ", count: 3"), "", []string{"3"}},
		"four":               {exactly("a", ", count: 4"), "", nil},
		"all there are":      {exactly("a", ", allocationMode: All"), "", nil},
		"in two requests":    {exactly("a", ", count: 2") + ", " + exactly("b", ""), "", []string{"3"}},
		"one of two":         {exactly("a", ", count: 2") + ", " + exactly("b", ", count: 8"), "a", []string{"2", "3"}},
		"the other of two":   {exactly("a", ", count: 2") + ", " + exactly("b", ", count: 8"), "b", nil},
		"choices":            {"{name: a, firstAvailable: [{name: x, count: 3}, {name: w, count: 2}]}", "", []string{"3"}},
		"a choice":           {"{name: a, firstAvailable: [{name: x, count: 3}, {name: w, count: 2}]}", "a/w", []string{"2", "3"}},
		"a choice of all":    {"{name: a, firstAvailable: [{name: x, allocationMode: All}, {name: w}]}", "", nil},
		"a choice not of it": {"{name: a, firstAvailable: [{name: x, allocationMode: All}, {name: w}]}", "a/w", []string{"2", "3"}},
		"no such request":    {exactly("a", ""), "z", nil}, // the API server's business
		"a mode to come":     {exactly("a", ", allocationMode: Some"), "", nil},
		"a negative number":  {exactly("a", ", count: -1"), "", nil},
		"too many to add":    {exactly("a", ", count: 9223372036854775807") + ", " + exactly("b", ", count: 9223372036854775807"), "", nil},
		"no requests at all": {"", "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			object := fmt.Sprintf("{metadata: {name: o}, spec: {devices: {requests: [%s], config: [{requests: [%s], opaque: {driver: %s, parameters: %s}}]}}}",
				c.requests, c.named, testDriver, mps)
			var want []string
			for _, id := range c.want {
				want = append(want, "spec.devices.config[0].opaque.parameters.sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit["+id+"]")
			}
			response := newValidator().Handle(t.Context(), review(kindClaim, toJSON(t, object), nil))
			if diff := cmp.Diff(want, causes(response)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestNothingToSay(t *testing.T) {
	for text, want := range map[string]string{
		"{}": allowed, "null": allowed, "{spec: {}}": allowed, "{spec: {config: []}}": allowed, "{spec: {config: [{}, null]}}": allowed,
		"7": unreadable, "{spec: []}": unreadable, "{spec: {config: {}}}": unreadable,
	} {
		j := newValidator()
		if response := j.Handle(t.Context(), review(kindClass, toJSON(t, text), nil)); !response.Allowed {
			t.Errorf("%s: %+v", text, response.Result)
		}
		if valueOf(t, j.requests.WithLabelValues(want)) != 1 {
			t.Errorf("%s is not counted as %s", text, want)
		}
	}
	j := newValidator()
	if response := j.Handle(t.Context(), review("Pod", []byte("{}"), nil)); !response.Allowed || valueOf(t, j.requests.WithLabelValues(unreadable)) != 1 {
		t.Errorf("a pod: %+v", response)
	}
}

// An answer stays short, and names what has no name yet.
func TestManyMistakes(t *testing.T) {
	var entries []string
	for range 32 {
		var unknown []string
		for i := range 20 {
			unknown = append(unknown, fmt.Sprintf("%q: 1", fmt.Sprint(strings.Repeat("x", 1000), i)))
		}
		entries = append(entries, "{opaque: {driver: "+testDriver+", parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, "+strings.Join(unknown, ", ")+"}}}")
	}
	object := toJSON(t, "{metadata: {generateName: o-}, spec: {devices: {config: ["+strings.Join(entries, ", ")+"]}}}")
	response := newValidator().Handle(t.Context(), review(kindClaim, object, nil))
	got := causes(response)
	if len(got) != 21 || got[20] != "spec.devices.config" || len(response.Result.Message) > 8000 || response.Result.Details.Name != "o-" {
		t.Errorf("%d causes, %d bytes, %q", len(got), len(response.Result.Message), response.Result.Details.Name)
	}
}

// Any bytes are answered, and each mistake has a path.
func FuzzMistakes(f *testing.F) {
	for kind := range places {
		for _, parameters := range []string{good, bad, sameBad, "null", "7", "{}", `{"sharing":`} {
			before := placed(f, kind, testDriver, good)
			f.Add(kind, []byte(fmt.Sprintf(`{"spec":{"config":[{"opaque":{"driver":"gpu.nvidia.com","parameters":%s}}]}}`, parameters)), before)
			f.Add(kind, []byte(fmt.Sprintf(`{"spec":{"devices":{"config":[{"opaque":{"driver":"gpu.nvidia.com","parameters":%s}}]}}}`, parameters)), []byte(nil))
		}
	}
	f.Add(kindClaim, []byte(`{"spec":{"devices":{"requests":[{"name":"a","firstAvailable":[{"count":-1}]}],"config":[{"requests":["a"],"opaque":{"driver":"gpu.nvidia.com","parameters":`+
		`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"99999999999999999999":"1Gi"}}}}}}]}}}`), []byte("{"))
	f.Fuzz(func(t *testing.T, kind string, object, before []byte) {
		wrong, err := Mistakes(kind, testDriver, object, before)
		if err != nil && len(wrong) > 0 {
			t.Error("mistakes in what cannot be read")
		}
		for _, w := range wrong {
			if !strings.HasPrefix(w.Field, "spec.") {
				t.Errorf("a mistake without a place: %v", w)
			}
		}
		newValidator().Handle(t.Context(), review(kind, object, before))
	})
}
