// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"net"
	"sync"
)

// gate holds up everything that kubelet would read while it is frozen. What is written meanwhile waits in the sockets, as
// it does with a stopped process.
type gate struct {
	mu   sync.Mutex
	open chan struct{} // closed while open
}

func newGate() *gate {
	g := &gate{open: make(chan struct{})}
	close(g.open)
	return g
}

func (g *gate) freeze() {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-g.open:
		g.open = make(chan struct{})
	default:
	}
}

func (g *gate) thaw() {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-g.open:
	default:
		close(g.open)
	}
}

func (g *gate) pass(ctx context.Context) error {
	g.mu.Lock()
	open := g.open
	g.mu.Unlock()
	select {
	case <-open:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

type gatedListener struct {
	net.Listener
	gate *gate
}

func (l *gatedListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &gatedConn{Conn: conn, gate: l.gate}, nil
}

type gatedConn struct {
	net.Conn
	gate *gate
}

// Read returns what arrived, or that the peer is gone, only while kubelet is awake.
func (c *gatedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	_ = c.gate.pass(context.Background())
	return n, err
}
