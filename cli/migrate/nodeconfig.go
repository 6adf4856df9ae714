// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"path"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// mountedConfigs returns the value config of NVIDIA's chart for a pod of the device plugin. The pod's config-manager takes the node's
// configuration from a ConfigMap, also in GPU Operator's pods. It returns nil if no container mounts such a ConfigMap.
func mountedConfigs(pod *corev1.PodSpec) map[string]any {
	for _, c := range slices.Concat(pod.Containers, pod.InitContainers) {
		variables := map[string]string{}
		for _, v := range c.Env {
			variables[v.Name] = v.Value
		}
		from := variables["CONFIG_FILE_SRCDIR"]
		name := configMapAt(pod, c.VolumeMounts, from)
		if from == "" || name == "" {
			continue
		}
		settings := map[string]any{"name": name}
		if usual := variables["DEFAULT_CONFIG"]; usual != "" {
			settings["default"] = usual
		}
		if text := variables["FALLBACK_STRATEGIES"]; text != "" {
			settings["fallbackStrategies"] = listOf(text)
		}
		return settings
	}
	return nil
}

// configMapAt returns the name of the ConfigMap that is mounted as a whole in a directory.
func configMapAt(pod *corev1.PodSpec, mounts []corev1.VolumeMount, directory string) string {
	for _, m := range mounts {
		for _, v := range pod.Volumes {
			if v.Name == m.Name && path.Clean(m.MountPath) == path.Clean(directory) && m.SubPath == "" && v.ConfigMap != nil && len(v.ConfigMap.Items) == 0 {
				return v.ConfigMap.Name
			}
		}
	}
	return ""
}

// hasConfigs reports whether a release has node configurations, or names their ConfigMap.
func (s *Source) hasConfigs() bool {
	return s != nil && (!isUnset(at(s.Values, "config.name")) || !isUnset(at(s.Values, "config.map")))
}
