// SPDX-License-Identifier: Apache-2.0

// Command mutations breaks Tandem in the ways of test/mutation, one after the other, and runs the tests that must detect it. It changes
// nothing in the checkout.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/test/mutation"
)

func main() {
	only := flag.String("only", "", "play the mutation with this `name`")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := play(ctx, *only)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutations:", err)
		os.Exit(1)
	}
}

func play(ctx context.Context, only string) error {
	root, err := gotool.Root(ctx)
	if err != nil {
		return err
	}
	tmp, err := os.MkdirTemp("", "tandem-mutations-")
	if err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	defer os.RemoveAll(tmp)
	played, found := 0, 0
	for _, m := range mutation.List() {
		if only != "" && m.Name != only {
			continue
		}
		played++
		dir := filepath.Join(tmp, m.Name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			return fmt.Errorf("make directory: %w", err)
		}
		started := time.Now()
		by, err := m.Play(ctx, root, dir)
		took := time.Since(started).Round(time.Second)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			fmt.Printf("mutation %s: %v (%s)\n", m.Name, err, took)
		default:
			found++
			fmt.Printf("mutation %s: found by %s in %s (%s)\n", m.Name, by.Test, by.Package, took)
		}
	}
	fmt.Printf("mutations: played=%d found=%d\n", played, found)
	switch {
	case played == 0:
		return fmt.Errorf("there is no mutation %q", only)
	case found < played:
		return fmt.Errorf("%d of %d were not found", played-found, played)
	}
	return nil
}
