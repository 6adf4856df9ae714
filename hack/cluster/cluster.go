// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/tandem-gpu/tandem/hack/binaries"
)

// Cluster is a cluster on this machine, running or not. Its processes are reparented to init: they outlive the
// program that started them, and any program can Open the cluster by its directory. It is safe for concurrent use, except
// Start and Stop beside anything else.
type Cluster struct {
	config     Config
	control    *machine
	components []*Component
	nodes      []*Node
	say        func(format string, args ...any)
}

// New describes a cluster; nothing is started or written. It reports what is wrong with the configuration.
func New(config Config) (*Cluster, error) {
	if err := config.complete(); err != nil {
		return nil, fmt.Errorf("configure cluster: %w", err)
	}
	programs, err := binaries.Locate(config.kubernetesVersions())
	if err != nil {
		return nil, err
	}
	c := &Cluster{config: config, say: sayer(config.Progress)}
	c.control = c.newMachine(programs, controlName, config.KubernetesVersion, nil)
	c.components = c.controlPlane(programs)
	for i, described := range config.Nodes {
		node := &Node{cluster: c, index: i, name: described.Name, config: described,
			machine: c.newMachine(programs, described.Name, described.KubernetesVersion, described.Mounts)}
		if described.Kind {
			node.machine.runOptions = ",nosuid,nodev,noexec" // those of docker run --tmpfs /run
		}
		node.describe(programs)
		c.nodes = append(c.nodes, node)
	}
	return c, nil
}

// ErrNoCluster is reported by Open where a directory holds no cluster.
var ErrNoCluster = errors.New("no cluster here")

// Open finds the cluster that was started with a directory, by this process or another. Progress may be nil.
func Open(dir string, progress io.Writer) (*Cluster, error) {
	config, err := readConfig(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("open cluster in %s: %w", dir, ErrNoCluster)
	}
	if err != nil {
		return nil, fmt.Errorf("open cluster: %w", err)
	}
	config.Progress = progress
	return New(config)
}

// gcPercent makes the cluster's programs, most of them in Go, collect garbage less often: memory for CPU time.
const gcPercent = "GOGC=300"

func (c *Cluster) newMachine(programs *binaries.Set, name, version string, mounts []Mount) *machine {
	var shown []Mount
	for _, dir := range []string{programs.Etcd, programs.Containerd, programs.Runc, programs.Kubernetes(version), filepath.Dir(programs.Pause)} {
		shown = append(shown, Mount{Source: dir, Target: dir, ReadOnly: true})
	}
	return &machine{
		name:   name,
		dir:    filepath.Join(c.config.Dir, "machines", name),
		group:  fmt.Sprintf("tandem-%.4x-%s", sha256.Sum256([]byte(c.config.Dir)), name),
		pause:  programs.Pause,
		mounts: append(shown, mounts...),
		env:    []string{"PATH=" + programs.Path(version), "HOME=/root", "LANG=C.UTF-8", gcPercent},
	}
}

// Config answers the configuration with its defaults filled in.
func (c *Cluster) Config() Config { return c.config }

// Kubeconfig is the path of an administrator's kubeconfig. Its server's address exists in the cluster's networks only:
// use Command (or RESTConfig, which dials there).
func (c *Cluster) Kubeconfig() string { return filepath.Join(c.config.Dir, "kubeconfig") }

// APIHost is the address of the API server, at port 6443, that all machines reach.
func (c *Cluster) APIHost() string { return controlIP }

// Nodes answers all nodes in the order of the configuration.
func (c *Cluster) Nodes() []*Node { return slices.Clone(c.nodes) }

// Node answers the node of that name; nil where there is none.
func (c *Cluster) Node(name string) *Node {
	if i := slices.IndexFunc(c.nodes, func(n *Node) bool { return n.name == name }); i >= 0 {
		return c.nodes[i]
	}
	return nil
}

// Component answers one of Etcd, APIServer, ControllerManager and Scheduler; nil where there is none of that name.
func (c *Cluster) Component(name string) *Component { return find(c.components, name) }

// DialContext connects from the control plane's machine, whence every node, pod and, with kube-proxy's exception, service
// address is reachable: ClusterIPs are not.
func (c *Cluster) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	return c.control.dial(ctx, network, address)
}

// Listen accepts connections of every machine of the cluster at the same address (numeric, of TCP): of the control plane's, where
// Command's programs run, and of each node. Serve all of them; a reboot of a node needs a new one.
func (c *Cluster) Listen(ctx context.Context, address string) ([]net.Listener, error) {
	var listeners []net.Listener
	for _, m := range c.machines() {
		listener, err := m.listen(ctx, "tcp", address)
		if err != nil {
			for _, other := range listeners {
				other.Close()
			}
			return nil, fmt.Errorf("listen on %s at %s: %w", m.name, address, err)
		}
		listeners = append(listeners, listener)
	}
	return listeners, nil
}

// RESTConfig answers an administrator's configuration for client-go that works from any process on the host. It has no
// client-side rate limit.
func (c *Cluster) RESTConfig() (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig())
	if err != nil {
		return nil, fmt.Errorf("read kubeconfig: %w", err)
	}
	config.Dial = c.DialContext
	config.QPS = -1
	return config, nil
}

// Command prepares a program of the host, with the host's files, that sees the cluster's network, an administrator's
// KUBECONFIG, and kubectl, helm and the rest of the cluster's programs in its PATH; the name may be one of these.
func (c *Cluster) Command(ctx context.Context, name string, args ...string) (*exec.Cmd, error) {
	programs, err := binaries.Locate(c.config.kubernetesVersions())
	if err != nil {
		return nil, err
	}
	path := "PATH=" + programs.Path(c.config.KubernetesVersion)
	if mine := os.Getenv("PATH"); mine != "" {
		path += ":" + mine
	}
	// env looks the program up in the new PATH.
	cmd, err := c.control.networkCommand(ctx, "env", append([]string{path, "KUBECONFIG=" + c.Kubeconfig(), name}, args...)...)
	if err != nil {
		return nil, err
	}
	return cmd, nil
}

// Kubectl runs kubectl and answers what it printed; standard error is in the error.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	cmd, err := c.Command(ctx, "kubectl", args...)
	if err != nil {
		return "", err
	}
	// A call lives too short for the garbage that it makes.
	cmd.Env = append(os.Environ(), "GOGC=1000")
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return string(out), fmt.Errorf("kubectl %v: %w: %s", args, err, exit.Stderr)
	}
	if err != nil {
		return string(out), fmt.Errorf("kubectl %v: %w", args, err)
	}
	return string(out), nil
}

// LoadImage imports an image archive into every node.
func (c *Cluster) LoadImage(ctx context.Context, tarball string) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, node := range c.nodes {
		group.Go(func() error { return node.LoadImage(ctx, tarball) })
	}
	return group.Wait()
}

// Start makes the programs available, boots the machines and returns when every node that is not bare is Ready and pods can be created. A
// cluster that was started before and has lost parts is completed, with its data. After an error, Stop cleans up.
func (c *Cluster) Start(ctx context.Context) error {
	if os.Geteuid() != 0 {
		return errors.New("start cluster: needs root")
	}
	if err := os.MkdirAll(c.config.Dir, 0o755); err != nil {
		return fmt.Errorf("start cluster: %w", err)
	}
	unlock, err := c.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	// First, so that a later process that opens the directory can undo everything that follows.
	if err := c.claimDir(); err != nil {
		return fmt.Errorf("start cluster: %w", err)
	}
	programs, err := binaries.Ensure(ctx, binaries.Options{Kubernetes: c.config.kubernetesVersions(), Progress: c.config.Progress})
	if err != nil {
		return fmt.Errorf("start cluster: %w", err)
	}
	if err := c.start(ctx, programs); err != nil {
		return fmt.Errorf("start cluster: %w", err)
	}
	return nil
}

// ErrAnotherCluster is reported by Start where the directory holds a cluster of another configuration: Stop that one first.
var ErrAnotherCluster = errors.New("directory holds a cluster of another configuration")

// claimDir writes the configuration down, unless another one is there: its machines would be forgotten.
func (c *Cluster) claimDir() error {
	path := filepath.Join(c.config.Dir, configFile)
	have, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return c.config.save()
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	if mine, err := encodeJSON(&c.config); err != nil {
		return err
	} else if !bytes.Equal(mine, have) {
		return fmt.Errorf("%s: %w", c.config.Dir, ErrAnotherCluster)
	}
	return nil
}

func (c *Cluster) start(ctx context.Context, programs *binaries.Set) error {
	if err := c.install(ctx, programs); err != nil {
		return err
	}
	var images []string
	if slices.ContainsFunc(c.nodes, func(n *Node) bool { return !n.config.Bare }) {
		var err error
		if images, err = c.makeImages(ctx, programs.Pause); err != nil {
			return err
		}
	}
	loadModules(ctx)
	c.say("booting %d machines", 1+len(c.nodes))
	if err := c.bootAll(ctx); err != nil {
		return err
	}
	c.say("starting Kubernetes %s", c.config.KubernetesVersion)
	group, ctx2 := errgroup.WithContext(ctx)
	served := make(chan struct{})
	group.Go(func() error { return c.startControlPlane(ctx2, served) })
	for _, node := range c.nodes {
		group.Go(func() error { return node.start(ctx2, images, served) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	c.say("waiting for nodes")
	if err := c.WaitReady(ctx); err != nil {
		return err
	}
	c.say("ready")
	return nil
}

// install writes disks, identities and configuration, where they are not there yet.
func (c *Cluster) install(ctx context.Context, programs *binaries.Set) error {
	if err := makeDisk(c.control.rootfs(), controlName); err != nil {
		return err
	}
	if err := c.writeAuditPolicy(); err != nil {
		return err
	}
	for _, node := range c.nodes {
		if err := makeDisk(node.machine.rootfs(), node.name); err != nil {
			return err
		}
		if err := node.configure(ctx, programs); err != nil {
			return err
		}
	}
	if _, err := os.Stat(c.Kubeconfig()); err == nil {
		return nil
	}
	return c.writeIdentities()
}

func (c *Cluster) bootAll(ctx context.Context) error {
	if _, err := c.control.holder(); errors.Is(err, errDown) {
		if err := c.control.boot(); err != nil {
			return err
		}
		if err := c.wireControl(ctx); err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	for _, node := range c.nodes {
		if _, err := node.machine.holder(); errors.Is(err, errDown) {
			if err := node.boot(ctx); err != nil {
				return err
			}
		} else if err != nil {
			return err
		}
	}
	return nil
}

// startControlPlane closes served as soon as the API server answers.
func (c *Cluster) startControlPlane(ctx context.Context, served chan<- struct{}) error {
	for _, component := range c.components {
		if err := component.Start(ctx); err != nil {
			return err
		}
		if component.name == APIServer {
			close(served)
		}
	}
	return nil
}

func (n *Node) start(ctx context.Context, images []string, served <-chan struct{}) error {
	if n.config.Bare {
		return nil
	}
	if err := n.Component(Containerd).Start(ctx); err != nil {
		return err
	}
	for _, image := range images {
		if err := n.LoadImage(ctx, image); err != nil {
			return err
		}
	}
	select {
	case <-served:
	case <-ctx.Done():
		return ctx.Err()
	}
	for _, component := range n.components {
		if err := component.Start(ctx); err != nil {
			return err
		}
	}
	return nil
}

const readyTimeout = 10 * time.Minute

// WaitReady returns when every node is Ready with its present boot ID and pods can be created in the default namespace. With
// APIServerOnly there is nothing to wait for. After readyTimeout the error says what was awaited.
func (c *Cluster) WaitReady(ctx context.Context) error {
	if c.config.APIServerOnly {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	for _, node := range c.nodes {
		if node.config.Bare {
			continue
		}
		if err := c.waitReady(ctx, node); err != nil {
			return err
		}
	}
	client, err := c.client()
	if err != nil {
		return err
	}
	var last error
	err = until(ctx, func() bool {
		_, last = client.CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{})
		return last == nil
	})
	if err != nil {
		return fmt.Errorf("wait for default service account: %w (%w)", err, last)
	}
	return nil
}

func (c *Cluster) waitReady(ctx context.Context, node *Node) error {
	client, err := c.client()
	if err != nil {
		return err
	}
	bootID, err := node.BootID()
	if err != nil {
		return err
	}
	var last error
	err = until(ctx, func() bool {
		object, err := client.CoreV1().Nodes().Get(ctx, node.name, metav1.GetOptions{})
		if last = err; err != nil {
			return false
		}
		for _, condition := range object.Status.Conditions {
			if condition.Type == corev1.NodeReady {
				last = fmt.Errorf("ready is %s: %s", condition.Status, condition.Message)
				return condition.Status == corev1.ConditionTrue && object.Status.NodeInfo.BootID == bootID
			}
		}
		return false
	})
	if err != nil {
		return fmt.Errorf("wait for node %s: %w (%w)", node.name, err, last)
	}
	return nil
}

func (c *Cluster) client() (kubernetes.Interface, error) {
	config, err := c.RESTConfig()
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make client: %w", err)
	}
	return client, nil
}

// Stop ends the cluster and removes everything of it: processes, containers, mounts, namespaces, interfaces, cgroups, and
// what it wrote below Dir, logs included. It is idempotent and works on a cluster that never came up.
func (c *Cluster) Stop(ctx context.Context) error {
	if _, err := os.Stat(c.config.Dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	unlock, err := c.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	var group errgroup.Group
	for _, machine := range c.machines() {
		group.Go(func() error { return machine.halt(ctx) })
	}
	if err := group.Wait(); err != nil {
		return fmt.Errorf("stop cluster: %w", err)
	}
	for _, name := range []string{"machines", "images", "kubeconfig", configFile, lockFile} {
		if err := removeDisk(filepath.Join(c.config.Dir, name)); err != nil {
			return fmt.Errorf("stop cluster: %w", err)
		}
	}
	// The directory itself goes only where nothing else is in it.
	if err := os.Remove(c.config.Dir); err != nil && !errors.Is(err, fs.ErrExist) && !errors.Is(err, unix.ENOTEMPTY) {
		return fmt.Errorf("stop cluster: %w", err)
	}
	return nil
}

func (c *Cluster) machines() []*machine {
	machines := []*machine{c.control}
	for _, node := range c.nodes {
		machines = append(machines, node.machine)
	}
	return machines
}

const lockFile = "lock"

// lock keeps two processes from starting or stopping the same cluster at once.
func (c *Cluster) lock(ctx context.Context) (unlock func(), err error) {
	file, err := os.OpenFile(filepath.Join(c.config.Dir, lockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock cluster: %w", err)
	}
	err = until(ctx, func() bool { return unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil })
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("lock cluster in %s: another process starts or stops it: %w", c.config.Dir, err)
	}
	return func() { file.Close() }, nil
}

// hostCommand prepares a command of the host.
func hostCommand(ctx context.Context, name string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, name, args...)
}

func sayer(out io.Writer) func(string, ...any) {
	if out == nil {
		return func(string, ...any) {}
	}
	var mu sync.Mutex
	start := time.Now()
	return func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprintf(out, "%6.1fs  %s\n", time.Since(start).Seconds(), fmt.Sprintf(format, args...))
	}
}
