// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
)

// Forward forwards connections from a listener on the host to an address in the cluster's network, until ctx ends. It then closes the
// listener and all connections, and returns nil. A connection that the cluster refuses is closed and told to Config.Progress.
func (c *Cluster) Forward(ctx context.Context, listener net.Listener, to netip.AddrPort) error {
	return forward(ctx, listener, func(ctx context.Context) (net.Conn, error) {
		far, err := c.DialContext(ctx, "tcp", to.String())
		if err != nil {
			c.say("cannot forward a connection to %s: %v", to, err)
		}
		return far, err
	})
}

func forward(ctx context.Context, listener net.Listener, dial func(context.Context) (net.Conn, error)) error {
	var connections sync.WaitGroup
	defer connections.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { listener.Close() })
	defer stop()
	for {
		near, err := listener.Accept()
		if ctx.Err() != nil {
			if err == nil {
				near.Close()
			}
			return nil
		}
		if err != nil {
			return errors.Join(fmt.Errorf("accept at %s: %w", listener.Addr(), err), listener.Close())
		}
		connections.Go(func() {
			defer near.Close()
			if far, err := dial(ctx); err == nil {
				join(ctx, near, far)
			}
		})
	}
}

// join copies both ways until both have ended, or ctx has. It closes far. The two ends notice errors.
func join(ctx context.Context, near, far net.Conn) {
	defer far.Close()
	stop := context.AfterFunc(ctx, func() {
		near.Close()
		far.Close()
	})
	defer stop()
	var directions sync.WaitGroup
	directions.Go(func() { copyHalf(near, far) })
	directions.Go(func() { copyHalf(far, near) })
	directions.Wait()
}

func copyHalf(to, from net.Conn) {
	_, _ = io.Copy(to, from)
	if half, ok := to.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
	}
}
