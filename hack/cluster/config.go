// SPDX-License-Identifier: Apache-2.0

// Package cluster runs a real Kubernetes cluster on this machine without a container engine: etcd, kube-apiserver,
// scheduler and controller manager on a machine of their own, and on each node containerd, crun, CNI, kubelet and
// kube-proxy. A machine is a set of namespaces (mount, network, PID, UTS, IPC, cgroup) with a root file system, a tmpfs
// on /run, a /dev and a cgroup of its own, so nothing of the host is touched and nothing stays behind when it ends.
// The package needs root. It does not build the programs (hack/binaries does) and installs nothing in the cluster.
package cluster

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/hack/binaries"
)

// Config describes a cluster. It is kept in Dir, so that another process can Open the cluster.
type Config struct {
	// Dir holds everything the cluster writes; it must not be below /run, /tmp is fine. Stop empties it.
	Dir string `json:"-"`
	// KubernetesVersion of the control plane and of nodes that name none, for example "v1.36.3"; empty means
	// binaries.DefaultKubernetes.
	KubernetesVersion string `json:"kubernetesVersion,omitempty"`
	// ContainerRuntime of nodes that name none: Crun or Runc; empty means Crun, which needs less CPU time.
	ContainerRuntime string `json:"containerRuntime,omitempty"`
	// Nodes; empty means one node named "node-1", unless APIServerOnly or NoNodes is set.
	Nodes []NodeConfig `json:"nodes,omitempty"`
	// APIServerOnly leaves out everything but etcd and kube-apiserver: no nodes, controllers or scheduler.
	APIServerOnly bool `json:"apiServerOnly,omitempty"`
	// NoNodes leaves out the nodes only: the caller plays them.
	NoNodes bool `json:"noNodes,omitempty"`
	// FeatureGates are set on every component.
	FeatureGates map[string]bool `json:"featureGates,omitempty"`
	// APIServerArgs, SchedulerArgs and ControllerManagerArgs are appended to the command lines: the last of equal flags wins.
	APIServerArgs         []string `json:"apiServerArgs,omitempty"`
	SchedulerArgs         []string `json:"schedulerArgs,omitempty"`
	ControllerManagerArgs []string `json:"controllerManagerArgs,omitempty"`
	// AuditPolicy, an audit.k8s.io/v1 Policy, makes kube-apiserver write which requests it got to the file AuditLog; empty for
	// none.
	AuditPolicy string `json:"auditPolicy,omitempty"`
	// Progress receives one line a step; nil is silent.
	Progress io.Writer `json:"-"`
}

// NodeConfig describes one node.
type NodeConfig struct {
	// Name of the Node object and host name: lower-case letters, digits and dashes.
	Name string `json:"name"`
	// KubernetesVersion of kubelet and kube-proxy, where it is not the cluster's.
	KubernetesVersion string `json:"kubernetesVersion,omitempty"`
	// ContainerRuntime of containerd, where it is not the cluster's.
	ContainerRuntime string `json:"containerRuntime,omitempty"`
	// Kubelet is merged into the default KubeletConfiguration, map by map; a nil value removes a field.
	Kubelet map[string]any `json:"kubelet,omitempty"`
	// KubeletArgs are appended to kubelet's command line.
	KubeletArgs []string `json:"kubeletArgs,omitempty"`
	// Mounts are bound into the node's file system before anything starts on it, in this order, also after a reboot.
	Mounts []Mount `json:"mounts,omitempty"`
	// Labels the kubelet registers the node with; NodeRestriction limits what may be under kubernetes.io.
	Labels map[string]string `json:"labels,omitempty"`
	// Kind gives the node what the nodes of kind have instead: a /run on which nothing can be executed, and a containerd that is configured
	// with the format of version 2 and leaves CDI to the defaults. There is no systemd all the same.
	Kind bool `json:"kind,omitempty"`
	// Bare boots the machine only, without containerd, kubelet and kube-proxy: the caller plays them (test/kubelet).
	Bare bool `json:"bare,omitempty"`
}

// Container runtimes that containerd can use on a node.
const (
	Crun = "crun"
	Runc = "runc"
)

// Mount is a file or directory of the host seen in a node.
type Mount struct {
	// Source is a path on the host, Target an absolute path in the node; Target is created where the node's own file
	// system lacks it (below /sys and /proc it must exist).
	Source, Target string
	ReadOnly       bool
}

// maxNodes bounds the addresses: node i is 10.88.0.(11+i) with pods in 10.244.(i+1).0/24.
const maxNodes = 100

var namePattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?$`)

// complete fills in defaults and reports everything that is wrong.
func (c *Config) complete() error {
	var problems []error
	if c.Dir == "" {
		problems = append(problems, errors.New("dir: missing"))
	} else if dir, err := filepath.Abs(c.Dir); err != nil {
		problems = append(problems, fmt.Errorf("dir %q: %w", c.Dir, err))
	} else {
		c.Dir = dir
	}
	for _, private := range []string{"/run", "/var/run", "/dev", "/proc", "/sys"} {
		if c.Dir == private || strings.HasPrefix(c.Dir, private+"/") {
			problems = append(problems, fmt.Errorf("dir %q: below %s", c.Dir, private))
		}
	}
	c.KubernetesVersion = cmp.Or(c.KubernetesVersion, binaries.DefaultKubernetes)
	if err := binaries.ValidKubernetes(c.KubernetesVersion); err != nil {
		problems = append(problems, fmt.Errorf("kubernetesVersion: %w", err))
	}
	c.ContainerRuntime = cmp.Or(c.ContainerRuntime, Crun)
	if (c.APIServerOnly || c.NoNodes) && len(c.Nodes) > 0 {
		problems = append(problems, errors.New("nodes: apiServerOnly and noNodes have none"))
	}
	if len(c.Nodes) == 0 && !c.APIServerOnly && !c.NoNodes {
		c.Nodes = []NodeConfig{{Name: "node-1"}}
	}
	if len(c.Nodes) > maxNodes {
		problems = append(problems, fmt.Errorf("nodes: %d, more than %d", len(c.Nodes), maxNodes))
	}
	// The caller's slice is not ours to fill in.
	c.Nodes = slices.Clone(c.Nodes)
	seen := map[string]bool{controlName: true}
	for i := range c.Nodes {
		problems = append(problems, c.Nodes[i].complete(fmt.Sprintf("nodes[%d]", i), c, seen)...)
	}
	return errors.Join(problems...)
}

func (n *NodeConfig) complete(path string, cluster *Config, seen map[string]bool) (problems []error) {
	if !namePattern.MatchString(n.Name) {
		problems = append(problems, fmt.Errorf("%s.name %q: want lower-case letters, digits and dashes", path, n.Name))
	}
	if seen[n.Name] {
		problems = append(problems, fmt.Errorf("%s.name %q: taken", path, n.Name))
	}
	seen[n.Name] = true
	n.KubernetesVersion = cmp.Or(n.KubernetesVersion, cluster.KubernetesVersion)
	n.ContainerRuntime = cmp.Or(n.ContainerRuntime, cluster.ContainerRuntime)
	if n.ContainerRuntime != Crun && n.ContainerRuntime != Runc {
		problems = append(problems, fmt.Errorf("%s.containerRuntime %q: want %s or %s", path, n.ContainerRuntime, Crun, Runc))
	}
	if err := binaries.ValidKubernetes(n.KubernetesVersion); err != nil {
		problems = append(problems, fmt.Errorf("%s.kubernetesVersion: %w", path, err))
	}
	for i, mount := range n.Mounts {
		if !filepath.IsAbs(mount.Source) || !filepath.IsAbs(mount.Target) {
			problems = append(problems, fmt.Errorf("%s.mounts[%d]: want absolute paths, not %q and %q", path, i, mount.Source, mount.Target))
		}
		// The script that makes a machine reads one mount a line.
		if strings.ContainsAny(mount.Source+mount.Target, " \t\n") {
			problems = append(problems, fmt.Errorf("%s.mounts[%d]: white space in %q or %q", path, i, mount.Source, mount.Target))
		}
	}
	return problems
}

func (c *Config) kubernetesVersions() []string {
	versions := []string{c.KubernetesVersion}
	for _, node := range c.Nodes {
		versions = append(versions, node.KubernetesVersion)
	}
	return versions
}

func (c *Config) featureGates() string {
	var gates []string
	for _, gate := range slices.Sorted(maps.Keys(c.FeatureGates)) {
		gates = append(gates, fmt.Sprintf("%s=%t", gate, c.FeatureGates[gate]))
	}
	return strings.Join(gates, ",")
}

const configFile = "cluster.json"

func (c *Config) save() error { return writeJSON(filepath.Join(c.Dir, configFile), c) }

func readConfig(dir string) (Config, error) {
	config := Config{}
	if err := readJSON(filepath.Join(dir, configFile), &config); err != nil {
		return Config{}, err
	}
	config.Dir = dir
	return config, nil
}

// writeJSON replaces a file in one step, so that a reader sees all of it or none.
func writeJSON(path string, value any) error {
	data, err := encodeJSON(value)
	if err != nil {
		return fmt.Errorf("encode %s: %w", path, err)
	}
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("replace %s: %w", path, err)
	}
	return nil
}

func encodeJSON(value any) ([]byte, error) {
	data, err := json.MarshalIndent(value, "", "  ")
	return append(data, '\n'), err
}

func readJSON(path string, value any) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	if err := json.Unmarshal(data, value); err != nil {
		return fmt.Errorf("decode %s: %w", path, err)
	}
	return nil
}
