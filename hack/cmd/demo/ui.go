// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sync/errgroup"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/install"
)

// ui serves the page of kubectl gpu ui at an address of this machine until ctx ends. The plugin runs in the cluster's network. It listens at
// the same port there, so that the address that it prints is right here, too.
func ui(ctx context.Context, dir string) error {
	c, err := cluster.Open(dir, nil)
	if err != nil {
		return fmt.Errorf("find the demo (make demo starts it): %w", err)
	}
	root, err := gotool.Root(ctx)
	if err != nil {
		return err
	}
	plugin := filepath.Join(root, "bin", "kubectl-gpu")
	build := exec.CommandContext(ctx, "go", "build", "-o", plugin, "./cmd/kubectl-gpu")
	build.Dir, build.Stdout, build.Stderr = root, os.Stderr, os.Stderr
	if err := build.Run(); err != nil {
		return fmt.Errorf("build kubectl-gpu: %w", err)
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer listener.Close()
	address := listener.Addr().String()
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return err
	}
	cmd, err := c.Command(ctx, plugin, "ui", "--port", port)
	if err != nil {
		return err
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.Stderr = os.Stderr
	output, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start kubectl gpu ui: %w", err)
	}
	page, err := bufio.NewReader(output).ReadString('\n')
	if err != nil {
		return errors.Join(errors.New("kubectl gpu ui has ended"), cmd.Wait())
	}
	fmt.Printf("Open %s in a browser on this machine. Ctrl-C ends it.\n", strings.TrimSpace(page))
	group, forwarding := errgroup.WithContext(ctx)
	group.Go(func() error { return c.Forward(forwarding, listener, address) })
	group.Go(func() error {
		if err := cmd.Wait(); ctx.Err() == nil {
			return fmt.Errorf("kubectl gpu ui has ended: %w", err)
		}
		return context.Cause(ctx)
	})
	if err := group.Wait(); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// agentAddress is where Prometheus finds the metrics of the demo's agent, in the cluster's network.
func (d *demo) agentAddress(ctx context.Context) (string, error) {
	ip, err := d.cluster.Kubectl(ctx, "get", "pods", "-n", install.Namespace, "-l", "app.kubernetes.io/component=kubelet-plugin",
		"-o", "jsonpath={.items[0].status.podIP}")
	return net.JoinHostPort(ip, strconv.Itoa(8080)), err
}
