// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"

	"github.com/spf13/cobra"

	"github.com/tandem-gpu/tandem/cli/page"
)

func (p *plugin) ui() *cobra.Command {
	var port uint16
	var exporters string
	cmd := &cobra.Command{
		Use:   "ui",
		Short: "Serve a web page of the GPUs on this machine",
		Long: "Serve a read-only web page of the GPUs, their holders and the waiting pods until the command is interrupted. The page shows only what\n" +
			"you may read. Open the printed address in a browser on this machine. The address contains a password: do not share it.",
		Example: "  kubectl gpu ui\n  kubectl gpu ui --port 8001",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := p.open()
			if err != nil {
				return err
			}
			// The page needs GPUNodes. Without the right to read them, no address is printed.
			if _, err := c.cluster.NodeNames(cmd.Context(), ""); err != nil {
				return err
			}
			var config net.ListenConfig
			listener, err := config.Listen(cmd.Context(), "tcp", fmt.Sprintf("127.0.0.1:%d", port))
			if err != nil {
				return fmt.Errorf("serve the page: %w", err)
			}
			view := page.New(c.cluster, page.Options{
				Where: page.Where{Context: c.context, Server: c.server}, Namespace: c.namespace, ExporterNamespace: exporters,
			})
			if err := p.print(fmt.Sprintf("http://%s%s\n", listener.Addr(), view.Path())); err != nil {
				listener.Close()
				return err
			}
			return view.Run(cmd.Context(), listener)
		},
	}
	cmd.Flags().Uint16Var(&port, "port", 0, "port on 127.0.0.1; 0 selects a free one")
	cmd.Flags().StringVar(&exporters, "exporter-namespace", "", "namespace of dcgm-exporter: read metrics only from pods of this namespace")
	return cmd
}
