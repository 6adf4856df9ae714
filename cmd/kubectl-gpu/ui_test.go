// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/tandem-gpu/tandem/internal/golden"
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

// pageWorld is the world of the page in the documentation.
func pageWorld() world {
	since := func(minute int) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.CreationTimestamp = metav1.NewTime(time.Date(2026, 1, 2, 3, minute, 0, 0, time.UTC))
		}
	}
	return world{
		machines: []*machine{busy(), partitioned(), waiting("node-3"), away("node-4"), cpu("cpu-1")}, namespaces: []string{"ml"},
		objects: []runtime.Object{
			pending("late", byTemplate("single", "late-gpu"), since(7), scheduler("0/5 nodes are available: 5 cannot allocate all claims.")),
			claim("late-gpu", spec("gpu.nvidia.com")),
			pending("wide", byLimits(testResource, 16), since(5)),
			pending("web", since(1)), // requests no GPU
		},
	}
}

// TestPage: the views of a viewer who may list the pods of namespace ml are those of the golden files.
func TestPage(t *testing.T) {
	w := pageWorld()
	p, _, _ := w.plugin(t)
	address := w.serve(t, p)
	awaitPage(t, address, "node-4", "node-3", "ml/late", "ml/wide")
	for name, path := range map[string]string{
		"fleet": "", "filter": "?q=node-2", "node": "node?name=node-1", "node-mig": "node?name=node-2", "node-away": "node?name=node-4",
		"why": "why?namespace=ml&pod=late",
	} {
		status, body, err := get(address + path)
		if err != nil || status != http.StatusOK || strings.Contains(body, "web/") {
			t.Errorf("%s: status %d, or a name of namespace web:\n%s", name, status, body)
		}
		golden.Compare(t, filepath.Join("testdata", "ui", name+".html"), []byte(body))
	}
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
	if got := w.run(t, "ui"); !strings.Contains(got, "resources: [gpunodes]") {
		t.Error(got)
	}
}

// TestPageOfAFleet: a page has at most so many nodes and pods, and the filter reaches the others.
func TestPageOfAFleet(t *testing.T) {
	w := world{namespaces: []string{""}}
	for i := range 150 {
		w.machines = append(w.machines, full(fmt.Sprintf("node-%03d", i), 8))
		w.objects = append(w.objects, pending(fmt.Sprintf("late-%03d", i), byLimits(testResource, 1)))
	}
	p, _, _ := w.plugin(t)
	address := w.serve(t, p)
	body := awaitPage(t, address, "1200 GPUs on 150 nodes", "50 more nodes: use the filter", "50 more: use the filter",
		"all 1200 GPUs of 150 nodes are held")
	if strings.Contains(body, "node-120") || strings.Contains(body, " open>") || len(body) > 1<<20 {
		t.Errorf("%d bytes", len(body))
	}
	body = awaitPage(t, address+"?q=node-120+POD-3", "1200 GPUs on 150 nodes", "ml/node-120-pod-3", " open>")
	if strings.Contains(body, "node-121-") || strings.Contains(body, "late-") || strings.Contains(body, "more:") {
		t.Errorf("the filter:\n%s", body)
	}
}
