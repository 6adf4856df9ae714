// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
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

// mistakesMax of all entries are told at once; the decoder tells ten of each.
const mistakesMax = 20

// judge answers the API server.
type judge struct {
	driver   string
	requests *prometheus.CounterVec
}

// Handle implements admission.Handler. What cannot be read is left to the node: this is here to help.
func (j *judge) Handle(ctx context.Context, request admission.Request) admission.Response {
	wrong, err := Mistakes(request.Kind.Kind, j.driver, request.Object.Raw, request.OldObject.Raw)
	switch {
	case err != nil:
		klog.FromContext(ctx).Info("Left to the nodes what cannot be read", "kind", request.Kind.Kind,
			"object", klog.KRef(request.Namespace, request.Name), "err", err)
		j.requests.WithLabelValues(unreadable).Inc()
	case len(wrong) > 0:
		j.requests.WithLabelValues(denied).Inc()
		return denial(request, wrong)
	default:
		j.requests.WithLabelValues(allowed).Inc()
	}
	return admission.Allowed("")
}

// denial is what the API server itself says of an object that is not valid: kubectl shows every cause.
func denial(request admission.Request, wrong field.ErrorList) admission.Response {
	var named metav1.PartialObjectMetadata
	// Mistakes has read it before.
	_ = json.Unmarshal(request.Object.Raw, &named)
	status := apierrors.NewInvalid(schema.GroupKind{Group: request.Kind.Group, Kind: request.Kind.Kind},
		cmp.Or(request.Name, named.Name, named.GenerateName), wrong).Status()
	return admission.Response{AdmissionResponse: admissionv1.AdmissionResponse{Result: &status}}
}

// Mistakes are those in what an object says to a driver, each with its path in the object. Of an object that was there before none
// are told as long as it says the same: it must be able to lose its finalizer. An error means that the object cannot be read. It is
// a pure function and takes any bytes.
func Mistakes(kind, driver string, object, before []byte) (field.ErrorList, error) {
	now, err := read(kind, driver, object)
	if err != nil {
		return nil, err
	}
	if len(before) > 0 {
		if then, err := read(kind, driver, before); err == nil && slices.EqualFunc(then.entries, now.entries, entry.equal) {
			return nil, nil
		}
	}
	var all field.ErrorList
	for _, e := range now.entries {
		said, wrong := parametersv1beta1.Decode(e.raw, e.path)
		all = append(all, wrong...)
		all = append(all, now.beyond(e, said)...)
	}
	if len(all) > mistakesMax {
		more := fmt.Sprintf("and %d more mistakes", len(all)-mistakesMax)
		all = append(all[:mistakesMax:mistakesMax], field.Invalid(now.path, field.OmitValueType{}, more))
	}
	return all, nil
}

// parameters are what one object says to our driver.
type parameters struct {
	path    *field.Path
	entries []entry
	// requests are nil in a class.
	requests []resourceapi.DeviceRequest
}

// entry is one of a configuration.
type entry struct {
	path *field.Path
	raw  []byte
	// requests are those that it is for, or none for all.
	requests []string
}

// equal reports whether two entries say the same. A patch of the object may have put the fields in another order.
func (e entry) equal(other entry) bool {
	if !slices.Equal(e.requests, other.requests) {
		return false
	}
	if bytes.Equal(e.raw, other.raw) {
		return true
	}
	var one, another any
	return json.Unmarshal(e.raw, &one) == nil && json.Unmarshal(other.raw, &another) == nil && reflect.DeepEqual(one, another)
}

func read(kind, driver string, raw []byte) (parameters, error) {
	var claimed resourceapi.DeviceClaim
	var p parameters
	switch kind {
	case kindClaim:
		var claim resourceapi.ResourceClaim
		if err := json.Unmarshal(raw, &claim); err != nil {
			return parameters{}, fmt.Errorf("read %s: %w", kind, err)
		}
		p.path, claimed = field.NewPath("spec", "devices", "config"), claim.Spec.Devices
	case kindTemplate:
		var template resourceapi.ResourceClaimTemplate
		if err := json.Unmarshal(raw, &template); err != nil {
			return parameters{}, fmt.Errorf("read %s: %w", kind, err)
		}
		p.path, claimed = field.NewPath("spec", "spec", "devices", "config"), template.Spec.Spec.Devices
	case kindClass:
		var class resourceapi.DeviceClass
		if err := json.Unmarshal(raw, &class); err != nil {
			return parameters{}, fmt.Errorf("read %s: %w", kind, err)
		}
		p.path = field.NewPath("spec", "config")
		for i, c := range class.Spec.Config {
			p.add(i, driver, c.DeviceConfiguration, nil)
		}
	default:
		return parameters{}, fmt.Errorf("read %s: it has no parameters", kind)
	}
	p.requests = claimed.Requests
	for i, c := range claimed.Config {
		p.add(i, driver, c.DeviceConfiguration, c.Requests)
	}
	return p, nil
}

func (p *parameters) add(i int, driver string, c resourceapi.DeviceConfiguration, requests []string) {
	if c.Opaque != nil && c.Opaque.Driver == driver {
		p.entries = append(p.entries, entry{p.path.Index(i).Child("opaque", "parameters"), c.Opaque.Parameters.Raw, requests})
	}
}

// beyond are limits for devices by an index that no device of the entry's requests can have.
func (p *parameters) beyond(e entry, said parametersv1beta1.Parameters) field.ErrorList {
	if said.Sharing == nil || said.Sharing.MPS == nil {
		return nil
	}
	most, known := p.devices(e.requests)
	if !known {
		return nil
	}
	var all field.ErrorList
	at := e.path.Child("sharing", "mpsConfig", "defaultPerDevicePinnedMemoryLimit")
	for id := range said.Sharing.MPS.PerDevicePinnedMemoryLimit {
		if index, err := strconv.ParseInt(id, 10, 64); err == nil && index >= most {
			all = append(all, field.Invalid(at.Key(id), id, fmt.Sprintf("is beyond the claim's devices: the last index is %d", most-1)))
		}
	}
	slices.SortFunc(all, func(a, b *field.Error) int { return cmp.Compare(a.Field, b.Field) })
	return all
}

// devices are how many the requests of these names can get, all requests where there are no names. It is known where each of them
// says a number; a class says nothing of them.
func (p *parameters) devices(names []string) (most int64, known bool) {
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
		if slices.Contains(choices, uncounted) {
			return 0, false
		}
		if len(choices) > 0 {
			most += slices.Max(choices)
		}
	}
	return most, most > 0
}

const (
	uncounted = -1
	// countMax is more than the API server takes, and cannot overflow in a sum.
	countMax = 1 << 20
)

// count of devices by one request; nothing said is one device.
func count(mode resourceapi.DeviceAllocationMode, n int64) int64 {
	switch {
	case mode != "" && mode != resourceapi.DeviceAllocationModeExactCount, n < 0, n > countMax:
		return uncounted
	case n == 0:
		return 1
	default:
		return n
	}
}
