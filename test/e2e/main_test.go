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

	"golang.org/x/sys/unix"
	"k8s.io/client-go/kubernetes"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/hack/queue"
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

// logsVariable names the directory for what a failed run has to tell.
const logsVariable = "E2E_LOGS"

// queueVariable names the file of a queue of stories, which several runs share (hack/cmd/e2e).
const queueVariable = "E2E_QUEUE"

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
	if err := endWithParent(stop); err != nil {
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
	if code, err = play(ctx, m); code == 0 {
		err = thePlace.End(ctx)
	}
	if code != 0 || err != nil {
		return code, errors.Join(err, collectLogs())
	}
	return code, err
}

// endWithParent calls end when the program that has started the run ends, even if it was killed: its clusters would run on.
func endWithParent(end func()) error {
	parent, err := unix.PidfdOpen(os.Getppid(), 0)
	if err != nil {
		return fmt.Errorf("find the program that has started the run: %w", err)
	}
	go func() {
		ended := []unix.PollFd{{Fd: int32(parent), Events: unix.POLLIN}}
		for {
			if _, err := unix.Poll(ended, -1); !errors.Is(err, unix.EINTR) {
				end()
				return
			}
		}
	}()
	return nil
}

// play runs the stories that flags name, or those that it can take from the queue. An interrupted run takes no more.
func play(ctx context.Context, m *testing.M) (code int, err error) {
	path, queued := os.LookupEnv(queueVariable)
	if !queued {
		return m.Run(), nil
	}
	for ctx.Err() == nil {
		name, ok, err := queue.At(path).Take(ctx, ofTheSameGroup, ofAnotherGroup)
		if err != nil {
			return 1, err
		}
		if !ok {
			return code, nil
		}
		if err := flag.Set("test.run", "^"+name+"$"); err != nil {
			return 1, err
		}
		if m.Run() == 0 {
			continue
		}
		code = 1
		// A broken cluster would take the other clusters' stories and fail them.
		if err := ready(ctx); err != nil {
			return code, fmt.Errorf("play no more stories after %s: %w", name, err)
		}
	}
	return 1, fmt.Errorf("play stories: %w", context.Cause(ctx))
}

// ready returns when Tandem is ready on the cluster.
func ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patient)
	defer cancel()
	return install.Ready(ctx, theCluster)
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
	dir := cmp.Or(os.Getenv(logsVariable), filepath.Join(os.TempDir(), "tandem-e2e-logs"))
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
