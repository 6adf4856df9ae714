// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
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

// Kubelet answers for the devices of pods. It is safe for concurrent use.
type Kubelet struct {
	node       *cluster.Node
	connection *grpc.ClientConn
}

// AskKubelet returns the kubelet of a node, which may be down and come back, until Close.
func AskKubelet(node *cluster.Node) (*Kubelet, error) {
	connection, err := grpc.NewClient("passthrough:///kubelet", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return node.DialContext(ctx, "unix", podResourcesSocket)
		}))
	if err != nil {
		return nil, fmt.Errorf("ask kubelet of %s: %w", node.Name(), err)
	}
	return &Kubelet{node, connection}, nil
}

// Close ends the connection.
func (k *Kubelet) Close() error { return k.connection.Close() }

// Granted asks what kubelet believes to have given to each pod, by "namespace/name": limits by UUID, with "::" and a number behind it for
// a replica, claims by the names of their devices, sorted. Ask only while no pod is being admitted: the question makes kubelet forget
// devices that it is about to give.
func (k *Kubelet) Granted(ctx context.Context) (map[string][]string, error) {
	answer, err := k.list(ctx)
	if err != nil {
		return nil, err
	}
	return granted(answer), nil
}

func (k *Kubelet) list(ctx context.Context) (*podresources.ListPodResourcesResponse, error) {
	answer, err := podresources.NewPodResourcesListerClient(k.connection).List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask kubelet of %s for its pods' resources: %w", k.node.Name(), err)
	}
	return answer, nil
}

// Granted is Kubelet.Granted for one question.
func Granted(ctx context.Context, node *cluster.Node) (map[string][]string, error) {
	kubelet, err := AskKubelet(node)
	if err != nil {
		return nil, err
	}
	defer kubelet.Close()
	return kubelet.Granted(ctx)
}

func granted(answer *podresources.ListPodResourcesResponse) map[string][]string {
	pods := map[string][]string{}
	for _, pod := range answer.GetPodResources() {
		pods[pod.GetNamespace()+"/"+pod.GetName()] = nil
	}
	for _, use := range uses(answer) {
		name := use.Namespace + "/" + use.Pod
		pods[name] = append(pods[name], use.Device)
	}
	for name, devices := range pods {
		slices.Sort(devices)
		pods[name] = slices.Compact(devices)
	}
	return pods
}

// Use is a device that kubelet lists for a container: of a limit by its ID, of a claim by its name.
type Use struct {
	Namespace, Pod, Container string
	Claim                     bool
	Device                    string
}

// Uses asks what kubelet believes to have given to each container. What Granted says about asking applies here too.
func Uses(ctx context.Context, node *cluster.Node) ([]Use, error) {
	kubelet, err := AskKubelet(node)
	if err != nil {
		return nil, err
	}
	defer kubelet.Close()
	answer, err := kubelet.list(ctx)
	if err != nil {
		return nil, err
	}
	return uses(answer), nil
}

func uses(answer *podresources.ListPodResourcesResponse) (all []Use) {
	for _, pod := range answer.GetPodResources() {
		for _, container := range pod.GetContainers() {
			use := Use{Namespace: pod.GetNamespace(), Pod: pod.GetName(), Container: container.GetName()}
			for _, devices := range container.GetDevices() {
				if !ofLimits(devices.GetResourceName()) {
					continue
				}
				for _, use.Device = range devices.GetDeviceIds() {
					all = append(all, use)
				}
			}
			use.Claim = true
			for _, claim := range container.GetDynamicResources() {
				for _, device := range claim.GetClaimResources() {
					if device.GetDriverName() == driverName {
						use.Device = device.GetDeviceName()
						all = append(all, use)
					}
				}
			}
		}
	}
	return all
}

// ofLimits reports whether a resource is a GPU, a replica of one, or a partition.
func ofLimits(resource string) bool {
	return strings.TrimSuffix(resource, sharedSuffix) == resourceName || strings.HasPrefix(resource, partitionResources)
}

// deviceCheckpoint is where kubelet's device manager records what pods have (k8s.io/kubernetes pkg/kubelet/cm/devicemanager/checkpoint).
const deviceCheckpoint = "var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"

// Recorded answers the IDs of the GPUs that kubelet has recorded for pods by limits, by the pod's UID, as the checkpoint below the root
// directory of a node tells. In contrast to Granted, reading it disturbs nothing. Pods that have ended may be among them.
func Recorded(root string) (map[string][]string, error) {
	data, err := os.ReadFile(filepath.Join(root, deviceCheckpoint))
	if gone(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read kubelet's checkpoint: %w", err)
	}
	var checkpoint struct {
		Data struct {
			PodDeviceEntries []struct {
				PodUID, ResourceName string
				DeviceIDs            map[string][]string
			}
		}
	}
	if err := json.Unmarshal(data, &checkpoint); err != nil {
		return nil, fmt.Errorf("read kubelet's checkpoint: %w", err)
	}
	pods := map[string][]string{}
	for _, entry := range checkpoint.Data.PodDeviceEntries {
		if !ofLimits(entry.ResourceName) {
			continue
		}
		for _, ids := range entry.DeviceIDs {
			pods[entry.PodUID] = append(pods[entry.PodUID], ids...)
		}
	}
	for uid, ids := range pods {
		slices.Sort(ids)
		pods[uid] = slices.Compact(ids)
	}
	return pods, nil
}

// foreign matches device IDs that are not UUIDs and end with the minor of a GPU: GKE's "nvidia3", and the torture's own "slot-3".
var foreign = regexp.MustCompile(`^[a-z-]+(\d+)$`)

// ForeignID answers the minor of the GPU that a foreign plugin means by a device ID, and false for the ID of Tandem or of NVIDIA's plugin.
func ForeignID(id string) (minor int, is bool) {
	match := foreign.FindStringSubmatch(id)
	if match == nil || strings.HasPrefix(id, "gpu-") {
		return 0, false
	}
	minor, err := strconv.Atoi(match[1])
	return minor, err == nil
}
