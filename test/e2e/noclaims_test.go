// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/test/stories"
)

// TestWithoutTheClaimsAPI has a cluster of its own, whose API server does not serve claims: DevicePluginOnly works, and in Dual the
// node gets an event that describes what to do.
func TestWithoutTheClaimsAPI(t *testing.T) {
	if !strings.HasPrefix(theCluster.Config().KubernetesVersion, "v1.34.") {
		t.Skip("from Kubernetes 1.35 on an API server that does not serve claims is never ready: its own informers wait for ResourceSlices")
	}
	s := &story{stories.New(t, theContext, &thePlace)}
	s.Namespace = metav1.NamespaceDefault
	c := s.clusterWithoutClaims()
	config, err := c.RESTConfig()
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	installed := func(mode string) {
		t.Helper()
		values := []string{"deviceClasses.create=false", "config.tandem.mode=" + mode}
		if err := install.Tandem(s.Ctx, c, install.Options{Detached: true, Values: values}); err != nil {
			t.Fatal(err)
		}
	}
	kubectl := func(args ...string) string {
		t.Helper()
		out, err := c.Kubectl(s.Ctx, args...)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	offered := func() error {
		n, err := client.CoreV1().Nodes().Get(s.Ctx, gpuNode, metav1.GetOptions{})
		if got := n.Status.Allocatable[install.ResourceName]; err == nil && got.Value() != gpusANode {
			err = fmt.Errorf("allocatable is %s", got.String())
		}
		return err
	}
	ready := func() error {
		pods, err := client.CoreV1().Pods(install.Namespace).List(s.Ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, pod := range pods.Items {
			if !podstatus.Ready(&pod) {
				err = errors.Join(err, fmt.Errorf("%s is not ready", pod.Name))
			}
		}
		return err
	}

	installed("DevicePluginOnly")
	s.Await(patient, "the GPUs to be offered to limits", offered)
	s.Await(patient, "agent and controller to be ready", ready)
	kubectl("apply", "-f", filepath.Join("..", "..", "examples", "limits.yaml"))
	s.Await(patient, "a limits pod to run", func() error {
		pod, err := client.CoreV1().Pods(s.Namespace).Get(s.Ctx, "limits", metav1.GetOptions{})
		if err == nil && pod.Status.Phase != corev1.PodRunning {
			err = fmt.Errorf("it is %s %s", pod.Status.Phase, pod.Status.Message)
		}
		return err
	})
	s.quiet(c)

	kubectl("label", "node", gpuNode, stories.ModeLabel+"=Dual")
	s.Await(patient, "the node to say what to do", func() error {
		if out := kubectl("get", "events", "--field-selector=reason=NoClaimsAPI"); !stories.HasAll(out, []string{"DevicePluginOnly", "--runtime-config"}) {
			return errors.New(out)
		}
		return nil
	})
	s.Await(patient, "the agent not to be ready", func() error {
		if ready() == nil {
			return errors.New("it is")
		}
		return nil
	})
	s.Await(patient, "limits to be served all the same", offered)
	s.quiet(c)
}

func (s *story) clusterWithoutClaims() *cluster.Cluster {
	s.Helper()
	return s.ownCluster(cluster.Config{
		Nodes:         []cluster.NodeConfig{{Name: gpuNode}},
		APIServerArgs: []string{"--runtime-config=resource.k8s.io/v1=false"},
		FeatureGates:  map[string]bool{"DynamicResourceAllocation": false},
	})
}

// ownCluster starts a cluster for this story only, with the versions of the stories' cluster.
func (s *story) ownCluster(config cluster.Config) *cluster.Cluster {
	s.Helper()
	dir, err := cluster.OwnedDir(s.Ctx, tempPrefix, s.Output())
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { os.RemoveAll(dir) })
	config.Dir, config.Progress = filepath.Join(dir, "cluster"), s.Output()
	config.KubernetesVersion, config.ContainerRuntime = theCluster.Config().KubernetesVersion, theCluster.Config().ContainerRuntime
	c, err := cluster.New(config)
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(s.Ctx), 2*time.Minute)
		defer cancel()
		if s.Failed() {
			for _, args := range [][]string{
				{"get", "pods", "-A", "-o", "wide"}, {"get", "events", "-A"},
				{"logs", "-n", install.Namespace, "-l", "app.kubernetes.io/name=tandem", "--tail=60", "--prefix"},
			} {
				out, err := c.Kubectl(ctx, args...)
				s.Logf("kubectl %v (%v):\n%s", args, err, out)
			}
		}
		if err := c.Stop(ctx); err != nil {
			s.Error(err)
		}
	})
	if err := c.Start(s.Ctx); err != nil {
		s.Fatal(err)
	}
	return c
}

// errorLine is how klog begins one.
var errorLine = regexp.MustCompile(`(?m)^E\d{4} `)

// quiet looks for half a minute whether agent and controller complain again and again.
func (s *story) quiet(c *cluster.Cluster) {
	s.Helper()
	errorsOf := func(component string) (lines int, log string) {
		log, err := c.Kubectl(s.Ctx, "logs", "-n", install.Namespace, "-l", "app.kubernetes.io/component="+component, "--tail=-1")
		if err != nil {
			s.Fatal(err)
		}
		return len(errorLine.FindAllString(log, -1)) + strings.Count(log, `"level":"error"`), log
	}
	components := []string{"kubelet-plugin", "controller"}
	before := map[string]int{}
	for _, component := range components {
		before[component], _ = errorsOf(component)
	}
	select {
	case <-s.Ctx.Done():
	case <-time.After(30 * time.Second):
	}
	for _, component := range components {
		if lines, log := errorsOf(component); lines > before[component]+5 {
			s.Errorf("%s logged %d errors in half a minute:\n%s", component, lines-before[component], log)
		}
	}
}
