// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/image"
	"github.com/tandem-gpu/tandem/test/kubelet"
)

// host runs containers on a bare node. Those of the chart's image are processes with a root directory, a network and volumes of their own.
// Of others it only finds out which device nodes they would have, as a runtime does when it starts them.
type host struct {
	node *cluster.Node
	// root is the node's root directory as this process sees it.
	root, logs, cgroups string

	mu        sync.Mutex
	addresses map[int]types.UID
	sandboxes map[types.UID]*sandbox
	// seen has the device nodes of containers by pod and container.
	seen map[types.UID]map[string][]string
}

// sandbox is what the containers of a pod share.
type sandbox struct {
	address int
	volumes map[string]string
	cancel  context.CancelFunc
}

// podsDir is where a node has the files of pods that run as programs.
const podsDir = "/run/pods"

func newHost(node *cluster.Node, logs string) (*host, error) {
	root, err := node.Root()
	if err != nil {
		return nil, err
	}
	h := &host{
		node: node, root: root, logs: filepath.Join(logs, node.Name()), addresses: map[int]types.UID{}, sandboxes: map[types.UID]*sandbox{},
		seen: map[types.UID]map[string][]string{},
	}
	// Of version 1, the hierarchy that proves that a cgroup has no process.
	h.cgroups = filepath.Join(root, "sys/fs/cgroup/pids")
	if _, err := os.Stat(h.cgroups); errors.Is(err, fs.ErrNotExist) {
		h.cgroups = filepath.Dir(h.cgroups)
	}
	h.cgroups = filepath.Join(h.cgroups, "kubepods")
	for _, dir := range []string{h.cgroups, filepath.Join(h.cgroups, "burstable"), filepath.Join(root, podsDir), h.logs} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("prepare %s: %w", node.Name(), err)
		}
	}
	return h, nil
}

// DialContext connects from the node.
func (h *host) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	return h.node.DialContext(ctx, network, address)
}

// isProgram reports whether the pod's containers are processes: those of the chart's image, and of others those that serve a port.
func isProgram(pod *corev1.Pod) bool {
	c := pod.Spec.Containers[0]
	return c.Image == image.DefaultRef || len(c.Ports) > 0
}

// run runs a script of sh(1) on the node.
func (h *host) run(ctx context.Context, script string) error {
	cmd, err := h.node.Command(ctx, "/bin/sh", "-ec", script)
	if err != nil {
		return err
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// StartPod implements kubelet.Runtime.
func (h *host) StartPod(ctx context.Context, pod *corev1.Pod) (ip string, err error) {
	if !isProgram(pod) {
		return "", nil
	}
	following, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s := &sandbox{address: 1, cancel: cancel}
	h.mu.Lock()
	for h.addresses[s.address] != "" {
		s.address++
	}
	h.addresses[s.address] = pod.UID
	h.sandboxes[pod.UID] = s
	h.mu.Unlock()
	ip = h.node.PodIP(s.address)
	if err := h.run(ctx, fmt.Sprintf(`
ip netns add pod%[1]d
ip link add pod%[1]d type veth peer name eth0 netns pod%[1]d
ip addr add %[2]s/32 peer %[3]s/32 dev pod%[1]d
ip link set pod%[1]d up
ip -n pod%[1]d -batch - <<END
link set lo up
addr add %[3]s/32 peer %[2]s/32 dev eth0
link set eth0 up
route add default via %[2]s
END
`, s.address, h.node.PodIP(0), ip)); err != nil {
		return "", fmt.Errorf("make network: %w", err)
	}
	s.volumes, err = h.makeVolumes(ctx, following, pod)
	return ip, err
}

// StopPod implements kubelet.Runtime.
func (h *host) StopPod(pod *corev1.Pod) error {
	h.mu.Lock()
	s := h.sandboxes[pod.UID]
	delete(h.seen, pod.UID)
	delete(h.sandboxes, pod.UID)
	h.mu.Unlock()
	if s == nil {
		return nil
	}
	s.cancel()
	// The peer in the namespace goes with it.
	err := h.run(context.Background(), fmt.Sprintf("ip link del pod%[1]d; ip netns del pod%[1]d; rm -rf %s", s.address, path.Join(podsDir, string(pod.UID))))
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.addresses, s.address)
	return err
}

// Start implements kubelet.Runtime.
func (h *host) Start(ctx context.Context, pod *corev1.Pod, c corev1.Container, devices kubelet.Devices) (kubelet.Process, error) {
	if !isProgram(pod) {
		nodes, err := h.deviceNodes(devices.CDI)
		if err != nil {
			return nil, err
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.seen[pod.UID] == nil {
			h.seen[pod.UID] = map[string][]string{}
		}
		h.seen[pod.UID][c.Name] = nodes
		return nil, nil //nolint:nilnil // a container without a process
	}
	return h.startProgram(ctx, pod, c)
}

// deviceNodes are the device nodes that the runtime makes for CDI devices, by their paths on the node.
func (h *host) deviceNodes(names []string) ([]string, error) {
	if len(names) == 0 {
		return nil, nil
	}
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(filepath.Join(h.root, "etc/cdi"), filepath.Join(h.root, "run/cdi")), cdilib.WithAutoRefresh(false))
	if err != nil {
		return nil, err
	}
	var nodes []string
	for _, name := range names {
		d := cache.GetDevice(name)
		if d == nil {
			return nil, fmt.Errorf("CDI device injection failed: unresolvable CDI devices %s", name)
		}
		for _, n := range d.ContainerEdits.DeviceNodes {
			path := n.HostPath
			if path == "" {
				path = n.Path
			}
			if _, err := os.Stat(filepath.Join(h.root, path)); err != nil {
				return nil, fmt.Errorf("CDI device injection failed: %w", err)
			}
			nodes = append(nodes, path)
		}
	}
	return nodes, nil
}

var gpuNodePath = regexp.MustCompile(`/nvidia([0-9]+)$`)

// minors are the minor numbers of the GPUs that a container has, by their device nodes.
func (h *host) minors(pod types.UID, container string) (minors []int, err error) {
	h.mu.Lock()
	nodes, ok := h.seen[pod][container]
	h.mu.Unlock()
	if !ok {
		return nil, fmt.Errorf("container %s does not run", container)
	}
	for _, node := range nodes {
		if !gpuNodePath.MatchString(node) {
			continue
		}
		var stat unix.Stat_t
		if err := unix.Stat(filepath.Join(h.root, node), &stat); err != nil {
			// It is gone from the node, and the container has it still.
			number, err := strconv.Atoi(gpuNodePath.FindStringSubmatch(node)[1])
			if err != nil {
				return nil, err
			}
			minors = append(minors, number)
			continue
		}
		if major := unix.Major(stat.Rdev); major != 195 {
			return nil, fmt.Errorf("%s has the major number %d", node, major)
		}
		minors = append(minors, int(unix.Minor(stat.Rdev)))
	}
	slices.Sort(minors)
	return slices.Compact(minors), nil
}

// doublyOwned are the whole GPUs that several pods have.
func (h *host) doublyOwned() (doubly []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	owners := map[string][]types.UID{}
	for pod, containers := range h.seen {
		for _, nodes := range containers {
			// A container with a partition has the device node of its GPU, too.
			if slices.ContainsFunc(nodes, func(node string) bool { return strings.Contains(node, "/nvidia-caps/") }) {
				continue
			}
			for _, node := range nodes {
				if gpuNodePath.MatchString(node) && !slices.Contains(owners[node], pod) {
					owners[node] = append(owners[node], pod)
				}
			}
		}
	}
	for node, pods := range owners {
		if len(pods) > 1 {
			doubly = append(doubly, fmt.Sprintf("%s by pods %v", node, pods))
		}
	}
	return doubly
}

// quoted is a word for sh(1).
func quoted(word string) string { return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'" }

func (h *host) startProgram(ctx context.Context, pod *corev1.Pod, c corev1.Container) (kubelet.Process, error) {
	h.mu.Lock()
	s := h.sandboxes[pod.UID]
	h.mu.Unlock()
	if s == nil {
		return nil, errors.New("the pod has no sandbox")
	}
	root := path.Join(podsDir, string(pod.UID), "root-"+c.Name)
	pidFile := root + ".pid"
	var script strings.Builder
	fmt.Fprintf(&script, `
mount -t tmpfs -o mode=755 tmpfs %[1]s
cd %[1]s
mkdir -p usr/bin usr/lib proc sys dev run var tmp etc
ln -s ../run var/run
for dir in lib lib64; do
  if [ -L /$dir ]; then ln -s "$(readlink /$dir)" $dir; elif [ -d /$dir ]; then mkdir $dir; mount --rbind /$dir $dir; fi
done
mount --rbind /usr/lib usr/lib
if [ -d /usr/lib64 ]; then mkdir -p usr/lib64; mount --rbind /usr/lib64 usr/lib64; fi
mount --rbind %[2]s usr/bin
for dir in proc sys dev; do mount --rbind /$dir $dir; done
`, root, programsDir)
	mounts := slices.Clone(c.VolumeMounts)
	slices.SortStableFunc(mounts, func(a, b corev1.VolumeMount) int {
		return strings.Count(path.Clean(a.MountPath), "/") - strings.Count(path.Clean(b.MountPath), "/")
	})
	for _, m := range mounts {
		source, ok := s.volumes[m.Name]
		if !ok {
			return nil, fmt.Errorf("there is no volume %s", m.Name)
		}
		if m.SubPath != "" {
			source = path.Join(source, m.SubPath)
			fmt.Fprintf(&script, "mkdir -p %s\n", quoted(source))
		}
		target := quoted(root + m.MountPath)
		fmt.Fprintf(&script, "mkdir -p %[2]s; mount --rbind %[1]s %[2]s\n", quoted(source), target)
		if m.ReadOnly {
			fmt.Fprintf(&script, "mount -o remount,bind,ro %s\n", target)
		}
	}
	if c.SecurityContext != nil && ptr.Deref(c.SecurityContext.ReadOnlyRootFilesystem, false) {
		fmt.Fprintf(&script, "mount -o remount,bind,ro %s\n", root)
	}
	user, group := int64(0), int64(0)
	if context := pod.Spec.SecurityContext; context != nil {
		user, group = ptr.Deref(context.RunAsUser, 0), ptr.Deref(context.RunAsGroup, 0)
	}
	argv := append(slices.Clone(c.Command), c.Args...)
	if c.Image == cluster.BusyboxImage {
		argv = append([]string{"/usr/bin/busybox"}, argv...)
	} else if len(c.Command) == 0 {
		argv = append([]string{"/usr/bin/kubelet-plugin"}, argv...) // the image's entry point
	}
	// The program is a child of this shell, not of nsenter, which stops together with a child that is stopped (SIGSTOP) and does not reap it.
	fmt.Fprintf(&script, "chroot --groups= --userspec=%d:%d %s", user, group, root)
	for _, arg := range argv {
		script.WriteString(" " + quoted(arg))
	}
	fmt.Fprintf(&script, " &\necho $! > %s\nwait $!\n", pidFile)
	environment, err := h.environment(pod, c)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Join(h.root, root), 0o755); err != nil {
		return nil, fmt.Errorf("make root directory: %w", err)
	}
	cmd, err := h.node.Command(context.WithoutCancel(ctx), "nsenter", fmt.Sprintf("--net=/run/netns/pod%d", s.address), "--",
		"unshare", "--mount", "--propagation", "slave", "--", "/bin/sh", "-ec", script.String())
	if err != nil {
		return nil, err
	}
	cmd.Env = append(cmd.Env, environment...)
	log, err := os.OpenFile(filepath.Join(h.logs, pod.Name+"-"+c.Name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	defer log.Close()
	start, err := log.Seek(0, 2)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start program: %w", err)
	}
	p := &program{host: h, pidFile: filepath.Join(h.root, pidFile), ended: make(chan struct{})}
	go func() {
		_ = cmd.Wait() // the state tells
		p.exit.Code = exitCode(cmd)
		p.exit.Message = tail(log.Name(), start)
		close(p.ended)
	}()
	return p, nil
}

func exitCode(cmd *exec.Cmd) int {
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int(status.Signal())
	}
	return cmd.ProcessState.ExitCode()
}

// tail is what kubelet takes from a log as the message of a container that has ended.
func tail(path string, from int64) string {
	const most = 2048
	data, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	data = data[min(from, int64(len(data))):]
	return string(data[max(0, len(data)-most):])
}

// environment are the variables of a container: those that kubelet sets and those of its spec.
func (h *host) environment(pod *corev1.Pod, c corev1.Container) ([]string, error) {
	// No kube-proxy serves the Service's address.
	all := []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "KUBERNETES_SERVICE_HOST=" + theCluster.APIHost(), "KUBERNETES_SERVICE_PORT=6443", "HOSTNAME=" + pod.Name}
	for _, e := range c.Env {
		value := e.Value
		if from := e.ValueFrom; from != nil {
			if from.FieldRef == nil {
				return nil, fmt.Errorf("variable %s is of an unknown kind", e.Name)
			}
			var known bool
			value, known = field(pod, h.node, from.FieldRef.FieldPath)
			if !known {
				return nil, fmt.Errorf("variable %s: unknown field %s", e.Name, from.FieldRef.FieldPath)
			}
		}
		all = append(all, e.Name+"="+value)
	}
	return all, nil
}

func field(pod *corev1.Pod, node *cluster.Node, path string) (string, bool) {
	value, known := map[string]string{
		"metadata.name": pod.Name, "metadata.namespace": pod.Namespace, "metadata.uid": string(pod.UID), "spec.nodeName": node.Name(),
		"spec.serviceAccountName": pod.Spec.ServiceAccountName, "status.hostIP": node.IP(),
	}[path]
	return value, known
}

// program is a container that is a process.
type program struct {
	host    *host
	pidFile string
	ended   chan struct{}
	exit    kubelet.Exit
}

// Wait implements kubelet.Process.
func (p *program) Wait() kubelet.Exit {
	<-p.ended
	return p.exit
}

// Stop implements kubelet.Process.
func (p *program) Stop(grace time.Duration) {
	for _, signal := range []string{"TERM", "KILL"} {
		if pid, err := os.ReadFile(p.pidFile); err == nil {
			// It may have ended.
			_ = p.host.run(context.Background(), fmt.Sprintf("kill -%s %s", signal, strings.TrimSpace(string(pid))))
		}
		select {
		case <-p.ended:
			return
		case <-time.After(grace):
		}
	}
}
