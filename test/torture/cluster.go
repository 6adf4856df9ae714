// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/newer"
)

func clusterDir(dir string) string { return filepath.Join(dir, "cluster") }

// Newer is the name of the image with the agent from the future, for Options.Newer.
const Newer = "docker.io/local/tandem:newer"

// Fresh removes what an earlier run has left in a directory and starts a cluster of one node with Tandem there. The image is
// built where it is empty, and the one called Newer with it.
func Fresh(ctx context.Context, dir string, state State, image string, out io.Writer) (*cluster.Cluster, error) {
	if err := Remove(ctx, dir); err != nil {
		return nil, err
	}
	c, err := cluster.New(cluster.Config{
		Dir: clusterDir(dir), KubernetesVersion: state.Kubernetes, Progress: out,
		// Kubelet makes a container that was killed often wait for up to five minutes: that would be tested instead of us.
		FeatureGates: map[string]bool{"KubeletCrashLoopBackOffMax": true},
		Nodes: []cluster.NodeConfig{{Name: "node-1", Kubelet: map[string]any{
			"crashLoopBackOff": map[string]any{"maxContainerRestartPeriod": "2s"},
		}}},
	})
	if err != nil {
		return nil, err
	}
	if err := c.Start(ctx); err != nil {
		return c, err
	}
	if image == "" {
		if err := loadNewer(ctx, c, dir, out); err != nil {
			return c, err
		}
	}
	o := install.Options{Image: image, Progress: out}
	if state.MIG {
		if o.ValuesFiles, err = valuesForMIG(dir); err != nil {
			return c, err
		}
		o.Profile = profileForMIG
	}
	if state.Sharing {
		if o.ValuesFiles, err = writeValues(dir, valuesOfPolicies()); err != nil {
			return c, err
		}
	}
	return c, install.Tandem(ctx, c, o)
}

// profileForMIG is the machine that room knows.
const profileForMIG = "h100x8-mig"

// valuesForMIG writes the chart's values for it.
func valuesForMIG(dir string) ([]string, error) {
	values := "config:\n  version: v1\n  flags: {migStrategy: mixed}\n  tandem:\n    devices:\n"
	for gpu := range dynamicGPUs {
		values += fmt.Sprintf("    - {match: {index: %d}, mig: dynamic}\n", gpu)
	}
	return writeValues(dir, values)
}

func writeValues(dir, values string) ([]string, error) {
	file := filepath.Join(dir, "values.yaml")
	if err := os.WriteFile(file, []byte(values), 0o644); err != nil {
		return nil, fmt.Errorf("write values: %w", err)
	}
	return []string{file}, nil
}

func loadNewer(ctx context.Context, c *cluster.Cluster, dir string, out io.Writer) error {
	tarball, err := newer.Image(ctx, filepath.Join(dir, "newer"), Newer, out)
	if err != nil {
		return fmt.Errorf("build the newer agent: %w", err)
	}
	return c.Nodes()[0].LoadImage(ctx, tarball)
}

// Reopen finds the cluster of an interrupted run as it was, or starts a fresh one where it is gone, or damaged, as by an
// interruption while it was being started or removed. Like Fresh it leaves no State.
func Reopen(ctx context.Context, dir string, state State, out io.Writer) (*cluster.Cluster, error) {
	if state.MIG {
		// No record says which partitions were the administrator's.
		return Fresh(ctx, dir, state, "", out)
	}
	c, err := cluster.Open(clusterDir(dir), out)
	if err == nil {
		err = revive(ctx, c)
	}
	if err == nil || ctx.Err() != nil {
		return c, err
	}
	fmt.Fprintf(out, "torture: the run continues on a fresh cluster: %v\n", err)
	return Fresh(ctx, dir, state, "", out)
}

// revive makes everything run again that was stopped or frozen.
func revive(ctx context.Context, c *cluster.Cluster) error {
	if err := (&injector{cluster: c, node: c.Nodes()[0]}).mend(ctx); err != nil {
		return err
	}
	// With the image that is there: an interruption is no upgrade.
	return install.Ready(ctx, c)
}

// Remove ends the cluster in a directory and forgets its run. Evidence stays. It is idempotent.
func Remove(ctx context.Context, dir string) error {
	c, err := cluster.Open(clusterDir(dir), nil)
	if err == nil {
		err = c.Stop(ctx)
	}
	if err != nil && !errors.Is(err, cluster.ErrNoCluster) {
		return err
	}
	if err := os.Remove(filepath.Join(dir, stateFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove state: %w", err)
	}
	return nil
}

// thaw lets every component run again. What is down is left so.
func thaw(c *cluster.Cluster) error {
	components := []*cluster.Component{c.Component(cluster.APIServer), c.Component(cluster.Scheduler)}
	for _, node := range c.Nodes() {
		components = append(components, node.Component(cluster.Kubelet), node.Component(cluster.Containerd))
	}
	for _, component := range components {
		if err := component.Thaw(); err != nil && !errors.Is(err, cluster.ErrNotRunning) {
			return err
		}
	}
	return nil
}

// collectPatience bounds the collection of logs at the end of a run.
const collectPatience = time.Minute

// CollectLogs copies the cluster's logs below the run's directory and answers where.
func CollectLogs(ctx context.Context, c *cluster.Cluster, dir string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, collectPatience)
	defer cancel()
	to := filepath.Join(dir, "logs")
	if err := os.RemoveAll(to); err != nil {
		return to, fmt.Errorf("remove old logs: %w", err)
	}
	return to, c.CollectLogs(ctx, to)
}
