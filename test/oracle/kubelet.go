// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/tandem-gpu/tandem/hack/cluster"
)

// podResourcesSocket is where kubelet answers on a node (KEP-606).
const podResourcesSocket = "/var/lib/kubelet/pod-resources/kubelet.sock"

// Granted asks a node's kubelet what it believes to have given to each pod, by "namespace/name": limits by UUID, with "::" and a
// number behind it for a replica, claims by the names of their devices, sorted. Ask only while no pod is being admitted: the question makes kubelet forget devices that it is
// about to give.
func Granted(ctx context.Context, node *cluster.Node) (map[string][]string, error) {
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
	return granted(answer), nil
}

func granted(answer *podresources.ListPodResourcesResponse) map[string][]string {
	pods := map[string][]string{}
	for _, pod := range answer.GetPodResources() {
		name := pod.GetNamespace() + "/" + pod.GetName()
		for _, container := range pod.GetContainers() {
			for _, devices := range container.GetDevices() {
				if ofLimits(devices.GetResourceName()) {
					pods[name] = append(pods[name], devices.GetDeviceIds()...)
				}
			}
			for _, claim := range container.GetDynamicResources() {
				for _, device := range claim.GetClaimResources() {
					if device.GetDriverName() == driverName {
						pods[name] = append(pods[name], device.GetDeviceName())
					}
				}
			}
		}
		slices.Sort(pods[name])
		pods[name] = slices.Compact(pods[name])
	}
	return pods
}

// ofLimits reports whether a resource is a GPU, a replica of one, or a partition.
func ofLimits(resource string) bool {
	return strings.TrimSuffix(resource, sharedSuffix) == resourceName || strings.HasPrefix(resource, partitionResources)
}
