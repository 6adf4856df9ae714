// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"flag"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/browser"
)

// screenshot names the file for a picture of the page, such as ../../docs/user/kubectl-gpu-ui.png.
var screenshot = flag.String("screenshot", "", "write a screenshot of the page to this file")

// browse runs the browser and returns what it prints.
func browse(t *testing.T, args ...string) string {
	t.Helper()
	if err := browser.Find(); err != nil {
		t.Skip(err)
	}
	cmd := exec.CommandContext(t.Context(), browser.Program, browser.Args(t.TempDir(), args...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, &stderr)
	}
	for _, complaint := range browser.Complaints(stderr.String()) {
		t.Error(complaint)
	}
	return string(out)
}

// TestPageInABrowser: a real browser loads the page's style and script, and its document becomes that of a change after it was loaded. No
// text of the cluster becomes a part of the document's structure.
func TestPageInABrowser(t *testing.T) {
	const reason = `<img src=x onerror="document.body.textContent='x'">`
	w := pageWorld()
	p, _, _ := w.plugin(t)
	address := w.serve(t, p)
	awaitPage(t, address, "node-4", "node-3", "ml/late", "ml/wide")
	if *screenshot != "" {
		browse(t, "--screenshot="+*screenshot, "--window-size=1100,1060", address)
	}
	c, err := p.connect()
	if err != nil {
		t.Fatal(err)
	}
	change := func() {
		m := w.machines[0].pod("ml", "newcomer", 7).maintain(6, reason)
		m.gpu(6).Health.Reason = ""
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(m.gpuNode())
		if err != nil {
			t.Error(err)
			return
		}
		if _, err := c.cluster.Dynamic.Resource(v1alpha1.Resource).Update(t.Context(), &unstructured.Unstructured{Object: content}, metav1.UpdateOptions{}); err != nil {
			t.Error(err)
		}
		if _, err := eventually(address, "newcomer"); err != nil {
			t.Error(err)
		}
	}
	// A proxy between the browser and the page knows when the browser has loaded it.
	target, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	var reads atomic.Int32
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(&url.URL{Scheme: target.Scheme, Host: target.Host}) },
		ModifyResponse: func(answer *http.Response) error {
			if answer.Request.URL.Path == target.Path {
				if reads.Add(1) == 2 { // the first read of the script
					change()
				}
			}
			return nil
		},
	}
	server := httptest.NewServer(proxy)
	defer server.Close()
	dom := browse(t, "--dump-dom", server.URL+target.Path)
	after := awaitPage(t, address, "newcomer")
	if diff := cmp.Diff(browser.Devices(after), browser.Devices(dom)); diff != "" || len(browser.Devices(dom)) != 15 || reads.Load() < 3 {
		t.Errorf("%d reads, %d devices (-page +document):\n%s\n%s", reads.Load(), len(browser.Devices(dom)), diff, dom)
	}
	if !strings.Contains(dom, `<p id="live" role="status"></p>`) {
		t.Errorf("the page says that it is not up to date:\n%s", dom)
	}
	if !strings.Contains(dom, "&lt;img src=x") || strings.Contains(dom, "<img") {
		t.Errorf("the reason of a maintenance:\n%s", dom)
	}
}
