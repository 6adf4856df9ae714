// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sync/errgroup"
)

// ui serves the page of kubectl gpu ui at an address of this machine until ctx ends, and then returns nil. The command runs in the cluster's
// network and listens at the same port there, so the address that it prints also works on the host.
func ui(ctx context.Context, dir string) error {
	c, err := open(dir)
	if err != nil {
		return err
	}
	plugin, err := pluginPath(ctx)
	if err != nil {
		return err
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("serve the page: %w", err)
	}
	defer listener.Close()
	address, err := netip.ParseAddrPort(listener.Addr().String())
	if err != nil {
		return fmt.Errorf("serve the page: %w", err)
	}
	group, ctx := errgroup.WithContext(ctx)
	cmd, err := c.Command(ctx, plugin, "ui", "--port", fmt.Sprint(address.Port()))
	if err != nil {
		return err
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	// The kernel ends the plugin with this thread, so also where this process is killed. The thread is this goroutine's as long as it waits.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	cmd.Stderr = os.Stderr
	output, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return fmt.Errorf("start kubectl gpu ui: %w", err)
	}
	group.Go(func() error {
		page, err := bufio.NewReader(output).ReadString('\n')
		if err == nil {
			fmt.Printf("Open %s in a browser on this machine. Ctrl-C ends it.\n", strings.TrimSpace(page))
		}
		if err := cmd.Wait(); ctx.Err() == nil {
			return errors.Join(errors.New("kubectl gpu ui has ended"), err)
		}
		return nil
	})
	group.Go(func() error { return c.Forward(ctx, listener, address) })
	return group.Wait()
}
