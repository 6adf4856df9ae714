// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	resourcehelper "k8s.io/component-helpers/resource"

	"github.com/tandem-gpu/tandem/internal/podstatus"
)

// claimNotCreated is the reason of the event with which kube-controller-manager reports that it cannot create the claim of a template.
const claimNotCreated = "FailedResourceClaimCreation"

// exceededQuota is how the API server refuses an object that a quota has no room for.
var exceededQuota = regexp.MustCompile(`exceeded quota: (.+?), requested: (.+?), used: (.+?), limited: (.+)$`)

// RefusedByQuota reports whether an event says that a quota has no room for a claim. It is pure. cli/overview calls it to know whether Why
// needs who uses the quota.
func RefusedByQuota(e corev1.Event) bool {
	return e.Reason == claimNotCreated && exceededQuota.MatchString(eventText(e))
}

// quotas returns the quotas of the namespace that count the pod's requests, with their use and who uses them.
func (f Facts) quotas(claims []claimOf, needs []need) (texts []string) {
	counted := f.counts(needs)
	// A quota counts a claim that exists as used.
	var later []need
	for _, of := range claims {
		if of.claim == nil {
			later = append(later, f.needs(of)...)
		}
	}
	lacks := f.counts(later)
	for _, q := range f.Quotas {
		for name, hard := range q.Status.Hard {
			if counted[name] == 0 {
				continue
			}
			used := q.Status.Used[name]
			text := fmt.Sprintf("%s: %s of %s %s are used", q.Name, used.String(), hard.String(), name)
			if left := hard.Value() - used.Value(); left <= 0 || left < lacks[name] {
				text += ": it has no room"
			}
			texts = append(texts, text+f.users(name))
		}
	}
	slices.Sort(texts)
	return texts
}

// counts returns what quotas count of requests.
func (f Facts) counts(needs []need) map[corev1.ResourceName]int64 {
	counted := map[corev1.ResourceName]int64{}
	for _, n := range needs {
		most := map[corev1.ResourceName]int64{} // of the alternatives
		count := func(name string, n int64) { most[corev1.ResourceName(name)] = max(most[corev1.ResourceName(name)], n) }
		for _, alternative := range n.alternatives() {
			if alternative.resource != "" {
				count("requests."+alternative.resource, alternative.count)
				continue
			}
			devices := alternative.count
			if alternative.all {
				devices = resourceapi.AllocationResultsMaxSize // pkg/quota/v1/evaluator/core of kubernetes
			}
			count(alternative.class+".deviceclass.resource.k8s.io/devices", devices)
			if class, known := f.class(alternative.class); known && class.Spec.ExtendedResourceName != nil {
				count("requests."+*class.Spec.ExtendedResourceName, devices)
			}
		}
		for name, n := range most {
			counted[name] += n
		}
	}
	return counted
}

// users returns who uses what a quota counts, the largest first.
func (f Facts) users(name corev1.ResourceName) string {
	uses := map[string]int64{}
	for i := range f.QuotaPods {
		pod := &f.QuotaPods[i]
		limits := resourcehelper.PodLimits(pod, resourcehelper.PodResourcesOptions{})
		for resource, quantity := range limits {
			if "requests."+resource == name && !podstatus.Ended(pod) {
				uses["pod "+pod.Name] += quantity.Value()
			}
		}
	}
	for i := range f.QuotaClaims {
		claim := &f.QuotaClaims[i]
		if n := f.counts(f.needs(claimOf{name: claim.Name, spec: &claim.Spec, claim: claim}))[name]; n > 0 {
			uses[userOf(claim)] += n
		}
	}
	delete(uses, "pod "+f.Pod.Name)
	if len(uses) == 0 {
		return ""
	}
	users := slices.SortedFunc(maps.Keys(uses), func(a, b string) int { return cmp.Or(cmp.Compare(uses[b], uses[a]), cmp.Compare(a, b)) })
	text := ": " + list(users, func(user string) string { return fmt.Sprintf("%s has %d", user, uses[user]) })
	if f.QuotaPartly {
		text += ", among the first " + Number(len(f.QuotaPods), "pod") + " and " + Number(len(f.QuotaClaims), "claim")
	}
	return text
}

// userOf is the pod of a template's claim, or the claim.
func userOf(claim *resourceapi.ResourceClaim) string {
	if pod := metav1.GetControllerOfNoCopy(claim); pod != nil && pod.Kind == "Pod" {
		return "pod " + OneLine(pod.Name)
	}
	return "claim " + claim.Name
}
