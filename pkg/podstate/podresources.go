// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// PodResources is a client of kubelet's pod resources endpoint (KEP-606). A pod that is missing from List may still run: after a
// kubelet restart the list is empty until kubelet's sources are ready. List must not be called while an Allocate is in progress,
// because it makes kubelet forget that call's device IDs.
type PodResources struct {
	connection *grpc.ClientConn
	client     podresources.PodResourcesListerClient
}

const (
	// maxAnswer is the limit of kubelet's own client (k8s.io/kubernetes pkg/kubelet/apis/podresources).
	maxAnswer = 16 << 20
	// reconnectDelay bounds how long kubelet counts as away after its return; grpc's own bound is two minutes.
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

// UsedClaim is a claim that kubelet lists for an active pod.
type UsedClaim struct {
	Namespace, Pod string
	Claim          string
	Devices        []PoolDevice
}

// List returns the devices of some resources and the claims of one driver that active pods have.
func (p *PodResources) List(ctx context.Context, counts func(resource string) bool, driver string) ([]UsedDevice, []UsedClaim, error) {
	response, err := p.client.List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		return nil, nil, fmt.Errorf("list kubelet's pod resources: %w", err)
	}
	var devices []UsedDevice
	var claims []UsedClaim
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
				used := UsedClaim{Namespace: dynamic.GetClaimNamespace(), Pod: pod.GetName(), Claim: dynamic.GetClaimName()}
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
