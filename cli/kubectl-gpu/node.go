// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"

	"github.com/tandem-gpu/tandem/cli/overview"
)

func (p *plugin) node() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "node NODE",
		Short: "Draw the GPUs and partitions of a node",
		Long: "Draw the GPUs of a node by NUMA node and NVLink, with their partitions to scale. The picture is plain ASCII unless standard\n" +
			"output is a UTF-8 terminal. NO_COLOR switches colours off.",
		Example: "  kubectl gpu node node-1\n  kubectl gpu node node-1 -o json",
		Args:    oneArgument("a node", "kubectl gpu node node-1; kubectl gpu ls lists the nodes"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := p.open()
			if err != nil {
				return err
			}
			picture, notes, err := c.cluster.Picture(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			p.notes(notes)
			if output != "" {
				return p.printData(output, "devices", overview.New([]overview.Node{picture.Node}))
			}
			return p.print(p.style.Draw(picture))
		},
		ValidArgsFunction: p.completeNodes(1),
	}
	outputFlag(cmd, &output, "json", "yaml")
	return cmd
}
