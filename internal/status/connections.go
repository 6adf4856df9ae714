// SPDX-License-Identifier: Apache-2.0

package status

import (
	"net"
	"net/http"
	"sync"
)

// connectionsMax bounds the memory for connections: some 20 KiB each in this process, and what the kernel buffers.
const connectionsMax = 256

// connections closes a connection for each one above connectionsMax. Every pod may connect, so the port always accepts: a listener that
// waits for a free connection (netutil.LimitListener) would keep kubelet's probes waiting. It closes the oldest idle connection, or else
// the oldest one. A probe is newer and takes less than a millisecond.
type connections struct {
	mu   sync.Mutex
	open map[net.Conn]connection
	seen uint64
}

type connection struct {
	at   uint64
	idle bool
}

func (c connection) endsBefore(other connection) bool {
	if c.idle != other.idle {
		return c.idle
	}
	return c.at < other.at
}

// changed implements http.Server.ConnState. The server accepts no other connection until it has returned for the one before.
func (c *connections) changed(conn net.Conn, state http.ConnState) {
	if victim := c.note(conn, state); victim != nil {
		// Without this, the kernel keeps what the client does not read.
		if tcp, ok := victim.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0)
		}
		_ = victim.Close()
	}
}

// note returns the connection to close, or nil.
func (c *connections) note(conn net.Conn, state http.ConnState) (victim net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch state {
	case http.StateNew:
		if len(c.open) >= connectionsMax {
			for candidate, is := range c.open {
				if victim == nil || is.endsBefore(c.open[victim]) {
					victim = candidate
				}
			}
			delete(c.open, victim)
		}
		c.seen++
		c.open[conn] = connection{at: c.seen}
	case http.StateActive, http.StateIdle:
		// A connection that was closed above is not there.
		if is, ok := c.open[conn]; ok {
			c.open[conn] = connection{at: is.at, idle: state == http.StateIdle}
		}
	default:
		delete(c.open, conn)
	}
	return victim
}
