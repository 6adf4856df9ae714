// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/tandem-gpu/tandem/hack/install"
)

const agentLabel = "app.kubernetes.io/component=kubelet-plugin"

// agentPod is the agent's pod on a node.
func (s *story) agentPod(nodeName string) corev1.Pod {
	s.Helper()
	pods, err := s.agentPods(nodeName)
	if err != nil {
		s.Fatal(err)
	}
	if len(pods) != 1 {
		s.Fatalf("%d pods of the agent on %s", len(pods), nodeName)
	}
	return pods[0]
}

// agentPods are all pods of the agent on a node, also those that end.
func (s *story) agentPods(nodeName string) ([]corev1.Pod, error) {
	list, err := theClient.CoreV1().Pods(install.Namespace).List(s.ctx, metav1.ListOptions{LabelSelector: agentLabel, FieldSelector: "spec.nodeName=" + nodeName})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// as is a client with a token of the agent's account; bound is the pod that the token is bound to, or nil.
func (s *story) as(account string, bound *corev1.Pod) kubernetes.Interface {
	s.Helper()
	request := &authenticationv1.TokenRequest{}
	if bound != nil {
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: bound.Name, UID: bound.UID}
	}
	answer, err := theClient.CoreV1().ServiceAccounts(install.Namespace).CreateToken(s.ctx, account, request, metav1.CreateOptions{})
	if err != nil {
		s.Fatal(err)
	}
	admin, err := theCluster.RESTConfig()
	if err != nil {
		s.Fatal(err)
	}
	config := rest.AnonymousClientConfig(admin)
	config.BearerToken = answer.Status.Token
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		s.Fatal(err)
	}
	return client
}

// sliceOf is one slice of a node.
func (s *story) sliceOf(nodeName string) *resourceapi.ResourceSlice {
	s.Helper()
	list, err := theClient.ResourceV1().ResourceSlices().List(s.ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + nodeName})
	if err != nil {
		s.Fatal(err)
	}
	if len(list.Items) == 0 {
		s.Fatalf("no slice of %s", nodeName)
	}
	return &list.Items[0]
}

// TestStolenToken: a process with the token of a node's agent can write that node's slices and read what the agent reads, and
// nothing else. Nothing of what it tries here is stored: requests that the API server would allow are dry runs.
func TestStolenToken(t *testing.T) {
	s := begin(t)
	pod := s.agentPod(gpuNode)
	account := pod.Spec.ServiceAccountName
	stolen := s.as(account, &pod)
	own, other := s.sliceOf(gpuNode), s.sliceOf(numaNode)
	const notYours = "the agent on node '" + gpuNode + "' may write ResourceSlices of that node only"
	otherDriver, otherPool, allNodes := own.DeepCopy(), own.DeepCopy(), own.DeepCopy()
	otherDriver.Spec.Driver = "gpu.example.com"
	otherPool.Spec.Pool.Name = numaNode
	everywhere := true
	allNodes.Spec.NodeName, allNodes.Spec.AllNodes = nil, &everywhere

	slicesOf := func(client kubernetes.Interface) writes { return writes{s, client} }
	for name, c := range map[string]struct {
		err  error
		want string // "" for allowed
	}{
		"update own":          {slicesOf(stolen).update(own), ""},
		"create own":          {slicesOf(stolen).create(own), ""},
		"delete own":          {slicesOf(stolen).remove(own), ""},
		"update another's":    {slicesOf(stolen).update(other), notYours},
		"create another's":    {slicesOf(stolen).create(other), notYours},
		"delete another's":    {slicesOf(stolen).remove(other), notYours},
		"for all nodes":       {slicesOf(stolen).create(allNodes), notYours},
		"of another driver":   {slicesOf(stolen).create(otherDriver), "of the driver " + install.DriverName + " only"},
		"in another's pool":   {slicesOf(stolen).create(otherPool), "may write pools named '" + gpuNode + "'"},
		"token bound to none": {slicesOf(s.as(account, nil)).update(own), "bound to its pod"},
	} {
		switch {
		case c.want == "" && c.err != nil:
			t.Errorf("%s: %v", name, c.err)
		case c.want != "" && (!apierrors.IsForbidden(c.err) || !strings.Contains(c.err.Error(), c.want)):
			t.Errorf("%s: %v, which should be forbidden and say %q", name, c.err, c.want)
		}
	}
	s.forbidden(stolen)
}

// writes to slices that are never stored.
type writes struct {
	*story
	client kubernetes.Interface
}

var dryRun = []string{metav1.DryRunAll}

func (w writes) create(slice *resourceapi.ResourceSlice) error {
	fresh := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{GenerateName: "stolen-"}, Spec: slice.Spec}
	_, err := w.client.ResourceV1().ResourceSlices().Create(w.ctx, fresh, metav1.CreateOptions{DryRun: dryRun})
	return err
}

func (w writes) update(slice *resourceapi.ResourceSlice) error {
	_, err := w.client.ResourceV1().ResourceSlices().Patch(w.ctx, slice.Name, types.MergePatchType, []byte(`{"metadata":{"labels":{"stolen":"true"}}}`), metav1.PatchOptions{DryRun: dryRun})
	return err
}

func (w writes) remove(slice *resourceapi.ResourceSlice) error {
	return w.client.ResourceV1().ResourceSlices().Delete(w.ctx, slice.Name, metav1.DeleteOptions{DryRun: dryRun})
}

// forbidden tries what an agent has no business with.
func (s *story) forbidden(client kubernetes.Interface) {
	s.Helper()
	list, dry := metav1.ListOptions{}, metav1.PatchOptions{DryRun: dryRun}
	patch := []byte(`{"metadata":{"labels":{"stolen":"true"}}}`)
	s.manifest(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: not-allocated}
spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]}}
`)
	for name, err := range map[string]error{
		"list secrets": func() error { _, err := client.CoreV1().Secrets("").List(s.ctx, list); return err }(),
		"list secrets of its namespace": func() error {
			_, err := client.CoreV1().Secrets(install.Namespace).List(s.ctx, list)
			return err
		}(),
		"list configmaps":       func() error { _, err := client.CoreV1().ConfigMaps("").List(s.ctx, list); return err }(),
		"list service accounts": func() error { _, err := client.CoreV1().ServiceAccounts("").List(s.ctx, list); return err }(),
		"list claims":           func() error { _, err := client.ResourceV1().ResourceClaims("").List(s.ctx, list); return err }(),
		"list roles":            func() error { _, err := client.RbacV1().ClusterRoles().List(s.ctx, list); return err }(),
		"list device classes":   func() error { _, err := client.ResourceV1().DeviceClasses().List(s.ctx, list); return err }(),
		"patch its node": func() error {
			_, err := client.CoreV1().Nodes().Patch(s.ctx, gpuNode, types.MergePatchType, patch, dry)
			return err
		}(),
		"patch its node's state": func() error {
			_, err := client.CoreV1().Nodes().Patch(s.ctx, gpuNode, types.MergePatchType, patch, dry, "status")
			return err
		}(),
		"create a pod": func() error {
			_, err := client.CoreV1().Pods(install.Namespace).Create(s.ctx, &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Name: "stolen"},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
			}, metav1.CreateOptions{DryRun: dryRun})
			return err
		}(),
		"delete pods": client.CoreV1().Pods(install.Namespace).Delete(s.ctx, s.agentPod(numaNode).Name, metav1.DeleteOptions{DryRun: dryRun}),
		"write a claim's status": func() error {
			_, err := client.ResourceV1().ResourceClaims(s.namespace).UpdateStatus(s.ctx, s.claim("not-allocated"), metav1.UpdateOptions{DryRun: dryRun})
			return err
		}(),
		"write a claim": func() error {
			_, err := client.ResourceV1().ResourceClaims(s.namespace).Update(s.ctx, s.claim("not-allocated"), metav1.UpdateOptions{DryRun: dryRun})
			return err
		}(),
		"make a token": func() error {
			_, err := client.CoreV1().ServiceAccounts(install.Namespace).CreateToken(s.ctx, "default", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
			return err
		}(),
	} {
		if !apierrors.IsForbidden(err) {
			s.Errorf("%s is not forbidden: %v", name, err)
		}
	}
}

// TestAgentIsConfined: what the kernel says of the agent's process on a node without real GPUs, where it needs no privilege.
func TestAgentIsConfined(t *testing.T) {
	s := begin(t)
	pid := strings.TrimSpace(s.on(node(), "pgrep", "-x", "kubelet-plugin"))
	status := s.on(node(), "cat", "/proc/"+pid+"/status")
	for field, want := range map[string]string{
		"CapInh": "0000000000000000", "CapPrm": "0000000000000000", "CapEff": "0000000000000000", "CapBnd": "0000000000000000",
		"NoNewPrivs": "1",
		"Seccomp":    "2", // a filter
	} {
		if !strings.Contains(status, field+":\t"+want+"\n") {
			t.Errorf("%s is not %s:\n%s", field, want, status)
		}
	}
	for _, namespace := range []string{"net", "pid", "ipc", "mnt"} {
		own, host := s.on(node(), "readlink", "/proc/"+pid+"/ns/"+namespace), s.on(node(), "readlink", "/proc/1/ns/"+namespace)
		if own == host {
			t.Errorf("the agent is in the node's %s namespace", namespace)
		}
	}
	// What it may write to, of the node's files: its own, and the directories in which it meets kubelet and the runtime.
	may := []string{
		"/run/tandem", "/var/run/cdi", "/var/lib/kubelet/plugins/gpu.nvidia.com", "/var/lib/kubelet/plugins_registry",
		"/var/lib/kubelet/device-plugins", "/dev/", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/var/termination-log", "/proc", "/dev",
		"/sys/fs/cgroup", // the container's own
		// What stands for the partitions that are in the GPUs themselves. The rest of the simulated machine stays read-only, and
		// with real GPUs nothing is mounted here.
		simulatedMachine + "/mig",
	}
	for line := range strings.Lines(s.on(node(), "cat", "/proc/"+pid+"/mounts")) {
		fields := strings.Fields(line)
		at, options := fields[1], strings.Split(fields[3], ",")
		if slices.Contains(options, "ro") || slices.ContainsFunc(may, func(path string) bool {
			return at == path || strings.HasSuffix(path, "/") && strings.HasPrefix(at, path)
		}) {
			continue
		}
		// Volumes of other pods are there, under a mount that hides them.
		if strings.HasPrefix(at, "/var/lib/kubelet/pods/") {
			if names := s.on(node(), "ls", "-A", "/proc/"+pid+"/root/var/lib/kubelet/pods"); names != "" {
				t.Errorf("the agent sees the volumes of pods: %s", names)
			}
			continue
		}
		// Masked parts of /proc are not the node's files.
		if fields[2] != "proc" && !strings.HasPrefix(at, "/proc/") && !strings.HasPrefix(at, "/node/proc/") {
			t.Errorf("the agent may write to %s: %s", at, line)
		}
	}
}

// TestHostIsHidden: with the chart's mounts for driverRoot auto, a container sees the host's driver, and neither kubelet's files nor
// the host's processes, also of pods that start later. That holds for an agent without SYS_ADMIN, which the pod here does not have either:
// with it, the agent could unmount what hides them. The simulated machine needs no such mounts, so a pod has them here.
func TestHostIsHidden(t *testing.T) {
	s := begin(t)
	s.manifest(`
apiVersion: v1
kind: Pod
metadata: {name: sees-host}
spec:
  nodeName: ` + gpuNode + `
  terminationGracePeriodSeconds: 1
  containers:
  - name: c
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [sleep, infinity]
    securityContext: {readOnlyRootFilesystem: true}
    volumeMounts:
    - {name: host, mountPath: /host, readOnly: true, mountPropagation: HostToContainer}
    - {name: nothing, mountPath: /host/var/lib/kubelet, readOnly: true}
    - {name: nothing, mountPath: /host/proc, readOnly: true}
  volumes:
  - {name: host, hostPath: {path: /, type: Directory}}
  - {name: nothing, emptyDir: {}}
`)
	s.running(soon, 1, 0)
	s.manifest(`
apiVersion: v1
kind: Secret
metadata: {name: secret}
stringData: {key: value}
---
apiVersion: v1
kind: Pod
metadata: {name: later}
spec:
  nodeName: ` + gpuNode + `
  terminationGracePeriodSeconds: 1
  containers:
  - {name: c, image: "docker.io/library/busybox:1.37", imagePullPolicy: Never, command: [sleep, infinity], volumeMounts: [{name: v, mountPath: /v}]}
  volumes: [{name: v, secret: {secretName: secret}}]
`)
	s.running(soon, 2, 0)
	if seen := s.kubectl("exec", "-n", s.namespace, "sees-host", "--", "ls", "/host"); !strings.Contains(seen, "usr") {
		t.Errorf("the host's root has %q", seen)
	}
	if seen := s.kubectl("exec", "-n", s.namespace, "sees-host", "--", "ls", "-A", "/host/var/lib/kubelet", "/host/proc"); strings.TrimSpace(seen) != "/host/proc:\n\n/host/var/lib/kubelet:" {
		t.Errorf("of kubelet and of processes there is %q", seen)
	}
}
