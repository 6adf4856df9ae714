// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	admissionv1 "k8s.io/api/admission/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
)

// Kinds of objects that have parameters.
const (
	kindClaim    = "ResourceClaim"
	kindTemplate = "ResourceClaimTemplate"
	kindClass    = "DeviceClass"
)

// mistakesMax bounds the mistakes of one answer. The decoder returns at most ten for each entry.
const mistakesMax = 20

// validator answers the API server.
type validator struct {
	driver   string
	requests *prometheus.CounterVec
}

// Handle implements admission.Handler. It allows an object that it cannot read: the node decides.
func (v *validator) Handle(ctx context.Context, request admission.Request) admission.Response {
	wrong, err := Mistakes(request.Kind.Kind, v.driver, request.Object.Raw, request.OldObject.Raw)
	if err != nil {
		klog.FromContext(ctx).Info("Allowed an object that cannot be read", "kind", request.Kind.Kind,
			"object", klog.KRef(request.Namespace, request.Name), "err", err)
		v.requests.WithLabelValues(unreadable).Inc()
		return admission.Allowed("")
	}
	if len(wrong) == 0 {
		v.requests.WithLabelValues(allowed).Inc()
		return admission.Allowed("")
	}
	v.requests.WithLabelValues(denied).Inc()
	var named metav1.PartialObjectMetadata
	_ = json.Unmarshal(request.Object.Raw, &named) // Mistakes has read it before.
	// The API server answers an invalid object with such a status. kubectl prints every cause.
	status := apierrors.NewInvalid(schema.GroupKind{Group: request.Kind.Group, Kind: request.Kind.Kind},
		cmp.Or(request.Name, named.Name, named.GenerateName), wrong).Status()
	return admission.Response{AdmissionResponse: admissionv1.AdmissionResponse{Result: &status}}
}

// Mistakes returns the mistakes in an object's parameters for a driver, each with its path in the object. It returns none if the
// parameters are the same as before: an object with mistakes must be able to lose its finalizer. An error means that the object cannot
// be read. It is a pure function and accepts any bytes.
func Mistakes(kind, driver string, object, before []byte) (field.ErrorList, error) {
	p, err := read(kind, driver, object)
	if err != nil {
		return nil, err
	}
	if len(before) > 0 {
		if old, err := read(kind, driver, before); err == nil && slices.EqualFunc(old.entries, p.entries, entry.equal) {
			return nil, nil
		}
	}
	var all field.ErrorList
	for _, e := range p.entries {
		decoded, wrong := parametersv1beta1.Admit(e.raw, e.path)
		all = append(all, wrong...)
		all = append(all, p.beyond(e, decoded)...)
	}
	if len(all) > mistakesMax {
		more := fmt.Sprintf("and %d more mistakes", len(all)-mistakesMax)
		all = append(all[:mistakesMax:mistakesMax], field.Invalid(p.path, field.OmitValueType{}, more))
	}
	return all, nil
}

// parameters of one object for one driver.
type parameters struct {
	path    *field.Path
	entries []entry
	// requests are nil in a class.
	requests []resourceapi.DeviceRequest
}

// entry of a configuration. It applies to the named requests, or to all if there are no names.
type entry struct {
	path     *field.Path
	raw      []byte
	requests []string
}

// equal reports whether two entries mean the same. A patch of the object may change the order of fields.
func (e entry) equal(other entry) bool {
	var a, b any
	return slices.Equal(e.requests, other.requests) && (bytes.Equal(e.raw, other.raw) ||
		json.Unmarshal(e.raw, &a) == nil && json.Unmarshal(other.raw, &b) == nil && reflect.DeepEqual(a, b))
}

// read returns the parameters of an object. Each kind has one of the three lists.
func read(kind, driver string, raw []byte) (parameters, error) {
	var object struct {
		Spec struct {
			Config  []resourceapi.DeviceClassConfiguration
			Devices resourceapi.DeviceClaim
			Spec    resourceapi.ResourceClaimSpec
		}
	}
	if err := json.Unmarshal(raw, &object); err != nil {
		return parameters{}, fmt.Errorf("read %s: %w", kind, err)
	}
	var p parameters
	var devices resourceapi.DeviceClaim
	switch kind {
	case kindClaim:
		p.path, devices = field.NewPath("spec", "devices", "config"), object.Spec.Devices
	case kindTemplate:
		p.path, devices = field.NewPath("spec", "spec", "devices", "config"), object.Spec.Spec.Devices
	case kindClass:
		p.path = field.NewPath("spec", "config")
		for _, c := range object.Spec.Config {
			devices.Config = append(devices.Config, resourceapi.DeviceClaimConfiguration{DeviceConfiguration: c.DeviceConfiguration})
		}
	default:
		return parameters{}, fmt.Errorf("read %s: the kind has no parameters", kind)
	}
	p.requests = devices.Requests
	for i, c := range devices.Config {
		if c.Opaque != nil && c.Opaque.Driver == driver {
			p.entries = append(p.entries, entry{p.path.Index(i).Child("opaque", "parameters"), c.Opaque.Parameters.Raw, c.Requests})
		}
	}
	return p, nil
}

// beyond returns a mistake for each limit of a device index that the entry's requests cannot reach.
func (p *parameters) beyond(e entry, decoded parametersv1beta1.Parameters) field.ErrorList {
	if decoded.Sharing == nil || decoded.Sharing.MPS == nil {
		return nil
	}
	most := p.devices(e.requests)
	if most == 0 {
		return nil
	}
	var all field.ErrorList
	at := e.path.Child("sharing", "mpsConfig", "defaultPerDevicePinnedMemoryLimit")
	for _, id := range slices.Sorted(maps.Keys(decoded.Sharing.MPS.PerDevicePinnedMemoryLimit)) {
		if index, err := strconv.ParseInt(id, 10, 64); err == nil && index >= most {
			all = append(all, field.Invalid(at.Key(id), id, fmt.Sprintf("is beyond the claim's devices: the last index is %d", most-1)))
		}
	}
	return all
}

// devices returns how many devices the named requests can get, or all requests if there are no names; zero if that is unknown.
func (p *parameters) devices(names []string) (most int64) {
	for _, r := range p.requests {
		named := func(request string) bool { return len(names) == 0 || slices.Contains(names, request) }
		var choices []int64
		if r.Exactly != nil && named(r.Name) {
			choices = append(choices, count(r.Exactly.AllocationMode, r.Exactly.Count))
		}
		for _, sub := range r.FirstAvailable {
			if named(r.Name) || named(r.Name+"/"+sub.Name) {
				choices = append(choices, count(sub.AllocationMode, sub.Count))
			}
		}
		if slices.Contains(choices, 0) {
			return 0
		}
		if len(choices) > 0 {
			most += slices.Max(choices)
		}
	}
	return most
}

// countMax is more than the API server accepts, and cannot overflow in a sum.
const countMax = 1 << 20

// count returns how many devices a request asks for; zero if that is unknown. The default is one.
func count(mode resourceapi.DeviceAllocationMode, n int64) int64 {
	if mode != "" && mode != resourceapi.DeviceAllocationModeExactCount || n < 0 || n > countMax {
		return 0
	}
	return max(n, 1)
}
