// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// otherPlugin is the registration server of another process.
type otherPlugin struct {
	registerapi.UnimplementedRegistrationServer
	info  *registerapi.PluginInfo
	asked *atomic.Int32
}

func (p otherPlugin) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	if p.asked != nil {
		p.asked.Add(1)
	}
	return p.info, nil
}

func serveOther(t *testing.T, path, kind, name string) (stop func()) {
	t.Helper()
	return serveCounting(t, path, kind, name, nil)
}

// serveCounting counts the calls, too.
func serveCounting(t *testing.T, path, kind, name string, asked *atomic.Int32) (stop func()) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	// The rename replaces the socket in one step: our agent must not notice a missing socket first.
	elsewhere := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", elsewhere)
	if err != nil {
		t.Fatal(err)
	}
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := os.Rename(elsewhere, path); err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	registerapi.RegisterRegistrationServer(server, otherPlugin{info: &registerapi.PluginInfo{Type: kind, Name: name}, asked: asked})
	go server.Serve(listener)
	stop = sync.OnceFunc(func() {
		server.Stop()
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// listenSilently accepts connections and never answers.
func listenSilently(t *testing.T, path string) (stop func()) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	return func() { listener.Close() }
}

func TestConflictingDriverIsAwaited(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(t *testing.T, dir string) (socket string, stop func()){
		"registration under our file name": func(t *testing.T, dir string) (string, func()) {
			return kubeletSocket(dir), serveOther(t, kubeletSocket(dir), registerapi.DRAPlugin, "gpu.nvidia.com")
		},
		"registration under another file name": func(t *testing.T, dir string) (string, func()) {
			path := filepath.Join(dir, "plugins_registry", "gpu.nvidia.com-1234-reg.sock")
			return path, serveOther(t, path, registerapi.DRAPlugin, "gpu.nvidia.com")
		},
		"registration in a directory": func(t *testing.T, dir string) (string, func()) {
			path := filepath.Join(dir, "plugins_registry", "deep", "reg.sock")
			return path, serveOther(t, path, registerapi.DRAPlugin, "gpu.nvidia.com")
		},
		"service socket that never answers": func(t *testing.T, dir string) (string, func()) {
			path := filepath.Join(dir, "plugins", "gpu.nvidia.com", "dra.sock")
			return path, listenSilently(t, path)
		},
		"service socket of a rolling update": func(t *testing.T, dir string) (string, func()) {
			path := filepath.Join(dir, "plugins", "gpu.nvidia.com", "dra-1234.sock")
			return path, listenSilently(t, path)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, machine(2))
			socket, stop := start(t, r.dir)
			r.run()
			var conflicting *ConflictingDriverError
			eventually(t, "Ready to name the other process", func() error {
				if err := r.driver.Ready(); !errors.As(err, &conflicting) {
					return fmt.Errorf("Ready: %v", err)
				}
				return nil
			})
			if conflicting.Socket != socket || !strings.Contains(conflicting.Error(), "uninstall one of the two") {
				t.Error(conflicting)
			}
			eventually(t, "an event on the node", func() error {
				if !strings.Contains(r.events.all(), "Node/node1 ConflictingDriver: another process serves DRA driver gpu.nvidia.com on this node at "+socket) {
					return errors.New(r.events.all())
				}
				return nil
			})
			if got := r.published(); got != "" {
				t.Error("published beside another driver:", got)
			}
			// The other process may give any GPU away, also one that a pod requests.
			if err := r.ledger.Withheld(); err == nil || !strings.Contains(err.Error(), socket) {
				t.Errorf("devices are given away beside another driver: %v", err)
			}
			if n := r.adoptions.Load(); n > 0 {
				t.Errorf("%d adoptions beside another driver", n)
			}
			stop()
			r.ready()
			if err := r.ledger.Withheld(); err != nil || r.adoptions.Load() != 2 {
				t.Errorf("Withheld is %v after %d adoptions, of which the first failed", err, r.adoptions.Load())
			}
			r.awaitPublished(names(2, nil))
		})
	}
}

// A driver that was made while another withheld devices takes over from the conflicting one, which is gone by then.
func TestNextDriverTakesOver(t *testing.T) {
	r := newRig(t, machine(1))
	ctx, cancel := context.WithCancel(t.Context())
	stop := serveOther(t, kubeletSocket(r.dir), registerapi.DRAPlugin, "gpu.nvidia.com")
	r.driver.FindConflicting(ctx)
	cancel()
	stop()
	config := r.driver.Config
	config.Registerer = prometheus.NewRegistry()
	next, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	next.takeOver = time.Millisecond
	for range 2 { // the first adoption fails
		if r.ledger.Withheld() == nil {
			t.Error("devices are given away before what the other gave is known")
		}
		next.FindConflicting(t.Context())
	}
	if err := r.ledger.Withheld(); err != nil || r.adoptions.Load() != 2 {
		t.Errorf("Withheld is %v after %d adoptions", err, r.adoptions.Load())
	}
}

// What a conflicting driver gave away is adopted only if it is still gone a while later.
func TestConflictingDriverComesBack(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(1))
	stop := serveOther(t, kubeletSocket(r.dir), registerapi.DRAPlugin, "gpu.nvidia.com")
	r.driver.FindConflicting(t.Context())
	stop()
	r.driver.takeOver = 2 * time.Second
	done := make(chan struct{})
	go func() { defer close(done); r.driver.FindConflicting(t.Context()) }()
	time.Sleep(r.driver.takeOver / 4)
	serveOther(t, kubeletSocket(r.dir), registerapi.DRAPlugin, "gpu.nvidia.com")
	<-done
	if r.ledger.Withheld() == nil || r.adoptions.Load() > 0 {
		t.Errorf("Withheld is %v after %d adoptions", r.ledger.Withheld(), r.adoptions.Load())
	}
}

// A conflicting driver that does not answer in time is not gone.
func TestSlowConflictingDriver(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(1))
	path := filepath.Join(r.dir, "plugins_registry", "other-reg.sock")
	stop := serveOther(t, path, registerapi.DRAPlugin, "gpu.nvidia.com")
	r.driver.FindConflicting(t.Context())
	stop()
	stop = listenSilently(t, path)
	r.driver.socketTimeout = 100 * time.Millisecond
	for range 2 {
		r.driver.FindConflicting(t.Context())
	}
	if r.ledger.Withheld() == nil || r.adoptions.Load() > 0 {
		t.Errorf("Withheld is %v after %d adoptions", r.ledger.Withheld(), r.adoptions.Load())
	}
	stop()
	for range 2 { // the first adoption fails
		r.driver.FindConflicting(t.Context())
	}
	if err := r.ledger.Withheld(); err != nil {
		t.Error(err)
	}
}

// While the ledger withholds devices, all devices are tainted, a claim of before is prepared again, and a new one waits.
func TestWithheldDevices(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(2))
	r.run()
	kubelet := r.ready()
	refused := func(claim *resourceapi.ResourceClaim) error {
		t.Helper()
		_, errs, err := kubelet.prepare("v1", claim)
		return errors.Join(err, errs[string(claim.UID)])
	}
	before := r.claim("before", "gpu-0")
	if err := refused(before); err != nil {
		t.Fatal(err)
	}
	r.ledger.Withhold("test", errors.New("another plugin"))
	r.awaitPublished("gpu-0!unhealthy gpu-1!unhealthy")
	if err := refused(before); err != nil {
		t.Error(err)
	}
	late := r.claim("late", "gpu-1")
	if err := refused(late); err == nil || !strings.Contains(err.Error(), "events of the node") {
		t.Errorf("a new claim is prepared: %v", err)
	}
	if events := r.events.all(); !strings.Contains(events, "team-a/late DevicesWithheld") || strings.Contains(events, "another plugin") {
		t.Errorf("a tenant reads %s", events)
	}
	if conflicts := r.ledger.Conflicts(); len(conflicts) > 0 {
		t.Errorf("conflicts: %v", conflicts)
	}
	r.ledger.Withhold("test", nil)
	r.awaitPublished(names(2, nil))
	if err := refused(late); err != nil {
		t.Error(err)
	}
}

func TestOldSocketsAndOtherDriversDoNotConflict(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(2))
	for _, path := range []string{kubeletSocket(r.dir), filepath.Join(r.dir, "plugins", "gpu.nvidia.com", "dra.sock")} {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		listener.SetUnlinkOnClose(false)
		listener.Close()
	}
	registry := filepath.Join(r.dir, "plugins_registry")
	serveOther(t, filepath.Join(registry, "csi.sock"), registerapi.CSIPlugin, "gpu.nvidia.com")
	serveOther(t, filepath.Join(registry, "compute-domain.sock"), registerapi.DRAPlugin, "compute-domain.nvidia.com")
	listenSilently(t, filepath.Join(registry, "slow.sock"))
	r.driver.socketTimeout = time.Second
	if err := os.WriteFile(filepath.Join(registry, "note.txt"), []byte("gpu.nvidia.com"), 0o644); err != nil {
		t.Fatal(err)
	}
	r.run().ready()
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(r.events.all(), "ConflictingDriver") {
		t.Error(r.events.all())
	}
}

// A registration socket of another driver is asked once for each file: some plugins log every call.
func TestOtherDriversAreAskedOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(2), func(c *Config) { c.CheckInterval = 20 * time.Millisecond })
	path := filepath.Join(r.dir, "plugins_registry", "csi.sock")
	var first, second atomic.Int32
	stop := serveCounting(t, path, registerapi.CSIPlugin, "csi.example.com", &first)
	r.run()
	// Once before the servers start, and once by the session.
	askedOnly(t, r, &first, 2)
	stop()
	serveCounting(t, path, registerapi.CSIPlugin, "csi.example.com", &second)
	askedOnly(t, r, &second, 1)
	// A third socket gets the inode of the second. Only its modification time differs.
	if err := os.Chtimes(path, time.Now(), time.Now().Add(time.Second)); err != nil {
		t.Fatal(err)
	}
	askedOnly(t, r, &second, 2)
}

// askedOnly waits until a plugin was asked that often, and a while longer.
func askedOnly(t *testing.T, r *rig, asked *atomic.Int32, want int32) {
	t.Helper()
	eventually(t, "calls of GetInfo", func() error {
		if n := asked.Load(); n < want {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	time.Sleep(10 * r.driver.CheckInterval)
	if n := asked.Load(); n != want {
		t.Errorf("asked %d times, want %d", n, want)
	}
}

// NVIDIA's driver, installed later, removes our registration socket and listens in its place.
func TestConflictingDriverThatComesLater(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(2)).run()
	r.ready()
	stop := serveOther(t, kubeletSocket(r.dir), registerapi.DRAPlugin, "gpu.nvidia.com")
	eventually(t, "Ready to name the other process", func() error {
		var conflicting *ConflictingDriverError
		if err := r.driver.Ready(); !errors.As(err, &conflicting) {
			return fmt.Errorf("Ready: %v", err)
		}
		return nil
	})
	eventually(t, "our sockets to go and theirs to stay", func() error {
		if left := socketsBelow(t, r.dir); len(left) != 1 || left[0] != kubeletSocket(r.dir) {
			return fmt.Errorf("sockets %v", left)
		}
		return nil
	})
	stop()
	r.ready()
}

// A call that waits for the driver of NVIDIA ends late. Limits get nothing meanwhile.
func TestConflictingDriverDuringACall(t *testing.T) {
	t.Parallel()
	entered, leave := make(chan struct{}), make(chan struct{})
	r := newRig(t, machine(2), func(c *Config) {
		c.HandOver = func(context.Context, string) error {
			close(entered)
			<-leave
			return nil
		}
	}).run()
	k := r.ready()
	c := r.claim("a", "gpu-0")
	ended := make(chan struct{})
	go func() { defer close(ended); _, _, _ = k.prepare("v1", c) }()
	<-entered
	stop := serveOther(t, kubeletSocket(r.dir), registerapi.DRAPlugin, "gpu.nvidia.com")
	defer func() { stop(); <-ended }()
	defer close(leave)
	eventually(t, "devices to be withheld", func() error {
		if r.ledger.Withheld() == nil {
			return errors.New("nothing is withheld")
		}
		return nil
	})
}

func TestRemovedSocketsComeBack(t *testing.T) {
	t.Parallel()
	for name, path := range map[string]string{"registration": "plugins_registry/gpu.nvidia.com-reg.sock", "service": "plugins/gpu.nvidia.com/dra.sock"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, machine(2)).run()
			r.ready()
			if err := os.Remove(filepath.Join(r.dir, path)); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the socket", func() error {
				_, err := os.Stat(filepath.Join(r.dir, path))
				return err
			})
			k := r.ready()
			if _, errs, err := k.prepare("v1", r.claim("a", "gpu-0")); err != nil || len(errs) > 0 {
				t.Error(err, errs)
			}
		})
	}
}

func TestMissingKubeletDirectory(t *testing.T) {
	r := newRig(t, machine(2))
	r.driver.KubeletDir = filepath.Join(r.dir, "misspelt")
	err := r.driver.Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "misspelt") {
		t.Error(err)
	}
	if _, err := os.Stat(r.driver.KubeletDir); err == nil {
		t.Error("a misspelt kubelet directory was made")
	}
}

func TestKubeletDirectoryWithALongPath(t *testing.T) {
	config := newRig(t, machine(1)).driver.Config
	config.KubeletDir = "/" + strings.Repeat("d", 90)
	if _, err := New(config); err == nil || !strings.Contains(err.Error(), "longer than the 107 bytes") {
		t.Error(err)
	}
}
