// SPDX-License-Identifier: Apache-2.0

// Package smi does to the MIG of a simulated machine what an administrator does with nvidia-smi: the options that it knows are
// called the same and mean the same. Tests and people use it; no part of the agent does.
package smi

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/simulated"
)

// Usage says what Run knows.
const Usage = `-L                                list GPUs and MIG devices
-i GPU -mig 0|1                   switch MIG mode off or on
-c 0|2|3                          set the compute mode: default, prohibited, exclusive to a process
mig -lgip | -lgi | -lci           list profiles, GPU instances, compute instances
mig -cgi PROFILE[:START],... [-C] create GPU instances, with -C each with a compute instance that takes all of it
mig -cci ID,... -gi ID            create compute instances by profile ID
mig -dci [-gi ID] [-ci ID]        destroy compute instances
mig -dgi [-gi ID]                 destroy GPU instances
-i GPU (index or UUID) goes with all of them; without it they are about all GPUs with MIG on.
PROFILE is a name ("3g.40gb") or an ID.
`

// command is what the arguments ask for.
type command struct {
	lib     nvml.Interface
	devices device.Interface
	out     io.Writer

	gpu, mode, compute                 string
	list, lgip, lgi, lci, whole        bool
	dci, dgi                           bool
	cgi, cci                           string
	gpuInstance, computeInstance, none int
}

// At is Run on the machine that is materialized in dir.
func At(dir string, args []string, out io.Writer) error {
	var reported error
	library, err := simulated.Machine(dir, func(err error) { reported = errors.Join(reported, err) })
	if err != nil {
		return err
	}
	if ret := library.Init(); ret != nvml.SUCCESS {
		return fmt.Errorf("initialize: %w", ret)
	}
	defer func() { _ = library.Shutdown() }()
	return errors.Join(Run(library, args, out), reported)
}

// Run does what nvidia-smi does with these arguments. The library has been initialized. It stops at the first error, as
// nvidia-smi does: what came before stays.
func Run(lib nvml.Interface, args []string, out io.Writer) error {
	c := &command{lib: lib, devices: device.New(lib), out: out, none: -1}
	flags := flag.NewFlagSet("smi", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&c.gpu, "i", "", "")
	if len(args) > 0 && args[0] == "mig" {
		args = args[1:]
		flags.BoolVar(&c.lgip, "lgip", false, "")
		flags.BoolVar(&c.lgi, "lgi", false, "")
		flags.BoolVar(&c.lci, "lci", false, "")
		flags.StringVar(&c.cgi, "cgi", "", "")
		flags.BoolVar(&c.whole, "C", false, "")
		flags.StringVar(&c.cci, "cci", "", "")
		flags.BoolVar(&c.dci, "dci", false, "")
		flags.BoolVar(&c.dgi, "dgi", false, "")
		flags.IntVar(&c.gpuInstance, "gi", c.none, "")
		flags.IntVar(&c.computeInstance, "ci", c.none, "")
	} else {
		flags.BoolVar(&c.list, "L", false, "")
		flags.StringVar(&c.mode, "mig", "", "")
		flags.StringVar(&c.compute, "c", "", "")
	}
	if err := flags.Parse(args); err != nil || flags.NArg() > 0 {
		return errors.Join(errors.New("the arguments are not understood"), err, errors.New(strings.TrimSpace(Usage)))
	}
	return c.run()
}

func (c *command) run() error {
	switch {
	case c.list:
		return c.visit(c.listDevices)
	case c.mode != "":
		return c.visit(c.switchMode)
	case c.compute != "":
		return c.visit(c.setComputeMode)
	case c.lgip:
		return c.visit(c.listProfiles)
	case c.lgi:
		return c.visitMIG(c.listInstances)
	case c.lci:
		return c.visitMIG(c.listComputes)
	case c.cgi != "":
		return c.visitMIG(c.createInstances)
	case c.cci != "":
		return c.visitMIG(c.createComputes)
	case c.dci:
		return c.visitMIG(c.destroyComputes)
	case c.dgi:
		return c.visitMIG(c.destroyInstances)
	}
	return errors.Join(errors.New("nothing to do"), errors.New(strings.TrimSpace(Usage)))
}

// visit goes to the GPU that was named, or to all.
func (c *command) visit(do func(index int, d nvml.Device) error) error {
	count, ret := c.lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return fmt.Errorf("count GPUs: %w", ret)
	}
	found := false
	for index := range count {
		d, ret := c.lib.DeviceGetHandleByIndex(index)
		switch {
		case ret == nvml.SUCCESS:
		case c.gpu == "" || c.gpu == strconv.Itoa(index):
			return fmt.Errorf("look up GPU %d: %w", index, ret)
		default:
			continue // another one is lost
		}
		uuid, _ := d.GetUUID() //nolint:errcheck // one without is not the one that was named
		if c.gpu != "" && c.gpu != strconv.Itoa(index) && c.gpu != uuid {
			continue
		}
		found = true
		if err := do(index, d); err != nil {
			return fmt.Errorf("GPU %d: %w", index, err)
		}
	}
	if !found {
		return fmt.Errorf("there is no GPU %q", c.gpu)
	}
	return nil
}

func (c *command) visitMIG(do func(index int, d nvml.Device) error) error {
	found := false
	err := c.visit(func(index int, d nvml.Device) error {
		if mode, _, ret := d.GetMigMode(); ret != nvml.SUCCESS || mode != nvml.DEVICE_MIG_ENABLE {
			return nil
		}
		found = true
		return do(index, d)
	})
	if err == nil && !found {
		return errors.New("no MIG-enabled devices found")
	}
	return err
}

func (c *command) print(format string, args ...any) {
	// The answer is for a person or a test: who cannot read it sees that.
	_, _ = fmt.Fprintf(c.out, format+"\n", args...)
}

func (c *command) setComputeMode(_ int, d nvml.Device) error {
	mode, err := strconv.Atoi(c.compute)
	if err != nil {
		return fmt.Errorf("compute mode: %w", err)
	}
	if ret := d.SetComputeMode(nvml.ComputeMode(mode)); ret != nvml.SUCCESS {
		return fmt.Errorf("set compute mode %d: %w", mode, ret)
	}
	return nil
}

func (c *command) switchMode(_ int, d nvml.Device) error {
	mode, err := strconv.Atoi(c.mode)
	if err != nil {
		return fmt.Errorf("MIG mode %q is neither 0 nor 1", c.mode)
	}
	activation, ret := d.SetMigMode(mode)
	if ret != nvml.SUCCESS {
		return fmt.Errorf("set MIG mode: %w", ret)
	}
	if activation != nvml.SUCCESS {
		return fmt.Errorf("MIG mode is pending: %w", activation)
	}
	return nil
}

func (c *command) listDevices(index int, d nvml.Device) error {
	name, _ := d.GetName() //nolint:errcheck // an empty name says so
	uuid, _ := d.GetUUID() //nolint:errcheck // the same
	c.print("GPU %d: %s (UUID: %s)", index, name, uuid)
	dev, err := c.devices.NewDevice(d)
	if err != nil {
		return err
	}
	return dev.VisitMigDevices(func(i int, m device.MigDevice) error {
		profile, err := m.GetProfile()
		if err != nil {
			return err
		}
		uuid, ret := m.GetUUID()
		if ret != nvml.SUCCESS {
			return ret
		}
		c.print("  MIG %-12s Device %2d: (UUID: %s)", profile, i, uuid)
		return nil
	})
}

func parseID(text string, what string) (int, error) {
	id, err := strconv.Atoi(text)
	if err != nil {
		return 0, fmt.Errorf("%s %q is no number", what, text)
	}
	return id, nil
}

// split is a list of the command line.
func split(list string) []string { return strings.Split(list, ",") }
