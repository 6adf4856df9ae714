// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/tandem-gpu/tandem/cli/explain"
	"github.com/tandem-gpu/tandem/cli/overview"
)

// answer is the form of why for scripts.
type answer struct {
	Version string `json:"version"`
	explain.Answer
}

func (p *plugin) why() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "why POD",
		Short: "Say why a pod waits for a GPU, or failed",
		Long: "Say why a pod waits for a GPU or failed, and which GPUs a running pod has. Holders in namespaces whose pods you may not list\n" +
			"are not named. kubectl gpu pending lists the pods that wait.",
		Example: "  kubectl gpu why train-0 -n ml\n  kubectl gpu why pod/train-0 -o json",
		Args:    oneArgument("a pod", "kubectl gpu why train-0 -n ml; kubectl gpu pending lists the pods that wait"),
		RunE: func(cmd *cobra.Command, args []string) error {
			name, err := podNamed(args[0])
			if err != nil {
				return err
			}
			c, err := p.open()
			if err != nil {
				return err
			}
			found, err := c.cluster.Why(cmd.Context(), c.namespace, name)
			if apierrors.IsNotFound(err) {
				if gone := c.checkNamespace(cmd.Context()); gone != nil {
					return gone
				}
			}
			if err != nil {
				return err
			}
			if output != "" {
				return p.printData(output, "the answer", answer{overview.Version, found})
			}
			return p.print(p.style.Why(found))
		},
		ValidArgsFunction: p.completePods(),
	}
	outputFlag(cmd, &output, "json", "yaml")
	return cmd
}

// podNamed returns the pod of an argument POD or pod/POD.
func podNamed(argument string) (string, error) {
	kind, name, qualified := strings.Cut(argument, "/")
	switch {
	case !qualified:
		return argument, nil
	case name != "" && slices.Contains([]string{"pod", "pods", "po"}, strings.ToLower(kind)):
		return name, nil
	default:
		return "", fmt.Errorf("name a pod as POD or pod/POD, not %q; give its namespace with -n", argument)
	}
}
