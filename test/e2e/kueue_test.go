// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/hack/binaries"
	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/test/manifests"
	"github.com/tandem-gpu/tandem/test/stories"
)

// kueueVariable lets TestKueue run. It is not part of make test because it compiles Kueue the first time.
const kueueVariable = "KUEUE"

const (
	kueueModule    = "sigs.k8s.io/kueue"
	kueueVersion   = "v0.17.0"
	kueueNamespace = "kueue-system"
	kueueImage     = "docker.io/local/kueue"
)

// TestKueue: one ClusterQueue counts the GPUs of Jobs with limits and of Jobs with claims. A Job that exceeds the quota waits, whichever API
// it uses. When a Job ends, the oldest waiting Job gets its GPU. Kueue's configuration and the queue are those of the user page.
func TestKueue(t *testing.T) {
	if os.Getenv(kueueVariable) == "" {
		t.Skipf("compiling Kueue takes minutes the first time; to play the story, run %s=1 make e2e RUN=TestKueue", kueueVariable)
	}
	s := begin(t)
	values, queues := kueuePage(t)
	s.startKueue(values)
	s.Manifest(queues + "---" + manifests.SingleTemplate)

	s.Manifest(queued("limit", "limit-0") + queued("claim", "claim-0") + queued("limit", "limit-1") + queued("claim", "claim-1"))
	s.admitted(4, 0)
	s.WantHolds(2, 2)
	s.Manifest(queued("claim", "claim-2"))
	s.admitted(4, 1)
	s.laterThan("claim-2")
	s.Manifest(queued("limit", "limit-2"))
	s.admitted(4, 2)
	s.finish("limit-0")
	s.admitted(4, 1)
	s.WantHolds(3, 1)
	s.finish("claim-0")
	s.admitted(4, 0)
	s.WantHolds(2, 2)

	// A restarted Kueue counts the same. It takes claims into the queue later than limits, so either of these two may be first.
	s.Manifest(queued("claim", "claim-3") + queued("limit", "limit-3"))
	s.admitted(4, 2)
	s.restartKueue()
	s.finish("limit-1")
	s.admitted(4, 1)
	s.finish("limit-2")
	s.admitted(4, 0)
	s.WantHolds(3, 1)
	s.NoDoubleOwners()
	s.Kubectl("delete", "jobs", "-n", s.Namespace, "--all")
	s.NoPods()

	// With a quota of all GPUs, Kueue admits a Job as soon as another Job ends. So the GPU must move from one API to the other.
	s.Manifest(strings.Replace(queues, "nvidia.com/gpu, nominalQuota: 4", fmt.Sprintf("nvidia.com/gpu, nominalQuota: %d", gpusANode), 1))
	for _, apis := range [][2]string{{"limit", "claim"}, {"claim", "limit"}} {
		first, second := apis[0], apis[1]
		// Each round uses new names: a Job may stay suspended if it has the name of a Job that Kueue has not finished yet after its deletion.
		var jobs strings.Builder
		for i := range gpusANode {
			jobs.WriteString(queued(first, fmt.Sprintf("all-%s-%d", first, i)))
		}
		s.Manifest(jobs.String())
		s.admitted(gpusANode, 0)
		s.Manifest(queued(second, "last-"+second))
		s.admitted(gpusANode, 1)
		s.finish("all-" + first + "-0")
		s.Took("a GPU from a "+first+" to a "+second, func() { s.admitted(gpusANode, 0) })
		if first == "limit" {
			s.WantHolds(1, gpusANode-1)
		} else {
			s.WantHolds(gpusANode-1, 1)
		}
		s.NoDoubleOwners()
		s.Kubectl("delete", "jobs", "-n", s.Namespace, "--all")
		s.NoPods()
	}
}

// queued returns a Job in the queue with one GPU. The Job ends when finish is called.
func queued(api, name string) string {
	pod := manifests.Pod(api, name)
	pod = strings.ReplaceAll(pod[strings.Index(pod, "spec:"):], "\n", "\n    ")
	pod = strings.Replace(pod, "[sleep, infinity]", `[sh, -c, "until [ -e /tmp/end ]; do sleep 1; done"]`, 1)
	return fmt.Sprintf(`
---
apiVersion: batch/v1
kind: Job
metadata: {name: %s, labels: {kueue.x-k8s.io/queue-name: gpus}}
spec:
  template:
    %s
      restartPolicy: Never
`, name, strings.TrimRight(pod, " \n"))
}

func (s *story) finish(job string) {
	s.Helper()
	s.Kubectl("exec", "-n", s.Namespace, "job/"+job, "--", "touch", "/tmp/end")
}

// laterThan waits until a new object would be younger than a Job: Kueue orders by creation time, in seconds.
func (s *story) laterThan(name string) {
	s.Helper()
	job, err := theClient.BatchV1().Jobs(s.Namespace).Get(s.Ctx, name, metav1.GetOptions{})
	if err != nil {
		s.Fatal(err)
	}
	time.Sleep(time.Until(job.CreationTimestamp.Add(time.Second)))
}

// admitted waits until these numbers of Jobs run and wait. The queue counts one GPU for each running Job. The others wait for quota, and have
// no pod. It ignores Jobs that have ended.
func (s *story) admitted(running, waiting int) {
	s.Helper()
	s.Await(patient, fmt.Sprintf("%d Jobs to run, %d to wait", running, waiting), func() error {
		var run, wait int
		jobs, err := theClient.BatchV1().Jobs(s.Namespace).List(s.Ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, job := range jobs.Items {
			switch {
			case job.Spec.Suspend != nil && *job.Spec.Suspend:
				wait++
			case job.Status.Active == 1 && job.Status.Ready != nil && *job.Status.Ready == 1:
				run++
			case !slices.ContainsFunc(job.Status.Conditions, func(c batchv1.JobCondition) bool {
				return c.Type == batchv1.JobComplete && c.Status == corev1.ConditionTrue
			}):
				return fmt.Errorf("job %s neither runs nor waits: %+v", job.Name, job.Status)
			}
		}
		pods := len(slices.DeleteFunc(s.Pods(), func(pod corev1.Pod) bool { return pod.Status.Phase == corev1.PodSucceeded }))
		if run != running || wait != waiting || pods != running {
			return fmt.Errorf("%d run, %d wait, %d pods", run, wait, pods)
		}
		counted, short, err := s.kueueCounts()
		if err == nil && (counted != fmt.Sprint(running) || short != waiting) {
			err = fmt.Errorf("the queue counts %s GPUs, %d workloads miss quota", counted, short)
		}
		return err
	})
}

// kueueCounts returns how many GPUs the queue counts, and how many workloads wait because the quota has no GPU left.
func (s *story) kueueCounts() (gpus string, short int, err error) {
	gpus, err = theCluster.Kubectl(s.Ctx, "get", "clusterqueue", "gpus", "-o",
		`jsonpath={.status.flavorsUsage[0].resources[?(@.name=="nvidia.com/gpu")].total}`)
	if err != nil {
		return "", 0, err
	}
	messages, err := theCluster.Kubectl(s.Ctx, "get", "workloads", "-n", s.Namespace, "-o",
		`jsonpath={.items[*].status.conditions[?(@.type=="QuotaReserved")].message}`)
	return gpus, strings.Count(messages, "insufficient unused quota for nvidia.com/gpu"), err
}

// kueuePage returns the values for Kueue's chart and the queues from the user page.
func kueuePage(t *testing.T) (values, queues string) {
	t.Helper()
	page, err := os.ReadFile("../../docs/user/with/kueue.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(string(page), -1)
	if len(blocks) != 2 {
		t.Fatalf("docs/user/with/kueue.md has %d YAML blocks; want two: values and queues", len(blocks))
	}
	return blocks[0][1], blocks[1][1]
}

// startKueue installs Kueue from its chart until the story ends. It does not pull Kueue's image, but builds Kueue from its module.
func (s *story) startKueue(values string) {
	s.Helper()
	tool := binaries.Tool{Module: kueueModule, Version: kueueVersion, Package: kueueModule + "/cmd/kueue"}
	program, err := tool.Ensure(s.Ctx, os.Stdout)
	if err != nil {
		s.Fatal(err)
	}
	dir := s.TempDir()
	image := filepath.Join(dir, "kueue.tar")
	if err := cluster.WriteProgramImage(image, kueueImage+":"+kueueVersion, program, "manager"); err != nil {
		s.Fatal(err)
	}
	if err := node().LoadImage(s.Ctx, image); err != nil {
		s.Fatal(err)
	}
	file := filepath.Join(dir, "values.yaml")
	if err := os.WriteFile(file, []byte(values), 0o644); err != nil {
		s.Fatal(err)
	}
	s.Undo(s.stopKueue)
	const manager = "controllerManager.manager."
	err = s.helm(kueueNamespace, "install", "kueue", filepath.Join(stories.ModuleDir(s.T, kueueModule+"@"+kueueVersion), "charts", "kueue"), "--create-namespace", "-f", file,
		"--set="+manager+"image.repository="+kueueImage, "--set="+manager+"image.tag="+kueueVersion, "--set="+manager+"image.pullPolicy=Never",
		"--set="+manager+"resources.requests.cpu=10m", "--set="+manager+"resources.requests.memory=64Mi")
	if err != nil {
		s.Fatal(err)
	}
	// Kueue writes its certificate into a Secret, and then waits for minutes until kubelet updates the mounted Secret. A pod that starts after
	// that write has the certificate at once.
	s.Await(soon, "Kueue to create its certificate", func() error {
		certificate, err := theCluster.Kubectl(s.Ctx, "get", "secret", "kueue-webhook-server-cert", "-n", kueueNamespace, "-o", `jsonpath={.data.tls\.crt}`)
		if err == nil && certificate == "" {
			err = errors.New("the Secret is empty")
		}
		return err
	})
	s.restartKueue()
}

func (s *story) restartKueue() {
	s.Helper()
	s.Kubectl("rollout", "restart", "deployment", "-n", kueueNamespace)
	s.Kubectl("rollout", "status", "deployment", "-n", kueueNamespace, "--timeout="+patient.String())
}

// stopKueue removes Kueue. Before that it deletes the objects with finalizers that only Kueue removes.
func (s *story) stopKueue() error {
	var failed error
	try := func(args ...string) string {
		out, err := theCluster.Kubectl(s.Ctx, args...)
		failed = errors.Join(failed, err)
		return out
	}
	if s.Failed() {
		s.Logf("%s", try("get", "clusterqueues,localqueues,workloads,jobs", "-n", s.Namespace, "-o", "yaml"))
		s.Logf("%s", try("get", "pods", "-A", "-o", "wide"))
		s.Logf("%s", try("logs", "deployment/kueue-controller-manager", "-n", kueueNamespace))
	}
	try("delete", "namespace", s.Namespace, "--timeout="+soon.String())
	try("delete", "clusterqueues,resourceflavors", "--all", "--timeout="+soon.String())
	failed = errors.Join(failed, s.helm(kueueNamespace, "uninstall", "kueue", "--wait", "--timeout="+soon.String()))
	try("delete", "namespace", kueueNamespace, "--timeout="+soon.String())
	return failed
}

// helm runs Helm in a namespace.
func (s *story) helm(namespace string, args ...string) error {
	cmd, err := theCluster.Command(s.Ctx, "helm", append(args, "--namespace", namespace)...)
	if err != nil {
		return err
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("helm %s: %w: %s", args[0], err, out)
	}
	return nil
}
