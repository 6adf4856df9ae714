// SPDX-License-Identifier: Apache-2.0

// Command smi does to the MIG of a simulated machine what an administrator does with nvidia-smi, from outside of the node.
package main

import (
	"fmt"
	"os"

	"github.com/tandem-gpu/tandem/simulated/smi"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprint(os.Stderr, "usage: smi DIRECTORY OPTIONS, where the directory is that of a simulated machine\n"+smi.Usage)
		os.Exit(2)
	}
	if err := smi.At(os.Args[1], os.Args[2:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "smi:", err)
		os.Exit(1)
	}
}
