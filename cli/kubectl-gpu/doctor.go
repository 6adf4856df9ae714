// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tandem-gpu/tandem/cli/doctor"
	"github.com/tandem-gpu/tandem/cli/explain"
	"github.com/tandem-gpu/tandem/cli/overview"
	"github.com/tandem-gpu/tandem/internal/version"
)

// diagnosis is the JSON form of doctor.
type diagnosis struct {
	Version  string            `json:"version"`
	Findings []doctor.Finding  `json:"findings"`
	NotRead  []explain.NotRead `json:"notRead"`
}

func (p *plugin) doctor() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check the installation and say what to do",
		Long: "Check versions, agents, the controller, its webhook and admission policies, and what the agents report. Each problem comes with\n" +
			"what to do. The exit status is 1 if there is an error or if something could not be read. Without the right to list\n" +
			"ClusterRoleBindings, give the namespace of the release with --namespace.",
		Example: "  kubectl gpu doctor\n  kubectl gpu doctor -o json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := p.open()
			if err != nil {
				return err
			}
			facts, err := doctor.Read(cmd.Context(), c.cluster, c.only(false), version.Version)
			if err != nil {
				return err
			}
			found := doctor.Examine(facts)
			if err := p.printFindings(output, facts, found); err != nil {
				return err
			}
			if slices.ContainsFunc(found, func(f doctor.Finding) bool { return f.Severity == doctor.Error }) {
				return errors.New("the installation has errors")
			}
			if unread := facts.Unread(); len(unread) > 0 {
				return fmt.Errorf("not everything was checked: %s of objects could not be read", explain.Number(len(unread), "kind"))
			}
			return nil
		},
	}
	outputFlag(cmd, &output, "json", "yaml")
	return cmd
}

func (p *plugin) printFindings(output string, facts doctor.Facts, found []doctor.Finding) error {
	if output != "" {
		return p.printData(output, "findings",
			diagnosis{overview.Version, append([]doctor.Finding{}, found...), append([]explain.NotRead{}, facts.NotRead...)})
	}
	for _, n := range facts.NotRead {
		p.notes([]string{fmt.Sprintf("%s are not checked: %s", n.Kind, n.Error)})
	}
	for line := range strings.Lines(doctor.Text(facts, found)) {
		if err := p.print(p.style.Paragraph(strings.TrimSuffix(line, "\n"))); err != nil {
			return err
		}
	}
	return nil
}
