// SPDX-License-Identifier: Apache-2.0

package image

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/hack/binaries"
	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/progress"
)

const (
	ownModule = "github.com/tandem-gpu/tandem"

	hookModule  = "github.com/NVIDIA/nvidia-container-toolkit"
	hookVersion = "v1.20.1"
	hookInfo    = hookModule + "/internal/info"
)

// lazyBinding lets a program start without the NVML symbols that go-nvml leaves undefined until the library is loaded:
// compilers of hardened systems bind at start by default.
const lazyBinding = "-Wl,-z,lazy"

// buildProgram compiles a program of ours into the output directory, where the next build finds it and links only what
// changed.
func buildProgram(ctx context.Context, o Options, name, pkg string) (string, error) {
	t, err := targetFor(o.Arch)
	if err != nil {
		return "", err
	}
	return build(ctx, o, name, pkg, t.goEnv(o.Arch), "-linkmode=external", "-extldflags="+lazyBinding)
}

// buildStatic compiles a command of ours that needs nothing of the image: it runs where there may be no C library.
func buildStatic(ctx context.Context, o Options, name string) (string, error) {
	return build(ctx, o, name, ownModule+"/cmd/"+name, []string{"CGO_ENABLED=0", "GOOS=linux", "GOARCH=" + o.Arch})
}

func build(ctx context.Context, o Options, name, pkg string, env []string, link ...string) (string, error) {
	out := filepath.Join(o.Out, name+"-"+o.Arch)
	ldflags := gotool.LDFlags(o.Version, o.Commit, link...)
	args := append([]string{"build", "-overlay=" + o.Overlay, "-ldflags", ldflags, "-o", out}, gotool.BuildFlags()...)
	fmt.Fprintf(o.Progress, "compiling %s for %s\n", pkg, o.Arch)
	tmp, err := os.MkdirTemp(o.Out, ".build-")
	if err != nil {
		return "", fmt.Errorf("make build directory: %w", err)
	}
	defer os.RemoveAll(tmp)
	cmd := gotool.Command(ctx, tmp, append(env, gotool.FixedEnv...), append(args, pkg)...)
	cmd.Dir = o.Root
	start := time.Now()
	stop := progress.Every(progress.Heartbeat, func() {
		fmt.Fprintf(o.Progress, "still compiling %s for %s after %s\n", pkg, o.Arch, time.Since(start).Round(time.Second))
	})
	output, err := cmd.CombinedOutput()
	stop()
	if err != nil {
		return "", fmt.Errorf("compile %s for %s: %w\n%s", pkg, o.Arch, err, output)
	}
	return out, nil
}

// hookBinary is nvidia-cdi-hook, linked statically: the container runtime runs it on the host, whose C library may be
// older than the one here, or missing (Talos). It never loads NVML, whose symbols therefore stay undefined.
// The C library is a part of it, so another one is another variant in the cache, as is another release of Go.
func hookBinary(arch string) (binaries.Tool, error) {
	t := targets[arch]
	archive, err := find(t.libraryDirs(arch), "libc.a")
	if err != nil {
		return binaries.Tool{}, err
	}
	data, err := os.ReadFile(archive)
	if err != nil {
		return binaries.Tool{}, fmt.Errorf("read C library of nvidia-cdi-hook: %w", err)
	}
	sum := sha256.Sum256(data)
	return binaries.Tool{
		Module: hookModule, Version: hookVersion, Package: hookModule + "/cmd/nvidia-cdi-hook",
		Variant: fmt.Sprintf("-static-%s-%s-%x", arch, runtime.Version(), sum[:6]),
		LDFlags: "-linkmode=external " +
			`-extldflags "-static -Wl,--unresolved-symbols=ignore-in-object-files" ` +
			"-X " + hookInfo + ".version=" + strings.TrimPrefix(hookVersion, "v"),
		Env: append(t.goEnv(arch), gotool.FixedEnv...),
	}, nil
}
