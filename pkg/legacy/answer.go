// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// Names that NVIDIA's container runtime reads (nvidia-container-toolkit, "visible devices").
const (
	visibleDevicesEnv   = "NVIDIA_VISIBLE_DEVICES"
	visibleDevicesMount = "/var/run/nvidia-container-devices"
)

// controlNodes are the device nodes that every container with a GPU uses, if the node has them.
var controlNodes = []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}

// answer returns a container's GPUs, by every configured strategy, and its client settings, if not nil.
func (p *Plugin) answer(items []item, client *sharing.Client) *pluginapi.ContainerAllocateResponse {
	response := &pluginapi.ContainerAllocateResponse{}
	for _, strategy := range p.config.Strategies {
		switch strategy {
		case StrategyCDI:
			for _, name := range p.cdiNames(items) {
				response.CdiDevices = append(response.CdiDevices, &pluginapi.CDIDevice{Name: name})
			}
		case StrategyCDIAnnotations:
			names := strings.Join(p.cdiNames(items), ",")
			response.Annotations = map[string]string{p.annotationKey(names): names}
		case StrategyEnvVar:
			p.setVisible(response, strings.Join(p.runtimeIDs(items), ","))
		case StrategyVolumeMounts:
			p.setVisible(response, visibleDevicesMount)
			for _, id := range p.runtimeIDs(items) {
				response.Mounts = append(response.Mounts, &pluginapi.Mount{
					HostPath: os.DevNull, ContainerPath: filepath.Join(visibleDevicesMount, id),
				})
			}
		}
	}
	if p.config.PassDeviceSpecs && p.config.uses(func(s Strategy) bool { return !s.cdi() }) {
		response.Devices = p.deviceSpecs(items)
	}
	if client != nil {
		connect(response, *client)
	}
	return response
}

// setVisible prefers the mount to the list, in any order of the strategies.
func (p *Plugin) setVisible(response *pluginapi.ContainerAllocateResponse, value string) {
	if response.Envs[visibleDevicesEnv] != visibleDevicesMount {
		response.Envs = map[string]string{visibleDevicesEnv: value}
	}
}

// connect adds the client settings of a daemon. Its mounts replace paths of the runtime, such as /dev/shm.
func connect(response *pluginapi.ContainerAllocateResponse, client sharing.Client) {
	if response.Envs == nil {
		response.Envs = map[string]string{}
	}
	maps.Copy(response.Envs, client.Env)
	for _, path := range slices.Sorted(maps.Keys(client.Mounts)) {
		response.Mounts = append(response.Mounts, &pluginapi.Mount{HostPath: client.Mounts[path], ContainerPath: path})
	}
}

func (p *Plugin) cdiNames(items []item) []string {
	return unique(items, func(i item) string { return p.config.Specs.QualifiedName(i.hardware()) })
}

// unique returns the name of each item, each name once.
func unique(items []item, name func(item) string) (names []string) {
	for _, i := range items {
		if name := name(i); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// annotationKey is different for each set of devices, because a container may get several resources.
func (p *Plugin) annotationKey(names string) string {
	sum := sha256.Sum256([]byte(names))
	return p.config.AnnotationPrefix + "tandem_" + hex.EncodeToString(sum[:8])
}

// runtimeIDs returns UUIDs, or indices: "0" for a GPU, "0:1" for a partition.
func (p *Plugin) runtimeIDs(items []item) []string {
	return unique(items, func(i item) string {
		switch {
		case !p.config.IndexIDs:
			return i.hardware()
		case i.Whole():
			return strconv.Itoa(i.GPU.Index)
		default:
			return fmt.Sprintf("%d:%d", i.GPU.Index, i.Partition.Index)
		}
	})
}

func (p *Plugin) deviceSpecs(items []item) (specs []*pluginapi.DeviceSpec) {
	// nvidia-uvm and nvidia-modeset appear when their modules are loaded, possibly long after the start.
	paths := slices.DeleteFunc(slices.Clone(controlNodes), func(path string) bool {
		_, err := os.Stat(filepath.Join(p.config.DevRootInAgent, path))
		return err != nil
	})
	for _, i := range items {
		paths = append(paths, fmt.Sprintf("/dev/nvidia%d", i.GPU.Minor))
		for _, number := range i.Partition.Caps {
			if number > 0 {
				paths = append(paths, fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", number))
			}
		}
	}
	for at, path := range paths {
		if slices.Contains(paths[:at], path) {
			continue // two partitions of one GPU
		}
		specs = append(specs, &pluginapi.DeviceSpec{
			ContainerPath: path, HostPath: filepath.Join(p.config.DevRoot, path), Permissions: "rw",
		})
	}
	return specs
}
