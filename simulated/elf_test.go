// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"bytes"
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

func TestSharedObjectIsReadable(t *testing.T) {
	for architecture, machine := range map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64} {
		t.Run(architecture, func(t *testing.T) {
			data := sharedObject(architecture, "libx.so.1", []export{{name: "answer", code: 42}, {name: "text", text: "words"}})
			o, err := elf.NewFile(bytes.NewReader(data))
			if err != nil {
				t.Fatal(err)
			}
			if o.Machine != machine || o.Type != elf.ET_DYN {
				t.Errorf("machine %v, type %v", o.Machine, o.Type)
			}
			if sonames, err := o.DynString(elf.DT_SONAME); err != nil || !slices.Equal(sonames, []string{"libx.so.1"}) {
				t.Errorf("SONAME %v, %v", sonames, err)
			}
			symbols, err := o.DynamicSymbols()
			if err != nil || len(symbols) != 2 || symbols[0].Name != "answer" || symbols[1].Name != "text" {
				t.Errorf("symbols %v, %v", symbols, err)
			}
		})
	}
}

// The real loader takes the library, and the real go-nvml gets from it what a machine without a loaded driver answers.
func TestLoaderLoadsTheLibrary(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs the Linux loader")
	}
	dir := t.TempDir()
	materialize(t, dir, "l4x4", MaterializeOptions{PlainDeviceFiles: true})
	found, err := filepath.Glob(filepath.Join(dir, DriverDir, "usr/lib/*/libnvidia-ml.so.1"))
	if err != nil || len(found) != 1 {
		t.Fatalf("libnvidia-ml.so.1: %v, %v", found, err)
	}
	lib := nvml.New(nvml.WithLibraryPath(found[0]))
	ret := lib.Init()
	if ret != nvml.ERROR_DRIVER_NOT_LOADED {
		t.Errorf("Init = %d", int(ret))
	}
	if text := ret.Error(); text != "Driver Not Loaded" {
		t.Errorf("error text %q", text)
	}
	if ret := lib.Shutdown(); ret != nvml.ERROR_UNINITIALIZED {
		t.Errorf("Shutdown = %d", int(ret))
	}
}

// ldconfig, which the container hook runs, files every library under its SONAME.
func TestLdconfigLinksTheLibraries(t *testing.T) {
	ldconfig, err := exec.LookPath("ldconfig")
	if err != nil {
		t.Skip("no ldconfig")
	}
	dir := t.TempDir()
	data := sharedObject(runtime.GOARCH, "libcuda.so.1", nil)
	if err := os.WriteFile(filepath.Join(dir, "libcuda.so.580.95.05"), data, 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(ldconfig, "-n", dir).CombinedOutput(); err != nil || len(out) > 0 {
		t.Fatalf("ldconfig: %v: %s", err, out)
	}
	if target, err := os.Readlink(filepath.Join(dir, "libcuda.so.1")); err != nil || target != "libcuda.so.580.95.05" {
		t.Errorf("libcuda.so.1 -> %q, %v", target, err)
	}
}
