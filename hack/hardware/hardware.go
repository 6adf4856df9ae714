// SPDX-License-Identifier: Apache-2.0

// Package hardware builds what the tests of hardware (test/hardware) need: programs for a machine with a GPU, which need neither Go nor a
// compiler there, and a stand-in of a driver, by which the tests are tested where there is no GPU.
package hardware

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"

	"github.com/tandem-gpu/tandem/hack/binaries"
	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/image"
)

//go:embed c/cuda.c c/libcuda.c run.sh root.sh inside.sh
var sources embed.FS

// Programs is what Build makes in a directory.
type Programs struct {
	// Dir has the programs; Run is the script that runs the tests.
	Dir, Run string
	// Simulated is the program that plays nvidia-smi and MPS in the stand-in. It is not part of the bundle.
	Simulated string
}

// Build compiles the programs for this machine's architecture into a directory: the test binary, the agent, mps-daemon, kubectl-gpu, static
// runc and nvidia-cdi-hook, a CUDA program, and a root directory for containers.
func Build(ctx context.Context, dir string, progress io.Writer) (Programs, error) {
	root, err := gotool.Root(ctx)
	if err != nil {
		return Programs{}, err
	}
	p := Programs{Dir: dir, Run: filepath.Join(dir, "run.sh")}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return Programs{}, err
	}
	built, err := image.Binaries(ctx, image.Options{Progress: progress})
	if err != nil {
		return Programs{}, err
	}
	p.Simulated = built.Simulated
	runc, err := staticRunc().Ensure(ctx, progress)
	if err != nil {
		return Programs{}, err
	}
	for name, from := range map[string]string{
		"kubelet-plugin": built.Agent, "mps-daemon": built.Daemon, "nvidia-cdi-hook": built.Hook, "runc": runc,
	} {
		if err := copyFile(from, filepath.Join(dir, name), 0o755); err != nil {
			return Programs{}, err
		}
	}
	tests := filepath.Join(dir, "hardware.test")
	for _, build := range []struct {
		what, env string
		args      []string
	}{
		{"the tests of hardware", "CGO_ENABLED=1", append([]string{"test", "-c",
			"-ldflags", "-s -w -linkmode=external -extldflags=-Wl,-z,lazy", "-o", tests, "./test/hardware"}, gotool.BuildFlags()...)},
		{"kubectl-gpu", "CGO_ENABLED=0", []string{"build", "-trimpath", "-ldflags", gotool.LDFlags("hardware", "none"),
			"-o", filepath.Join(dir, "kubectl-gpu"), "./cli/kubectl-gpu"}},
	} {
		fmt.Fprintln(progress, "compiling", build.what)
		cmd := gotool.Command(ctx, dir, []string{build.env}, build.args...)
		cmd.Dir = root
		if out, err := cmd.CombinedOutput(); err != nil {
			return Programs{}, fmt.Errorf("compile %s: %w\n%s", build.what, err, out)
		}
	}
	if err := compile(ctx, "cuda.c", filepath.Join(dir, "cuda"), "-ldl"); err != nil {
		return Programs{}, err
	}
	return p, p.addRoot(ctx, tests, progress)
}

// addRoot makes the root directory of containers, whose C library also serves programs outside where this machine's is too old.
func (p Programs) addRoot(ctx context.Context, tests string, progress io.Writer) error {
	root := filepath.Join(p.Dir, "rootfs")
	if err := os.RemoveAll(root); err != nil {
		return err
	}
	if _, _, err := image.Root(ctx, runtime.GOARCH, tests, root, progress); err != nil {
		return err
	}
	for _, dir := range []string{"dev", "proc", "sys", "tmp", "etc/ld.so.conf.d", "usr/bin"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			return err
		}
	}
	script, err := sources.ReadFile("run.sh")
	if err != nil {
		return err
	}
	return errors.Join(
		copyFile(filepath.Join(p.Dir, "cuda"), filepath.Join(root, "usr/bin/cuda"), 0o755),
		// The hook update-ldcache writes a configuration that includes this directory only if there is one that does.
		os.WriteFile(filepath.Join(root, "etc/ld.so.conf"), []byte("include /etc/ld.so.conf.d/*.conf\n"), 0o644),
		os.WriteFile(p.Run, script, 0o755),
	)
}

// staticRunc is runc without seccomp, whose library is rarely there as an archive, and linked statically: the machine may have another C
// library, or an older one.
func staticRunc() binaries.Tool {
	const module = "github.com/opencontainers/runc"
	return binaries.Tool{
		Module: module, Version: binaries.RuncVersion, Package: module, Variant: "-static-" + runtime.GOARCH,
		LDFlags: `-linkmode=external -extldflags "-static"`, Env: []string{"CGO_ENABLED=1"},
	}
}

func compile(ctx context.Context, source, out string, flags ...string) error {
	code, err := sources.ReadFile("c/" + source)
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "hardware-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	file := filepath.Join(work, source)
	if err := os.WriteFile(file, code, 0o644); err != nil {
		return err
	}
	args := append([]string{"-O1", "-Wall", "-Wextra", "-Werror", "-s", "-o", out, file}, flags...)
	if output, err := exec.CommandContext(ctx, "gcc", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("compile %s: %w\n%s", source, err, output)
	}
	return nil
}

func copyFile(from, to string, mode os.FileMode) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if err := os.RemoveAll(to); err != nil {
		return err
	}
	return os.WriteFile(to, data, mode)
}
