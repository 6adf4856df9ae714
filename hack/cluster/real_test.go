// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// realVariable asks for the test with a real cluster: it needs root, minutes, and programs that may have to be built.
const realVariable = "TANDEM_TEST_CLUSTER"

// TestRealCluster drives a real cluster of two nodes through everything the package offers, and looks for what it leaves
// behind. Its parts build on each other.
func TestRealCluster(t *testing.T) {
	if os.Getenv(realVariable) == "" {
		t.Skipf("starts a real cluster: set %s=1 to run it", realVariable)
	}
	if os.Geteuid() != 0 {
		t.Skip("starts a real cluster: needs root")
	}
	shown := t.TempDir()
	if err := os.WriteFile(filepath.Join(shown, "file"), []byte("from the host"), 0o644); err != nil {
		t.Fatal(err)
	}
	c, err := New(Config{Dir: filepath.Join(t.TempDir(), "cluster"), KubernetesVersion: os.Getenv("TANDEM_TEST_KUBERNETES"), Progress: t.Output(),
		Nodes: []NodeConfig{
			{Name: "one", Labels: map[string]string{"test": "first"}, Mounts: []Mount{{Source: shown, Target: "/opt/shown", ReadOnly: true}}},
			{Name: "two", ContainerRuntime: Runc},
		}})
	if err != nil {
		t.Fatal(err)
	}
	inherited := make([]int, 2)
	if err := unix.Pipe2(inherited, 0); err != nil {
		t.Fatal(err)
	}
	before := traces(t, c)
	t.Cleanup(func() {
		if t.Failed() {
			if dir := os.Getenv("TANDEM_TEST_LOGS"); dir != "" {
				t.Log(c.CollectLogs(context.Background(), dir))
			}
		}
		inside := namespaces(t, c)
		if err := c.Stop(context.Background()); err != nil {
			t.Error(err)
		}
		if err := c.Stop(context.Background()); err != nil {
			t.Errorf("stop again: %v", err)
		}
		for what, after := range traces(t, c) {
			for _, entry := range after {
				if !slices.Contains(before[what], entry) {
					t.Errorf("left behind among %s: %s", what, entry)
				}
			}
		}
		for _, namespace := range allNamespaces(t) {
			if inside[namespace] {
				t.Errorf("left behind: namespace %s", namespace)
			}
		}
	})
	if err := c.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	r := &realTest{Cluster: c, client: must(c.client()), pipe: must(os.Readlink(fmt.Sprintf("/proc/self/fd/%d", inherited[0])))}
	for _, step := range []struct {
		name string
		run  func(*realTest, *testing.T)
	}{
		{"pods run", (*realTest).podsRun},
		{"network", (*realTest).network},
		{"isolation", (*realTest).isolation},
		{"runtimes", (*realTest).runtimes},
		{"kubelet", (*realTest).kubelet},
		{"containerd", (*realTest).containerd},
		{"control plane", (*realTest).controlPlane},
		{"another process", (*realTest).anotherProcess},
		{"reboot", (*realTest).reboot},
		{"logs", (*realTest).logs},
	} {
		if !t.Run(step.name, func(t *testing.T) { step.run(r, t) }) {
			t.FailNow()
		}
	}
}

type realTest struct {
	*Cluster
	client kubernetes.Interface
	// pipe is a file that the starter of the cluster has inherited.
	pipe string
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

// podsManifest has a server on node one that tells the boot ID, and one server on each node.
const podsManifest = `
apiVersion: v1
kind: Pod
metadata: {name: server}
spec:
  nodeName: one
  restartPolicy: Always
  containers:
  - name: c
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [sh, -c, "cat /proc/sys/kernel/random/boot_id; mkdir -p /www; hostname > /www/index.html; exec httpd -f -p 80 -h /www"]
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: servers}
spec:
  selector: {matchLabels: {app: servers}}
  template:
    metadata: {labels: {app: servers}}
    spec:
      containers:
      - name: c
        image: docker.io/library/busybox:1.37
        imagePullPolicy: Never
        command: [sh, -c, "mkdir -p /www; hostname > /www/index.html; exec httpd -f -p 80 -h /www"]
---
apiVersion: v1
kind: Service
metadata: {name: servers}
spec: {selector: {app: servers}, ports: [{port: 80}]}
`

// eventually fails the test when a condition does not come true in a minute.
func eventually(t *testing.T, what string, holds func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var last error
	if err := until(ctx, func() bool { last = holds(ctx); return last == nil }); err != nil {
		t.Fatalf("%s: %v (%v)", what, last, err)
	}
}

func (r *realTest) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := r.Kubectl(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(out)
}

// server answers the state of pod server's container.
func (r *realTest) server(ctx context.Context) (corev1.ContainerStatus, error) {
	pod, err := r.client.CoreV1().Pods("default").Get(ctx, "server", metav1.GetOptions{})
	if err != nil {
		return corev1.ContainerStatus{}, err
	}
	if len(pod.Status.ContainerStatuses) != 1 || pod.Status.ContainerStatuses[0].State.Running == nil {
		return corev1.ContainerStatus{}, fmt.Errorf("pod server is %s", pod.Status.Phase)
	}
	return pod.Status.ContainerStatuses[0], nil
}

func (r *realTest) podsRun(t *testing.T) {
	manifest := filepath.Join(t.TempDir(), "pods.yaml")
	if err := os.WriteFile(manifest, []byte(podsManifest), 0o644); err != nil {
		t.Fatal(err)
	}
	r.kubectl(t, "apply", "-f", manifest)
	r.kubectl(t, "rollout", "status", "daemonset/servers", "--timeout=60s")
	r.kubectl(t, "wait", "--for=condition=Ready", "pod/server", "--timeout=60s")
	if got := r.kubectl(t, "exec", "server", "--", "hostname"); got != "server" {
		t.Errorf("exec says %q", got)
	}
	if got, want := r.kubectl(t, "logs", "server"), must(r.Node("one").BootID()); got != want {
		t.Errorf("log %q: want the node's boot ID %q", got, want)
	}
	if got := r.kubectl(t, "get", "node", "-l", "test=first", "-o", "name"); got != "node/one" {
		t.Errorf("nodes with the label: %q", got)
	}
}

func (r *realTest) network(t *testing.T) {
	service := r.kubectl(t, "get", "service", "servers", "-o", "jsonpath={.spec.clusterIP}")
	// Both pods behind the service answer a pod of node one: so pods, services and the way between nodes work.
	seen := map[string]bool{}
	eventually(t, "both servers answer", func(ctx context.Context) error {
		answer, err := r.Kubectl(ctx, "exec", "server", "--", "wget", "-qO-", service)
		if err != nil {
			return err
		}
		if seen[answer] = true; len(seen) != 2 {
			return fmt.Errorf("only %v", seen)
		}
		return nil
	})
	address := "http://" + r.kubectl(t, "get", "pod", "server", "-o", "jsonpath={.status.podIP}") + "/"
	for from, machine := range map[string]*machine{
		"control plane": r.control, "its own node": r.Node("one").machine, "node two": r.Node("two").machine,
	} {
		eventually(t, "pod from "+from, machine.answers(address))
	}
}

func (r *realTest) isolation(t *testing.T) {
	root := must(r.Node("one").Root())
	if got := string(must(os.ReadFile(filepath.Join(root, "opt/shown/file")))); got != "from the host" {
		t.Errorf("mounted file holds %q", got)
	}
	if err := os.WriteFile(filepath.Join(root, "opt/shown/other"), nil, 0o644); err == nil {
		t.Error("a read-only mount took a file")
	}
	components := slices.Clone(r.components)
	for _, node := range r.Nodes() {
		components = append(components, node.components...)
	}
	for _, component := range components {
		open := must(exec.Command("ls", "-l", fmt.Sprintf("/proc/%d/fd", must(component.Pid()))).Output())
		if strings.Contains(string(open), r.pipe) {
			t.Errorf("%s has inherited a file:\n%s", component.name, open)
		}
	}
	if err := os.WriteFile(filepath.Join(root, "run/marker"), nil, 0o644); err != nil {
		t.Error(err)
	}
	for _, path := range []string{"/run/marker", "/run/containerd/containerd.sock", "/var/lib/kubelet/pods"} {
		if _, err := os.Stat(path); err == nil {
			t.Errorf("%s is on the host", path)
		}
	}
	ids := map[string]bool{string(must(os.ReadFile("/proc/sys/kernel/random/boot_id"))): true}
	for _, node := range r.Nodes() {
		out := must(must(node.Command(t.Context(), "cat", "/proc/sys/kernel/random/boot_id")).Output())
		ids[string(out)] = true
	}
	if len(ids) != 3 {
		t.Errorf("boot IDs of the host and two nodes: %v", ids)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cmd := must(r.Node("one").Command(ctx, "sleep", "4242"))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := cmd.Wait(); err == nil {
		t.Error("a cancelled command ended well")
	}
	eventually(t, "cancelled command is gone", func(ctx context.Context) error {
		if out, err := must(r.Node("one").Command(ctx, "pgrep", "-f", "sleep 4242")).Output(); err == nil {
			return fmt.Errorf("still there: %s", out)
		}
		return nil
	})
}

// runtimesManifest has a pod that tells what containers see of their runtime, and one whose containers end in different ways.
const runtimesManifest = `
apiVersion: v1
kind: Pod
metadata: {name: sees-%[1]s}
spec:
  nodeName: %[1]s
  automountServiceAccountToken: false
  volumes:
  - {name: dev, hostPath: {path: /dev}}
  containers:
  - name: default
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    resources: {requests: {cpu: 100m, memory: 16Mi}, limits: {cpu: 500m, memory: 32Mi}}
    readinessProbe: {exec: {command: ["true"]}, periodSeconds: 1}
    command: &sees
    - sh
    - -c
    - |
      exec 2>&1
      grep -E '^(NoNewPrivs|Seccomp|Cap...|Uid|Gid|Groups):' /proc/self/status
      grep -E 'open files|processes|locked memory' /proc/self/limits
      ls /dev | grep -v '^core$'
      cat /proc/self/oom_score_adj
      sort /sys/fs/cgroup/devices/devices.list | grep -v -e '^c 5:1 ' -e '^c 10:200 '
      cd /sys/fs/cgroup
      grep -s . memory.max cpu.max memory/memory.limit_in_bytes cpu/cpu.cfs_quota_us cpu/cpu.shares
      for path in /etc/new /proc/sys/kernel/new; do mkdir $path; done
      for path in /proc/kcore /proc/timer_list; do head -c 1 $path | wc -c; done
      ls /sys/firmware
      mknod /tmp/disk b 8 0 && cat /tmp/disk
      touch /dev-of-node/new /dev-of-node/shm/new
      echo said
      exec sleep 3600
  - name: restricted
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      runAsUser: 1000
      capabilities: {drop: [ALL]}
      seccompProfile: {type: RuntimeDefault}
    volumeMounts: [{name: dev, mountPath: /dev-of-node, readOnly: true, recursiveReadOnly: IfPossible}]
    command: *sees
  - name: privileged
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    securityContext: {privileged: true}
    command: *sees
---
apiVersion: v1
kind: Pod
metadata: {name: ends-%[1]s}
spec:
  nodeName: %[1]s
  restartPolicy: Never
  containers:
  - name: status
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [sh, -c, "echo why > /dev/termination-log; exit 3"]
  - name: memory
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    resources: {limits: {memory: 32Mi}}
    command: [tail, /dev/zero]
  - name: no-program
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [/no-such-program]
`

// runtimes compares what kubelet and containers see of crun, on node one, with what they see of runc, on node two. It leaves out that
// crun has /dev/core and allows the console, that runc allows /dev/net/tun, and that runc sets HOME of a user without an entry in /etc/passwd.
func (r *realTest) runtimes(t *testing.T) {
	seen := map[string]string{}
	for _, node := range []string{"one", "two"} {
		manifest := filepath.Join(t.TempDir(), "pods.yaml")
		if err := os.WriteFile(manifest, fmt.Appendf(nil, runtimesManifest, node), 0o644); err != nil {
			t.Fatal(err)
		}
		sees, ends := "sees-"+node, "ends-"+node
		r.kubectl(t, "apply", "-f", manifest)
		r.kubectl(t, "wait", "--for=condition=Ready", "pod/"+sees, "--timeout=60s")
		r.kubectl(t, "wait", "--for=jsonpath={.status.phase}=Failed", "pod/"+ends, "--timeout=60s")
		var said []string
		for _, container := range []string{"default", "restricted", "privileged"} {
			var log string
			eventually(t, container+" to have said all", func(ctx context.Context) (err error) {
				log, err = r.Kubectl(ctx, "logs", sees, "-c", container)
				if err == nil && !strings.HasSuffix(log, "said\n") {
					err = fmt.Errorf("only:\n%s", log)
				}
				return err
			})
			said = append(said, container, log)
		}
		if got, want := r.kubectl(t, "exec", sees, "--", "cat", procBootID), must(r.Node(node).BootID()); got != want {
			t.Errorf("boot ID in a container of node %s: %q, want %q", node, got, want)
		}
		said = append(said,
			r.kubectl(t, "exec", sees, "-c", "restricted", "--", "sh", "-c",
				"grep -E '^(NoNewPrivs|Seccomp|Cap...|Uid):' /proc/self/status; pwd; env | sort | grep -v ^HOME="),
			r.kubectl(t, "get", "pod", sees, "-o", "jsonpath={.status.containerStatuses[*].volumeMounts}"),
			r.kubectl(t, "get", "pod", ends, "-o", "jsonpath={range .status.containerStatuses[*].state.terminated}{.exitCode} {.reason}\n{end}"),
			r.kubectl(t, "get", "pod", ends, "-o", "jsonpath={.status.containerStatuses[?(@.name=='status')].state.terminated.message}"),
			r.kubectl(t, "get", "node", node, "-o", "jsonpath={.status.runtimeHandlers[*].features.recursiveReadOnlyMounts}"))
		seen[node] = strings.ReplaceAll(strings.Join(said, "\n"), "-"+node, "-NODE")
		r.kubectl(t, "delete", "pod", sees, ends)
	}
	if diff := cmp.Diff(seen["one"], seen["two"]); diff != "" {
		t.Errorf("crun (-) and runc (+) differ:\n%s", diff)
	}
}

func (r *realTest) kubelet(t *testing.T) {
	kubelet := r.Node("one").Component(Kubelet)
	before := must(r.server(t.Context()))
	pid := must(kubelet.Pid())
	if err := kubelet.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := kubelet.Pid(); !errors.Is(err, ErrNotRunning) {
		t.Errorf("killed kubelet: %v", err)
	}
	if err := kubelet.Kill(t.Context()); err != nil {
		t.Errorf("kill again: %v", err)
	}
	if err := kubelet.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if again := must(kubelet.Pid()); again == pid {
		t.Errorf("process %d survived", pid)
	}
	if err := kubelet.Start(t.Context()); err != nil {
		t.Errorf("start again: %v", err)
	}
	if err := r.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after := must(r.server(t.Context())); after.ContainerID != before.ContainerID {
		t.Error("the container did not survive kubelet")
	}
}

func (r *realTest) containerd(t *testing.T) {
	before := must(r.server(t.Context()))
	if err := r.Node("one").Component(Containerd).Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "exec works again", func(ctx context.Context) error {
		_, err := r.Kubectl(ctx, "exec", "server", "--", "true")
		return err
	})
	if after := must(r.server(t.Context())); after.ContainerID != before.ContainerID {
		t.Error("the container did not survive containerd")
	}
}

func (r *realTest) controlPlane(t *testing.T) {
	server := r.Component(APIServer)
	if err := server.Freeze(); err != nil {
		t.Fatal(err)
	}
	if err := server.probe(t.Context()); err == nil {
		t.Error("a frozen API server answers")
	}
	if err := server.Thaw(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a thawed API server answers", server.probe)
	for _, name := range []string{Etcd, APIServer, ControllerManager, Scheduler} {
		if err := r.Component(name).Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Component(Etcd).Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := r.Component(Etcd).Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the API server finds etcd again", server.probe)
	if err := r.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r.Component("no-such") != nil || r.Node("no-such") != nil {
		t.Error("names of nothing find something")
	}
}

func (r *realTest) anotherProcess(t *testing.T) {
	other, err := Open(r.config.Dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	if mine, theirs := must(r.Component(Etcd).Pid()), must(other.Component(Etcd).Pid()); mine != theirs {
		t.Errorf("etcd is %d here and %d there", mine, theirs)
	}
	if err := other.Node("two").Component(Kubelet).Restart(t.Context()); err != nil {
		t.Error(err)
	}
	// Starting what runs changes nothing.
	before := must(r.Node("one").Component(Kubelet).Pid())
	if err := other.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after := must(r.Node("one").Component(Kubelet).Pid()); after != before {
		t.Errorf("start restarted kubelet: %d, then %d", before, after)
	}
}

func (r *realTest) reboot(t *testing.T) {
	node := r.Node("one")
	before, bootID := must(r.server(t.Context())), must(node.BootID())
	if err := node.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}
	if must(node.BootID()) == bootID {
		t.Error("the boot ID is the same")
	}
	if _, err := os.Stat(filepath.Join(must(node.Root()), "run/marker")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("/run was not emptied: %v", err)
	}
	eventually(t, "the pod runs again", func(ctx context.Context) error {
		after, err := r.server(ctx)
		if err == nil && after.ContainerID == before.ContainerID {
			err = errors.New("it is the container from before")
		}
		return err
	})
	if got, want := r.kubectl(t, "logs", "server"), must(node.BootID()); got != want {
		t.Errorf("boot ID in the container %q: want %q", got, want)
	}
	address := "http://" + r.kubectl(t, "get", "pod", "server", "-o", "jsonpath={.status.podIP}") + "/"
	eventually(t, "the pod's network works again", r.control.answers(address))
}

func (r *realTest) logs(t *testing.T) {
	dir := t.TempDir()
	if err := r.CollectLogs(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	for _, pattern := range []string{"one/kubelet.log", "control-plane/kube-apiserver.log", "one/pods/default_server_*/c/*.log", "objects.yaml", "events.txt"} {
		found := must(filepath.Glob(filepath.Join(dir, pattern)))
		if len(found) == 0 {
			t.Errorf("no %s", pattern)
		}
		for _, file := range found {
			if info := must(os.Stat(file)); info.Size() == 0 {
				t.Errorf("%s is empty", file)
			}
		}
	}
}

// traces lists what the cluster could leave behind on the host. Another cluster on this machine does not disturb it.
func traces(t *testing.T, c *Cluster) map[string][]string {
	t.Helper()
	group := strings.TrimSuffix(c.control.group, controlName)
	found := map[string][]string{}
	for what, command := range map[string]string{
		"mounts":     "cut -d' ' -f5 /proc/self/mountinfo | grep -E '^(" + c.config.Dir + "|/(dev|etc|opt|proc|run|sys|usr|var)(/|$))'",
		"interfaces": "ls /sys/class/net",
		"cgroups":    "find /sys/fs/cgroup -type d -name '" + group + "*'",
		"processes":  "grep -l '/" + group + "' /proc/[0-9]*/cgroup",
		"rules":      "nft list ruleset",
		"files":      "ls -d /var/lib/kubelet /var/lib/containerd /var/lib/etcd /etc/cni /etc/cdi /run/containerd /run/netns /var/lib/cni '" + c.config.Dir + "'",
		"settings": "cd /proc/sys && grep . vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops " +
			"kernel/keys/root_maxkeys kernel/keys/root_maxbytes net/ipv4/ip_forward",
	} {
		// Nothing to be found makes some of these fail.
		out, _ := exec.Command("/bin/sh", "-c", command+" 2>/dev/null").Output()
		found[what] = strings.Fields(string(out))
	}
	return found
}

// namespaces answers those that the cluster's processes are in and that are not the host's.
func namespaces(t *testing.T, c *Cluster) map[string]bool {
	t.Helper()
	inside := map[string]bool{}
	for _, path := range traces(t, c)["processes"] {
		for _, kind := range []string{"net", "mnt", "pid"} {
			// A process may end meanwhile.
			link, err := os.Readlink(filepath.Join(filepath.Dir(path), "ns", kind))
			own, _ := os.Readlink("/proc/self/ns/" + kind)
			if err == nil && link != own {
				inside[link] = true
			}
		}
	}
	if len(inside) < 9 {
		t.Errorf("three machines have only %d namespaces", len(inside))
	}
	return inside
}

// allNamespaces answers those of every process on this machine except other clusters': numbers of namespaces come back.
func allNamespaces(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, dir := range must(filepath.Glob("/proc/[0-9]*")) {
		if group, err := os.ReadFile(filepath.Join(dir, "cgroup")); err != nil || strings.Contains(string(group), "/tandem-") {
			continue
		}
		for _, kind := range []string{"net", "mnt", "pid"} {
			for _, path := range must(filepath.Glob(filepath.Join(dir, "task/*/ns", kind))) {
				if link, err := os.Readlink(path); err == nil {
					all = append(all, link)
				}
			}
		}
	}
	return all
}
