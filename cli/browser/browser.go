// SPDX-License-Identifier: Apache-2.0

// Package browser runs a real browser for tests of kubectl gpu's page. Only tests import it.
package browser

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"html"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
)

// screenshots is a directory for pictures of the pages that tests open, such as docs/user.
var screenshots = flag.String("screenshots", "", "write screenshots of the tested pages to this directory")

// Program is the browser, of Debian's package of that name.
const Program = "chromium"

// ErrMissing says how to install the browser.
var ErrMissing = errors.New("there is no chromium: make deps installs it on Debian")

// Find returns ErrMissing if there is no browser.
func Find() error {
	if _, err := exec.LookPath(Program); err != nil {
		return ErrMissing
	}
	return nil
}

// Args returns the arguments for a browser without a window, with a directory for its files. Its clock advances ten seconds while it waits
// for nothing, so that the page's timers run at once.
func Args(dir string, more ...string) []string {
	return args(dir, append([]string{"--virtual-time-budget=10000"}, more...)...)
}

func args(dir string, more ...string) []string {
	args := []string{"--headless", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--enable-logging=stderr", "--user-data-dir=" + dir}
	if os.Geteuid() == 0 { // its sandbox refuses root
		args = append(args, "--no-sandbox")
	}
	return append(args, more...)
}

// Open runs the browser and returns what it prints. It skips the test if there is no browser, and reports what the page's scripts and its
// security policy complain about.
func Open(t testing.TB, more ...string) string {
	t.Helper()
	return open(t, Args(t.TempDir(), more...))
}

func open(t testing.TB, args []string) string {
	t.Helper()
	if err := Find(); err != nil {
		t.Skip(err)
	}
	cmd := exec.CommandContext(t.Context(), Program, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, &stderr)
	}
	for _, complaint := range Complaints(stderr.String()) {
		t.Error(complaint)
	}
	return string(out)
}

// Screenshot writes a picture of a page with the flag -screenshots.
func Screenshot(t testing.TB, name, address string, width, height int) {
	t.Helper()
	if *screenshots == "" {
		return
	}
	file := filepath.Join(*screenshots, name+".png")
	Open(t, "--screenshot="+file, fmt.Sprintf("--window-size=%d,%d", width, height), address)
}

// Size is how large a page is when it has loaded.
type Size struct {
	// Elements is their number, Bytes the length of the page itself, without the files that it loads.
	Elements, Bytes int
	// ClientWidth is what the browser shows, and ScrollWidth what the page needs.
	ClientWidth, ScrollWidth int
	// Wide are texts of elements that are wider than what the browser shows.
	Wide []string
	// Loaded is how many milliseconds the browser has loaded it. No test checks it.
	Loaded float64
}

// frame is a page that shows another one in so many pixels. A window of the browser is not as narrow as a telephone.
const frame = `<!DOCTYPE html><body style="margin: 0"><iframe style="border: 0; width: %dpx; height: 100vh"></iframe><script>
const f = document.querySelector('iframe');
f.onload = () => {
  const root = f.contentDocument.documentElement, w = f.contentWindow;
  document.body.dataset.size = JSON.stringify({
    Elements: root.querySelectorAll('*').length + 1, ClientWidth: root.clientWidth, ScrollWidth: root.scrollWidth,
    Wide: [...root.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > root.clientWidth + 1).slice(0, 5).map((e) => e.outerHTML.slice(0, 200)),
    Loaded: w.performance.now(),
  });
};
f.src = %q;
</script>`

var size = regexp.MustCompile(`data-size="([^"]*)"`)

// Measure opens a page at a width in pixels.
func Measure(t testing.TB, name, address string, width int) (of Size) {
	t.Helper()
	target, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	var length atomic.Int64
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(&url.URL{Scheme: target.Scheme, Host: target.Host}) },
		ModifyResponse: func(answer *http.Response) error {
			answer.Header.Del("Content-Security-Policy") // it forbids frames
			if answer.Request.URL.Path != target.Path || answer.StatusCode != http.StatusOK {
				return nil
			}
			page, err := io.ReadAll(answer.Body)
			answer.Body = io.NopCloser(bytes.NewReader(page))
			length.Store(int64(len(page)))
			return err
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) }, // the browser has gone
	}
	mux := http.NewServeMux()
	mux.Handle("/", proxy)
	mux.HandleFunc("/{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		fmt.Fprintf(w, frame, width, target.RequestURI())
	})
	server := httptest.NewServer(mux)
	defer server.Close()
	document := open(t, args(t.TempDir(), "--dump-dom", server.URL+"/"))
	found := size.FindStringSubmatch(document)
	if found == nil {
		t.Fatalf("the page is not loaded:\n%s", document)
	}
	if err := json.Unmarshal([]byte(html.UnescapeString(found[1])), &of); err != nil {
		t.Fatal(err)
	}
	of.Bytes = int(length.Load())
	Screenshot(t, name, server.URL+"/", max(width, 500), 900)
	t.Logf("%s at %d px: %d elements, %d bytes, %.0f ms", name, width, of.Elements, of.Bytes, of.Loaded)
	return of
}

// Complaints returns what a page's scripts and its security policy have reported, from the browser's standard error.
func Complaints(stderr string) (lines []string) {
	for line := range strings.Lines(stderr) {
		if strings.Contains(line, "CONSOLE") {
			lines = append(lines, line)
		}
	}
	return lines
}

// row is a device in the page.
var row = regexp.MustCompile(`<th scope="row"[^>]*>([^<]*)</th><td>([^<]*)</td><td data-state="(\w+)">[^<]*</td><td>([^<]*)</td><td>([^<]*)</td><td>([^<]*)</td>`)

// Devices returns the devices of the page, each with name, model, state, share, holders and reason. The page is what the server sends, or the
// document that a browser prints.
func Devices(page string) (found [][]string) {
	for _, match := range row.FindAllStringSubmatch(page, -1) {
		var cells []string
		for _, cell := range match[1:] {
			cells = append(cells, html.UnescapeString(cell))
		}
		found = append(found, cells)
	}
	return found
}

// Owner is a row of waiting pods.
type Owner struct {
	Name, Requests, Reason string
	Pods                   int
}

var owner = regexp.MustCompile(
	`<a id="why-[^>]*>([^<]*)</a>(?: <span>(\d+) pods</span>)? <span>([^<]*)</span>(?: <time[^>]*>[^<]*</time>)? <span>([^<]*)</span>`)

// Waiting returns the waiting pods of the page by their owners.
func Waiting(page string) (found []Owner, pods int) {
	for _, match := range owner.FindAllStringSubmatch(page, -1) {
		of := Owner{Name: html.UnescapeString(match[1]), Requests: html.UnescapeString(match[3]), Reason: html.UnescapeString(match[4]), Pods: 1}
		if n, err := strconv.Atoi(match[2]); err == nil {
			of.Pods = n
		}
		found, pods = append(found, of), pods+of.Pods
	}
	return found, pods
}
