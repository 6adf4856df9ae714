// SPDX-License-Identifier: Apache-2.0

package helm_test

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/internal/config"
)

// platform is what the agent's pod of a platform has; empty fields are the chart's defaults.
type platform struct {
	kubeletDir, driverRoot string
	// selector is in the nodeSelector, required in the node affinity: "key=value", and "key operator values".
	selector, required string
	webhookPort        string
	quota              bool
}

var platforms = map[string]platform{
	"gke":          {driverRoot: "/home/kubernetes/bin/nvidia", required: "cloud.google.com/gke-accelerator Exists []", webhookPort: "10250", quota: true},
	"eks":          {required: "eks.amazonaws.com/compute-type NotIn [fargate auto]"},
	"aks":          {selector: "kubernetes.azure.com/accelerator=nvidia"},
	"openshift":    {selector: "feature.node.kubernetes.io/pci-10de.present=true"},
	"talos":        {},
	"k0s":          {kubeletDir: "/var/lib/k0s/kubelet"},
	"microk8s":     {kubeletDir: "/var/snap/microk8s/common/var/lib/kubelet"},
	"rke2-k3s":     {},
	"gpu-operator": {selector: "nvidia.com/gpu.present=true"},
}

// platformFiles is a directory of the chart, so that each package of it has the files.
const platformFiles = "tandem/platforms"

// platformValues are the files that docs/user/platforms describes.
func platformValues(name string) []string {
	return []string{"-f", filepath.Join(platformFiles, name+".yaml"), "--set", "image.repository=registry.example.com/gpu/tandem"}
}

func platformAgents(t *testing.T, name string) (set appsv1.DaemonSet) {
	t.Helper()
	if err := yaml.UnmarshalStrict(renderWith(t, append(platformValues(name), "-s", "templates/daemonset.yaml")...), &set); err != nil {
		t.Fatal(err)
	}
	return set
}

// TestPackageHasPlatforms: who installs a release has no checkout.
func TestPackageHasPlatforms(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if out, err := run("package", "tandem", "--destination", dir); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	archives, err := filepath.Glob(filepath.Join(dir, "*.tgz"))
	if err != nil || len(archives) != 1 {
		t.Fatalf("archives %v: %v", archives, err)
	}
	listed, err := exec.Command("tar", "-tzf", archives[0]).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, listed)
	}
	for name := range platforms {
		if file := filepath.Join(platformFiles, name+".yaml") + "\n"; !strings.Contains(string(listed), file) {
			t.Errorf("the package lacks %s", file)
		}
	}
}

func TestPlatforms(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(platformFiles + "/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if name := strings.TrimSuffix(filepath.Base(file), ".yaml"); !slices.Contains(slices.Collect(maps.Keys(platforms)), name) {
			t.Errorf("%s is not tested", file)
		}
	}
	for name, want := range platforms {
		t.Run(name, func(t *testing.T) {
			if out, err := run(append([]string{"lint", "--strict", "tandem"}, platformValues(name)...)...); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
			pod := platformAgents(t, name).Spec.Template.Spec
			agent := pod.Containers[0]
			var stderr bytes.Buffer
			c, err := config.Load(agent.Args, func(key string) (string, bool) { return "node-1", key == "NODE_NAME" }, &stderr)
			if err != nil {
				t.Fatalf("%v\n%s", err, &stderr)
			}
			if c.KubeletDir != cmp.Or(want.kubeletDir, "/var/lib/kubelet") || c.DriverRoot != cmp.Or(want.driverRoot, "auto") || c.CDIDir != "/var/run/cdi" {
				t.Errorf("kubelet in %s, driver in %s, CDI specs in %s", c.KubeletDir, c.DriverRoot, c.CDIDir)
			}
			for _, dir := range []string{c.KubeletDir, c.KubeletDir + "/plugins_registry", c.KubeletDir + "/device-plugins", c.CDIDir} {
				if !mountsHost(pod, dir) {
					t.Errorf("%s of the host is not mounted", dir)
				}
			}
			if mountsHost(pod, "/") != (want.driverRoot == "") || want.driverRoot != "" && !mountsHost(pod, want.driverRoot) {
				t.Errorf("the driver's root is not what is mounted")
			}
			if !*agent.SecurityContext.Privileged || !slices.Contains(pod.Tolerations, corev1.Toleration{Operator: corev1.TolerationOpExists}) {
				t.Errorf("not privileged, or only with tolerations %v", pod.Tolerations)
			}
			if want.selector == "" {
				want.selector = "kubernetes.io/os=linux"
			}
			if key, value, _ := strings.Cut(want.selector, "="); pod.NodeSelector[key] != value {
				t.Errorf("nodeSelector %v", pod.NodeSelector)
			}
			required := ""
			if pod.Affinity != nil {
				r := pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchExpressions[0]
				required = fmt.Sprint(r.Key, " ", r.Operator, " ", r.Values)
			}
			if required != want.required {
				t.Errorf("node affinity %q, want %q", required, want.required)
			}
			text := string(renderWith(t, platformValues(name)...))
			if strings.Contains(text, "kind: ResourceQuota") != want.quota {
				t.Error("the quota for critical pods")
			}
			if port := "containerPort: " + cmp.Or(want.webhookPort, "9443"); !strings.Contains(text, port) {
				t.Errorf("the webhook has no %s", port)
			}
			if !strings.Contains(string(renderWith(t, append(platformValues(name), "--api-versions", "security.openshift.io/v1")...)), "kind: SecurityContextConstraints") {
				t.Error("no SecurityContextConstraints where OpenShift's API is served")
			}
		})
	}
}

// TestAgentsOutliveAPause: GPU Operator's managers change the nodeSelector labels of their components, and wait up to five minutes for the end
// of pods with their app labels (NVIDIA/mig-parted 0d08f4f0026e, pkg/mig/reconfigure/reconfigure.go, waitForPodsToBeDeleted;
// NVIDIA/k8s-driver-manager 0c04c81075d6, cmd/driver-manager/main.go, waitForPodsToTerminate and WaitForPodsWithNodeSelector). The agents must
// neither end then nor be waited for.
func TestAgentsOutliveAPause(t *testing.T) {
	t.Parallel()
	for name := range platforms {
		template := platformAgents(t, name).Spec.Template
		if app, has := template.Labels["app"]; has {
			t.Errorf("%s: the agents have the label app=%s", name, app)
		}
		for key := range template.Spec.NodeSelector {
			if strings.HasPrefix(key, "nvidia.com/gpu.deploy.") {
				t.Errorf("%s: the agents have the nodeSelector %s", name, key)
			}
		}
	}
}

// TestDriverContainersRoot: a pod that mounts the root of a driver container keeps the old driver's after an upgrade.
func TestDriverContainersRoot(t *testing.T) {
	t.Parallel()
	var set appsv1.DaemonSet
	args := append(platformValues("gpu-operator"), "--set", "driverRoot=/run/nvidia/driver", "-s", "templates/daemonset.yaml")
	if err := yaml.UnmarshalStrict(renderWith(t, args...), &set); err != nil {
		t.Fatal(err)
	}
	pod := set.Spec.Template.Spec
	if mountsHost(pod, "/run/nvidia/driver") || !mountsHost(pod, "/run/nvidia") {
		t.Error("the driver container's root is mounted itself")
	}
	i := slices.IndexFunc(pod.Containers[0].VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == "/host/run/nvidia" })
	if i < 0 {
		t.Fatal("nothing is mounted at /host/run/nvidia")
	}
	if p := pod.Containers[0].VolumeMounts[i].MountPropagation; p == nil || *p != corev1.MountPropagationHostToContainer {
		t.Errorf("mount propagation %v", p)
	}
	if !slices.Contains(pod.Containers[0].Args, "--driver-root=/run/nvidia/driver") {
		t.Errorf("arguments %q", pod.Containers[0].Args)
	}
}
