// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/image"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/kubelet"
	"github.com/tandem-gpu/tandem/test/stories"
)

const (
	gpuNode  = stories.GPUNode
	numaNode = stories.NUMANode

	soon, patient = stories.Soon, stories.Patient
	gpusANode     = stories.GPUsANode
)

var (
	theCluster *cluster.Cluster
	theClient  kubernetes.Interface
	thePlace   = stories.Place{Image: noImage, Devices: given{}, Logs: logs}
	// theContext ends when the run is interrupted, so that the cluster is removed then as well.
	theContext  context.Context
	theKubelets = map[string]*kubelet.Kubelet{}
	theHosts    = map[string]*host{}
)

func TestMain(m *testing.M) {
	flag.Parse()
	if flag.Lookup("test.list").Value.String() != "" {
		os.Exit(m.Run())
	}
	if os.Geteuid() != 0 {
		fmt.Println("contract: skipped: an API server and machines of one's own need root")
		os.Exit(0)
	}
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "contract:", err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// The go command that reads our output may have been ended first; the cluster is to be removed all the same.
	signal.Ignore(syscall.SIGPIPE)
	if err := stories.EndWithParent(stop); err != nil {
		return 1, err
	}
	theContext = ctx
	// Paths of sockets below it may have 107 bytes.
	dir, err := cluster.OwnedDir(ctx, "tdm", os.Stdout)
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	config, err := clusterConfig(ctx, dir)
	if err != nil {
		return 1, err
	}
	theCluster, err = cluster.New(config)
	if err != nil {
		return 1, err
	}
	defer func() {
		for _, k := range theKubelets {
			k.Stop()
		}
		// Not ctx: an interrupted run leaves nothing behind either.
		stopCtx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
		defer cancel()
		err = errors.Join(err, theCluster.Stop(stopCtx))
	}()
	if err := start(ctx, dir); err != nil {
		return 1, errors.Join(err, collectLogs())
	}
	if code, err = thePlace.Play(ctx, m); code == 0 {
		err = thePlace.End(ctx)
	}
	if code != 0 || err != nil {
		err = errors.Join(err, collectLogs())
	}
	return code, err
}

// programsDir is where the nodes have the programs of the image.
const programsDir = "/opt/image/usr/bin"

// kubeletDirs are where this process has the nodes' directories of kubelet: sockets below Node.Root would have too long paths.
func kubeletDirs(dir string) map[string]string {
	return map[string]string{gpuNode: filepath.Join(dir, "1"), numaNode: filepath.Join(dir, "2")}
}

func clusterConfig(ctx context.Context, dir string) (cluster.Config, error) {
	programs, err := image.Binaries(ctx, image.Options{Progress: os.Stdout})
	if err != nil {
		return cluster.Config{}, err
	}
	var mounts []cluster.Mount
	for name, path := range map[string]string{
		"kubelet-plugin": programs.Agent, "controller": programs.Controller, "mps-daemon": programs.Daemon,
		"simulated-driver": programs.Simulated, "nvidia-cdi-hook": programs.Hook, "busybox": "/usr/bin/busybox",
	} {
		mounts = append(mounts, cluster.Mount{Source: path, Target: filepath.Join(programsDir, name), ReadOnly: true})
	}
	config := cluster.Config{
		Dir: filepath.Join(dir, "cluster"), KubernetesVersion: os.Getenv("KUBERNETES"), Progress: os.Stdout, AuditPolicy: ourWrites,
	}
	for _, name := range []string{gpuNode, numaNode} {
		of := kubeletDirs(dir)[name]
		if err := os.MkdirAll(of, 0o755); err != nil {
			return cluster.Config{}, fmt.Errorf("make kubelet's directory: %w", err)
		}
		config.Nodes = append(config.Nodes, cluster.NodeConfig{
			Name: name, Bare: true, Mounts: append([]cluster.Mount{{Source: of, Target: kubeletDir}}, mounts...),
		})
	}
	return config, nil
}

// kubeletDir is on the nodes.
const kubeletDir = "/var/lib/kubelet"

func start(ctx context.Context, dir string) error {
	if err := theCluster.Start(ctx); err != nil {
		return err
	}
	if err := thePlace.Connect(theCluster); err != nil {
		return err
	}
	theClient = thePlace.Client
	for _, node := range theCluster.Nodes() {
		if err := startKubelet(ctx, node, dir); err != nil {
			return err
		}
	}
	return thePlace.Install(ctx, install.Options{Progress: os.Stdout})
}

// noImage keeps the image from being built: the nodes run its programs.
const noImage = "none"

func startKubelet(ctx context.Context, node *cluster.Node, dir string) error {
	h, err := newHost(node, filepath.Join(dir, "logs"))
	if err != nil {
		return err
	}
	bootID, err := node.BootID()
	if err != nil {
		return err
	}
	object := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: node.Name(), Labels: map[string]string{
			corev1.LabelHostname: node.Name(), corev1.LabelOSStable: "linux", corev1.LabelArchStable: runtime.GOARCH,
		}},
		Status: corev1.NodeStatus{
			Capacity: corev1.ResourceList{"cpu": resource.MustParse("64"), "memory": resource.MustParse("256Gi"), "pods": resource.MustParse("250")},
			Addresses: []corev1.NodeAddress{
				{Type: corev1.NodeInternalIP, Address: node.IP()}, {Type: corev1.NodeHostName, Address: node.Name()},
			},
			NodeInfo: corev1.NodeSystemInfo{
				BootID: bootID, KubeletVersion: theCluster.Config().KubernetesVersion, OperatingSystem: "linux", Architecture: runtime.GOARCH,
			},
		},
	}
	if node.Name() == numaNode {
		object.Labels[stories.NUMAKey] = "true"
		object.Spec.Taints = []corev1.Taint{{Key: stories.NUMAKey, Value: "true", Effect: corev1.TaintEffectNoSchedule}}
	}
	k, err := kubelet.Start(ctx, kubelet.Options{
		Dir: kubeletDirs(dir)[node.Name()], SeenAs: kubeletDir, Client: theClient, Node: object, Runtime: h, Cgroups: h.cgroups,
		// Longer than soon: what comes soon is not due to kubelet's own retry.
		Retry: 3 * time.Minute,
	})
	if err != nil {
		return err
	}
	theKubelets[node.Name()], theHosts[node.Name()] = k, h
	return nil
}

// collectLogs leaves what a failed run has to tell where its reader finds it.
func collectLogs() error {
	dir := cmp.Or(os.Getenv(stories.LogsVariable), filepath.Join(os.TempDir(), "tandem-contract-logs"))
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	err := theCluster.CollectLogs(ctx, dir)
	for _, h := range theHosts {
		err = errors.Join(err, os.CopyFS(filepath.Join(dir, h.node.Name(), "programs"), os.DirFS(h.logs)))
	}
	for name, k := range theKubelets {
		for _, failure := range k.Failures() {
			fmt.Printf("contract: kubelet of %s: %v\n", name, failure)
		}
	}
	fmt.Println("contract: the cluster's logs are in", dir)
	return err
}
