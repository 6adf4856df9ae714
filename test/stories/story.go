// SPDX-License-Identifier: Apache-2.0

// Package stories has what tests on a cluster with Tandem have in common, be its kubelet the real one (test/e2e) or a fake one
// (test/contract). A method fails the test if it cannot do what it says. One that checks a condition returns an error if the condition does
// not hold. None is safe for concurrent use.
package stories

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/restmapper"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/hack/results"
)

const (
	// Soon is for what takes seconds. Patient is for what waits until kubelet retries a Prepare: after 60 to 90 s, or three minutes in
	// test/contract. Both count from the last change of the condition's error. They are long because the machine may be busy.
	Soon    = 5 * time.Minute
	Patient = 8 * time.Minute
	// LookAgain is the time between two looks at what is to happen, SampleEvery that between two looks at what must not.
	LookAgain   = 200 * time.Millisecond
	SampleEvery = 100 * time.Millisecond
	// longWait is when a wait is worth a line in the story's log.
	longWait = 5 * time.Second
	// mostPatience is how many times as long Await waits in all, where a condition says something else each time.
	mostPatience = 4
)

// The nodes: most stories are about GPUNode. Only pods that ask for it by NUMAKey get NUMANode.
const (
	GPUNode  = "node-1"
	NUMANode = "node-2"
	NUMAKey  = "numa"
	// GPUsANode is how many GPUs the usual machine has.
	GPUsANode = 8
)

const (
	// AgentLabel selects the agents' pods, DaemonLabel those of MPS daemons, by the chart and by pkg/mps. ModeLabel gives a node a mode.
	AgentLabel  = "app.kubernetes.io/component=kubelet-plugin"
	DaemonLabel = "tandem-gpu.dev/mps-daemon"
	ModeLabel   = "tandem-gpu.dev/mode"
	// SimulatedMachine is where the chart makes the simulated machine of a node.
	SimulatedMachine = "/run/nvidia/simulated"
)

// Place is a cluster with Tandem, on which tests are played one after the other.
type Place struct {
	Cluster *cluster.Cluster
	Client  kubernetes.Interface
	Dynamic dynamic.Interface
	Mapper  meta.RESTMapper
	// Image is install.Options.Image of all installations that do not say another one.
	Image   string
	Devices Devices
	// Logs logs the ends of the logs of Tandem's programs.
	Logs func(s *Story)
}

// Devices tells which GPUs containers have. It looks at what their runtime gave them, and never at the ledger.
type Devices interface {
	// Of returns the sorted minors of the GPUs that containers have, by pod. The map has the name of one container for each pod.
	Of(s *Story, containers map[string]string) map[string][]int
	// DoublyOwned describes each GPU that has two owners.
	DoublyOwned(ctx context.Context) ([]string, error)
}

// Connect sets the clients of a cluster that runs.
func (p *Place) Connect(c *cluster.Cluster) error {
	config, err := c.RESTConfig()
	if err != nil {
		return err
	}
	if p.Client, err = kubernetes.NewForConfig(config); err != nil {
		return err
	}
	if p.Dynamic, err = dynamic.NewForConfig(config); err != nil {
		return err
	}
	p.Cluster, p.Mapper = c, restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(p.Client.Discovery()))
	return nil
}

// End waits until the namespaces of all stories are gone: an object that keeps one was left by a story, or by Tandem.
func (p *Place) End(ctx context.Context) error {
	var left []string
	err := wait.PollUntilContextTimeout(ctx, LookAgain, time.Minute, true, func(ctx context.Context) (bool, error) {
		list, err := p.Client.CoreV1().Namespaces().List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err
		}
		left = nil
		for _, namespace := range list.Items {
			if strings.HasPrefix(namespace.Name, "test") {
				left = append(left, fmt.Sprintf("%s: %v", namespace.Name, namespace.Status.Conditions))
			}
		}
		return len(left) == 0, nil
	})
	if err != nil {
		return fmt.Errorf("wait for the end of namespaces %q: %w", left, err)
	}
	return nil
}

// Install installs Tandem or upgrades it, with Options.
func (p *Place) Install(ctx context.Context, o install.Options) error {
	return install.Tandem(ctx, p.Cluster, p.Options(o))
}

// Options adds what all installations have: the image of the place, and agents also on the node that only pods that ask for it get.
func (p *Place) Options(o install.Options) install.Options {
	o.Image = cmp.Or(o.Image, p.Image)
	o.Values = append(slices.Clone(o.Values), "extraTolerations[0].key="+NUMAKey, "extraTolerations[0].operator=Exists")
	return o
}

// Story is one test in a namespace of its own. A copy with another namespace is a part of the same test.
type Story struct {
	*testing.T
	*Place
	Ctx       context.Context
	Namespace string
	// Limits and Offered are how many devices the node offers to limits and by its slices while all is free. Offered is negative where
	// that depends on the version of Kubernetes.
	Limits  int64
	Offered int
	// DaemonsStay says that MPS daemons run even while no pod has a GPU.
	DaemonsStay bool
}

// New returns a story whose node offers what the usual machine has. It changes nothing on the cluster.
func New(t *testing.T, ctx context.Context, p *Place) Story {
	return Story{
		T: t, Place: p, Ctx: ctx, Namespace: strings.ToLower(strings.ReplaceAll(t.Name(), "/", "-")), Limits: GPUsANode, Offered: GPUsANode,
	}
}

// Begin makes the namespace. At the end of the test it removes the namespace, and waits until all GPUs are free again.
func (s *Story) Begin() {
	s.Helper()
	s.MakeNamespace()
	s.Cleanup(func() {
		failed := s.Failed()
		if failed {
			s.Explain()
		}
		defer func() {
			if s.Failed() && !failed {
				s.Explain()
			}
		}()
		s.Gone()
		s.AllFree()
	})
}

// Node is GPUNode.
func (s *Story) Node() *cluster.Node { return s.Cluster.Node(GPUNode) }

// Never is what a condition of Await returns when it can no longer become true.
func Never(err error) error { return never{err} }

type never struct{ error }

// Await looks until the condition holds. The last error of the condition is in the failure. It gives up when the error has not changed for
// patience, after mostPatience times patience in all, and at once if the condition returns Never.
func (s *Story) Await(patience time.Duration, what string, condition func() error) {
	s.Helper()
	began := time.Now()
	changed, said := began, ""
	ticker := time.NewTicker(LookAgain)
	defer ticker.Stop()
	for {
		err := condition()
		if err == nil {
			if took := time.Since(began); took > longWait {
				s.Logf("waited %.1f s for %s", took.Seconds(), what)
			}
			return
		}
		if now := err.Error(); now != said {
			changed, said = time.Now(), now
		}
		var hopeless never
		if errors.As(err, &hopeless) || time.Since(changed) > patience || time.Since(began) > mostPatience*patience {
			s.Fatalf("waited %s for %s: %v", time.Since(began).Round(time.Second), what, err)
		}
		select {
		case <-s.Ctx.Done():
			s.Fatalf("waiting for %s: %v", what, context.Cause(s.Ctx))
		case <-ticker.C:
		}
	}
}

// Undo returns a function that runs the action the first time it is called. If it is not called, the action runs when the story ends.
func (s *Story) Undo(action func() error) func() {
	var once sync.Once
	undo := func() {
		once.Do(func() {
			if err := action(); err != nil {
				s.Error(err)
			}
		})
	}
	s.Cleanup(undo)
	return undo
}

// Took runs a part of a story and says how long it took.
func (s *Story) Took(what string, part func()) time.Duration {
	s.Helper()
	began := time.Now()
	part()
	took := time.Since(began)
	s.Logf("%s: %.1f s", what, took.Seconds())
	return took
}

// Explain logs what a reader of a failure asks first.
func (s *Story) Explain() {
	s.Log(results.StateBegins)
	defer s.Log(results.StateEnds)
	for _, args := range [][]string{
		{"get", "pods,resourceclaims", "-n", s.Namespace, "-o", "wide"},
		{"get", "events", "-n", s.Namespace, "--sort-by=.lastTimestamp"},
		{"get", "events", "-n", "default", "--field-selector=involvedObject.kind=Node"},
		{"get", "gpunodes", "-o", "yaml"},
		{"get", "pods", "-n", install.Namespace, "-o", "wide"},
	} {
		out, err := s.Cluster.Kubectl(s.Ctx, args...)
		s.Logf("kubectl %s (%v):\n%s", strings.Join(args, " "), err, out)
	}
	for _, node := range s.Cluster.Nodes() {
		s.Logf("holds on %s:\n%s", node.Name(), s.Records(node))
	}
	s.Logs(s)
}

// MakeNamespace makes the story's namespace. One of that name may be ending.
func (s *Story) MakeNamespace() {
	s.Helper()
	s.Await(Soon, "the namespace to be made", func() error {
		namespaces := s.Client.CoreV1().Namespaces()
		_, err := namespaces.Create(s.Ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.Namespace}}, metav1.CreateOptions{})
		if err == nil {
			return nil
		}
		if !s.ending() {
			return Never(err)
		}
		return err
	})
}

// ending reports whether the story's namespace is being deleted, or is gone.
func (s *Story) ending() bool {
	namespace, err := s.Client.CoreV1().Namespaces().Get(s.Ctx, s.Namespace, metav1.GetOptions{})
	return apierrors.IsNotFound(err) || err == nil && namespace.DeletionTimestamp != nil
}

// Clear deletes the story's namespace with all that is in it, and does not wait for that.
func (s *Story) Clear() {
	s.Helper()
	err := s.Client.CoreV1().Namespaces().Delete(s.Ctx, s.Namespace, metav1.DeleteOptions{})
	// A conflict says that it is being deleted already.
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		err = nil
	}
	// The namespace controller begins five seconds later to delete what is in it. Nothing can be made meanwhile.
	grace := int64(1)
	err = errors.Join(
		err,
		s.Client.CoreV1().Pods(s.Namespace).DeleteCollection(s.Ctx, metav1.DeleteOptions{GracePeriodSeconds: &grace}, metav1.ListOptions{}),
		s.Client.ResourceV1().ResourceClaims(s.Namespace).DeleteCollection(s.Ctx, metav1.DeleteOptions{}, metav1.ListOptions{}),
	)
	if err != nil {
		s.Errorf("delete namespace %s: %v", s.Namespace, err)
	}
}

// Gone is Clear, and waits until pods and claims have ended. What else the namespace has goes later.
func (s *Story) Gone() {
	s.Helper()
	s.Clear()
	s.Await(Patient, "pods and claims to be gone", func() error {
		pods, err := s.Client.CoreV1().Pods(s.Namespace).List(s.Ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		claims, err := s.Client.ResourceV1().ResourceClaims(s.Namespace).List(s.Ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		if len(pods.Items)+len(claims.Items) > 0 {
			return fmt.Errorf("there are %d pods and %d claims", len(pods.Items), len(claims.Items))
		}
		return nil
	})
}

// Kubectl runs kubectl and returns what it printed.
func (s *Story) Kubectl(args ...string) string {
	s.Helper()
	out, err := s.Cluster.Kubectl(s.Ctx, args...)
	if err != nil {
		s.Fatal(err)
	}
	return out
}

// Example applies a file of examples/ as a user would.
func (s *Story) Example(name string) {
	s.Helper()
	s.Kubectl("apply", "-n", s.Namespace, "-f", filepath.Join("..", "..", "examples", name))
}

// Manifest applies text, for what no user would copy. It does without a kubectl, whose start takes longer than the request.
func (s *Story) Manifest(text string) {
	s.Helper()
	decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(text), 4096)
	for {
		object := &unstructured.Unstructured{}
		err := decoder.Decode(&object.Object)
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			s.Fatalf("read manifest: %v\n%s", err, text)
		}
		if len(object.Object) == 0 {
			continue
		}
		kind := object.GroupVersionKind()
		mapping, err := s.Mapper.RESTMapping(kind.GroupKind(), kind.Version)
		if err != nil {
			s.Fatal(err)
		}
		namespace := ""
		if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
			namespace = cmp.Or(object.GetNamespace(), s.Namespace)
		}
		_, err = s.Dynamic.Resource(mapping.Resource).Namespace(namespace).Apply(s.Ctx, object.GetName(), object,
			metav1.ApplyOptions{FieldManager: "story", Force: true})
		if err != nil {
			s.Fatalf("apply %s %s: %v", kind.Kind, object.GetName(), err)
		}
	}
}

// Apply runs kubectl apply, for manifests that may be denied.
func (s *Story) Apply(text string, flags ...string) error {
	return s.ApplyAnywhere(text, append([]string{"-n", s.Namespace}, flags...)...)
}

// ApplyAnywhere is Apply for manifests that name their namespace.
func (s *Story) ApplyAnywhere(text string, flags ...string) error {
	cmd, err := s.Cluster.Command(s.Ctx, "kubectl", append([]string{"apply", "-f", "-"}, flags...)...)
	if err != nil {
		return err
	}
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("kubectl apply: %w: %s", err, out)
	}
	return nil
}

// On runs a command on a node and returns its output.
func (s *Story) On(n *cluster.Node, command string, args ...string) string {
	s.Helper()
	cmd, err := n.Command(s.Ctx, command, args...)
	if err != nil {
		s.Fatal(err)
	}
	out, err := cmd.Output()
	if err != nil {
		s.Fatalf("%s %v on %s: %v", command, args, n.Name(), err)
	}
	return string(out)
}

// File reads a file of the node.
func (s *Story) File(path string) ([]byte, error) {
	s.Helper()
	return os.ReadFile(s.NodePath(path))
}

// NodePath is where a file of the node is for this process.
func (s *Story) NodePath(path string) string {
	s.Helper()
	root, err := s.Node().Root()
	if err != nil {
		s.Fatal(err)
	}
	return filepath.Join(root, path)
}

// Event waits for an event of the story's namespace, of the node where the kind is Node, or of our Secret, whose message has all the
// words.
func (s *Story) Event(kind, name, reason string, words ...string) {
	s.Helper()
	namespace := s.Namespace
	switch kind {
	case "Node":
		namespace = metav1.NamespaceDefault
	case "Secret":
		namespace = install.Namespace
	}
	s.Await(Soon, fmt.Sprintf("event %s on %s %s", reason, kind, name), func() error {
		list, err := s.Client.CoreV1().Events(namespace).List(s.Ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		seen := errors.New("there is none")
		for _, event := range list.Items {
			if event.InvolvedObject.Kind != kind || event.InvolvedObject.Name != name || event.Reason != reason {
				continue
			}
			if HasAll(event.Message, words) {
				return nil
			}
			seen = fmt.Errorf("it says %q, which lacks some of %q", event.Message, words)
		}
		return seen
	})
}

// HasAll reports whether the text has all the words.
func HasAll(text string, words []string) bool {
	return !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(text, word) })
}
