// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/pkg/overview"
)

// outputs are the values of -o.
var outputs = []string{"", "wide", "json", "yaml"}

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
			if !slices.Contains(outputs, output) {
				return fmt.Errorf("--output: %q is not wide, json or yaml", output)
			}
			if watch && (output == "json" || output == "yaml") {
				return errors.New("--watch prints rows: it excludes --output json and yaml")
			}
			c, err := p.open()
			if err != nil {
				return err
			}
			namespace := ""
			if c.given && !all {
				namespace = c.namespace
			}
			if watch {
				return p.watch(cmd.Context(), c.cluster, namespace, output == "wide", names)
			}
			return p.list(cmd.Context(), c.cluster, namespace, output, names)
		},
		ValidArgsFunction: p.completeNodes(0),
	}
	cmd.Flags().StringVarP(&output, "output", "o", "", "wide, json or yaml")
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "print the devices, and then those that change")
	cmd.Flags().BoolVarP(&all, "all-namespaces", "A", false, "list all devices, whatever --namespace says")
	if err := cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(outputs[1:], cobra.ShellCompDirectiveNoFileComp)); err != nil {
		cmd.PrintErrln(err)
	}
	return cmd
}

func (p *plugin) list(ctx context.Context, cluster overview.Cluster, namespace, output string, names []string) error {
	nodes, notes, err := cluster.Nodes(ctx, names...)
	if err != nil {
		return err
	}
	if namespace != "" {
		var in []overview.Node
		for _, n := range nodes {
			if of, uses := n.In(namespace); uses {
				in = append(in, of)
			}
		}
		nodes, notes = in, nil
	}
	found := overview.New(nodes)
	p.notes(notes)
	switch output {
	case "json":
		return p.printJSON("devices", found)
	case "yaml":
		text, err := yaml.Marshal(found)
		if err != nil {
			return fmt.Errorf("encode devices: %w", err)
		}
		return p.print(string(text))
	default:
		return p.print(p.style.Table(found, output == "wide"))
	}
}

// watch prints the rows of all devices, and then each row that changes.
func (p *plugin) watch(ctx context.Context, cluster overview.Cluster, namespace string, wide bool, names []string) error {
	shown := map[string][]overview.Row{} // by node
	if err := p.print(p.style.Changed([]overview.Row{overview.HeaderRow(wide)})); err != nil {
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
			rows = p.style.Rows(node, wide)
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
