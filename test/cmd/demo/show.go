// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/oracle"
)

const namespace = "default"

// expectation is what a pod of the examples should get.
type expectation struct {
	pod  string
	gpus int
	api  oracle.API
	// uuid of the GPU, where the example names it.
	uuid string
}

// The examples that fill the eight GPUs, each a file and a pod of the same name; the pods of tooMany find nothing.
var (
	expected = []expectation{
		{pod: "limits", gpus: 2, api: oracle.Limits},
		{pod: "claim-template", gpus: 1, api: oracle.Claim},
		{pod: "shared-claim", gpus: 1, api: oracle.Claim},
		{pod: "by-attribute", gpus: 1, api: oracle.Claim},
		{pod: "nvlink-pair", gpus: 2, api: oracle.Claim},
		{pod: "by-uuid", gpus: 1, api: oracle.Claim, uuid: "GPU-a0e71877-c06b-4cdb-a55e-fefd8a19b882"},
	}
	tooMany     = "more-than-gpus"
	tooManyPods = 10
)

const (
	patience  = 2 * time.Minute
	lookAgain = 100 * time.Millisecond
	heartbeat = 5 * time.Second
)

type demo struct {
	cluster  *cluster.Cluster
	client   kubernetes.Interface
	examples string
	steps    *steps
	out      io.Writer
}

func newDemo(ctx context.Context, c *cluster.Cluster, steps *steps, out io.Writer) (*demo, error) {
	root, err := gotool.Root(ctx)
	if err != nil {
		return nil, err
	}
	config, err := c.RESTConfig()
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make client: %w", err)
	}
	return &demo{cluster: c, client: client, examples: filepath.Join(root, "examples"), steps: steps, out: out}, nil
}

// run applies the examples and prints the outcome, right or wrong; the error says what is wrong.
func (d *demo) run(ctx context.Context) error {
	problem := d.fill(ctx)
	if ctx.Err() != nil {
		return problem
	}
	d.steps.next("who got what, as the containers see it")
	pods, err := d.pods(ctx)
	if err != nil {
		return errors.Join(problem, err)
	}
	seen, err := oracle.Observe(ctx, d.cluster)
	if err != nil {
		return errors.Join(problem, err)
	}
	fmt.Fprint(d.out, "\n", table(pods, seen), "\n")
	problem = errors.Join(problem, d.holders(ctx))
	problem = errors.Join(problem, d.explain(ctx, waiting(pods)))
	doubles := seen.DoublyOwned()
	running, pending := count(pods)
	fmt.Fprintf(d.out, "demo: pods=%d running=%d pending=%d doubly_owned=%d\n", len(pods), running, pending, len(doubles))
	for _, double := range doubles {
		problem = errors.Join(problem, errors.New(double.String()))
	}
	return errors.Join(problem, check(seen))
}

// fill applies the examples and returns when each pod is in the state it should be in.
func (d *demo) fill(ctx context.Context) error {
	d.steps.next("pods by both APIs for all eight GPUs")
	// One API after the other: bare pods that raced for a GPU would wait for it, as they should, and the demo with them.
	for _, api := range []oracle.API{oracle.Limits, oracle.Claim} {
		var files []string
		for _, example := range expected {
			if example.api == api {
				files = append(files, example.pod)
			}
		}
		d.steps.say("by %s: %s", api, strings.Join(files, ", "))
		if err := d.apply(ctx, files...); err != nil {
			return err
		}
		if err := d.await(ctx, "them to run", func(ctx context.Context) (string, error) { return d.notRunning(ctx, files) }); err != nil {
			return err
		}
	}
	d.steps.next("more pods than GPUs: %s", tooMany)
	// Kubelet would refuse limits pods that the scheduler sends on the strength of an old number.
	if err := d.await(ctx, "the node to say what claims leave to limits", d.allocatableStale); err != nil {
		return err
	}
	if err := d.apply(ctx, tooMany); err != nil {
		return err
	}
	return d.await(ctx, "the others to be Pending", d.notPending)
}

func (d *demo) apply(ctx context.Context, files ...string) error {
	args := []string{"apply", "--namespace", namespace}
	for _, file := range files {
		args = append(args, "-f", filepath.Join(d.examples, file+".yaml"))
	}
	_, err := d.cluster.Kubectl(ctx, args...)
	return err
}

// await looks until nothing is missing, and says meanwhile what is.
func (d *demo) await(ctx context.Context, what string, missing func(context.Context) (string, error)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ticker := time.NewTicker(lookAgain)
	defer ticker.Stop()
	said := time.Time{}
	for {
		lack, err := missing(ctx)
		if err != nil {
			lack = err.Error()
		}
		if lack == "" {
			return nil
		}
		if time.Since(said) > heartbeat {
			d.steps.say("waiting for %s: %s", what, lack)
			said = time.Now()
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w: %s", what, ctx.Err(), lack)
		case <-ticker.C:
		}
	}
}

func (d *demo) pods(ctx context.Context) ([]corev1.Pod, error) {
	list, err := d.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list pods: %w", err)
	}
	return list.Items, nil
}

func (d *demo) notRunning(ctx context.Context, names []string) (string, error) {
	pods, err := d.pods(ctx)
	if err != nil {
		return "", err
	}
	var lacking []string
	for _, name := range names {
		at := slices.IndexFunc(pods, func(p corev1.Pod) bool { return p.Name == name })
		switch {
		case at < 0:
			lacking = append(lacking, name+" (not there)")
		case !ready(pods[at]):
			lacking = append(lacking, fmt.Sprintf("%s (%s)", name, state(pods[at])))
		}
	}
	return strings.Join(lacking, ", "), nil
}

// notPending wants the examples' pods still to run, and every other refused by the scheduler for want of a GPU.
func (d *demo) notPending(ctx context.Context) (string, error) {
	pods, err := d.pods(ctx)
	if err != nil {
		return "", err
	}
	var lacking []string
	for _, pod := range pods {
		if isExpected(pod.Name) && !ready(pod) || !isExpected(pod.Name) && !unschedulable(pod) {
			lacking = append(lacking, fmt.Sprintf("%s (%s)", pod.Name, state(pod)))
		}
	}
	if others := len(pods) - len(expected); others != tooManyPods {
		lacking = append(lacking, fmt.Sprintf("%d pods in place of %d", others, tooManyPods))
	}
	return strings.Join(lacking, ", "), nil
}

// allocatableStale is empty once the node says that only what limits hold is theirs to have.
func (d *demo) allocatableStale(ctx context.Context) (string, error) {
	total, byClaims := 0, 0
	for _, want := range expected {
		total += want.gpus
		if want.api == oracle.Claim {
			byClaims += want.gpus
		}
	}
	for _, node := range d.cluster.Nodes() {
		object, err := d.client.CoreV1().Nodes().Get(ctx, node.Name(), metav1.GetOptions{})
		if err != nil {
			return "", fmt.Errorf("get node %s: %w", node.Name(), err)
		}
		allocatable := object.Status.Allocatable[install.ResourceName]
		if int(allocatable.Value()) != total-byClaims {
			return fmt.Sprintf("%s says %s: %s, though claims hold %d", node.Name(), install.ResourceName, allocatable.String(), byClaims), nil
		}
	}
	return "", nil
}

// check compares what the containers see with what the examples ask for.
func check(seen oracle.Picture) error {
	var problems []error
	for _, want := range expected {
		devices := seen.PodDevices(namespace, want.pod)
		if len(devices) != want.gpus {
			problems = append(problems, fmt.Errorf("pod %s sees %d GPUs, not %d", want.pod, len(devices), want.gpus))
		}
		for _, device := range devices {
			if device.API != want.api {
				problems = append(problems, fmt.Errorf("pod %s has %s by %s, not by %s", want.pod, device.GPU.UUID, device.API, want.api))
			}
			if want.uuid != "" && device.GPU.UUID != want.uuid {
				problems = append(problems, fmt.Errorf("pod %s has %s, not %s", want.pod, device.GPU.UUID, want.uuid))
			}
		}
	}
	for _, container := range seen.Unexplained() {
		problems = append(problems, fmt.Errorf("pod %s sees GPUs that it did not ask for", container.Title()))
	}
	return errors.Join(problems...)
}

// holders prints which pod has which GPU according to Tandem.
func (d *demo) holders(ctx context.Context) error {
	plugin, err := pluginPath(ctx)
	if err != nil {
		return err
	}
	cmd, err := d.cluster.Command(ctx, plugin, "ls")
	if err != nil {
		return err
	}
	var failure bytes.Buffer
	cmd.Stderr = &failure
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("kubectl gpu ls: %w: %s", err, &failure)
	}
	fmt.Fprintf(d.out, "kubectl gpu ls\n%s\n", out)
	return nil
}

// explain prints what to do next. waiting is the name of a pod without a GPU.
func (d *demo) explain(ctx context.Context, waiting string) error {
	enter := "bin/hack/cluster -dir " + d.cluster.Config().Dir
	fmt.Fprintf(d.out, `Look around:  make demo-shell, and in it
                kubectl gpu ls                                who has which GPU
                kubectl gpu why %-30swhy this pod waits for one
                kubectl gpu node node-1                       a picture of the node
                kubectl get pods,resourceclaims,gpunodes
Web page:     make demo-ui
The node:     %s node node-1
`, waiting, enter)
	agent, err := d.agentIP(ctx)
	if err == nil {
		fmt.Fprintf(d.out, `Dashboard:    %s forward 8080 %s:8080
              Let your Prometheus scrape 127.0.0.1:8080, and import deployments/helm/tandem/files/dashboard.json in Grafana.
`, enter, agent)
	}
	fmt.Fprint(d.out, "Remove it:    make demo-down\n\n")
	return err
}

// waiting is the name of a pod that waits; empty if none does.
func waiting(pods []corev1.Pod) string {
	for _, pod := range pods {
		if unschedulable(pod) {
			return pod.Name
		}
	}
	return ""
}

func (d *demo) agentIP(ctx context.Context) (string, error) {
	ip, err := d.cluster.Kubectl(ctx, "get", "pods", "-n", install.Namespace, "-l", "app.kubernetes.io/component=kubelet-plugin",
		"-o", "jsonpath={.items[0].status.podIP}")
	if err == nil && ip == "" {
		err = errors.New("it has none")
	}
	if err != nil {
		return "", fmt.Errorf("find the IP address of the agent's pod: %w", err)
	}
	return ip, nil
}
