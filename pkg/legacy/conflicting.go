// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// ForeignError says that another process on the node serves the same GPUs to kubelet. Two of them would give the same GPU
// away twice.
type ForeignError struct {
	// Socket of the other device plugin.
	Socket string
	// Devices of ours that it serves, or some of its own where we have none.
	Devices []string
}

// Error names the socket and a device.
func (e *ForeignError) Error() string {
	return fmt.Sprintf("another device plugin serves the same GPUs on %s (%d devices, among them %s)",
		e.Socket, len(e.Devices), e.Devices[0])
}

// probes remembers what each socket turned out to be. Asking leaves a trace: NVIDIA's plugin never ends a ListAndWatch
// whose reader has gone, and that one may swallow a health event. So each socket is asked only until it has answered, and by one
// of the resources at a time.
type probes struct {
	asking singleflight.Group

	mu    sync.Mutex
	known map[string]probed
}

type probed struct {
	file    fileID
	devices []string
}

func newProbes() *probes { return &probes{known: make(map[string]probed)} }

// CheckForeign looks for another process that serves our GPUs to kubelet and returns a *ForeignError when it finds one,
// nil otherwise; any other error means that it could not look. Run calls it before each registration and when a socket
// appears, and calling it as well does no harm; before Run, when no GPU is known yet, every GPU counts as ours.
func (p *Plugin) CheckForeign(ctx context.Context) error {
	_, err := p.checkForeign(ctx)
	return err
}

// checkForeign also reports whether each live socket has answered.
func (p *Plugin) checkForeign(ctx context.Context) (settled bool, err error) {
	entries, err := os.ReadDir(p.config.Directory)
	if err != nil {
		return false, fmt.Errorf("look for other device plugins: %w", err)
	}
	settled = true
	for _, entry := range entries {
		path := filepath.Join(p.config.Directory, entry.Name())
		if entry.Type()&os.ModeSocket == 0 || entry.Name() == "kubelet.sock" || p.owns(path) {
			continue
		}
		devices, answered := p.probes.devices(ctx, path, p.times.foreignProbe)
		settled = settled && answered
		if ours := p.ours(devices); len(ours) > 0 {
			return settled, &ForeignError{Socket: path, Devices: ours}
		}
	}
	return settled, nil
}

// ours returns those of another plugin's devices that are GPUs of this inventory or partitions of them, or while that is empty
// (the driver is late) all that look so.
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

// devices returns what the plugin behind a socket serves; answered is false when it is alive and does not say.
func (p *probes) devices(ctx context.Context, path string, limit time.Duration) (devices []string, answered bool) {
	file, err := identify(path)
	if err != nil || !alive(path) {
		return nil, true
	}
	// Where the resource ends whose turn it was, the others look again.
	answer, err, _ := p.asking.Do(path, func() (any, error) { return p.ask(ctx, path, file, limit) })
	devices, answered = answer.([]string)
	return devices, answered && err == nil
}

func (p *probes) ask(ctx context.Context, path string, file fileID, limit time.Duration) ([]string, error) {
	p.mu.Lock()
	known, ok := p.known[path]
	p.mu.Unlock()
	if ok && known.file == file {
		return known.devices, nil
	}
	devices, err := listDevices(ctx, path, limit)
	if len(devices) > 0 { // a plugin that has none yet may get some
		p.mu.Lock()
		defer p.mu.Unlock()
		p.known[path] = probed{file: file, devices: devices}
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
	// What matters of the connection has been read by then.
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

// dial prepares a connection to a socket; it is made by the first call.
func dial(path string) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("unix://"+path,
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", path, err)
	}
	return conn, nil
}
