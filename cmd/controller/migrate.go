// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/terminal"
	"github.com/tandem-gpu/tandem/pkg/migrate"
)

const migrateUsage = `Usage: controller migrate [-f FILE]...     print values for Tandem's chart, what changes and what is lost
       controller migrate --plan [--back]  print what --apply would do
       controller migrate --apply          move nodes from NVIDIA's software to Tandem, one after the other
       controller migrate --apply --back   move them back

A file has values of NVIDIA's charts, a configuration of its device plugin, a ConfigMap, a ClusterPolicy or a DaemonSet; "-" is standard
input. Without files, the values are those of the Helm releases and of NVIDIA's DaemonSets in the cluster.

`

// migration is what the user asks for.
type migration struct {
	files               []string
	plan, apply, back   bool
	node                string
	daemonSets          []types.NamespacedName
	namespace           string
	sameConfig          bool
	driverName          string
	timeout             time.Duration
	kubeconfig, context string
}

func runMigrate(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	m, err := parseMigrate(args, stderr)
	if err != nil {
		return err
	}
	switch {
	case m.plan || m.apply:
		return m.moveNodes(ctx, stdout)
	default:
		return m.printValues(ctx, stdin, stdout, stderr)
	}
}

func parseMigrate(args []string, stderr io.Writer) (migration, error) {
	m := migration{driverName: config.Defaults().DriverName, timeout: 5 * time.Minute}
	flags := flag.NewFlagSet("controller migrate", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprint(stderr, migrateUsage)
		flags.PrintDefaults()
	}
	flags.Func("f", "`file` to read, or CHART=file if its values do not say which chart they are for; may be repeated", func(s string) error {
		m.files = append(m.files, s)
		return nil
	})
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
	flags.StringVar(&m.namespace, "namespace", "", "`namespace` of Tandem's release, if it was installed with rbac.create=false")
	flags.BoolVar(&m.sameConfig, "same-config", false, "with --back: NVIDIA's plugin has the sharing, MIG strategy and resource names of Tandem")
	flags.StringVar(&m.driverName, "driver-name", m.driverName, "DRA driver `name`")
	flags.DurationVar(&m.timeout, "timeout", m.timeout, "how long one node may take")
	flags.StringVar(&m.kubeconfig, "kubeconfig", "", "kubeconfig `file`")
	flags.StringVar(&m.context, "context", "", "`name` of the kubeconfig's context")
	if err := flags.Parse(args); err != nil {
		return migration{}, err
	}
	ofNodes := m.plan || m.apply
	switch {
	case flags.NArg() > 0:
		return migration{}, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case m.back && !ofNodes:
		return migration{}, errors.New("--back needs --plan or --apply")
	case m.node != "" && !ofNodes:
		return migration{}, errors.New("--node needs --plan or --apply")
	case m.sameConfig && !m.back:
		return migration{}, errors.New("--same-config needs --back")
	case len(m.files) > 0 && ofNodes:
		return migration{}, errors.New("-f excludes --plan and --apply: they read the cluster, and no values")
	case m.timeout <= 0:
		return migration{}, fmt.Errorf("--timeout: %s is not positive", m.timeout)
	}
	return m, nil
}

// printValues writes values for Tandem's chart to stdout. If it could not read some releases, it writes the rest and returns an error.
func (m migration) printValues(ctx context.Context, stdin io.Reader, stdout, stderr io.Writer) error {
	var sources []migrate.Source
	for _, file := range m.files {
		chart, path, ok := strings.Cut(file, "=")
		if !ok || !migrate.IsChart(chart) {
			chart, path = "", file
		}
		text, err := readInput(path, stdin)
		if err != nil {
			return err
		}
		found, err := migrate.ReadFor(chart, path, text)
		if err != nil {
			return err
		}
		sources = append(sources, found...)
	}
	var partly error
	if len(m.files) == 0 {
		api, err := m.api()
		if err != nil {
			return err
		}
		client, err := kubernetes.NewForConfig(api)
		if err != nil {
			return fmt.Errorf("configure API client: %w", err)
		}
		releases, err := migrate.ReadReleases(ctx, client, m.namespace)
		sets, setsErr := migrate.ReadDaemonSets(ctx, client, m.namespace)
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
		_, err = stdout.Write(text)
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
func (m migration) moveNodes(ctx context.Context, stdout io.Writer) error {
	api, err := m.api()
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(api)
	if err != nil {
		return fmt.Errorf("configure API client: %w", err)
	}
	gpuNodes, err := dynamic.NewForConfig(api)
	if err != nil {
		return fmt.Errorf("configure API client: %w", err)
	}
	nodes := migrate.Nodes{
		Client: client, DriverName: m.driverName, Back: m.back, Only: m.node, DaemonSets: m.daemonSets, Patience: m.timeout, Progress: stdout,
		Namespace: m.namespace, SameConfig: m.sameConfig,
		GPUNode: func(ctx context.Context, name string) (*v1alpha1.GPUNode, error) {
			object, err := gpuNodes.Resource(v1alpha1.Resource).Get(ctx, name, metav1.GetOptions{})
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
	if _, err := fmt.Fprint(stdout, terminal.Lines(plan.String(), false)); err != nil {
		return fmt.Errorf("print plan: %w", err)
	}
	if !m.apply {
		return nil
	}
	return nodes.Apply(ctx, plan)
}

func (m migration) api() (*rest.Config, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = m.kubeconfig
	api, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: m.context}).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("configure API client: %w", err)
	}
	return withLimits(api, "tandem-migrate"), nil
}
