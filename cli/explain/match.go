// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"maps"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// matcher evaluates selectors as the scheduler does, until a bound is reached. It compiles each expression once. It is not safe for
// concurrent use.
type matcher struct {
	driver string
	// classes and cache are for the scheduler's allocator, which compiles nothing that the matcher has compiled.
	classes  classLister
	cache    *cel.Cache
	compiled map[string]cel.CompilationResult
	counts   map[string]tried
	// search bounds each search of the allocator.
	search time.Duration
	// left is what further evaluations may cost.
	left int64
	// ended is why it evaluates no more. What it returned since does not count.
	ended error
}

func newMatcher(f Facts, b bounds) *matcher {
	return &matcher{
		driver: f.Driver, classes: classLister(f), cache: cel.NewCache(mostExpressions, celFeatures), compiled: map[string]cel.CompilationResult{},
		counts: map[string]tried{}, left: b.cost, search: b.search(),
	}
}

// celFeatures are those of a scheduler with all features enabled.
var celFeatures = cel.Features{EnableConsumableCapacity: true, EnableListTypeAttributes: true}

// mostExpressions is the size of the cache: the largest claim has 32 requests with 32 selectors each.
const mostExpressions = 1100

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
		result = m.cache.GetOrCompile(expression)
		m.compiled[expression] = result
		m.left -= compilationCost * int64(len(expression))
	}
	return result
}

// evaluate evaluates a selector on a device.
func (m *matcher) evaluate(ctx context.Context, expression string, d candidate) (bool, error) {
	result := m.compile(expression)
	if result.Error != nil {
		return false, result.Error
	}
	match, details, err := result.DeviceMatches(ctx, cel.Device{
		Driver: m.driver, AllowMultipleAllocations: d.published.AllowMultipleAllocations,
		Attributes: d.published.Attributes, Capacity: d.published.Capacity,
	})
	m.left -= conversionCost
	if details != nil && details.ActualCost() != nil {
		m.left -= int64(*details.ActualCost())
	}
	return match, err
}

// matches reports whether a selector matches a device. A selector that fails matches a device of which not all attributes are known.
func (m *matcher) matches(ctx context.Context, expression string, d candidate) bool {
	if !m.goesOn(ctx) {
		return false
	}
	match, err := m.evaluate(ctx, expression, d)
	if err != nil {
		return d.partly
	}
	of := m.counts[expression]
	of.evaluated++
	if match {
		of.matched++
	}
	m.counts[expression] = of
	return match
}

// tried is on how many devices a selector was evaluated, and on how many of them it matched.
type tried struct{ evaluated, matched int }

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
	for _, t := range d.Taints {
		c.published.Taints = append(c.published.Taints, deviceTaint(t.Taint))
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
