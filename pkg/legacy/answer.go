// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// What NVIDIA's container runtime looks for (nvidia-container-toolkit, "visible devices").
const (
	visibleDevicesEnv   = "NVIDIA_VISIBLE_DEVICES"
	visibleDevicesMount = "/var/run/nvidia-container-devices"
)

// controlNodes are the device nodes that every container with a GPU uses, where the node has them.
var controlNodes = []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}

// answer says how one container gets its GPUs, by every configured strategy.
func (p *Plugin) answer(gpus []device.GPU) *pluginapi.ContainerAllocateResponse {
	response := &pluginapi.ContainerAllocateResponse{}
	for _, strategy := range p.config.Strategies {
		switch strategy {
		case StrategyCDI:
			for _, name := range p.cdiNames(gpus) {
				response.CdiDevices = append(response.CdiDevices, &pluginapi.CDIDevice{Name: name})
			}
		case StrategyCDIAnnotations:
			names := strings.Join(p.cdiNames(gpus), ",")
			response.Annotations = map[string]string{p.annotationKey(names): names}
		case StrategyEnvVar:
			p.setVisible(response, strings.Join(p.runtimeIDs(gpus), ","))
		case StrategyVolumeMounts:
			p.setVisible(response, visibleDevicesMount)
			for _, id := range p.runtimeIDs(gpus) {
				response.Mounts = append(response.Mounts, &pluginapi.Mount{HostPath: os.DevNull, ContainerPath: filepath.Join(visibleDevicesMount, id)})
			}
		}
	}
	if p.config.PassDeviceSpecs && p.config.uses(func(s Strategy) bool { return !s.cdi() }) {
		response.Devices = p.deviceSpecs(gpus)
	}
	return response
}

// setVisible lets the mount win over the list, in whatever order the strategies are configured.
func (p *Plugin) setVisible(response *pluginapi.ContainerAllocateResponse, value string) {
	if response.Envs[visibleDevicesEnv] != visibleDevicesMount {
		response.Envs = map[string]string{visibleDevicesEnv: value}
	}
}

func (p *Plugin) cdiNames(gpus []device.GPU) []string {
	names := make([]string, len(gpus))
	for i, gpu := range gpus {
		names[i] = p.config.Specs.QualifiedName(gpu.UUID)
	}
	return names
}

// annotationKey differs between two sets of devices, because a container may get several resources.
func (p *Plugin) annotationKey(names string) string {
	sum := sha256.Sum256([]byte(names))
	return p.config.AnnotationPrefix + "tandem_" + hex.EncodeToString(sum[:8])
}

func (p *Plugin) runtimeIDs(gpus []device.GPU) []string {
	ids := make([]string, len(gpus))
	for i, gpu := range gpus {
		ids[i] = gpu.UUID
		if p.config.IDStrategy == IDStrategyIndex {
			ids[i] = strconv.Itoa(gpu.Index)
		}
	}
	return ids
}

func (p *Plugin) deviceSpecs(gpus []device.GPU) []*pluginapi.DeviceSpec {
	var specs []*pluginapi.DeviceSpec
	add := func(path string) {
		specs = append(specs, &pluginapi.DeviceSpec{ContainerPath: path, HostPath: filepath.Join(p.config.DevRoot, path), Permissions: "rw"})
	}
	for _, path := range controlNodes {
		// nvidia-uvm and nvidia-modeset appear when their modules load, which may be long after the start.
		if _, err := os.Stat(filepath.Join(p.config.DevRootInAgent, path)); err == nil {
			add(path)
		}
	}
	for _, gpu := range gpus {
		add(fmt.Sprintf("/dev/nvidia%d", gpu.Minor))
	}
	return specs
}
