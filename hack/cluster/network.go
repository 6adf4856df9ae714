// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"os"
	"strings"
)

// Addresses exist only inside the cluster's own network namespaces: they cannot clash with the host's or another cluster's.
const (
	controlIP   = "10.88.0.1"
	apiAddress  = controlIP + ":6443"
	serviceCIDR = "10.96.0.0/16"
	serviceIP   = "10.96.0.1"
	dnsIP       = "10.96.0.10"
	podCIDR     = "10.244.0.0/16"
)

func nodeIP(i int) string   { return fmt.Sprintf("10.88.0.%d", 11+i) }
func nodePods(i int) string { return fmt.Sprintf("10.244.%d.0/24", i+1) }
func nodeLink(i int) string { return fmt.Sprintf("node%d", i) }

// wireControl gives the control plane's machine the switch that all nodes are plugged into, and a way to every pod.
func (c *Cluster) wireControl(ctx context.Context) error {
	commands := []string{
		"link set lo up",
		"link add switch type bridge forward_delay 0",
		"addr add " + controlIP + "/24 dev switch",
		"link set switch up",
	}
	for i := range c.nodes {
		commands = append(commands, fmt.Sprintf("route add %s via %s", nodePods(i), nodeIP(i)))
	}
	return c.control.ip(ctx, commands)
}

// wireNode plugs a node that has just booted into the switch.
func (c *Cluster) wireNode(ctx context.Context, i int) error {
	node := c.nodes[i].machine
	holder, err := node.holder()
	if err != nil {
		return err
	}
	// After a reboot the kernel may still be about to remove the old pair: it removes it now.
	if cmd, err := c.control.networkCommand(ctx, "ip", "link", "del", nodeLink(i)); err != nil {
		return err
	} else if err := cmd.Run(); err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	err = c.control.ip(ctx, []string{
		fmt.Sprintf("link add %s type veth peer name eth0 netns %d", nodeLink(i), holder.Pid),
		fmt.Sprintf("link set %s master switch up", nodeLink(i)),
	})
	if err != nil {
		return err
	}
	commands := []string{
		"link set lo up",
		"addr add " + nodeIP(i) + "/24 dev eth0",
		"link set eth0 up",
		"route add default via " + controlIP,
	}
	for other := range c.nodes {
		if other != i {
			commands = append(commands, fmt.Sprintf("route add %s via %s", nodePods(other), nodeIP(other)))
		}
	}
	if err := node.ip(ctx, commands); err != nil {
		return err
	}
	return node.sysctl(ctx, "net/ipv4/ip_forward", "1")
}

// ip runs commands of ip(8) in the machine's network namespace.
func (m *machine) ip(ctx context.Context, commands []string) error {
	cmd, err := m.networkCommand(ctx, "ip", "-batch", "-")
	if err != nil {
		return err
	}
	cmd.Stdin = strings.NewReader(strings.Join(commands, "\n") + "\n")
	if err := run(cmd); err != nil {
		return fmt.Errorf("set up network of %s: %w", m.name, err)
	}
	return nil
}

// sysctl sets a kernel setting of the machine's network namespace.
func (m *machine) sysctl(ctx context.Context, setting, value string) error {
	cmd, err := m.command(ctx, "/bin/sh", "-c", `echo "$2" > "/proc/sys/$1"`, "sh", setting, value)
	if err != nil {
		return err
	}
	if err := run(cmd); err != nil {
		return fmt.Errorf("set %s of %s: %w", setting, m.name, err)
	}
	return nil
}

// loadModules asks for kernel modules that the cluster uses. Kernels that have them built in need no answer, so none is checked.
func loadModules(ctx context.Context) {
	cmd := hostCommand(ctx, "modprobe", "-a", "overlay", "br_netfilter", "veth", "bridge", "nf_tables", "nft_compat")
	cmd.Stdout, cmd.Stderr = nil, nil
	if err := cmd.Run(); err != nil && os.Getenv("TANDEM_DEBUG") != "" {
		fmt.Fprintln(os.Stderr, "modprobe:", err)
	}
}
