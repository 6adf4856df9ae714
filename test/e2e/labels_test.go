// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/pkg/nodelabels"
)

// hasLabels waits until the node has these labels, and does not have those whose value is empty.
func (s *story) hasLabels(want map[string]string) {
	s.Helper()
	s.await(patient, "labels of the node", func() error {
		node, err := theClient.CoreV1().Nodes().Get(s.ctx, gpuNode, metav1.GetOptions{})
		if err != nil {
			return err
		}
		var errs []error
		for key, value := range want {
			if got := node.Labels[nodelabels.Prefix+key]; got != value {
				errs = append(errs, fmt.Errorf("%s is %q, want %q", key, got, value))
			}
		}
		return errors.Join(errs...)
	})
}

// ownedLabels are the labels of all nodes that Tandem owns.
func (s *story) ownedLabels() (owned []string) {
	s.Helper()
	nodes, err := theClient.CoreV1().Nodes().List(s.ctx, metav1.ListOptions{})
	if err != nil {
		s.Fatal(err)
	}
	for _, node := range nodes.Items {
		for _, entry := range node.ManagedFields {
			if entry.Manager == nodelabels.Manager {
				owned = append(owned, node.Name+": "+entry.FieldsV1.GetRawString())
			}
		}
	}
	return owned
}

// featureNames returns the names of the NodeFeatures in Tandem's namespace.
func (s *story) featureNames() []string {
	s.Helper()
	return strings.Fields(s.kubectl("get", "nodefeatures", "-n", install.Namespace, "-o", "name"))
}

func (s *story) awaitFeatures(names ...string) {
	s.Helper()
	s.await(patient, fmt.Sprintf("NodeFeatures %v", names), func() error {
		if got := s.featureNames(); !slices.Equal(got, names) {
			return fmt.Errorf("there are %v", got)
		}
		return nil
	})
}

// TestNodeFeature: with Node Feature Discovery, the labels come from NodeFeatures. The agents remove these when the setting changes, and the
// garbage collector after an uninstallation. An agent leaves a NodeFeature that another field manager has written. Without Node Feature
// Discovery the labels on the nodes stay, and an event says what is missing.
func TestNodeFeature(t *testing.T) {
	const product, own = "NVIDIA-H100-80GB-HBM3", "nvidia-features-for-" + gpuNode
	s := begin(t)
	discovery := s.nfd()
	values := func(use string) []string { return []string{"gfd.sleepInterval=1s", "nfd.enableNodeFeatureApi=" + use} }
	upgrade := func(use string) {
		t.Helper()
		err := install.Tandem(s.ctx, theCluster, install.Options{Values: append(values(use), installValues...)})
		if err != nil {
			t.Fatal(err)
		}
		s.rolledOut()
	}
	feature := func(node string) string { return "nodefeature.nfd.k8s-sigs.io/nvidia-features-for-" + node }
	labelled := map[string]string{"gpu.product": product, "gpu.count": "8", "gpu.family": "hopper"}
	notOurs := func() {
		t.Helper()
		s.await(patient, "no labels of Tandem's own on the nodes", func() error {
			if owned := s.ownedLabels(); len(owned) > 0 {
				return errors.New(strings.Join(owned, "\n"))
			}
			return nil
		})
	}
	s.hasLabels(labelled)

	s.installed("mig-limits.values.yaml", values("true")...)
	s.event("Node", gpuNode, "NodeLabelsNotWritten", "the API server has no NodeFeatures", "Install Node Feature Discovery")
	s.ready()
	s.hasLabels(labelled)
	discovery.define()
	s.awaitFeatures(feature(gpuNode), feature(numaNode))
	notOurs()
	discovery.run()
	s.hasLabels(labelled)
	if owned := s.ownedLabels(); len(owned) > 0 {
		t.Errorf("labels of Tandem's own:\n%s", strings.Join(owned, "\n"))
	}

	// A stolen token labels no other node, and writes no other label. Requests that the API server would allow are dry runs.
	pod := s.agentPod(gpuNode)
	stolen := s.as(pod.Spec.ServiceAccountName, &pod).CoreV1().RESTClient()
	path := func(namespace, name string) string {
		return "/apis/nfd.k8s-sigs.io/v1alpha1/namespaces/" + namespace + "/nodefeatures/" + name
	}
	patch := func(path, text string) error {
		return stolen.Patch(types.MergePatchType).AbsPath(path).Param("dryRun", "All").Body([]byte(text)).Do(s.ctx).Error()
	}
	other := path(install.Namespace, "nvidia-features-for-"+numaNode)
	for what, c := range map[string]struct {
		err  error
		want string
	}{
		"own":           {patch(path(install.Namespace, own), `{"spec":{"labels":{"nvidia.com/gpu.count":"9"}}}`), ""},
		"another label": {patch(path(install.Namespace, own), `{"spec":{"labels":{"nvidia.com/gpu.deploy.driver":"false"}}}`), "nothing in a NodeFeature but labels of GPU Feature Discovery"},
		"for another":   {patch(path(install.Namespace, own), `{"metadata":{"labels":{"nfd.node.kubernetes.io/node-name":"`+numaNode+`"}}}`), "for that node only"},
		"another's":     {patch(other, `{"spec":{"labels":{"nvidia.com/gpu.count":"9"}}}`), "may write the NodeFeature " + own + " only"},
		"deletes":       {stolen.Delete().AbsPath(other).Param("dryRun", "All").Do(s.ctx).Error(), "may write the NodeFeature " + own + " only"},
		"elsewhere":     {patch(path(s.namespace, own), `{"spec":{"labels":{"nvidia.com/gpu.count":"9"}}}`), "cannot patch resource"},
	} {
		switch {
		case c.want == "" && c.err != nil:
			t.Errorf("%s: %v", what, c.err)
		case c.want != "" && (!apierrors.IsForbidden(c.err) || !strings.Contains(c.err.Error(), c.want)):
			t.Errorf("%s: %v, which should be forbidden and say %q", what, c.err, c.want)
		}
	}

	// The next agent uses the same object, and writes a deleted one again.
	s.killAgent()
	s.ready()
	uid := s.kubectl("get", "nodefeature", own, "-n", install.Namespace, "-o", "jsonpath={.metadata.uid}")
	s.kubectl("delete", "nodefeature", own, "-n", install.Namespace)
	s.await(patient, "another NodeFeature", func() error {
		if now := s.kubectl("get", "nodefeature", own, "-n", install.Namespace, "--ignore-not-found", "-o", "jsonpath={.metadata.uid}"); now == "" || now == uid {
			return fmt.Errorf("its UID is %q", now)
		}
		return nil
	})
	s.hasLabels(labelled)

	// If another field manager writes to the object, Tandem leaves it alone.
	s.kubectl("patch", "nodefeature", own, "-n", install.Namespace, "--field-manager=gfd", "--type=merge", "-p", `{"spec":{"labels":{"nvidia.com/gpu.product":"theirs"}}}`)
	s.event("Node", gpuNode, "NodeLabelsNotWritten", "the field manager gfd has written the NodeFeature "+install.Namespace+"/"+own)
	s.hasLabels(map[string]string{"gpu.product": "theirs", "gpu.count": "8"})
	s.kubectl("delete", "nodefeature", own, "-n", install.Namespace)
	s.hasLabels(labelled)

	// The labels move to the Node, and back to the object.
	upgrade("false")
	s.awaitFeatures()
	s.await(patient, "labels of Tandem's own on both nodes", func() error {
		if owned := s.ownedLabels(); len(owned) != 2 || !strings.Contains(owned[0], "gpu.product") || !strings.Contains(owned[1], "gpu.product") {
			return errors.New(strings.Join(owned, "\n"))
		}
		return nil
	})
	s.hasLabels(labelled)
	upgrade("true")
	s.awaitFeatures(feature(gpuNode), feature(numaNode))
	notOurs()
	s.hasLabels(labelled)

	if err := install.Uninstall(s.ctx, theCluster, install.Options{}); err != nil {
		t.Fatal(err)
	}
	s.awaitFeatures()
	s.hasLabels(map[string]string{"gpu.product": "", "gpu.count": "", "gpu.family": ""})
}
