// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/tandem-gpu/tandem/hack/cluster"
)

// podResourcesSocket is where kubelet answers on a node (KEP-606).
const podResourcesSocket = "/var/lib/kubelet/pod-resources/kubelet.sock"

// Granted asks a node's kubelet which GPUs it believes to have given to each pod, by "namespace/name". Ask only while no pod
// is being admitted: the question makes kubelet forget devices that it is about to give.
func Granted(ctx context.Context, node *cluster.Node) (map[string][]Number, error) {
	root, err := node.Root()
	if err != nil {
		return nil, fmt.Errorf("ask kubelet of %s: %w", node.Name(), err)
	}
	known, err := readGPUs(root)
	if err != nil {
		return nil, fmt.Errorf("ask kubelet of %s: %w", node.Name(), err)
	}
	connection, err := grpc.NewClient("passthrough:///kubelet", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return node.DialContext(ctx, "unix", podResourcesSocket)
		}))
	if err != nil {
		return nil, fmt.Errorf("ask kubelet of %s: %w", node.Name(), err)
	}
	defer connection.Close()
	answer, err := podresources.NewPodResourcesListerClient(connection).List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask kubelet of %s for its pods' resources: %w", node.Name(), err)
	}
	return known.granted(answer), nil
}

// granted reads kubelet's answer: limits by UUID, claims by the devices' names.
func (g gpus) granted(answer *podresources.ListPodResourcesResponse) map[string][]Number {
	byUUID := map[string]Number{}
	for number, gpu := range g {
		byUUID[gpu.UUID] = number
	}
	pods := map[string][]Number{}
	for _, pod := range answer.GetPodResources() {
		name := pod.GetNamespace() + "/" + pod.GetName()
		for _, container := range pod.GetContainers() {
			for _, devices := range container.GetDevices() {
				for _, id := range devices.GetDeviceIds() {
					if number, ok := byUUID[id]; ok && devices.GetResourceName() == resourceName {
						pods[name] = append(pods[name], number)
					}
				}
			}
			for _, claim := range container.GetDynamicResources() {
				for _, device := range claim.GetClaimResources() {
					minor, err := strconv.ParseUint(strings.TrimPrefix(device.GetDeviceName(), "gpu-"), 10, 32)
					if err == nil && device.GetDriverName() == driverName {
						pods[name] = append(pods[name], Number{nvidiaMajor, uint32(minor)})
					}
				}
			}
		}
		slices.SortFunc(pods[name], Number.compare)
		pods[name] = slices.Compact(pods[name])
	}
	return pods
}
