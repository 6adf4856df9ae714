// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	resourcehelper "k8s.io/component-helpers/resource"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/internal/capacity"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// need is what a pod requests of one kind of device: by an extended resource, or by a request of a claim.
type need struct {
	// resource is the extended resource; empty for a claim.
	resource string
	// claim and request are empty for limits. class may be set for limits as well: the class that the resource maps to.
	claim, request, class string
	count                 int64
	// all requests every matching device of a node.
	all bool
	// selectors are those of the class and of the request; own are those of the request.
	selectors   []string
	own         []string
	tolerations []resourceapi.DeviceToleration
	capacity    map[resourceapi.QualifiedName]int64
	admin       bool
	// others are the further alternatives of firstAvailable.
	others []need
}

// String returns text such as "2 nvidia.com/gpu" or "1 device of class gpu.nvidia.com with memory 10240 MiB".
func (n need) String() string {
	amount := fmt.Sprint(n.count)
	if n.all {
		amount = "all"
	}
	if n.resource != "" {
		return amount + " " + n.resource
	}
	text := fmt.Sprintf("%s of class %s", amount, n.class)
	if memory := n.capacity[capacity.Memory]; memory > 0 {
		text += " with " + Mebibytes(memory)
	}
	if shares := n.capacity[capacity.Shares]; shares > 0 {
		text += " with " + equalShares(shares)
	}
	for _, expression := range n.own {
		text += " where " + Bounded(OneLine(expression), mostExpression)
	}
	for _, other := range n.others {
		text += ", or " + other.String()
	}
	return Bounded(text, mostText)
}

// alternatives returns the need and the further ones of firstAvailable.
func (n need) alternatives() []need { return append([]need{n}, n.others...) }

// mostExpression bounds a selector in an answer.
const mostExpression = 160

// Bounded returns at most so many characters of a text, and three dots if it is longer. It is pure. Views call it for what they show.
func Bounded(text string, most int) string {
	if runes := []rune(text); len(runes) > most {
		return string(runes[:most]) + "..."
	}
	return text
}

// mapsTo returns the class of an extended resource that claims serve, and an empty string if there is none. Of several classes the
// scheduler takes the one that was created last, or the one whose name comes first.
func mapsTo(resource corev1.ResourceName, classes []resourceapi.DeviceClass) string {
	if class, implicit := strings.CutPrefix(string(resource), resourceapi.ResourceDeviceClassPrefix); implicit {
		return class
	}
	var mapped []resourceapi.DeviceClass
	for _, class := range classes {
		if ptr.Deref(class.Spec.ExtendedResourceName, "") == string(resource) {
			mapped = append(mapped, class)
		}
	}
	if len(mapped) == 0 {
		return ""
	}
	return slices.MinFunc(mapped, func(a, b resourceapi.DeviceClass) int {
		return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	}).Name
}

// limitNeeds returns what the pod requests of Tandem by extended resources.
func (f Facts) limitNeeds() (needs []need) {
	limits := resourcehelper.PodLimits(f.Pod, resourcehelper.PodResourcesOptions{})
	offered := f.offered()
	for _, name := range slices.Sorted(maps.Keys(limits)) {
		quantity := limits[name]
		if quantity.Value() <= 0 || !strings.Contains(string(name), "/") {
			continue
		}
		n := need{resource: string(name), count: quantity.Value(), class: mapsTo(name, f.Classes)}
		if class, known := f.class(n.class); known {
			n.selectors = celOf(class.Spec.Selectors)
			if !offered(n.resource) && !f.ours(class) {
				continue
			}
		} else if !offered(n.resource) {
			continue
		}
		needs = append(needs, n)
	}
	return needs
}

// offered returns a function that reports whether a node offers an extended resource for Tandem's devices, or whether it has one of their
// usual names.
func (f Facts) offered() func(resource string) bool {
	names := map[string]bool{}
	for _, n := range f.GPUNodes {
		names[n.Status.ExtendedResource] = true
		for _, d := range n.Status.Devices {
			names[d.ExtendedResource] = true
		}
	}
	return func(resource string) bool { return usualResources.Has(resource) || names[resource] }
}

// usualResources are those that NVIDIA's device plugin serves, and Tandem by default.
var usualResources = device.Resources{GPU: config.Defaults().ResourceName}

// HasLimits reports whether a pod requests one of the extended resources. It is a pure function. cli/drain and cli/migrate call it.
func HasLimits(pod *corev1.Pod, resources device.Resources) bool {
	for name, quantity := range resourcehelper.PodLimits(pod, resourcehelper.PodResourcesOptions{}) {
		if resources.Has(string(name)) && !quantity.IsZero() {
			return true
		}
	}
	return false
}

// claimOf is a claim of the pod: the object, or the template of one that does not exist yet.
type claimOf struct {
	// ref is its name in the pod.
	ref string
	// name of the claim; empty while it does not exist. template is empty for a claim that the pod names.
	name, template string
	spec           *resourceapi.ResourceClaimSpec
	// claim is nil while it does not exist.
	claim *resourceapi.ResourceClaim
}

// String returns the name for users.
func (c claimOf) String() string {
	if c.name == "" {
		return "a claim of template " + c.template
	}
	return "claim " + c.name
}

// claims returns the claims of the pod, at most MostClaims.
func (f Facts) claims() (found []claimOf) {
	for i := range f.Pod.Spec.ResourceClaims[:min(MostClaims, len(f.Pod.Spec.ResourceClaims))] {
		of := claimOf{ref: f.Pod.Spec.ResourceClaims[i].Name}
		if template := f.Pod.Spec.ResourceClaims[i].ResourceClaimTemplateName; template != nil {
			of.template = *template
			if t := f.Templates[of.template]; t != nil {
				of.spec = &t.Spec.Spec
			}
		}
		// An error means that the claim of a template does not exist yet; neither an error nor a name, that it is not needed.
		name, _, err := resourceclaim.Name(f.Pod, &f.Pod.Spec.ResourceClaims[i])
		if err == nil && name == nil {
			continue
		}
		if name != nil {
			of.name = *name
			if of.claim = f.Claims[of.name]; of.claim != nil {
				of.spec = &of.claim.Spec
			}
		}
		found = append(found, of)
	}
	return found
}

// needs returns what the requests of a claim need of Tandem's devices. It leaves out requests of other drivers.
func (f Facts) needs(of claimOf) (needs []need) {
	if of.spec == nil {
		return nil
	}
	for _, r := range of.spec.Devices.Requests {
		var alternatives []need
		if r.Exactly != nil {
			alternatives = append(alternatives, f.need(of, r.Name, resourceapi.DeviceSubRequest{
				DeviceClassName: r.Exactly.DeviceClassName, Selectors: r.Exactly.Selectors, AllocationMode: r.Exactly.AllocationMode,
				Count: r.Exactly.Count, Tolerations: r.Exactly.Tolerations, Capacity: r.Exactly.Capacity,
			}))
			alternatives[0].admin = ptr.Deref(r.Exactly.AdminAccess, false)
		}
		for _, sub := range r.FirstAvailable {
			alternatives = append(alternatives, f.need(of, r.Name+"/"+sub.Name, sub))
		}
		if !slices.ContainsFunc(alternatives, func(n need) bool { return f.mayBeOurs(n.class) }) {
			continue
		}
		first := alternatives[0]
		first.others = alternatives[1:]
		needs = append(needs, first)
	}
	return needs
}

// foreign returns why the devices of the driver do not tell whether a node satisfies all needs: a request may get a device of another driver.
func (f Facts) foreign(needs []need) error {
	for _, n := range needs {
		for _, alternative := range n.alternatives() {
			if class, known := f.class(alternative.class); known && alternative.resource == "" && !f.ours(class) {
				return fmt.Errorf("an alternative of %s is of class %s, whose devices are of another driver", alternative.claim, alternative.class)
			}
		}
	}
	return nil
}

func (f Facts) need(of claimOf, request string, r resourceapi.DeviceSubRequest) need {
	n := need{
		claim: of.String(), request: request, class: r.DeviceClassName, count: max(1, r.Count),
		all: r.AllocationMode == resourceapi.DeviceAllocationModeAll, tolerations: r.Tolerations,
	}
	if class, known := f.class(r.DeviceClassName); known {
		n.selectors = celOf(class.Spec.Selectors)
	}
	n.own = celOf(r.Selectors)
	n.selectors = append(n.selectors, n.own...)
	if r.Capacity != nil {
		n.capacity = map[resourceapi.QualifiedName]int64{}
		for name, quantity := range r.Capacity.Requests {
			n.capacity[name] = quantity.Value()
		}
	}
	return n
}

func celOf(selectors []resourceapi.DeviceSelector) (expressions []string) {
	for _, s := range selectors {
		if s.CEL != nil {
			expressions = append(expressions, s.CEL.Expression)
		}
	}
	return expressions
}

// class returns a DeviceClass by its name.
func (f Facts) class(name string) (resourceapi.DeviceClass, bool) {
	i := slices.IndexFunc(f.Classes, func(c resourceapi.DeviceClass) bool { return c.Name == name })
	if i < 0 {
		return resourceapi.DeviceClass{}, false
	}
	return f.Classes[i], true
}

// mayBeOurs reports whether a class is for Tandem's devices, or not known.
func (f Facts) mayBeOurs(name string) bool {
	class, known := f.class(name)
	return !known || f.ours(class)
}

// ours reports whether a class is for Tandem's devices. A class without a selector that names a driver is for all.
func (f Facts) ours(class resourceapi.DeviceClass) bool {
	return !mentions(class, "device.driver") || names(class, f.Driver)
}

// names reports whether a CEL selector of a class contains a quoted string.
func names(class resourceapi.DeviceClass, text string) bool {
	return mentions(class, `"`+text+`"`) || mentions(class, `'`+text+`'`)
}

func mentions(class resourceapi.DeviceClass, text string) bool {
	return slices.ContainsFunc(celOf(class.Spec.Selectors), func(expression string) bool { return strings.Contains(expression, text) })
}
