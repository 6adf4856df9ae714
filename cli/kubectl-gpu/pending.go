// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/tandem-gpu/tandem/cli/overview"
)

func (p *plugin) pending() *cobra.Command {
	var output string
	var all bool
	cmd := &cobra.Command{
		Use:   "pending",
		Short: "List the pods that wait for GPUs, by their owners",
		Long: "List the pods in phase Pending that request GPUs by limits or claims, one row for each owner, with the reason of most of its\n" +
			"pods. With --namespace, list only those of the namespace. kubectl gpu why says more about one pod.",
		Example: "  kubectl gpu pending\n  kubectl gpu pending -n ml -o wide",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := p.open()
			if err != nil {
				return err
			}
			namespace := c.only(all)
			found, notes, err := c.cluster.Pending(cmd.Context(), namespace)
			if denied := (*overview.DeniedError)(nil); errors.As(err, &denied) && apierrors.IsForbidden(err) && namespace == "" && !all {
				var again error
				if found, notes, again = c.cluster.Pending(cmd.Context(), c.namespace); again == nil {
					notes = append(notes, fmt.Sprintf("these are the pods of namespace %s: you may not list those of all namespaces", c.namespace))
					err = nil
				}
			}
			if err == nil && len(found.Groups) == 0 {
				err = c.checkNamespace(cmd.Context())
			}
			if err != nil {
				return err
			}
			p.notes(notes)
			if output == "json" || output == "yaml" {
				return p.printData(output, "waiting pods", found)
			}
			return p.print(p.style.Pending(found, c.cluster.Clock.Now(), output == "wide"))
		},
	}
	listFlags(cmd, &output, &all)
	cmd.Flags().Lookup("all-namespaces").Usage = "list the pods of all namespaces, whatever --namespace says"
	return cmd
}
