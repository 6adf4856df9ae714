// SPDX-License-Identifier: Apache-2.0

// Package helm_test renders the chart with Helm and checks the result. It installs nothing.
package helm_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/golden"
)

var helm string

func TestMain(m *testing.M) {
	flag.Parse()
	// The tools are a module of their own, which the product does not import.
	command := exec.Command("go", "-C", "../../hack", "run", "./cmd/helm")
	command.Stderr = os.Stderr
	path, err := command.Output()
	if err != nil {
		fmt.Fprintln(os.Stderr, "find Helm:", err)
		os.Exit(1)
	}
	helm = strings.TrimSpace(string(path))
	os.Exit(m.Run())
}

// cases are the value files; each has a golden file beside it.
var cases = []string{"default", "simulated", "runtimeclass", "gke", "everything"}

func TestRendersAsBefore(t *testing.T) {
	t.Parallel()
	for _, name := range cases {
		t.Run(name, func(t *testing.T) {
			golden.Compare(t, filepath.Join("testdata", name+".golden.yaml"), render(t, name))
		})
	}
}

func TestLint(t *testing.T) {
	t.Parallel()
	for _, name := range cases {
		if out, err := run("lint", "--strict", "tandem", "-f", valuesFile(name)); err != nil {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
	}
	// Without values, what is missing is said once.
	if out, err := run("lint", "tandem"); err != nil || strings.Count(string(out), "image.repository is not set") != 1 {
		t.Errorf("%v\n%s", err, out)
	}
}

// Every field exists in the API: the API server silently drops misspelt fields.
func TestDecodesStrictly(t *testing.T) {
	t.Parallel()
	for _, name := range cases {
		t.Run(name, func(t *testing.T) {
			if len(objects(t, name)) < 4 {
				t.Error("fewer objects than DaemonSet, role, binding and policy")
			}
		})
	}
}

func TestMountsMatchVolumes(t *testing.T) {
	t.Parallel()
	for _, name := range cases {
		t.Run(name, func(t *testing.T) {
			pod := daemonSet(t, name).Spec.Template.Spec
			volumes := map[string]bool{}
			for _, v := range pod.Volumes {
				if _, twice := volumes[v.Name]; twice {
					t.Errorf("volume %s is defined twice", v.Name)
				}
				volumes[v.Name] = false
			}
			for _, c := range append(pod.InitContainers, pod.Containers...) {
				paths := map[string]bool{}
				for _, m := range c.VolumeMounts {
					if _, ok := volumes[m.Name]; !ok {
						t.Errorf("container %s mounts %s, which is no volume", c.Name, m.Name)
					}
					volumes[m.Name] = true
					if paths[m.MountPath] {
						t.Errorf("container %s mounts two volumes at %s", c.Name, m.MountPath)
					}
					paths[m.MountPath] = true
				}
			}
			for volume, used := range volumes {
				if !used {
					t.Errorf("volume %s is not mounted", volume)
				}
			}
		})
	}
}

// No socket is mounted, because it does not work after its server restarts. Every hostPath has a type, because otherwise the
// container runtime creates the path.
func TestHostPathsAreDirectories(t *testing.T) {
	t.Parallel()
	for _, name := range cases {
		t.Run(name, func(t *testing.T) {
			for _, v := range daemonSet(t, name).Spec.Template.Spec.Volumes {
				if v.HostPath == nil {
					continue
				}
				if kind := *v.HostPath.Type; kind != corev1.HostPathDirectory && kind != corev1.HostPathDirectoryOrCreate {
					t.Errorf("volume %s (%s): type %q is no directory", v.Name, v.HostPath.Path, kind)
				}
			}
		})
	}
}

// The least privileges that each kind of access needs.
func TestPrivileges(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]struct {
		privileged bool
		root, dev  bool // host directories / and /dev mounted
		class      string
		visible    string
	}{
		"default":      {privileged: true, root: true, dev: true, visible: "void"},
		"gke":          {privileged: true, dev: true, visible: "void"},
		"runtimeclass": {root: true, class: "nvidia", visible: "all"},
		"everything":   {dev: true, visible: "void"},
		"simulated":    {visible: "void"},
	} {
		t.Run(name, func(t *testing.T) {
			pod := daemonSet(t, name).Spec.Template.Spec
			agent := pod.Containers[0]
			security := agent.SecurityContext
			if *security.Privileged != want.privileged {
				t.Errorf("privileged is %v", *security.Privileged)
			}
			// Through NVIDIA's runtime, MIG needs this (NVIDIA_MIG_CONFIG_DEVICES).
			var add []corev1.Capability
			if want.class != "" {
				add = []corev1.Capability{"SYS_ADMIN"}
			}
			if !want.privileged && (*security.AllowPrivilegeEscalation || security.Capabilities.Drop[0] != "ALL" ||
				!slices.Equal(security.Capabilities.Add, add)) {
				t.Errorf("an unprivileged agent has other privileges than %v: %+v", add, security)
			}
			if got, want := slices.Contains(agent.Args, "--create-device-nodes"), want.privileged; got != want {
				t.Errorf("creates device nodes: %t, want %t", got, want)
			}
			for _, m := range agent.VolumeMounts {
				if m.MountPath == "/host/dev" && m.ReadOnly == want.privileged {
					t.Errorf("the host's /dev is read-only: %t", m.ReadOnly)
				}
			}
			if !*security.ReadOnlyRootFilesystem || pod.HostNetwork || pod.HostPID || pod.HostIPC {
				t.Error("root file system is writable, or a host namespace is shared")
			}
			if class := pod.RuntimeClassName; (class == nil) != (want.class == "") || (class != nil && *class != want.class) {
				t.Errorf("runtime class is %v, want %q", class, want.class)
			}
			if visible := variables(agent)["NVIDIA_VISIBLE_DEVICES"]; visible != want.visible {
				t.Errorf("NVIDIA_VISIBLE_DEVICES is %q, want %q", visible, want.visible)
			}
			if got := mountsHost(pod, "/"); got != want.root {
				t.Errorf("host's root mounted: %v", got)
			}
			if got := mountsHost(pod, "/dev"); got != want.dev {
				t.Errorf("host's /dev mounted: %v", got)
			}
		})
	}
}

// Placements, GPU instances by ID and changes need a privileged user of MIG, which is SYS_ADMIN with access to the monitor and the config
// device (MIG User Guide, "Device Nodes and Capabilities"; nvml.h).
func TestMIGWithARuntimeClass(t *testing.T) {
	t.Parallel()
	for _, allowed := range []bool{true, false} {
		var set appsv1.DaemonSet
		out := renderWith(t, "-f", valuesFile("runtimeclass"), "--set", fmt.Sprintf("migAccess=%t", allowed), "-s", "templates/daemonset.yaml")
		if err := yaml.Unmarshal(out, &set); err != nil {
			t.Fatal(err)
		}
		agent := set.Spec.Template.Spec.Containers[0]
		want := ""
		if allowed {
			want = "all"
		}
		for _, name := range []string{"NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_MIG_MONITOR_DEVICES"} {
			if got := variables(agent)[name]; got != want {
				t.Errorf("migAccess %t: %s=%q, want %q", allowed, name, got, want)
			}
		}
		if got := len(agent.SecurityContext.Capabilities.Add) > 0; got != allowed {
			t.Errorf("migAccess %t: capabilities %v", allowed, agent.SecurityContext.Capabilities.Add)
		}
	}
	// SYS_ADMIN undoes what hides files of the host, so an administrator must know of it.
	readme, err := os.ReadFile("tandem/README.md")
	if text := strings.Join(strings.Fields(string(readme)), " "); err != nil || !strings.Contains(text, "SYS_ADMIN with `access: runtimeClass`, unless `migAccess` is false; otherwise none") {
		t.Errorf("the README's rights of the agent do not say so: %v", err)
	}
}

// OpenShift admits pods by SecurityContextConstraints.
func TestSecurityContextConstraints(t *testing.T) {
	t.Parallel()
	const api = "security.openshift.io/v1"
	type constraints struct {
		APIVersion string            `json:"apiVersion"`
		Kind       string            `json:"kind"`
		Metadata   metav1.ObjectMeta `json:"metadata"`
		Users      []string          `json:"users"`
		Volumes    []string          `json:"volumes"`
		Added      []string          `json:"allowedCapabilities"`
		HostPath   bool              `json:"allowHostDirVolumePlugin"`
		Privileged bool              `json:"allowPrivilegedContainer"`
		HostPID    bool              `json:"allowHostPID"`
	}
	list := func(args ...string) (found []constraints) {
		t.Helper()
		for _, doc := range documents(t, renderWith(t, args...)) {
			var c constraints
			if err := yaml.Unmarshal(doc, &c); err != nil {
				t.Fatal(err)
			}
			if c.APIVersion == api {
				found = append(found, c)
			}
		}
		return found
	}
	if found := list("-f", valuesFile("default")); len(found) > 0 {
		t.Errorf("without OpenShift's API: %+v", found)
	}
	for name, privileged := range map[string]bool{"default": true, "runtimeclass": false, "everything": false} {
		found := list("-f", valuesFile(name), "--api-versions", api)
		if len(found) != 2 {
			t.Fatalf("%s: %d constraints, want one for agents and one for daemons", name, len(found))
		}
		account := daemonSet(t, name).Spec.Template.Spec.ServiceAccountName
		agent, daemon := found[0], found[1]
		if want := []string{"system:serviceaccount:tandem-system:" + account}; !slices.Equal(agent.Users, want) {
			t.Errorf("%s: users %v, want %v", name, agent.Users, want)
		}
		if len(daemon.Users) != 1 || daemon.Users[0] == agent.Users[0] || !daemon.HostPID || agent.HostPID {
			t.Errorf("%s: daemons are %+v", name, daemon)
		}
		for _, c := range found {
			if c.Privileged != privileged || !c.HostPath || c.Kind != "SecurityContextConstraints" {
				t.Errorf("%s: %+v", name, c)
			}
		}
		// What the pods have is allowed.
		for _, v := range daemonSet(t, name).Spec.Template.Spec.Volumes {
			kind := "hostPath"
			switch {
			case v.EmptyDir != nil:
				kind = "emptyDir"
			case v.ConfigMap != nil:
				kind = "configMap"
			}
			if !slices.Contains(agent.Volumes, kind) {
				t.Errorf("%s: volume %s is %s, which is not in %v", name, v.Name, kind, agent.Volumes)
			}
		}
		if c := daemonSet(t, name).Spec.Template.Spec.Containers[0].SecurityContext.Capabilities; c != nil {
			for _, capability := range c.Add {
				if !slices.Contains(agent.Added, string(capability)) {
					t.Errorf("%s: capability %s is not in %v", name, capability, agent.Added)
				}
			}
		}
	}
}

// OpenShift admits a pod with a fixed user only if its service account may use constraints that allow it.
func TestFixedUsersOnOpenShift(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"default", "everything"} {
		fixed, bound := map[string]string{}, map[string]bool{}
		note := func(owner string, pod corev1.PodSpec) {
			if pod.SecurityContext != nil && pod.SecurityContext.RunAsUser != nil {
				fixed[pod.ServiceAccountName] = owner
			}
		}
		out := renderWith(t, "-f", valuesFile(name), "--set", "gfd.enabled=true", "--api-versions", "security.openshift.io/v1")
		for _, object := range decode(t, out) {
			switch o := object.(type) {
			case *appsv1.Deployment:
				note("Deployment "+o.Name, o.Spec.Template.Spec)
			case *batchv1.Job:
				note("Job "+o.Name, o.Spec.Template.Spec)
			case *rbacv1.RoleBinding:
				for _, subject := range o.Subjects {
					bound[subject.Name] = bound[subject.Name] || o.RoleRef.Name == "system:openshift:scc:nonroot-v2"
				}
			}
		}
		if len(fixed) != 2 {
			t.Errorf("%s: pods with a fixed user are those of %v, want controller and the Job that removes labels", name, fixed)
		}
		for account, owner := range fixed {
			if !bound[account] {
				t.Errorf("%s: %s: service account %s may not use nonroot-v2", name, owner, account)
			}
		}
	}
}

// The controller meets Pod Security's restricted profile and mounts nothing of the host.
func TestControllerIsRestricted(t *testing.T) {
	t.Parallel()
	for _, name := range cases {
		t.Run(name, func(t *testing.T) {
			pod := find[*appsv1.Deployment](t, name).Spec.Template.Spec
			if len(pod.Volumes) > 0 || pod.HostNetwork || pod.HostPID || pod.HostIPC {
				t.Error("volumes or host namespaces")
			}
			if s := pod.SecurityContext; !*s.RunAsNonRoot || *s.RunAsUser == 0 || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
				t.Errorf("pod: %+v", s)
			}
			s := pod.Containers[0].SecurityContext
			if *s.Privileged || *s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) ||
				len(s.Capabilities.Add) > 0 {
				t.Errorf("container: %+v", s)
			}
		})
	}
}

// Whom a binding, a policy or a Service is about is found by name and label: that of the other would render as well.
func TestControllerIsNotTheAgent(t *testing.T) {
	t.Parallel()
	for _, name := range cases {
		controller, agent := find[*appsv1.Deployment](t, name), daemonSet(t, name)
		if labels.SelectorFromSet(agent.Spec.Selector.MatchLabels).Matches(labels.Set(controller.Spec.Template.Labels)) {
			t.Errorf("%s: the agents' selector takes the controller's pods", name)
		}
		account := controller.Spec.Template.Spec.ServiceAccountName
		if account == agent.Spec.Template.Spec.ServiceAccountName {
			t.Errorf("%s: agent and controller are both %s", name, account)
		}
		for kind, subjects := range map[string][]rbacv1.Subject{
			"cluster role": findNamed[*rbacv1.ClusterRoleBinding](t, name, "-controller").Subjects,
			"role":         find[*rbacv1.RoleBinding](t, name).Subjects,
		} {
			if len(subjects) != 1 || subjects[0].Name != account {
				t.Errorf("%s: the controller's %s is bound to %v, not to %s", name, kind, subjects, account)
			}
		}
	}
}

// The pod of a daemon has what the agent has, or one capability; no token, and no limit of memory that would end its clients.
func TestDaemonPods(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]struct {
		privileged bool
		class      string
		visible    string
		memory     string
	}{
		"default":      {privileged: true, visible: "void", memory: "4Gi"},
		"gke":          {privileged: true, visible: "void", memory: "4Gi"},
		"runtimeclass": {class: "nvidia", visible: "all", memory: "4Gi"},
		"everything":   {visible: "void", memory: "512Mi"},
		"simulated":    {visible: "void", memory: "4Gi"},
	} {
		t.Run(name, func(t *testing.T) {
			pod := daemonPod(t, name, daemonPods(t, name).DriverRoots[0])
			c := pod.Spec.Containers[0]
			if *c.SecurityContext.Privileged != want.privileged || !*c.SecurityContext.ReadOnlyRootFilesystem {
				t.Errorf("privileged is %v", *c.SecurityContext.Privileged)
			}
			if !want.privileged && (*c.SecurityContext.AllowPrivilegeEscalation || c.SecurityContext.Capabilities.Drop[0] != "ALL" ||
				!slices.Equal(c.SecurityContext.Capabilities.Add, []corev1.Capability{"SYS_CHROOT"})) {
				t.Errorf("more than it needs: %+v", c.SecurityContext)
			}
			if class := pod.Spec.RuntimeClassName; (class == nil) != (want.class == "") || (class != nil && *class != want.class) {
				t.Errorf("runtime class is %v, want %q", class, want.class)
			}
			if visible := variables(c)["NVIDIA_VISIBLE_DEVICES"]; visible != want.visible {
				t.Errorf("NVIDIA_VISIBLE_DEVICES is %q, want %q", visible, want.visible)
			}
			if _, limited := c.Resources.Limits[corev1.ResourceMemory]; limited {
				t.Error("memory is limited")
			}
			for _, v := range pod.Spec.Volumes {
				if v.Name == "shm" && v.EmptyDir.SizeLimit.String() != want.memory {
					t.Errorf("shared memory %s, want %s", v.EmptyDir.SizeLimit, want.memory)
				}
			}
			account := findNamed[*corev1.ServiceAccount](t, name, pod.Spec.ServiceAccountName)
			if account.AutomountServiceAccountToken == nil || *account.AutomountServiceAccountToken {
				t.Errorf("account %s has a token", account.Name)
			}
			if selector := daemonSet(t, name).Spec.Selector.MatchLabels; labels.SelectorFromSet(selector).Matches(labels.Set(pod.Labels)) {
				t.Error("the agents' selector takes it")
			}
		})
	}
}

// Without daemons the controller has no right to make pods.
func TestWithoutDaemons(t *testing.T) {
	t.Parallel()
	text := string(renderWith(t, "-f", valuesFile("default"), "--set", "mps.enabled=false"))
	for _, word := range []string{"mps-pod", "mps-daemon", "create, delete]"} {
		if strings.Contains(text, word) {
			t.Errorf("there is still %s", word)
		}
	}
}

// TestToleratesEveryTaint: without the agent, kubelet cannot unprepare the claims of pods that a NoExecute taint ends.
func TestToleratesEveryTaint(t *testing.T) {
	t.Parallel()
	every := corev1.Toleration{Operator: corev1.TolerationOpExists}
	if got := daemonSet(t, "default").Spec.Template.Spec.Tolerations; !slices.Contains(got, every) {
		t.Errorf("the agent tolerates only %v", got)
	}
}

func TestNeverSurges(t *testing.T) {
	t.Parallel()
	for _, name := range cases {
		if surge := daemonSet(t, name).Spec.UpdateStrategy.RollingUpdate.MaxSurge; surge.IntValue() != 0 {
			t.Errorf("%s: maxSurge is %v", name, surge)
		}
	}
}

// The agent takes every flag and the configuration that the chart gives it.
func TestAgentAcceptsTheArguments(t *testing.T) {
	t.Parallel()
	for _, name := range cases {
		t.Run(name, func(t *testing.T) {
			agent := daemonSet(t, name).Spec.Template.Spec.Containers[0]
			args := slices.DeleteFunc(slices.Clone(agent.Args), func(arg string) bool {
				return arg == "--config=/etc/tandem/config.yaml"
			})
			if len(args) == len(agent.Args)-1 {
				file := filepath.Join(t.TempDir(), "config.yaml")
				data := find[*corev1.ConfigMap](t, name).Data["config.yaml"]
				if err := os.WriteFile(file, []byte(data), 0o600); err != nil {
					t.Fatal(err)
				}
				args = append(args, "--config="+file)
			}
			env := map[string]string{"NODE_NAME": "node-1"}
			lookup := func(key string) (string, bool) { value, ok := env[key]; return value, ok }
			var stderr bytes.Buffer
			if _, err := config.Load(args, lookup, &stderr); err != nil {
				t.Errorf("%v: %v\n%s", args, err, &stderr)
			}
		})
	}
}

func TestControllerAcceptsTheArguments(t *testing.T) {
	t.Parallel()
	for _, name := range cases {
		t.Run(name, func(t *testing.T) {
			container := find[*appsv1.Deployment](t, name).Spec.Template.Spec.Containers[0]
			env := map[string]string{"NAMESPACE": "tandem-system", "POD_NAME": "tandem-controller-5d8b-x2x4z"}
			lookup := func(key string) (string, bool) { value, ok := env[key]; return value, ok }
			var stderr bytes.Buffer
			c, err := config.LoadController(container.Args, lookup, &stderr)
			if err != nil {
				t.Fatalf("%v: %v\n%s", container.Args, err, &stderr)
			}
			// The Lease and the Secret are those that its role lets it write.
			var writable []string
			for _, rule := range find[*rbacv1.Role](t, name).Rules {
				writable = append(writable, rule.ResourceNames...)
			}
			if !slices.Equal(writable, []string{c.LeaseName, c.WebhookName}) {
				t.Errorf("the lease is %s, the secret %s, the role's are %v", c.LeaseName, c.WebhookName, writable)
			}
		})
	}
}

// A new configuration reaches the agents as a file that kubelet replaces under them, which it does for whole volumes only: no pod
// is made anew for it.
func TestConfigChangesNoPod(t *testing.T) {
	t.Parallel()
	render := func(args ...string) string {
		return string(renderWith(t, append([]string{"-f", valuesFile("everything"), "--show-only", "templates/daemonset.yaml"}, args...)...))
	}
	first := render()
	if first != render("--set", "config.flags.plugin.passDeviceSpecs=false") {
		t.Error("another configuration makes other pods")
	}
	if !strings.Contains(first, "--config=/etc/tandem/config.yaml") || strings.Contains(first, "subPath") {
		t.Error("the configuration is not mounted as a directory")
	}
}

// YAML would make of some arguments an object or a comment.
func TestExtraArgsAreTakenAsTheyAre(t *testing.T) {
	t.Parallel()
	const args = `["--a=x: y","--b=1 #2","-v=5"]`
	want := []string{"--a=x: y", "--b=1 #2", "-v=5"}
	set := []string{"extraArgs=" + args, "controller.extraArgs=" + args}
	for what, c := range map[string]corev1.Container{
		"agent":      ask[appsv1.DaemonSet](t, "DaemonSet", "", set...).Spec.Template.Spec.Containers[0],
		"controller": ask[appsv1.Deployment](t, "Deployment", "", set...).Spec.Template.Spec.Containers[0],
	} {
		if got := c.Args[max(0, len(c.Args)-len(want)):]; !slices.Equal(got, want) {
			t.Errorf("%s: the last arguments are %q", what, got)
		}
	}
}

// Helm allows names that YAML takes for numbers.
func TestNamesThatAreNumbers(t *testing.T) {
	t.Parallel()
	out, err := run("template", "2026", "tandem", "--namespace", "2026", "-f", valuesFile("everything"),
		"--set", "fullnameOverride=gpus,nameOverride=0x1",
		"--set-string", "metrics.dashboard.namespace=7", "--set",
		"networkPolicy.create=true,networkPolicy.webhookFrom[0].podSelector.matchLabels.a=b,networkPolicy.metricsFrom[0].podSelector.matchLabels.a=b")
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	decode(t, out)
	for _, bare := range []string{"namespace: 2026\n", "namespace: 7\n", "instance: 2026\n", "kubernetes.io/name: 0x1\n"} {
		if strings.Contains(string(out), bare) {
			t.Errorf("a number where the API wants a string: %s", bare)
		}
	}
	// A release without Services may have a name that no Service could have.
	out, err = run("template", "tandem", "tandem", "--is-upgrade", "-f", valuesFile("default"), "--set", "fullnameOverride=7gpus,webhook.enabled=false")
	if err != nil {
		t.Errorf("an upgrade without Services: %v\n%s", err, out)
	}
}

func TestRejects(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"Split without devices": {[]string{"--set", "config.version=v1", "--set", "config.tandem.mode=Split"}, "config.tandem.devices: is required by mode Split: set which GPUs"},
		"shares with MPS": {[]string{"--set", "config.version=v1", "--set", "config.tandem.devices[0].match.index=0", "--set",
			"config.tandem.devices[0].sharing.strategy=MPS", "--set", "config.tandem.devices[0].sharing.shares=4"}, "sharing.shares: 4 is not allowed: shares are for strategy TimeSlicing"},
		"no repository":         {[]string{"--set", "image.repository="}, "image.repository is not set"},
		"old Kubernetes":        {[]string{"--kube-version", "1.33.9"}, "requires kubeVersion: >=1.34.0-0"},
		"unknown key":           {[]string{"--set", "acces=none"}, "additional properties 'acces' not allowed"},
		"unknown nested key":    {[]string{"--set", "image.name=x"}, "at '/image': additional properties 'name' not allowed"},
		"surge":                 {[]string{"--set", "updateStrategy.maxSurge=1"}, "at '/updateStrategy': additional properties 'maxSurge'"},
		"no node may be down":   {[]string{"--set", "updateStrategy.maxUnavailable=0"}, "at '/updateStrategy/maxUnavailable'"},
		"unknown access":        {[]string{"--set", "access=root"}, "'privileged', 'runtimeClass', 'none'"},
		"relative driver root":  {[]string{"--set", "driverRoot=run/nvidia"}, "at '/driverRoot'"},
		"trailing slash":        {[]string{"--set", "kubeletDir=/var/lib/kubelet/"}, "at '/kubeletDir'"},
		"kubelet dir is root":   {[]string{"--set", "kubeletDir=/"}, "at '/kubeletDir'"},
		"number as string":      {[]string{"--set-string", "metrics.port=8080"}, "at '/metrics/port': got string, want integer"},
		"pull policy":           {[]string{"--set", "image.pullPolicy=never"}, "at '/image/pullPolicy'"},
		"bad resource":          {[]string{"--set", "resourceName=gpu"}, "at '/resourceName'"},
		"bad driver":            {[]string{"--set", "driverName=GPU"}, "at '/driverName'"},
		"configuration version": {[]string{"--set", "config.version=v2"}, "at '/config/version'"},
		"simulated with driver": {[]string{"--set", "simulated.profile=l4x4", "--set", "driverRoot=/x"}, "leave those three at auto"},
		"unknown profile":       {[]string{"--set", "simulated.profile=h100x9"}, "at '/simulated/profile': value must be one of '', 'a100x8', "},
		"default of nothing":    {[]string{"--set", "config.default=a"}, "config.default is a, which has no effect without config.name or config.map"},
		"fallback of nothing":   {[]string{"--set", "config.fallbackStrategies={empty}"}, "config.fallbackStrategies has no effect without"},
		"quota of no class":     {[]string{"--set", "deviceClasses.create=false", "--set", "deviceClasses.countInQuota=true"}, "have no effect without deviceClasses.create"},
		"monitor, no service":   {[]string{"--set", "metrics.serviceMonitor.create=true"}, "needs metrics.service.create"},
		"class without access":  {[]string{"--set", "access=none", "--set", "runtimeClassName=nvidia"}, "set access to runtimeClass"},
		"tag in repository":     {[]string{"--set", "image.repository=localhost:5000/gpu/tandem:1.0"}, "at '/image/repository'"},
		"quota for nothing":     {[]string{"--set", "criticalPodsQuota.create=true", "--set", "priorityClassName="}, "needs priorityClassName"},
		"controller's account":  {[]string{"--set", "controller.serviceAccount.create=false"}, "controller.serviceAccount.name is not set"},
		"webhook's port":        {[]string{"--set", "webhook.port=0"}, "at '/webhook/port'"},
		"unknown of controller": {[]string{"--set", "controller.replica=2"}, "at '/controller': additional properties 'replica'"},
		"daemons' account":      {[]string{"--set", "mps.serviceAccount.create=false"}, "mps.serviceAccount.name is not set"},
		"much shared memory":    {[]string{"--set", "mps.sharedMemory=much"}, "at '/mps/sharedMemory'"},
		"one account for both":  {[]string{"--set", "serviceAccount.create=false,serviceAccount.name=x,controller.serviceAccount.create=false,controller.serviceAccount.name=x"}, "need a service account each, and are given x, x, tandem-mps-daemon"},
		"daemons with rights":   {[]string{"--set", "mps.serviceAccount.name=tandem"}, "need a service account each"},
		"long name":             {[]string{"--set", "fullnameOverride=" + strings.Repeat("x", 50)}, "at most 49 characters are allowed"},
		"long name of a metric": {[]string{"--set", "metrics.service.create=true,fullnameOverride=" + strings.Repeat("x", 45)}, "at most 44 characters are allowed"},
		"long name, upgrade": {[]string{"--is-upgrade", "--set",
			"metrics.service.create=true,fullnameOverride=" + strings.Repeat("x", 45)}, "at most 44 characters are allowed"},
		"name with a dot":   {[]string{"--set", "fullnameOverride=gpu.prod"}, "the name gpu.prod of the release's objects is not allowed"},
		"name with a digit": {[]string{"--set", "fullnameOverride=7gpus"}, "the name 7gpus of the release's objects is not allowed"},
		"name in capitals":  {[]string{"--is-upgrade", "--set", "fullnameOverride=GPU_prod"}, "the name GPU_prod of the release's objects"},
		"agent's account":   {[]string{"--set", "serviceAccount.create=false"}, "serviceAccount.name is not set"},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := run(append([]string{"template", "tandem", "tandem", "-f", valuesFile("default")}, c.args...)...)
			if err == nil {
				t.Fatal("rendered")
			}
			if !strings.Contains(string(out), c.want) {
				t.Errorf("got %s\nwant %s", out, c.want)
			}
		})
	}
}

// The schema has the simulated machines that the image has.
func TestSchemaHasTheProfiles(t *testing.T) {
	t.Parallel()
	var schema struct {
		Properties struct {
			Simulated struct {
				Properties struct{ Profile struct{ Enum []string } }
			}
		}
	}
	text, err := os.ReadFile("tandem/values.schema.json")
	if err == nil {
		err = json.Unmarshal(text, &schema)
	}
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("../../simulated/profiles/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	names := []string{""}
	for _, file := range files {
		names = append(names, strings.TrimSuffix(filepath.Base(file), ".yaml"))
	}
	slices.Sort(names)
	if enum := schema.Properties.Simulated.Properties.Profile.Enum; !slices.Equal(enum, names) {
		t.Errorf("the schema has %q, the image %q", enum, names)
	}
}

// The names of the schema and of values.yaml are the same, so docs/reference/values.md has every value with its default.
func TestSchemaMatchesValues(t *testing.T) {
	t.Parallel()
	var schema struct{ Properties map[string]any }
	var values map[string]any
	decodeFile(t, "tandem/values.schema.json", &schema)
	decodeFile(t, "tandem/values.yaml", &values)
	delete(schema.Properties, "global")
	for name := range schema.Properties {
		if _, ok := values[name]; !ok {
			t.Errorf("%s is in the schema, not in values.yaml", name)
		}
	}
	for name := range values {
		if _, ok := schema.Properties[name]; !ok {
			t.Errorf("%s is in values.yaml, not in the schema", name)
		}
	}
}

// A key without a value in a values file removes the chart's default, and the schema does not see it. Either the chart says so, or what it
// renders works.
func TestKeysWithoutAValue(t *testing.T) {
	t.Parallel()
	var values map[string]any
	decodeFile(t, "tandem/values.yaml", &values)
	without := func(t *testing.T, file string, keys []string) ([]byte, error) {
		t.Helper()
		none := map[string]any{}
		for _, key := range keys {
			at, path := none, strings.Split(key, "/")
			for _, name := range path[:len(path)-1] {
				section, ok := at[name].(map[string]any)
				if !ok {
					section = map[string]any{}
					at[name] = section
				}
				at = section
			}
			at[path[len(path)-1]] = nil
		}
		text, err := json.Marshal(none)
		if err != nil {
			t.Fatal(err)
		}
		blank := filepath.Join(t.TempDir(), "blank.yaml")
		if err := os.WriteFile(blank, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return run("template", "tandem", "tandem", "--namespace", "tandem-system", "-f", file, "-f", blank)
	}
	named := func(out []byte) (keys []string) {
		_, list, _ := strings.Cut(string(out), "the chart needs one: ")
		list, _, _ = strings.Cut(list, ". A key")
		if list == "" {
			return nil
		}
		return strings.Split(strings.ReplaceAll(list, ".", "/"), ", ")
	}
	sections, leaves := keysOf("", values)
	needed := map[string]bool{"image/repository": true} // has its own message
	for _, keys := range [][]string{topmost(sections), leaves, append(deeper(sections), "driverName")} {
		out, err := without(t, valuesFile("default"), keys)
		if err == nil || strings.Contains(string(out), "nil pointer") || len(named(out)) == 0 {
			t.Fatalf("without %v: %v\n%s", keys, err, out)
		}
		for _, key := range named(out) {
			if !slices.Contains(keys, key) {
				t.Errorf("%s is named, and has a value", key)
			}
			needed[key] = true
		}
	}
	var free []string
	for _, key := range append(sections, leaves...) {
		inside := false // of a section that is needed, or in one that is null already
		for other := range needed {
			inside = inside || strings.HasPrefix(other, key+"/")
		}
		if !needed[key] && !inside {
			free = append(free, key)
		}
	}
	out, err := without(t, valuesFile("default"), free)
	if err != nil {
		t.Fatalf("without %v: %v\n%s", free, err, out)
	}
	for _, object := range decode(t, out) {
		env := map[string]string{"NODE_NAME": "node-1", "NAMESPACE": "tandem-system", "POD_NAME": "tandem-controller-5d8b-x2x4z"}
		lookup := func(key string) (string, bool) { value, ok := env[key]; return value, ok }
		var err error
		switch o := object.(type) {
		case *appsv1.DaemonSet:
			_, err = config.Load(o.Spec.Template.Spec.Containers[0].Args, lookup, io.Discard)
		case *appsv1.Deployment:
			_, err = config.LoadController(o.Spec.Template.Spec.Containers[0].Args, lookup, io.Discard)
		}
		if err != nil {
			t.Error(err)
		}
	}
}

// keysOf are the paths of a values file whose default is not null: sections, and others.
func keysOf(above string, values map[string]any) (sections, leaves []string) {
	for name, value := range values {
		switch v := value.(type) {
		case nil:
		case map[string]any:
			inner, more := keysOf(above+name+"/", v)
			sections, leaves = append(append(sections, above+name), inner...), append(leaves, more...)
		default:
			leaves = append(leaves, above+name)
		}
	}
	return sections, slices.DeleteFunc(leaves, func(key string) bool { return strings.Contains(key, "kubernetes.io/") })
}

func topmost(keys []string) []string {
	return slices.DeleteFunc(slices.Clone(keys), func(key string) bool { return strings.Contains(key, "/") })
}

func deeper(keys []string) []string {
	return slices.DeleteFunc(slices.Clone(keys), func(key string) bool { return !strings.Contains(key, "/") })
}

func decodeFile(t *testing.T, path string, into any) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(data, into); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

func valuesFile(name string) string { return filepath.Join("testdata", name+".values.yaml") }

func run(args ...string) ([]byte, error) {
	cmd := exec.Command(helm, args...)
	// Helm reads kubeconfig and plugins from the user's home otherwise.
	cmd.Env = append(os.Environ(), "KUBECONFIG="+os.DevNull, "HELM_PLUGINS="+os.DevNull)
	return cmd.CombinedOutput()
}

func render(t *testing.T, name string) []byte {
	t.Helper()
	return renderWith(t, "-f", valuesFile(name))
}

// rendered is what renderWith renders, by arguments: each once.
var rendered sync.Map

func renderWith(t *testing.T, args ...string) []byte {
	t.Helper()
	base := []string{"template", "tandem", "tandem", "--namespace", "tandem-system", "--kube-version", "1.37.1"}
	rendering, _ := rendered.LoadOrStore(strings.Join(args, "\x00"), sync.OnceValues(func() ([]byte, error) {
		return run(append(base, args...)...)
	}))
	out, err := rendering.(func() ([]byte, error))()
	if err != nil {
		t.Fatalf("helm template %v: %v\n%s", args, err, out)
	}
	return slices.Clone(out)
}

// objects decodes what a case renders, apart from the Prometheus Operator's.
func objects(t *testing.T, name string) []runtime.Object {
	t.Helper()
	return decode(t, render(t, name))
}

func decode(t *testing.T, manifest []byte) []runtime.Object {
	t.Helper()
	types := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{scheme.AddToScheme, apiextensionsv1.AddToScheme} {
		if err := add(types); err != nil {
			t.Fatal(err)
		}
	}
	decoder := serializer.NewCodecFactory(types, serializer.EnableStrict).UniversalDeserializer()
	var found []runtime.Object
	for _, doc := range documents(t, manifest) {
		if len(bytes.TrimSpace(doc)) == 0 || bytes.Contains(doc, []byte("monitoring.coreos.com")) || bytes.Contains(doc, []byte("security.openshift.io")) {
			continue
		}
		object, _, err := decoder.Decode(doc, nil, nil)
		if err != nil {
			t.Fatalf("%v in\n%s", err, doc)
		}
		found = append(found, object)
	}
	return found
}

func documents(t *testing.T, manifest []byte) (documents [][]byte) {
	t.Helper()
	for r := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(manifest))); ; {
		doc, err := r.Read()
		if err == io.EOF {
			return documents
		}
		if err != nil {
			t.Fatal(err)
		}
		documents = append(documents, doc)
	}
}

// find is the first object of a kind; findNamed the one whose name ends so.
func find[T runtime.Object](t *testing.T, name string) T {
	t.Helper()
	return findNamed[T](t, name, "")
}

func findNamed[T runtime.Object](t *testing.T, name, suffix string) T {
	t.Helper()
	for _, o := range objects(t, name) {
		if found, ok := o.(T); ok {
			if m, err := meta.Accessor(o); err == nil && strings.HasSuffix(m.GetName(), suffix) {
				return found
			}
		}
	}
	var none T
	t.Fatalf("%s renders no %T %s", name, none, suffix)
	return none
}

func daemonSet(t *testing.T, name string) *appsv1.DaemonSet {
	t.Helper()
	return find[*appsv1.DaemonSet](t, name)
}

func variables(c corev1.Container) map[string]string {
	env := map[string]string{}
	for _, e := range c.Env {
		env[e.Name] = e.Value
	}
	return env
}

func mountsHost(pod corev1.PodSpec, path string) bool {
	for _, v := range pod.Volumes {
		if v.HostPath != nil && v.HostPath.Path == path {
			return true
		}
	}
	return false
}

// NVIDIA's tests remove the affinity of the agents by an empty string.
func TestAffinityIsRemoved(t *testing.T) {
	t.Parallel()
	affinity := func(more ...string) *corev1.Affinity {
		t.Helper()
		const given = "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0]"
		args := append([]string{"-f", valuesFile("default"), "--set", given + ".key=gpu," + given + ".operator=Exists"}, more...)
		for _, o := range decode(t, renderWith(t, args...)) {
			if set, ok := o.(*appsv1.DaemonSet); ok {
				return set.Spec.Template.Spec.Affinity
			}
		}
		t.Fatal("no DaemonSet")
		return nil
	}
	if affinity() == nil {
		t.Error("an affinity is not used")
	}
	if a := affinity("--set", "affinity="); a != nil {
		t.Errorf("the agents have %v", a)
	}
}
