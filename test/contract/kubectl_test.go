// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/browser"
	"github.com/tandem-gpu/tandem/cli/overview"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/manifests"
	"github.com/tandem-gpu/tandem/test/oracle"
	"github.com/tandem-gpu/tandem/test/stories"
)

// TestKubectlGPU: on a node that both APIs have filled, the plugin's list is kubelet's own, it says why a pod waits, and draws the node. A
// user with few rights learns which are missing, and no names of other namespaces.
func TestKubectlGPU(t *testing.T) {
	s := begin(t)
	plugin := s.BuildPlugin()
	gpu := func(args ...string) string {
		t.Helper()
		out, err := s.KubectlGPU(plugin, args...)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	s.Example("more-than-gpus.yaml")
	s.Running(soon, gpusANode, 2)
	s.Unschedulable(2) // and none waits for its eviction, because its claim got a GPU that another pod has

	s.Await(soon, "ls to list what kubelet has given to pods", func() error {
		want, err := oracle.Granted(s.Ctx, node())
		if err != nil {
			return err
		}
		for pod, devices := range want {
			if len(devices) == 0 {
				delete(want, pod)
			}
		}
		if diff := cmp.Diff(want, s.listed(gpu("ls", gpuNode, "-o", "json"))); diff != "" || len(want) != gpusANode {
			return fmt.Errorf("kubelet has given devices to %d pods (-kubelet +ls):\n%s", len(want), diff)
		}
		return nil
	})
	table := gpu("ls")
	t.Log("\n" + table)
	if n := strings.Count(table, "("); n != gpusANode || !strings.Contains(table, numaNode) {
		t.Errorf("ls has %d holders", n)
	}

	var waits corev1.Pod
	for _, pod := range s.Pods() {
		if pod.Status.Phase == corev1.PodPending && pod.Spec.NodeName == "" {
			waits = pod
		}
	}
	why := gpu("why", waits.Name, "-n", s.Namespace)
	t.Log("\n" + why)
	for _, words := range []string{
		"Pod " + s.Namespace + "/" + waits.Name + " waits: all 8 GPUs of " + gpuNode + " are held", gpuNode + ": is full: 0 of 8",
		"The scheduler says", numaNode + ": cannot run it: the pod does not tolerate its taint " + stories.NUMAKey + "=true:NoSchedule", "once its holder has ended",
	} {
		if !strings.Contains(why, words) {
			t.Errorf("why has no %q", words)
		}
	}
	if n := strings.Count(why, "  "+s.Namespace+"/"); n != gpusANode {
		t.Errorf("why names %d holders", n)
	}
	i := slices.IndexFunc(s.Pods(), func(p corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning })
	if running := gpu("why", s.Pods()[i].Name, "-n", s.Namespace); !strings.Contains(running, "runs on "+gpuNode+" with gpu-") {
		t.Errorf("why of a pod that runs:\n%s", running)
	}
	picture := gpu("node", gpuNode)
	t.Log("\n" + picture)
	for _, words := range []string{"NUMA node 0", "NUMA node 1", "NVLink A: gpu-0", "gpu-7  NVIDIA H100", "* Claim", "* Pod"} {
		if !strings.Contains(picture, words) {
			t.Errorf("node has no %q", words)
		}
	}
	s.pluginWithFewRights(plugin, waits.Name)
	s.page(plugin, waits.Name)
}

// page serves the page as an administrator and as a user with few rights: it has what ls and why print, a browser shows the same, names of
// other namespaces are not in it, and it follows a change.
func (s *story) page(plugin, waits string) {
	s.Helper()
	address := s.serveUI(plugin)
	want, err := s.KubectlGPU(plugin, "ls", "-o", "json")
	if err != nil {
		s.Fatal(err)
	}
	var o overview.Overview
	if err := json.Unmarshal([]byte(want), &o); err != nil {
		s.Fatalf("decode the list: %v", err)
	}
	var devices []string
	for _, n := range o.Nodes {
		for _, d := range n.Devices {
			devices = append(devices, fmt.Sprint(d.Name, d.State, len(d.Holders) > 0))
		}
	}
	full := regexp.MustCompile("^(all 8 GPUs of |no node that may run it has |no node has 1 |0/2 nodes are available)")
	listed := func(page string) error {
		var got []string
		for _, row := range browser.Devices(page) {
			got = append(got, fmt.Sprint(row[0], row[2], row[4] != ""))
		}
		if diff := cmp.Diff(devices, got); diff != "" || strings.Count(page, s.Namespace+"/") < gpusANode {
			return fmt.Errorf("the page differs from ls (-ls +page):\n%s\n%s", diff, page)
		}
		owners, n := browser.Waiting(page)
		for _, o := range owners {
			if !strings.HasPrefix(o.Name, "Deployment "+s.Namespace+"/more-") || !full.MatchString(o.Reason) {
				return fmt.Errorf("%+v in\n%s", o, page)
			}
		}
		if n != 2 {
			return fmt.Errorf("%d pods wait:\n%s", n, page)
		}
		return nil
	}
	s.Await(soon, "the page to be that of ls", func() error { return listed(s.read(address)) })
	s.browsed(address, listed)
	answer := s.read(address + "why?namespace=" + s.Namespace + "&pod=" + waits)
	if words := "all 8 GPUs of " + gpuNode + " are held"; !strings.Contains(answer, words) {
		s.Errorf("no %q in the answer of why:\n%s", words, answer)
	}

	guest := s.serveUI(plugin, "--as=system:serviceaccount:"+s.Namespace+":guest")
	s.Await(soon, "a page without names", func() error {
		page := s.read(guest)
		if n := strings.Count(page, "<td>another namespace ("); n != gpusANode || strings.Contains(page, s.Namespace+"/") {
			return fmt.Errorf("%d holders without a name:\n%s", n, page)
		}
		return nil
	})

	s.Kubectl("scale", "deployment", "-n", s.Namespace, "more-claims", "--replicas=4")
	s.Await(soon, "the page to follow", func() error {
		if _, n := browser.Waiting(s.read(address)); n != 1 {
			return fmt.Errorf("%d pods wait", n)
		}
		return nil
	})
}

// serveUI runs kubectl gpu ui until the story ends, and returns the page's address.
func (s *story) serveUI(plugin string, flags ...string) (address string) {
	s.Helper()
	cmd, err := theCluster.Command(s.Ctx, "sh", append([]string{"-c", `PATH="$0:$PATH" exec kubectl gpu ui "$@"`, filepath.Dir(plugin)}, flags...)...)
	if err != nil {
		s.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		s.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() {
		if err := errors.Join(cmd.Process.Signal(os.Interrupt), cmd.Wait()); err != nil {
			s.Errorf("kubectl gpu ui: %v", err)
		}
	})
	address, err = bufio.NewReader(out).ReadString('\n')
	if err != nil {
		s.Fatalf("kubectl gpu ui prints no address: %v", err)
	}
	return strings.TrimSpace(address)
}

// read returns a page as the server sends it.
func (s *story) read(address string) string {
	s.Helper()
	cmd, err := theCluster.Command(s.Ctx, "busybox", "wget", "-q", "-O", "-", address)
	if err != nil {
		s.Fatal(err)
	}
	page, err := cmd.Output()
	if err != nil {
		s.Fatalf("read the page: %v", err)
	}
	return string(page)
}

// browsed checks the document that a browser has of a page.
func (s *story) browsed(address string, check func(page string) error) {
	s.Helper()
	if err := browser.Find(); err != nil {
		s.Log("the page is not opened in a browser:", err)
		return
	}
	cmd, err := theCluster.Command(s.Ctx, browser.Program, browser.Args(s.TempDir(), "--dump-dom", address)...)
	if err != nil {
		s.Fatal(err)
	}
	var complaints strings.Builder
	cmd.Stderr = &complaints
	document, err := cmd.Output()
	if err != nil {
		s.Fatalf("open the page in a browser: %v\n%s", err, &complaints)
	}
	if err := check(string(document)); err != nil {
		s.Error(err)
	}
	for _, complaint := range browser.Complaints(complaints.String()) {
		s.Error(complaint)
	}
}

// pluginWithFewRights runs the plugin as users of the namespace.
func (s *story) pluginWithFewRights(plugin, waits string) {
	s.Helper()
	as := "--as=system:serviceaccount:" + s.Namespace + ":"
	s.Manifest(`
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: viewer}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: view}
subjects: [{kind: ServiceAccount, name: viewer, namespace: ` + s.Namespace + `}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: one}
rules: [{apiGroups: [""], resources: [pods], verbs: [get]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: one}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: one}
subjects: [{kind: ServiceAccount, name: guest, namespace: ` + s.Namespace + `}]
`)
	s.guestMay(readGPUNodes, `{apiGroups: [""], resources: [nodes], verbs: [get, list]}`,
		`{apiGroups: [resource.k8s.io], resources: [resourceslices, deviceclasses, resourceclaims], verbs: [get, list]}`)
	if out, err := s.KubectlGPU(plugin, "ls", as+"viewer"); err == nil || !strings.Contains(err.Error(), "resources: [gpunodes]") {
		s.Errorf("ls of a user without the right to list GPUNodes: %v\n%s", err, out)
	}
	out, err := s.KubectlGPU(plugin, "why", waits, "-n", s.Namespace, as+"viewer")
	if err != nil || !strings.Contains(out, "What you may not read") || !strings.Contains(out, "The scheduler says") {
		s.Errorf("why of a user who may view the namespace: %v\n%s", err, out)
	}
	// A new rule takes a moment to be known to the API server.
	s.Await(soon, "an answer without names", func() error {
		out, err := s.KubectlGPU(plugin, "why", waits, "-n", s.Namespace, as+"guest")
		if err != nil {
			return err
		}
		if n := strings.Count(out, "another namespace ("); n != gpusANode || strings.Count(out, "  "+s.Namespace+"/") > 0 {
			return fmt.Errorf("%d holders without a name:\n%s", n, out)
		}
		return nil
	})
}

// readGPUNodes is the rule by which a user may read GPUNodes.
const readGPUNodes = `{apiGroups: [tandem-gpu.dev], resources: [gpunodes], verbs: [get, list, watch]}`

// guestMay gives the account guest of the story's namespace these rules in the whole cluster.
func (s *story) guestMay(rules ...string) {
	s.Helper()
	s.Undo(func() error {
		_, err := theCluster.Kubectl(s.Ctx, "delete", "--ignore-not-found", "clusterrole,clusterrolebinding", s.Namespace)
		return err
	})
	s.Manifest(`
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: ` + s.Namespace + `}
rules: [` + strings.Join(rules, ", ") + `]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: ` + s.Namespace + `}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: ` + s.Namespace + `}
subjects: [{kind: ServiceAccount, name: guest, namespace: ` + s.Namespace + `}]
`)
}

// listed returns what the plugin lists for pods, as oracle.Granted does: limits by UUID, claims by the names of their devices.
func (s *story) listed(text string) map[string][]string {
	s.Helper()
	var o overview.Overview
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		s.Fatalf("decode the list: %v", err)
	}
	pods := map[string][]string{}
	for _, n := range o.Nodes {
		for _, d := range n.Devices {
			for _, h := range d.Holders {
				id := d.UUID
				if h.Claim != nil {
					id = d.Name
				}
				for _, p := range h.Pods {
					pods[p.Namespace+"/"+p.Name] = append(pods[p.Namespace+"/"+p.Name], id)
				}
			}
		}
	}
	for _, ids := range pods {
		slices.Sort(ids)
	}
	return pods
}

// TestDoctor: doctor finds nothing on a cluster as the chart made it, and names what is broken afterwards.
func TestDoctor(t *testing.T) {
	s := begin(t)
	s.Kubectl("delete", "events", "-n", "default", "--all") // what agents reported in earlier stories
	plugin := s.BuildPlugin()
	nothing := func() error {
		out, err := s.KubectlGPU(plugin, "doctor")
		if err == nil && !strings.HasPrefix(out, "no problem found: Kubernetes v1.") {
			err = errors.New(out)
		}
		return err
	}
	s.Await(soon, "doctor to find nothing", nothing)

	const policy = "tandem-gpunode-status"
	startControllers := s.WithoutControllers()
	binding := s.Kubectl("get", "validatingadmissionpolicybinding", policy, "-o", "yaml")
	bind := s.Undo(func() error { return s.Apply(binding) })
	s.Kubectl("delete", "validatingadmissionpolicybinding", policy)
	want := []string{
		"error deployment tandem-system/tandem-controller", "warning validatingadmissionpolicy " + policy, "warning validatingwebhookconfiguration tandem-webhook",
	}
	s.Await(soon, "doctor to name what is broken", func() error {
		out, err := s.KubectlGPU(plugin, "doctor", "-o", "json")
		if err == nil || !strings.Contains(err.Error(), "the installation has errors") {
			return fmt.Errorf("exit status: %w, %s", err, out)
		}
		var found struct {
			Findings []struct{ Severity, Object, Action string }
		}
		if err := json.Unmarshal([]byte(out), &found); err != nil {
			return err
		}
		var got []string
		for _, f := range found.Findings {
			if f.Action != "" {
				got = append(got, f.Severity+" "+f.Object)
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			return fmt.Errorf("it found %q", got)
		}
		return nil
	})
	bind()
	startControllers()
	s.Await(soon, "doctor to find nothing again", nothing)
}

// TestUnservedNode: while a node gives no GPU to new pods, by another driver, a pause, or an agent that has ended or died, each view says so, and none
// calls its GPUs free.
func TestUnservedNode(t *testing.T) {
	s := begin(t)
	plugin := s.BuildPlugin()
	s.Manifest(manifests.SingleTemplate + manifests.Pod("limit", "infer"))
	s.Running(soon, 1, 0)
	says := func(words string) {
		t.Helper()
		s.Await(soon, "each view to say "+words, func() error {
			for _, command := range []string{"ls " + gpuNode, "node " + gpuNode, "top " + gpuNode, "why late -n " + s.Namespace, "why late-claim -n " + s.Namespace} {
				out, err := s.KubectlGPU(plugin, strings.Fields(command)...)
				out = strings.Join(strings.Fields(out), " ")
				if err != nil || !strings.Contains(out, words) || strings.Contains(out, "Free") || strings.Contains(out, "has room") {
					return fmt.Errorf("%s: %w: %s", command, err, out)
				}
			}
			if out, err := s.KubectlGPU(plugin, "doctor"); err == nil {
				return fmt.Errorf("doctor: %s", out)
			}
			return nil
		})
		if table := s.Kubectl("get", "gpunode", gpuNode); !strings.Contains(table, "WAITING") {
			t.Errorf("no column WAITING:\n%s", table)
		}
	}

	late := func() {
		t.Helper()
		// Before that the scheduler still sends a pod to the node, and kubelet refuses it.
		s.Await(soon, "no GPU to be offered to pods", func() error { return s.OfferedToPods(0) })
		s.Manifest(manifests.Pod("limit", "late") + manifests.Pod("claim", "late-claim"))
	}

	s.Kubectl("label", "node", gpuNode, "nvidia.com/gpu.deploy.client=paused-for-driver-upgrade")
	resume := s.Undo(func() error {
		_, err := s.Cluster.Kubectl(s.Ctx, "label", "node", gpuNode, "nvidia.com/gpu.deploy.client-")
		return err
	})
	s.Shows("the pause", func(n gpunode.GPUNode) bool { return strings.Contains(n.Status.Waiting, "paused-for-driver-upgrade") })
	late()
	says("paused-for-driver-upgrade")
	resume()
	s.Running(soon, 3, 0)
	s.Shows("no reason", func(n gpunode.GPUNode) bool { return n.Status.Waiting == "" })
	s.Kubectl("delete", "pod", "-n", s.Namespace, "late", "late-claim")

	const agents = "daemonset/tandem"
	s.Kubectl("patch", "-n", install.Namespace, agents, "--type=merge", "-p", `{"spec":{"template":{"spec":{"nodeSelector":{"kubernetes.io/os":"none"}}}}}`)
	start := s.Undo(func() error {
		_, err := s.Cluster.Kubectl(s.Ctx, "patch", "-n", install.Namespace, agents, "--type=merge", "-p", `{"spec":{"template":{"spec":{"nodeSelector":{"kubernetes.io/os":"linux"}}}}}`)
		return err
	})
	s.Shows("that the agent has ended", func(n gpunode.GPUNode) bool {
		return n.Status.Waiting == "the agent has stopped" && n.Status.Holders != ""
	})
	late()
	says("the agent has stopped")
	// What an agent leaves that has died ten minutes ago.
	died := time.Now().Add(-10 * time.Minute).UTC().Format(time.RFC3339)
	s.Kubectl("patch", "gpunode", gpuNode, "--subresource=status", "--type=merge", "-p", fmt.Sprintf(`{"status":{"waiting":null,"waitingSince":null,"seen":%q}}`, died))
	says("its agent has been silent since")
	start()
	s.RolledOut()
	s.Running(soon, 3, 0)
	s.Shows("no reason", func(n gpunode.GPUNode) bool {
		return n.Status.Waiting == "" && time.Since(n.Status.Seen.Time) < 2*time.Minute
	})
	s.NoDoubleOwners()
}

// TestWhoHasWhichGPU: kubectl answers it, for both APIs, and GPUNode outlives what people do to it.
func TestWhoHasWhichGPU(t *testing.T) {
	s := begin(t)
	s.Manifest(manifests.SingleTemplate + manifests.Pod("claim", "train") + manifests.Pod("limit", "infer"))
	s.Running(soon, 2, 0)
	claim := *s.Pod("train").Status.ResourceClaimStatuses[0].ResourceClaimName
	holders := fmt.Sprintf("%s=%s/%s(claim) %s=%s/infer(pod)",
		stories.GPUName(s.GPUs("train", "")[0]), s.Namespace, claim, stories.GPUName(s.GPUs("infer", "")[0]), s.Namespace)
	told := func(n gpunode.GPUNode) bool {
		withdrawn := 0
		for _, d := range n.Status.Devices {
			if d.ExtendedResourceState == gpunode.ExtendedResourceWithdrawn {
				withdrawn++
			}
		}
		return n.Status.Holders == holders && withdrawn == 1 && n.Status.Counts.Free == gpusANode-2 &&
			len(n.Spec.Claims) == 1 && n.Status.ObservedGeneration == n.Generation
	}
	before := s.Shows("both holders", told)
	table := s.Kubectl("get", "gpunodes", "-o", "wide")
	for _, words := range []string{"MODE", "HOLDERS", "Dual", holders} {
		if !strings.Contains(table, words) {
			t.Errorf("kubectl get gpunodes -o wide has no %q:\n%s", words, table)
		}
	}
	t.Log("\n" + table)

	// Nothing changes, so nothing is written.
	const idle = 15 * time.Second
	time.Sleep(idle)
	if now := s.Shows("both holders", told); now.ResourceVersion != before.ResourceVersion {
		t.Errorf("GPUNode was written within %s in which nothing happened:\n%+v\n%+v", idle, before, now)
	}

	s.Kubectl("delete", "gpunode", before.Name)
	after := s.Shows("both holders again", told)
	if after.UID == before.UID {
		t.Error("kubectl did not delete it")
	}

	s.Kubectl("delete", "pods", "-n", s.Namespace, "train", "infer")
	s.Await(soon, "GPUNode to show no holder", func() error {
		n, err := s.GPUNodeObject()
		if err == nil && (n.Status.Holders != "" || n.Status.Counts.Free != gpusANode || len(n.Spec.Claims) > 0) {
			err = errors.New(n.Status.Holders)
		}
		return err
	})
}
