// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"sigs.k8s.io/yaml"
)

// withoutBinding removes what tells the namespace of Tandem's release, as in an installation with rbac.create=false.
func (w *world) withoutBinding() {
	w.Helper()
	if err := w.client.RbacV1().ClusterRoleBindings().Delete(w.Context(), "tandem", metav1.DeleteOptions{}); err != nil {
		w.Fatal(err)
	}
}

// agentsOfChart returns the DaemonSet of the chart with kubeletDir=/var/lib/k0s/kubelet.
func agentsOfChart(t *testing.T) *appsv1.DaemonSet {
	text, err := os.ReadFile("../../deployments/helm/testdata/everything.golden.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for document := range bytes.SplitSeq(text, []byte("\n---\n")) {
		if !bytes.Contains(document, []byte("\nkind: DaemonSet\n")) {
			continue
		}
		set := &appsv1.DaemonSet{}
		if err := yaml.Unmarshal(document, set); err != nil {
			t.Fatal(err)
		}
		return set
	}
	t.Fatal("the chart has no DaemonSet")
	return nil
}

// On nodes with another directory of kubelet's, NVIDIA's pods mount that. Tandem's DaemonSet tells it.
func TestOtherKubeletDirectory(t *testing.T) {
	volume := func(path string) []corev1.Volume {
		return []corev1.Volume{{VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: path}}}}
	}
	elsewhere := tandem.DeepCopy()
	elsewhere.Spec.Template.Spec.Volumes = agentsOfChart(t).Spec.Template.Spec.Volumes
	for path, want := range map[string]bool{
		"/var/lib/k0s/kubelet/plugins_registry/": true, "/var/lib/k0s/kubelet/device-plugins": true, "/var/lib/kubelet/device-plugins": true,
		"/var/lib/k0s/kubelet": false, "/var/lib/k0s/kubelet/pods": false, "/scratch/device-plugins": false,
	} {
		nvidia := *plugin.DeepCopy()
		nvidia.Spec.Template.Spec.Volumes = volume(path)
		w := newWorld(t, nvidia)
		if err := w.client.Tracker().Update(appsv1.SchemeGroupVersion.WithResource("daemonsets"), elsewhere, "tandem-system"); err != nil {
			t.Fatal(err)
		}
		chart := map[string]any{"metadata": map[string]any{"name": "nvidia-device-plugin"}}
		secret := release(t, "nvidia", "plugin", map[string]any{"name": "plugin", "chart": chart})
		must[any](w, nil, w.client.Tracker().Add(secret))
		check := func(namespace string, want bool) {
			t.Helper()
			n := w.nodes(false)
			n.Namespace = namespace
			sets, doubtful, err := n.daemonSets(t.Context())
			if (len(sets) == 1) != want || (len(doubtful) == 1) == want || err != nil {
				t.Errorf("%s: %v, doubtful %v, %v", path, sets, doubtful, err)
			}
			sources, err := ReadReleases(t.Context(), w.client, namespace)
			if (len(sources) == 1) != want || (err == nil) != want {
				t.Errorf("%s: releases %v, %v", path, sources, err)
			}
		}
		check("", want)
		w.withoutBinding()
		check("", path == "/var/lib/kubelet/device-plugins")
		check("tandem-system", want)
	}
}

// After all nodes have moved, NVIDIA's release has no pods. The nodes tell its namespace.
func TestReleaseOfSetsThatLeft(t *testing.T) {
	w := newWorld(t, plugin)
	for _, namespace := range []string{"nvidia", "aaa-tenant", "nvid"} {
		must[any](w, nil, w.client.Tracker().Add(release(t, namespace, "plugin", map[string]any{
			"name": "plugin", "chart": map[string]any{"metadata": map[string]any{"name": "nvidia-device-plugin"}},
		})))
	}
	if err := w.migrate(w.nodes(false)); err != nil {
		t.Fatal(err)
	}
	sources, err := ReadReleases(t.Context(), w.client, "")
	if len(sources) != 1 || sources[0].Name != "release nvidia/plugin" {
		t.Errorf("read %v", sources)
	}
	w.wantError(err, "release aaa-tenant/plugin is not read", "release nvid/plugin is not read")
}

// A namespace is read once, however many DaemonSets and releases a tenant creates there.
func TestNamespacesAreReadOnce(t *testing.T) {
	client := fake.NewClientset()
	for i := range 20 {
		set := plugin.DeepCopy()
		set.Namespace, set.Name = fmt.Sprintf("tenant-%d", i%2), fmt.Sprintf("mine-%d", i)
		chart := map[string]any{"metadata": map[string]any{"name": "nvidia-device-plugin"}}
		if err := client.Tracker().Add(set); err != nil {
			t.Fatal(err)
		}
		if err := client.Tracker().Add(release(t, set.Namespace, set.Name, map[string]any{"name": set.Name, "chart": chart})); err != nil {
			t.Fatal(err)
		}
	}
	for name, read := range map[string]func(context.Context) int{
		"DaemonSets": func(ctx context.Context) int {
			_, doubtful, err := (&Nodes{Client: client}).daemonSets(ctx)
			if err != nil {
				t.Error(err)
			}
			return len(doubtful)
		},
		"releases": func(ctx context.Context) int {
			sources, err := ReadReleases(ctx, client, "")
			if len(sources) > 0 || err == nil {
				t.Errorf("read %v, %v", sources, err)
			}
			return strings.Count(err.Error(), "is not read")
		},
	} {
		client.ClearActions()
		if got := read(t.Context()); got != 20 {
			t.Errorf("%s: %d are doubtful", name, got)
		}
		lists := map[string]int{}
		for _, action := range client.Actions() {
			lists[action.GetResource().Resource+" of "+action.GetNamespace()]++
		}
		for what, times := range lists {
			if times > 1 {
				t.Errorf("%s: %s are listed %d times", name, what, times)
			}
		}
	}
}
