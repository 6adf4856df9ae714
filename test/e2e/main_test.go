// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/test/stories"
)

// The cluster of all stories: gpuNode for most of them; numaNode, where kubelet aligns CPUs and GPUs and which only pods
// that ask for it get, for one.
const (
	gpuNode  = stories.GPUNode
	numaNode = stories.NUMANode
	numaKey  = stories.NUMAKey

	soon, patient = stories.Soon, stories.Patient
	gpusANode     = stories.GPUsANode

	// staticPodDir is where gpuNode's kubelet reads pods from.
	staticPodDir = "/etc/kubernetes/manifests"
)

// keepVariable names a directory for a cluster that the next run uses again. The run starts it if it does not run, and leaves it.
// It is for authors of stories.
const keepVariable = "E2E_CLUSTER"

// tempPrefix begins the names of directories with clusters of one run.
const tempPrefix = "tandem-e2e-"

// runtimeVariable names the container runtime of the clusters: cluster.Crun, the default, or cluster.Runc.
const runtimeVariable = "CONTAINER_RUNTIME"

var (
	theCluster *cluster.Cluster
	theClient  kubernetes.Interface
	thePlace   = stories.Place{Devices: seen{}, Logs: logs}
	// theContext ends when the run is interrupted, so that the cluster is removed then as well.
	theContext context.Context
)

func TestMain(m *testing.M) {
	flag.Parse()
	if flag.Lookup("test.list").Value.String() != "" {
		os.Exit(m.Run())
	}
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	if os.Geteuid() != 0 {
		fmt.Println("e2e: skipped: a cluster of one's own needs root")
		return 0, nil
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// The go command that reads our output may have been ended first; the cluster is to be removed all the same.
	signal.Ignore(syscall.SIGPIPE)
	if err := stories.EndWithParent(stop); err != nil {
		return 1, err
	}
	theContext = ctx
	dir, keep := os.LookupEnv(keepVariable)
	if !keep {
		if dir, err = cluster.OwnedDir(ctx, tempPrefix, os.Stdout); err != nil {
			return 1, err
		}
		defer os.RemoveAll(dir)
	}
	config, err := clusterConfig(dir)
	if err != nil {
		return 1, err
	}
	theCluster, err = cluster.New(config)
	if err != nil {
		return 1, err
	}
	defer func() {
		if keep {
			fmt.Println("e2e: the cluster stays; remove it with: go run ./hack/cmd/cluster -dir", config.Dir, "down")
			return
		}
		// Not ctx: an interrupted run leaves nothing behind either.
		stopCtx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
		defer cancel()
		err = errors.Join(err, theCluster.Stop(stopCtx))
	}()
	if err := start(ctx); err != nil {
		return 1, errors.Join(err, collectLogs())
	}
	if code, err = thePlace.Play(ctx, m, ofTheSameGroup, ofAnotherGroup); code == 0 {
		err = thePlace.End(ctx)
	}
	if code != 0 || err != nil {
		return code, errors.Join(err, collectLogs())
	}
	return code, err
}

func clusterConfig(dir string) (cluster.Config, error) {
	profile, err := simulated.Load(install.DefaultProfile)
	if err != nil {
		return cluster.Config{}, err
	}
	machine := filepath.Join(dir, "machine")
	if err := simulated.Materialize(machine, profile, simulated.MaterializeOptions{Seed: numaNode}); err != nil {
		return cluster.Config{}, err
	}
	const nodes = "devices/system/node"
	return cluster.Config{
		Dir:               filepath.Join(dir, "cluster"),
		KubernetesVersion: os.Getenv("KUBERNETES"),
		ContainerRuntime:  os.Getenv(runtimeVariable),
		Progress:          os.Stdout,
		Nodes: []cluster.NodeConfig{
			{Name: gpuNode, Kubelet: map[string]any{"staticPodPath": staticPodDir, "fileCheckFrequency": "1s"}},
			{
				Name: numaNode, Labels: map[string]string{numaKey: "true"},
				// Debian 12's crun fails to write the CPU quota of containers with exclusive CPUs.
				ContainerRuntime: cluster.Runc,
				// Kubelet sees the NUMA nodes of the simulated machine.
				Mounts: []cluster.Mount{{
					Source: filepath.Join(machine, simulated.SysfsDir, nodes), Target: filepath.Join("/sys", nodes), ReadOnly: true,
				}},
				Kubelet: map[string]any{
					"cpuManagerPolicy": "static", "topologyManagerPolicy": "single-numa-node",
					// Takes one CPU from those that pods may have for themselves, and leaves one of two to be requested whole.
					"systemReserved":            map[string]string{"cpu": "100m"},
					"cpuManagerReconcilePeriod": "1s",
					"registerWithTaints":        []map[string]string{{"key": numaKey, "value": "true", "effect": "NoSchedule"}},
				},
			},
		},
	}, nil
}

func start(ctx context.Context) error {
	if err := theCluster.Start(ctx); err != nil {
		return err
	}
	if err := thePlace.Connect(theCluster); err != nil {
		return err
	}
	theClient = thePlace.Client
	if err := thePlace.Install(ctx, install.Options{Progress: os.Stdout}); err != nil {
		return err
	}
	theGroup = usualGroup
	return nil
}

// collectLogs leaves what a failed run has to tell where its reader finds it.
func collectLogs() error {
	dir := cmp.Or(os.Getenv(stories.LogsVariable), filepath.Join(os.TempDir(), "tandem-e2e-logs"))
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := theCluster.CollectLogs(ctx, dir); err != nil {
		return err
	}
	fmt.Println("e2e: the cluster's logs are in", dir)
	return nil
}
