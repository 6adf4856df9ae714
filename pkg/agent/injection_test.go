// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/config"
)

// listReader is kubelet as a reader of lists: it takes a registration and reads the list.
type listReader struct {
	pluginapi.UnimplementedRegistrationServer
	t          *testing.T
	directory  string
	registered chan string
	plugin     pluginapi.DevicePluginClient
	// stop ends what the test runs, so that only the agent's goroutines are left.
	stop func()

	mu      sync.Mutex
	devices []*pluginapi.Device
}

func newListReader(t *testing.T, c config.Config) *listReader {
	t.Helper()
	m := &listReader{t: t, directory: filepath.Join(c.KubeletDir, "device-plugins"), registered: make(chan string, 10)}
	listener, err := net.Listen("unix", filepath.Join(m.directory, "kubelet.sock"))
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	pluginapi.RegisterRegistrationServer(server, m)
	serving := make(chan struct{})
	go func() { defer close(serving); _ = server.Serve(listener) }()
	m.stop = sync.OnceFunc(func() { server.Stop(); <-serving })
	t.Cleanup(m.stop)
	return m
}

func (m *listReader) Register(_ context.Context, r *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	m.registered <- r.GetEndpoint()
	return &pluginapi.Empty{}, nil
}

// follow reads the list of the first registration.
func (m *listReader) follow() {
	m.t.Helper()
	var endpoint string
	select {
	case endpoint = <-m.registered:
	case <-time.After(time.Minute):
		m.t.Fatal("the device plugin does not register")
	}
	connection, err := grpc.NewClient("unix://"+filepath.Join(m.directory, endpoint), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		m.t.Fatal(err)
	}
	stop := m.stop
	m.stop = func() { stop(); _ = connection.Close() }
	m.plugin = pluginapi.NewDevicePluginClient(connection)
	stream, err := m.plugin.ListAndWatch(m.t.Context(), &pluginapi.Empty{})
	if err != nil {
		m.t.Fatal(err)
	}
	go func() {
		for {
			list, err := stream.Recv()
			if err != nil {
				return
			}
			m.mu.Lock()
			m.devices = list.GetDevices()
			m.mu.Unlock()
		}
	}()
}

func (m *listReader) healthy() (ids []string, listed int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, d := range m.devices {
		if d.GetHealth() == pluginapi.Healthy {
			ids = append(ids, d.GetID())
		}
	}
	return ids, len(m.devices)
}

// await waits until condition holds.
func await(t *testing.T, what string, condition func() bool) {
	t.Helper()
	ticker := time.NewTicker(time.Millisecond)
	defer ticker.Stop()
	for deadline := time.Now().Add(time.Minute); !condition(); <-ticker.C {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

// mountSmall puts a tmpfs of 64 KiB at path.
func mountSmall(t *testing.T, path string) {
	t.Helper()
	check(t, os.MkdirAll(path, 0o755))
	if err := unix.Mount("tmpfs", path, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("a full or read-only directory needs the right to mount a tmpfs: %v", err)
	}
	t.Cleanup(func() { check(t, unix.Unmount(path, unix.MNT_DETACH)) })
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// inSlices returns how many devices the slices have, and how many of them without a taint.
func inSlices(t *testing.T, client *fake.Clientset) (devices, offered int) {
	t.Helper()
	for _, slice := range published(t, client) {
		for _, d := range slice.Spec.Devices {
			if !strings.HasPrefix(d.Name, "gpu-") {
				continue // the probe
			}
			devices++
			if len(d.Taints) == 0 {
				offered++
			}
		}
	}
	return devices, offered
}

// A device that containers cannot be given is offered by neither API, and comes back by itself: every pod that kubelet would admit
// with it would fail for good.
func TestDevicesThatCannotBeInjectedAreNotOffered(t *testing.T) {
	type cause struct {
		// bring is called before the agent starts, remove later.
		bring  func(t *testing.T, c *config.Config)
		remove func(t *testing.T, c config.Config)
		// says is a part of the event.
		says string
	}
	for name, cause := range map[string]cause{
		"a file in place of the directory": {
			func(t *testing.T, c *config.Config) { check(t, os.WriteFile(c.CDIDir, nil, 0o600)) },
			func(t *testing.T, c config.Config) { check(t, os.Remove(c.CDIDir)) },
			"not a directory",
		},
		"a read-only directory": {
			func(t *testing.T, c *config.Config) {
				mountSmall(t, c.CDIDir)
				check(t, unix.Mount("", c.CDIDir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
			},
			func(t *testing.T, c config.Config) { check(t, unix.Mount("", c.CDIDir, "", unix.MS_REMOUNT, "")) },
			"read-only file system",
		},
		"a full directory": {
			func(t *testing.T, c *config.Config) {
				mountSmall(t, c.CDIDir)
				if err := os.WriteFile(filepath.Join(c.CDIDir, "filler"), make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
					t.Fatal(err)
				}
			},
			func(t *testing.T, c config.Config) { check(t, os.Remove(filepath.Join(c.CDIDir, "filler"))) },
			"no space left on device",
		},
		"no hook program": {
			func(_ *testing.T, c *config.Config) {
				c.CDIHook, c.CDIHookSource = "install", filepath.Join(c.HostRoot, "hook")
			},
			func(t *testing.T, c config.Config) { check(t, os.WriteFile(c.CDIHookSource, []byte("hook"), 0o755)) },
			"no such file or directory",
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := nodeConfig(t)
			simulatedMachine(t, &c)
			cause.bring(t, &c)
			kubelet := newListReader(t, c)
			client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: c.NodeName, UID: "n"}})
			a := startWith(t, c, client)
			kubelet.follow()
			await(t, "a list", func() bool { _, listed := kubelet.healthy(); return listed == 4 })
			if ids, _ := kubelet.healthy(); len(ids) > 0 {
				answer, err := kubelet.plugin.Allocate(t.Context(), &pluginapi.AllocateRequest{
					ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids[:1]}},
				})
				t.Errorf("%d devices are healthy for kubelet, and Allocate says %v, %v", len(ids), answer, err)
			}
			await(t, "slices", func() bool { devices, _ := inSlices(t, client); return devices == 4 })
			if _, offered := inSlices(t, client); offered > 0 {
				t.Errorf("%d devices are offered to claims", offered)
			}
			a.wantDeviceEvent("DeviceNotInjectable", cause.says)
			cause.remove(t, c)
			await(t, "healthy devices", func() bool { ids, _ := kubelet.healthy(); return len(ids) == 4 })
			await(t, "devices offered to claims", func() bool { _, offered := inSlices(t, client); return offered == 4 })
			kubelet.stop()
			a.stop()
		})
	}
}

// Limits without CDI are served where no spec can be written, and claims are not.
func TestLimitsWithoutCDI(t *testing.T) {
	c := nodeConfig(t)
	simulatedMachine(t, &c)
	c.DeviceListStrategies = []string{"envvar"}
	check(t, os.WriteFile(c.CDIDir, nil, 0o600))
	kubelet := newListReader(t, c)
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: c.NodeName, UID: "n"}})
	a := startWith(t, c, client)
	kubelet.follow()
	await(t, "healthy devices", func() bool { ids, _ := kubelet.healthy(); return len(ids) == 4 })
	await(t, "slices", func() bool { devices, _ := inSlices(t, client); return devices == 4 })
	if _, offered := inSlices(t, client); offered > 0 {
		t.Errorf("%d devices are offered to claims", offered)
	}
	kubelet.stop()
	a.stop()
}

// wantDeviceEvent waits for the only event.
func (a *testAgent) wantDeviceEvent(reason, says string) {
	a.t.Helper()
	select {
	case event := <-a.events.Events:
		if !strings.Contains(event, reason) || !strings.Contains(event, says) {
			a.t.Errorf("event %q, want %s with %q", event, reason, says)
		}
	case <-time.After(time.Minute):
		a.t.Errorf("no event %s", reason)
	}
}

// Where no holder can be recorded, no device is offered: the next pod would fail for good.
func TestNothingIsOfferedWithoutRecords(t *testing.T) {
	c := nodeConfig(t)
	simulatedMachine(t, &c)
	mountSmall(t, c.RunDir)
	kubelet := newListReader(t, c)
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: c.NodeName, UID: "n"}})
	a := startWith(t, c, client)
	kubelet.follow()
	offered := func(want int) func() bool {
		return func() bool {
			ids, _ := kubelet.healthy()
			_, offered := inSlices(t, client)
			return len(ids) == want && offered == want
		}
	}
	await(t, "all devices", offered(4))
	check(t, unix.Mount("", c.RunDir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	await(t, "none", offered(0))
	a.wantDeviceEvent("DeviceNotRecordable", "read-only file system")
	check(t, unix.Mount("", c.RunDir, "", unix.MS_REMOUNT, ""))
	await(t, "all devices again", offered(4))
	kubelet.stop()
	a.stop()
}
