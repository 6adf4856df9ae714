// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os/signal"
	"syscall"

	"k8s.io/client-go/kubernetes"

	"github.com/tandem-gpu/tandem/pkg/controller"
	"github.com/tandem-gpu/tandem/pkg/nodelabels"
)

// removeLabels removes the labels that agents have written from all nodes, and the controller's condition. A Job of the chart runs it after an
// uninstallation.
func removeLabels(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("controller remove-labels", flag.ContinueOnError)
	flags.SetOutput(stderr)
	kubeconfig := flags.String("kubeconfig", "", "kubeconfig `file`; empty inside a cluster")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("remove-labels: unexpected argument %q", flags.Arg(0))
	}
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	api, err := newAPI(*kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(api)
	if err != nil {
		return fmt.Errorf("create API client: %w", err)
	}
	removed, failed := nodelabels.RemoveFromAll(ctx, client.CoreV1().Nodes())
	if failed != nil {
		failed = fmt.Errorf("remove labels: %w", failed)
	}
	conditions, err := controller.RemoveConditions(ctx, client.CoreV1().Nodes())
	_, printed := fmt.Fprintf(stdout, "Removed Tandem's labels from %d nodes, and the conditions %s and %s from %d.\n", removed,
		controller.ConditionGPUsHealthy, controller.ConditionGPURepairNeeded, conditions)
	return errors.Join(failed, err, printed)
}
