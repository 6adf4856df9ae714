// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// configured is an agent that follows its settings and serves nothing.
type configured struct {
	*Agent
	t      *testing.T
	file   string
	events *record.FakeRecorder
	served chan config.Config
	ended  chan error
	gpus   *gpus
	// hangs is whether a thread of the agent waits for the driver.
	hangs atomic.Bool
}

// gpus are the node's.
type gpus struct {
	changed broadcast.Signal
	mu      sync.Mutex
	list    []device.GPU
}

func (g *gpus) Changed() <-chan struct{} { return g.changed.Changed() }

func (g *gpus) Inventory() device.Inventory {
	g.mu.Lock()
	defer g.mu.Unlock()
	return device.Inventory{GPUs: g.list}
}

func (g *gpus) set(list ...device.GPU) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.list = list
	g.changed.Notify()
}

var gpuA, gpuB = device.GPU{UUID: "GPU-a", Index: 0}, device.GPU{UUID: "GPU-b", Index: 1}

func follow(t *testing.T, file string, labels map[string]string) *configured {
	t.Helper()
	return followOn(t, file, labels, gpuA, gpuB)
}

func followOn(t *testing.T, file string, labels map[string]string, list ...device.GPU) *configured {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	writeConfigMap(t, path, file)
	return followWith(t, path, []string{"--config=" + path, "--run-dir=" + t.TempDir()}, labels, list...)
}

// followWith starts an agent with these flags. edit writes the file.
func followWith(t *testing.T, file string, args []string, labels map[string]string, list ...device.GPU) *configured {
	t.Helper()
	args = append(args, "--node-name=node-1", "--kubeconfig="+nodeConfig(t).Kubeconfig, "--http-endpoint=")
	noVariable := func(string) (string, bool) { return "", false }
	loaded, err := config.Load(args, noVariable, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	a, err := newAgent(loaded)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.events.Shutdown)
	c := &configured{
		Agent: a, t: t, file: file, events: record.NewFakeRecorder(100), served: make(chan config.Config, 1), ended: make(chan error, 1),
		gpus: &gpus{list: list},
	}
	a.recorder = c.events
	a.stuck = func(context.Context) []int {
		if c.hangs.Load() {
			return []int{7}
		}
		return nil
	}
	a.reload = func(name string) (config.Chosen, error) { return config.LoadChosen(args, noVariable, name) }
	a.client = fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "uid", Labels: labels}})
	ctx, cancel := context.WithCancel(context.Background())
	self := podstate.NewNode(a.client, "node-1")
	watched := make(chan error, 1)
	go func() { watched <- self.Run(ctx) }()
	group, groupCtx := errgroup.WithContext(ctx)
	if loaded.Unchosen {
		group.Go(func() error { return a.choose(groupCtx, self) })
	}
	group.Go(func() error {
		return a.serveConfigured(groupCtx, self, c.gpus, func(ctx context.Context, current config.Config) error {
			c.served <- current
			<-ctx.Done()
			return nil
		})
	})
	go func() { c.ended <- group.Wait() }()
	t.Cleanup(func() { cancel(); <-watched })
	return c
}

func (c *configured) label(value string) {
	c.t.Helper()
	c.setLabels(map[string]string{config.ModeLabel: value})
}

func (c *configured) setLabels(labels map[string]string) {
	c.t.Helper()
	node, err := c.client.CoreV1().Nodes().Get(c.t.Context(), "node-1", metav1.GetOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	node.Labels = labels
	if _, err := c.client.CoreV1().Nodes().Update(c.t.Context(), node, metav1.UpdateOptions{}); err != nil {
		c.t.Fatal(err)
	}
}

func (c *configured) edit(file string) {
	c.t.Helper()
	writeConfigMap(c.t, c.file, file)
}

// writeConfigMap replaces a file as kubelet does: it writes a new directory, then replaces the symbolic link to it.
func writeConfigMap(t *testing.T, path, content string) {
	t.Helper()
	dir, name := filepath.Split(path)
	data, err := os.MkdirTemp(dir, "..data_")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(data, name), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Base(data), data+".link"); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(data+".link", filepath.Join(dir, "..data")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join("..data", name), path); err != nil && !errors.Is(err, os.ErrExist) {
		t.Fatal(err)
	}
}

func (c *configured) serves(want config.Mode) {
	c.t.Helper()
	select {
	case got := <-c.served:
		if got.Mode != want {
			c.t.Errorf("serves %s, want %s", got.Mode, want)
		}
	case err := <-c.ended:
		c.t.Fatalf("ended: %v", err)
	case <-time.After(time.Minute):
		c.t.Fatal("serves nothing")
	}
	c.shows(`tandem_mode{mode="` + string(want) + `"} 1`)
}

// shows looks for a line of the metrics.
func (c *configured) shows(line string) {
	c.t.Helper()
	families, err := c.metrics.Gather()
	if err != nil {
		c.t.Fatal(err)
	}
	var text strings.Builder
	for _, family := range families {
		if _, err := expfmt.MetricFamilyToText(&text, family); err != nil {
			c.t.Fatal(err)
		}
	}
	if !strings.Contains(text.String(), line+"\n") {
		c.t.Errorf("%s is not among the metrics", line)
	}
}

func (c *configured) event() string {
	c.t.Helper()
	select {
	case event := <-c.events.Events:
		return event
	case <-time.After(time.Minute):
		c.t.Fatal("no event")
		return ""
	}
}

func (c *configured) rejects(want string) {
	c.t.Helper()
	select {
	case event := <-c.events.Events:
		if !strings.Contains(event, "ConfigRejected") || !strings.Contains(event, want) {
			c.t.Errorf("event %q, want %s", event, want)
		}
	case err := <-c.ended:
		c.t.Fatalf("ended: %v", err)
	case <-time.After(time.Minute):
		c.t.Fatal("no event")
	}
	c.shows("tandem_config_rejected 1")
}

func (c *configured) startsAnew() {
	c.t.Helper()
	select {
	case err := <-c.ended:
		if !errors.Is(err, errReconfigured) {
			c.t.Errorf("ended: %v", err)
		}
	case <-time.After(30 * time.Second):
		c.t.Fatal("the agent does not restart")
	}
}

func TestModeChanges(t *testing.T) {
	const rules = "tandem: {devices: [{match: {index: 0}, use: limits}]}"
	t.Run("label", func(t *testing.T) {
		c := follow(t, rules, nil)
		c.serves(config.ModeDual)
		c.label("split")
		c.rejects(`"split" is not one of`)
		c.label("Split")
		c.startsAnew()
	})
	t.Run("file", func(t *testing.T) {
		c := follow(t, "version: v1\n", nil)
		c.serves(config.ModeDual)
		c.edit("tandem: {mode: Split, devices: [{match: {index: 7}, use: limits}]}")
		c.rejects("no GPU of this node has index 7")
		c.edit("tandem: {mode: Split, devices: [{match: {index: 0}, use: limits}, {match: {uuid: GPU-a}, use: claims}]}")
		c.rejects("set different uses for GPU GPU-a")
		c.edit("tandem: {moed: Split}")
		c.rejects("moed")
		c.edit("tandem: {mode: DevicePluginOnly}")
		c.startsAnew()
	})
	t.Run("the label wins over the file", func(t *testing.T) {
		c := follow(t, "tandem: {mode: DevicePluginOnly}", map[string]string{config.ModeLabel: "ClaimsOnly"})
		c.serves(config.ModeClaimsOnly)
		// Nothing changes for this node; the wrong file after it is the first that is noticed.
		c.edit("tandem: {mode: Dual}")
		c.edit("tandem: {mode: }}")
		c.rejects("config.yaml")
		c.label("Dual")
		c.edit("tandem: {mode: ClaimsOnly}")
		c.startsAnew()
	})
	t.Run("wrong from the start", func(t *testing.T) {
		c := follow(t, "version: v1\n", map[string]string{config.ModeLabel: "Split"})
		// Holders that have a GPU are served. New claims and pods get none.
		gpu := device.GPU{UUID: "GPU-a"}
		if got := <-c.served; got.Mode.Claims() || got.Mode.Limits() || got.OfferedToClaims(gpu) || got.OfferedToPods(gpu) {
			t.Errorf("serves %+v", got)
		}
		c.rejects("tandem.devices: is required")
		if err := c.status.Ready(); err == nil || !strings.Contains(err.Error(), "mode: node label tandem-gpu.dev/mode=Split") {
			t.Errorf("ready: %v", err)
		}
		c.edit(rules)
		c.startsAnew()
	})
	t.Run("a lost GPU stops no other", func(t *testing.T) {
		c := follow(t, "tandem: {mode: Split, devices: [{match: {index: 7}, use: limits}]}", nil)
		c.serves(config.ModeSplit)
		if event := <-c.events.Events; !strings.Contains(event, "Warning ConfigMatchesNothing") {
			t.Errorf("event %q", event)
		}
	})
	t.Run("edited while a GPU was lost", func(t *testing.T) {
		c := followOn(t, "version: v1\n", nil, gpuA)
		c.serves(config.ModeDual)
		c.edit("tandem: {mode: Split, devices: [{match: {uuid: GPU-b}, use: limits}]}")
		c.rejects("no GPU of this node has uuid")
		c.gpus.set(gpuA, gpuB)
		c.startsAnew()
	})
	t.Run("contradictory while a GPU is missing", func(t *testing.T) {
		moved := gpuB
		moved.Index = 0
		c := followOn(t, "tandem: {mode: Split, devices: [{match: {index: 0}, use: limits}, {match: {uuid: GPU-b}, use: claims}]}", nil, moved)
		<-c.served
		c.rejects("set different uses for GPU GPU-b")
		c.gpus.set(gpuA, gpuB)
		c.startsAnew()
	})
	t.Run("edited while a driver call does not return", func(t *testing.T) {
		c := follow(t, "version: v1\n", nil)
		c.serves(config.ModeDual)
		c.hangs.Store(true)
		for _, mode := range []string{"ClaimsOnly", "DevicePluginOnly"} {
			c.edit("tandem: {mode: " + mode + "}")
			if mode == "ClaimsOnly" {
				if event := <-c.events.Events; !strings.Contains(event, "Warning ConfigPostponed") {
					t.Errorf("event %q", event)
				}
			}
		}
		c.hangs.Store(false)
		c.edit("tandem: {mode: ClaimsOnly}")
		c.startsAnew()
		select {
		case event := <-c.events.Events:
			t.Errorf("event %q", event)
		default:
		}
	})
	t.Run("dynamic MIG where there is none", func(t *testing.T) {
		c := follow(t, "tandem: {devices: [{match: {model: A30}, mig: dynamic}]}", nil)
		c.serves(config.ModeDual)
		if event := <-c.events.Events; !strings.Contains(event, `Normal ConfigMatchesNothing tandem.devices[0].match: no GPU of this node has model "A30"`) {
			t.Errorf("event %q", event)
		}
	})
}

// The node's label selects a file of a directory. The agent starts again with the file, and without the API server it starts with the
// last one.
func TestChosenConfiguration(t *testing.T) {
	dir, run := t.TempDir(), t.TempDir()
	put := func(name, content string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, ".new"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, ".new"), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	put("default", "tandem: {mode: ClaimsOnly}")
	put("limits", "tandem: {mode: DevicePluginOnly}")
	put("wrong", "tandem: {moed: Dual}")
	labelled := func(name string) map[string]string { return map[string]string{config.ConfigLabel: name} }
	begin := func(labels map[string]string) *configured {
		return followWith(t, filepath.Join(dir, "limits"), []string{"--config-dir=" + dir, "--run-dir=" + run}, labels, gpuA)
	}
	c := begin(nil)
	c.startsAnew()
	c = begin(nil)
	c.serves(config.ModeClaimsOnly)
	c.setLabels(labelled("absent"))
	c.rejects("node label nvidia.com/device-plugin.config=absent: " + dir + " has no such configuration, only default, limits, wrong")
	c.setLabels(labelled("wrong"))
	c.rejects("moed")
	c.setLabels(labelled("limits"))
	c.startsAnew()
	// The label is not known at first.
	c = begin(labelled("limits"))
	c.serves(config.ModeDevicePluginOnly)
	put("limits", "tandem: {mode: Dual}")
	c.startsAnew()
	// An agent starts with the recorded configuration, even if the file is missing or wrong.
	if err := os.Remove(filepath.Join(dir, "limits")); err != nil {
		t.Fatal(err)
	}
	c = begin(labelled("limits"))
	c.serves(config.ModeDual)
	c.rejects("has no such configuration")
	c.setLabels(nil)
	c.startsAnew()
	put("default", "tandem: {moed: Dual}")
	c = begin(nil)
	c.serves(config.ModeClaimsOnly)
	c.rejects("moed")
	// Without a record nothing is served until something is chosen.
	run = t.TempDir()
	c = begin(nil)
	if got := <-c.served; got.Mode.Claims() || got.Mode.Limits() {
		t.Errorf("serves %+v", got)
	}
	c.rejects("moed")
	if err := c.status.Ready(); err == nil || !strings.Contains(err.Error(), "no valid configuration is selected for this node") {
		t.Errorf("ready: %v", err)
	}
	put("default", "tandem: {mode: Dual}")
	c.startsAnew()
}

// The configuration says where the driver is. So it is selected before a driver is found, with and without GPUs that claims have, and a
// recorded one with a wrong path is corrected.
func TestChosenBeforeTheDriver(t *testing.T) {
	for _, test := range []struct{ held, unchosen bool }{{false, true}, {true, true}, {false, false}, {true, false}} {
		held := test.held
		c := nodeConfig(t)
		c.ConfigDir, c.Unchosen = t.TempDir(), test.unchosen
		if err := os.WriteFile(filepath.Join(c.ConfigDir, "default"), []byte("flags: {nvidiaDriverRoot: /opt/driver}"), 0o600); err != nil {
			t.Fatal(err)
		}
		a, err := newAgent(c)
		if err != nil {
			t.Fatal(err)
		}
		a.client = fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: c.NodeName, UID: "n"}})
		a.reload = func(name string) (config.Chosen, error) {
			next := config.Chosen{Config: c}
			next.ConfigName, next.Unchosen, next.DriverRoot = name, false, "/opt/driver"
			return next, nil
		}
		if held {
			hold(t, c, a.bootID, ledger.ClaimRequest{UID: "c1", Namespace: "apps", Name: "one", Devices: []device.Ref{{GPU: "GPU-0"}}})
		}
		running := runAgent(t, a)
		select {
		case err := <-running.done:
			if !errors.Is(err, errReconfigured) {
				t.Errorf("held %t: ended with %v", held, err)
			}
		case <-time.After(time.Minute):
			t.Fatalf("held %t: nothing is chosen", held)
		}
		running.cancel()
		if _, err := os.Stat(filepath.Join(c.RunDir, "config.json")); err != nil {
			t.Errorf("held %t: %v", held, err)
		}
	}
}

// A setting that changes nothing is reported once.
func TestSettingsWithoutEffect(t *testing.T) {
	c := follow(t, "flags: {failOnInitError: true}", nil)
	c.serves(config.ModeDual)
	reports := func(want string) {
		t.Helper()
		if event := c.event(); !strings.HasPrefix(event, "Warning ConfigWithoutEffect These settings of the node's configuration, flags or environment are ignored, and can be removed: "+want) {
			t.Errorf("event %q, want %s", event, want)
		}
	}
	reports("flags.failOnInitError: ")
	c.edit("flags: {failOnInitError: true, mpsRoot: /mps}")
	reports("flags.failOnInitError: the agent waits for the driver and its GPUs; flags.mpsRoot: ")
	c.edit("tandem: {mode: }}")
	c.rejects("config.yaml")
}

// TestRetire: the plugin of a node that serves limits no more runs as long as a limit has a device, and no longer: one of before, or one
// that another plugin gave away and that is adopted later.
func TestRetire(t *testing.T) {
	book, err := ledger.Open(t.Context(), ledger.Options{Dir: t.TempDir(), BootID: "boot", PodStates: anything{}})
	if err != nil {
		t.Fatal(err)
	}
	defer book.Close()
	ctx, cancel := context.WithCancel(t.Context())
	events, done := make(chan string), make(chan error, 1)
	run := func(ctx context.Context) error {
		events <- "starts"
		<-ctx.Done()
		events <- "ends"
		return nil
	}
	next := func(want string) {
		t.Helper()
		select {
		case got := <-events:
			if got != want {
				t.Fatalf("%s, want %s", got, want)
			}
		case err := <-done:
			t.Fatalf("returned: %v", err)
		case <-time.After(time.Minute):
			t.Fatalf("nothing %s", want)
		}
	}
	go func() { done <- retire(ctx, book, run) }()
	for range 2 {
		if err := book.ReservePod([]ledger.PodRequest{{ID: "GPU-a", Resource: "nvidia.com/gpu", Device: device.Ref{GPU: "GPU-a"}}}); err != nil {
			t.Fatal(err)
		}
		next("starts")
		for _, h := range book.Holds() {
			if err := book.Release(h); err != nil {
				t.Fatal(err)
			}
		}
		next("ends")
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	failing := func(context.Context) error { return errNotStarted }
	if err := book.ReservePod([]ledger.PodRequest{{ID: "GPU-a", Resource: "nvidia.com/gpu", Device: device.Ref{GPU: "GPU-a"}}}); err != nil {
		t.Fatal(err)
	}
	if err := retire(t.Context(), book, failing); !errors.Is(err, errNotStarted) {
		t.Errorf("a plugin that fails: %v", err)
	}
}
