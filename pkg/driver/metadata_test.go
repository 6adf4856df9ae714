// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// A container finds the attributes of its devices in a file (KEP-5304).
func TestDeviceMetadata(t *testing.T) {
	t.Parallel()
	for _, on := range []bool{true, false} {
		t.Run(map[bool]string{true: "on", false: "off"}[on], func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			r := newRig(t, machine(8), func(c *Config) {
				if on {
					c.MetadataDir = dir
				}
			}).run()
			k := r.ready()
			c := r.claim("a", "gpu-2", "gpu-3")
			answer, err := drapbv1.NewDRAPluginClient(k.conn).NodePrepareResources(t.Context(), &drapbv1.NodePrepareResourcesRequest{
				Claims: []*drapbv1.Claim{{Uid: string(c.UID), Name: c.Name, Namespace: c.Namespace}},
			})
			if err != nil {
				t.Fatal(err)
			}
			const name = "gpu.nvidia.com/metadata=uid-a_gpus"
			ids := answer.Claims[string(c.UID)].Devices[0].CdiDeviceIds
			if got := slices.Contains(ids, name); got != on || len(ids) == 0 || ids[0] != cdi(2) {
				t.Fatalf("CDI devices %v", ids)
			}
			if !on {
				if files, err := os.ReadDir(dir); err != nil || len(files) > 0 {
					t.Errorf("files %v, %v", files, err)
				}
				return
			}
			cache, err := cdilib.NewCache(cdilib.WithSpecDirs(dir), cdilib.WithAutoRefresh(false))
			if err != nil {
				t.Fatal(err)
			}
			d := cache.GetDevice(name)
			if d == nil || len(d.ContainerEdits.Mounts) != 1 {
				t.Fatalf("device %s resolves to %+v", name, d)
			}
			path := d.ContainerEdits.Mounts[0].HostPath
			devices := readMetadata(t, path)
			if len(devices) != 2 {
				t.Fatalf("metadata of %d devices, want 2", len(devices))
			}
			text := func(at int, name resourceapi.QualifiedName) string {
				if value := devices[at].Attributes[name].StringValue; value != nil {
					return *value
				}
				return ""
			}
			for at, minor := range []int{2, 3} {
				if got := text(at, "uuid"); got != uuidOf(minor) {
					t.Errorf("device %d has UUID %q, want %q", at, got, uuidOf(minor))
				}
				if got := text(at, "type"); got != "gpu" {
					t.Errorf("device %d has type %q", at, got)
				}
			}
			if errs, err := k.unprepare("v1", c); err != nil || len(errs) > 0 {
				t.Fatal(err, errs)
			}
			left, err := filepath.Glob(filepath.Join(dir, "*"))
			if err != nil || len(left) > 0 {
				t.Errorf("left %v, %v", left, err)
			}
			if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s is left (%v)", path, err)
			}
		})
	}
}

func readMetadata(t *testing.T, path string) []metadata.Device {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var got metadata.DeviceMetadata
	if err := devicemetadata.DecodeMetadataFromStream(json.NewDecoder(file), &got); err != nil {
		t.Fatal(err)
	}
	return got.Requests[0].Devices
}

// A slice lacks the UUID of a partition on demand, because it has another one each time.
func TestMetadataOfAPartitionOnDemand(t *testing.T) {
	t.Parallel()
	made := &fakePartitions{known: map[device.Ref]device.Partition{}}
	dir := t.TempDir()
	r := newRig(t, dynamicMachine(2), func(c *Config) { c.Partitions, c.MetadataDir = made, dir }).run()
	k := r.ready()
	if _, errs, err := k.prepare("v1", r.demanding("a", "gpu-0-mig-1g10gb-19-1")); err != nil || len(errs) > 0 {
		t.Fatal(err, errs)
	}
	files, err := filepath.Glob(filepath.Join(r.driver.pluginDir(), "dra-device-metadata/*/gpus/metadata.json"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	d := readMetadata(t, files[0])[0]
	uuid, profile := d.Attributes["uuid"].StringValue, d.Attributes["profile"].StringValue
	if uuid == nil || *uuid != "MIG-1+1" || profile == nil || *profile != "1g.10gb" {
		t.Errorf("attributes %+v", d.Attributes)
	}
}
