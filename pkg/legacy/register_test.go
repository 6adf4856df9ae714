// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/filewatch"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// eachRelease runs a test against the behaviour of each kubelet.
func eachRelease(t *testing.T, test func(*testing.T, kubeletRelease)) {
	for name, release := range map[string]kubeletRelease{"1.37": release137, "1.36": release136} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, release)
		})
	}
}

// checkFresh says whether every registration used a name of its own, and only the current socket is left.
func (f *fixture) checkFresh() {
	f.Helper()
	endpoints := f.kubelet.State().Endpoints
	if distinct := slices.Compact(slices.Sorted(slices.Values(endpoints))); len(distinct) != len(endpoints) {
		f.Errorf("socket names were used again: %v", endpoints)
	}
	for _, name := range endpoints {
		if !ownName(name) || filepath.Base(name) != name {
			f.Errorf("registered %q", name)
		}
	}
	if mine := f.mySockets(); len(mine) != 1 {
		f.Errorf("sockets %v, want just the current one", mine)
	}
}

func TestRegisters(t *testing.T) {
	t.Parallel()
	eachRelease(t, func(t *testing.T, release kubeletRelease) {
		f := newFixture(t, release)
		f.startKubelet()
		p, stop := f.start()
		state := f.await("the list", healthyCount(8))
		f.awaitReady(p, "")
		var numa []int64
		for i, d := range state.Devices {
			if d.GetID() != uuid(i) {
				t.Errorf("device %d is %s", i, d.GetID())
			}
			numa = append(numa, d.GetTopology().GetNodes()[0].GetID())
		}
		if !slices.Equal(numa, []int64{0, 0, 0, 0, 1, 1, 1, 1}) {
			t.Errorf("NUMA nodes %v", numa)
		}
		f.checkFresh()
		if f.metric("tandem_device_plugin_registrations_total", "reason=start") != 1 || f.metric("tandem_device_plugin_devices", "resource=nvidia.com/gpu", "state=healthy") != 8 {
			t.Error("metrics do not tell of it")
		}
		stop()
		f.await("disconnection", func(s kubeletState) bool { return len(s.Connected) == 0 && len(s.Healthy()) == 0 })
		if mine := f.mySockets(); len(mine) != 0 {
			t.Errorf("left %v behind", mine)
		}
		if err := p.Ready(); err == nil {
			t.Error("ready after the end")
		}
	})
}

func TestSendsOnlyChanges(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.startKubelet()
	f.start()
	f.await("the list", healthyCount(8))
	before := f.kubelet.State().Lists
	f.ledger.claim("a", 2)
	f.await("withdrawal", func(s kubeletState) bool { return !slices.Contains(s.Healthy(), uuid(2)) && len(s.Devices) == 8 })
	// A claim that drains, a limit that holds, and an inventory that is the same are no news.
	f.ledger.drain("a")
	f.inventory.setHealth("GPU-unknown", device.Health{})
	if err := f.ledger.ReservePod([]ledger.PodRequest{{ID: uuid(5), Resource: "nvidia.com/gpu", Device: device.Ref{GPU: uuid(5)}}}); err != nil {
		t.Fatal(err)
	}
	f.ledger.release("a")
	f.await("return", healthyCount(8))
	if lists := f.kubelet.State().Lists - before; lists != 2 {
		t.Errorf("sent %d lists for one withdrawal and one return", lists)
	}
}

func TestKeepsEveryID(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.startKubelet()
	f.start()
	f.await("the list", healthyCount(8))
	f.inventory.set(func(inv device.Inventory) device.Inventory { return device.Inventory{GPUs: inv.GPUs[:3]} })
	state := f.await("the loss of five", healthyCount(3))
	if len(state.Devices) != 8 {
		t.Errorf("kubelet knows %d devices, want all 8", len(state.Devices))
	}
	client, err := f.kubelet.Plugin()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Allocate(context.Background(), allocation([]string{uuid(6)})); err == nil || !strings.Contains(err.Error(), "unhealthy device: "+uuid(6)+": Missing") {
		t.Errorf("got %v", err)
	}
}

func TestRegistersAgain(t *testing.T) {
	t.Parallel()
	removeOwn := func(f *fixture, _ *Plugin) {
		for _, path := range f.mySockets() {
			if err := os.Remove(path); err != nil {
				f.Error(err)
			}
		}
	}
	for name, test := range map[string]struct {
		disturb func(*fixture, *Plugin)
		reason  string
	}{
		"kubelet restarts":  {func(f *fixture, _ *Plugin) { f.kubelet.Stop(); f.startKubelet() }, ""},
		"kubelet is killed": {func(f *fixture, _ *Plugin) { f.kubelet.Kill(); f.startKubelet() }, ""},
		"kubelet is away for long": {func(f *fixture, p *Plugin) {
			f.kubelet.Stop()
			f.awaitReady(p, "wait for kubelet")
			f.startKubelet()
		}, "kubelet_restarted"},
		"socket is removed": {removeOwn, "socket_removed"},
		"stream ends":       {func(f *fixture, _ *Plugin) { f.kubelet.DropStreams() }, "stream_ended"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachRelease(t, func(t *testing.T, release kubeletRelease) {
				f := newFixture(t, release)
				f.startKubelet()
				p, _ := f.start()
				for round := range 3 {
					state := f.await("registration", registrations(round+1))
					f.awaitReady(p, "")
					test.disturb(f, p)
					f.await("another", registrations(len(state.Endpoints)+1))
				}
				f.await("the list", healthyCount(8))
				f.awaitReady(p, "")
				f.checkFresh()
				if test.reason != "" && f.metric("tandem_device_plugin_registrations_total", "reason="+test.reason) == 0 {
					t.Errorf("no registration was counted for %s", test.reason)
				}
				if _, err := f.kubelet.Plugin(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

func TestKubeletTurnsUpLate(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	p, _ := f.start()
	f.awaitReady(p, "wait for kubelet: lstat "+filepath.Join(f.dir, "kubelet.sock"))
	f.startKubelet()
	f.await("the list", healthyCount(8))
	f.awaitReady(p, "")
}

func TestKubeletRefuses(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.kubelet.Set(kubeletFaults{RefuseRegister: true})
	f.startKubelet()
	p, _ := f.start(func(t *times) { t.firstRetry, t.lastRetry = time.Millisecond, 5*time.Millisecond })
	f.await("attempts", func(s kubeletState) bool { return len(s.Endpoints) >= 4 })
	f.awaitReady(p, "registration is refused")
	f.kubelet.Set(kubeletFaults{})
	f.await("the list", healthyCount(8))
	f.awaitReady(p, "")
	f.checkFresh()
}

func TestKubeletNeverListens(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.kubelet.Set(kubeletFaults{NoStream: true})
	f.startKubelet()
	p, _ := f.start(func(t *times) { t.streamWait = 500 * time.Millisecond })
	f.awaitReady(p, "did not list devices")
	f.kubelet.Set(kubeletFaults{})
	f.await("the list", healthyCount(8))
	f.awaitReady(p, "")
	if f.metric("tandem_device_plugin_registrations_total", "reason=no_stream") == 0 {
		t.Error("not counted")
	}
	f.checkFresh()
}

// TestKubeletDeaf is kubelet 1.37 after a path registered twice: the stream stands and nothing that is sent is believed.
func TestKubeletDeaf(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.kubelet.Set(kubeletFaults{Deaf: true})
	f.startKubelet()
	p, _ := f.start(func(t *times) { t.confirmPoll, t.confirmLimit = 5*time.Millisecond, 30*time.Millisecond })
	f.await("a second attempt", func(s kubeletState) bool { return len(s.Endpoints) >= 2 })
	f.kubelet.Set(kubeletFaults{})
	f.ledger.claim("c", 1)
	f.await("the list", healthyCount(7))
	f.awaitReady(p, "")
	if f.metric("tandem_device_plugin_registrations_total", "reason=unconfirmed") == 0 {
		t.Error("not counted")
	}
	f.checkFresh()
}

// TestIdleIsSilent counts what kubelet is asked once it has confirmed the list.
func TestIdleIsSilent(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	view := &countingView{KubeletView: f.kubelet, asked: newObservable(0)}
	f.config.Kubelet = view
	f.startKubelet()
	f.start(func(t *times) { t.confirmPoll = time.Millisecond })
	f.await("the list", healthyCount(8))
	for deadline := time.Now().Add(patience); view.asked.get() == 0 && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	before := view.asked.get()
	time.Sleep(100 * time.Millisecond) // a hundred polls, were there any
	if after := view.asked.get(); before == 0 || after > before+1 {
		t.Errorf("kubelet was asked %d times, then %d times while idle", before, after-before)
	}
}

type countingView struct {
	KubeletView
	asked *observable[int]
}

func (v *countingView) Allocatable(ctx context.Context) (map[string][]string, error) {
	v.asked.set(func(n int) int { return n + 1 })
	return v.KubeletView.Allocatable(ctx)
}

// TestKubeletFrozen restarts the agent while kubelet sleeps (R A4): it wakes up to an ended stream and a new Register at
// once, and must come to know the new agent.
func TestKubeletFrozen(t *testing.T) {
	t.Parallel()
	eachRelease(t, func(t *testing.T, release kubeletRelease) {
		f := newFixture(t, release)
		f.startKubelet()
		_, stop := f.start()
		f.await("the list", healthyCount(8))
		for range 3 {
			f.kubelet.Freeze()
			stop()
			var p *Plugin
			p, stop = f.start()
			f.awaitReady(p, "no answer yet")
			f.ledger.claim("c", 3)
			f.kubelet.Thaw()
			f.await("the new list", healthyCount(7))
			f.awaitReady(p, "")
			f.ledger.release("c")
			f.await("the return", healthyCount(8))
		}
		f.checkFresh()
	})
}

func TestDirectory(t *testing.T) {
	t.Parallel()
	t.Run("missing", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, release137)
		f.config.Directory = filepath.Join(f.dir, "no")
		p, err := New(f.config)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Run(context.Background()); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), f.config.Directory) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("removed", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, release137)
		p, err := New(f.config)
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- p.Run(context.Background()) }()
		f.awaitReady(p, "wait for kubelet")
		if err := os.RemoveAll(f.dir); err != nil {
			t.Fatal(err)
		}
		if err := <-done; !errors.Is(err, errDirectoryGone) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("stale sockets", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, release137)
		stale, others := []string{"tandem-gpu-ABCDEFGHIJKL.sock", "tandem-mig-1g.10gb-ABCDEFGHIJKL.sock"}, []string{"nvidia-gpu.sock", "tandem-ABCDEFGHIJKL.sock", "tandem-gpu-x.sock"}
		for _, name := range slices.Concat(others, stale) {
			listener, err := net.Listen("unix", filepath.Join(f.dir, name))
			if err != nil {
				t.Fatal(err)
			}
			listener.(*net.UnixListener).SetUnlinkOnClose(false)
			if err := listener.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if err := removeStale(f.dir); err != nil {
			t.Fatal(err)
		}
		slices.Sort(others)
		found, err := sockets(f.dir)
		if err != nil {
			t.Fatal(err)
		}
		var left []string
		for _, s := range found {
			left = append(left, s.name)
		}
		if !slices.Equal(left, others) {
			t.Errorf("left %v, want %v", left, others)
		}
	})
}

// otherPlugin is another device plugin, which lists the devices of the test.
type otherPlugin struct {
	pluginapi.UnimplementedDevicePluginServer
	ids   []string
	asked *observable[int]
}

func (o *otherPlugin) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	o.asked.set(func(n int) int { return n + 1 })
	list := &pluginapi.ListAndWatchResponse{}
	for _, id := range o.ids {
		list.Devices = append(list.Devices, &pluginapi.Device{ID: id, Health: pluginapi.Healthy})
	}
	if err := stream.Send(list); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (o *otherPlugin) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{}, nil
}

// startOther serves another plugin below a name and returns how often it was asked and how to stop it.
func (f *fixture) startOther(name string, ids ...string) (asked func() int, stop func()) {
	f.Helper()
	listener, err := net.Listen("unix", filepath.Join(f.dir, name))
	if err != nil {
		f.Fatal(err)
	}
	return f.serveOther(listener, ids...)
}

// serveOther is startOther with a listener.
func (f *fixture) serveOther(listener net.Listener, ids ...string) (asked func() int, stop func()) {
	f.Helper()
	other := &otherPlugin{ids: ids, asked: newObservable(0)}
	return other.asked.get, f.serve(listener, other)
}

func (f *fixture) serve(listener net.Listener, other *otherPlugin) (stop func()) {
	server := grpc.NewServer()
	pluginapi.RegisterDevicePluginServer(server, other)
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(listener) }()
	stop = func() { server.Stop(); <-done }
	f.Cleanup(stop)
	return stop
}

// lookOnce returns what withhold finds.
func lookOnce(p *Plugin) (conflicting *conflictingPlugin, settled bool) {
	p.turn.Lock()
	defer p.turn.Unlock()
	return p.checkConflicting(context.Background())
}

func TestForeignPlugin(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		ids         []string
		conflicting bool
	}{
		"same GPUs":           {[]string{uuid(0), uuid(1)}, true},
		"one shared GPU":      {[]string{"GPU-else", uuid(7) + "::3"}, true},
		"partitions of a GPU": {[]string{"MIG-" + uuid(7) + "/1/0"}, true},
		"GPUs by minor":       {[]string{"nvidia0", "nvidia7"}, true},
		"instances by minor":  {[]string{"nvidia0/gi1", "nvidia7/vgpu3"}, true},
		"shares of memory":    {[]string{uuid(7) + "-_-12"}, true},
		"other devices":       {[]string{"nic-0", "GPU-else"}, false},
		"none":                {nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, release137)
			f.startKubelet()
			asked, stopOther := f.startOther("nvidia-gpu.sock", test.ids...)
			p, _ := f.start(func(t *times) { t.pluginProbe, t.pluginInterval = patience, 5*time.Millisecond })
			if test.conflicting {
				f.awaitReady(p, "nvidia-gpu.sock")
				if event := f.event(); !strings.HasPrefix(event, "Warning OtherDevicePlugin ") || !strings.Contains(event, "nvidia-gpu.sock") {
					t.Errorf("recorded %q", event)
				}
				if other, _ := lookOnce(p); other == nil || other.socket != filepath.Join(f.dir, "nvidia-gpu.sock") {
					t.Errorf("got %v", other)
				}
				if endpoints := f.kubelet.State().Endpoints; len(endpoints) != 0 {
					t.Errorf("registered %v all the same", endpoints)
				}
				stopOther()
			}
			f.await("the list", healthyCount(8))
			f.awaitReady(p, "")
			if n := asked(); n != 1 {
				t.Errorf("the other plugin was asked %d times", n)
			}
			if other, _ := lookOnce(p); other != nil {
				t.Errorf("got %v", other)
			}
		})
	}
}

func TestForeignPluginTurnsUpLater(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.startKubelet()
	p, _ := f.start()
	f.await("the list", healthyCount(8))
	f.awaitReady(p, "")
	_, stopHarmless := f.startOther("example.sock", "nic-0")
	_, stopOther := f.startOther("nvidia-gpu.sock", uuid(0))
	f.awaitReady(p, "nvidia-gpu.sock")
	f.await("disconnection", func(s kubeletState) bool { return len(s.Connected) == 0 && len(s.Healthy()) == 0 })
	stopOther()
	f.await("the list", healthyCount(8))
	f.awaitReady(p, "")
	stopHarmless()
	if f.metric("tandem_device_plugin_registrations_total", "reason=conflicting_plugin") != 1 {
		t.Error("not counted")
	}
}

// TestForeignPluginAnswersLate has one that is alive but says nothing when it is first asked.
func TestForeignPluginAnswersLate(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.startKubelet()
	path := filepath.Join(f.dir, "nvidia-gpu.sock")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	p, _ := f.start()
	f.awaitReady(p, "")
	_, stop := f.serveOther(listener, uuid(0))
	f.awaitReady(p, path)
	stop()
	f.awaitReady(p, "")
}

// A plugin that is still starting may have no devices when it is first asked. So it is asked again.
func TestForeignPluginGetsDevicesLater(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	listener, err := net.Listen("unix", filepath.Join(f.dir, "nvidia-gpu.sock"))
	if err != nil {
		t.Fatal(err)
	}
	other := &otherPlugin{asked: newObservable(0)}
	f.serve(listener, other)
	p, err := New(f.config)
	if err != nil {
		t.Fatal(err)
	}
	p.times.pluginProbe = patience
	for _, ids := range [][]string{nil, {uuid(0)}} {
		other.ids = ids
		if found, settled := lookOnce(p); (found != nil) != (len(ids) > 0) || !settled {
			t.Errorf("with the devices %q: settled %v, %v", ids, settled, found)
		}
	}
}

// However many resources are served, another plugin is asked once.
func TestForeignPluginIsAskedOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	asked, _ := f.startOther("nvidia-gpu.sock", "nic-0")
	p, err := New(f.config)
	if err != nil {
		t.Fatal(err)
	}
	p.times.pluginProbe = patience
	var looking sync.WaitGroup
	for range 16 {
		looking.Go(func() {
			if other, settled := lookOnce(p); other != nil || !settled {
				t.Errorf("settled %v, %v", settled, other)
			}
		})
	}
	looking.Wait()
	if n := asked(); n != 1 {
		t.Errorf("was asked %d times", n)
	}
}

func TestForeignWhileNoGPUIsKnown(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.inventory.set(func(device.Inventory) device.Inventory { return device.Inventory{} })
	f.startKubelet()
	_, stopOther := f.startOther("nvidia-gpu.sock", "GPU-x")
	p, _ := f.start()
	f.awaitReady(p, "nvidia-gpu.sock")
	stopOther()
	f.awaitReady(p, "")
}

// A mount of a removed directory still exists, and so does an open one.
func TestADirectoryThatIsGone(t *testing.T) {
	path := t.TempDir()
	open, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	held := fmt.Sprintf("/proc/self/fd/%d", open.Fd())
	if gone(path) || gone(held) {
		t.Error("gone before it was removed")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(held); err != nil || !gone(path) || !gone(held) {
		t.Errorf("there after it was removed (%v)", err)
	}
}

// Where inotify has run out, as on nodes with many watchers.
func TestWithoutNotifications(t *testing.T) {
	t.Cleanup(func() { filewatch.NewWatcher = fsnotify.NewWatcher })
	filewatch.NewWatcher = func() (*fsnotify.Watcher, error) { return nil, unix.EMFILE }
	t.Run("again", TestRegistersAgain)
	t.Run("late", TestKubeletTurnsUpLate)
	t.Run("directory", TestDirectory)
}

// TestStopDoesNotWaitForKubelet: no registration follows a stop, so a kubelet that keeps its connection must not delay it.
func TestStopDoesNotWaitForKubelet(t *testing.T) {
	t.Parallel()
	eachRelease(t, func(t *testing.T, release kubeletRelease) {
		f := newFixture(t, release)
		f.startKubelet()
		_, stop := f.start(func(t *times) { t.callDrain, t.drain = 2*patience, 2*patience })
		f.await("the list", healthyCount(8))
		f.kubelet.Freeze()
		defer f.kubelet.Thaw()
		began := time.Now()
		stop()
		if took := time.Since(began); took > patience {
			t.Errorf("stop took %s", took)
		}
	})
}
