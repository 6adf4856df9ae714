// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/hack/binaries"
)

// Node is one node of the cluster. It is safe for concurrent use, except Reboot, Halt and Boot beside each other.
type Node struct {
	cluster    *Cluster
	index      int
	name       string
	config     NodeConfig
	machine    *machine
	components []*Component
}

// Name of the node.
func (n *Node) Name() string { return n.name }

// IP is the node's InternalIP; it is reachable from inside the cluster's networks only (Cluster.DialContext).
func (n *Node) IP() string { return nodeIP(n.index) }

// Component answers one of Containerd, Kubelet and KubeProxy; nil where there is none of that name.
func (n *Node) Component(name string) *Component { return find(n.components, name) }

func find(components []*Component, name string) *Component {
	if i := slices.IndexFunc(components, func(c *Component) bool { return c.name == name }); i >= 0 {
		return components[i]
	}
	return nil
}

// Root is the host path under which the node's file system is seen as processes on the node see it, mounts included. It
// changes with a reboot. Symbolic links that are absolute lead back to the host's files; resolve them yourself.
func (n *Node) Root() (string, error) {
	holder, err := n.machine.holder()
	if err != nil {
		return "", err
	}
	return filepath.Join("/proc", strconv.Itoa(holder.Pid), "root"), nil
}

// Command prepares a command on the node: in all its namespaces, its own file system included. Cancelling ctx ends it.
func (n *Node) Command(ctx context.Context, name string, args ...string) (*exec.Cmd, error) {
	return n.machine.command(ctx, name, args...)
}

// DialContext connects from the node; unix socket paths are the node's. It fits net.Dialer's users.
func (n *Node) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	return n.machine.dial(ctx, network, address)
}

// BootID is what the node reports as its boot ID since its last boot.
func (n *Node) BootID() (string, error) {
	state, err := n.machine.state()
	return state.BootID, err
}

// Halt ends everything on the node at once, as a power cut would: containers, shims and components, with the node's
// /run, /dev and all mounts. Its disk stays. It is idempotent.
func (n *Node) Halt(ctx context.Context) error { return n.machine.halt(ctx) }

// Boot starts a halted node, with a new boot ID, and returns when kubelet serves (the Node object is Ready a little later).
func (n *Node) Boot(ctx context.Context) error {
	if err := n.boot(ctx); err != nil {
		return err
	}
	for _, component := range n.components {
		if err := component.Start(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (n *Node) boot(ctx context.Context) error {
	if err := n.machine.boot(); err != nil {
		return err
	}
	return n.cluster.wireNode(ctx, n.index)
}

// Reboot halts and boots the node, and returns when the Node object is Ready with the new boot ID.
func (n *Node) Reboot(ctx context.Context) error {
	if err := n.Halt(ctx); err != nil {
		return err
	}
	if err := n.Boot(ctx); err != nil {
		return err
	}
	return n.cluster.waitReady(ctx, n)
}

// PodIP is the i-th address of the node's pods, which all machines have a route to.
func (n *Node) PodIP(i int) string { return fmt.Sprintf("10.244.%d.%d", n.index+1, 1+i) }

// LoadImage imports an image archive (docker or OCI layout, a tarball) into the node's containerd. A bare node has none.
func (n *Node) LoadImage(ctx context.Context, tarball string) error {
	if n.config.Bare {
		return nil
	}
	file, err := os.Open(tarball)
	if err != nil {
		return fmt.Errorf("load image into %s: %w", n.name, err)
	}
	defer file.Close()
	cmd, err := n.machine.command(ctx, "ctr", "--namespace=k8s.io", "images", "import", "-")
	if err != nil {
		return err
	}
	cmd.Stdin = file
	if err := run(cmd); err != nil {
		return fmt.Errorf("load image %s into %s: %w", tarball, n.name, err)
	}
	return nil
}

// describe fills in the node's components.
func (n *Node) describe(programs *binaries.Set) {
	if n.config.Bare {
		return
	}
	kubernetes := programs.Kubernetes(n.config.KubernetesVersion)
	kubeletArgs := []string{
		"--config=/etc/kubernetes/kubelet.yaml",
		"--hostname-override=" + n.name,
		"--kubeconfig=/etc/kubernetes/kubelet.conf",
		"--node-ip=" + n.IP(),
	}
	if len(n.config.Labels) > 0 {
		var labels []string
		for _, key := range slices.Sorted(maps.Keys(n.config.Labels)) {
			labels = append(labels, key+"="+n.config.Labels[key])
		}
		kubeletArgs = append(kubeletArgs, "--node-labels="+strings.Join(labels, ","))
	}
	component := func(name, program string, probe func(context.Context) error, args ...string) *Component {
		return &Component{machine: n.machine, name: name, argv: append([]string{program}, args...), probe: probe}
	}
	n.components = []*Component{
		component(Containerd, filepath.Join(programs.Containerd, Containerd), n.machine.runsContainers(containerdSocket),
			"--config=/etc/containerd/config.toml"),
		component(Kubelet, filepath.Join(kubernetes, Kubelet), n.machine.answers("http://127.0.0.1:10248/healthz"),
			append(kubeletArgs, n.config.KubeletArgs...)...),
		component(KubeProxy, filepath.Join(kubernetes, KubeProxy), n.machine.answers("http://127.0.0.1:10256/healthz"),
			"--config=/etc/kubernetes/kube-proxy.yaml", "--hostname-override="+n.name),
	}
}

const containerdSocket = "/run/containerd/containerd.sock"

// bootIDFile is a file of the node. A container, whose /proc is a new one, sees it at procBootID.
const (
	bootIDFile = "/run/.machine/boot_id"
	procBootID = "/proc/sys/kernel/random/boot_id"
)

// bootIDHook mounts it in a container of runc, which refuses mounts below /proc: runc runs the hook when the container's mounts are made
// and before its root is entered.
const bootIDHook = `#!/bin/sh
read -r state
bundle=${state#*'"bundle":"'}
bundle=${bundle%%'"'*}
exec mount --bind ` + bootIDFile + ` "$bundle/rootfs` + procBootID + `"
`

const bootIDHookPath = "/etc/containerd/boot-id-hook"

// crunScript is what containerd calls. Debian 12's crun refuses specifications newer than 1.0. It does not know the command "features",
// from whose answer kubelet learns that mounts can be read-only recursively. And it fails with "writing to pipe: Broken pipe" if a hook
// ends before crun has written the state to it (fixed in crun 1.17, containers/crun#1553), so stateHook runs first. Hooks without
// arguments are left as they are. A startContainer hook would fail: its path is one in the container. No container here has either.
const crunScript = `#!/bin/sh
[ "$1" != features ] || exec echo '{"ociVersionMin": "1.0.0", "ociVersionMax": "1.0.2", "mountOptions": ["rro"]}'
previous=
for argument; do
  [ "$previous" != --bundle ] || sed -i -e 's/"ociVersion":"[^"]*"/"ociVersion":"1.0.2"/' \
    -e 's#{"path":\("[^"]*"\),"args":\["[^"]*"#{"path":"` + stateHookPath + `","args":["hook",\1#g' "$argument/config.json" || exit
  previous=$argument
done
exec /usr/bin/crun "$@"
`

// stateHook reads the whole state, then becomes the hook and gives it the state. It calls no program: a hook may have no PATH.
const stateHook = `#!/bin/sh
state=
while IFS= read -r line || [ -n "$line" ]; do
  state="$state$line
"
done
exec "$@" <<end
$state
end
`

const stateHookPath = "/etc/containerd/state-hook"

const crunPath = "/etc/containerd/crun"

// baseSpec answers the OCI specification containerd starts from: its default with the node's boot ID.
func baseSpec(ctx context.Context, programs *binaries.Set, containerRuntime string) ([]byte, error) {
	out, err := hostCommand(ctx, filepath.Join(programs.Containerd, "ctr"), "oci", "spec").Output()
	if err != nil {
		return nil, fmt.Errorf("ask containerd for its default specification: %w", err)
	}
	spec := map[string]any{}
	if err := json.Unmarshal(out, &spec); err != nil {
		return nil, fmt.Errorf("read containerd's default specification: %w", err)
	}
	if containerRuntime == Runc {
		spec["hooks"] = map[string]any{"createContainer": []any{map[string]any{
			"path": bootIDHookPath, "env": []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"},
		}}}
		return json.Marshal(spec)
	}
	mounts, ok := spec["mounts"].([]any)
	if !ok {
		return nil, errors.New("containerd's default specification has no mounts")
	}
	spec["mounts"] = append(mounts, map[string]any{
		"destination": procBootID, "type": "bind", "source": bootIDFile, "options": []string{"bind"},
	})
	return json.Marshal(spec)
}

// configure writes the configuration files of the node's components onto its disk.
func (n *Node) configure(ctx context.Context, programs *binaries.Set) error {
	if n.config.Bare {
		return nil
	}
	spec, err := baseSpec(ctx, programs, n.config.ContainerRuntime)
	if err != nil {
		return err
	}
	kubelet, err := n.kubeletConfig()
	if err != nil {
		return err
	}
	proxy, err := n.proxyConfig()
	if err != nil {
		return err
	}
	snapshotter, err := snapshotterFor(n.machine.dir)
	if err != nil {
		return err
	}
	containerd := containerdConfig
	if n.config.Kind {
		containerd = kindContainerdConfig
	}
	program := crunPath
	if n.config.ContainerRuntime == Runc {
		program = filepath.Join(programs.Runc, Runc)
	}
	files := map[string]string{
		"/etc/kubernetes/kubelet.yaml":      string(kubelet),
		"/etc/kubernetes/kube-proxy.yaml":   string(proxy),
		"/etc/containerd/config.toml":       fmt.Sprintf(containerd, pauseImage, snapshotter, programs.CNI, program),
		"/etc/cni/net.d/10-tandem.conflist": fmt.Sprintf(cniConfig, nodePods(n.index)),
		"/etc/containerd/base-spec.json":    string(spec),
		bootIDHookPath:                      bootIDHook,
		crunPath:                            crunScript,
		stateHookPath:                       stateHook,
	}
	for path, content := range files {
		path = n.machine.path(path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return fmt.Errorf("configure %s: %w", n.name, err)
		}
		// Some of them are programs; none is secret.
		if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
			return fmt.Errorf("configure %s: %w", n.name, err)
		}
	}
	if err := os.MkdirAll(n.machine.path("/etc/cdi"), 0o755); err != nil {
		return fmt.Errorf("configure %s: %w", n.name, err)
	}
	return nil
}

// snapshotterFor avoids overlayfs where the disk is one already: the kernel refuses to stack them for writing.
func snapshotterFor(dir string) (string, error) {
	var stat unix.Statfs_t
	if err := unix.Statfs(dir, &stat); err != nil {
		return "", fmt.Errorf("look at file system of %s: %w", dir, err)
	}
	if stat.Type == unix.OVERLAYFS_SUPER_MAGIC {
		return "native", nil
	}
	return "overlayfs", nil
}

func (n *Node) kubeletConfig() ([]byte, error) {
	config := map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1",
		"kind":       "KubeletConfiguration",
		"authentication": map[string]any{
			"anonymous": map[string]any{"enabled": false},
			"webhook":   map[string]any{"enabled": true},
			"x509":      map[string]any{"clientCAFile": pkiDir + "/ca.crt"},
		},
		"authorization":            map[string]any{"mode": "Webhook"},
		"cgroupDriver":             "cgroupfs",
		"containerRuntimeEndpoint": "unix://" + containerdSocket,
		// The disk is the developer's: its fill level must not cause evictions.
		"evictionHard": map[string]any{"memory.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%"},
		// No DNS server runs there, so lookups fail at once. Without an address kubelet warns about every pod.
		"clusterDNS":                  []string{dnsIP},
		"clusterDomain":               "cluster.local",
		"failCgroupV1":                false,
		"failSwapOn":                  false,
		"imageGCHighThresholdPercent": 100,
		"resolvConf":                  "/etc/resolv.conf",
		"serializeImagePulls":         false,
		"tlsCertFile":                 pkiDir + "/kubelet.crt",
		"tlsPrivateKeyFile":           pkiDir + "/kubelet.key",
		"volumePluginDir":             "/var/lib/kubelet/volume-plugins",
	}
	return n.encode("kubelet", config, n.config.Kubelet)
}

// encode returns the configuration of a component with the cluster's feature gates and the overrides.
func (n *Node) encode(component string, config, overrides map[string]any) ([]byte, error) {
	if len(n.cluster.config.FeatureGates) > 0 {
		config["featureGates"] = n.cluster.config.FeatureGates
	}
	merge(config, overrides)
	data, err := yaml.Marshal(config)
	if err != nil {
		return nil, fmt.Errorf("encode %s configuration of %s: %w", component, n.name, err)
	}
	return data, nil
}

// merge writes overrides into config, map by map; nil removes.
func merge(config, overrides map[string]any) {
	for key, value := range overrides {
		inner, isMap := value.(map[string]any)
		have, hasMap := config[key].(map[string]any)
		switch {
		case value == nil:
			delete(config, key)
		case isMap && hasMap:
			merge(have, inner)
		default:
			config[key] = value
		}
	}
}

func (n *Node) proxyConfig() ([]byte, error) {
	config := map[string]any{
		"apiVersion":         "kubeproxy.config.k8s.io/v1alpha1",
		"kind":               "KubeProxyConfiguration",
		"clientConnection":   map[string]any{"kubeconfig": "/etc/kubernetes/kube-proxy.conf"},
		"clusterCIDR":        podCIDR,
		"healthzBindAddress": "0.0.0.0:10256",
		"mode":               "nftables",
		// The limit is the whole kernel's, and only the first network namespace may set it.
		"conntrack": map[string]any{"maxPerCore": 0, "min": 0},
	}
	return n.encode("kube-proxy", config, nil)
}

const containerdConfig = `version = 3
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
  address = "` + containerdSocket + `"

[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "%[1]s"

[plugins."io.containerd.cri.v1.images"]
  snapshotter = "%[2]s"

[plugins."io.containerd.cri.v1.runtime"]
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
  restrict_oom_score_adj = true

  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["%[3]s"]
    conf_dir = "/etc/cni/net.d"
    # Instead of one more CNI plugin for each pod.
    use_internal_loopback = true

  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "runc"

    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "/etc/containerd/base-spec.json"

      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
        BinaryName = "%[4]s"
        SystemdCgroup = false
`

// kindContainerdConfig has the sections and keys of images/base/files/etc/containerd/config.toml of kind v0.33.0, and what this machine needs:
// kind's restrict_oom_score_adj is false, but runc may not lower the score where this machine is in a container without the right to.
const kindContainerdConfig = `version = 2
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
  address = "` + containerdSocket + `"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "%[1]s"
  tolerate_missing_hugepages_controller = true
  restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "%[3]s"
  conf_dir = "/etc/cni/net.d"

[plugins."io.containerd.grpc.v1.cri".containerd]
  discard_unpacked_layers = true
  snapshotter = "%[2]s"
  default_runtime_name = "runc"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  base_runtime_spec = "/etc/containerd/base-spec.json"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  BinaryName = "%[4]s"
  SystemdCgroup = false
`

// Each plugin is a process when a pod starts and another one when it ends, so these are as few as possible. Host ports and bandwidth limits
// have no effect. Pods have no use for ipMasq: all machines have routes to them.
const cniConfig = `{
  "cniVersion": "1.0.0",
  "name": "tandem",
  "plugins": [
    {
      "type": "ptp",
      "ipam": {"type": "host-local", "ranges": [[{"subnet": %q}]], "routes": [{"dst": "0.0.0.0/0"}]}
    }
  ]
}
`
