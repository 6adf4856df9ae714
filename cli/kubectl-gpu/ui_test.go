// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/tandem-gpu/tandem/cli/browser"
	"github.com/tandem-gpu/tandem/internal/golden"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// serve runs kubectl gpu ui until the test ends and returns the page's address.
func (w world) serve(t *testing.T, p *plugin) (address string) {
	t.Helper()
	var out lockedBuffer
	p.streams.Out = &out
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	root := p.command()
	root.SetArgs([]string{"ui"})
	go func() { ended <- root.ExecuteContext(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	out.await(t, "/\n")
	return strings.TrimSpace(out.buffer.String())
}

func get(address string) (status int, body string, err error) {
	answer, err := http.Get(address)
	if err != nil {
		return 0, "", err
	}
	defer answer.Body.Close()
	data, err := io.ReadAll(answer.Body)
	return answer.StatusCode, string(data), err
}

// eventually reads the page until it has the words.
func eventually(address string, words ...string) (body string, err error) {
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		_, body, err = get(address)
		if err != nil {
			return body, err
		}
		missing := slices.DeleteFunc(slices.Clone(words), func(word string) bool { return strings.Contains(body, word) })
		if len(missing) == 0 {
			return body, nil
		}
		if time.Now().After(deadline) {
			return body, fmt.Errorf("no %q in\n%s", missing, body)
		}
	}
}

func awaitPage(t *testing.T, address string, words ...string) (body string) {
	t.Helper()
	body, err := eventually(address, words...)
	if err != nil {
		t.Fatal(err)
	}
	return body
}

// ago lets a pod be so old.
func ago(age time.Duration) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.CreationTimestamp = metav1.NewTime(time.Now().Add(-age)) }
}

// pageWorld is the world of the page in the documentation.
func pageWorld() world {
	return world{
		machines: []*machine{busy(), partitioned(), waiting("node-3"), away("node-4"), cpu("cpu-1")}, namespaces: []string{"ml"},
		objects: []runtime.Object{
			pending("late", byTemplate("single", "late-gpu"), ago(25*time.Minute), scheduler("0/5 nodes are available: 5 cannot allocate all claims.")),
			template("single", spec("gpu.nvidia.com")), claim("late-gpu", spec("gpu.nvidia.com")),
			pending("wide", byLimits(testResource, 16), ago(3*time.Hour)),
			pending("web", ago(time.Hour)), // requests no GPU
		},
	}
}

// timeless replaces what a page says of the present: ages, and the time of its data.
func timeless(page string) []byte {
	return regexp.MustCompile(`(<time(?: id="at")?)[^>]*>[^<]*</time>`).ReplaceAll([]byte(page), []byte("$1>TIME</time>"))
}

// TestPage: the views of a viewer who may list the pods of namespace ml are those of the golden files.
func TestPage(t *testing.T) {
	w := pageWorld()
	p, _, _ := w.plugin(t)
	address := w.serve(t, p)
	awaitPage(t, address, "node-4", "node-3", "ml/late", "ml/wide", "as jane", ">3 h</time>", ">25 min</time>")
	for name, path := range map[string]string{
		"fleet": "", "filter": "?q=node-2", "node": "node?name=node-1", "node-mig": "node?name=node-2", "node-away": "node?name=node-4",
		"why": "why?namespace=ml&pod=late",
	} {
		status, body, err := get(address + path)
		if err != nil || status != http.StatusOK || strings.Contains(body, "web/") {
			t.Errorf("%s: status %d, or a name of namespace web:\n%s", name, status, body)
		}
		golden.Compare(t, filepath.Join("testdata", "ui", name+".html"), timeless(body))
	}
	browser.Screenshot(t, "kubectl-gpu-ui", address, 1100, 1060)
	for path, want := range map[string]int{
		"node?name=node-9": 404, "why?namespace=ml&pod=nothing": 404, "?q=" + strings.Repeat("x", 201): 400, "files/page.css": 200, "files/page.js": 200,
	} {
		if status, body, err := get(address + path); status != want {
			t.Errorf("%s: status %d, want %d: %s, %v", path, status, want, body, err)
		}
	}
}

// TestPageOfFewRights: the page says what the viewer may not read, and needs GPUNodes.
func TestPageOfFewRights(t *testing.T) {
	w := pageWorld()
	w.namespaces, w.denied = nil, []string{"nodes", "resourceslices"}
	p, _, _ := w.plugin(t)
	body := awaitPage(t, w.serve(t, p), "node-2", "Waiting pods are not shown", "Nodes without a GPUNode are not shown", "NUMA nodes and NVLink are not known")
	for _, name := range []string{"ml/", "web/", "late"} {
		if strings.Contains(body, name) {
			t.Errorf("the page has %q:\n%s", name, body)
		}
	}
	if n := strings.Count(body, "<td>another namespace (claim)</td>"); n < 2 {
		t.Errorf("%d holders without a name:\n%s", n, body)
	}
	w.denied = []string{"gpunodes"}
	if got := w.run(t, "ui"); !strings.Contains(got, "resources: [gpunodes]") || strings.Contains(got, "http://") {
		t.Error(got)
	}
}

// TestPageOfAFleet: nodes with a problem come first, waiting pods are grouped by owner, and the filter reaches what is beyond the first page.
func TestPageOfAFleet(t *testing.T) {
	w := world{namespaces: []string{""}}
	for i := range 60 {
		w.machines = append(w.machines, full(fmt.Sprintf("node-%03d", i), 8))
		w.objects = append(w.objects, pending(fmt.Sprintf("late-%03d", i), byLimits(testResource, 1), ago(time.Hour)),
			pending(fmt.Sprintf("train-%d", i), byLimits(testResource, 1), owned("StatefulSet", "train"), ago(2*time.Hour)))
	}
	w.machines[59].gpu(2).Health = device.Health{Reason: device.ReasonXID, XID: 79, Message: "XID 79: GPU has fallen off the bus"}
	p, _, _ := w.plugin(t)
	address := w.serve(t, p)
	body := awaitPage(t, address, "Nodes 1 to 50 of 60", ">480 GPUs<", ">120 waiting pods<", ">1 with a problem<", ">StatefulSet ml/train</a> <span>60 pods</span>",
		"51 more owners", "all 480 GPUs of 60 nodes are held or unhealthy", "gpu-2: Unhealthy: XID: 79", "<b>production</b> <span>10.0.0.1:6443</span> <span>as jane</span>")
	if first := strings.Index(body, `id="node-node-`); !strings.HasPrefix(body[first:], `id="node-node-059"`) || strings.Contains(body, "node-055") || strings.Contains(body, "<table") {
		t.Errorf("the nodes:\n%s", body)
	}
	awaitPage(t, address+"?page=2", "Nodes 51 to 60 of 60", `id="node-node-058"`)
	body = awaitPage(t, address+"?q=node-055+POD-3", ">480 GPUs<", "ml/node-055-pod-3", " open>")
	if strings.Contains(body, "node-056") || strings.Contains(body, "late-") {
		t.Errorf("the filter:\n%s", body)
	}
}

// TestPageMetrics: the view of a node has what dcgm-exporter measures. It is read once in a while, and only of the node that is viewed.
func TestPageMetrics(t *testing.T) {
	w := measured(pageWorld())
	scrape, scrapes := w.scrape, atomic.Int32{}
	w.scrape = func(ctx context.Context, pod *corev1.Pod) ([]byte, error) {
		scrapes.Add(1)
		return scrape(ctx, pod)
	}
	p, _, _ := w.plugin(t)
	address := w.serve(t, p)
	awaitPage(t, address, "node-1", "node-2")
	if n := scrapes.Load(); n != 0 {
		t.Errorf("the view of all nodes reads %d exporters", n)
	}
	for range 3 {
		awaitPage(t, address+"node?name=node-1", "<p>Use: 37%, 24004/81080 MiB, 257 W, 43 C</p>", "<p>Use: 0%, 4/81080 MiB, 72 W, 31 C</p>")
	}
	awaitPage(t, address+"node?name=node-2", "<td>43%, ")
	if n := scrapes.Load(); n != 2 {
		t.Errorf("%d scrapes", n)
	}
}
