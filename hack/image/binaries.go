// SPDX-License-Identifier: Apache-2.0

package image

import "context"

// Binaries compiles the two programs of the image as the image has them, without the image around them, for whoever runs
// them on this machine. It returns the paths of the agent and of nvidia-cdi-hook.
func Binaries(ctx context.Context, o Options) (agent, hook string, err error) {
	if err := o.complete(ctx); err != nil {
		return "", "", err
	}
	return compile(ctx, o)
}

func compile(ctx context.Context, o Options) (agent, hook string, err error) {
	if err := ensureToolchain(ctx, o.Arch, o.Progress); err != nil {
		return "", "", err
	}
	agent, err = buildAgent(ctx, o)
	if err != nil {
		return "", "", err
	}
	hook, err = hookBinary(o.Arch).Ensure(ctx, o.Progress)
	return agent, hook, err
}
