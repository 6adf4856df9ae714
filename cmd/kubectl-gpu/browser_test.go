// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"flag"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os/exec"
	"strconv"
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

// hand is a script that a test adds to the page: what a user does while the page follows a change.
const hand = `
'use strict';
const until = async (condition) => { while (!condition()) await new Promise((done) => setTimeout(done, 100)); };
addEventListener('load', async () => {
  const node = () => document.getElementById('node-node-1');
  node().open = false;
  document.getElementById('summary-node-1').focus();
  await until(() => document.body.textContent.includes('newcomer'));
  const found = ['open ' + node().open, 'focus ' + document.activeElement.id];
  const filter = document.getElementById('q');
  filter.focus();
  filter.value = 'newcomer';
  filter.dispatchEvent(new Event('input'));
  await until(() => !document.getElementById('node-node-2'));
  found.push('focus ' + document.activeElement.id, location.search);
  document.documentElement.dataset.found = found.join(', ');
});`

// loaded serves a page to a browser by a proxy: it calls changed when the page's script has read the page for the first time, and adds a
// script to the page.
func loaded(t *testing.T, address, script string, changed func()) (through string) {
	t.Helper()
	target, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	var reads atomic.Int32
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(&url.URL{Scheme: target.Scheme, Host: target.Host}) },
		ModifyResponse: func(answer *http.Response) error {
			if answer.Request.URL.Path != target.Path {
				return nil
			}
			switch reads.Add(1) {
			case 1:
				page, err := io.ReadAll(answer.Body)
				page = append(page, `<script src="/hand.js" defer></script>`...)
				answer.Body = io.NopCloser(bytes.NewReader(page))
				answer.ContentLength = int64(len(page))
				answer.Header.Set("Content-Length", strconv.Itoa(len(page)))
				return err
			case 2:
				changed()
			}
			return nil
		},
	}
	mux := http.NewServeMux()
	mux.Handle("/", proxy)
	mux.HandleFunc("/hand.js", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/javascript")
		_, _ = io.WriteString(w, script)
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server.URL + target.Path
}

// TestPageInABrowser: a real browser loads the page's style and script, and its document becomes that of a change after it was loaded. What the
// user has closed, focused and typed stays. No text of the cluster becomes a part of the document's structure.
func TestPageInABrowser(t *testing.T) {
	const reason = `<img src=x onerror="document.body.textContent='x'">`
	for name, c := range map[string]struct{ script, query, found string }{
		"alone":       {"", "", ""},
		"with a user": {hand, "?q=newcomer", ` data-found="open false, focus summary-node-1, focus q, ?q=newcomer"`},
	} {
		t.Run(name, func(t *testing.T) {
			w := pageWorld()
			p, _, _ := w.plugin(t)
			address := w.serve(t, p)
			awaitPage(t, address, "node-4", "node-3", "ml/late", "ml/wide")
			if *screenshot != "" {
				browse(t, "--screenshot="+*screenshot, "--window-size=1100,1060", address)
			}
			connected, err := p.connect()
			if err != nil {
				t.Fatal(err)
			}
			through := loaded(t, address, c.script, func() {
				m := w.machines[0].pod("ml", "newcomer", 7).maintain(6, reason)
				m.gpu(6).Health.Reason = ""
				content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(m.gpuNode())
				if err != nil {
					t.Error(err)
					return
				}
				nodes := connected.cluster.Dynamic.Resource(v1alpha1.Resource)
				if _, err := nodes.Update(t.Context(), &unstructured.Unstructured{Object: content}, metav1.UpdateOptions{}); err != nil {
					t.Error(err)
				}
				if _, err := eventually(address, "newcomer"); err != nil {
					t.Error(err)
				}
			})
			document := browse(t, "--dump-dom", through)
			want := browser.Devices(awaitPage(t, address+c.query, "newcomer"))
			if diff := cmp.Diff(want, browser.Devices(document)); diff != "" || len(want) < 8 || !strings.Contains(document, c.found) {
				t.Errorf("%d devices, want%s (-page +document):\n%s\n%s", len(want), c.found, diff, document)
			}
			if !strings.Contains(document, `<p id="live" role="status"></p>`) {
				t.Errorf("the page says that it is not up to date:\n%s", document)
			}
			if !strings.Contains(document, "&lt;img src=x") || strings.Contains(document, "<img") {
				t.Errorf("the reason of a maintenance:\n%s", document)
			}
		})
	}
}
