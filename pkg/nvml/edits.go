// SPDX-License-Identifier: Apache-2.0

// What a container needs to use a device, as CDI edits.

package nvml

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/transform"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/transform/root"
	"github.com/go-logr/logr"
	"github.com/moby/sys/devices"
	"k8s.io/klog/v2"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/cdi"
	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

var _ cdi.Source = (*Node)(nil)

// ContainerEdits returns the CDI edits of each GPU that answers and of each partition, by nvcdi, with host paths. It fails if the
// driver's files cannot be found, and for one GPU if that GPU's files are missing or it does not answer in time. It takes about
// ten milliseconds. No scan waits for it, and it waits for no scan, but for the end of a reset.
func (n *Node) ContainerEdits(ctx context.Context) (cdi.Edits, error) {
	unlock, err := n.turns.Lock(ctx, wholeEdits)
	if err != nil {
		return cdi.Edits{}, fmt.Errorf("wait for other container edits: %w", err)
	}
	defer unlock()
	n.mu.Lock()
	at, inventory := n.attachment, n.inventory
	n.mu.Unlock()
	if at.session == nil {
		return cdi.Edits{}, n.Missing()
	}
	if err := n.whyNoCall(); err != nil {
		return cdi.Edits{}, err
	}
	if !broadcast.Await(ctx, at.session.idle.Changed, func() bool { return !at.session.suspended.Load() }) {
		return cdi.Edits{}, fmt.Errorf("wait for the end of a reset: %w", context.Cause(ctx))
	}
	// The session's end may hang as well. Then the next edits say so.
	end := func(struct{}) { at.session.close() }
	_, err = attempt(n, wholeEdits, nil, func() (struct{}, error) { return struct{}{}, at.session.tryOpen() }, end)
	switch {
	case errors.Is(err, errNoAnswer):
		return cdi.Edits{}, errSilent
	case err != nil:
		return cdi.Edits{}, err
	}
	defer func() {
		_, _ = attempt(n, wholeEdits, nil, func() (none struct{}, err error) { end(none); return none, nil }, nil)
	}()
	lib, err := n.toolkit(ctx, at, inventory)
	if err != nil {
		return cdi.Edits{}, fmt.Errorf("prepare container edits: %w", err)
	}
	common, err := attempt(n, driverFiles, at.session, lib.GetCommonEdits, nil)
	if err != nil {
		return cdi.Edits{}, fmt.Errorf("find the driver's files below %s: %w", at.layout.driverRoot, err)
	}
	spec := &specs.Spec{ContainerEdits: *common.ContainerEdits}
	for _, d := range controlDevices {
		if err := n.options.checkDevice(at.layout.devRoot, at.majors, d); err != nil {
			return cdi.Edits{}, err
		}
	}
	_, err = attempt(n, driverFiles, at.session, func() (struct{}, error) {
		return struct{}{}, n.addExtras(ctx, at, &spec.ContainerEdits)
	}, nil)
	if err != nil {
		return cdi.Edits{}, err
	}
	failed, nodes := map[string]error{}, map[string]string{}
	add := func(uuid string, minor int, device specs.Device, err error) {
		if err != nil {
			failed[uuid], nodes[uuid] = err, gpuDevice(minor).path
			return
		}
		spec.Devices = append(spec.Devices, device)
	}
	// A GPU that does not answer costs the others a second, once. They do not wait for it.
	patience := min(scanPatience, n.options.patience)
	for _, g := range inventory.GPUs {
		edits := func() (specs.Device, error) { return deviceEdits(lib, g) }
		parent, err := attemptFor(n, patience, "edits of "+g.UUID, at.session, edits, nil)
		add(g.UUID, g.Minor, parent, err)
		for _, p := range g.Partitions {
			if p.UUID == "" {
				continue
			}
			p.Health = gpu.Device{GPU: g, Partition: p}.Health()
			device, err := n.partitionEdits(at, p, parent, err)
			add(p.UUID, g.Minor, device, err)
		}
	}
	if err := n.toHost(at.layout.devRoot, spec); err != nil {
		return cdi.Edits{}, fmt.Errorf("turn paths into the host's: %w", err)
	}
	return cdi.Edits{Common: spec.ContainerEdits, Devices: spec.Devices, Failed: failed, Nodes: nodes}, nil
}

// Keys of calls: driverFiles of those that find the driver's files, wholeEdits of those that open and close the session for edits.
const (
	driverFiles = "driver files"
	wholeEdits  = "container edits"
)

// byAddress looks up GPUs by their PCI addresses, as the session does: nvcdi asks by UUID.
type byAddress struct {
	gonvml.Interface
	session   *session
	inventory gpu.Inventory
}

// Init does nothing: the session is open while nvcdi has the library. Otherwise go-nvml would change whether it is loaded while other goroutines
// look up functions, for which it takes no lock.
func (l byAddress) Init() gonvml.Return { return gonvml.SUCCESS }

// Shutdown does nothing, as Init.
func (l byAddress) Shutdown() gonvml.Return { return gonvml.SUCCESS }

func (l byAddress) DeviceGetHandleByUUID(uuid string) (gonvml.Device, gonvml.Return) {
	g, _ := l.inventory.ByUUID(uuid)
	return l.session.handle(uuid, g.PCIBusID)
}

// toolkit returns the library that makes the edits of all containers and of each GPU.
func (n *Node) toolkit(ctx context.Context, at attachment, inventory gpu.Inventory) (nvcdi.Interface, error) {
	namer, err := nvcdi.NewDeviceNamer(nvcdi.DeviceNameStrategyUUID)
	if err != nil {
		return nil, err
	}
	options := []nvcdi.Option{
		nvcdi.WithLogger(toolkitLogger{klog.FromContext(ctx).V(6)}),
		nvcdi.WithMode(nvcdi.ModeNvml),
		nvcdi.WithNvmlLib(byAddress{at.session.library, at.session, inventory}),
		nvcdi.WithDriverRoot(n.options.onHost(at.layout.driverRoot)),
		nvcdi.WithDevRoot(n.options.onHost(at.layout.devRoot)),
		nvcdi.WithDeviceNamers(namer),
		// Only libraries of the driver, in any directory; nvcdi's own list lacks the directories of several systems.
		nvcdi.WithLibrarySearchPaths(at.layout.libraryDirs),
		nvcdi.WithLdconfigPath(n.options.ldconfig()),
		// Without the first flag, nvcdi would load the nvsandboxutils library into this process, which adds nothing for GPUs that NVML
		// reports. The second flag leaves out mounts of sockets: CUDA works without them, and a container with such a mount does not start
		// after the socket's server has ended.
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils, nvcdi.FeatureDisableIPCDiscoverer),
		nvcdi.WithFeatureFlags(n.options.Features...),
		nvcdi.WithNVIDIACDIHookPath(n.options.HookPath),
		nvcdi.WithDisabledHooks(n.options.DisabledHooks...),
	}
	if n.options.HookPath == "" {
		options = append(options, nvcdi.WithDisabledHooks(nvcdi.AllHooks))
	}
	create := func() (nvcdi.Interface, error) { return nvcdi.New(options...) }
	return attempt(n, driverFiles, at.session, create, nil)
}

// deviceEdits returns the edits of one GPU. nvcdi omits missing device nodes, and would return edits that give the container no
// GPU: that is an error here.
func deviceEdits(lib nvcdi.Interface, g gpu.GPU) (specs.Device, error) {
	if !g.Health.Healthy() {
		return specs.Device{}, errors.New(g.Health.Message)
	}
	devices, err := lib.GetDeviceSpecsByID(g.UUID)
	if err != nil {
		return specs.Device{}, err
	}
	if len(devices) != 1 {
		return specs.Device{}, fmt.Errorf("nvcdi answers with %d devices", len(devices))
	}
	node := gpuDevice(g.Minor).path
	if !slices.ContainsFunc(devices[0].ContainerEdits.DeviceNodes, func(d *specs.DeviceNode) bool { return d.Path == node }) {
		return specs.Device{}, fmt.Errorf("%s does not exist", node)
	}
	return devices[0], nil
}

// toHost replaces the agent's paths by host paths. All of them are below the host root as mounted in the agent. Paths in the
// container need it too: nvcdi names the links below /dev/dri/by-path, which a hook makes, after the device root.
func (n *Node) toHost(devRoot string, spec *specs.Spec) error {
	from := path.Clean(n.options.HostRoot)
	host := root.New(root.WithRoot(from), root.WithTargetRoot("/"), root.WithRelativeTo("host"))
	if err := host.Transform(spec); err != nil {
		return err
	}
	dev := path.Join(n.options.onHost(devRoot), "dev")
	container := root.New(root.WithRoot(dev), root.WithTargetRoot("/dev"), root.WithRelativeTo("container"))
	if err := container.Transform(spec); err != nil {
		return err
	}
	dropEqualHostPaths(spec.ContainerEdits)
	for _, d := range spec.Devices {
		dropEqualHostPaths(d.ContainerEdits)
	}
	// Two of nvcdi's searches may find the same file, and the order is that of the search.
	return transform.NewSimplifier().Transform(spec)
}

// dropEqualHostPaths keeps the spec readable for runtimes with CDI 0.4, in which a node has no host path.
func dropEqualHostPaths(edits specs.ContainerEdits) {
	for _, d := range edits.DeviceNodes {
		if d.HostPath == d.Path {
			d.HostPath = ""
		}
	}
}

// toolkitLogger logs the printf-style messages of NVIDIA's container toolkit. It warns about each optional file that a driver
// lacks, so all messages are debug output; real errors are returned.
type toolkitLogger struct{ logger logr.Logger }

func (l toolkitLogger) log(format string, args []any) {
	if l.logger.Enabled() {
		l.logger.Info("Container toolkit", "message", fmt.Sprintf(format, args...))
	}
}

func (l toolkitLogger) Debugf(format string, args ...any)   { l.log(format, args) }
func (l toolkitLogger) Errorf(format string, args ...any)   { l.log(format, args) }
func (l toolkitLogger) Infof(format string, args ...any)    { l.log(format, args) }
func (l toolkitLogger) Warningf(format string, args ...any) { l.log(format, args) }
func (l toolkitLogger) Tracef(format string, args ...any)   { l.log(format, args) }

// capabilities are the minors of the devices below /dev/nvidia-caps, by what they give access to: "gpu0/gi3/access" for a GPU
// instance, "gpu0/gi3/ci0/access" for a compute instance (MIG User Guide, "Device Nodes and Capabilities"; nvcdi reads the same
// file, but only below "/").
type capabilities map[string]int

// migMinors is the driver's list of them, below proc.
const migMinors = "driver/nvidia-caps/mig-minors"

// readCapabilities reads the list; it is empty if the driver has no MIG.
func readCapabilities(procRoot string) (capabilities, error) {
	text, err := os.ReadFile(filepath.Join(procRoot, migMinors))
	if err != nil && !os.IsNotExist(err) {
		return nil, fmt.Errorf("read MIG capabilities: %w", err)
	}
	all := capabilities{}
	for line := range strings.Lines(string(text)) {
		name, number, _ := strings.Cut(strings.TrimSpace(line), " ")
		// A later driver may add lines of another form.
		if minor, err := strconv.Atoi(number); err == nil {
			all[name] = minor
		}
	}
	return all, nil
}

// of returns the minors of a partition's GPU instance and compute instance.
func (c capabilities) of(p gpu.Partition) (caps [2]int, err error) {
	instance := fmt.Sprintf("gpu%d/gi%d", p.Parent, p.GPUInstance)
	for i, name := range []string{instance + "/access", fmt.Sprintf("%s/ci%d/access", instance, p.ComputeInstance)} {
		minor, ok := c[name]
		if !ok {
			return caps, fmt.Errorf("the driver lists no capability %s in %s", name, migMinors)
		}
		caps[i] = minor
	}
	return caps, nil
}

// PartitionEdits returns the CDI edits of a new partition, besides the common edits: the same as ContainerEdits once the
// inventory contains it. It calls the driver only for a partition with graphics. It is safe for concurrent use; paths are the
// host's.
func (n *Node) PartitionEdits(ctx context.Context, p gpu.Partition) (_ specs.Device, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("container edits of partition %s (%s): %w", p.Name(), p.UUID, err)
		}
	}()
	if graphics(p) {
		edits, err := n.ContainerEdits(ctx)
		if err != nil {
			return specs.Device{}, err
		}
		for _, d := range edits.Devices {
			if d.Name == p.UUID {
				return d, nil
			}
		}
		return specs.Device{}, errors.Join(errors.New("nvcdi returns none"), edits.Failed[p.UUID])
	}
	n.mu.Lock()
	at := n.attachment
	n.mu.Unlock()
	device, err := n.partitionEdits(at, p, specs.Device{}, nil)
	if err != nil {
		return specs.Device{}, err
	}
	spec := &specs.Spec{Devices: []specs.Device{device}}
	if err := n.toHost(at.layout.devRoot, spec); err != nil {
		return specs.Device{}, fmt.Errorf("turn paths into the host's: %w", err)
	}
	return spec.Devices[0], nil
}

// graphics reports whether a partition can render: only then it gets its GPU's nodes for graphics (nvcdi).
func graphics(p gpu.Partition) bool { return strings.HasSuffix(p.Profile, "+gfx") }

// partitionEdits returns the nodes of the GPU and of the two capabilities. nvcdi v1.20.1 returns the same, but reads the list of
// capabilities below "/" only. parent is what nvcdi returns for the GPU, if anything.
func (n *Node) partitionEdits(at attachment, p gpu.Partition, parent specs.Device, parentErr error) (specs.Device, error) {
	if !p.Health.Healthy() {
		return specs.Device{}, errors.New(p.Health.Message)
	}
	device := specs.Device{Name: p.UUID}
	for _, d := range []charDevice{gpuDevice(p.Parent), capabilityDevice(p.Caps[0]), capabilityDevice(p.Caps[1])} {
		node, err := n.deviceNode(at, d)
		if err != nil {
			return specs.Device{}, err
		}
		device.ContainerEdits.DeviceNodes = append(device.ContainerEdits.DeviceNodes, node)
	}
	if graphics(p) {
		if parentErr != nil {
			return specs.Device{}, parentErr
		}
		addGraphics(&device.ContainerEdits, parent.ContainerEdits)
	}
	return device, nil
}

// deviceNode returns a node for containers. With a type and a number it needs no node of the host (CDI, container-edits_unix.go,
// fillMissingInfo), which capabilities may lack.
func (n *Node) deviceNode(at attachment, d charDevice) (*specs.DeviceNode, error) {
	hostPath := n.options.onHost(path.Join(at.layout.devRoot, d.path))
	if major, listed := at.majors[d.driver]; listed && d.driver == driverCaps {
		return &specs.DeviceNode{
			Path: d.path, HostPath: hostPath, Type: "c", Major: int64(major), Minor: int64(d.minor), Permissions: "rwm", FileMode: &d.mode,
		}, nil
	}
	found, err := devices.DeviceFromPath(hostPath, "rwm")
	if err == nil && found.Type != 'c' {
		err = errors.New("no character device")
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path.Join(at.layout.devRoot, d.path), err)
	}
	return &specs.DeviceNode{
		Path: d.path, HostPath: found.Path, Permissions: string(found.Permissions), FileMode: &found.FileMode, Major: found.Major, Minor: found.Minor,
	}, nil
}

// drmDir has a GPU's nodes for graphics.
const drmDir = "/dev/dri"

// addGraphics copies the nodes for graphics and their hooks. Their paths are changed later, so it copies the values.
func addGraphics(to *specs.ContainerEdits, parent specs.ContainerEdits) {
	for _, node := range parent.DeviceNodes {
		if strings.HasPrefix(node.Path, drmDir+"/") {
			own := *node
			to.DeviceNodes = append(to.DeviceNodes, &own)
		}
	}
	about := func(arg string) bool { return strings.Contains(arg, drmDir) }
	for _, hook := range parent.Hooks {
		if slices.ContainsFunc(hook.Args, about) {
			own := *hook
			own.Args = slices.Clone(hook.Args)
			to.Hooks = append(to.Hooks, &own)
		}
	}
}
