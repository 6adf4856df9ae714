// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/cli/overview"
)

func (p *plugin) ls() *cobra.Command {
	var output string
	var watch, all bool
	cmd := &cobra.Command{
		Use:     "ls [NODE...]",
		Aliases: []string{"list"},
		Short:   "List GPUs and partitions with their holders",
		Long: "List the GPUs and the existing partitions of all nodes, or of some, with their holders. With --namespace, list only the\n" +
			"devices that the namespace uses.",
		Example: "  kubectl gpu ls\n  kubectl gpu ls node-1 -o wide\n  kubectl gpu ls -n ml -w",
		RunE: func(cmd *cobra.Command, names []string) error {
			if watch && (output == "json" || output == "yaml") {
				return errors.New("--watch prints rows: it excludes --output json and yaml")
			}
			c, err := p.open()
			if err != nil {
				return err
			}
			namespace := c.only(all)
			if watch {
				return p.watch(cmd.Context(), c.cluster, namespace, overview.View{Wide: output == "wide"}, names)
			}
			nodes, err := p.nodes(cmd.Context(), c.cluster, namespace, names)
			if err != nil {
				return err
			}
			return p.list(nodes, namespace, output, overview.View{})
		},
		ValidArgsFunction: p.completeNodes(0),
	}
	listFlags(cmd, &output, &all)
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "print the devices, and then those that change")
	return cmd
}

// listFlags adds the flags of the commands that list devices.
func listFlags(cmd *cobra.Command, output *string, all *bool) {
	outputFlag(cmd, output, "wide", "json", "yaml")
	cmd.Flags().BoolVarP(all, "all-namespaces", "A", false, "list all devices, whatever --namespace says")
}

// outputFlag adds the flag -o with these values, besides none.
func outputFlag(cmd *cobra.Command, output *string, values ...string) {
	last := len(values) - 1
	usage := strings.Join(values[:last], ", ") + " or " + values[last]
	cmd.Flags().StringVarP(output, "output", "o", "", usage)
	completeFlag(cmd, "output", values)
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if *output != "" && !slices.Contains(values, *output) {
			return fmt.Errorf("--output: %q is not %s", *output, usage)
		}
		return nil
	}
}

func completeFlag(cmd *cobra.Command, name string, values []string) {
	if err := cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		cmd.PrintErrln(err)
	}
}

// oneArgument returns an error that says what is expected, with an example.
func oneArgument(what, example string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != 1 {
			return fmt.Errorf("name %s, as in: %s", what, example)
		}
		return nil
	}
}

// checkNamespace returns an error if the namespace that a flag selects does not exist.
func (c connection) checkNamespace(ctx context.Context) error {
	if !c.given {
		return nil
	}
	if _, err := c.cluster.Client.CoreV1().Namespaces().Get(ctx, c.namespace, metav1.GetOptions{}); apierrors.IsNotFound(err) {
		return fmt.Errorf("namespace %q does not exist", c.namespace)
	}
	return nil // it exists, or the viewer may not know
}

// only returns the namespace whose devices are listed; empty for all.
func (c connection) only(all bool) string {
	if c.given && !all {
		return c.namespace
	}
	return ""
}

// nodes returns the named nodes, or all. If the namespace is not empty, nodes whose devices it does not use are left out.
func (p *plugin) nodes(ctx context.Context, cluster overview.Cluster, namespace string, names []string) ([]overview.Node, error) {
	nodes, notes, err := cluster.Nodes(ctx, names...)
	if err != nil {
		return nil, err
	}
	if namespace != "" {
		nodes = slices.DeleteFunc(nodes, func(n overview.Node) bool {
			_, uses := n.In(namespace)
			return !uses
		})
		if len(nodes) == 0 {
			err = connection{cluster: cluster, namespace: namespace, given: true}.checkNamespace(ctx)
		}
		return nodes, err
	}
	p.notes(notes)
	return nodes, nil
}

// list prints the devices of nodes. If the namespace is not empty, it prints only those that the namespace uses.
func (p *plugin) list(nodes []overview.Node, namespace, output string, view overview.View) error {
	if namespace != "" {
		for i, n := range nodes {
			nodes[i], _ = n.In(namespace)
		}
	}
	found := overview.New(nodes)
	switch output {
	case "json", "yaml":
		return p.printData(output, "devices", found)
	default:
		view.Wide = output == "wide"
		return p.print(p.style.Table(found, view))
	}
}

// watch prints the rows of all devices, and then each row that changes.
func (p *plugin) watch(ctx context.Context, cluster overview.Cluster, namespace string, view overview.View, names []string) error {
	shown := map[string][]overview.Row{} // by node
	if err := p.print(p.style.Changed([]overview.Row{overview.HeaderRow(view)})); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	err := cluster.Watch(ctx, overview.Viewer{Show: func(change overview.Change) {
		node, uses := overview.NodeOf(change.GPUNode), true
		if namespace != "" {
			node, uses = node.In(namespace)
		}
		var rows []overview.Row
		if !change.Gone && uses {
			rows = p.style.Rows(node, view)
		}
		changed := overview.Changes(shown[node.Name], rows)
		if shown[node.Name] = rows; len(rows) == 0 {
			delete(shown, node.Name)
		}
		if err := p.print(p.style.Changed(changed)); err != nil {
			cancel(err)
		}
	}}, names...)
	if cause := context.Cause(ctx); err == nil && cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return err
}
