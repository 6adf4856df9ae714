// SPDX-License-Identifier: Apache-2.0

// Command smi does to the MIG of a simulated machine what an administrator does with nvidia-smi, from outside of the node.
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/tandem-gpu/tandem/pkg/nvml/simulated/smi"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "smi:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) < 2 {
		return errors.New("usage: smi DIRECTORY OPTIONS, where the directory is that of a simulated machine\n" + smi.Usage)
	}
	return smi.At(args[0], args[1:], os.Stdout)
}
