// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/test/stories"
)

// nfdVersion is the version that the chart of NVIDIA's device plugin 0.20 installs.
const nfdVersion = "v0.19.0"

// nfd is Node Feature Discovery: its CustomResourceDefinitions, and its master, built from its module. Its workers are left out, because they
// need its image.
type nfd struct {
	*story
	dir, master string
}

// nfd builds the master. This takes minutes the first time, and seconds once Go has the packages in its cache.
func (s *story) nfd() nfd {
	s.Helper()
	const module = "sigs.k8s.io/node-feature-discovery"
	n := nfd{s, filepath.Join(s.TempDir(), "nfd"), filepath.Join(s.TempDir(), "nfd-master")}
	// In NFD's repository api/nfd is a directory. In the module proxy it is a module of its own.
	for path, to := range map[string]string{module: n.dir, module + "/api/nfd": filepath.Join(n.dir, "api/nfd")} {
		if err := os.CopyFS(to, os.DirFS(stories.ModuleDir(s.T, path+"@"+nfdVersion))); err != nil {
			s.Fatal(err)
		}
	}
	build := gotool.Command(s.Ctx, s.TempDir(), []string{"GOWORK=off", "CGO_ENABLED=0"}, "build", "-o", n.master, "./cmd/nfd-master")
	build.Dir = n.dir
	out, err := build.CombinedOutput()
	stories.SkipUnreachable(s.T, out)
	if err != nil {
		s.Fatalf("build Node Feature Discovery: %v\n%s", err, out)
	}
	return n
}

// define installs the CustomResourceDefinitions. At the story's end it removes everything of Node Feature Discovery.
func (n nfd) define() {
	n.Helper()
	file := filepath.Join(n.dir, "deployment/base/nfd-crds/nfd-api-crds.yaml")
	n.Undo(func() error {
		ctx := context.WithoutCancel(n.Ctx)
		if out, err := n.command(ctx, "-prune").CombinedOutput(); err != nil {
			return fmt.Errorf("prune: %w\n%s", err, out)
		}
		_, err := theCluster.Kubectl(ctx, "delete", "--ignore-not-found", "-f", file)
		return err
	})
	n.Kubectl("apply", "--server-side", "-f", file)
	n.Kubectl("wait", "--for=condition=Established", "--timeout=1m", "-f", file)
}

func (n nfd) command(ctx context.Context, args ...string) *exec.Cmd {
	n.Helper()
	args = append([]string{"NODE_NAME=" + gpuNode, "KUBERNETES_NAMESPACE=" + n.Namespace, n.master, "-kubeconfig=" + theCluster.Kubeconfig(), "-port=18080"}, args...)
	cmd, err := theCluster.Command(ctx, "env", args...)
	if err != nil {
		n.Fatal(err)
	}
	return cmd
}

// run runs the master until the story ends.
func (n nfd) run() {
	n.Helper()
	ctx, cancel := context.WithCancel(n.Ctx)
	cmd := n.command(ctx)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		cancel()
		n.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	n.Cleanup(func() {
		cancel()
		err := <-ended
		if n.Failed() {
			n.Logf("the master of Node Feature Discovery (%v):\n%s", err, log.String())
		}
	})
}
