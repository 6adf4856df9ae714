// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// PodDevice is one device in kubelet's device manager checkpoint. It does not prove that the pod lives: kubelet does not rewrite
// the checkpoint when a pod ends (k8s.io/kubernetes pkg/kubelet/cm/devicemanager).
type PodDevice struct {
	PodUID, Container string
	Resource, ID      string
}

// DeviceCheckpoint is the contents of kubelet's device manager checkpoint.
type DeviceCheckpoint struct {
	// Written is the modification time of the file; zero when there is none.
	Written time.Time
	Devices []PodDevice
	// Registered has the device IDs of each resource.
	Registered map[string][]string
}

// deviceCheckpointFile is the name below the device plugin directory (kubelet_internal_checkpoint since Kubernetes 1.8).
const deviceCheckpointFile = "kubelet_internal_checkpoint"

// DeviceCheckpointPath returns the path of the checkpoint below kubelet's root directory. kubelet replaces the file at each
// change.
func DeviceCheckpointPath(kubeletDir string) string {
	return filepath.Join(kubeletDir, "device-plugins", deviceCheckpointFile)
}

// ReadDeviceCheckpoint reads the checkpoint below kubelet's root directory. A missing file is no error: kubelet has allocated
// nothing yet, or its state was removed. It ignores unknown fields, and it cannot verify the checksum, which covers a Go
// structure of kubelet.
func ReadDeviceCheckpoint(kubeletDir string) (DeviceCheckpoint, error) {
	path := DeviceCheckpointPath(kubeletDir)
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return DeviceCheckpoint{}, nil
	}
	if err != nil {
		return DeviceCheckpoint{}, fmt.Errorf("read kubelet's device checkpoint: %w", err)
	}
	defer file.Close()
	info, err := file.Stat()
	data, readErr := io.ReadAll(file)
	if err := errors.Join(err, readErr); err != nil {
		return DeviceCheckpoint{}, fmt.Errorf("read kubelet's device checkpoint: %w", err)
	}
	var contents struct {
		Data struct {
			PodDeviceEntries []struct {
				PodUID, ContainerName, ResourceName string
				DeviceIDs                           map[string][]string
			}
			RegisteredDevices map[string][]string
		}
	}
	if err := json.Unmarshal(data, &contents); err != nil {
		return DeviceCheckpoint{}, fmt.Errorf("read kubelet's device checkpoint %s: %w", path, err)
	}
	checkpoint := DeviceCheckpoint{Written: info.ModTime(), Registered: contents.Data.RegisteredDevices}
	for _, entry := range contents.Data.PodDeviceEntries {
		for _, ids := range entry.DeviceIDs {
			for _, id := range ids {
				checkpoint.Devices = append(checkpoint.Devices, PodDevice{
					PodUID: entry.PodUID, Container: entry.ContainerName, Resource: entry.ResourceName, ID: id,
				})
			}
		}
	}
	return checkpoint, nil
}

// KubeletClaim is a claim that kubelet has prepared, or begun to prepare, with the devices of one driver.
type KubeletClaim struct {
	UID, Namespace, Name string
	PodUIDs              []string
	Devices              []PoolDevice
	// CDIDevices are the CDI names of kubelet's answer from Prepare, which it passes to the runtime.
	CDIDevices []string
}

// PoolDevice identifies a device as ResourceSlices do.
type PoolDevice struct{ Pool, Device string }

// ClaimStatePath returns the path of kubelet's claim state below its root directory. kubelet replaces the file at each change.
func ClaimStatePath(kubeletDir string) string { return filepath.Join(kubeletDir, "dra_manager_state") }

// ReadClaimState reads kubelet's claim state, dra_manager_state, below its root directory, for one driver. It survives reboots. A
// missing file is no error. The checksum is verified: CRC-32 (IEEE) over the inner JSON (k8s.io/kubernetes
// pkg/kubelet/cm/dra/state).
func ReadClaimState(kubeletDir, driver string) ([]KubeletClaim, error) {
	entries, err := readClaimState(kubeletDir)
	if err != nil {
		return nil, err
	}
	var claims []KubeletClaim
	for _, entry := range entries {
		ours, ok := entry.DriverState[driver]
		if !ok {
			continue
		}
		claim := KubeletClaim{UID: entry.ClaimUID, Namespace: entry.Namespace, Name: entry.ClaimName}
		for uid := range entry.PodUIDs {
			claim.PodUIDs = append(claim.PodUIDs, uid)
		}
		slices.Sort(claim.PodUIDs)
		for _, d := range ours.Devices {
			claim.Devices = append(claim.Devices, PoolDevice{Pool: d.PoolName, Device: d.DeviceName})
			claim.CDIDevices = append(claim.CDIDevices, d.CDIDeviceIDs...)
		}
		claims = append(claims, claim)
	}
	return claims, nil
}

// claimDevices reports whether kubelet's state has devices of any driver for a claim, and returns the pods that kubelet starts,
// or has started, with them.
func claimDevices(kubeletDir, claimUID string) (has bool, podUIDs []string, err error) {
	entries, err := readClaimState(kubeletDir)
	if err != nil {
		return false, nil, err
	}
	for _, entry := range entries {
		for _, state := range entry.DriverState {
			if entry.ClaimUID == claimUID && len(state.Devices) > 0 {
				return true, slices.Sorted(maps.Keys(entry.PodUIDs)), nil
			}
		}
	}
	return false, nil, nil
}

// claimEntry is a claim in kubelet's claim state.
type claimEntry struct {
	ClaimUID, ClaimName, Namespace string
	PodUIDs                        map[string]struct{}
	DriverState                    map[string]struct {
		Devices []struct {
			PoolName, DeviceName string
			CDIDeviceIDs         []string
		}
	}
}

func readClaimState(kubeletDir string) ([]claimEntry, error) {
	path := ClaimStatePath(kubeletDir)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read kubelet's claim state: %w", err)
	}
	var file struct {
		Data     string
		Checksum uint32
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, fmt.Errorf("read kubelet's claim state %s: %w", path, err)
	}
	if sum := crc32.ChecksumIEEE([]byte(file.Data)); sum != file.Checksum {
		return nil, fmt.Errorf("read kubelet's claim state %s: checksum is %d, not %d", path, sum, file.Checksum)
	}
	var state struct{ ClaimInfoStateList []claimEntry }
	if err := json.Unmarshal([]byte(file.Data), &state); err != nil {
		return nil, fmt.Errorf("read kubelet's claim state %s: data: %w", path, err)
	}
	return state.ClaimInfoStateList, nil
}

// PodResources is a client of kubelet's pod resources endpoint (KEP-606). A pod that is missing from List may still run: after a
// kubelet restart the list is empty until kubelet's sources are ready. While an Allocate is in progress, List makes
// kubelet forget that call's device IDs if a pod has ended since: the ledger refuses them to the next pod (docs/design/0002-ledger.md,
// Reuse inside a pod).
type PodResources struct {
	connection *grpc.ClientConn
	client     podresources.PodResourcesListerClient
}

const (
	// maxAnswer is the limit of kubelet's own client (k8s.io/kubernetes pkg/kubelet/apis/podresources).
	maxAnswer = 16 << 20
	// reconnectDelay limits the time between two attempts to reconnect to kubelet. gRPC's default limit is two minutes.
	reconnectDelay = time.Second
)

// NewPodResources returns a client that connects at its first call to the socket below kubelet's root directory.
func NewPodResources(kubeletDir string) (*PodResources, error) {
	socket := filepath.Join(kubeletDir, "pod-resources", "kubelet.sock")
	connection, err := grpc.NewClient("unix://"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: reconnectDelay / 10, Multiplier: 2, MaxDelay: reconnectDelay},
			MinConnectTimeout: reconnectDelay,
		}))
	if err != nil {
		return nil, fmt.Errorf("connect to kubelet's pod resources: %w", err)
	}
	return &PodResources{connection: connection, client: podresources.NewPodResourcesListerClient(connection)}, nil
}

// Close ends the connection.
func (p *PodResources) Close() error { return p.connection.Close() }

// UsedDevice is a device that kubelet lists for an active pod.
type UsedDevice struct {
	Namespace, Pod, Container string
	Resource, ID              string
}

// List returns the devices of some resources and the claims of one driver that active pods have. Of a claim it returns namespace, name and
// devices.
func (p *PodResources) List(ctx context.Context, counts func(resource string) bool, driver string) ([]UsedDevice, []KubeletClaim, error) {
	response, err := p.client.List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		return nil, nil, fmt.Errorf("list kubelet's pod resources: %w", err)
	}
	var devices []UsedDevice
	var claims []KubeletClaim
	for _, pod := range response.GetPodResources() {
		for _, container := range pod.GetContainers() {
			for _, d := range container.GetDevices() {
				if !counts(d.GetResourceName()) {
					continue
				}
				for _, id := range d.GetDeviceIds() {
					devices = append(devices, UsedDevice{
						Namespace: pod.GetNamespace(), Pod: pod.GetName(), Container: container.GetName(), Resource: d.GetResourceName(), ID: id,
					})
				}
			}
			for _, dynamic := range container.GetDynamicResources() {
				used := KubeletClaim{Namespace: dynamic.GetClaimNamespace(), Name: dynamic.GetClaimName()}
				for _, r := range dynamic.GetClaimResources() {
					if r.GetDriverName() == driver {
						used.Devices = append(used.Devices, PoolDevice{Pool: r.GetPoolName(), Device: r.GetDeviceName()})
					}
				}
				if len(used.Devices) > 0 {
					claims = append(claims, used)
				}
			}
		}
	}
	return devices, claims, nil
}

// Allocatable returns the allocatable device IDs of each resource, which shows whether kubelet uses the list that it was sent.
func (p *PodResources) Allocatable(ctx context.Context) (map[string][]string, error) {
	response, err := p.client.GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("get kubelet's allocatable resources: %w", err)
	}
	ids := map[string][]string{}
	for _, d := range response.GetDevices() {
		ids[d.GetResourceName()] = append(ids[d.GetResourceName()], d.GetDeviceIds()...)
	}
	return ids, nil
}
