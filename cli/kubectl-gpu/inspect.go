// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"os/exec"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/internal/terminal"
)

// agentContainer is the container of the agent's pod, and the program in it.
const agentContainer = "kubelet-plugin"

func (p *plugin) inspect() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "inspect NODE",
		Short: "Print what the agent of a node reads of the NVIDIA driver",
		Long: "Run kubelet-plugin inspect in the agent's pod of a node, by kubectl exec, and print its report. Without the right to list\n" +
			"ClusterRoleBindings, give the agents' namespace with --namespace.",
		Example: "  kubectl gpu inspect node-1\n  kubectl gpu inspect node-1 -o json > node-1.json",
		Args:    oneArgument("a node", "kubectl gpu inspect node-1; kubectl gpu ls lists the nodes"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !slices.Contains([]string{"text", "json", "slices"}, output) {
				return fmt.Errorf("--output: %q is not text, json or slices", output)
			}
			c, err := p.open()
			if err != nil {
				return err
			}
			pod, err := c.cluster.AgentPod(cmd.Context(), c.only(false), args[0])
			if err != nil {
				return err
			}
			return p.exec(cmd, pod, output != "text", "inspect", "-o", output)
		},
		ValidArgsFunction: p.completeNodes(1),
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text, json or slices")
	return cmd
}

// exec runs the agent's program in its pod by kubectl, with the flags of the connection that the user has set. It makes all output harmless,
// because the agent may have been taken over. utf8 says that the output is data (JSON, YAML), which keeps its characters whatever the
// terminal can show.
func (p *plugin) exec(cmd *cobra.Command, pod *corev1.Pod, utf8 bool, arguments ...string) error {
	var args []string
	cmd.InheritedFlags().VisitAll(func(f *pflag.Flag) {
		switch values, several := f.Value.(pflag.SliceValue); {
		case !f.Changed || f.Name == "namespace" || f.Name == driverNameFlag:
		case several:
			for _, value := range values.GetSlice() {
				args = append(args, "--"+f.Name+"="+value)
			}
		default:
			args = append(args, "--"+f.Name+"="+f.Value.String())
		}
	})
	args = append(args, "exec", "--namespace="+pod.Namespace, pod.Name, "--container="+agentContainer, "--", agentContainer)
	stdout, stderr := terminal.Writer(p.streams.Out, !utf8 && !p.style.UTF8), terminal.Writer(p.streams.ErrOut, !p.errors.UTF8)
	if err := p.kubectl(cmd.Context(), stdout, stderr, append(args, arguments...)...); err != nil {
		return fmt.Errorf("run %s %s in pod %s/%s: %w", agentContainer, arguments[0], pod.Namespace, pod.Name, err)
	}
	return nil
}

// runKubectl runs the kubectl in PATH, which has run this plugin.
func runKubectl(ctx context.Context, stdout, stderr io.Writer, args ...string) error {
	cmd := exec.CommandContext(ctx, "kubectl", args...)
	cmd.Stdout, cmd.Stderr = stdout, stderr
	return cmd.Run()
}
