// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"

	"github.com/tandem-gpu/tandem/cli/explain"
)

const metricsPage = "DCGM_FI_DEV_GPU_UTIL{UUID=\"GPU-a\"} 7\n"

// apiServer answers each request with the function, and returns a scraper of it.
func apiServer(t *testing.T, answer http.HandlerFunc) Scraper {
	t.Helper()
	server := httptest.NewServer(answer)
	t.Cleanup(server.Close)
	scrape, err := NewScraper(&rest.Config{Host: server.URL + "/clusters/a", BearerToken: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	return scrape
}

func status(code int, reason, message string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(code)
		fmt.Fprintf(w, `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": %q, "reason": %q, "code": %d}`, message, reason, code)
	}
}

// endless writes until the client goes away.
func endless(w io.Writer) {
	part := bytes.Repeat([]byte("x"), 1<<16)
	for {
		if _, err := w.Write(part); err != nil {
			return
		}
	}
}

// TestScraper: what the API server and a pod may answer.
func TestScraper(t *testing.T) {
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		want   string
	}{
		"a page": {func(w http.ResponseWriter, r *http.Request) {
			if r.Method != http.MethodGet || r.URL.Path != "/clusters/a/api/v1/namespaces/gpu-operator/pods/a:9400/proxy/metrics" || r.Header.Get("Authorization") != "Bearer secret" {
				t.Errorf("%s %s %v", r.Method, r.URL, r.Header)
			}
			fmt.Fprint(w, metricsPage)
		}, "page"},
		"forbidden": {status(403, "Forbidden", "jane may not"), "forbidden: jane may not"},
		"not found": {status(404, "NotFound", "pods \"a\" not found"), `pods "a" not found`},
		"away":      {status(503, "ServiceUnavailable", "no endpoints"), "no endpoints"},
		"the pod's": {func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", 500) }, "HTTP status 500"},
		"JSON":      {func(w http.ResponseWriter, _ *http.Request) { http.Error(w, `{"code": 500, "message": "no"}`, 500) }, "HTTP status 500"},
		"TLS": {func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "Client sent an HTTP request to an HTTPS server.", 400)
		}, "HTTP status 400"},
		"no status": {status(403, "Forbidden", strings.Repeat("x", mostMetricsSize)), "HTTP status 403"},
		"too much":  {func(w http.ResponseWriter, _ *http.Request) { endless(w) }, "the answer has more than 4 MiB"},
		"a bomb": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			endless(gzip.NewWriter(w))
		}, "the answer has more than 4 MiB"},
		"a large error": {func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(500)
			endless(w)
		}, "HTTP status 500"},
		"cut": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100")
			fmt.Fprint(w, metricsPage)
		}, "unexpected EOF"},
	} {
		page, err := apiServer(t, c.answer)(t.Context(), exporterPod("gpu-operator", "a"))
		got := "page"
		switch {
		case apierrors.IsForbidden(err):
			got = "forbidden: " + err.Error()
		case err != nil:
			got = err.Error()
		case string(page) != metricsPage:
			got = string(page)
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// TestScraperFollowsNoRedirect: a pod that redirects to another host does not get the viewer's token there.
func TestScraperFollowsNoRedirect(t *testing.T) {
	for _, code := range []int{301, 302, 303, 307, 308} {
		var asked atomic.Int32
		evil := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
		scrape := apiServer(t, func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, evil.URL, code) })
		_, err := scrape(t.Context(), exporterPod("web", "a"))
		if want := fmt.Sprintf("HTTP status %d", code); err == nil || err.Error() != want || asked.Load() > 0 {
			t.Errorf("%v after %d requests, want %s", err, asked.Load(), want)
		}
		evil.Close()
	}
}

// TestScraperEnds: when the context ends, the scraper stops waiting for a pod. Its error does not repeat the address.
func TestScraperEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	scrape := apiServer(t, func(_ http.ResponseWriter, r *http.Request) {
		cancel()
		<-r.Context().Done()
	})
	if _, err := scrape(ctx, exporterPod("gpu-operator", "a")); !errors.Is(err, context.Canceled) || strings.Contains(err.Error(), "http") {
		t.Error(err)
	}
}

func TestPortOf(t *testing.T) {
	pod := exporterPod("gpu-operator", "a")
	if got := portOf(pod); got != 9400 {
		t.Error(got)
	}
	pod.Spec.Containers = []corev1.Container{{Ports: []corev1.ContainerPort{{Name: "health", ContainerPort: 1}, {Name: "metrics", ContainerPort: 9401}}}}
	if got := portOf(pod); got != 9401 {
		t.Error(got)
	}
}

// TestExporters: pods with the labels of either installation are found, by node.
func TestExporters(t *testing.T) {
	labelled := func(name, node string, labels map[string]string) *corev1.Pod {
		return exporterPod("a", name, func(p *corev1.Pod) { p.Labels, p.Spec.NodeName = labels, node })
	}
	cluster := Cluster{Client: fake.NewClientset(
		labelled("chart", "node-1", map[string]string{"app.kubernetes.io/name": "dcgm-exporter", "app.kubernetes.io/instance": "x"}),
		labelled("operator", "node-2", map[string]string{"app": "nvidia-dcgm-exporter"}),
		labelled("other", "node-1", map[string]string{"app": "dcgm"}),
		labelled("none", "node-1", nil),
		exporterPod("b", "elsewhere"),
	)}
	for namespace, want := range map[string]string{"": "a/chart b/elsewhere, a/operator", "a": "a/chart, a/operator", "b": "b/elsewhere, "} {
		found, err := cluster.exporters(t.Context(), []Node{{Name: "node-1"}, {Name: "node-2"}}, namespace)
		if err != nil {
			t.Fatal(err)
		}
		var nodes []string
		for _, node := range []string{"node-1", "node-2"} {
			var names []string
			for _, p := range found[node] {
				names = append(names, p.Namespace+"/"+p.Name)
			}
			nodes = append(nodes, strings.Join(names, " "))
		}
		if got := strings.Join(nodes, ", "); got != want {
			t.Errorf("namespace %q: %s, want %s", namespace, got, want)
		}
	}
}

// TestReadMetrics: what a node has if its exporter answers, and the reason if it does not answer well.
func TestReadMetrics(t *testing.T) {
	long := strings.Repeat("x", 1000)
	for name, c := range map[string]struct {
		page string
		err  error
		want string
	}{
		"well":        {page: metricsPage, want: "7%"},
		"forbidden":   {err: apierrors.NewForbidden(corev1.Resource("pods"), "a", errors.New("jane")), want: `you may not get pods/proxy (pod gpu-operator/a: pods "a" is forbidden: jane)`},
		"slow":        {err: context.DeadlineExceeded, want: "dcgm-exporter could not be read in time (pod gpu-operator/a)"},
		"away":        {err: errors.New("connection\n refused"), want: "dcgm-exporter could not be read (pod gpu-operator/a: connection refused)"},
		"talkative":   {err: errors.New(long), want: "dcgm-exporter could not be read (pod gpu-operator/a: " + long[:200] + "...)"},
		"hostile":     {err: errors.New("\x1b[2J\u009b2J\u202e\x7f"), want: "dcgm-exporter could not be read (pod gpu-operator/a: ?[2J?2J??)"},
		"not metrics": {page: "DCGM_FI_DEV_GPU_UTIL{", want: "the page of dcgm-exporter could not be parsed"},
		"others":      {page: strings.ReplaceAll(metricsPage, "GPU-a", "GPU-z"), want: "dcgm-exporter has no metrics of the node's GPUs (pod gpu-operator/a)"},
	} {
		cluster := Cluster{Client: fake.NewClientset(exporterPod("gpu-operator", "a")), Scrape: func(ctx context.Context, _ *corev1.Pod) ([]byte, error) {
			if end, bounded := ctx.Deadline(); !bounded || time.Until(end) > 5*time.Second {
				t.Errorf("%s: the time is not bounded by 5 s", name)
			}
			return []byte(c.page), c.err
		}}
		nodes := []Node{measuredNode()}
		if err := cluster.ReadMetrics(t.Context(), nodes, ""); err != nil {
			t.Fatal(err)
		}
		got := ""
		if none := nodes[0].NoMetrics; none != nil {
			got = fmt.Sprintf("%s (%s)", none.Reason, none.Detail)
		} else if nodes[0].Exporter != nil && nodes[0].Exporter.Name == "a" {
			got = nodes[0].Devices[0].Metrics.cells()[0]
		}
		if got != c.want && !(name == "not metrics" && strings.HasPrefix(got, c.want)) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// TestReadMetricsIsBounded: nodes are read a few at a time, in a limited time. After that, and if the context is done, none is read.
func TestReadMetricsIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var pods []runtime.Object
		var nodes []Node
		for i := range 200 {
			n := measuredNode()
			n.Name = fmt.Sprintf("node-%d", i)
			nodes = append(nodes, Node{Name: "cpu-" + n.Name}, n)
			pods = append(pods, exporterPod("gpu-operator", n.Name, func(p *corev1.Pod) { p.Spec.NodeName = n.Name }))
		}
		const answerTime = 4500 * time.Millisecond
		var mu sync.Mutex
		asked, now, most := 0, 0, 0
		cluster := Cluster{Client: fake.NewClientset(pods...), Scrape: func(context.Context, *corev1.Pod) ([]byte, error) {
			mu.Lock()
			asked, now = asked+1, now+1
			most = max(most, now)
			mu.Unlock()
			time.Sleep(answerTime)
			mu.Lock()
			defer mu.Unlock()
			now--
			return []byte(metricsPage), nil
		}}
		if err := cluster.ReadMetrics(t.Context(), nodes, ""); err != nil {
			t.Fatal(err)
		}
		measured, without := 0, 0
		for _, n := range nodes {
			measured += explain.Count(n.Exporter != nil)
			if n.NoMetrics != nil {
				without++
				if !strings.HasPrefix(n.NoMetrics.Reason, "not read within 1m0s") {
					t.Error(n.NoMetrics)
				}
			}
		}
		const want = 8 * 14 // 8 at once, for the last time after 58.5 s
		if measured != want || asked != want || without != 200-want || most != 8 {
			t.Errorf("%d nodes asked, %d at once, %d measured, %d without, want %d", asked, most, measured, without, want)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := cluster.ReadMetrics(ctx, nodes, ""); !errors.Is(err, context.Canceled) || asked != want {
			t.Errorf("%v, %d nodes asked", err, asked)
		}
	})
}
