// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// conflictingPlugin is another process on the node that serves the same GPUs to kubelet. Both would give the same GPU away.
type conflictingPlugin struct {
	socket string
	// devices of ours that it serves; while we have none, some of its own.
	devices []string
}

func (c *conflictingPlugin) Error() string {
	return fmt.Sprintf("another device plugin serves the same GPUs on %s (%d devices, among them %s)",
		c.socket, len(c.devices), c.devices[0])
}

// probe is what the plugin behind a socket answered.
type probe struct {
	file    fileID
	devices []string
}

// checkConflicting returns a process that serves our GPUs to kubelet; nil for none. settled reports whether each live socket has
// answered. While no GPU is known yet, every GPU counts as ours.
func (p *Plugin) checkConflicting(ctx context.Context) (conflicting *conflictingPlugin, settled bool) {
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
			return &conflictingPlugin{path, ours}, settled
		}
	}
	return nil, settled
}

// ours returns those devices of another plugin that are GPUs of this inventory or their partitions. While the inventory is empty,
// because the driver is late, it returns all that have the form of NVIDIA's UUIDs.
func (p *Plugin) ours(devices []string) []string {
	known := p.lists.table.Load().ours
	var ours []string
	for _, id := range devices {
		uuid := device.HardwareUUID(id)
		if known[uuid] || len(known) == 0 && (strings.HasPrefix(uuid, "GPU-") || strings.HasPrefix(uuid, "MIG-")) {
			ours = append(ours, id)
		}
	}
	return ours
}

// probe returns the devices of the plugin behind a socket. A probe leaves a trace: NVIDIA's plugin never ends a ListAndWatch whose reader
// is gone, and that stream may take a health event. So each socket is probed only until it has answered, and by one resource at a time
// (TestForeignPluginIsAskedOnce). If the resource that probes ends, the others probe again.
func (p *Plugin) probe(ctx context.Context, path string, file fileID) ([]string, error) {
	devices, err, _ := p.probing.Do(path, func() (any, error) {
		if known, ok := p.probes.Load(path); ok && known.(probe).file == file {
			return known.(probe).devices, nil
		}
		devices, err := listDevices(ctx, path, p.times.pluginProbe)
		if len(devices) > 0 { // a plugin that has none yet may get some
			p.probes.Store(path, probe{file: file, devices: devices})
		}
		return devices, err
	})
	return devices.([]string), err
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
	for _, d := range list.GetDevices() {
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
