// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"maps"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// matcher evaluates selectors as the scheduler does, until a bound is reached. It compiles each expression once. It is not safe for
// concurrent use.
type matcher struct {
	driver   string
	compiled map[string]cel.CompilationResult
	// left is what further evaluations may cost.
	left int64
	// ended is why it evaluates no more. What it returned since does not count.
	ended error
}

func newMatcher(driver string, cost int64) *matcher {
	return &matcher{driver: driver, compiled: map[string]cel.CompilationResult{}, left: cost}
}

// goesOn reports whether no bound is reached yet.
func (m *matcher) goesOn(ctx context.Context) bool {
	switch {
	case m.ended != nil:
	case ctx.Err() != nil:
		m.ended = context.Cause(ctx)
	case m.left <= 0:
		m.ended = errCost
	}
	return m.ended == nil
}

// broken returns the first selector that does not compile, with its error.
func (m *matcher) broken(ctx context.Context, selectors []string) (expression string, err error) {
	for _, expression := range selectors {
		if !m.goesOn(ctx) {
			break
		}
		if result := m.compile(expression); result.Error != nil {
			return expression, result.Error
		}
	}
	return "", nil
}

func (m *matcher) compile(expression string) cel.CompilationResult {
	result, known := m.compiled[expression]
	if !known {
		result = cel.GetCompiler(cel.Features{EnableConsumableCapacity: true, EnableListTypeAttributes: true}).
			CompileCELExpression(expression, cel.Options{DisableCostEstimation: true})
		m.compiled[expression] = result
		m.left -= compilationCost * int64(len(expression))
	}
	return result
}

// matches reports whether a selector matches a device. A selector that fails matches a device of which not all attributes are known.
func (m *matcher) matches(ctx context.Context, expression string, d candidate) bool {
	if !m.goesOn(ctx) {
		return false
	}
	result := m.compile(expression)
	if result.Error != nil {
		return false
	}
	match, details, err := result.DeviceMatches(ctx, cel.Device{
		Driver: m.driver, AllowMultipleAllocations: d.published.AllowMultipleAllocations,
		Attributes: d.published.Attributes, Capacity: d.published.Capacity,
	})
	m.left -= conversionCost
	if details != nil && details.ActualCost() != nil {
		m.left -= int64(*details.ActualCost())
	}
	if err != nil {
		return d.partly
	}
	return match
}

// described returns a device that no ResourceSlice has, as far as the GPUNode and a published device of the same model describe it.
// API servers before Kubernetes 1.36 drop taints, and then an agent does not publish a device that has a holder.
func described(d v1alpha1.DeviceStatus, like *resourceapi.Device) candidate {
	c := candidate{partly: true, published: resourceapi.Device{Name: d.Name}}
	c.published.Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
	if like != nil {
		maps.Copy(c.published.Attributes, like.Attributes)
		c.published.Capacity = like.Capacity
		for _, own := range []resourceapi.QualifiedName{"index", "minor", "parentUUID"} {
			delete(c.published.Attributes, own)
		}
	}
	text := func(name resourceapi.QualifiedName, value string) {
		if value != "" {
			c.published.Attributes[name] = resourceapi.DeviceAttribute{StringValue: ptr.To(value)}
		}
	}
	text("productName", d.Model)
	text("uuid", d.UUID)
	text("profile", d.Profile)
	if d.Parent == "" {
		text("type", "gpu")
	} else {
		text("type", "mig")
	}
	return c
}

// alike identifies devices for which selectors usually have the same result.
type alike struct{ model, profile string }

func attribute(d resourceapi.Device, name resourceapi.QualifiedName) string {
	return ptr.Deref(d.Attributes[name].StringValue, "")
}
