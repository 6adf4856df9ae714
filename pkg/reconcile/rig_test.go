// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	quantity "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

const (
	node     = "node-1"
	driver   = "gpu.nvidia.com"
	resource = "nvidia.com/gpu"

	migResource = "nvidia.com/mig-1g.10gb"
)

// rig is a node around a real ledger: kubelet's files, a cgroup tree, an API server's pods and claims.
type rig struct {
	t      *testing.T
	book   *ledger.Ledger
	r      *Reconciler
	client *fake.Clientset
	counts *prometheus.Registry
	pods   *podstate.Pods
	dir    string // kubelet's
	groups string

	mu      sync.Mutex
	gpus    []device.GPU
	changed chan struct{}
	claims  map[string]*resourceapi.ResourceClaim
	away    bool // API server and kubelet
	used    []podstate.UsedDevice
	usedBy  []podstate.KubeletClaim
	gets    int
	lists   int
}

func newRig(t *testing.T, gpus ...string) *rig {
	t.Helper()
	g := &rig{t: t, dir: t.TempDir(), groups: t.TempDir(), changed: make(chan struct{}), claims: map[string]*resourceapi.ResourceClaim{}}
	g.setGPUs(gpus...)
	must(t, os.Mkdir(filepath.Join(g.dir, "device-plugins"), 0o755))
	g.group("anchor", true)
	g.client = fake.NewClientset(g.pod("anchor"))
	g.counts = prometheus.NewRegistry()
	cgroups := podstate.NewCgroups(g.groups, "")
	var err error
	g.pods, err = podstate.NewPods(g.client, node, cgroups, g.dir)
	must(t, err)
	g.book, err = ledger.Open(t.Context(), ledger.Options{Dir: t.TempDir(), BootID: "boot", PodStates: g.pods})
	must(t, err)
	t.Cleanup(func() { must(t, g.book.Close()) })
	g.r = New(Config{
		Ledger: g.book, Pods: g.pods, Cgroups: cgroups, Resources: g, Claims: func(namespace string) Claims { return claimsIn{g, namespace} },
		Inventory: g, KubeletDir: g.dir, NodeName: node, DriverName: driver, Limits: device.Resources{GPU: resource},
		Partitions: newPartitions(), Settings: newSettings(), AddPlaceholders: func([]string) {},
		Recorder: record.NewFakeRecorder(10), Registerer: g.counts,
	})
	ms := time.Millisecond
	g.r.times = times{
		leaving: ms, leavingLast: 5 * ms, verify: time.Hour, ending: time.Hour, waitShown: time.Hour, waitReported: time.Hour, podHoldCheck: time.Hour, call: time.Minute, restore: time.Minute,
		retry: 10 * ms, retryMost: 20 * ms, rest: ms, gather: ms, verifyGather: ms,
	}
	return g
}

// verifySoon makes what takes minutes take milliseconds.
func (g *rig) verifySoon() {
	const ms = time.Millisecond
	g.r.times.verify, g.r.times.ending, g.r.times.podHoldCheck = 20*ms, 20*ms, 10*ms
}

// run runs pods and reconciler until the returned function is called, or the test ends.
func (g *rig) run() (stop func()) { return g.start(g.pods.Run, g.r.Run) }

// watchPods runs the pods only. Passes are made by settle.
func (g *rig) watchPods() { g.start(g.pods.Run) }

func (g *rig) start(parts ...func(context.Context) error) (stop func()) {
	watches := g.watches()
	ctx, cancel := context.WithCancel(g.t.Context())
	var running sync.WaitGroup
	for _, part := range parts {
		running.Go(func() { must(g.t, part(ctx)) })
	}
	stop = sync.OnceFunc(func() { cancel(); running.Wait() })
	g.t.Cleanup(stop)
	if !g.pods.AwaitSync(ctx) {
		g.t.Fatal("no pods")
	}
	// The fake forgets what happens between the list and the watch.
	for g.watches() == watches && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	return stop
}

// watches counts the watches of pods that were begun.
func (g *rig) watches() (n int) {
	for _, action := range g.client.Actions() {
		if action.Matches("watch", "pods") {
			n++
		}
	}
	return n
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

func (g *rig) Inventory() device.Inventory {
	g.mu.Lock()
	defer g.mu.Unlock()
	return device.Inventory{GPUs: g.gpus}
}

func (g *rig) Changed() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.changed
}

// setGPUs has "GPU-<n>" published as gpu-<n>, and "GPU-<n>:MIG-a,MIG-b" with partitions from slice 0 on.
func (g *rig) setGPUs(uuids ...string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.gpus = nil
	for _, uuid := range uuids {
		var minor int
		_, err := fmt.Sscanf(uuid, "GPU-%d", &minor)
		must(g.t, err)
		uuid, partitions, _ := strings.Cut(uuid, ":")
		gpu := device.GPU{UUID: uuid, Minor: minor}
		for i, id := range strings.FieldsFunc(partitions, func(c rune) bool { return c == ',' }) {
			place := device.Ref{GPU: uuid, Placement: device.Placement{Start: i, Size: 1}}
			gpu.Partitions = append(gpu.Partitions, device.Partition{UUID: id, Ref: place, Parent: minor, Profile: "1g.10gb", ProfileID: 19})
		}
		g.gpus = append(g.gpus, gpu)
	}
	close(g.changed)
	g.changed = make(chan struct{})
}

var errAway = errors.New("connection refused")

type claimsIn struct {
	*rig
	namespace string
}

func (c claimsIn) Get(_ context.Context, name string, _ metav1.GetOptions) (*resourceapi.ResourceClaim, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gets++
	if c.away {
		return nil, errAway
	}
	if claim, ok := c.claims[c.namespace+"/"+name]; ok {
		return claim, nil
	}
	return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "resourceclaims"}, name)
}

func (g *rig) List(context.Context, func(string) bool, string) ([]podstate.UsedDevice, []podstate.KubeletClaim, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.lists++
	if g.away {
		return nil, nil, errAway
	}
	return g.used, g.usedBy, nil
}

func (g *rig) calls() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.gets + g.lists
}

func (g *rig) change(f func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f()
}

// claim exists with the devices it holds; those that begin with admin: are for admin access, and it has 4Gi of "4Gi:gpu-1".
func (g *rig) claim(name, uid string, devices ...string) {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "apps", Name: name, UID: types.UID(uid)}}
	if devices != nil {
		c.Status.Allocation = &resourceapi.AllocationResult{}
	}
	for _, d := range devices {
		d, admin := strings.CutPrefix(d, "admin:")
		memory, part, shared := strings.Cut(d, ":")
		if shared {
			d = part
		}
		result := resourceapi.DeviceRequestAllocationResult{Request: d, Driver: driver, Pool: poolOf(d), Device: d, AdminAccess: &admin}
		if shared {
			id := types.UID("share-" + uid)
			result.ShareID, result.ConsumedCapacity = &id, map[resourceapi.QualifiedName]quantity.Quantity{"memory": quantity.MustParse(memory)}
			wanted := &resourceapi.ExactDeviceRequest{Capacity: &resourceapi.CapacityRequirements{Requests: result.ConsumedCapacity}}
			c.Spec.Devices.Requests = append(c.Spec.Devices.Requests, resourceapi.DeviceRequest{Name: d, Exactly: wanted})
		}
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, result)
	}
	g.change(func() { g.claims["apps/"+name] = c })
}

// poolOf has a pool of its own for each GPU that is partitioned.
func poolOf(name string) string {
	if gpu, _, partition := strings.Cut(name, "-mig-"); partition {
		return node + "/" + gpu
	}
	return node
}

func (g *rig) pod(uid string, claims ...string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "apps", Name: uid, UID: types.UID(uid)}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	for _, claim := range claims {
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, corev1.PodResourceClaim{Name: claim, ResourceClaimName: &claim})
	}
	return p
}

func (g *rig) addPod(p *corev1.Pod) {
	g.t.Helper()
	must(g.t, g.client.Tracker().Add(p))
}

func (g *rig) deletePod(uid string) {
	g.t.Helper()
	must(g.t, g.client.CoreV1().Pods("apps").Delete(context.Background(), uid, metav1.DeleteOptions{}))
}

// awaitDeleted waits until the watch has reported that the pods are deleted.
func (g *rig) awaitDeleted(uids ...string) {
	g.t.Helper()
	deadline := time.Now().Add(time.Minute)
	for _, uid := range uids {
		for g.pods.UnwantedSince(uid).IsZero() {
			if time.Now().After(deadline) {
				g.t.Fatalf("pod %s is not deleted", uid)
			}
			time.Sleep(time.Millisecond)
		}
	}
}

// settle makes one pass over the holds.
func (g *rig) settle() {
	g.t.Helper()
	_, err := g.r.Settle(g.t.Context())
	must(g.t, err)
}

func (g *rig) group(uid string, busy bool) {
	dir := filepath.Join(g.groups, "kubepods", "pod"+uid)
	must(g.t, os.MkdirAll(dir, 0o755))
	populated := map[bool]string{true: "populated 1\n", false: "populated 0\n"}[busy]
	temporary := filepath.Join(g.groups, "new")
	must(g.t, os.WriteFile(temporary, []byte(populated), 0o600))
	must(g.t, os.Rename(temporary, filepath.Join(dir, "cgroup.events")))
}

// noGroup removes a cgroup in one step, as the kernel does.
func (g *rig) noGroup(uid string) {
	must(g.t, os.Rename(filepath.Join(g.groups, "kubepods", "pod"+uid), filepath.Join(g.t.TempDir(), "removed")))
}

// checkpoint is written by kubelet's way: pairs of pod and device.
func (g *rig) checkpoint(podsAndDevices ...string) {
	var entries []any
	for pair := range slices.Chunk(podsAndDevices, 2) {
		name := resource
		if strings.HasPrefix(pair[1], "MIG-") {
			name = migResource
		}
		entries = append(entries, map[string]any{"PodUID": pair[0], "ContainerName": "main", "ResourceName": name, "DeviceIDs": map[string]any{"0": []string{pair[1]}}})
	}
	data, err := json.Marshal(map[string]any{"Data": map[string]any{"PodDeviceEntries": entries, "RegisteredDevices": nil}, "Checksum": 1})
	must(g.t, err)
	g.replace(podstate.DeviceCheckpointPath(g.dir), data)
}

func (g *rig) replace(path string, data []byte) {
	temporary := filepath.Join(filepath.Dir(path), ".tmp")
	must(g.t, os.WriteFile(temporary, data, 0o600))
	must(g.t, os.Rename(temporary, path))
}

// kubeletClaim is one in dra_manager_state.
type kubeletClaim struct {
	uid, name string
	pods      []string
	devices   []string
}

func (g *rig) claimState(claims ...kubeletClaim) {
	list := []any{}
	for _, c := range claims {
		var devices []any
		for _, d := range c.devices {
			devices = append(devices, map[string]any{"PoolName": poolOf(d), "DeviceName": d, "CDIDeviceIDs": []string{"vendor/class=" + d}})
		}
		pods := map[string]any{}
		for _, uid := range c.pods {
			pods[uid] = struct{}{}
		}
		list = append(list, map[string]any{"ClaimUID": c.uid, "ClaimName": c.name, "Namespace": "apps", "PodUIDs": pods, "DriverState": map[string]any{driver: map[string]any{"Devices": devices}}})
	}
	inner, err := json.Marshal(map[string]any{"ClaimInfoStateList": list})
	must(g.t, err)
	data, err := json.Marshal(map[string]any{"Data": string(inner), "Checksum": crc32.ChecksumIEEE(inner)})
	must(g.t, err)
	g.replace(filepath.Join(g.dir, "dra_manager_state"), data)
}

// holds describes every hold: "GPU-1: claim c1 restored [p1]", and who has a part: "... has 4096Mi of 24576Mi".
func (g *rig) holds() []string {
	described := []string{}
	for _, h := range g.book.Holds() {
		var pods []string
		for _, p := range h.Pods {
			pods = append(pods, p.UID)
		}
		text := fmt.Sprintf("%s: %s %s %s %v", h.Device, h.Holder.Kind, h.Holder.ID, h.State, pods)
		if h.Unreadable {
			text += " unreadable"
		}
		if !h.Share.Whole() {
			text += " has " + h.Share.String()
		}
		described = append(described, text)
	}
	return described
}

func (g *rig) want(want ...string) {
	g.t.Helper()
	if got := g.holds(); !slices.Equal(got, want) {
		g.t.Errorf("holds are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// await waits until the ledger has exactly these holds.
func (g *rig) await(want ...string) {
	g.t.Helper()
	g.awaitWithin(2*time.Minute, want...) // a minute is what some holds wait for
}

func (g *rig) awaitWithin(patience time.Duration, want ...string) {
	g.t.Helper()
	deadline := time.After(patience)
	for {
		changed := g.book.Changed()
		if slices.Equal(g.holds(), want) {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			g.want(want...)
			g.t.FailNow()
		}
	}
}

// stays watches for a moment that nothing changes. What it finds is wrong; that it finds nothing proves little.
func (g *rig) stays(want ...string) {
	g.t.Helper()
	g.want(want...)
	deadline := time.After(150 * time.Millisecond)
	for {
		changed := g.book.Changed()
		if !slices.Equal(g.holds(), want) {
			g.want(want...)
			return
		}
		select {
		case <-changed:
		case <-deadline:
			return
		}
	}
}

func (g *rig) allocate(ids ...string) {
	g.t.Helper()
	for _, id := range ids {
		request := ledger.PodRequest{ID: id, Resource: resource, Device: device.Ref{GPU: id}}
		for _, d := range g.Inventory().Devices() {
			if d.UUID() == id && !d.Whole() {
				request.Resource, request.Device = migResource, d.Ref()
			}
		}
		must(g.t, g.book.ReservePod([]ledger.PodRequest{request}))
	}
}

func (g *rig) prepare(uid, name, gpu string, pods ...string) {
	g.t.Helper()
	request := ledger.ClaimRequest{UID: uid, Namespace: "apps", Name: name, Devices: []device.Ref{{GPU: gpu}}}
	for _, uid := range pods {
		request.Pods = append(request.Pods, ledger.Pod{UID: uid, Namespace: "apps", Name: uid})
	}
	_, err := g.book.ReserveClaim(g.t.Context(), request)
	must(g.t, err)
}

// metric is the value of a metric with these labels, or the number of samples of a histogram.
func (g *rig) metric(name string, labels ...string) float64 {
	g.t.Helper()
	families, err := g.counts.Gather()
	must(g.t, err)
	for _, family := range families {
		for _, m := range family.GetMetric() {
			var values []string
			for _, pair := range m.GetLabel() {
				values = append(values, pair.GetValue())
			}
			if family.GetName() == name && slices.Equal(values, labels) {
				return m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return 0
}
