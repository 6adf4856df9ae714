// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/test/stories"
)

// kindImport is how kind v0.33.0 loads an image archive (pkg/cluster/nodeutils/util.go).
const kindImport = `snapshotter=$(containerd --config /etc/containerd/config.toml config dump | sed -n "s/^ *snapshotter = ['\"]\(.*\)['\"]$/\1/p" | head -1)
exec ctr --namespace=k8s.io images import --all-platforms --digests --snapshotter="$snapshotter" -`

// kindScript stands in for kind: the cluster is there already.
const kindScript = `
kind() {
	case "$*" in
	"create cluster") ;;
	"load image-archive "*) env -i LOAD <"$3" ;;
	*) echo "kind $*: not expected" >&2 && return 1 ;;
	esac
}
`

// TestQuickStartOnKind runs the commands of the quick start for kind, as written, on a cluster with what kind changes.
func TestQuickStartOnKind(t *testing.T) {
	s := &story{stories.New(t, theContext, &thePlace)}
	s.Namespace = "default"
	root, err := gotool.Root(s.Ctx)
	if err != nil {
		t.Fatal(err)
	}
	commands, err := exec.CommandContext(s.Ctx, root+"/hack/quickstart.sh").Output()
	if err != nil || !strings.Contains(string(commands), "helm install") {
		t.Fatalf("the commands are %q: %v", commands, err)
	}
	c := s.ownCluster(cluster.Config{Nodes: []cluster.NodeConfig{{Name: gpuNode, Kind: true}}})
	node := c.Node(gpuNode)
	if mounts := s.On(node, "grep", " /run ", "/proc/mounts"); !strings.Contains(mounts, "noexec") {
		t.Errorf("programs in /run can be executed: %s", mounts)
	}
	load, err := node.Command(s.Ctx, "sh", "-c", kindImport)
	if err != nil {
		t.Fatal(err)
	}
	var quoted []string
	for _, word := range append(load.Env, load.Args...) {
		quoted = append(quoted, "'"+strings.ReplaceAll(word, "'", `'\''`)+"'")
	}
	script := strings.Replace(kindScript, "LOAD", strings.Join(quoted, " "), 1) + string(commands)
	run, err := c.Command(s.Ctx, "bash", "-euo", "pipefail", "-c", script)
	if err != nil {
		t.Fatal(err)
	}
	run.Dir = root
	out, err := run.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
	if !stories.HasAll(string(out), []string{"no problem found", "8 GPUs on 1 node: 1 by claims, 2 by pods"}) {
		t.Error("kubectl gpu does not say that all is well, with three GPUs in use")
	}
	seen := map[string]bool{}
	for pod, want := range map[string]int{"claim-template": 1, "limits": 2} {
		log, err := c.Kubectl(s.Ctx, "logs", pod)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(log) {
			if seen[line] {
				t.Errorf("both pods have %s", line)
			}
			seen[line] = true
		}
		if got := strings.Count(log, "/dev/nvidia"); got != want {
			t.Errorf("%s sees %d GPUs, want %d:\n%s", pod, got, want, log)
		}
	}
	// What the page on uninstallation says, with nothing left on the Node that looks like an agent's.
	for _, args := range [][]string{{"kubectl", "delete", "pod", "claim-template", "limits"}, {"helm", "uninstall", "tandem", "-n", "tandem-system"}} {
		cmd, err := c.Command(s.Ctx, args[0], args[1:]...)
		if err != nil {
			t.Fatal(err)
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	left, err := c.Kubectl(s.Ctx, "get", "node", gpuNode, "-o", "jsonpath={.metadata.labels} {.status.conditions[*].type}")
	if err != nil || strings.Contains(left, "nvidia.com/") || strings.Contains(left, "GPU") || !strings.Contains(left, "Ready") {
		t.Errorf("the Node has %s (%v)", left, err)
	}
}
