// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// conflictingPlugin is another process on the node that serves the same GPUs, or one of our resources, to kubelet. Both would give
// the same GPU away.
type conflictingPlugin struct {
	// socket is empty if it is not in kubelet's directory, or does not answer.
	socket string
	// resource is the one that kubelet has its devices for; empty if kubelet does not tell.
	resource string
	// devices of ours that it serves; while we have none, some of its own.
	devices []string
}

func (c *conflictingPlugin) Error() string {
	where := "on " + c.socket
	switch {
	case c.socket == "":
		where = fmt.Sprintf("as resource %s on an unknown socket", c.resource)
	case c.resource != "":
		where = fmt.Sprintf("as resource %s on %s", c.resource, c.socket)
	}
	return fmt.Sprintf("another device plugin serves this node's GPUs %s (%d devices, such as %s): uninstall it",
		where, len(c.devices), c.devices[0])
}

// probe is what the plugin behind a socket answered.
type probe struct {
	file    fileID
	devices []string
}

const (
	// maxForeign bounds Plugin.foreign, and maxProbed the devices of a probe: some plugins list one for each MiB of memory, and a
	// plugin is known by a few of them.
	maxForeign = 1024
	maxProbed  = 4096
)

func (p *Plugin) addForeign(id, resource string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.foreign) < maxForeign {
		p.foreign[id] = resource
	}
}

// foreignResource returns the resource of a foreign device, which is empty for others.
func (p *Plugin) foreignResource(id string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.foreign[id]
}

// checkConflicting returns a process that serves our GPUs or one of our resources to kubelet; nil for none. settled reports whether
// each live socket has answered. While no GPU is known yet, every GPU counts as ours. Under p.turn.
//
// kubelet's checkpoint has the IDs that it registered for each resource, whatever they look like. It is late: the IDs of a plugin
// that is gone stay until kubelet writes it for another reason (TestForeignPluginOfUnknownDevices). So kubelet is asked as well. A
// plugin is gone when no live socket lists a device of ours, or one that kubelet ever had for our resources, and kubelet has no
// foreign ID allocatable.
func (p *Plugin) checkConflicting(ctx context.Context) (conflicting *conflictingPlugin, settled bool) {
	registered := p.foreignOfKubelet(ctx)
	found, err := sockets(p.config.Directory)
	settled = err == nil // without a readable directory the GPUs are served, and watchFiles checks again
	for _, socket := range found {
		path := filepath.Join(p.config.Directory, socket.name)
		if path == p.kubeletSocket() || p.owns(path) || !alive(path) {
			continue
		}
		devices, err := p.probe(ctx, path, socket.file)
		settled = settled && err == nil
		if ours := p.ours(devices); len(ours) > 0 {
			return &conflictingPlugin{path, p.foreignResource(ours[0]), ours}, settled
		}
	}
	if len(registered) > 0 {
		return &conflictingPlugin{"", p.foreignResource(registered[0]), registered}, settled
	}
	return nil, settled
}

// sourceConflicting is the plugin's source of ledger.Withhold.
const sourceConflicting = "conflicting device plugin"

// FindConflicting looks once for a conflicting device plugin, and withholds devices in both APIs while there is one. The agent calls it
// before it serves either API. It takes up to a second for each socket that does not answer.
func (p *Plugin) FindConflicting(ctx context.Context) {
	p.Refresh(time.Now())
	_, _ = p.withhold(ctx) // WatchConflicting looks again, and reports
}

// WatchConflicting withholds devices while there is a conflicting device plugin, until ctx is done. The agent calls it once in a mode
// without limits: Run does the same, but runs there only while a pod has a device. It is safe beside Run. It returns an error if kubelet's directory is missing.
func (p *Plugin) WatchConflicting(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return p.watchDirectory(ctx) })
	group.Go(func() error {
		r := &registrar{Plugin: p, resource: "claims"}
		for ctx.Err() == nil {
			changed := p.filesChanged.Changed()
			r.awaitNoConflicting(ctx)
			select {
			case <-ctx.Done():
			case <-time.After(p.times.pluginInterval):
			case <-changed:
				// A socket exists before its process answers on it.
				broadcast.Sleep(ctx, p.times.pluginProbe)
			}
		}
		return nil
	})
	if err := group.Wait(); err != nil {
		return fmt.Errorf("watch for conflicting device plugins: %w", err)
	}
	return nil
}

// withhold withholds devices while checkConflicting finds a plugin. When the plugin is gone, withhold first adopts what
// it gave away. An error is why limits must not be served.
func (p *Plugin) withhold(ctx context.Context) (conflicting error, settled bool) {
	p.turn.Lock()
	defer p.turn.Unlock()
	found, settled := p.checkConflicting(ctx)
	if found == nil && p.withholds.Load() {
		// By then kubelet's checkpoint has the last device that the plugin gave away.
		broadcast.Sleep(ctx, p.times.takeOver)
		if err := p.config.Adopt(ctx); err != nil {
			return fmt.Errorf("take over from another device plugin that is gone: %w", err), settled
		}
		// It may have come back, or another one may have come: an adoption waits for the API server.
		found, settled = p.checkConflicting(ctx)
	}
	switch {
	case ctx.Err() != nil:
		return ctx.Err(), settled
	case found != nil:
		p.withholds.Store(true)
		p.config.Ledger.Withhold(sourceConflicting, found)
		return found, settled
	}
	p.withholds.Store(false)
	p.config.Ledger.Withhold(sourceConflicting, nil)
	return nil, settled
}

// foreignOfKubelet returns the IDs that kubelet has for our resources and that are of another plugin, sorted. While kubelet does not
// answer, its checkpoint counts.
func (p *Plugin) foreignOfKubelet(ctx context.Context) []string {
	checkpoint, err := podstate.ReadDeviceCheckpoint(filepath.Dir(p.config.Directory))
	if err != nil {
		klog.FromContext(ctx).Error(err, "Looking for conflicting device plugins without kubelet's checkpoint")
	}
	found := p.foreignAmong(checkpoint.Registered)
	if len(found) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, p.times.pluginProbe)
	defer cancel()
	allocatable, err := p.config.Kubelet.Allocatable(ctx)
	if err == nil {
		found = p.foreignAmong(allocatable)
	}
	return found
}

// foreignAmong returns those device IDs of our resources that neither this plugin lists nor have the form of its own: kubelet has
// these also from an earlier agent. It remembers them.
func (p *Plugin) foreignAmong(registered map[string][]string) (foreign []string) {
	listed := p.lists.table.Load().items
	for resource, ids := range registered {
		if !p.config.Resources.Has(resource) {
			continue
		}
		for _, id := range ids {
			if _, ours := listed[listedID{resource, id}]; !ours && !device.HasUUID(id) {
				p.addForeign(id, resource)
				foreign = append(foreign, id)
			}
		}
	}
	slices.Sort(foreign)
	return foreign
}

// ours returns those devices of another plugin that are GPUs of this inventory or their partitions, and those that kubelet has had for
// our resources. While the inventory is empty, because the driver is late, it returns all that have the form of NVIDIA's UUIDs.
func (p *Plugin) ours(devices []string) []string {
	known := p.lists.table.Load().ours
	inventory := p.config.Inventory.Inventory()
	unknown := len(known)+len(inventory.GPUs) == 0
	inventory.GPUs = slices.DeleteFunc(slices.Clone(inventory.GPUs), func(g device.GPU) bool {
		return p.config.Excluded != nil && p.config.Excluded(g)
	})
	var ours []string
	for _, id := range devices {
		uuid := device.HardwareUUID(id)
		switch {
		case known[uuid], inventory.Claimed(id), p.foreignResource(id) != "":
		case unknown && (strings.HasPrefix(uuid, "GPU-") || strings.HasPrefix(uuid, "MIG-") || strings.HasPrefix(id, "nvidia")):
		default:
			continue
		}
		ours = append(ours, id)
	}
	return ours
}

// probe returns the devices of the plugin behind a socket. A probe leaves a trace: NVIDIA's plugin never ends a ListAndWatch whose reader
// is gone, and that stream may take a health event. So each socket is probed only until it has answered, and under p.turn by one resource
// at a time (TestForeignPluginIsAskedOnce).
func (p *Plugin) probe(ctx context.Context, path string, file fileID) ([]string, error) {
	if known := p.probes[path]; known.file == file {
		return known.devices, nil
	}
	devices, err := listDevices(ctx, path, p.times.pluginProbe)
	if len(devices) > 0 { // a plugin that has none yet may get some
		p.probes[path] = probe{file: file, devices: devices}
	}
	return devices, err
}

func listDevices(ctx context.Context, path string, limit time.Duration) (ids []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	conn, err := dial(path)
	if err != nil {
		return nil, err
	}
	// The answer has been read by then.
	defer func() { _ = conn.Close() }()
	stream, err := pluginapi.NewDevicePluginClient(conn).ListAndWatch(ctx, &pluginapi.Empty{})
	if err != nil {
		return nil, fmt.Errorf("list devices of %s: %w", path, err)
	}
	list, err := stream.Recv()
	if err != nil {
		return nil, fmt.Errorf("list devices of %s: %w", path, err)
	}
	devices := list.GetDevices()
	for _, d := range devices[:min(len(devices), maxProbed)] {
		ids = append(ids, d.GetID())
	}
	return ids, nil
}

// dial prepares a connection to a socket; the first call makes it.
func dial(path string) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("unix://"+path,
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", path, err)
	}
	return conn, nil
}
