// SPDX-License-Identifier: Apache-2.0

package owner_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/internal/owner"
)

func TestReplaces(t *testing.T) {
	const no = "which may not replace it"
	safe := map[string]string{"tandem-gpu.dev/safe-to-evict": "true"} // users write it
	for name, c := range map[string]struct {
		version, kind string
		annotations   map[string]string
		want          string // part of the reason
	}{
		"Deployment":                  {"apps/v1", "ReplicaSet", nil, ""},
		"StatefulSet":                 {"apps/v1", "StatefulSet", nil, ""},
		"DaemonSet":                   {"apps/v1", "DaemonSet", nil, ""},
		"in a later version":          {"apps/v2", "ReplicaSet", nil, ""},
		"ReplicationController":       {"v1", "ReplicationController", nil, ""},
		"Job":                         {"batch/v1", "Job", nil, ""},
		"bare":                        {"", "", nil, "has no owner"},
		"bare, and says it is safe":   {"", "", safe, "has no owner"},
		"Argo":                        {"argoproj.io/v1alpha1", "Workflow", nil, no},
		"Tekton":                      {"tekton.dev/v1", "TaskRun", nil, no},
		"Ray":                         {"ray.io/v1", "RayCluster", nil, no},
		"Ray, and says it is safe":    {"ray.io/v1", "RayCluster", safe, ""},
		"Ray, and says it is not":     {"ray.io/v1", "RayCluster", map[string]string{owner.SafeToEvict: "false"}, no},
		"Kubeflow":                    {"kubeflow.org/v1", "PyTorchJob", nil, no},
		"Spark: the driver pod":       {"v1", "Pod", nil, no},
		"a Job of another group":      {"batch.volcano.sh/v1alpha1", "Job", nil, no},
		"a StatefulSet of another":    {"apps.kruise.io/v1beta1", "StatefulSet", nil, no},
		"ReplicaSet of no group":      {"v1", "ReplicaSet", nil, no},
		"an owner without a version":  {"", "ReplicaSet", nil, no},
		"a version that is no such":   {"a/b/c", "ReplicaSet", nil, no},
		"static":                      {"v1", "Node", map[string]string{corev1.MirrorPodAnnotationKey: "x"}, "is static"},
		"static, and says it is safe": {"v1", "Node", map[string]string{corev1.MirrorPodAnnotationKey: "x", owner.SafeToEvict: "true"}, "is static"},
	} {
		t.Run(name, func(t *testing.T) {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Annotations: c.annotations}}
			if c.kind != "" {
				pod.OwnerReferences = []metav1.OwnerReference{
					{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "not its controller"},
					{APIVersion: c.version, Kind: c.kind, Name: "o", Controller: ptr.To(true)},
				}
			}
			got := owner.WhyNot(pod)
			if !strings.Contains(got, c.want) || (c.want == "") != (got == "") || owner.Replaces(pod) != (got == "") {
				t.Errorf("%q", got)
			}
		})
	}
}
