// SPDX-License-Identifier: Apache-2.0

package binaries

import (
	"context"
	_ "embed"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

//go:embed testdata/devicemanager/main.go
var deviceManagerMain []byte

//go:embed testdata/devicemanager/bridge.go
var deviceManagerBridge []byte

// deviceManagerPackage is kubelet's device manager in the module k8s.io/kubernetes.
const deviceManagerPackage = "pkg/kubelet/cm/devicemanager"

// DeviceManager returns the path of a program that drives the device manager of a Kubernetes version, kubelet's own sources with one file
// beside them that opens the package to the program. It builds what the cache lacks, with its progress on out as Options.Progress has it.
// It is idempotent, and safe against other processes doing the same.
func DeviceManager(ctx context.Context, version string, out io.Writer) (string, error) {
	if err := ValidKubernetes(version); err != nil {
		return "", err
	}
	cache, err := CacheDir()
	if err != nil {
		return "", err
	}
	c := component{
		name: "devicemanager", version: version, variant: "-" + hashOf(slices.Concat(deviceManagerMain, deviceManagerBridge)), module: kubernetesModule,
		shared: version == DefaultKubernetes, prepare: copyDeviceManager, source: deviceManagerMain, packages: []program{{".", []string{"devicemanager"}}},
	}
	dir, err := newBuilder(cache, out).ensure(ctx, c, "[1/1]")
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, "devicemanager"), nil
}

// copyDeviceManager copies kubelet's sources of the package, without its tests, and adds the bridge.
func copyDeviceManager(module, work string) error {
	from, to := filepath.Join(module, filepath.FromSlash(deviceManagerPackage)), filepath.Join(work, "devicemanager")
	entries, err := os.ReadDir(from)
	if err != nil {
		return fmt.Errorf("read kubelet's device manager: %w", err)
	}
	if err := os.Mkdir(to, 0o755); err != nil {
		return fmt.Errorf("copy kubelet's device manager: %w", err)
	}
	files := map[string][]byte{"bridge.go": deviceManagerBridge}
	for _, entry := range entries {
		if name := entry.Name(); strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go") {
			if files[name], err = os.ReadFile(filepath.Join(from, name)); err != nil {
				return fmt.Errorf("read kubelet's device manager: %w", err)
			}
		}
	}
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(to, name), data, 0o644); err != nil {
			return fmt.Errorf("copy kubelet's device manager: %w", err)
		}
	}
	return nil
}
