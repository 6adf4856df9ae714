// SPDX-License-Identifier: Apache-2.0

package v1beta1

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"
)

// said is what a claim's author writes, with the apiVersion before it.
func said(kind Kind, text string) string {
	return fmt.Sprintf("apiVersion: %s\nkind: %s\n%s", APIVersion, kind, text)
}

func decode(t *testing.T, text string) (Parameters, field.ErrorList) {
	t.Helper()
	raw, err := yaml.YAMLToJSON([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return Decode(raw, field.NewPath("at"))
}

func TestDecode(t *testing.T) {
	sliced := func(interval Interval) *Sharing { return &Sharing{Strategy: TimeSlicing, Interval: interval} }
	mps := func(settings MPS) *Sharing { return &Sharing{Strategy: MPSStrategy, MPS: &settings} }
	for name, c := range map[string]struct {
		kind Kind
		text string
		want *Sharing
	}{
		"nothing":                      {kind: GPU},
		"no sharing":                   {kind: GPU, text: "sharing: null"},
		"empty sharing":                {kind: GPU, text: "sharing: {}"},
		"time-slicing":                 {kind: GPU, text: "sharing: {strategy: TimeSlicing}", want: sliced(IntervalDefault)},
		"without settings":             {kind: GPU, text: "sharing: {strategy: TimeSlicing, timeSlicingConfig: null}", want: sliced(IntervalDefault)},
		"with none of the settings":    {kind: GPU, text: "sharing: {strategy: TimeSlicing, timeSlicingConfig: {}}", want: sliced(IntervalDefault)},
		"with a setting of null":       {kind: GPU, text: "sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: null}}", want: sliced(IntervalDefault)},
		"an interval":                  {kind: GPU, text: "sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: Long}}", want: sliced(IntervalLong)},
		"MPS":                          {kind: GPU, text: "sharing: {strategy: MPS}", want: mps(MPS{})},
		"MPS without settings":         {kind: GPU, text: "sharing: {strategy: MPS, mpsConfig: {}}", want: mps(MPS{})},
		"MPS, null for other settings": {kind: GPU, text: "sharing: {strategy: MPS, timeSlicingConfig: null}", want: mps(MPS{})},
		"MPS with all settings": {kind: GPU, text: `sharing:
  strategy: MPS
  mpsConfig:
    defaultActiveThreadPercentage: 50
    defaultPinnedDeviceMemoryLimit: 10Gi
    defaultPerDevicePinnedMemoryLimit: {"0": 5Gi, GPU-a: 1.5Mi, MIG-b: 4294967296}
    multiUser: true`, want: mps(MPS{
			ActiveThreadPercentage: ptr.To(50), PinnedMemoryLimit: ptr.To(resource.MustParse("10Gi")), MultiUser: true,
			PerDevicePinnedMemoryLimit: map[string]resource.Quantity{
				"0": resource.MustParse("5Gi"), "GPU-a": resource.MustParse("1.5Mi"), "MIG-b": resource.MustParse("4294967296"),
			},
		})},
		"no percentage at all":         {kind: GPU, text: "sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 0}}", want: mps(MPS{ActiveThreadPercentage: ptr.To(0)})},
		"a partition":                  {kind: MIGDevice},
		"a partition, time-slicing":    {kind: MIGDevice, text: "sharing: {strategy: TimeSlicing}", want: &Sharing{Strategy: TimeSlicing}},
		"a partition, MPS":             {kind: MIGDevice, text: "sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 100}}", want: mps(MPS{ActiveThreadPercentage: ptr.To(100)})},
		"passed through":               {kind: VFIODevice},
		"passed through, old":          {kind: VFIODevice, text: "iommu: {backendPolicy: LegacyOnly}"},
		"passed through, with iommufd": {kind: VFIODevice, text: "iommu: {backendPolicy: PreferIommuFD, enableAPIDevice: true}"},
	} {
		t.Run(name, func(t *testing.T) {
			got, wrong := decode(t, said(c.kind, c.text))
			if len(wrong) > 0 {
				t.Fatal(wrong.ToAggregate())
			}
			if diff := cmp.Diff(Parameters{Kind: c.kind, Sharing: c.want}, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// Each mistake is told by where it is and what would be right.
func TestMistakes(t *testing.T) {
	for text, want := range map[string][]string{
		"null":                                {`at.apiVersion: Unsupported value: "": supported values: "resource.nvidia.com/v1beta1"`},
		"{}":                                  {`at.apiVersion: Unsupported value`},
		"apiVersion: resource.nvidia.com/v1":  {`at.apiVersion: Unsupported value: "resource.nvidia.com/v1"`},
		"kind: 7":                             {`at.kind: Invalid value: must be a string, not number`},
		"[]":                                  {`at: Invalid value`},
		`"text"`:                              {`at: Invalid value`},
		said("GPUConfig", ""):                 {`at.kind: Unsupported value: "GPUConfig": supported values: "GpuConfig", "MigDeviceConfig"`},
		said("", ""):                          {`at.kind: Unsupported value: ""`},
		said(GPU, "shearing: {}"):             {`at.shearing: Invalid value: unknown field`},
		said(GPU, "Sharing: {}"):              {`at.Sharing: Invalid value: unknown field`},
		said(GPU, "sharing: []"):              {`at.sharing: Invalid value: must be an object, not array`},
		said(GPU, "sharing: {strategy: 1}"):   {`at.sharing.strategy: Invalid value: must be a string, not number`},
		said(GPU, "sharing: {strategy: ''}"):  {`at.sharing.strategy: Unsupported value: "": supported values: "TimeSlicing", "MPS"`},
		said(GPU, "sharing: {strategy: mps}"): {`at.sharing.strategy: Unsupported value: "mps"`},
		said(GPU, "sharing: {timeSlicingConfig: {}}"):                                    {`at.sharing.strategy: Required value: must be TimeSlicing or MPS`},
		said(GPU, "sharing: {mpsConfig: {}}"):                                            {`at.sharing.strategy: Required value`},
		said(GPU, "sharing: {strategy: MPS, timeSlicingConfig: {}}"):                     {`at.sharing.timeSlicingConfig: Forbidden: may be set with strategy TimeSlicing only`},
		said(GPU, "sharing: {strategy: TimeSlicing, mpsConfig: {}}"):                     {`at.sharing.mpsConfig: Forbidden: may be set with strategy MPS only`},
		said(GPU, "sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: ''}}"): {`at.sharing.timeSlicingConfig.interval: Unsupported value: "": supported values: "Default", "Short", "Medium", "Long"`},
		said(GPU, "sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: 2}}"):  {`at.sharing.timeSlicingConfig.interval: Invalid value: must be a string, not number`},
		said(GPU, "sharing: {strategy: TimeSlicing, timeSlicingConfig: {timeslice: 2}}"): {`at.sharing.timeSlicingConfig.timeslice: Invalid value: unknown field`},
		said(GPU, "sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 101, defaultPinnedDeviceMemoryLimit: 10 Gi, multiuser: true}}"): {
			`at.sharing.mpsConfig.multiuser: Invalid value: unknown field`,
			`at.sharing.mpsConfig.defaultActiveThreadPercentage: Invalid value: 101: must be between 0 and 100`,
			`at.sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: Invalid value: "10 Gi": must be an amount of memory such as 10Gi`,
		},
		said(GPU, "sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: -1}}"):               {`defaultActiveThreadPercentage: Invalid value: -1`},
		said(GPU, "sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 0.5}}"):              {`defaultActiveThreadPercentage: Invalid value: must be a whole number, not number 0.5`},
		said(GPU, "sharing: {strategy: MPS, mpsConfig: {defaultPinnedDeviceMemoryLimit: 1023Ki}}"):          {`defaultPinnedDeviceMemoryLimit: Invalid value: "1023Ki": must be at least 1Mi`},
		said(GPU, "sharing: {strategy: MPS, mpsConfig: {defaultPinnedDeviceMemoryLimit: '1e999999999'}}"):   {`defaultPinnedDeviceMemoryLimit: Invalid value: "1e999999999"`},
		said(GPU, "sharing: {strategy: MPS, mpsConfig: {defaultPinnedDeviceMemoryLimit: -1Gi}}"):            {`must be at least 1Mi`},
		said(GPU, "sharing: {strategy: MPS, mpsConfig: {defaultPinnedDeviceMemoryLimit: {}}}"):              {`defaultPinnedDeviceMemoryLimit: Invalid value: "{}"`},
		said(GPU, "sharing: {strategy: MPS, mpsConfig: {defaultPerDevicePinnedMemoryLimit: {gpu-0: 1Gi}}}"): {`defaultPerDevicePinnedMemoryLimit[gpu-0]: Invalid value: "gpu-0": must be the UUID of a device, or an index`},
		said(GPU, "sharing: {strategy: MPS, mpsConfig: {defaultPerDevicePinnedMemoryLimit: {'-1': 1Gi, '01': 1Gi, '+1': null}}}"): {
			`[+1]: Invalid value: "+1": must be the UUID`, `[+1]: Invalid value: "": must be an amount`, `[-1]: Invalid`, `[01]: Invalid`,
		},
		said(MIGDevice, "sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: Long}}"): {`at.sharing.timeSlicingConfig: Invalid value: unknown field`},
		said(MIGDevice, "sharing: {strategy: TimeSlicing, mpsConfig: {}}"):                       {`at.sharing.mpsConfig: Forbidden`},
		said(VFIODevice, "iommu: {backendPolicy: Legacy}"):                                       {`at.iommu.backendPolicy: Unsupported value: "Legacy": supported values: "LegacyOnly", "PreferIommuFD"`},
		said(VFIODevice, "sharing: {}"):                                                          {`at.sharing: Invalid value: unknown field`},
	} {
		t.Run(text, func(t *testing.T) {
			got, wrong := decode(t, text)
			if got.Kind != "" || got.Sharing != nil {
				t.Errorf("%+v of what is wrong", got)
			}
			if len(wrong) != len(want) {
				t.Errorf("%d mistakes, want %d: %v", len(wrong), len(want), wrong.ToAggregate())
			}
			for i := range min(len(wrong), len(want)) {
				if !strings.Contains(wrong[i].Error(), want[i]) {
					t.Errorf("got  %s\nwant %s", wrong[i], want[i])
				}
			}
		})
	}
}

// What YAML cannot say.
func TestMistakesInJSON(t *testing.T) {
	for raw, want := range map[string]string{
		"":  "at: Required value",
		"}": "at: Invalid value: invalid character",
		`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":null,"sharing":{}}`: "at.sharing: Invalid value: duplicate field",
		`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"} {}`:                          "at: Invalid value",
	} {
		if _, wrong := Decode([]byte(raw), field.NewPath("at")); len(wrong) != 1 || !strings.HasPrefix(wrong[0].Error(), want) {
			t.Errorf("%q: %v, want %s", raw, wrong.ToAggregate(), want)
		}
	}
}

// A user who can create claims can make thousands of mistakes, and each attempt repeats the errors.
func TestManyMistakes(t *testing.T) {
	keys := func(n int) string {
		var all strings.Builder
		for i := range n {
			fmt.Fprintf(&all, "%q: 0, ", fmt.Sprint("z", i, strings.Repeat("x\n", 100)))
		}
		return all.String()
	}
	for name, c := range map[string]struct {
		text string
		want int
	}{
		"unknown fields":      {"{apiVersion: " + APIVersion + ", kind: GpuConfig, " + keys(5000) + "}", mistakesMax + 1},
		"too many devices":    {said(GPU, "sharing: {strategy: MPS, mpsConfig: {defaultPerDevicePinnedMemoryLimit: {"+keys(5000)+"}}}"), 1},
		"many devices":        {said(GPU, "sharing: {strategy: MPS, mpsConfig: {defaultPerDevicePinnedMemoryLimit: {"+keys(devicesMax)+"}}}"), mistakesMax + 1},
		"one of great length": {said(GPU, "sharing: {strategy: "+strings.Repeat("x", 100_000)+"}"), 1},
	} {
		_, wrong := decode(t, c.text)
		if said := wrong.ToAggregate().Error(); len(wrong) != c.want || len(said) > 4000 || strings.Contains(said, "\n") {
			t.Errorf("%s: %d mistakes in %d bytes", name, len(wrong), len(said))
		}
	}
}

// Claim authors write these bytes: none may crash who reads them, and what is taken for valid is complete.
func FuzzDecode(f *testing.F) {
	for _, text := range []string{
		"null", "[]", "apiVersion: 1", said(GPU, ""), said(GPU, "sharing: {strategy: TimeSlicing, timeSlicingConfig: {}}"),
		said(GPU, "sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: null}}"), said(GPU, "sharing: {timeSlicingConfig: {interval: Long}}"),
		said(GPU, "sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 1e3, defaultPinnedDeviceMemoryLimit: '1e999999999'}}"),
		said(GPU, "sharing: {strategy: MPS, mpsConfig: {defaultPerDevicePinnedMemoryLimit: {'0': 1Ei, GPU-: 0, MIG-x: null}}}"),
		said(MIGDevice, "sharing: {strategy: MPS, mpsConfig: {multiUser: true}}"), said(VFIODevice, "iommu: {backendPolicy: LegacyOnly}"),
	} {
		raw, err := yaml.YAMLToJSON([]byte(text))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		p, wrong := Decode(raw, field.NewPath("at"))
		if aggregate := wrong.ToAggregate(); aggregate != nil && len(aggregate.Error()) > 8000 {
			t.Errorf("%d bytes about %d mistakes", len(aggregate.Error()), len(wrong))
		}
		for _, err := range wrong {
			if !strings.HasPrefix(err.Error(), "at") || len(err.Error()) < len("at: x") {
				t.Errorf("a mistake without a place: %q", err.Error())
			}
		}
		switch s := p.Sharing; {
		case len(wrong) > 0:
			if p.Kind != "" || p.Sharing != nil {
				t.Errorf("%+v of what is wrong", p)
			}
		case s == nil:
		case s.Strategy == TimeSlicing && s.MPS == nil && (s.Interval != "") == (p.Kind == GPU):
		case s.Strategy == MPSStrategy && s.MPS != nil && s.Interval == "":
		default:
			t.Errorf("incomplete: %+v", s)
		}
	})
}

// What nodes do not serve is refused where a user writes it.
func TestAdmit(t *testing.T) {
	for kind, want := range map[Kind]string{
		GPU: "", MIGDevice: "", VFIODevice: `at.kind: Unsupported value: "VfioDeviceConfig": supported values: "GpuConfig", "MigDeviceConfig"`,
	} {
		p, wrong := Admit([]byte(`{"apiVersion":"`+APIVersion+`","kind":"`+string(kind)+`"}`), field.NewPath("at"))
		got := ""
		if len(wrong) > 0 {
			got = wrong.ToAggregate().Error()
		}
		if p.Kind != kind || got != want {
			t.Errorf("%s: %+v, %s", kind, p, got)
		}
	}
}
