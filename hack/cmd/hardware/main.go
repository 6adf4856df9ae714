// SPDX-License-Identifier: Apache-2.0

// Command hardware runs the tests of this machine's GPUs, or packs them for another machine. See docs/dev/hardware.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/hardware"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/simulated/recording"
)

const usage = `usage: hardware run [-stand-in PROFILE | -recording FILE] [-run REGEXP]
       hardware bundle [-o FILE]
       hardware root [-o DIR]
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			os.Exit(exit.ExitCode()) // the tests have said what failed
		}
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "hardware:", err)
		}
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, usage)
		return flag.ErrHelp
	}
	root, err := gotool.Root(ctx)
	if err != nil {
		return err
	}
	out := filepath.Join(root, "bin/hardware")
	flags := flag.NewFlagSet("hardware "+args[0], flag.ContinueOnError)
	switch args[0] {
	case "run":
		profile := flags.String("stand-in", "", "`profile` of a simulated machine to test the tests on, in place of this machine's driver")
		file := flags.String("recording", "", "`file` of kubelet-plugin inspect -o json whose machine plays the driver")
		tests := flags.String("run", "", "`regexp` of the tests to run: Hardware/Cost")
		if err := flags.Parse(args[1:]); err != nil {
			return err
		}
		return runTests(ctx, out, *profile, *file, *tests)
	case "root":
		dir := flags.String("o", filepath.Join(root, "bin/hardware-root"), "`directory` of the archives")
		if err := flags.Parse(args[1:]); err != nil {
			return err
		}
		programs, err := hardware.Build(ctx, filepath.Join(out, "programs"), os.Stderr)
		if err != nil {
			return err
		}
		if err := programs.Root(ctx, *dir, os.Stderr); err != nil {
			return err
		}
		fmt.Println(*dir, "has the parts of an archive, inside.sh and busybox; docs/dev/hardware.md says how to use them")
		return nil
	case "bundle":
		path := flags.String("o", filepath.Join(root, "bin/tandem-hardware.tar.gz"), "`file` of the archive")
		if err := flags.Parse(args[1:]); err != nil {
			return err
		}
		programs, err := hardware.Build(ctx, filepath.Join(out, "programs"), os.Stderr)
		if err != nil {
			return err
		}
		size, err := programs.Bundle(*path)
		if err != nil {
			return err
		}
		fmt.Printf("%s %d MiB: unpack it on the machine, and run tandem-hardware/run.sh as root\n", *path, (size+1<<20-1)>>20)
		return nil
	}
	fmt.Fprint(os.Stderr, usage)
	return flag.ErrHelp
}

func runTests(ctx context.Context, out, profile, file, tests string) error {
	if profile == "" && file == "" {
		// Building takes minutes.
		missing, err := missingDriver(ctx)
		if err != nil {
			return err
		}
		if missing != nil {
			fmt.Printf("no hardware to test: %v\n", missing)
			return nil
		}
	}
	programs, err := hardware.Build(ctx, filepath.Join(out, "programs"), os.Stderr)
	if err != nil {
		return err
	}
	env := []string{"TANDEM_HARDWARE_OUT=" + filepath.Join(out, "out")}
	if profile != "" || file != "" {
		var rec *recording.Recording
		if file != "" {
			if rec, err = hardware.ReadRecording(file); err != nil {
				return err
			}
		}
		more, err := hardware.StandIn(ctx, filepath.Join(out, "stand-in"), profile, programs.Simulated, rec)
		if err != nil {
			return err
		}
		env = append(env, more...)
	}
	args := []string{"-test.timeout=2h"} // the programs of the cluster may have to be built
	if tests != "" {
		args = append(args, "-test.run="+tests)
	}
	cmd := exec.CommandContext(ctx, programs.Run, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	return cmd.Run()
}

// missingDriver says where it looked if the agent would find no GPU here.
func missingDriver(ctx context.Context) (missing, err error) {
	c, err := config.LoadInspect(nil, os.LookupEnv, os.Stderr)
	if err != nil {
		return nil, err
	}
	return nvml.Inspect(ctx, nvml.Options{
		Host: nvml.Host{HostRoot: c.HostRoot, DriverRoot: c.DriverRoot, DevRoot: c.DevRoot, Library: c.NVML, SysfsRoot: c.SysfsRoot},
	}).Err(), nil
}
