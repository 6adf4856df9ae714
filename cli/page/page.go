// SPDX-License-Identifier: Apache-2.0

// Package page serves the web page of kubectl gpu ui: the views of kubectl gpu ls, node and why, and the waiting pods. It runs on the viewer's
// own machine and reads with the viewer's own token, so that the API server authorizes all that it shows. page.go protects the server,
// fleet.go keeps what the views share, search.go finds and orders nodes and pods, and views.go and files write HTML.
package page

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"embed"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tandem-gpu/tandem/cli/overview"
)

//go:embed files
var files embed.FS

// Page is the web page of one viewer. It is safe for concurrent use.
type Page struct {
	where Where
	fleet *fleet
	token string
	views http.Handler
	// why admits one answer at a time, because each reads lists of the whole cluster.
	why chan struct{}
}

// Where says which cluster a page shows.
type Where struct {
	// Context is that of the kubeconfig; empty without one. Server is the API server's host.
	Context, Server string
}

// Options say what a page shows.
type Options struct {
	Where
	// Namespace is that whose waiting pods are shown to a viewer who may not list the pods of all.
	Namespace string
	// ExporterNamespace is the namespace of dcgm-exporter; empty if it may be any.
	ExporterNamespace string
}

// New returns the page of the cluster's viewer. It makes no request before Run.
func New(cluster overview.Cluster, of Options) *Page {
	p := &Page{where: of.Where, fleet: newFleet(cluster, of), token: rand.Text(), why: make(chan struct{}, 1)}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", p.showFleet)
	mux.HandleFunc("GET /node", p.showNode)
	mux.HandleFunc("GET /why", p.showWhy)
	mux.Handle("GET /files/", http.FileServerFS(files))
	p.views = mux
	return p
}

// Path is the path of the page. It contains a random token, which other users of the machine and other pages in the viewer's browser do not know.
func (p *Page) Path() string { return "/" + p.token + "/" }

const (
	// endsWithin bounds how long requests may still take when ctx is done.
	endsWithin = 2 * time.Second
	// A request comes from a browser on the same machine. An answer of why may read a large cluster.
	readsWithin  = 10 * time.Second
	writesWithin = 5 * time.Minute
	// answersWithin bounds an answer of why, for which other requests wait. It leaves time to write an error.
	answersWithin = writesWithin - readsWithin
	mostHeader    = 16 << 10
)

// Run serves the page until ctx is done, or until the viewer may not read GPUNodes, and closes the listener. The listener must be one of the
// loopback interface.
func (p *Page) Run(ctx context.Context, listener net.Listener) error {
	defer listener.Close()
	if address, err := netip.ParseAddrPort(listener.Addr().String()); err != nil || !address.Addr().IsLoopback() {
		return fmt.Errorf("serve the page on %s: it is not an address of the loopback interface", listener.Addr())
	}
	group, ctx := errgroup.WithContext(ctx)
	p.fleet.run(ctx, group)
	server := &http.Server{
		Handler: p, BaseContext: func(net.Listener) context.Context { return ctx },
		ReadTimeout: readsWithin, WriteTimeout: writesWithin, MaxHeaderBytes: mostHeader,
	}
	group.Go(func() error {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve the page: %w", err)
		}
		return nil
	})
	group.Go(func() error {
		<-ctx.Done()
		ends, cancel := context.WithTimeout(context.WithoutCancel(ctx), endsWithin)
		defer cancel()
		if err := server.Shutdown(ends); err != nil {
			return server.Close()
		}
		return nil
	})
	return group.Wait()
}

// policy lets the page load its own files and nothing else. The page has no inline scripts or styles.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

// ServeHTTP answers requests that have the token and name this machine.
func (p *Page) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	for name, value := range map[string]string{
		"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
		"Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
	} {
		w.Header().Set(name, value)
	}
	switch token, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/"); {
	case !thisMachine(r.Host):
		// Another site's name resolves to this machine (DNS rebinding).
		http.Error(w, "Open the page as 127.0.0.1 or localhost.", http.StatusForbidden)
	case subtle.ConstantTimeCompare([]byte(token), []byte(p.token)) != 1:
		http.Error(w, "Open the address that kubectl gpu ui has printed.", http.StatusForbidden)
	default:
		http.StripPrefix("/"+p.token, p.views).ServeHTTP(w, r)
	}
}

// thisMachine reports whether the Host header names this machine. The port differs if the connection is forwarded.
func thisMachine(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = host
	}
	return name == "localhost" || name == "127.0.0.1" || strings.Trim(name, "[]") == "::1"
}
