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

// matcher evaluates selectors as the scheduler does. It compiles each expression once. It is not safe for concurrent use.
type matcher struct {
	driver   string
	compiled map[string]cel.CompilationResult
}

func newMatcher(driver string) matcher {
	return matcher{driver: driver, compiled: map[string]cel.CompilationResult{}}
}

// broken returns the first selector that does not compile, with its error.
func (m matcher) broken(selectors []string) (expression string, err error) {
	for _, expression := range selectors {
		if result := m.compile(expression); result.Error != nil {
			return expression, result.Error
		}
	}
	return "", nil
}

func (m matcher) compile(expression string) cel.CompilationResult {
	result, known := m.compiled[expression]
	if !known {
		result = cel.GetCompiler(cel.Features{EnableConsumableCapacity: true, EnableListTypeAttributes: true}).
			CompileCELExpression(expression, cel.Options{DisableCostEstimation: true})
		m.compiled[expression] = result
	}
	return result
}

// matches reports whether all selectors match a device. A selector that fails matches a device of which not all attributes are known.
func (m matcher) matches(selectors []string, d candidate) bool {
	for _, expression := range selectors {
		result := m.compile(expression)
		if result.Error != nil {
			return false
		}
		match, _, err := result.DeviceMatches(context.Background(), cel.Device{
			Driver: m.driver, AllowMultipleAllocations: d.published.AllowMultipleAllocations,
			Attributes: d.published.Attributes, Capacity: d.published.Capacity,
		})
		if err != nil && !d.partly || err == nil && !match {
			return false
		}
	}
	return true
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
