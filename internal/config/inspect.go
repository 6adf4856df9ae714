// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"flag"
	"io"
)

// Inspect is the configuration of the command inspect: the agent's, of which it uses what says where the driver is.
type Inspect struct {
	Config
	// Output is "text", "json" or "slices".
	Output string
	// SpecDir is the directory in which the CDI spec is written; empty for none.
	SpecDir string
}

// Flags that only the command inspect has. They have no environment variables.
const (
	outputFlag = "o"
	specFlag   = "cdi"
)

func (i *Inspect) define(flags *flag.FlagSet) {
	i.Config.define(flags)
	flags.StringVar(&i.Output, outputFlag, i.Output, "output `format`: text, json, or slices (the ResourceSlices of a new node with these GPUs)")
	flags.StringVar(&i.SpecDir, specFlag, i.SpecDir, "also write the CDI spec into this `directory`")
}

// LoadInspect is Load for the command inspect. It takes the agent's flags and environment, so that the command finds the same driver in the
// agent's container as the agent. It needs no cluster.
func LoadInspect(args []string, lookupEnv func(string) (string, bool), stderr io.Writer) (Inspect, error) {
	i := Inspect{Config: Defaults(), Output: "text"}
	l := loader{"kubelet-plugin inspect", args, lookupEnv, stderr, &i.Config, i.define, i.check}
	if err := l.load(); err != nil {
		return Inspect{}, err
	}
	return i, nil
}

func (i *Inspect) check() error {
	var p problems
	i.checkDriver(&p)
	p.path("--proc-root", i.ProcRoot)
	oneOf(&p, "-"+outputFlag, i.Output, "text", "json", "slices")
	if i.SpecDir != "" {
		p.path("--"+specFlag, i.SpecDir)
	}
	return errors.Join(p...)
}
