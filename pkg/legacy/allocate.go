// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// Allocate reserves the devices of all containers of the request, or none. It never waits for another holder: kubelet calls it
// from its only sync loop, without a deadline, and an error fails the pod permanently. kubelet and simulations call it. The same
// IDs again are reuse within one pod. It is safe for concurrent use.
func (p *Plugin) Allocate(ctx context.Context, resource string, request *pluginapi.AllocateRequest,
) (*pluginapi.AllocateResponse, error) {
	if p.config.HeldOnly != nil {
		return nil, status.Errorf(codes.Unavailable, "allocate %s: %v", resource, p.config.HeldOnly)
	}
	containers, err := p.requested(resource, request)
	if err != nil {
		return nil, status.Errorf(status.Code(err), "invalid allocation request for %q: invalid request: %s", resource,
			status.Convert(err).Message())
	}
	if err := ctx.Err(); err != nil {
		// kubelet no longer waits for the answer and would never use the devices, so reserve none.
		return nil, status.FromContextError(err).Err()
	}
	if err := p.checkSpecs(resource, slices.Concat(containers...)); err != nil {
		return nil, err
	}
	if err := p.admit(ctx, resource, containers); err != nil {
		return nil, err
	}
	clients, err := p.reserve(ctx, resource, containers)
	if err != nil {
		return nil, err
	}
	response := &pluginapi.AllocateResponse{}
	for at, items := range containers {
		response.ContainerResponses = append(response.ContainerResponses, p.answer(items, clients[at]))
	}
	return response, nil
}

// checkSpecs refuses a device that has no CDI entry. It writes nothing: the entry was on disk when the device was listed as healthy. If it was
// damaged since and cannot be restored, the container waits until the runtime finds it, whereas a refusal would fail the pod permanently.
func (p *Plugin) checkSpecs(resource string, items []item) error {
	if !p.config.uses(Strategy.cdi) {
		return nil
	}
	p.config.Specs.Verify()
	for _, i := range items {
		if !p.config.Specs.Has(i.hardware()) {
			return status.Errorf(codes.Unavailable, "allocate %s: device %s cannot be given to a container: %v", resource, i.id,
				p.config.Specs.Problem(i.hardware()))
		}
	}
	return nil
}

// requested resolves the devices of each container, in the order of the request.
func (p *Plugin) requested(resource string, request *pluginapi.AllocateRequest) ([][]item, error) {
	if len(request.GetContainerRequests()) == 0 {
		return nil, invalid("no container requests")
	}
	var containers [][]item
	seen := make(map[string]bool)
	for _, container := range request.GetContainerRequests() {
		items, err := p.lookup(resource, container.GetDevicesIds(), seen)
		if err != nil {
			return nil, err
		}
		mps, shared := false, 0
		for _, i := range items {
			mps = mps || i.Sharing().Strategy == device.MPS
			if !i.share.Whole() {
				shared++
			}
		}
		if mps {
			shared = len(items) // a client of an MPS daemon sees no other GPU
		}
		if shared > 1 && (mps || p.config.FailRequestsGreaterThanOne) {
			return nil, invalid("maximum request size for shared resources is 1; found %d", shared)
		}
		for _, i := range items {
			if health := i.Health(); !health.Healthy() {
				return nil, status.Errorf(codes.FailedPrecondition, "unhealthy device: %s: %s: %s", i.id, health.Reason, health.Message)
			}
			if i.offered {
				continue
			}
			// kubelet may not have the newest list yet, or a pod that holds the device requests it again.
			if _, mine, _ := usageOf(p.config.Ledger, p.config.Allocations).ownHold(resource, i); !mine {
				return nil, status.Errorf(codes.FailedPrecondition, "device is no longer offered to pods: %s", i.id)
			}
		}
		containers = append(containers, items)
	}
	return containers, nil
}

// lookup resolves the device IDs of one container. It returns an error for an empty list and for an ID that is in seen, to which it adds
// the IDs.
func (p *Plugin) lookup(resource string, ids []string, seen map[string]bool) ([]item, error) {
	if len(ids) == 0 {
		return nil, invalid("no device IDs")
	}
	known := p.lists.devices(resource)
	items := make([]item, 0, len(ids))
	for _, id := range ids {
		at, ok := known.index[id]
		switch {
		case id == "":
			return nil, invalid("empty device ID")
		case !ok:
			return nil, status.Errorf(codes.NotFound, "unknown device: %s", id)
		case seen[id]:
			return nil, invalid("duplicate device: %s", id)
		}
		seen[id] = true
		items = append(items, known.items[at])
	}
	return items, nil
}

// beforeStart checks that the pod of a container may have its devices, and waits until their GPUs are handed over to the pod.
func (p *Plugin) beforeStart(ctx context.Context, resource string, ids []string) error {
	if !p.config.asksBeforeStart() {
		return nil
	}
	items, err := p.lookup(resource, ids, map[string]bool{})
	if err != nil {
		return err
	}
	if err := p.admitPod(ctx, resource, items); err != nil {
		return err
	}
	if p.config.HandOver == nil {
		return nil
	}
	for _, uuid := range unique(items, func(i item) string { return i.GPU.UUID }) {
		if err := p.config.HandOver(ctx, uuid); err != nil {
			return status.Errorf(codes.Unavailable, "start a container with %s: %v", resource, err)
		}
	}
	return nil
}

// reserve reserves all devices or none, and returns the client settings of each container.
func (p *Plugin) reserve(ctx context.Context, resource string, containers [][]item) ([]*sharing.Client, error) {
	if _, err := p.clients(resource, containers); err != nil {
		return nil, err
	}
	var requests []ledger.PodRequest
	outOfService := p.config.Allocations.OutOfService()
	for _, i := range slices.Concat(containers...) {
		requests = append(requests, ledger.PodRequest{
			ID: i.id, Resource: resource, Device: i.Ref(), Share: i.share, OutOfService: outOfService(i.Device),
		})
	}
	if err := p.config.Ledger.ReservePod(requests); err != nil {
		return nil, p.refuse(ctx, resource, err)
	}
	// Check again: the sharing policy may have marked the GPU since the first check. It marks a GPU before it reads the ledger, so either
	// it sees the new holds, or this check sees the mark. The reconciler then releases the new holds. Allocate must not, because some holds
	// of this call may belong to an earlier container of the pod.
	return p.clients(resource, containers)
}

// clients returns the client settings of each container, nil for none. It returns an error if a device is not shared yet as the node's
// policy requires.
func (p *Plugin) clients(resource string, containers [][]item) ([]*sharing.Client, error) {
	clients := make([]*sharing.Client, len(containers))
	for at, items := range containers {
		for _, i := range items {
			client, err := p.config.Sharing.Client(i.Device, i.share)
			if err != nil {
				return nil, status.Errorf(codes.Unavailable, "allocate %s: %v", resource, err)
			}
			if client != nil {
				clients[at] = client // the container has no other device
			}
		}
	}
	return clients, nil
}

// refuse turns the ledger's answer into the error for kubelet. kubelet writes the error into the status of the pod, whose owner may not
// be allowed to read other namespaces. So the error and the event name the holder by kind and UID only; the agent's log has the names.
func (p *Plugin) refuse(ctx context.Context, resource string, err error) error {
	conflict, ok := errors.AsType[*ledger.ConflictError](err)
	if errors.Is(err, ledger.ErrWithdrawn) {
		// Rare: kubelet had not received the list without the device yet, or its holder had just ended.
		klog.FromContext(ctx).Info("Refused Allocate because a device is out of service", "resource", resource, "reason", err.Error())
		return status.Errorf(codes.FailedPrecondition,
			"allocate %s: a GPU is out of service; the pod's owner creates another pod: %v", resource, err)
	}
	if !ok {
		return status.Errorf(codes.Internal, "allocate %s: %v", resource, err)
	}
	p.metrics.conflicts.Inc()
	klog.FromContext(ctx).Info("Refused Allocate because another holder has the device", "resource", resource, "conflict", conflict.Error())
	message := p.describe(conflict)
	p.config.warn("PodConflict",
		"Refused a pod that requests %s: %s. kubelet fails the pod; its owner creates another one", resource, message)
	return status.Errorf(codes.FailedPrecondition, "allocate %s: %s", resource, message)
}

func (p *Plugin) describe(conflict *ledger.ConflictError) string {
	inv := p.config.Inventory.Inventory()
	parts := make([]string, len(conflict.Holds))
	for i, h := range conflict.Holds {
		name := h.Device.String()
		if d, known := inv.ByRef(h.Device); known {
			name = fmt.Sprintf("%s (%s)", name, d.Name())
		}
		parts[i] = fmt.Sprintf("device %s is held by %s", name, anonymous(h))
		if !h.Share.Whole() {
			parts[i] = fmt.Sprintf("%s of device %s are held by %s", h.Share, name, anonymous(h))
		}
	}
	return strings.Join(parts, "; ")
}

// anonymous describes a holder without names.
func anonymous(h ledger.Hold) string {
	switch {
	case h.Unreadable:
		return fmt.Sprintf("a %s whose record is unreadable", h.Holder.Kind)
	case h.Holder.Kind == ledger.KindClaim:
		return fmt.Sprintf("claim %s (%s)", h.Holder.ID, h.State)
	case h.State == ledger.StateDraining:
		return "a pod that is gone but whose containers may still run"
	default:
		return fmt.Sprintf("a pod (%s)", h.State)
	}
}

// Names that NVIDIA's container runtime reads (nvidia-container-toolkit, "visible devices").
const (
	visibleDevicesEnv   = "NVIDIA_VISIBLE_DEVICES"
	visibleDevicesMount = "/var/run/nvidia-container-devices"
	imexChannelsEnv     = "NVIDIA_IMEX_CHANNELS"
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
			if channels := p.imexChannels(); len(channels) > 0 {
				addEnv(response, map[string]string{imexChannelsEnv: strings.Join(channels, ",")})
			}
		case StrategyVolumeMounts:
			p.setVisible(response, visibleDevicesMount)
			names := p.runtimeIDs(items)
			for _, channel := range p.imexChannels() {
				names = append(names, filepath.Join("imex", channel))
			}
			for _, name := range names {
				response.Mounts = append(response.Mounts, &pluginapi.Mount{
					HostPath: os.DevNull, ContainerPath: filepath.Join(visibleDevicesMount, name),
				})
			}
		}
	}
	if p.config.PassDeviceSpecs && p.config.uses(func(s Strategy) bool { return !s.cdi() }) {
		response.Devices = p.deviceSpecs(items)
	}
	addEnv(response, p.config.Env)
	if client != nil {
		connect(response, *client)
	}
	return response
}

// imexChannels returns the channels that exist.
func (p *Plugin) imexChannels() (channels []string) {
	for _, channel := range p.config.IMEXChannels {
		if p.hasNode(imexChannel(strconv.Itoa(channel))) {
			channels = append(channels, strconv.Itoa(channel))
		}
	}
	return channels
}

func imexChannel(number string) string { return "/dev/nvidia-caps-imex-channels/channel" + number }

func (p *Plugin) hasNode(path string) bool {
	_, root := p.config.DevRoot()
	_, err := os.Stat(filepath.Join(root, path))
	return err == nil
}

// setVisible prefers the mount to the list, in any order of the strategies.
func (p *Plugin) setVisible(response *pluginapi.ContainerAllocateResponse, value string) {
	if response.Envs[visibleDevicesEnv] != visibleDevicesMount {
		addEnv(response, map[string]string{visibleDevicesEnv: value})
	}
}

func addEnv(response *pluginapi.ContainerAllocateResponse, variables map[string]string) {
	if response.Envs == nil && len(variables) > 0 {
		response.Envs = map[string]string{}
	}
	maps.Copy(response.Envs, variables)
}

// connect adds the client settings of a daemon. Its mounts replace paths of the runtime, such as /dev/shm.
func connect(response *pluginapi.ContainerAllocateResponse, client sharing.Client) {
	addEnv(response, client.Env)
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
	paths := slices.DeleteFunc(slices.Clone(controlNodes), func(path string) bool { return !p.hasNode(path) })
	for _, i := range items {
		paths = append(paths, fmt.Sprintf("/dev/nvidia%d", i.GPU.Minor))
		for _, number := range i.Partition.Caps {
			if number > 0 {
				paths = append(paths, fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", number))
			}
		}
	}
	for _, channel := range p.imexChannels() {
		paths = append(paths, imexChannel(channel))
	}
	root, _ := p.config.DevRoot()
	for at, path := range paths {
		if slices.Contains(paths[:at], path) {
			continue // two partitions of one GPU
		}
		specs = append(specs, &pluginapi.DeviceSpec{
			ContainerPath: path, HostPath: filepath.Join(root, path), Permissions: "rw",
		})
	}
	return specs
}
