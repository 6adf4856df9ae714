// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/hack/binaries"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/stories"
)

const (
	// karpenterVariable lets TestKarpenter run. It is not part of make test because it compiles Karpenter the first time.
	karpenterVariable = "KARPENTER"

	karpenterModule  = "sigs.k8s.io/karpenter"
	karpenterVersion = "v1.14.0"
	nodePoolLabel    = "karpenter.sh/nodepool"
)

//go:embed testdata/karpenter/main.go
var karpenterSource []byte

// TestKarpenter: Karpenter with a provider that has Tandem's condition compiled in replaces a node with a GPU that needs a reboot. It keeps a node
// with a GPU that a claim holds and that needs a reset.
func TestKarpenter(t *testing.T) {
	if os.Getenv(karpenterVariable) == "" {
		t.Skipf("compiling Karpenter takes minutes the first time; to play the story, run %s=1 hack/unit.sh ./test/contract -run TestKarpenter", karpenterVariable)
	}
	s := begin(t)
	s.startKarpenter()
	if err := s.ApplyAnywhere(nodePool); err != nil {
		t.Fatal(err)
	}
	s.Manifest(onePodANode)
	var nodes []corev1.Node
	s.Await(patient, "Karpenter to make two nodes", func() error {
		nodes = s.karpenterNodes()
		if len(nodes) != 2 {
			return fmt.Errorf("%d nodes", len(nodes))
		}
		return nil
	})
	broken, full := nodes[0], nodes[1]
	s.agentOf(broken.Name, gpunode.DeviceStatus{UnhealthyReason: "Lost: it has fallen off the bus", Repair: "Reboot"})
	s.agentOf(full.Name, gpunode.DeviceStatus{UnhealthyReason: "ResetRequired", Repair: "Reset", Holders: []gpunode.DeviceHolder{{Kind: gpunode.HolderClaim, State: gpunode.HoldHeld, UID: "claim"}}})
	s.Await(soon, "the condition of the node that is full", func() error {
		n, err := theClient.CoreV1().Nodes().Get(s.Ctx, full.Name, metav1.GetOptions{})
		if err == nil && !slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == "GPURepairNeeded" && c.Status == corev1.ConditionFalse && c.Reason == "Reset"
		}) {
			err = fmt.Errorf("conditions %+v", n.Status.Conditions)
		}
		return err
	})
	s.Took("the fault to another node", func() {
		s.Await(patient, "another node in its place", func() error {
			now := s.karpenterNodes()
			if len(now) != 2 || slices.ContainsFunc(now, func(n corev1.Node) bool { return n.UID == broken.UID }) {
				return fmt.Errorf("there are %d nodes, want 2 without the broken one", len(now))
			}
			return nil
		})
	})
	// Three times as long as Karpenter tolerates the condition.
	for until := time.Now().Add(15 * time.Second); time.Now().Before(until); time.Sleep(stories.SampleEvery) {
		if !slices.ContainsFunc(s.karpenterNodes(), func(n corev1.Node) bool { return n.UID == full.UID && n.DeletionTimestamp == nil }) {
			t.Fatal("the node that is full was replaced")
		}
	}
}

const nodePool = `
apiVersion: karpenter.kwok.sh/v1alpha1
kind: KWOKNodeClass
metadata: {name: gpus}
---
apiVersion: karpenter.sh/v1
kind: NodePool
metadata: {name: gpus}
spec:
  disruption: {consolidationPolicy: WhenEmpty, consolidateAfter: Never}
  template:
    spec:
      nodeClassRef: {group: karpenter.kwok.sh, kind: KWOKNodeClass, name: gpus}
      requirements:
      - {key: kubernetes.io/os, operator: In, values: [linux]}
`

const onePodANode = `
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: train}
spec:
  replicas: 2
  selector: {matchLabels: {app: train}}
  template:
    metadata: {labels: {app: train}}
    spec:
      terminationGracePeriodSeconds: 0
      nodeSelector: {` + nodePoolLabel + `: gpus}
      affinity:
        podAntiAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
          - {topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {app: train}}}
      containers: [{name: work, image: none, resources: {requests: {cpu: 100m}}}]
`

// karpenterNodes returns the nodes of the pool, sorted by name. It makes those Ready that are not: no kubelet runs there.
func (s *story) karpenterNodes() []corev1.Node {
	s.Helper()
	list, err := theClient.CoreV1().Nodes().List(s.Ctx, metav1.ListOptions{LabelSelector: nodePoolLabel + "=gpus"})
	if err != nil {
		s.Fatal(err)
	}
	for _, n := range list.Items {
		if !slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == corev1.NodeReady }) {
			now := metav1.Now()
			n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{
				Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", LastHeartbeatTime: now, LastTransitionTime: now,
			})
			if _, err := theClient.CoreV1().Nodes().UpdateStatus(s.Ctx, &n, metav1.UpdateOptions{}); err != nil {
				s.Log(err) // the next look tries again
			}
		}
	}
	return list.Items
}

// agentOf writes a GPUNode with one device, as the agent of the node would. No agent runs there.
func (s *story) agentOf(name string, d gpunode.DeviceStatus) {
	s.Helper()
	if err := s.createGPUNode(theClient, name, "", "{}"); err != nil {
		s.Fatal(err)
	}
	s.Undo(func() error { return s.removeGPUNode(name) })
	now := metav1.Now()
	d.Name, d.UUID, d.ExtendedResource = stories.GPUName(0), "GPU-0", install.ResourceName
	if d.UnhealthyReason != "" {
		d.UnhealthySince = &now
	}
	s.writeStatus(name, gpunode.GPUNodeStatus{Mode: "Dual", Seen: &now, Devices: []gpunode.DeviceStatus{d}})
}

// startKarpenter runs Karpenter until the story ends.
func (s *story) startKarpenter() {
	s.Helper()
	sources := stories.ModuleDir(s.T, karpenterModule+"@"+karpenterVersion)
	var definitions []string
	for _, dir := range []string{"pkg/apis/crds", "kwok/apis/crds"} {
		files, err := filepath.Glob(filepath.Join(sources, dir, "karpenter.*.yaml"))
		if err != nil || len(files) == 0 {
			s.Fatalf("no definitions in %s, %v", dir, err)
		}
		definitions = append(definitions, files...)
	}
	args := "--filename=" + strings.Join(definitions, ",")
	s.Kubectl("apply", args)
	s.Undo(func() error {
		_, err := theCluster.Kubectl(context.WithoutCancel(s.Ctx), "delete", args, "--timeout="+soon.String())
		return err
	})
	s.Kubectl("wait", "--for=condition=Established", args, "--timeout="+soon.String())
	tool := binaries.Tool{Module: karpenterModule, Version: karpenterVersion, Package: "karpenter", Source: karpenterSource}
	program, err := tool.Ensure(s.Ctx, os.Stdout)
	if err != nil {
		s.Fatal(err)
	}
	log, err := os.Create(filepath.Join(s.TempDir(), "karpenter.log"))
	if err != nil {
		s.Fatal(err)
	}
	cmd, err := theCluster.Command(s.Ctx, program, "--feature-gates=NodeRepair=true", "--disable-leader-election=true", "--metrics-port=0",
		"--health-probe-port=0", "--batch-idle-duration=1s")
	if err != nil {
		s.Fatal(err)
	}
	cmd.Env = append(cmd.Environ(), "SYSTEM_NAMESPACE=default")
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		s.Fatal(err)
	}
	s.Undo(func() error {
		if s.Failed() {
			text, err := os.ReadFile(log.Name())
			s.Logf("Karpenter's log (%v):\n%s", err, text)
		}
		ctx := context.WithoutCancel(s.Ctx)
		const objects = "nodepools,nodeclaims"
		_, err := theCluster.Kubectl(ctx, "delete", objects, "--all", "--timeout="+soon.String())
		if err != nil {
			// Karpenter has not removed its finalizers.
			err = errors.Join(err, s.withoutFinalizers(ctx, objects), s.withoutFinalizers(ctx, "nodes", "-l", nodePoolLabel))
		}
		return errors.Join(err, cmd.Process.Signal(syscall.SIGTERM), ended(cmd.Wait()), log.Close())
	})
}

// withoutFinalizers removes the finalizers of objects and deletes them.
func (s *story) withoutFinalizers(ctx context.Context, objects string, selector ...string) error {
	names, err := theCluster.Kubectl(ctx, append([]string{"get", objects, "-o", "name"}, selector...)...)
	for _, name := range strings.Fields(names) {
		_, patched := theCluster.Kubectl(ctx, "patch", name, "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
		_, deleted := theCluster.Kubectl(ctx, "delete", name, "--ignore-not-found", "--timeout="+soon.String())
		err = errors.Join(err, patched, deleted)
	}
	return err
}

// ended returns nil if a signal ended the process.
func ended(err error) error {
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.Sys().(syscall.WaitStatus).Signaled() {
		return nil
	}
	return err
}
