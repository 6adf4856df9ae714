// SPDX-License-Identifier: Apache-2.0

// Package kubelet plays kubelet for one node, over kubelet's real sockets and state files: the registration of device plugins and DRA
// drivers, their calls, the pod resources endpoint and both checkpoints. With a client it also plays kubelet's part in the API server: the
// Node, its Lease, and the pods that are bound to it. The order of calls is that of k8s.io/kubernetes pkg/kubelet, 1.37. A Runtime runs the
// containers. Liveness probes, volumes and the alignment of NUMA nodes are left out.
package kubelet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/internal/keylock"
)

// Options of a kubelet.
type Options struct {
	// Dir is kubelet's directory as this process sees it. Paths of sockets below it must be shorter than 108 bytes.
	Dir string
	// SeenAs is the same directory as plugins see it; empty if they see it at Dir.
	SeenAs string
	// Client, with the rights of an administrator, makes kubelet take part in the cluster. Nil: only the sockets.
	Client kubernetes.Interface
	// Node is what kubelet registers: name, labels, taints, addresses, node info, and the capacity without devices of plugins.
	Node *corev1.Node
	// Runtime runs the containers of pods. Nil: containers are only said to run.
	Runtime Runtime
	// Cgroups is the directory kubepods of a cgroup hierarchy, which gets a directory for each pod. Empty: none.
	Cgroups string
	// Retry is after how long claims are prepared again for a pod whose claims could not be. Default 75 s: kubelet takes 60 to 90 s.
	Retry time.Duration
}

// Kubelet plays kubelet. All methods are safe for concurrent use.
type Kubelet struct {
	broadcast.Signal
	Options
	server  *grpc.Server
	watcher *fsnotify.Watcher
	cancel  context.CancelFunc
	done    sync.WaitGroup
	// admission is kubelet's sync loop, which admits one pod after the other.
	admission sync.Mutex
	claimLock keylock.Locks[types.UID]

	mu       sync.Mutex
	plugins  map[string]*plugin
	drivers  map[string]*driver
	granted  []Grant
	claims   map[types.UID]*claim
	lives    map[types.UID]*life
	failures []error
}

// retryPrepare is the middle of what kubelet takes (pkg/kubelet, resyncInterval and workerResyncIntervalJitterFactor).
const retryPrepare = 75 * time.Second

// Start makes kubelet's directory, listens in it, and begins its part in the cluster if there is a client. It ends with Stop, not with ctx.
func Start(ctx context.Context, o Options) (*Kubelet, error) {
	if o.SeenAs == "" {
		o.SeenAs = o.Dir
	}
	if o.Retry == 0 {
		o.Retry = retryPrepare
	}
	if o.Runtime == nil {
		o.Runtime = still{}
	}
	for _, dir := range []string{"plugins", "plugins_registry", "device-plugins", "pod-resources", "pods"} {
		if err := os.MkdirAll(filepath.Join(o.Dir, dir), 0o755); err != nil {
			return nil, fmt.Errorf("make kubelet's directory: %w", err)
		}
	}
	k := &Kubelet{
		Options: o, server: grpc.NewServer(),
		plugins: map[string]*plugin{}, drivers: map[string]*driver{}, claims: map[types.UID]*claim{}, lives: map[types.UID]*life{},
	}
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	k.cancel = cancel
	if err := k.start(ctx, running); err != nil {
		k.Stop()
		return nil, err
	}
	return k, nil
}

func (k *Kubelet) start(ctx, running context.Context) (err error) {
	if k.watcher, err = fsnotify.NewWatcher(); err != nil {
		return fmt.Errorf("watch plugin registrations: %w", err)
	}
	registry := filepath.Join(k.Dir, "plugins_registry")
	if err := k.watcher.Add(registry); err != nil {
		return fmt.Errorf("watch plugin registrations: %w", err)
	}
	pluginapi.RegisterRegistrationServer(k.server, &registration{kubelet: k, ctx: running})
	podresources.RegisterPodResourcesListerServer(k.server, &lister{kubelet: k})
	for _, dir := range []string{"device-plugins", "pod-resources"} {
		socket := filepath.Join(k.Dir, dir, "kubelet.sock")
		if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the socket of an earlier kubelet: %w", err)
		}
		listener, err := net.Listen("unix", socket)
		if err != nil {
			return fmt.Errorf("listen as kubelet: %w", err)
		}
		k.done.Go(func() { _ = k.server.Serve(listener) }) // ends with Stop
	}
	if k.Client != nil {
		if err := k.join(ctx, running); err != nil {
			return err
		}
	}
	k.done.Go(func() { k.watchPlugins(running, registry) })
	return nil
}

// Stop ends kubelet. Containers that the Runtime runs end, too; the API server keeps the objects.
func (k *Kubelet) Stop() {
	k.cancel()
	k.server.Stop()
	if k.watcher != nil {
		_ = k.watcher.Close() // nothing was written
	}
	k.done.Wait()
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range k.plugins {
		_ = p.conn.Close()
	}
	for _, d := range k.drivers {
		_ = d.conn.Close()
	}
}

// Failures are the registrations that have failed so far.
func (k *Kubelet) Failures() []error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return append([]error(nil), k.failures...)
}

func (k *Kubelet) fail(err error) {
	k.change(func() { k.failures = append(k.failures, err) })
}

// change changes what kubelet knows, and notifies those who wait for a change.
func (k *Kubelet) change(f func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f()
	k.Notify()
}

// path is a plugin's path as this process sees it.
func (k *Kubelet) path(seen string) string {
	if below, ok := strings.CutPrefix(seen, k.SeenAs+"/"); ok {
		return filepath.Join(k.Dir, below)
	}
	return seen
}

func dial(socket string) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", socket, err)
	}
	return conn, nil
}

// driver is a registered DRA driver.
type driver struct {
	socket     string
	file       os.FileInfo
	conn       *grpc.ClientConn
	identified time.Time
	// health is what the driver reports of its devices, by "pool/device".
	health map[string]corev1.ResourceHealthStatus
}

// Driver is a DRA driver that kubelet calls.
type Driver struct {
	drapb.DRAPluginClient
	Conn *grpc.ClientConn
	// Identified is when the driver answered GetInfo.
	Identified time.Time
}

// Driver returns the registered driver of a name.
func (k *Kubelet) Driver(name string) (Driver, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	d, ok := k.drivers[name]
	if !ok {
		return Driver{}, false
	}
	return Driver{DRAPluginClient: drapb.NewDRAPluginClient(d.conn), Conn: d.conn, Identified: d.identified}, true
}

// watchPlugins is kubelet's plugin watcher.
func (k *Kubelet) watchPlugins(ctx context.Context, registry string) {
	found, _ := filepath.Glob(filepath.Join(registry, "*.sock")) // the pattern is valid
	for _, socket := range found {
		k.registerPlugin(ctx, socket)
	}
	for {
		select {
		case <-ctx.Done():
			return
		case event, ok := <-k.watcher.Events:
			switch {
			case !ok:
				return
			case strings.HasPrefix(filepath.Base(event.Name), ".") || !strings.HasSuffix(event.Name, ".sock"):
			case event.Has(fsnotify.Create):
				k.registerPlugin(ctx, event.Name)
			case event.Has(fsnotify.Remove):
				k.removePlugin(ctx, event.Name)
			}
		}
	}
}

// registerPlugin registers a DRA driver, unless the one of the socket is registered: the first look and the watch may both find it. A
// driver that was killed leaves its socket, and the next one puts its own in the place of that.
func (k *Kubelet) registerPlugin(running context.Context, socket string) {
	file, err := os.Stat(socket)
	if err != nil {
		return // it is gone again
	}
	k.mu.Lock()
	for _, d := range k.drivers {
		if d.socket == socket && os.SameFile(d.file, file) {
			k.mu.Unlock()
			return
		}
	}
	k.mu.Unlock()
	ctx, cancel := context.WithTimeout(running, 10*time.Second)
	defer cancel()
	err = func() error {
		conn, err := dial(socket)
		if err != nil {
			return err
		}
		defer conn.Close()
		client := registerapi.NewRegistrationClient(conn)
		info, err := client.GetInfo(ctx, &registerapi.InfoRequest{}, grpc.WaitForReady(true))
		if err != nil {
			return fmt.Errorf("get info of plugin %s: %w", socket, err)
		}
		identified := time.Now()
		if info.GetType() != registerapi.DRAPlugin || !slices.Contains(info.GetSupportedVersions(), drapb.DRAPluginService) {
			refusal := fmt.Sprintf("type %s with versions %v is not supported: want type %s with %s",
				info.GetType(), info.GetSupportedVersions(), registerapi.DRAPlugin, drapb.DRAPluginService)
			_, err := client.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{Error: refusal})
			return errors.Join(fmt.Errorf("plugin %s: %s", socket, refusal), err)
		}
		service, err := dial(k.path(info.GetEndpoint()))
		if err != nil {
			return err
		}
		if _, err := client.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
			return errors.Join(fmt.Errorf("notify plugin %s: %w", socket, err), service.Close())
		}
		k.change(func() {
			if before := k.drivers[info.GetName()]; before != nil {
				_ = before.conn.Close()
			}
			d := &driver{socket: socket, file: file, conn: service, identified: identified, health: map[string]corev1.ResourceHealthStatus{}}
			k.drivers[info.GetName()] = d
			if k.Client != nil {
				k.done.Go(func() { k.followHealth(running, d) })
			}
		})
		return nil
	}()
	// A socket may be gone before kubelet has looked at it.
	if _, gone := os.Stat(socket); err != nil && gone == nil && ctx.Err() == nil {
		k.fail(err)
	}
}

func (k *Kubelet) removePlugin(ctx context.Context, socket string) {
	k.change(func() {
		for name, d := range k.drivers {
			if d.socket == socket {
				_ = d.conn.Close()
				delete(k.drivers, name)
				k.wipeLater(ctx, name)
			}
		}
	})
}
