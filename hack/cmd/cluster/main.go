// SPDX-License-Identifier: Apache-2.0

// Command cluster starts, inspects, enters and removes a real Kubernetes cluster on this machine (hack/cluster).
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/tandem-gpu/tandem/hack/binaries"
	"github.com/tandem-gpu/tandem/hack/cluster"
)

const usage = `usage: cluster [-dir DIR] COMMAND [arguments]

  build [-kubernetes V]                build or fetch the programs of a cluster and do nothing else
  up [-kubernetes V] [-nodes N]        start a cluster (or complete one that lost parts)
  status                               what runs
  exec [COMMAND ...]                   run a program of this machine in the cluster's network, with kubectl and helm at hand; a shell by default
  forward PORT IP:PORT                 forward connections to 127.0.0.1:PORT of this machine to an address in the cluster's network
  node NAME [COMMAND ...]              run a command on a node; a shell by default
  kubeconfig                           path of the kubeconfig (its server is reachable with "exec" only)
  start|stop|kill|restart|freeze|thaw COMPONENT [NODE]
  reboot NODE                          power cut and boot
  load TARBALL ...                     load image archives into every node
  logs DIR                             collect logs into a directory
  down                                 end the cluster and remove everything of it
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:])
	var ended endedWith
	switch {
	case errors.As(err, &ended):
		os.Exit(int(ended))
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	cache, err := binaries.CacheDir()
	if err != nil {
		return err
	}
	flags := flag.NewFlagSet("cluster", flag.ContinueOnError)
	flags.Usage = func() { fmt.Fprint(os.Stderr, usage) }
	dir := flags.String("dir", filepath.Join(cache, "clusters", "default"), "directory of the cluster")
	if err := flags.Parse(args); err != nil {
		return err
	}
	command, args := flags.Arg(0), flags.Args()[min(1, flags.NArg()):]
	switch command {
	case "build":
		return build(ctx, args)
	case "up":
		return up(ctx, *dir, args)
	case "":
		flags.Usage()
		return flag.ErrHelp
	}
	c, err := cluster.Open(*dir, os.Stderr)
	if errors.Is(err, cluster.ErrNoCluster) && command == "down" {
		return nil
	}
	if err != nil {
		return err
	}
	return act(ctx, c, command, args)
}

func act(ctx context.Context, c *cluster.Cluster, command string, args []string) error {
	switch command {
	case "status":
		return status(c)
	case "exec":
		return interact(c.Command(ctx, first(args, "bash"), rest(args)...))
	case "node":
		node, err := theNode(c, first(args, ""))
		if err != nil {
			return err
		}
		args = rest(args)
		return interact(node.Command(ctx, first(args, "bash"), rest(args)...))
	case "forward":
		return forward(ctx, c, first(args, ""), first(rest(args), ""))
	case "kubeconfig":
		fmt.Println(c.Kubeconfig())
		return nil
	case "reboot":
		node, err := theNode(c, first(args, ""))
		if err != nil {
			return err
		}
		return node.Reboot(ctx)
	case "load":
		for _, tarball := range args {
			if err := c.LoadImage(ctx, tarball); err != nil {
				return err
			}
		}
		return nil
	case "logs":
		return c.CollectLogs(ctx, first(args, "logs"))
	case "down":
		return c.Stop(ctx)
	}
	return steer(ctx, c, command, args)
}

func steer(ctx context.Context, c *cluster.Cluster, command string, args []string) error {
	component := c.Component(first(args, ""))
	if len(args) > 1 || component == nil {
		node, err := theNode(c, first(rest(args), ""))
		if err != nil {
			return err
		}
		component = node.Component(first(args, ""))
	}
	if component == nil {
		return fmt.Errorf("no component %q", first(args, ""))
	}
	switch command {
	case "start":
		return component.Start(ctx)
	case "stop":
		return component.Stop(ctx)
	case "kill":
		return component.Kill(ctx)
	case "restart":
		return component.Restart(ctx)
	case "freeze":
		return component.Freeze()
	case "thaw":
		return component.Thaw()
	}
	return fmt.Errorf("unknown command %q\n%s", command, usage)
}

func forward(ctx context.Context, c *cluster.Cluster, port, address string) error {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return fmt.Errorf("forward: want PORT and IP:port of the cluster: %w", err)
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:"+port)
	if err != nil {
		return fmt.Errorf("forward: %w", err)
	}
	fmt.Printf("Forwarding %s to %s. Ctrl-C ends it.\n", listener.Addr(), to)
	return c.Forward(ctx, listener, to)
}

func build(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("build", flag.ContinueOnError)
	version := flags.String("kubernetes", binaries.DefaultKubernetes, "Kubernetes version")
	if err := flags.Parse(args); err != nil {
		return err
	}
	_, err := binaries.Ensure(ctx, binaries.Options{Kubernetes: []string{*version}, Progress: os.Stderr})
	return err
}

func up(ctx context.Context, dir string, args []string) error {
	flags := flag.NewFlagSet("up", flag.ContinueOnError)
	version := flags.String("kubernetes", binaries.DefaultKubernetes, "Kubernetes version")
	nodes := flags.Int("nodes", 1, "number of nodes")
	if err := flags.Parse(args); err != nil {
		return err
	}
	config := cluster.Config{Dir: dir, KubernetesVersion: *version, Progress: os.Stderr}
	for i := range *nodes {
		config.Nodes = append(config.Nodes, cluster.NodeConfig{Name: fmt.Sprintf("node-%d", i+1)})
	}
	c, err := cluster.New(config)
	if err != nil {
		return err
	}
	return c.Start(ctx)
}

func status(c *cluster.Cluster) error {
	fmt.Printf("Kubernetes %s in %s\n", c.Config().KubernetesVersion, c.Config().Dir)
	show := func(where string, component *cluster.Component) {
		state := "down"
		if pid, err := component.Pid(); err == nil {
			state = fmt.Sprintf("pid %d", pid)
		}
		fmt.Printf("  %-16s %-26s %s\n", where, component.Name(), state)
	}
	for _, name := range []string{cluster.Etcd, cluster.APIServer, cluster.ControllerManager, cluster.Scheduler} {
		show("control-plane", c.Component(name))
	}
	for _, node := range c.Nodes() {
		for _, name := range []string{cluster.Containerd, cluster.Kubelet, cluster.KubeProxy} {
			show(node.Name(), node.Component(name))
		}
	}
	return nil
}

// endedWith is the exit status of a program that we ran for the user: it has said itself what was wrong.
type endedWith int

func (e endedWith) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// interact runs a command on this terminal.
func interact(cmd *exec.Cmd, err error) error {
	if err != nil {
		return err
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	// Only the terminal's own process group may read from it; that group gets the terminal's signals, too.
	cmd.SysProcAttr, cmd.Cancel = nil, func() error { return nil }
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() >= 0 {
		return endedWith(exit.ExitCode())
	}
	return err
}

func theNode(c *cluster.Cluster, name string) (*cluster.Node, error) {
	var names []string
	for _, node := range c.Nodes() {
		if node.Name() == name || name == "" && len(c.Nodes()) == 1 {
			return node, nil
		}
		names = append(names, node.Name())
	}
	return nil, fmt.Errorf("no node %q: there is %s", name, strings.Join(names, ", "))
}

func first(args []string, otherwise string) string {
	if len(args) == 0 {
		return otherwise
	}
	return args[0]
}

func rest(args []string) []string { return args[min(1, len(args)):] }
