// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/dynamic/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/overview"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/version"
	"github.com/tandem-gpu/tandem/pkg/device"
)

func TestWrongFlags(t *testing.T) {
	w := world{machines: []*machine{busy()}}
	for line, want := range map[string]string{
		"ls -o table":                       `--output: "table" is not wide, json or yaml`,
		"ls -w -o json":                     "--watch prints rows",
		"ls --nothing":                      "unknown flag: --nothing",
		"why":                               "name a pod, as in: kubectl gpu why train-0 -n ml; kubectl gpu pending lists the pods that wait",
		"why a b":                           "name a pod, as in: ",
		"why ml/late":                       `name a pod as POD or pod/POD, not "ml/late"; give its namespace with -n`,
		"why pod/":                          `name a pod as POD or pod/POD, not "pod/"`,
		"why late -o wide":                  `--output: "wide" is not json or yaml`,
		"node":                              "name a node, as in: kubectl gpu node node-1; kubectl gpu ls lists the nodes",
		"node node-1 -o wide":               `--output: "wide" is not json or yaml`,
		"inspect":                           "name a node, as in: kubectl gpu inspect node-1",
		"pending x":                         `unknown command "x"`,
		"pending -o table":                  `--output: "table" is not wide, json or yaml`,
		"drain":                             "name a node or a GPU, as in: kubectl gpu drain node-1/3",
		"drain node-1/":                     `"node-1/" is not NODE or NODE/GPU`,
		"drain /0":                          `"/0" is not NODE or NODE/GPU`,
		"doctor x":                          `unknown command "x"`,
		"ui x":                              `unknown command "x"`,
		"migrate x":                         `unknown command "x"`,
		"migrate --back":                    "--back needs --plan or --apply",
		"migrate --node=a":                  "--node needs --plan or --apply",
		"migrate --plan --same-config":      "--same-config needs --back",
		"migrate -f=a --apply":              "-f excludes --plan and --apply",
		"migrate --apply --timeout=0s":      "--timeout: 0s is not positive",
		"migrate --daemonset=a":             "want namespace/name",
		"migrate -f=/absent":                "read values: open /absent",
		"ui --port 70000":                   `invalid argument "70000" for "--port"`,
		"doctor -o wide":                    `--output: "wide" is not json or yaml`,
		"undrain a b":                       "name a node or a GPU, as in: kubectl gpu undrain node-1/3",
		"drain node-1 --force":              "--force needs --evict",
		"drain node-1 --wait=false --evict": "--evict and --timeout need --wait",
		"drain node-1 --reason " + strings.Repeat("x", 257): "the reason has 257 bytes",
		"top -o table":               `--output: "table" is not wide, json or yaml`,
		"top --sort-by power":        `--sort-by: "power" is not util or memory`,
		"top --sort-by util -o json": "--sort-by sorts rows",
		"tops":                       `unknown command "tops"`,
		"node node-1 -w":             "unknown shorthand flag",
		"ls node-1 other":            `"other" not found`,
	} {
		if got := w.run(t, strings.Fields(line)...); !strings.Contains(got, want) {
			t.Errorf("%s: %s, want %s", line, got, want)
		}
	}
}

// TestNamespaceThatDoesNotExist: an empty list says so, if a flag names the namespace. Of a namespace that exists, or that may not be read, it
// says nothing.
func TestNamespaceThatDoesNotExist(t *testing.T) {
	for _, line := range []string{"ls", "top", "pending", "why late"} {
		w := world{machines: []*machine{h100s("node-1", 1)}, namespace: "nosuchns", given: true}
		const want = `namespace "nosuchns" does not exist`
		if got := w.run(t, strings.Fields(line)...); !strings.Contains(got, want) {
			t.Errorf("%s: %s", line, got)
		}
		for _, change := range []func(*world){
			func(w *world) { w.given = false },
			func(w *world) { w.denied = []string{"namespaces"} },
			func(w *world) {
				w.objects = []runtime.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "nosuchns"}}}
			},
		} {
			other := w
			change(&other)
			if got := other.run(t, strings.Fields(line)...); strings.Contains(got, want) {
				t.Errorf("%s: %s", line, got)
			}
		}
	}
}

// TestKindOfAPod: kubectl's forms of a pod's name.
// TestNamedTwice: a node that is named twice is listed once.
func TestNamedTwice(t *testing.T) {
	w := world{machines: []*machine{h100s("node-1", 2)}}
	if once, twice := w.run(t, "ls", "node-1"), w.run(t, "ls", "node-1", "node-1"); once != twice {
		t.Errorf("once\n%s\ntwice\n%s", once, twice)
	}
}

// TestPendingByClass: pending lists a pod that requests the extended resource of a class, as why answers for it.
func TestPendingByClass(t *testing.T) {
	const name = "example.com/whole-gpu"
	class := deviceClass("whole-gpu", "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'")
	class.Spec.ExtendedResourceName = new(name)
	m := h100s("node-1", 1).pod("ml", "infer", 0)
	w := world{machines: []*machine{m}, namespaces: []string{""}, objects: []runtime.Object{class, pending("late", byLimits(name, 1))}}
	for _, command := range [][]string{{"why", "late"}, {"pending"}} {
		if got := w.run(t, command...); !strings.Contains(got, "1 "+name) || !strings.Contains(got, "ml/late") {
			t.Errorf("%q:\n%s", command, got)
		}
	}
}

func TestKindOfAPod(t *testing.T) {
	w := world{machines: []*machine{h100s("node-1", 1)}, objects: []runtime.Object{pending("late", byLimits(testResource, 2))}}
	want := w.run(t, "why", "late")
	for _, argument := range []string{"pod/late", "pods/late", "po/late"} {
		if got := w.run(t, "why", argument); got != want || !strings.Contains(got, "cannot run") {
			t.Errorf("%s: %s", argument, got)
		}
	}
}

// TestKubeconfig: the flags of kubectl select cluster and namespace, and nothing connects before a request.
func TestKubeconfig(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config")
	const kubeconfig = `{"apiVersion": "v1", "kind": "Config", "current-context": "a",
		"clusters": [{"name": "a", "cluster": {"server": "https://a.example"}}, {"name": "b", "cluster": {"server": "https://b.example:6443/clusters/b"}}],
		"contexts": [{"name": "a", "context": {"cluster": "a", "namespace": "of-a"}}, {"name": "b", "context": {"cluster": "b", "namespace": "of-b"}}]}`
	if err := os.WriteFile(path, []byte(kubeconfig), 0o600); err != nil {
		t.Fatal(err)
	}
	for line, want := range map[string]connection{
		"":                   {namespace: "of-a", context: "a", server: "a.example"},
		"--context b":        {namespace: "of-b", context: "b", server: "b.example:6443/clusters/b"},
		"-n ml":              {namespace: "ml", given: true, context: "a", server: "a.example"},
		"--context b -n web": {namespace: "web", given: true, context: "b", server: "b.example:6443/clusters/b"},
		"--server https://jane:secret@c.example:8443/": {namespace: "of-a", context: "a", server: "c.example:8443"},
	} {
		flags := genericclioptions.NewConfigFlags(true)
		p := &plugin{streams: genericiooptions.NewTestIOStreamsDiscard(), connect: connectWith(flags)}
		root := p.command()
		flags.AddFlags(root.PersistentFlags())
		if err := root.ParseFlags(append(strings.Fields(line), "--kubeconfig", path)); err != nil {
			t.Fatal(err)
		}
		c, err := p.open()
		if err != nil || c.namespace != want.namespace || c.given != want.given || c.context != want.context || c.server != want.server ||
			c.cluster.Client == nil || c.cluster.DriverName != config.Defaults().DriverName {
			t.Errorf("%s: namespace %q, given %t, context %q, server %q, %v", line, c.namespace, c.given, c.context, c.server, err)
		}
	}
}

func TestCompletion(t *testing.T) {
	w := world{machines: []*machine{busy(), h100s("gpu-2", 1)}, objects: []runtime.Object{pending("train-0"), pending("infer-1")}}
	for line, want := range map[string]string{
		"node |":          "gpu-2 node-1 :4",
		"node n|":         "node-1 :4",
		"node node-1 |":   ":4",
		"drain n|":        "node-1 :4",
		"drain node-1/|":  "node-1/gpu-0 node-1/gpu-1 node-1/gpu-2 node-1/gpu-3 node-1/gpu-4 node-1/gpu-5 node-1/gpu-6 node-1/gpu-7 :4",
		"undrain gpu-2/|": "gpu-2/gpu-0 :4",
		"drain node-9/|":  ":1",
		"ls node-1 |":     "gpu-2 node-1 :4",
		"top node-1 |":    "gpu-2 node-1 :4",
		"top --sort-by |": "memory util :4",
		"why t|":          "train-0 :4",
		"why |":           "infer-1 train-0 :4",
		"why train-0 |":   ":4",
		"ls --output y|":  "yaml json wide :4",
	} {
		args := append([]string{"__complete"}, strings.Split(strings.TrimSuffix(line, "|"), " ")...)
		p, stdout, _ := w.plugin(t)
		root := p.command()
		root.SetArgs(args)
		if err := root.ExecuteContext(t.Context()); err != nil {
			t.Fatal(err)
		}
		got := strings.Fields(stdout.String())
		wanted := strings.Fields(want)
		slices.Sort(got)
		slices.Sort(wanted)
		if !slices.Equal(got, wanted) {
			t.Errorf("%s: %v, want %v", line, got, wanted)
		}
	}
	w.denied = []string{"pods", "gpunodes"}
	for _, line := range []string{"node", "why"} {
		if got := w.run(t, "__complete", line, ""); !strings.Contains(got, ":1") {
			t.Errorf("%s without rights: %s", line, got)
		}
	}
}

func TestVersion(t *testing.T) {
	w := world{}
	want := "kubectl gpu version " + version.String() + "\n"
	for _, command := range []string{"version", "--version"} {
		if got := w.run(t, command); got != want {
			t.Errorf("%s: %q, want %q", command, got, want)
		}
	}
}

// TestJSONIsStable: what the documentation says of the JSON form. A field may be added.
func TestJSONIsStable(t *testing.T) {
	var got struct {
		Version string
		Nodes   []struct {
			Name, Mode, Problem string
			Devices             []struct {
				Name, UUID, Model, State, UnhealthyReason, ExtendedResource, ExtendedResourceState string
				Holders                                                                            []struct {
					Kind  string
					Claim *struct{ UID, Namespace, Name string }
					Pods  []struct{ UID, Namespace, Name string }
				}
			}
		}
		GPUs struct{ Total, Free int }
	}
	if err := json.Unmarshal([]byte(world{machines: []*machine{busy()}}.run(t, "ls", "-o", "json")), &got); err != nil {
		t.Fatal(err)
	}
	states := map[string]string{}
	for _, d := range got.Nodes[0].Devices {
		states[d.Name] = d.State
	}
	want := map[string]string{
		"gpu-0": "Claim", "gpu-1": "Pod", "gpu-2": "Claim", "gpu-3": "Allocated", "gpu-4": "Draining", "gpu-5": "Pod", "gpu-6": "Unhealthy", "gpu-7": "Free",
	}
	if diff := cmp.Diff(want, states); diff != "" || got.Version != "v1alpha1" || got.GPUs.Total != 8 || got.GPUs.Free != 1 {
		t.Errorf("%+v\n%s", got, diff)
	}
	if h := got.Nodes[0].Devices[0].Holders; len(h) != 1 || h[0].Claim.Name != "train-0-gpu" || h[0].Pods[0].Name != "train-0" {
		t.Errorf("%+v", h)
	}
}

// TestInspect: kubectl runs the agent's program in the pod of the node's running agent, with the flags of the connection.
func TestInspect(t *testing.T) {
	agent := func(name, node string, phase corev1.PodPhase) *corev1.Pod {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "tandem-system", Name: name, Labels: map[string]string{
				"app.kubernetes.io/part-of": "tandem", "app.kubernetes.io/component": "kubelet-plugin",
			}},
			Spec: corev1.PodSpec{NodeName: node}, Status: corev1.PodStatus{Phase: phase},
		}
		owned("DaemonSet", "tandem")(p)
		p.OwnerReferences[0].UID = "agents"
		return p
	}
	// A tenant's pods and DaemonSet have the labels of agents, and the UID of their owner.
	tenant := agent("aaa", "node-3", corev1.PodRunning)
	tenant.Namespace = "aaa-tenant"
	bare := agent("bare", "node-3", corev1.PodRunning)
	bare.OwnerReferences = nil
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "aaa-tenant", Name: "tandem", UID: "agents", Labels: tenant.Labels}}
	set.Spec.Template.Spec.ServiceAccountName = "tandem"
	other := agent("tandem-controller", "node-1", corev1.PodRunning)
	other.Labels["app.kubernetes.io/component"] = "controller"
	w := world{objects: append(installed(), tenant, bare, set,
		other, agent("tandem-a", "node-1", corev1.PodFailed), agent("tandem-b", "node-1", corev1.PodRunning), agent("tandem-c", "node-2", corev1.PodPending),
	)}
	w.objects = slices.DeleteFunc(w.objects, func(o runtime.Object) bool {
		pod, is := o.(*corev1.Pod)
		return is && pod.Name == "tandem-x7k2p"
	})
	for line, want := range map[string]string{
		"inspect node-1":                 "exec --namespace=tandem-system tandem-b --container=kubelet-plugin -- kubelet-plugin inspect -o text",
		"inspect node-1 -o json":         "exec --namespace=tandem-system tandem-b --container=kubelet-plugin -- kubelet-plugin inspect -o json",
		"inspect node-2":                 "error: find the running agent of node node-2: pod tandem-system/tandem-c is Pending",
		"inspect node-3":                 "error: find the running agent of node node-3: there is none",
		"inspect node-1 -o yaml":         `error: --output: "yaml" is not text, json or slices`,
		"inspect node-1 --driver-name x": "exec --namespace=tandem-system tandem-b --container=kubelet-plugin -- kubelet-plugin inspect -o text",
		"inspect node-1 --context c --as-group=a --as-group=b": "--as-group=a --as-group=b --context=c exec --namespace=tandem-system tandem-b --container=kubelet-plugin -- kubelet-plugin inspect -o text",
	} {
		p, _, _ := w.plugin(t)
		var got string
		p.kubectl = func(_ context.Context, _, _ io.Writer, args ...string) error {
			got = strings.Join(args, " ")
			return nil
		}
		root := p.command()
		genericclioptions.NewConfigFlags(true).AddFlags(root.PersistentFlags())
		root.SetArgs(strings.Fields(line))
		if err := root.ExecuteContext(t.Context()); err != nil {
			got = "error: " + err.Error()
		}
		if got != want {
			t.Errorf("%s: %s, want %s", line, got, want)
		}
	}
	w.denied = []string{"clusterrolebindings"}
	if got := w.run(t, "inspect", "node-1"); !strings.Contains(got, "give the namespace with --namespace") {
		t.Error(got)
	}
	// The user names the namespace.
	w.namespace, w.given = "tandem-system", true
	p, _, _ := w.plugin(t)
	p.kubectl = func(_ context.Context, _, _ io.Writer, args ...string) error {
		if !slices.Contains(args, "tandem-b") {
			t.Error(args)
		}
		return nil
	}
	if err := p.execute(t.Context(), p.command(), []string{"inspect", "node-1"}); err != nil {
		t.Error(err)
	}
}

// What the agent's pod and kubectl print does not control the terminal, and neither does an error of the API server.
func TestInspectOfAnAgentThatWasTakenOver(t *testing.T) {
	const hostile = "\x1b]0;title\x07 \u009b2J \u202e\r x\n"
	for _, output := range []string{"text", "json", "slices"} {
		p, stdout, stderr := world{objects: installed()}.plugin(t)
		p.kubectl = func(_ context.Context, out, errOut io.Writer, _ ...string) error {
			for _, b := range []byte(hostile) { // in parts, as a pipe has them
				if _, err := out.Write([]byte{b}); err != nil {
					t.Error(err)
				}
			}
			fmt.Fprint(errOut, hostile)
			return errors.New(hostile)
		}
		if err := p.execute(t.Context(), p.command(), []string{"inspect", "node-1", "-o", output}); err == nil {
			t.Error("no error")
		}
		for _, got := range []string{stdout.String(), stderr.String()} {
			if strings.ContainsAny(got, "\x1b\x07\u009b\u202e\r") || !strings.Contains(got, "x\n") {
				t.Errorf("%s: %q", output, got)
			}
		}
	}
}

// lockedBuffer is a buffer that a test reads while a command writes.
type lockedBuffer struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (b *lockedBuffer) Write(data []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.Write(data)
}

func (b *lockedBuffer) await(t *testing.T, want string) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		b.mu.Lock()
		got := b.buffer.String()
		b.mu.Unlock()
		if strings.Contains(got, want) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("no %q in\n%s", want, got)
		}
	}
}

func TestWatch(t *testing.T) {
	m := h100s("node-1", 2)
	p, _, _ := world{machines: []*machine{m}}.plugin(t)
	var out lockedBuffer
	p.streams.Out = &out
	c, err := p.open()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	root := p.command()
	root.SetArgs([]string{"ls", "-w"})
	go func() { ended <- root.ExecuteContext(ctx) }()
	out.await(t, "gpu-1 ")
	nodes := c.cluster.Dynamic.Resource(v1alpha1.Resource)
	awaitWatch(t, c.cluster.Dynamic.(*fake.FakeDynamicClient))
	update := func() {
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(m.gpuNode())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := nodes.Update(ctx, &unstructured.Unstructured{Object: content}, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	m.pod("ml", "infer", 1)
	update()
	out.await(t, "ml/infer (limits)")
	m.gpus = m.gpus[1:]
	update()
	out.await(t, "Gone")
	if err := nodes.Delete(ctx, "node-1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		out.mu.Lock()
		gone := strings.Count(out.buffer.String(), "Gone")
		text := out.buffer.String()
		out.mu.Unlock()
		if gone == 2 {
			// A row that did not change is not printed again.
			if n := strings.Count(text, "\n"); n != 6 {
				t.Errorf("%d lines:\n%s", n, text)
			}
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the node is not gone:\n%s", text)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func awaitWatch(t *testing.T, client *fake.FakeDynamicClient) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if slices.ContainsFunc(client.Actions(), func(a clienttesting.Action) bool { return a.GetVerb() == "watch" }) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("no watch")
		}
	}
}

// runAgainst runs a command that must succeed against an API server, by the flags of kubectl. It returns what the command prints.
func runAgainst(t *testing.T, url string, args ...string) string {
	t.Helper()
	streams, _, stdout, _ := genericiooptions.NewTestIOStreams()
	flags := genericclioptions.NewConfigFlags(true)
	p := &plugin{streams: streams, connect: connectWith(flags)}
	root := p.command()
	flags.AddFlags(root.PersistentFlags())
	root.SetArgs(append(args, "--kubeconfig", "/dev/null", "--server", url))
	if err := root.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	return stdout.String()
}

// TestPages: a large cluster is read in pages, and every page is shown.
func TestPages(t *testing.T) {
	pages := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if !strings.HasSuffix(r.URL.Path, "/gpunodes") {
			fmt.Fprint(w, `{"kind": "NodeList", "apiVersion": "v1", "items": []}`)
			return
		}
		if limit := r.URL.Query().Get("limit"); limit != "500" {
			t.Errorf("a page of %q", limit)
		}
		list := v1alpha1.GPUNodeList{TypeMeta: metav1.TypeMeta{Kind: "GPUNodeList", APIVersion: v1alpha1.GroupVersion.String()}}
		for i := range 500 {
			list.Items = append(list.Items, v1alpha1.GPUNode{
				TypeMeta:   metav1.TypeMeta{Kind: "GPUNode", APIVersion: v1alpha1.GroupVersion.String()},
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("node-%d-%d", pages, i)},
				Status:     v1alpha1.GPUNodeStatus{Devices: []v1alpha1.DeviceStatus{{Name: "gpu-0", UUID: "GPU-0"}}},
			})
		}
		if pages++; pages < 10 {
			list.Continue = "more"
		}
		if err := json.NewEncoder(w).Encode(list); err != nil {
			t.Error(err)
		}
	}))
	defer server.Close()
	if got := runAgainst(t, server.URL, "ls"); !strings.HasSuffix(got, "5000 GPUs on 5000 nodes: 5000 free\n") {
		t.Errorf("%d pages, and the end is %q", pages, got[max(0, len(got)-80):])
	}
}

// TestLargeCluster: the answer is bounded, and comes within seconds.
func TestLargeCluster(t *testing.T) {
	var w world
	for i := range 300 {
		w.machines = append(w.machines, full(fmt.Sprintf("node-%03d", i), 8))
	}
	for i := range 200 {
		w.machines = append(w.machines, cpu(fmt.Sprintf("cpu-%03d", i)))
	}
	w.namespaces, w.objects = []string{""}, []runtime.Object{pending("late", byLimits(testResource, 4))}
	start := time.Now()
	got := w.run(t, "why", "late")
	if lines := strings.Count(got, "\n"); lines > 100 || !strings.Contains(got, "and 289 more: is full") {
		t.Errorf("%d lines:\n%s", lines, got)
	}
	if took := time.Since(start); took > time.Minute {
		t.Errorf("it took %s", took)
	}
}

func TestStyle(t *testing.T) {
	file, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if got := styleOf(file, func(string) string { return "de_DE.UTF-8" }); got != (overview.Style{}) {
		t.Errorf("a file: %+v", got)
	}
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skip("no terminal here:", err)
	}
	defer terminal.Close()
	for env, want := range map[string]overview.Style{
		"LANG=C.UTF-8":                  {Colour: true, UTF8: true},
		"LANG=de_DE.utf8":               {Colour: true, UTF8: true},
		"LANG=C":                        {Colour: true},
		"":                              {Colour: true},
		"LANG=C.UTF-8 NO_COLOR=1":       {UTF8: true},
		"LANG=C.UTF-8 TERM=dumb":        {UTF8: true},
		"LC_ALL=C LANG=C.UTF-8":         {Colour: true},
		"LC_CTYPE=en_US.UTF-8 LANG=C":   {Colour: true, UTF8: true},
		"LC_ALL=C.UTF-8 LC_CTYPE=POSIX": {Colour: true, UTF8: true},
	} {
		getenv := func(name string) string {
			for _, pair := range strings.Fields(env) {
				if value, ok := strings.CutPrefix(pair, name+"="); ok {
					return value
				}
			}
			return ""
		}
		if got := styleOf(terminal, getenv); got != want {
			t.Errorf("%q: %+v, want %+v", env, got, want)
		}
	}
}

// TestControlCharacters: a name or a message from the cluster controls neither the terminal nor the direction of text.
func TestControlCharacters(t *testing.T) {
	m := h100s("node-1", 1)
	m.gpu(0).ProductName, m.waiting = "H100\x1b[2J", ""
	w := world{machines: []*machine{m}, style: overview.Style{UTF8: true}, objects: []runtime.Object{
		pending("late", byLimits(testResource, 1), func(p *corev1.Pod) {
			scheduler("none\x1b]0;title\x07 \x9b2J \u202e")(p)
		})}}
	w.objects = append(w.objects, exporter("gpu-operator", "node-1"))
	w.scrape = func(context.Context, *corev1.Pod) ([]byte, error) { return nil, errors.New("\x1b[2J\u009b2J\u202e") }
	m.gpu(0).NVLinkDomain = "a\x1b[2J"
	m.gpus[0].Health = device.Health{Reason: device.ReasonXID, Message: "\x1b[2J\u009b2J\u202e\U000e0041"}
	w.objects = append(w.objects, installed()...)
	for _, args := range [][]string{
		{"ls"}, {"top"}, {"ls", "-o", "wide"}, {"node", "node-1"}, {"why", "late"}, {"ls", "-o", "json"}, {"ls", "-o", "yaml"}, {"doctor"}, {"doctor", "-o", "json"},
		{"why", "none\x1b[2J\u009b2J\u202e"}, {"node", "\x1b[2J\u009b2J\u202e"},
	} {
		if got := w.run(t, args...); strings.ContainsAny(got, "\x1b\x07\u009b\u202e\U000e0041") {
			t.Errorf("%v: %q", args, got)
		}
	}
	if got := w.run(t, "ls", "-o", "yaml"); !strings.Contains(got, `unhealthyReason: "XID: \e[2J`) || strings.Contains(got, "error: ") {
		t.Error(got)
	}
}

// TestErrorsByStandardError: what standard error can show decides on the characters of an error, not standard output (kubectl gpu ls | less).
func TestErrorsByStandardError(t *testing.T) {
	file, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skip("no terminal here:", err)
	}
	defer terminal.Close()
	t.Setenv("LC_ALL", "C.UTF-8")
	stdout, stderr := os.Stdout, os.Stderr
	defer func() { os.Stdout, os.Stderr = stdout, stderr }()
	for _, test := range []struct {
		stdout, stderr *os.File
		want           string
	}{{file, terminal, "w\u00f6"}, {terminal, file, "w?"}} {
		streams, _, _, errOut := genericiooptions.NewTestIOStreams()
		os.Stdout, os.Stderr = test.stdout, test.stderr
		err := run(t.Context(), []string{"ls", "-o", "w\u00f6"}, streams)
		if got := errOut.String(); err == nil || !strings.Contains(got, test.want) {
			t.Errorf("%q, want %s", got, test.want)
		}
	}
}

// Notes, and what the agent's program writes to standard error, are shown as errors are.
func TestNotesByStandardError(t *testing.T) {
	p, _, stderr := world{objects: installed()}.plugin(t)
	p.errors = overview.Style{UTF8: true}
	p.notes([]string{"w\u00f6"})
	p.kubectl = func(_ context.Context, _, errOut io.Writer, _ ...string) error {
		_, err := fmt.Fprintln(errOut, "m\u00fc")
		return err
	}
	if err := p.execute(t.Context(), p.command(), []string{"inspect", "node-1"}); err != nil {
		t.Fatal(err)
	}
	if got := stderr.String(); got != "note: w\u00f6\nm\u00fc\n" {
		t.Errorf("%q", got)
	}
}

// TestClockOfTheServer: a pod that the API server passes on does not set the clock that says which agents are silent.
func TestClockOfTheServer(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Date", time.Now().Add(time.Hour).UTC().Format(http.TimeFormat))
	}))
	defer server.Close()
	flags := genericclioptions.NewConfigFlags(true)
	*flags.APIServer, *flags.KubeConfig = server.URL, os.DevNull
	c, err := connectWith(flags)()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.cluster.Scrape(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "b"}}); err != nil {
		t.Fatal(err)
	}
	if off := time.Until(c.cluster.Clock.Now()); off.Abs() > 2*time.Second {
		t.Errorf("a pod has set the clock: it is %s off", off)
	}
}
