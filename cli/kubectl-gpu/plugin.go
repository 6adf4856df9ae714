// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/cli/overview"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/terminal"
	"github.com/tandem-gpu/tandem/internal/version"
)

// plugin is what all commands use.
type plugin struct {
	streams genericiooptions.IOStreams
	// style is what standard output can show, and errors what standard error can.
	style, errors overview.Style

	connect func() (connection, error)
	// kubectl runs it with the arguments.
	kubectl func(ctx context.Context, stdout, stderr io.Writer, args ...string) error
	// driverName is the value of its flag.
	driverName string
}

const driverNameFlag = "driver-name"

// connection is a cluster and the namespace that the flags and the kubeconfig select.
type connection struct {
	cluster   overview.Cluster
	namespace string
	// given is set if a flag selects the namespace.
	given bool
	// context is that of the kubeconfig; empty without one. server is the API server's host, with a path where it has one.
	context, server string
}

// connectWith returns a function that makes the clients. It does not connect before the first request.
func connectWith(flags *genericclioptions.ConfigFlags) func() (connection, error) {
	return func() (connection, error) {
		config, err := flags.ToRESTConfig()
		if err != nil {
			return connection{}, fmt.Errorf("configure API client: %w", err)
		}
		// Pages of large clusters and the rights of many namespaces are more than the default of 5 requests a second.
		config.QPS, config.Burst = 50, 100
		config.UserAgent = "kubectl-gpu/" + version.Version
		// The scraper does not set the clock: the dates that it gets are those of pods.
		scrape, scrapeErr := overview.NewScraper(config)
		clock := &overview.Clock{}
		config.Wrap(clock.Watch)
		client, clientErr := kubernetes.NewForConfig(config)
		objects, objectsErr := dynamic.NewForConfig(config)
		if err := cmp.Or(scrapeErr, clientErr, objectsErr); err != nil {
			return connection{}, fmt.Errorf("configure API client: %w", err)
		}
		loader := flags.ToRawKubeConfigLoader()
		namespace, _, namespaceErr := loader.Namespace()
		kubeconfig, kubeconfigErr := loader.RawConfig()
		if err := cmp.Or(namespaceErr, kubeconfigErr); err != nil {
			return connection{}, fmt.Errorf("read kubeconfig: %w", err)
		}
		server, _, err := rest.DefaultServerUrlFor(config)
		if err != nil {
			return connection{}, fmt.Errorf("find the API server: %w", err)
		}
		c := connection{cluster: overview.Cluster{Client: client, Dynamic: objects, Scrape: scrape, Clock: clock}, namespace: namespace}
		c.given = flags.Namespace != nil && *flags.Namespace != ""
		c.context, c.server = kubeconfig.CurrentContext, server.Host+strings.TrimSuffix(server.Path, "/")
		if flags.Context != nil && *flags.Context != "" {
			c.context = *flags.Context
		}
		return c, nil
	}
}

// open connects with the driver's name of the flag.
func (p *plugin) open() (connection, error) {
	c, err := p.connect()
	c.cluster.DriverName = p.driverName
	return c, err
}

// styleOf returns what a file can show. Colours are for terminals, unless NO_COLOR is set (no-color.org).
func styleOf(out *os.File, getenv func(string) string) overview.Style {
	terminal := term.IsTerminal(int(out.Fd()))
	locale := strings.ToUpper(cmp.Or(getenv("LC_ALL"), getenv("LC_CTYPE"), getenv("LANG")))
	return overview.Style{
		Colour: terminal && getenv("NO_COLOR") == "" && getenv("TERM") != "dumb",
		UTF8:   terminal && (strings.Contains(locale, "UTF-8") || strings.Contains(locale, "UTF8")),
	}
}

// command returns the root command without the flags of the connection.
func (p *plugin) command() *cobra.Command {
	root := &cobra.Command{
		Use:         "kubectl-gpu",
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl gpu"},
		Short:       "Show the GPUs of a cluster that Tandem serves, and take them out of service",
		Long: "Show the GPUs and MIG partitions of a cluster that Tandem serves: who has which, and why a pod waits for one. Take GPUs out of\n" +
			"service for maintenance. Move nodes from NVIDIA's software to Tandem, and back.",
		Version:       version.String(),
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	// kubectl completes its plugins by a program of its own: see docs/user/kubectl-gpu.md.
	root.CompletionOptions.HiddenDefaultCmd = true
	root.SetIn(p.streams.In)
	root.SetOut(p.streams.Out)
	root.SetErr(p.streams.ErrOut)
	root.PersistentFlags().StringVar(&p.driverName, driverNameFlag, config.Defaults().DriverName, "name of Tandem's DRA driver")
	root.AddCommand(p.ls(), p.top(), p.why(), p.pending(), p.node(), p.drain(), p.undrain(), p.inspect(), p.doctor(), p.migrate(),
		p.ui(), p.version())
	return root
}

// version prints what --version does, where users of kubectl look for it.
func (p *plugin) version() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version of the plugin", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return p.print(fmt.Sprintf("%s version %s\n", cmd.Root().DisplayName(), version.String()))
		},
	}
}

// notes prints what a view lacks to standard error, so that standard output stays as documented.
func (p *plugin) notes(notes []string) {
	for _, note := range notes {
		fmt.Fprint(p.streams.ErrOut, p.errors.Line("note: "+note))
	}
}

func (p *plugin) print(text string) error {
	if _, err := fmt.Fprint(p.streams.Out, text); err != nil {
		return fmt.Errorf("print: %w", err)
	}
	return nil
}

// printData prints a value as JSON or YAML.
func (p *plugin) printData(output, what string, value any) error {
	text, err := json.MarshalIndent(value, "", "  ")
	if err == nil && output == "yaml" {
		// The YAML parser accepts C1 characters only as escapes. The encoder keeps characters that control the direction of text: Lines replaces
		// them.
		if text, err = yaml.JSONToYAML([]byte(terminal.JSONForYAML(string(text)))); err == nil {
			return p.print(terminal.Lines(string(text), false))
		}
	}
	if err != nil {
		return fmt.Errorf("encode %s: %w", what, err)
	}
	return p.print(terminal.JSON(string(text)) + "\n")
}

// completeNodes completes names of nodes with an agent.
func (p *plugin) completeNodes(most int) cobra.CompletionFunc {
	return p.completion(most, func(ctx context.Context, c connection, prefix string) ([]string, error) {
		return c.cluster.NodeNames(ctx, prefix)
	})
}

// completeGPUs completes NODE[/GPU]: first names of nodes, and behind a slash the GPUs of that node.
func (p *plugin) completeGPUs() cobra.CompletionFunc {
	return p.completion(1, func(ctx context.Context, c connection, prefix string) ([]string, error) {
		node, _, behind := strings.Cut(prefix, "/")
		if !behind {
			return c.cluster.NodeNames(ctx, prefix)
		}
		of, err := c.cluster.GPUNode(ctx, node)
		var names []string
		for _, d := range of.Status.Devices {
			if name := node + "/" + d.Name; d.Parent == "" && strings.HasPrefix(name, prefix) {
				names = append(names, name)
			}
		}
		return names, err
	})
}

// completePods completes names of pods of the namespace.
func (p *plugin) completePods() cobra.CompletionFunc {
	return p.completion(1, func(ctx context.Context, c connection, prefix string) ([]string, error) {
		return c.cluster.PodNames(ctx, c.namespace, prefix)
	})
}

// completion completes up to most arguments; with 0, any number.
func (p *plugin) completion(most int, names func(context.Context, connection, string) ([]string, error)) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if most > 0 && len(args) >= most {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		c, err := p.open()
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		found, err := names(cmd.Context(), c, prefix)
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		return found, cobra.ShellCompDirectiveNoFileComp
	}
}
