// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// TestQuotaWithoutRoom: a quota has no room for a claim if it has less left than the claim requests. A claim that exists is used already.
func TestQuotaWithoutRoom(t *testing.T) {
	const name = "gpu.nvidia.com.deviceclass.resource.k8s.io/devices"
	first := []resourceapi.DeviceRequest{{Name: "r", FirstAvailable: []resourceapi.DeviceSubRequest{
		{Name: "two", DeviceClassName: "gpu.nvidia.com", Count: 2}, {Name: "one", DeviceClassName: "gpu.nvidia.com", Count: 1}}}}
	for _, c := range []struct {
		used     string
		requests []resourceapi.DeviceRequest
		exists   bool
		want     string
	}{
		{"2", exactly(2), false, ""},
		{"3", exactly(2), false, ": it has no room"},
		{"3", exactly(2), true, ""},
		{"4", exactly(2), true, ": it has no room"},
		{"2", first, false, ""},
		{"3", first, false, ": it has no room"},
	} {
		f := facts(c.requests, "-")
		if !c.exists {
			of := &resourceapi.ResourceClaimTemplate{}
			of.Spec.Spec.Devices.Requests = c.requests
			f.Claims, f.Templates = nil, map[string]*resourceapi.ResourceClaimTemplate{"t": of}
			f.Pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "x", ResourceClaimTemplateName: ptr.To("t")}}
		}
		f.Quotas = []corev1.ResourceQuota{{ObjectMeta: metav1.ObjectMeta{Name: "q"}, Status: corev1.ResourceQuotaStatus{
			Hard: corev1.ResourceList{name: resource.MustParse("4")}, Used: corev1.ResourceList{name: resource.MustParse(c.used)},
		}}}
		want := []string{"q: " + c.used + " of 4 " + name + " are used" + c.want}
		if diff := cmp.Diff(want, answerTo(t, f).Quotas); diff != "" {
			t.Errorf("%+v: %s", c, diff)
		}
		f.QuotaClaims = []resourceapi.ResourceClaim{{ObjectMeta: metav1.ObjectMeta{Name: "other"}, Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: exactly(2)}}}}
		f.QuotaPartly = true
		want[0] += ": claim other has 2, among the first 0 pods and 1 claim"
		if diff := cmp.Diff(want, answerTo(t, f).Quotas); diff != "" {
			t.Errorf("%+v: %s", c, diff)
		}
	}
}
