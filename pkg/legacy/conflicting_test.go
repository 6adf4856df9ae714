// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// registerOther registers a plugin below a name with kubelet, as another plugin would.
func (f *fixture) registerOther(name, resource string) {
	f.Helper()
	conn, err := grpc.NewClient("unix://"+filepath.Join(f.dir, "kubelet.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	if err != nil {
		f.Fatal(err)
	}
	defer conn.Close()
	request := &pluginapi.RegisterRequest{Version: pluginapi.Version, Endpoint: name, ResourceName: resource}
	if _, err := pluginapi.NewRegistrationClient(conn).Register(f.Context(), request); err != nil {
		f.Fatal(err)
	}
}

// noNewHolder checks that neither API gets a device.
func (f *fixture) noNewHolder(words ...string) {
	f.Helper()
	pod := f.ledger.ReservePod([]ledger.PodRequest{{ID: uuid(6), Resource: kubeletGPU, Device: device.Ref{GPU: uuid(6)}}})
	_, claim := f.ledger.ReserveClaim(f.Context(), ledger.ClaimRequest{UID: "new", Devices: []device.Ref{{GPU: uuid(6)}}})
	for _, err := range []error{pod, claim} {
		var withheld *ledger.WithheldError
		if !errors.As(err, &withheld) {
			f.Errorf("a new holder gets %v", err)
			continue
		}
	}
	for _, word := range words {
		if reasons := fmt.Sprint(f.ledger.Withheld()); !strings.Contains(reasons, word) {
			f.Errorf("%q does not say %q", reasons, word)
		}
	}
}

// A plugin is found by what kubelet registered for our resource, whatever its device IDs look like, before and after we register.
func TestForeignPluginOfUnknownDevices(t *testing.T) {
	eachRelease(t, func(t *testing.T, release kubeletRelease) {
		for _, ids := range [][]string{{"nvidia0", "nvidia1"}, {"card-a"}, {uuid(0) + "-3"}} {
			t.Run("first "+ids[0], func(t *testing.T) {
				f := newFixture(t, release)
				f.startKubelet()
				_, stopOther := f.startOther("other.sock", ids...)
				f.registerOther("other.sock", kubeletGPU)
				f.await("the other's list", healthyCount(len(ids)))
				p, stop := f.start()
				f.awaitReady(p, "other.sock")
				f.noNewHolder(kubeletGPU, "other.sock", ids[0], "uninstall")
				if n := len(f.mySockets()); n > 0 {
					t.Errorf("%d sockets of ours", n)
				}
				stop() // the agent makes another plugin, as after the held phase
				p, _ = f.start()
				f.awaitReady(p, "other.sock")
				stopOther()
				f.await("our list", healthyCount(8))
				f.awaitReady(p, "")
				if err := f.ledger.Withheld(); err != nil {
					t.Error(err)
				}
			})
			t.Run("later "+ids[0], func(t *testing.T) {
				f := newFixture(t, release)
				f.startKubelet()
				f.ledger.claim("c1", 3)
				p, _ := f.start()
				f.await("our list", healthyCount(7))
				f.awaitReady(p, "")
				_, stopOther := f.startOther("other.sock", ids...)
				f.registerOther("other.sock", kubeletGPU)
				f.awaitReady(p, "other.sock")
				f.noNewHolder("other.sock")
				if release == release137 {
					f.await("the other's list alone", healthyCount(len(ids)))
				}
				stopOther()
				f.await("our list", healthyCount(7))
				f.awaitReady(p, "")
			})
		}
	})
}

// A plugin that was made while another withheld devices takes over from the conflicting one, which is gone by then.
func TestNextPluginTakesOver(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.startKubelet()
	adoptions := 0
	f.config.Adopt = func(context.Context) error { adoptions++; return nil }
	f.ledger.Withhold(sourceConflicting, errTest) // as the plugin of the held phase did
	p, err := New(f.config)
	if err != nil {
		t.Fatal(err)
	}
	p.times.takeOver = time.Millisecond
	p.FindConflicting(t.Context())
	if err := f.ledger.Withheld(); err != nil || adoptions != 1 {
		t.Errorf("Withheld is %v after %d adoptions", err, adoptions)
	}
}

// A plugin whose devices are unhealthy now is still there.
func TestForeignPluginWithoutHealthyDevices(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.startKubelet()
	_, stopOther := f.startOther("other.sock", "card-a")
	f.registerOther("other.sock", kubeletGPU)
	f.await("the other's list", healthyCount(1))
	p, _ := f.start()
	f.awaitReady(p, "other.sock")
	f.kubelet.DropStreams() // kubelet takes them for unhealthy
	f.await("no healthy device", func(s kubeletState) bool { return len(s.Healthy()) == 0 })
	for range 3 {
		if other, _ := p.withhold(context.Background()); other == nil {
			t.Error("forgotten")
		}
	}
	stopOther()
	f.awaitReady(p, "")
}

// kubelet's checkpoint keeps the IDs of a plugin that is gone. kubelet itself knows better, and while it is silent the file counts.
func TestStaleCheckpoint(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	registered := map[string][]string{kubeletGPU: {"nvidia0"}, "example.com/nic": {"nic-0"}}
	data, err := json.Marshal(map[string]any{"Data": map[string]any{"RegisteredDevices": registered}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(f.dir, "kubelet_internal_checkpoint"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := New(f.config)
	if err != nil {
		t.Fatal(err)
	}
	p.times.takeOver = time.Millisecond
	p.FindConflicting(t.Context())
	f.noNewHolder("nvidia0", "unknown socket")
	f.startKubelet()
	p.FindConflicting(t.Context())
	if err := f.ledger.Withheld(); err != nil {
		t.Error(err)
	}
	registered[kubeletGPU] = []string{uuid(2), uuid(3) + "::1", "MIG-00000000-0000-0000-0000-000000000009"}
	if foreign := p.foreignAmong(registered); foreign != nil {
		t.Errorf("those of an earlier agent of ours are foreign: %v", foreign)
	}
}

// What the other plugin gave away is adopted before anything is served again, also if that fails at first.
func TestAdoptionComesFirst(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.startKubelet()
	var adoptions atomic.Int32
	f.config.Adopt = func(context.Context) error {
		if f.ledger.Withheld() == nil || len(f.mySockets()) > 0 {
			t.Error("serves before the adoption")
		}
		if adoptions.Add(1) < 3 {
			return errTest
		}
		return f.ledger.Expect(ledger.Hold{
			Holder: ledger.Holder{Kind: ledger.KindPod, ID: "nvidia5"}, Resource: kubeletGPU, Device: device.Ref{GPU: uuid(5)},
		})
	}
	_, stopOther := f.startOther("nvidia-gpu.sock", "nvidia5")
	p, _ := f.start(func(t *times) { t.pluginInterval = 5 * time.Millisecond })
	f.awaitReady(p, "nvidia-gpu.sock")
	if n := adoptions.Load(); n > 0 {
		t.Errorf("%d adoptions beside the other plugin", n)
	}
	stopOther()
	// The GPU of the adopted pod is listed under the pod's ID, and not offered under its own.
	state := f.await("our list", healthyCount(8))
	if healthy := state.Healthy(); slices.Contains(healthy, uuid(5)) || !slices.Contains(healthy, "nvidia5") {
		t.Errorf("healthy are %v", healthy)
	}
	f.awaitReady(p, "")
	if n := adoptions.Load(); n != 3 {
		t.Errorf("%d adoptions", n)
	}
}

// While devices are withheld for another reason, kubelet is offered only what pods hold.
func TestWithheldDevicesAreWithdrawn(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.startKubelet()
	if err := f.ledger.ReservePod([]ledger.PodRequest{{ID: uuid(1), Resource: kubeletGPU, Device: device.Ref{GPU: uuid(1)}}}); err != nil {
		t.Fatal(err)
	}
	p, _ := f.start()
	f.await("our list", healthyCount(8))
	f.ledger.Withhold("test", errTest)
	state := f.await("the withdrawal", healthyCount(1))
	if got := fmt.Sprint(state.Healthy()); got != fmt.Sprint([]string{uuid(1)}) {
		t.Errorf("healthy are %s", got)
	}
	allocate := func(id string) error {
		_, err := p.Allocate(t.Context(), kubeletGPU, &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: []string{id}}}})
		return err
	}
	if err := allocate(uuid(2)); err == nil || !strings.Contains(err.Error(), "events of the node") {
		t.Errorf("kubelet's old list: %v", err)
	}
	f.ledger.Withhold("test", nil)
	f.await("our list", healthyCount(8))
	if err := allocate(uuid(2)); err != nil {
		t.Error(err)
	}
}

// In a mode without limits another plugin keeps claims from being served, unless its GPUs are excluded from both APIs.
func TestWatchConflicting(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.startKubelet()
	f.config.Offered = func(device.GPU) bool { return false }
	f.config.Excluded = func(g device.GPU) bool { return g.Minor == 7 }
	p, err := New(f.config)
	if err != nil {
		t.Fatal(err)
	}
	p.times.pluginInterval, p.times.takeOver = 20*time.Millisecond, time.Millisecond
	p.FindConflicting(t.Context())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.WatchConflicting(ctx) }()
	withheld := func(want bool) {
		t.Helper()
		for deadline := time.Now().Add(patience); (f.ledger.Withheld() != nil) != want; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("Withheld is %v", f.ledger.Withheld())
			}
		}
	}
	_, stopHarmless := f.startOther("excluded.sock", uuid(7), "nvidia7")
	_, stopOther := f.startOther("nvidia-gpu.sock", uuid(2))
	withheld(true)
	if event := f.event(); !strings.Contains(event, "OtherDevicePlugin Not serving claims") || !strings.Contains(event, "nvidia-gpu.sock") {
		t.Errorf("recorded %q", event)
	}
	stopOther()
	withheld(false)
	stopHarmless()
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A plugin that comes while the one before is taken over from has its socket in the directory when ours is made.
func TestPluginThatComesDuringTheAdoption(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.startKubelet()
	_, stopFirst := f.startOther("first.sock", uuid(0))
	stopSecond := func() {}
	come := sync.OnceFunc(func() { _, stopSecond = f.startOther("second.sock", uuid(1)) })
	f.config.Adopt = func(context.Context) error { come(); return nil }
	p, _ := f.start()
	f.awaitReady(p, "first.sock")
	stopFirst()
	f.awaitReady(p, "second.sock")
	f.noNewHolder("second.sock")
	if n := len(f.kubelet.State().Endpoints); n > 0 {
		t.Errorf("%d registrations beside the second plugin", n)
	}
	stopSecond()
	f.await("our list", healthyCount(8))
	f.awaitReady(p, "")
}

// A socket may exist before its process listens on it: it is dead when Tandem looks before it registers.
func TestPluginThatListensLate(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.startKubelet()
	socket, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(socket), "other.sock")
	defer file.Close()
	if err := syscall.Bind(socket, &syscall.SockaddrUnix{Name: filepath.Join(f.dir, "other.sock")}); err != nil {
		t.Fatal(err)
	}
	p, _ := f.start(func(t *times) { t.pluginProbe = 2 * time.Second })
	f.await("our list", healthyCount(8))
	if err := syscall.Listen(socket, 16); err != nil {
		t.Fatal(err)
	}
	listener, err := net.FileListener(file)
	if err != nil {
		t.Fatal(err)
	}
	f.serveOther(listener, uuid(1))
	f.awaitReady(p, "other.sock")
}
