// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"
)

func (p *plugin) why() *cobra.Command {
	return &cobra.Command{
		Use:   "why POD",
		Short: "Say why a pod waits for a GPU, or failed",
		Long: "Say why a pod waits for a GPU or failed, and which GPUs a running pod has. Holders in namespaces whose pods you may not list\n" +
			"are not named.",
		Example: "  kubectl gpu why train-0 -n ml",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := p.open()
			if err != nil {
				return err
			}
			answer, err := c.cluster.Why(cmd.Context(), c.namespace, args[0])
			if err != nil {
				return err
			}
			return p.print(p.style.Why(answer))
		},
		ValidArgsFunction: p.completePods(),
	}
}
