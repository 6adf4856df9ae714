// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tandem-gpu/tandem/cli/drain"
	"github.com/tandem-gpu/tandem/internal/config"
)

func (p *plugin) drain() *cobra.Command {
	var o drain.Options
	var resource string
	cmd := &cobra.Command{
		Use:   "drain NODE[/GPU]",
		Short: "Take GPUs out of service and wait until they are free",
		Long: "Take a GPU out of service, or all GPUs of a node: neither claims nor pods with limits get them any more. Their holders keep them.\n" +
			"Then wait until no holder is left. A GPU is named by its number, its name or its UUID. kubectl gpu undrain ends it.",
		Example: "  kubectl gpu drain node-1/3 --reason 'replace the fan'\n  kubectl gpu drain node-1 --evict --timeout 10m",
		Args:    oneArgument("a node or a GPU", "kubectl gpu drain node-1/3; kubectl gpu ls lists them"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !o.Wait && (o.Evict || o.Timeout > 0) {
				return errors.New("--evict and --timeout need --wait")
			}
			if o.Force && !o.Evict {
				return errors.New("--force needs --evict")
			}
			d, node, gpu, err := p.drainer(args[0])
			if err != nil {
				return err
			}
			d.Resources.GPU = resource
			return d.Run(cmd.Context(), node, gpu, o)
		},
		ValidArgsFunction: p.completeGPUs(),
	}
	cmd.Flags().StringVar(&o.Reason, "reason", "", "why the GPU is out of service, shown wherever the GPU is shown")
	cmd.Flags().BoolVar(&o.Wait, "wait", true, "wait until no holder is left")
	cmd.Flags().DurationVar(&o.Timeout, "timeout", 0, "how long to wait; zero means no limit")
	cmd.Flags().BoolVar(&o.Evict, "evict", false, "evict the pods that hold the GPUs, with your own rights")
	cmd.Flags().BoolVar(&o.Force, "force", false, "with --evict, also pods of DaemonSets and pods that declare no controller")
	cmd.Flags().StringVar(&resource, "resource-name", config.Defaults().ResourceName,
		"extended resource of whole GPUs: --evict evicts pods that request it, or one of partitions or replicas, and pods with claims")
	return cmd
}

func (p *plugin) undrain() *cobra.Command {
	return &cobra.Command{
		Use:     "undrain NODE[/GPU]",
		Short:   "Put GPUs into service again",
		Long:    "Put a GPU into service again, or all GPUs of a node. It undoes kubectl gpu drain.",
		Example: "  kubectl gpu undrain node-1/3",
		Args:    oneArgument("a node or a GPU", "kubectl gpu undrain node-1/3; kubectl gpu ls -o wide lists what is under maintenance"),
		RunE: func(cmd *cobra.Command, args []string) error {
			d, node, gpu, err := p.drainer(args[0])
			if err != nil {
				return err
			}
			return d.End(cmd.Context(), node, gpu)
		},
		ValidArgsFunction: p.completeGPUs(),
	}
}

// drainer returns a Drainer, and the node and the GPU of an argument NODE[/GPU].
func (p *plugin) drainer(argument string) (d *drain.Drainer, node, gpu string, err error) {
	node, gpu, named := strings.Cut(argument, "/")
	if node == "" || named && gpu == "" {
		return nil, "", "", fmt.Errorf("%q is not NODE or NODE/GPU", argument)
	}
	c, err := p.open()
	if err != nil {
		return nil, "", "", err
	}
	d = &drain.Drainer{
		Cluster: c.cluster, Now: time.Now, Interval: drain.Interval, Settle: drain.Settle,
		Say: func(line string) error { return p.print(p.style.Paragraph(line)) },
	}
	return d, node, gpu, nil
}
