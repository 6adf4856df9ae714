// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/cli/overview"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// exporterStandIn is a pod with the labels and the port of GPU Operator's dcgm-exporter. The real one needs its image and DCGM. The page has the
// format of the real one (NVIDIA/dcgm-exporter, internal/pkg/rendermetrics/render_metrics.go).
func exporterStandIn(namespace, page string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: ConfigMap
metadata: {name: page, namespace: %[1]s}
data: {metrics: %[2]q}
---
apiVersion: v1
kind: Pod
metadata: {name: dcgm-exporter, namespace: %[1]s, labels: {app: nvidia-dcgm-exporter}}
spec:
  nodeSelector: {kubernetes.io/hostname: %[3]s}
  terminationGracePeriodSeconds: 1
  containers:
  - name: exporter
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [httpd, -f, -p, "9400", -h, /www]
    ports: [{name: metrics, containerPort: 9400}]
    readinessProbe: {httpGet: {path: /metrics, port: 9400}, periodSeconds: 1}
    volumeMounts: [{name: page, mountPath: /www}]
  volumes: [{name: page, configMap: {name: page}}]
`, namespace, page, gpuNode)
}

// TestKubectlGPUTop: top reads a stand-in for dcgm-exporter through the real API server's pod proxy, and shows the metrics of each GPU beside its
// holders. It says why it has no metrics: before the stand-in runs, without the rights, and when a second namespace has such a pod.
func TestKubectlGPUTop(t *testing.T) {
	s := begin(t)
	plugin := s.BuildPlugin()
	object, err := s.GPUNodeObject()
	if err != nil {
		t.Fatal(err)
	}
	var page strings.Builder
	want, busiest := map[string]string{}, ""
	for i, d := range object.Status.Devices {
		labels := fmt.Sprintf("gpu=\"%d\",UUID=%q,device=\"nvidia%d\",modelName=%q,Hostname=%q", i, d.UUID, i, d.Model, gpuNode)
		fmt.Fprintf(&page, "# TYPE DCGM_FI_DEV_GPU_UTIL gauge\nDCGM_FI_DEV_GPU_UTIL{%s} %d\n", labels, 10*i)
		fmt.Fprintf(&page, "DCGM_FI_DEV_FB_USED{%s} %d\nDCGM_FI_DEV_FB_FREE{%s} %d\n", labels, i, labels, 1000-i)
		want[d.Name] = fmt.Sprintf("%d%% of the time, %d of 1000 MiB", 10*i, i)
		busiest = d.Name + " "
	}
	// measured checks what top shows: metrics, or why there are none.
	measured := func(reason string, args ...string) func() error {
		return func() error {
			out, err := s.KubectlGPU(plugin, append([]string{"top", gpuNode, "-o", "json"}, args...)...)
			if err != nil {
				return err
			}
			var o overview.Overview
			if err := json.Unmarshal([]byte(out), &o); err != nil {
				return err
			}
			n := o.Nodes[0]
			if reason != "" || n.NoMetrics != nil {
				if n.NoMetrics == nil || !strings.Contains(n.NoMetrics.Reason, reason) || reason == "" {
					return fmt.Errorf("no metrics: %+v, want %q", n.NoMetrics, reason)
				}
				return nil
			}
			got := map[string]string{}
			for _, d := range n.Devices {
				if m := d.Metrics; m != nil && m.UtilizationPercent != nil && m.MemoryUsedBytes != nil && m.MemoryTotalBytes != nil {
					got[d.Name] = fmt.Sprintf("%.0f%% of the time, %d of %d MiB", *m.UtilizationPercent, *m.MemoryUsedBytes>>20, *m.MemoryTotalBytes>>20)
				}
			}
			if diff := cmp.Diff(want, got); diff != "" || n.Exporter == nil || n.Exporter.Namespace != s.Namespace {
				return fmt.Errorf("metrics of %+v (-exporter +top):\n%s", n.Exporter, diff)
			}
			return nil
		}
	}
	s.Await(soon, "top to report that dcgm-exporter is missing", measured("no pod of dcgm-exporter found"))

	s.Manifest(manifests.Pod("limit", "worker"))
	if err := s.ApplyAnywhere(exporterStandIn(s.Namespace, page.String())); err != nil {
		t.Fatal(err)
	}
	s.Running(soon, 2, 0)
	s.Await(soon, "top to show the metrics", measured(""))
	s.Await(soon, "top to name the holder", func() error {
		table, err := s.KubectlGPU(plugin, "top", gpuNode, "--sort-by", "util")
		lines := strings.Split(table, "\n")
		if err == nil && (len(lines) < 2 || !strings.Contains(lines[1], busiest) ||
			strings.Count(table, s.Namespace+"/worker (limits)") != 1 || !strings.Contains(table, "metrics for 1 node from dcgm-exporter in "+s.Namespace)) {
			err = errors.New(table)
		}
		return err
	})
	s.topWithFewRights(measured)

	other := s.Namespace + "-other"
	s.Undo(func() error {
		_, err := theCluster.Kubectl(s.Ctx, "delete", "namespace", other, "--ignore-not-found")
		return err
	})
	s.Kubectl("create", "namespace", other)
	if err := s.ApplyAnywhere(exporterStandIn(other, strings.ReplaceAll(page.String(), "} ", "} 1"))); err != nil {
		t.Fatal(err)
	}
	s.Await(soon, "top to read neither of two pods", measured("pods of several namespaces have the labels of dcgm-exporter"))
	s.Await(soon, "top to read the pod of the given namespace", measured("", "--exporter-namespace", s.Namespace))
}

// topWithFewRights runs top as a user of the namespace, first without the rules of docs/user/kubectl-gpu.md and then with them.
func (s *story) topWithFewRights(measured func(reason string, args ...string) func() error) {
	s.Helper()
	as := "--as=system:serviceaccount:" + s.Namespace + ":guest"
	s.guestMay(readGPUNodes)
	s.Manifest(`
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: top}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: top}
subjects: [{kind: ServiceAccount, name: guest, namespace: ` + s.Namespace + `}]
`)
	role := func(rules string) {
		s.Manifest("{apiVersion: rbac.authorization.k8s.io/v1, kind: Role, metadata: {name: top}, rules: [" + rules + "]}")
	}
	const list, proxy = `{apiGroups: [""], resources: [pods], verbs: [list]}`, `{apiGroups: [""], resources: [pods/proxy], verbs: [get]}`
	s.Await(soon, "top to report the missing right to list pods", measured("list pods of all namespaces ", as))
	role(list)
	s.Await(soon, "top to report the missing right to the proxy", measured("you may not get pods/proxy", as, "--exporter-namespace", s.Namespace))
	role(list + ", " + proxy)
	s.Await(soon, "top to read with the documented rights", measured("", as, "--exporter-namespace", s.Namespace))
}
