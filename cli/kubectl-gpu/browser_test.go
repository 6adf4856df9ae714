// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/browser"
)

const until = `'use strict';
const until = async (condition) => { while (!condition()) await new Promise((done) => setTimeout(done, 100)); };`

// opens is a script that opens a node of many and an owner of waiting pods.
const opens = until + `
addEventListener('load', async () => {
  const opened = (selector) => document.querySelector(selector + '[open]');
  const found = [document.querySelectorAll('table').length];
  for (const [row, content] of [['#node-node-1', 'table'], ['#pending details', 'li']]) {
    document.querySelector(row).open = true;
    await until(() => document.querySelector(row + ' ' + content));
  }
  await until(() => document.body.textContent.includes('newcomer'));
  found.push(!!opened('#node-node-1'), !!opened('#pending details'), new URLSearchParams(location.search).getAll('open').length);
  document.querySelector('#pending details').open = false;
  await until(() => !document.querySelector('#pending details li'));
  found.push(location.search);
  document.documentElement.dataset.found = found.join(', ');
});`

// opensNine is a script that opens one node more than the server sends: the first one closes.
const opensNine = until + `
addEventListener('load', async () => {
  await until(() => document.body.textContent.includes('newcomer'));
  const row = (i) => document.getElementById('node-more-' + i);
  for (let i = 0; i < 9; i++) {
    row(i).open = true;
    await until(() => row(i).querySelector('table'));
  }
  await until(() => !row(0).querySelector('table'));
  const found = [];
  for (let i = 0; i < 9; i++) found.push(row(i).open);
  document.documentElement.dataset.found = found.join(', ');
});`

// hand is a script that a test adds to the page: what a user does while the page follows a change.
const hand = until + `
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
	for name, c := range map[string]struct {
		script, query, found string
		more                 int
	}{
		"alone":       {"", "", "", 0},
		"with a user": {hand, "?q=newcomer", ` data-found="open false, focus summary-node-1, focus q, ?q=newcomer"`, 0},
		"with nine rows open": {
			opensNine, "?open=node-more-1&open=node-more-2&open=node-more-3&open=node-more-4&open=node-more-5&open=node-more-6&open=node-more-7&open=node-more-8",
			` data-found="false, true, true, true, true, true, true, true, true"`, 9,
		},
		"with many nodes": {opens, "?open=node-node-1", ` data-found="0, true, true, 2, ?open=node-node-1"`, 2},
	} {
		t.Run(name, func(t *testing.T) {
			w := pageWorld()
			for i := range c.more {
				w.machines = append(w.machines, full(fmt.Sprintf("more-%d", i), 8))
				w.objects = append(w.objects, pending(fmt.Sprintf("train-%d", i), byLimits(testResource, 1), owned("StatefulSet", "train")))
			}
			p, _, _ := w.plugin(t)
			address := w.serve(t, p)
			awaitPage(t, address, "node-4", "node-3", "ml/late", "ml/wide")
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
			document := browser.Open(t, "--dump-dom", through)
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

// TestPageOfATelephone: each view fits into 400 pixels, with names as long as Kubernetes allows.
func TestPageOfATelephone(t *testing.T) {
	w := pageWorld()
	long := strings.Repeat("a", 253)
	w.machines = append(w.machines, h100s(long, 8).pod("ml", long, 0).maintain(1, long))
	w.objects = append(w.objects, pending(long, byLimits(testResource, 1), scheduler(long)))
	p, _, _ := w.plugin(t)
	address := w.serve(t, p)
	awaitPage(t, address, "node-4", "node-3", "ml/late", "ml/wide", long)
	for name, path := range map[string]string{"long": "", "open": "?q=node:node-", "node": "node?name=" + long, "mig": "node?name=node-2", "why": "why?namespace=ml&pod=wide"} {
		of := browser.Measure(t, "telephone-"+name, address+path, 400)
		if of.ClientWidth != 400 || of.ScrollWidth > 400 || len(of.Wide) > 0 || of.Elements < 20 {
			t.Errorf("%s: %+v", name, of)
		}
	}
}
