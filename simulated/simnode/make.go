// SPDX-License-Identifier: Apache-2.0

package simnode

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/tandem-gpu/tandem/simulated"
)

// Make is the command "kubelet-plugin simulate". It makes the files of the machine that --nvml=simulated:<profile> simulates: driver root,
// device nodes, sysfs.
func Make(args []string, stderr io.Writer) error {
	flags := flag.NewFlagSet("kubelet-plugin simulate", flag.ContinueOnError)
	flags.SetOutput(stderr)
	name := flags.String("profile", "", "machine profile: "+strings.Join(simulated.Names(), ", ")+", or the `path` of a YAML file")
	root := flags.String("root", "", "`directory` to make it in")
	node := flags.String("node-name", os.Getenv("NODE_NAME"), "`name` of the node: nodes of one profile differ in their UUIDs (environment: NODE_NAME)")
	programs := flags.String("programs", "", "`path` of the program that plays the driver's own, simulated-driver; empty for none")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *name == "" || *root == "" || flags.NArg() > 0 {
		return errors.New("simulate: --profile and --root are required, and nothing else")
	}
	profile, err := simulated.Load(*name)
	if err != nil {
		return fmt.Errorf("simulate: %w", err)
	}
	return simulated.Materialize(*root, profile, simulated.MaterializeOptions{Seed: *node, Programs: *programs})
}
