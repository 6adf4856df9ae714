// SPDX-License-Identifier: Apache-2.0

package intruder

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/hack/leftovers"
)

// The account of each component, as the chart names them.
const (
	agentAccount      = install.Release
	controllerAccount = install.Release + "-controller"
)

// The thief has the token of the agent on ownNode.
const (
	ownNode   = "node-1"
	otherNode = "node-2"
)

var (
	theCluster *cluster.Cluster
	theClient  kubernetes.Interface
	// agentPods are pods of the agent, by node.
	agentPods = map[string]*corev1.Pod{}
)

func TestMain(m *testing.M) {
	flag.Parse()
	if flag.Lookup("test.list").Value.String() != "" {
		os.Exit(m.Run())
	}
	if os.Geteuid() != 0 {
		fmt.Println("intruder: skipped: an API server of one's own needs root")
		os.Exit(0)
	}
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "intruder:", err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	r, err := leftovers.Begin(ctx, os.Stdout)
	if err != nil {
		return 1, err
	}
	// Not ctx: an interrupted run leaves nothing behind either.
	stopCtx := context.WithoutCancel(ctx)
	defer func() { err = errors.Join(err, r.End(stopCtx)) }()
	theCluster, err = cluster.New(cluster.Config{
		Dir: filepath.Join(r.Dir, "intruder", "cluster"), KubernetesVersion: os.Getenv("KUBERNETES"), APIServerOnly: true, Progress: os.Stdout,
	})
	if err != nil {
		return 1, err
	}
	defer func() {
		stopCtx, cancel := context.WithTimeout(stopCtx, 5*time.Minute)
		defer cancel()
		err = errors.Join(err, theCluster.Stop(stopCtx))
	}()
	if err := prepare(ctx); err != nil {
		return 1, err
	}
	return m.Run(), nil
}

// prepare installs the chart, with nodes and agents that do not run.
func prepare(ctx context.Context) error {
	if err := theCluster.Start(ctx); err != nil {
		return err
	}
	config, err := theCluster.RESTConfig()
	if err != nil {
		return err
	}
	if theClient, err = kubernetes.NewForConfig(config); err != nil {
		return err
	}
	if err := install.Tandem(ctx, theCluster, install.Options{Image: "none", Detached: true, Progress: os.Stdout, Values: installValues}); err != nil {
		return err
	}
	for _, name := range []string{ownNode, otherNode} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if _, err := theClient.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("create node %s: %w", name, err)
		}
		pod := podIn(install.Namespace, "agent-"+name)
		pod.Spec.NodeName, pod.Spec.ServiceAccountName = name, agentAccount
		if agentPods[name], err = theClient.CoreV1().Pods(install.Namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("create pod of agent: %w", err)
		}
	}
	// No controller makes the accounts of pods here.
	for _, namespace := range append([]string{"default", install.Namespace}, systemNamespaces...) {
		account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
		if _, err := theClient.CoreV1().ServiceAccounts(namespace).Create(ctx, account, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("create account of pods in %s: %w", namespace, err)
		}
	}
	return nil
}

var systemNamespaces = []string{"kube-system", "kube-public", "kube-node-lease"}

// installValues switch on what the chart leaves off.
var installValues = []string{"podPolicy.action=deny"}

// podIn returns a pod that asks for nothing.
func podIn(namespace, name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "image"}}},
	}
}

// as returns a client's configuration with a token of an account. The token is bound to a pod, or to none.
func as(t *testing.T, account string, bound *corev1.Pod) *rest.Config {
	t.Helper()
	request := &authenticationv1.TokenRequest{}
	if bound != nil {
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: bound.Name, UID: bound.UID}
	}
	answer, err := theClient.CoreV1().ServiceAccounts(install.Namespace).CreateToken(t.Context(), account, request, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	admin, err := theCluster.RESTConfig()
	if err != nil {
		t.Fatal(err)
	}
	config := rest.AnonymousClientConfig(admin)
	config.BearerToken = answer.Status.Token
	config.QPS = -1
	return config
}

func clientOf(t *testing.T, config *rest.Config) kubernetes.Interface {
	t.Helper()
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// until tries a request until its answer is as wanted: the API server learns of a new policy a little later.
func until(t *testing.T, what, want string, try func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for {
		err := try()
		if want == "" && err == nil || want != "" && err != nil && strings.Contains(err.Error(), want) {
			return
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			t.Errorf("%s: got %v, want %q", what, err, want)
			return
		}
	}
}
