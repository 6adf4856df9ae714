// SPDX-License-Identifier: Apache-2.0

package intruder

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/hack/install"
)

// A tenant's pod gets no GPU around the ledger, where the chart's policy denies that.
func TestPodsAroundTheLedger(t *testing.T) {
	visible := func(value string) []corev1.EnvVar {
		return []corev1.EnvVar{{Name: "NVIDIA_VISIBLE_DEVICES", Value: value}}
	}
	const environment, privileged, mounted = "NVIDIA_VISIBLE_DEVICES", "privileged", "/var/run/nvidia-container-devices"
	create := func(namespace string, change func(*corev1.PodSpec)) func() error {
		return func() error {
			pod := podIn(namespace, "tenant")
			change(&pod.Spec)
			_, err := theClient.CoreV1().Pods(namespace).Create(t.Context(), pod, metav1.CreateOptions{DryRun: dry})
			return err
		}
	}
	first := func(s *corev1.PodSpec) *corev1.Container { return &s.Containers[0] }
	for name, c := range map[string]struct {
		change func(*corev1.PodSpec)
		want   string
	}{
		"nothing":  {func(*corev1.PodSpec) {}, ""},
		"void":     {func(s *corev1.PodSpec) { first(s).Env = visible("void") }, ""},
		"none":     {func(s *corev1.PodSpec) { first(s).Env = visible("none") }, ""},
		"empty":    {func(s *corev1.PodSpec) { first(s).Env = visible("") }, ""},
		"all":      {func(s *corev1.PodSpec) { first(s).Env = visible("all") }, environment},
		"an index": {func(s *corev1.PodSpec) { first(s).Env = visible("0") }, environment},
		"from elsewhere": {func(s *corev1.PodSpec) {
			first(s).Env = []corev1.EnvVar{{Name: "NVIDIA_VISIBLE_DEVICES", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.labels['x']"}}}}
		}, environment},
		"in an init container": {func(s *corev1.PodSpec) {
			s.InitContainers = []corev1.Container{{Name: "i", Image: "image", Env: visible("all")}}
		}, environment},
		"privileged": {func(s *corev1.PodSpec) { first(s).SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true)} }, privileged},
		"as a volume": {func(s *corev1.PodSpec) {
			s.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
			first(s).VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "//run/nvidia-container-devices/all"}}
		}, mounted},
		"from a ConfigMap": {func(s *corev1.PodSpec) {
			first(s).EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "settings"}}}}
		}, "envFrom"},
		"from a ConfigMap, but void": {func(s *corev1.PodSpec) {
			first(s).EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "settings"}}}}
			first(s).Env = visible("void")
		}, ""},
		"as an old image": {func(s *corev1.PodSpec) {
			first(s).Env = []corev1.EnvVar{{Name: "CUDA_VERSION", Value: "8.0"}}
		}, "CUDA_VERSION"},
	} {
		until(t, name, c.want, create("default", c.change))
	}
	until(t, "of the cluster", "", create("kube-system", func(s *corev1.PodSpec) { first(s).SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true)} }))
	until(t, "of the release", "", create(install.Namespace, func(s *corev1.PodSpec) { first(s).SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true)} }))

	pod, err := theClient.CoreV1().Pods("default").Create(t.Context(), podIn("default", "debugged"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for value, want := range map[string]string{"void": "", "all": environment} {
		until(t, "debugging with "+value, want, func() error {
			changed := pod.DeepCopy()
			changed.Spec.EphemeralContainers = []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{
				Name: "e", Image: "image", Env: visible(value), ImagePullPolicy: corev1.PullAlways, TerminationMessagePolicy: corev1.TerminationMessageReadFile,
			}}}
			_, err := theClient.CoreV1().Pods("default").UpdateEphemeralContainers(t.Context(), pod.Name, changed, metav1.UpdateOptions{DryRun: dry})
			return err
		})
	}
	if err := theClient.CoreV1().Pods("default").Delete(t.Context(), pod.Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		t.Error(err)
	}
}
