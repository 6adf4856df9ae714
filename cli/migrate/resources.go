// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/api/resource"
)

// settleResources corrects requests that exceed their limits, which the API server refuses: NVIDIA's charts have no requests and limits by
// default, and Helm adds Tandem's to those that a user set. What the user set stays; of two sources the request does.
func (r *Result) settleResources(defaults map[string]any) {
	together, _ := at(overlay(defaults, r.Values), "resources.requests").(map[string]any)
	for _, name := range slices.Sorted(maps.Keys(together)) {
		asked, bound := "resources.requests."+name, "resources.limits."+name
		request, limit := together[name], at(overlay(defaults, r.Values), bound)
		if !exceeds(request, limit) {
			continue
		}
		if at(r.Values, asked) == nil {
			put(r.Values, asked, limit)
			r.Changes = append(r.Changes, fmt.Sprintf("%s: %v, as the limit, because Tandem's default %v exceeds it", asked, limit, request))
			continue
		}
		from := "Tandem's default"
		if at(r.Values, bound) != nil {
			from = "that of another source,"
		}
		put(r.Values, bound, nil) // Helm would add the chart's
		r.Changes = append(r.Changes, fmt.Sprintf("%s: none, because the request %v exceeds %s %v", bound, request, from, limit))
	}
}

// exceeds reports whether a request is larger than a limit. What is no quantity is left to the API server.
func exceeds(request, limit any) bool {
	if request == nil || limit == nil {
		return false
	}
	asked, err := resource.ParseQuantity(fmt.Sprint(request))
	bound, boundErr := resource.ParseQuantity(fmt.Sprint(limit))
	return err == nil && boundErr == nil && asked.Cmp(bound) > 0
}
