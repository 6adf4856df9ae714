// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/migrate"
	"github.com/tandem-gpu/tandem/internal/terminal"
)

// migration is what the user asks for.
type migration struct {
	files             []string
	plan, apply, back bool
	node              string
	daemonSets        []types.NamespacedName
	sameConfig        bool
	timeout           time.Duration
}

func (p *plugin) migrate() *cobra.Command {
	var m migration
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "Translate the configuration of NVIDIA's drivers, and move nodes",
		Long: "Print values for Tandem's chart, what changes and what is lost. Or move nodes from NVIDIA's software to Tandem and back, one after the\n" +
			"other, while their pods run.\n\n" +
			"A file has values of NVIDIA's charts, a configuration of its device plugin, a ConfigMap, a ClusterPolicy or a DaemonSet; \"-\" is standard\n" +
			"input. Without files, the values are those of the Helm releases and of NVIDIA's DaemonSets in the cluster. If Tandem was installed with\n" +
			"rbac.create=false, give the namespace of its release with --namespace.",
		Example: "  kubectl gpu migrate > values.yaml         # from the cluster\n  kubectl gpu migrate -f nvidia-values.yaml > values.yaml\n" +
			"  kubectl gpu migrate --plan                # what --apply would do\n  kubectl gpu migrate --apply --node node-1\n" +
			"  kubectl gpu migrate --apply --back",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ofNodes := m.plan || m.apply
			switch {
			case m.back && !ofNodes:
				return errors.New("--back needs --plan or --apply")
			case m.node != "" && !ofNodes:
				return errors.New("--node needs --plan or --apply")
			case m.sameConfig && !m.back:
				return errors.New("--same-config needs --back")
			case len(m.files) > 0 && ofNodes:
				return errors.New("-f excludes --plan and --apply: they read the cluster, and no values")
			case m.timeout <= 0:
				return fmt.Errorf("--timeout: %s is not positive", m.timeout)
			case ofNodes:
				return p.moveNodes(cmd.Context(), m)
			}
			return p.printValues(cmd.Context(), m.files)
		},
	}
	flags := cmd.Flags()
	flags.StringArrayVarP(&m.files, "filename", "f", nil, "`file` to read, or CHART=file if its values do not say which chart they are for; may be repeated")
	flags.BoolVar(&m.plan, "plan", false, "print what --apply would do, and change nothing")
	flags.BoolVar(&m.apply, "apply", false, "print the plan and carry it out")
	flags.BoolVar(&m.back, "back", false, "move nodes back to NVIDIA's software")
	flags.StringVar(&m.node, "node", "", "move only the node of this `name`")
	flags.Func("daemonset", "DaemonSet of NVIDIA's that is not found or may be a tenant's, as `namespace/name`; may be repeated", func(s string) error {
		namespace, name, ok := strings.Cut(s, "/")
		if !ok || namespace == "" || name == "" {
			return errors.New("want namespace/name")
		}
		m.daemonSets = append(m.daemonSets, types.NamespacedName{Namespace: namespace, Name: name})
		return nil
	})
	flags.BoolVar(&m.sameConfig, "same-config", false, "with --back: NVIDIA's plugin has the sharing, MIG strategy and resource names of Tandem")
	flags.DurationVar(&m.timeout, "timeout", 5*time.Minute, "how long one node may take")
	return cmd
}

// printValues prints values for Tandem's chart. If it could not read some releases, it prints the rest and returns an error.
func (p *plugin) printValues(ctx context.Context, files []string) error {
	var sources []migrate.Source
	for _, file := range files {
		chart, path, ok := strings.Cut(file, "=")
		if !ok || !migrate.IsChart(chart) {
			chart, path = "", file
		}
		text, err := readInput(path, p.streams.In)
		if err != nil {
			return err
		}
		found, err := migrate.Read(chart, path, text)
		if err != nil {
			return err
		}
		sources = append(sources, found...)
	}
	var partly error
	if len(files) == 0 {
		c, err := p.open()
		if err != nil {
			return err
		}
		releases, err := migrate.ReadReleases(ctx, c.cluster.Client, c.only(false))
		sets, setsErr := migrate.ReadDaemonSets(ctx, c.cluster.Client, c.only(false), releases)
		if sources, partly = append(releases, sets...), errors.Join(err, setsErr); len(sources) == 0 {
			return cmp.Or(partly, errors.New("the cluster has no Helm release of NVIDIA's device plugin, DRA driver or GPU Operator, and no DaemonSet of theirs: "+
				"pass their values with -f"))
		}
	}
	result, err := migrate.Translate(sources...)
	if err != nil {
		return errors.Join(err, partly)
	}
	text, err := result.YAML()
	if err == nil {
		err = p.print(string(text))
	}
	return errors.Join(err, partly)
}

func readInput(file string, stdin io.Reader) ([]byte, error) {
	if file == "-" {
		text, err := io.ReadAll(stdin)
		if err != nil {
			return nil, fmt.Errorf("read standard input: %w", err)
		}
		return text, nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read values: %w", err)
	}
	return text, nil
}

// moveNodes prints the plan, and carries it out with --apply.
func (p *plugin) moveNodes(ctx context.Context, m migration) error {
	c, err := p.open()
	if err != nil {
		return err
	}
	nodes := migrate.Nodes{
		Client: c.cluster.Client, DriverName: p.driverName, Back: m.back, Only: m.node, DaemonSets: m.daemonSets, Patience: m.timeout,
		Progress: p.streams.Out, Namespace: c.only(false), SameConfig: m.sameConfig,
		GPUNode: func(ctx context.Context, name string) (*v1alpha1.GPUNode, error) {
			object, err := c.cluster.Dynamic.Resource(v1alpha1.Resource).Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return nil, err
			}
			var node v1alpha1.GPUNode
			return &node, runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &node)
		},
	}
	plan, err := nodes.Plan(ctx)
	if err != nil {
		return err
	}
	if err := p.print(terminal.Lines(plan.String(), false)); err != nil || !m.apply {
		return err
	}
	return nodes.Apply(ctx, plan)
}
