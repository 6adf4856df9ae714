// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
)

// runcContainer runs one process after the other in containers of runc, as a container runtime would with the node's CDI spec.
type runcContainer struct {
	bench *bench
	cache *cdilib.Cache
	count int
}

// process is what runs in a container.
type process struct {
	args []string
	// device is the UUID of a device that is injected.
	device string
	uid    uint32
}

func newContainer(t *testing.T, b *bench) *runcContainer {
	t.Helper()
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(b.specDir(t)), cdilib.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	return &runcContainer{bench: b, cache: cache}
}

func (c *runcContainer) run(t *testing.T, p process) ([]byte, error) {
	t.Helper()
	c.count++
	bundle := t.TempDir()
	root := filepath.Join(bundle, "rootfs")
	if err := os.CopyFS(root, os.DirFS(filepath.Join(c.bench.programs, "rootfs"))); err != nil {
		t.Fatal(err)
	}
	config := oci.Spec{
		Version:  oci.Version,
		Root:     &oci.Root{Path: root},
		Hostname: "hardware",
		Process: &oci.Process{
			Args: p.args, Cwd: "/", User: oci.User{UID: p.uid, GID: p.uid}, NoNewPrivileges: true,
			Env: []string{"PATH=/usr/bin:/bin", "LC_ALL=C"},
		},
		Mounts: []oci.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755", "size=65536k"}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "nodev", "mode=1777"}},
			{Destination: "/tmp", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=1777"}},
		},
		Linux: &oci.Linux{
			Namespaces: []oci.LinuxNamespace{
				{Type: oci.PIDNamespace}, {Type: oci.IPCNamespace}, {Type: oci.UTSNamespace}, {Type: oci.MountNamespace},
				{Type: oci.NetworkNamespace},
			},
			CgroupsPath: fmt.Sprintf("/tandem-hardware-%d-%d", os.Getpid(), c.count),
			Resources:   &oci.LinuxResources{Devices: []oci.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}},
		},
	}
	if p.device != "" {
		name := "k8s.gpu.nvidia.com/gpu=" + p.device
		if unresolved, err := c.cache.InjectDevices(&config, name); err != nil {
			t.Fatalf("inject %s: %v (unresolved: %v)", name, err, unresolved)
		}
	}
	data, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), data, 0o644); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := c.bench.command(ctx, "runc", "--root", filepath.Join(bundle, "state"), "run", "--no-new-keyring", "--bundle", bundle,
		fmt.Sprintf("tandem-hardware-%d-%d", os.Getpid(), c.count))
	// The driver's libraries are for the container only.
	cmd.Env = os.Environ()
	return cmd.CombinedOutput()
}
