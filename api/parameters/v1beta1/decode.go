// SPDX-License-Identifier: Apache-2.0

package v1beta1

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	kjson "sigs.k8s.io/json"
)

// Decode reads the parameters at path of an object and sets defaults. It returns all errors at once, unless a wrong type or another
// API version prevents that. A misspelt or repeated field is an error, because it would have no effect. The node and the webhook call
// it. It is a pure function and accepts any bytes. The length of the errors is bounded.
func Decode(raw []byte, path *field.Path) (Parameters, field.ErrorList) {
	var meta metav1.TypeMeta
	if err := kjson.UnmarshalCaseSensitivePreserveInts(raw, &meta); err != nil {
		return Parameters{}, field.ErrorList{malformed(raw, path, err)}
	}
	if meta.APIVersion != APIVersion {
		return Parameters{}, field.ErrorList{notSupported(path.Child("apiVersion"), meta.APIVersion, []string{APIVersion})}
	}
	p := Parameters{Kind: Kind(meta.Kind)}
	var wire interface {
		sharing(of *field.Path) (*Sharing, field.ErrorList)
	}
	switch p.Kind {
	case GPU, MIGDevice:
		wire = &deviceConfig{}
	case VFIODevice:
		wire = &vfioDeviceConfig{}
	default:
		return Parameters{}, field.ErrorList{notSupported(path.Child("kind"), p.Kind, offered)}
	}
	strict, err := kjson.UnmarshalStrict(raw, wire)
	if err != nil {
		return Parameters{}, field.ErrorList{malformed(raw, path, err)}
	}
	var all field.ErrorList
	for _, err := range strict {
		all = append(all, misplaced(path, err))
	}
	sharing, wrong := wire.sharing(path)
	if all = append(all, wrong...); len(all) > 0 {
		return Parameters{}, few(path, all)
	}
	p.Sharing = sharing
	return p, nil
}

// offered are the kinds that a node serves.
var offered = []Kind{GPU, MIGDevice}

// Admit is Decode for parameters that a user writes now. It refuses the kind for GPUs that are passed through, which no node does: nodes
// ignore it where it is beside another one, because claims may have it already.
func Admit(raw []byte, path *field.Path) (Parameters, field.ErrorList) {
	p, wrong := Decode(raw, path)
	if len(wrong) == 0 && p.Kind == VFIODevice {
		wrong = field.ErrorList{notSupported(path.Child("kind"), p.Kind, offered)}
	}
	return p, wrong
}

const (
	// mistakesMax is how many errors are returned. Each adds text to an event.
	mistakesMax = 10
	// devicesMax is more than any claim has devices.
	devicesMax = 128
	// echoMax is how many bytes of a value or name an error repeats.
	echoMax = 64
)

// few returns the first errors, and one with the number of the rest.
func few(path *field.Path, all field.ErrorList) field.ErrorList {
	if len(all) <= mistakesMax {
		return all
	}
	more := fmt.Sprintf("and %d more mistakes", len(all)-mistakesMax)
	return append(all[:mistakesMax:mistakesMax], field.Invalid(path, field.OmitValueType{}, more))
}

// echo shortens input for an error text.
func echo(text string) string {
	if len(text) > echoMax {
		text = text[:echoMax] + "…"
	}
	quoted := strconv.Quote(text)
	return quoted[1 : len(quoted)-1]
}

func notSupported[T ~string](path *field.Path, value T, known []T) *field.Error {
	return field.NotSupported(path, T(echo(string(value))), known)
}

// malformed is the error for invalid JSON, or for a value of the wrong type.
func malformed(raw []byte, path *field.Path, err error) *field.Error {
	var mismatch *json.UnmarshalTypeError
	if errors.As(err, &mismatch) {
		if mismatch.Field != "" {
			path = path.Child(echo(mismatch.Field))
		}
		return field.Invalid(path, field.OmitValueType{}, fmt.Sprintf("must be %s, not %s", inWords(mismatch.Type), mismatch.Value))
	}
	if len(raw) == 0 {
		return field.Required(path, "no parameters")
	}
	return field.Invalid(path, field.OmitValueType{}, echo(err.Error()))
}

// inWords names a type in terms of JSON.
func inWords(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Struct, reflect.Map:
		return "an object"
	case reflect.Bool:
		return "true or false"
	case reflect.Int:
		return "a whole number"
	default:
		return "a " + t.Kind().String()
	}
}

// misplaced is the error for an unknown or duplicate field.
func misplaced(path *field.Path, err error) *field.Error {
	var at kjson.FieldError
	if !errors.As(err, &at) {
		return field.Invalid(path, field.OmitValueType{}, echo(err.Error()))
	}
	what, _, _ := strings.Cut(err.Error(), ` "`) // unknown field, or duplicate field
	return field.Invalid(path.Child(echo(at.FieldPath())), field.OmitValueType{}, what)
}

// The JSON objects. Quantities and the names of strategies are checked after decoding, when their path is known.
type (
	// deviceConfig is for both kinds of devices. A partition has no TimeSlicingConfig.
	deviceConfig struct {
		metav1.TypeMeta `json:",inline"`
		// Sharing is how the containers of the claim share the device. Without it, no sharing settings are applied.
		Sharing *struct {
			// Strategy is required if there are settings. TimeSlicing has no effect on a partition.
			Strategy *Strategy `json:"strategy,omitempty"`
			// MPSConfig are the settings of the claim's daemon, for strategy MPS.
			MPSConfig *mps `json:"mpsConfig,omitempty"`
			// TimeSlicingConfig is for strategy TimeSlicing of whole GPUs.
			TimeSlicingConfig *struct {
				// Interval is how long a process runs before the next one (nvidia-smi compute-policy --set-timeslice).
				Interval *Interval `json:"interval,omitempty"`
			} `json:"timeSlicingConfig,omitempty"`
		} `json:"sharing,omitempty"`
	}
	mps struct {
		// ActiveThreadPercentage limits the multiprocessors of a client, 0 to 100.
		ActiveThreadPercentage *int `json:"defaultActiveThreadPercentage,omitempty"`
		// PinnedMemoryLimit limits a client's memory on each device: a quantity such as 10Gi.
		PinnedMemoryLimit *quantity `json:"defaultPinnedDeviceMemoryLimit,omitempty"`
		// PerDevicePinnedMemoryLimit is the limit of single devices, by UUID, or by index in the sorted UUIDs of the claim's devices.
		PerDevicePinnedMemoryLimit map[string]quantity `json:"defaultPerDevicePinnedMemoryLimit,omitempty"`
		// MultiUser accepts clients of other users. It needs compute capability 7.0.
		MultiUser *bool `json:"multiUser,omitempty"`
	}
	vfioDeviceConfig struct {
		metav1.TypeMeta `json:",inline"`
		IOMMU           *struct {
			BackendPolicy   *string `json:"backendPolicy,omitempty"`
			EnableAPIDevice *bool   `json:"enableAPIDevice,omitempty"`
		} `json:"iommu,omitempty"`
	}
)

const unknownField = "unknown field"

// sharing returns nil if none is requested.
func (c *deviceConfig) sharing(path *field.Path) (*Sharing, field.ErrorList) {
	if c.Sharing == nil {
		return nil, nil
	}
	path = path.Child("sharing")
	mpsPath, slicingPath := path.Child("mpsConfig"), path.Child("timeSlicingConfig")
	strategy, settings, slicing := c.Sharing.Strategy, c.Sharing.MPSConfig, c.Sharing.TimeSlicingConfig
	var all field.ErrorList
	limits, interval := &MPS{}, IntervalDefault
	if settings != nil {
		limits, all = settings.limits(mpsPath)
	}
	if slicing != nil && slicing.Interval != nil {
		interval = *slicing.Interval
	}
	if known := []Interval{IntervalDefault, IntervalShort, IntervalMedium, IntervalLong}; !slices.Contains(known, interval) {
		all = append(all, notSupported(slicingPath.Child("interval"), interval, known))
	}
	isGPU := Kind(c.Kind) == GPU
	if !isGPU && slicing != nil {
		all = append(all, field.Invalid(slicingPath, field.OmitValueType{}, unknownField))
	}
	switch known := []Strategy{TimeSlicing, MPSStrategy}; {
	case strategy == nil && settings == nil && slicing == nil:
		return nil, nil
	case strategy == nil:
		return nil, append(all, field.Required(path.Child("strategy"), "must be TimeSlicing or MPS if there are settings"))
	case !slices.Contains(known, *strategy):
		return nil, append(all, notSupported(path.Child("strategy"), *strategy, known))
	case *strategy == MPSStrategy:
		if isGPU && slicing != nil {
			all = append(all, field.Forbidden(slicingPath, "may be set with strategy TimeSlicing only"))
		}
		return &Sharing{Strategy: MPSStrategy, MPS: limits}, all
	}
	if settings != nil {
		all = append(all, field.Forbidden(mpsPath, "may be set with strategy MPS only"))
	}
	if !isGPU {
		interval = ""
	}
	return &Sharing{Strategy: TimeSlicing, Interval: interval}, all
}

func (c *vfioDeviceConfig) sharing(path *field.Path) (*Sharing, field.ErrorList) {
	if c.IOMMU == nil || c.IOMMU.BackendPolicy == nil {
		return nil, nil
	}
	known := []string{"LegacyOnly", "PreferIommuFD"}
	if slices.Contains(known, *c.IOMMU.BackendPolicy) {
		return nil, nil
	}
	return nil, field.ErrorList{notSupported(path.Child("iommu", "backendPolicy"), *c.IOMMU.BackendPolicy, known)}
}

func (m *mps) limits(path *field.Path) (*MPS, field.ErrorList) {
	var all field.ErrorList
	if percentage := m.ActiveThreadPercentage; percentage != nil && (*percentage < 0 || *percentage > 100) {
		all = append(all, field.Invalid(path.Child("defaultActiveThreadPercentage"), *percentage, "must be between 0 and 100"))
	}
	settings := &MPS{ActiveThreadPercentage: m.ActiveThreadPercentage, MultiUser: m.MultiUser != nil && *m.MultiUser}
	if m.PinnedMemoryLimit != nil {
		limit, wrong := m.PinnedMemoryLimit.limit(path.Child("defaultPinnedDeviceMemoryLimit"))
		all, settings.PinnedMemoryLimit = append(all, wrong...), &limit
	}
	at := path.Child("defaultPerDevicePinnedMemoryLimit")
	if n := len(m.PerDevicePinnedMemoryLimit); n > devicesMax {
		return settings, append(all, field.TooMany(at, n, devicesMax))
	}
	for _, id := range slices.Sorted(maps.Keys(m.PerDevicePinnedMemoryLimit)) {
		if index, err := strconv.Atoi(id); (err != nil || index < 0 || strconv.Itoa(index) != id) && !isUUID(id) {
			all = append(all, field.Invalid(at.Key(echo(id)), echo(id), "must be the UUID of a device, or an index among the claim's"))
		}
		limit, wrong := m.PerDevicePinnedMemoryLimit[id].limit(at.Key(echo(id)))
		if all = append(all, wrong...); settings.PerDevicePinnedMemoryLimit == nil {
			settings.PerDevicePinnedMemoryLimit = map[string]resource.Quantity{}
		}
		settings.PerDevicePinnedMemoryLimit[id] = limit
	}
	return settings, all
}

func isUUID(id string) bool {
	return strings.HasPrefix(id, "GPU-") && len(id) > len("GPU-") || strings.HasPrefix(id, "MIG-") && len(id) > len("MIG-")
}

// quantity contains the text. The error of resource.Quantity would end the decoding and has no path.
type quantity string

// UnmarshalJSON implements json.Unmarshaler. It accepts a number, as resource.Quantity does.
func (q *quantity) UnmarshalJSON(raw []byte) error {
	var text string
	if json.Unmarshal(raw, &text) != nil {
		text = string(raw)
	}
	*q = quantity(text)
	return nil
}

const mebibyte = 1 << 20

// amount bounds the size of a resource.Quantity: parsing 1e999999999 takes minutes.
var amount = regexp.MustCompile(`^[+-]?[0-9.]{1,20}([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$`)

func (q quantity) limit(path *field.Path) (resource.Quantity, field.ErrorList) {
	if !amount.MatchString(string(q)) {
		return resource.Quantity{}, field.ErrorList{field.Invalid(path, echo(string(q)), "must be an amount of memory such as 10Gi")}
	}
	parsed, err := resource.ParseQuantity(string(q))
	if err != nil {
		return resource.Quantity{}, field.ErrorList{field.Invalid(path, echo(string(q)), "must be an amount of memory such as 10Gi: "+err.Error())}
	}
	if parsed.CmpInt64(mebibyte) < 0 {
		return resource.Quantity{}, field.ErrorList{field.Invalid(path, echo(string(q)), "must be at least 1Mi: the limit is in whole MiB")}
	}
	return parsed, nil
}

// Effective are the parameters that apply to one device of an allocated claim.
type Effective struct {
	// Entry is the index of the allocation's configuration. Devices of one entry are shared together.
	Entry int
	// Path of the parameters in the claim or in its class.
	Path *field.Path
	// Sharing is nil if there are no parameters for the device.
	Sharing *Sharing
}

// Allocated returns the parameters of a result, which is a whole GPU or a partition, or an error if they are invalid. As in NVIDIA's
// driver the last matching entry of the right kind applies; entries of the class come before those of the claim. It does not validate
// the entries that it overrides. It skips an entry of another kind for all requests. An entry of another kind for this request is an
// error, but not one for the whole request of a subrequest (firstAvailable), because it applies to other subrequests. Schedulers from
// 1.37 on drop the names from an entry that names all requests of a claim. It is a pure function. Node and controller call it.
func Allocated(claim *resourceapi.ResourceClaim, driverName string, result resourceapi.DeviceRequestAllocationResult, whole bool) (Effective, error) {
	fitting, what := GPU, "a whole GPU"
	if !whole {
		fitting, what = MIGDevice, "a partition"
	}
	entries := claim.Status.Allocation.Devices.Config
	for i, entry := range slices.Backward(entries) {
		if entry.Opaque == nil || entry.Opaque.Driver != driverName || len(resourceclaim.ConfigForResult(entries[i:i+1], result)) == 0 {
			continue
		}
		path := pathOf(claim, entry)
		parameters, wrong := Decode(entry.Opaque.Parameters.Raw, path)
		switch {
		case len(wrong) > 0:
			return Effective{}, wrong.ToAggregate()
		case parameters.Kind == fitting:
			return Effective{Entry: i, Path: path, Sharing: parameters.Sharing}, nil
		case slices.Contains(entry.Requests, result.Request):
			return Effective{}, fmt.Errorf("%s: %s is for request %s, which got %s: only %s fits", path.Child("kind"), parameters.Kind, result.Request, what, fitting)
		}
	}
	return Effective{}, nil
}

// pathOf returns the path of an entry in its class or claim. The allocation lists the entries of classes before the claim's.
func pathOf(claim *resourceapi.ResourceClaim, entry resourceapi.DeviceAllocationConfiguration) *field.Path {
	if entry.Source == resourceapi.AllocationConfigSourceClass {
		return field.NewPath("the device class's spec", "config", "opaque", "parameters")
	}
	at := slices.IndexFunc(claim.Spec.Devices.Config, func(c resourceapi.DeviceClaimConfiguration) bool {
		return apiequality.Semantic.DeepEqual(c.Opaque, entry.Opaque)
	})
	return field.NewPath("spec", "devices", "config").Index(max(0, at)).Child("opaque", "parameters")
}
