// SPDX-License-Identifier: Apache-2.0

// Command helm prints the path of the Helm command line, building it first if it is not in the cache. It is not Helm.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/tandem-gpu/tandem/hack/binaries"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	path, err := binaries.Helm().Ensure(ctx, os.Stderr)
	if err != nil {
		fmt.Fprintln(os.Stderr, "helm:", err)
		os.Exit(1)
	}
	fmt.Println(path)
}
