// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/tandem-gpu/tandem/cli/workloads"
)

// pluginDirectories are those in which kubelet looks for the sockets of device plugins and DRA drivers, where it is not told otherwise.
var pluginDirectories = []string{"/var/lib/kubelet/device-plugins", "/var/lib/kubelet/plugins_registry"}

// administeredIn returns a function that reports whether tenants cannot create pods in a namespace. What is in it may look as if it were
// NVIDIA's: names, labels, images and owner references are its creator's choice. But NVIDIA's pods mount a directory of kubelet's, and a user
// who may create such a pod has the node and its GPUs anyway. A DaemonSet alone proves nothing: admission may refuse its pods. The function
// reads a namespace once, because a tenant may create any number of DaemonSets and Secrets in it. tandem is the namespace of Tandem's release;
// empty if it is to be found.
func administeredIn(ctx context.Context, client kubernetes.Interface, tandem string) func(namespace string) (bool, error) {
	agents := sync.OnceValues(func() ([]string, error) { return agentDirectories(ctx, client, tandem) })
	read := func(namespace string) (bool, error) {
		list, err := client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, fmt.Errorf("list pods of namespace %s: %w", namespace, err)
		}
		mount := func(paths []string) bool {
			return slices.ContainsFunc(list.Items, func(pod corev1.Pod) bool {
				return slices.ContainsFunc(hostPaths(pod.Spec), func(of string) bool { return slices.Contains(paths, of) })
			})
		}
		if mount(pluginDirectories) {
			return true, nil
		}
		paths, err := agents()
		return mount(paths), err
	}
	seen := map[string]func() (bool, error){metav1.NamespaceSystem: func() (bool, error) { return true, nil }}
	return func(namespace string) (bool, error) {
		if seen[namespace] == nil {
			seen[namespace] = sync.OnceValues(func() (bool, error) { return read(namespace) })
		}
		return seen[namespace]()
	}
}

// agentDirectories returns what is pluginDirectories where kubelet has another root directory: the DaemonSets of Tandem's agents mount them.
func agentDirectories(ctx context.Context, client kubernetes.Interface, namespace string) (paths []string, err error) {
	sets, err := workloads.DaemonSets(ctx, client, namespace)
	if err != nil && !errors.Is(err, workloads.ErrNoBinding) {
		return nil, fmt.Errorf("find the kubelet directory of Tandem's agents: %w", err)
	}
	for _, set := range sets {
		for _, of := range hostPaths(set.Spec.Template.Spec) {
			if slices.ContainsFunc(pluginDirectories, func(known string) bool { return path.Base(known) == path.Base(of) }) {
				paths = append(paths, of)
			}
		}
	}
	return paths, nil
}

func hostPaths(pod corev1.PodSpec) (paths []string) {
	for _, v := range pod.Volumes {
		if v.HostPath != nil {
			paths = append(paths, path.Clean(v.HostPath.Path))
		}
	}
	return paths
}

// setsThatLeft returns the DaemonSets that left nodes in earlier runs, as namespace/name. They may have no pods, and administered looks at
// pods.
func setsThatLeft(ctx context.Context, client kubernetes.Interface) (names []string, err error) {
	list, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: Label})
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	for _, node := range list.Items {
		names = append(names, strings.Split(node.Annotations[setsAnnotation], ",")...)
	}
	return names, nil
}
