// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tandem-gpu/tandem/cli/overview"
)

func (p *plugin) top() *cobra.Command {
	var output, sortBy, exporters string
	var all bool
	cmd := &cobra.Command{
		Use:   "top [NODE...]",
		Short: "List GPUs with their holders, utilisation, memory, power and temperature",
		Long: "List the devices as ls does, with what NVIDIA's dcgm-exporter measures of them. The metrics are read through the API server's pod\n" +
			"proxy: you need the rights to list pods and to get pods/proxy. A value that dcgm-exporter does not export is \"-\".",
		Example: "  kubectl gpu top\n  kubectl gpu top node-1\n  kubectl gpu top --sort-by util --exporter-namespace gpu-operator",
		RunE: func(cmd *cobra.Command, names []string) error {
			if sortBy != "" && !slices.Contains(overview.SortKeys, sortBy) {
				return fmt.Errorf("--sort-by: %q is not %s", sortBy, strings.Join(overview.SortKeys, " or "))
			}
			if sortBy != "" && (output == "json" || output == "yaml") {
				return errors.New("--sort-by sorts rows: it excludes --output json and yaml")
			}
			c, err := p.open()
			if err != nil {
				return err
			}
			namespace := c.only(all)
			nodes, err := p.nodes(cmd.Context(), c.cluster, namespace, names)
			if err != nil {
				return err
			}
			if err := c.cluster.ReadMetrics(cmd.Context(), nodes, exporters); err != nil {
				return err
			}
			p.notes(overview.MissingMetrics(nodes))
			return p.list(nodes, namespace, output, overview.View{Metrics: true, SortBy: sortBy})
		},
		ValidArgsFunction: p.completeNodes(0),
	}
	listFlags(cmd, &output, &all)
	cmd.Flags().StringVar(&sortBy, "sort-by", "", "util or memory: the largest values come first")
	cmd.Flags().StringVar(&exporters, "exporter-namespace", "", "namespace of dcgm-exporter: read no pods of other namespaces")
	completeFlag(cmd, "sort-by", overview.SortKeys)
	return cmd
}
