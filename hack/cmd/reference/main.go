// SPDX-License-Identifier: Apache-2.0

// Command reference writes docs/reference of a checkout. go generate and make update run it.
package main

import (
	"fmt"
	"os"

	"github.com/tandem-gpu/tandem/hack/reference"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: reference ROOT, where ROOT is the root directory of the checkout")
		os.Exit(2)
	}
	if err := reference.Write(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "reference:", err)
		os.Exit(1)
	}
}
