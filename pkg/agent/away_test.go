// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// deviceManager is the part of kubelet that plugins register with. It keeps the newest list of the newest plugin.
type deviceManager struct {
	pluginapi.UnimplementedRegistrationServer
	t         *testing.T
	directory string

	// reading are the streams of plugins, which end with ctx.
	reading sync.WaitGroup
	ctx     context.Context

	mu      sync.Mutex
	plugin  pluginapi.DevicePluginClient
	devices map[string]string
}

// startDeviceManager returns a kubelet, and how to stop it before the agent.
func startDeviceManager(t *testing.T, c config.Config) (k *deviceManager, stop func()) {
	t.Helper()
	k = &deviceManager{t: t, directory: filepath.Join(c.KubeletDir, "device-plugins")}
	listener, err := net.Listen("unix", filepath.Join(k.directory, "kubelet.sock"))
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	pluginapi.RegisterRegistrationServer(server, k)
	ctx, cancel := context.WithCancel(context.Background())
	k.ctx = ctx
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	stop = sync.OnceFunc(func() { server.Stop(); <-ended; cancel(); k.reading.Wait() })
	t.Cleanup(stop)
	return k, stop
}

func (k *deviceManager) Register(_ context.Context, r *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	conn, err := grpc.NewClient("unix://"+filepath.Join(k.directory, r.GetEndpoint()), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	plugin := pluginapi.NewDevicePluginClient(conn)
	stream, err := plugin.ListAndWatch(k.ctx, &pluginapi.Empty{})
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	k.reading.Go(func() {
		defer func() { _ = conn.Close() }()
		for {
			list, err := stream.Recv()
			if err != nil {
				return
			}
			devices := map[string]string{}
			for _, d := range list.GetDevices() {
				devices[d.GetID()] = d.GetHealth()
			}
			k.mu.Lock()
			k.plugin, k.devices = plugin, devices
			k.mu.Unlock()
		}
	})
	return &pluginapi.Empty{}, nil
}

// await waits until the newest list is the one wanted.
func (k *deviceManager) await(want map[string]string) pluginapi.DevicePluginClient {
	k.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		k.mu.Lock()
		plugin, devices := k.plugin, k.devices
		k.mu.Unlock()
		if maps.Equal(devices, want) {
			return plugin
		}
		if time.Now().After(deadline) {
			k.t.Fatalf("kubelet has %v, want %v", devices, want)
		}
	}
}

// awayNode is a node with four GPUs, of which a pod has one and a claim another. It returns their UUIDs: the pod's first.
func awayNode(t *testing.T) (config.Config, []string) {
	t.Helper()
	c := nodeConfig(t)
	simulatedMachine(t, &c)
	a, err := newAgent(c)
	if err != nil {
		t.Fatal(err)
	}
	a.events.Shutdown()
	node := nvml.New(nodeOptions(a.config, a.openDriver))
	if err := node.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	var uuids []string
	for _, g := range node.Inventory().GPUs {
		uuids = append(uuids, g.UUID)
	}
	book, err := ledger.Open(t.Context(), ledger.Options{Dir: c.RunDir, BootID: a.bootID, PodStates: anything{}})
	if err != nil {
		t.Fatal(err)
	}
	pod := ledger.PodRequest{ID: uuids[0], Resource: "nvidia.com/gpu", Device: device.Ref{GPU: uuids[0]}}
	if err := book.ReservePod([]ledger.PodRequest{pod}); err != nil {
		t.Fatal(err)
	}
	claim := ledger.ClaimRequest{UID: "c1", Namespace: "apps", Name: "one", Devices: []device.Ref{{GPU: uuids[1]}}}
	if _, err := book.ReserveClaim(t.Context(), claim); err != nil {
		t.Fatal(err)
	}
	if err := book.Close(); err != nil {
		t.Fatal(err)
	}
	return c, uuids
}

// impatient is an agent that does not wait for the API server.
func impatient(t *testing.T, c config.Config) *Agent {
	t.Helper()
	a, err := newAgent(c)
	if err != nil {
		t.Fatal(err)
	}
	a.times.answerWait = time.Millisecond
	return a
}

// heldOnly is the list of an agent that does not know the node's pods yet.
func heldOnly(uuids []string) map[string]string {
	devices := map[string]string{}
	for _, uuid := range uuids {
		devices[uuid] = pluginapi.Unhealthy
	}
	devices[uuids[0]] = pluginapi.Healthy
	return devices
}

// allButTheClaims is the list of an agent that serves all GPUs but that of the claim.
func allButTheClaims(uuids []string) map[string]string {
	devices := heldOnly(uuids)
	devices[uuids[2]], devices[uuids[3]] = pluginapi.Healthy, pluginapi.Healthy
	return devices
}

// checkpointOf is kubelet's device checkpoint when it has given a GPU to a container of pod p1.
func checkpointOf(container, uuid string) string {
	return fmt.Sprintf(`{"Data":{"PodDeviceEntries":[{"PodUID":"p1","ContainerName":%q,"ResourceName":"nvidia.com/gpu","DeviceIDs":{"0":[%q]}}],"RegisteredDevices":{}},"Checksum":1}`, container, uuid)
}

// besidePendingPod is an agent on the node of pod p1, which kubelet has not started.
func besidePendingPod(t *testing.T, c config.Config) *Agent {
	t.Helper()
	a, err := newAgent(c)
	check(t, err)
	a.client = fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: c.NodeName, UID: "n"}}, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "apps", Name: "one", UID: "p1"},
		Spec:       corev1.PodSpec{NodeName: c.NodeName}, Status: corev1.PodStatus{Phase: corev1.PodPending},
	})
	return a
}

// wantPodHold requires the record of a GPU that a pod holds.
func wantPodHold(t *testing.T, c config.Config, uuid string) {
	t.Helper()
	if _, err := os.Stat(filepath.Join(c.RunDir, "holds", "pod~"+uuid+"~"+uuid)); err != nil {
		t.Errorf("the GPU is offered, and the pod holds nothing: %v", err)
	}
}

func hangingServer(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	return "http://" + listener.Addr().String()
}

func refusingServer(t *testing.T, code int) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, http.StatusText(code), code) }))
	t.Cleanup(server.Close)
	return server.URL
}

// TestServesWhatIsHeldWithoutAPIServer: kubelet starts no container of a running pod whose resource has had no plugin for five
// minutes. An agent that restarts meanwhile registers with what it holds, and gives nothing away.
func TestServesWhatIsHeldWithoutAPIServer(t *testing.T) {
	for name, url := range map[string]func(*testing.T) string{
		"refuses connections": func(*testing.T) string { return "http://127.0.0.1:1" },
		"hangs":               hangingServer,
		"401":                 func(t *testing.T) string { return refusingServer(t, http.StatusUnauthorized) },
		"403":                 func(t *testing.T) string { return refusingServer(t, http.StatusForbidden) },
		"500":                 func(t *testing.T) string { return refusingServer(t, http.StatusInternalServerError) },
	} {
		t.Run(name, func(t *testing.T) {
			c, uuids := awayNode(t)
			if err := os.WriteFile(c.Kubeconfig, []byte(strings.Replace(kubeconfig, "http://127.0.0.1:1", url(t), 1)), 0o600); err != nil {
				t.Fatal(err)
			}
			kubelet, stopKubelet := startDeviceManager(t, c)
			a := runAgent(t, impatient(t, c))
			plugin := kubelet.await(heldOnly(uuids))
			for _, uuid := range uuids[:3] {
				_, err := plugin.Allocate(t.Context(), &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{
					{DevicesIds: []string{uuid}},
				}})
				if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), errNoPods.Error()) {
					t.Errorf("allocate %s: %v", uuid, err)
				}
			}
			a.await("claims: " + errNoPods.Error() + "\nlimits: " + errNoPods.Error())
			callsOfClaims(t, c)
			stopKubelet()
			a.stop()
			if left, err := filepath.Glob(filepath.Join(c.KubeletDir, "*", "tandem*.sock")); err != nil || len(left) > 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
		})
	}
}

// callsOfClaims prepares in vain, because only the API server says what a claim has, and unprepares.
func callsOfClaims(t *testing.T, c config.Config) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	socket := filepath.Join(c.KubeletDir, "plugins", c.DriverName, "dra.sock")
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = connection.Close() }()
	kubelet := drapb.NewDRAPluginClient(connection)
	claims := []*drapb.Claim{{Namespace: "apps", Uid: "c1", Name: "one"}}
	began := time.Now()
	_, err = kubelet.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: claims}, grpc.WaitForReady(true))
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), errNoPods.Error()) || time.Since(began) > 20*time.Second {
		t.Errorf("prepare: %v after %s", err, time.Since(began))
	}
	unprepared, err := kubelet.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: claims})
	if err != nil || unprepared.GetClaims()["c1"].GetError() != "" {
		t.Errorf("unprepare: %v, %v", unprepared, err)
	}
}

// TestServesAllOnceTheAPIServerAnswers: what waited is offered, without a restart of the agent.
func TestServesAllOnceTheAPIServerAnswers(t *testing.T) {
	c, uuids := awayNode(t)
	kubelet, stopKubelet := startDeviceManager(t, c)
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: c.NodeName, UID: "n"}})
	var answers atomic.Bool
	client.PrependReactor("*", "*", func(clienttesting.Action) (bool, runtime.Object, error) {
		return !answers.Load(), nil, errors.New("connection refused")
	})
	a := impatient(t, c)
	a.client = client
	running := runAgent(t, a)
	kubelet.await(heldOnly(uuids))
	answers.Store(true)
	began := time.Now()
	kubelet.await(allButTheClaims(uuids))
	// New pods may come within seconds of an API server that is back.
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("after %s", took)
	}
	await(t, "a ResourceSlice", func() bool { return len(published(t, client)) > 0 })
	stopKubelet()
	running.stop()
}

// TestPodsAdmittedBeforeTheStart: kubelet admitted a pod for another plugin, which is gone, and has not started it yet. No other pod gets
// its GPU, also while kubelet's checkpoint cannot be read.
func TestPodsAdmittedBeforeTheStart(t *testing.T) {
	for name, torn := range map[string]bool{"known": false, "checkpoint that cannot be read": true} {
		t.Run(name, func(t *testing.T) {
			c, uuids := awayNode(t)
			checkpoint := podstate.DeviceCheckpointPath(c.KubeletDir)
			text := checkpointOf("main", uuids[2])
			first := text
			if torn {
				first = "{"
			}
			check(t, os.WriteFile(checkpoint, []byte(first), 0o600))
			kubelet, stopKubelet := startDeviceManager(t, c)
			running := runAgent(t, besidePendingPod(t, c))
			if torn {
				kubelet.await(heldOnly(uuids))
				running.wantEvent("HoldersUnknown")
				check(t, os.WriteFile(checkpoint, []byte(text), 0o600))
			}
			kubelet.await(allButTheClaims(uuids))
			wantPodHold(t, c, uuids[2])
			stopKubelet()
			running.stop()
		})
	}
}

// endingPlugin is another device plugin. When it is asked for its devices, it has given one away, and ends without an answer.
type endingPlugin struct {
	pluginapi.UnimplementedDevicePluginServer
	end func()
}

func (p *endingPlugin) ListAndWatch(*pluginapi.Empty, grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	p.end()
	return status.Error(codes.Unavailable, "the plugin ends")
}

// TestPluginThatEndsDuringTheStart: another device plugin gives a GPU away while the agent starts, and ends before the agent has found out
// what it serves.
func TestPluginThatEndsDuringTheStart(t *testing.T) {
	c, uuids := awayNode(t)
	socket := filepath.Join(c.KubeletDir, "device-plugins", "nvidia-gpu.sock")
	listener, err := net.Listen("unix", socket)
	check(t, err)
	other := grpc.NewServer()
	ended := make(chan error, 1)
	pluginapi.RegisterDevicePluginServer(other, &endingPlugin{end: sync.OnceFunc(func() {
		ended <- os.WriteFile(podstate.DeviceCheckpointPath(c.KubeletDir), []byte(checkpointOf("main", uuids[2])), 0o600)
		_ = listener.Close() // this removes the socket
	})})
	serving := make(chan error, 1)
	go func() { serving <- other.Serve(listener) }()
	defer func() { other.Stop(); <-serving }()
	kubelet, stopKubelet := startDeviceManager(t, c)
	a := besidePendingPod(t, c)
	a.times.answerWait = time.Minute // an agent that serves held devices first asks the plugin, too
	running := runAgent(t, a)
	kubelet.await(allButTheClaims(uuids))
	select {
	case err := <-ended:
		check(t, err)
	default:
		t.Error("the other plugin was not asked")
	}
	wantPodHold(t, c, uuids[2])
	stopKubelet()
	running.stop()
}

// TestStopAnswersAnAllocateThatWaitsForTheWatch: kubelet asks for the device of an init container again, and the watch has not reported
// the pod yet. The agent is told to stop. An error would fail the pod for good.
func TestStopAnswersAnAllocateThatWaitsForTheWatch(t *testing.T) {
	c, uuids := awayNode(t)
	kubelet, stopKubelet := startDeviceManager(t, c)
	a, err := newAgent(c)
	check(t, err)
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: c.NodeName, UID: "n"}})
	a.client = client
	running := runAgent(t, a)
	plugin := kubelet.await(allButTheClaims(uuids))
	allocate := func() error {
		_, err := plugin.Allocate(t.Context(), &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: uuids[2:3]}}})
		return err
	}
	check(t, allocate())
	checkpoint := checkpointOf("first", uuids[2])
	check(t, os.WriteFile(podstate.DeviceCheckpointPath(c.KubeletDir), []byte(checkpoint), 0o600))
	answer := make(chan error, 1)
	go func() { answer <- allocate() }()
	await(t, "the call waits", func() bool { return strings.Contains(ownGoroutines(), "podstate.(*Pods).Reuses(") })
	running.cancel()
	await(t, "the agent stops", func() bool { return !strings.Contains(ownGoroutines(), "podstate.(*Node).Run(") })
	limits := corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}}
	_, err = client.CoreV1().Pods("apps").Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "apps", Name: "one", UID: "p1"},
		Spec: corev1.PodSpec{
			NodeName:       c.NodeName,
			InitContainers: []corev1.Container{{Name: "first", Resources: limits}}, Containers: []corev1.Container{{Name: "second", Resources: limits}},
		},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	}, metav1.CreateOptions{})
	check(t, err)
	if err := <-answer; err != nil {
		t.Error(err)
	}
	stopKubelet()
	running.stop()
}
