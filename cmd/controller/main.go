// SPDX-License-Identifier: Apache-2.0

// Command controller runs Tandem's reconcilers (pkg/controller) and the webhook for claim parameters (pkg/webhook). Its subcommands are
// remove-labels, which removes the labels of nodes (pkg/nodelabels), and stacks, for diagnosis (internal/stacks).
// This package only wires.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"syscall"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/stacks"
	"github.com/tandem-gpu/tandem/internal/status"
	"github.com/tandem-gpu/tandem/internal/version"
	"github.com/tandem-gpu/tandem/pkg/controller"
)

func main() {
	err := run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)
	klog.Flush()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "controller:", err)
		os.Exit(1)
	}
}

// gcPercent makes the garbage collector run more often than Go's default of 100 does. Most of the heap is caches, which live long, and the
// controller uses little CPU time. BenchmarkFleet measures both.
const gcPercent = 30

// commands follows the flags in the output of --help.
const commands = `
Other commands:
  controller remove-labels  remove the labels of GPU Feature Discovery and Tandem's conditions from nodes
  controller stacks         have the controller of this container log the stacks of its goroutines
  controller version        print the version
`

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) > 0 {
		switch args[0] {
		case "migrate":
			return errors.New("migrate is a command of the kubectl plugin now: kubectl gpu migrate, with the same flags and two dashes")
		case "remove-labels":
			return removeLabels(ctx, args[1:], stdout, stderr)
		case "stacks":
			return stacks.Request("controller")
		case "version":
			_, err := fmt.Fprintln(stdout, version.String())
			return err
		}
	}
	c, err := config.LoadController(args, os.LookupEnv, stderr)
	if errors.Is(err, flag.ErrHelp) {
		fmt.Fprint(stderr, commands)
	}
	if err != nil {
		return err
	}
	if _, set := os.LookupEnv("GOGC"); !set {
		debug.SetGCPercent(gcPercent)
	}
	if err := new(klog.Level).Set(strconv.Itoa(c.Verbosity)); err != nil {
		return fmt.Errorf("set log verbosity: %w", err)
	}
	logger := klog.Background()
	ctrllog.SetLogger(logger)
	defer stacks.OnSignal(stderr)()
	ctx, stop := signal.NotifyContext(klog.NewContext(ctx, logger), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// A second signal ends the process at once.
	context.AfterFunc(ctx, stop)
	logger.Info("Starting", "version", version.String(), "config", c)
	return serve(ctx, c)
}

// serve blocks until ctx is done or a component fails.
func serve(ctx context.Context, c config.Controller) error {
	api, err := newAPI(c.Kubeconfig)
	if err != nil {
		return err
	}
	daemons, err := daemonPods(c)
	if err != nil {
		return err
	}
	// controller-runtime's registry already has the metrics of queues, requests and the process.
	metrics := ctrlmetrics.Registry
	promauto.With(metrics).NewGaugeVec(prometheus.GaugeOpts{
		Name: "tandem_build_info", Help: "Version and commit of the running controller; always 1.",
	}, []string{"version", "commit"}).WithLabelValues(version.Version, version.Commit).Set(1)
	reconcilers, err := controller.New(controller.Config{
		REST: api, DriverName: c.DriverName, ResourceName: c.ResourceName,
		Namespace: c.Namespace, LeaseName: c.LeaseName, Identity: c.PodName, Daemons: daemons,
		WebhookName: c.WebhookName, WebhookPort: c.WebhookPort, Registerer: metrics,
	})
	if err != nil {
		return err
	}
	server := status.New(c.HTTPEndpoint, metrics)
	server.Check("caches", reconcilers.Ready)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return server.Run(ctx) })
	group.Go(func() error { return reconcilers.Run(ctx) })
	return group.Wait()
}

// daemonPods returns the description of MPS daemon pods.
func daemonPods(c config.Controller) (controller.DaemonPods, error) {
	pods := controller.DaemonPods{RunDir: c.RunDir, KubeletDir: c.KubeletDir, DriverRoots: c.DriverRoots}
	var err error
	if c.DaemonPod != "" {
		if pods.Template, err = controller.DaemonTemplate(c.DaemonPod); err != nil {
			return controller.DaemonPods{}, fmt.Errorf("--mps-pod: %w", err)
		}
	}
	pods.SharedMemory, err = c.SharedMemory()
	return pods, err
}

// The limits allow a burst of claims on many nodes without delay: pods fail on a node whose GPUs are withdrawn too late.
const (
	requestsPerSecond = 100
	requestBurst      = 400
)

func newAPI(kubeconfig string) (*rest.Config, error) {
	api, err := rest.InClusterConfig()
	if kubeconfig != "" {
		api, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("configure API client: %w (outside a cluster --kubeconfig is needed)", err)
	}
	api.QPS, api.Burst = requestsPerSecond, requestBurst
	return rest.AddUserAgent(api, "tandem-controller/"+version.Version), nil
}
