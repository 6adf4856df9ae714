// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/hack/install"
)

// featureNames returns the names of the NodeFeatures in Tandem's namespace.
func (s *story) featureNames() []string {
	s.Helper()
	return strings.Fields(s.Kubectl("get", "nodefeatures", "-n", install.Namespace, "-o", "name"))
}

func (s *story) awaitFeatures(names ...string) {
	s.Helper()
	s.Await(patient, fmt.Sprintf("NodeFeatures %v", names), func() error {
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
		err := s.Install(s.Ctx, install.Options{Values: values(use)})
		if err != nil {
			t.Fatal(err)
		}
		s.RolledOut()
	}
	feature := func(node string) string { return "nodefeature.nfd.k8s-sigs.io/nvidia-features-for-" + node }
	labelled := map[string]string{"gpu.product": product, "gpu.count": "8", "gpu.family": "hopper"}
	notOurs := func() {
		t.Helper()
		s.Await(patient, "no labels of Tandem's own on the nodes", func() error {
			if owned := s.OwnedLabels(); len(owned) > 0 {
				return errors.New(strings.Join(owned, "\n"))
			}
			return nil
		})
	}
	s.HasLabels(labelled)

	s.Installed("mig-limits.values.yaml", values("true")...)
	s.Event("Node", gpuNode, "NodeLabelsNotWritten", "the API server has no NodeFeatures", "Install Node Feature Discovery")
	s.Ready()
	s.HasLabels(labelled)
	discovery.define()
	s.awaitFeatures(feature(gpuNode), feature(numaNode))
	notOurs()
	discovery.run()
	s.HasLabels(labelled)
	if owned := s.OwnedLabels(); len(owned) > 0 {
		t.Errorf("labels of Tandem's own:\n%s", strings.Join(owned, "\n"))
	}

	// A stolen token labels no other node, and writes no other label. Requests that the API server would allow are dry runs.
	pod := s.AgentPod(gpuNode)
	stolen := s.As(pod.Spec.ServiceAccountName, &pod).CoreV1().RESTClient()
	path := func(namespace, name string) string {
		return "/apis/nfd.k8s-sigs.io/v1alpha1/namespaces/" + namespace + "/nodefeatures/" + name
	}
	patch := func(path, text string) error {
		return stolen.Patch(types.MergePatchType).AbsPath(path).Param("dryRun", "All").Body([]byte(text)).Do(s.Ctx).Error()
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
		"deletes":       {stolen.Delete().AbsPath(other).Param("dryRun", "All").Do(s.Ctx).Error(), "may write the NodeFeature " + own + " only"},
		"elsewhere":     {patch(path(s.Namespace, own), `{"spec":{"labels":{"nvidia.com/gpu.count":"9"}}}`), "cannot patch resource"},
	} {
		switch {
		case c.want == "" && c.err != nil:
			t.Errorf("%s: %v", what, c.err)
		case c.want != "" && (!apierrors.IsForbidden(c.err) || !strings.Contains(c.err.Error(), c.want)):
			t.Errorf("%s: %v, which should be forbidden and say %q", what, c.err, c.want)
		}
	}

	// The next agent uses the same object, and writes a deleted one again.
	s.KillAgent()
	s.Ready()
	uid := s.Kubectl("get", "nodefeature", own, "-n", install.Namespace, "-o", "jsonpath={.metadata.uid}")
	s.Kubectl("delete", "nodefeature", own, "-n", install.Namespace)
	s.Await(patient, "another NodeFeature", func() error {
		if now := s.Kubectl("get", "nodefeature", own, "-n", install.Namespace, "--ignore-not-found", "-o", "jsonpath={.metadata.uid}"); now == "" || now == uid {
			return fmt.Errorf("its UID is %q", now)
		}
		return nil
	})
	s.HasLabels(labelled)

	// If another field manager writes to the object, Tandem leaves it alone.
	s.Kubectl("patch", "nodefeature", own, "-n", install.Namespace, "--field-manager=gfd", "--type=merge", "-p", `{"spec":{"labels":{"nvidia.com/gpu.product":"theirs"}}}`)
	s.Event("Node", gpuNode, "NodeLabelsNotWritten", "the field manager gfd has written the NodeFeature "+install.Namespace+"/"+own)
	s.HasLabels(map[string]string{"gpu.product": "theirs", "gpu.count": "8"})
	s.Kubectl("delete", "nodefeature", own, "-n", install.Namespace)
	s.HasLabels(labelled)

	// The labels move to the Node, and back to the object.
	upgrade("false")
	s.awaitFeatures()
	s.Await(patient, "labels of Tandem's own on both nodes", func() error {
		if owned := s.OwnedLabels(); len(owned) != 2 || !strings.Contains(owned[0], "gpu.product") || !strings.Contains(owned[1], "gpu.product") {
			return errors.New(strings.Join(owned, "\n"))
		}
		return nil
	})
	s.HasLabels(labelled)
	upgrade("true")
	s.awaitFeatures(feature(gpuNode), feature(numaNode))
	notOurs()
	s.HasLabels(labelled)

	if err := install.Uninstall(s.Ctx, theCluster, install.Options{}); err != nil {
		t.Fatal(err)
	}
	s.awaitFeatures()
	s.HasLabels(map[string]string{"gpu.product": "", "gpu.count": "", "gpu.family": ""})
}
