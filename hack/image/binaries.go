// SPDX-License-Identifier: Apache-2.0

package image

import "context"

// Programs are the paths of what the image runs.
type Programs struct{ Agent, Controller, Daemon, Simulated, Hook string }

// Binaries compiles the programs of the image without the image, for tests that run them on this machine.
func Binaries(ctx context.Context, o Options) (Programs, error) {
	if err := o.complete(ctx); err != nil {
		return Programs{}, err
	}
	return compile(ctx, o)
}

func compile(ctx context.Context, o Options) (Programs, error) {
	if err := ensureToolchain(ctx, o.Arch, o.Progress); err != nil {
		return Programs{}, err
	}
	agent, err := buildProgram(ctx, o, "kubelet-plugin", o.Package)
	if err != nil {
		return Programs{}, err
	}
	controller, err := buildProgram(ctx, o, "controller", o.ControllerPackage)
	if err != nil {
		return Programs{}, err
	}
	daemon, err := buildStatic(ctx, o, "mps-daemon")
	if err != nil {
		return Programs{}, err
	}
	simulated, err := buildStatic(ctx, o, "simulated-driver")
	if err != nil {
		return Programs{}, err
	}
	tool, err := hookBinary(o.Arch)
	if err != nil {
		return Programs{}, err
	}
	hook, err := tool.Ensure(ctx, o.Progress)
	return Programs{Agent: agent, Controller: controller, Daemon: daemon, Simulated: simulated, Hook: hook}, err
}
