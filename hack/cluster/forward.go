// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"golang.org/x/sync/errgroup"
)

// Forward connects the clients of a listener of the host with an address in the cluster's network, until ctx ends. It closes the
// listener and all connections, and then returns nil. A connection that the cluster refuses is closed.
func (c *Cluster) Forward(ctx context.Context, listener net.Listener, address string) error {
	return forward(ctx, listener, func(ctx context.Context) (net.Conn, error) { return c.DialContext(ctx, "tcp", address) })
}

func forward(ctx context.Context, listener net.Listener, dial func(context.Context) (net.Conn, error)) error {
	stop := context.AfterFunc(ctx, func() { listener.Close() })
	defer stop()
	var connections sync.WaitGroup
	defer connections.Wait()
	for {
		near, err := listener.Accept()
		if ctx.Err() != nil {
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

// join copies both ways until both have ended, or ctx has. It closes far.
func join(ctx context.Context, near, far net.Conn) {
	defer far.Close()
	stop := context.AfterFunc(ctx, func() {
		near.Close()
		far.Close()
	})
	defer stop()
	var group errgroup.Group
	copyTo := func(to, from net.Conn) func() error {
		return func() error {
			_, err := io.Copy(to, from)
			if half, ok := to.(interface{ CloseWrite() error }); ok {
				err = errors.Join(err, half.CloseWrite())
			}
			return err
		}
	}
	group.Go(copyTo(near, far))
	group.Go(copyTo(far, near))
	_ = group.Wait() // the ends notice
}
