// SPDX-License-Identifier: Apache-2.0

// Command simulated-driver is the programs of a simulated machine's driver: kubelet-plugin simulate installs it under their names.
package main

import (
	"os"

	"github.com/tandem-gpu/tandem/simulated/programs"
)

func main() { os.Exit(programs.Run(os.Args)) }
