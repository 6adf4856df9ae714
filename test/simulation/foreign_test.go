// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	typedresourcev1 "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/driver"
)

// server is what kubelet calls by both APIs: the agent or a foreign driver.
type server interface {
	life() *process
	// refresh follows the registration of the DRA driver.
	refresh()
	// streamEnded is what the server notices of a stream that kubelet dropped.
	streamEnded(e *stream)
	prefer(request *pluginapi.PreferredAllocationRequest) *pluginapi.PreferredAllocationResponse
	allocate(ctx context.Context, uid string, ids []string) error
	prepare(ctx context.Context, batch []*claimInfo) (map[string][]kubeletplugin.Device, error)
	unprepare(ctx context.Context, batch []*claimInfo) error
}

// foreign is one life of other drivers: a device plugin, and a DRA driver of our name. Some GPUs are for limits, the others for claims. They
// keep no account. But they give away no GPU that has a holder, since what comes of that is no fault of the agent.
type foreign struct {
	*simulation
	process *process
	// ids are those of the GPUs for limits, or of all if kubelet still knows them.
	ids []string
	// forLimits is how many GPUs are for limits.
	forLimits int
	stream    *stream
	// leaving is set once they are to be uninstalled, gone once they are: then they answer no more than what they were asked before.
	leaving, gone bool
	// socket is that of the DRA driver. It has no process behind it: a connection is all that the agent tries.
	socket *net.UnixListener
}

// The IDs of a foreign device plugin by their prefixes: NVIDIA's, GKE's, and those that do not tell which GPU a pod has.
var idForms = []string{"GPU-", "nvidia", "nvidia", unknownForm}

const unknownForm = "card-"

// gpuOfID is the GPU of a device ID. That of an unknown form is not the one that its number suggests.
func (s *simulation) gpuOfID(id string) string {
	minor := int(id[len(id)-1] - '0')
	if isUnknown(id) {
		minor = (minor + 1) % s.host.gpus
	}
	return fmt.Sprintf("gpu-%d", minor)
}

func isUnknown(id string) bool { return strings.HasPrefix(id, unknownForm) }

func (s *simulation) startForeign() {
	f := &foreign{simulation: s, process: newProcess("foreign"), forLimits: 1 + s.rand.IntN(s.host.gpus-1)}
	form := s.profile.foreign[s.rand.IntN(len(s.profile.foreign))]
	for i := range s.host.gpus {
		if id := fmt.Sprintf("%s%d", form, i); minorOf(s.gpuOfID(id)) < f.forLimits {
			f.ids = append(f.ids, id)
		}
	}
	s.foreign, s.withoutAgent = f, true
	path := filepath.Join(s.host.kubeletDir(), "plugins", driverName, "dra.sock")
	s.host.check(os.MkdirAll(filepath.Dir(path), 0o700))
	s.host.check(os.RemoveAll(path))
	var err error
	f.socket, err = net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	s.host.check(err)
	f.register(0)
	s.kubelet.lookForPlugin()
}

// installed reports whether the foreign drivers are there.
func (s *simulation) installed() bool { return s.foreign != nil && !s.foreign.gone }

func (f *foreign) life() *process { return f.process }

// register serves limits under a fresh name, as soon as there is a kubelet.
func (f *foreign) register(delay time.Duration) {
	f.after(f.process, delay+f.latency(), "registers for limits", func() {
		if f.gone || f.kubelet.process.over || f.stream != nil && f.kubelet.streams[f.stream.endpoint] == f.stream {
			return
		}
		list := &pluginapi.ListAndWatchResponse{}
		for _, id := range f.ids {
			list.Devices = append(list.Devices, &pluginapi.Device{ID: id, Health: pluginapi.Healthy})
		}
		f.stream = &stream{server: f, lists: []*pluginapi.ListAndWatchResponse{list}}
		f.kubelet.register(f.stream)
	})
}

func (f *foreign) streamEnded(e *stream) {
	if !e.ended && f.stream == e {
		e.ended, f.stream = true, nil
		f.register(100 * time.Millisecond)
	}
}

// refresh publishes the GPUs for claims.
func (f *foreign) refresh() {
	offered := f.inventory
	offered.GPUs = offered.GPUs[f.forLimits:]
	pools, _ := (&driver.Offer{NodeName: nodeName}).Pools(driver.Facts{Inventory: offered, Kept: kept(f.version)})
	f.api.request(f.process, "writes its slice", func() {
		if !f.gone {
			f.api.put("slice/", resourceSlices(pools))
		}
	})
}

// prefer returns any devices: those without a holder first.
func (f *foreign) prefer(request *pluginapi.PreferredAllocationRequest) *pluginapi.PreferredAllocationResponse {
	wanted := request.ContainerRequests[0]
	ids := slices.Clone(wanted.MustIncludeDeviceIDs)
	for _, had := range []bool{false, true} {
		for _, id := range wanted.AvailableDeviceIDs {
			if len(ids) < int(wanted.AllocationSize) && !slices.Contains(ids, id) && had == f.has(f.gpuOfID(id), "") {
				ids = append(ids, id)
			}
		}
	}
	return &pluginapi.PreferredAllocationResponse{ContainerResponses: []*pluginapi.ContainerPreferredAllocationResponse{{DeviceIDs: ids}}}
}

var errHad = errors.New("the GPU has a holder")

func (f *foreign) allocate(ctx context.Context, uid string, ids []string) error {
	turn(ctx, "allocates")
	for _, id := range ids {
		allocated := func(k *claim) bool { return slices.Contains(k.devices(), f.gpuOfID(id)) }
		if f.has(f.gpuOfID(id), uid) || slices.ContainsFunc(all[*claim](f.api.objects), allocated) {
			return errHad
		}
	}
	f.host.foreign[uid] = true
	f.hit(foreignAllocates)
	if isUnknown(ids[0]) {
		f.hit(foreignUnknown)
	}
	return nil
}

// has reports whether a holder other than owner has a GPU, by what runs and by what kubelet has.
func (f *foreign) has(gpu, owner string) bool {
	for uid, group := range f.host.pods {
		if slices.ContainsFunc(group.grants, func(g grant) bool { return g.owner != owner && slices.Contains(g.parts, gpu) && uid != owner }) {
			return true
		}
	}
	for uid := range f.kubelet.devices.State().Pods {
		if uid != owner && slices.Contains(f.kubelet.devicesOf(uid), gpu) {
			return true
		}
	}
	for _, info := range f.kubelet.claims {
		if info.uid != owner && slices.Contains(info.devices, gpu) {
			return true
		}
	}
	return false
}

func (f *foreign) prepare(ctx context.Context, batch []*claimInfo) (map[string][]kubeletplugin.Device, error) {
	if f.gone {
		return nil, errAway
	}
	turn(ctx, "prepares")
	devices := map[string][]kubeletplugin.Device{}
	for _, info := range batch {
		k, ok := get[*claim](f.api, claimKey(info.name))
		if f.api.down || !ok || k.uid != info.uid || k.allocation == nil {
			return nil, errAway
		}
		for _, gpu := range k.devices() {
			inFlight := slices.ContainsFunc(f.kubelet.inFlight, func(id string) bool { return f.gpuOfID(id) == gpu })
			if inFlight || f.has(gpu, info.uid) {
				return nil, errHad
			}
			delete(f.host.clocks, uuidOf(gpu)) // what a holder of before has left is no fault of the agent
			f.host.foreign[info.uid] = true
			devices[info.uid] = append(devices[info.uid], kubeletplugin.Device{DeviceName: gpu, PoolName: nodeName})
		}
	}
	f.hit(foreignPrepares)
	return devices, nil
}

func (f *foreign) unprepare(ctx context.Context, _ []*claimInfo) error {
	turn(ctx, "unprepares")
	return nil
}

// end ends the foreign drivers and what they serve. Calls for claims that are in flight may outlive their sockets.
func (f *foreign) end(calls time.Duration) {
	f.gone = true
	f.host.check(f.socket.Close())
	if f.stream != nil {
		f.kubelet.hangUp(f.stream)
	}
	if f.kubelet.plugin == f {
		f.kubelet.plugin = nil
	}
	if calls == 0 {
		f.die(f.process, nil)
		return
	}
	f.after(f.host.alive, calls, "ends the calls of foreign drivers", func() { f.die(f.process, nil) })
}

// changeDrivers replaces the agent by foreign drivers, or the foreign drivers by the agent.
func (s *simulation) changeDrivers() {
	switch {
	case s.installed() && s.foreign.leaving:
	case s.installed():
		s.uninstallForeign(!s.chance(4))
	case s.agent != nil && !s.agent.process.over && !s.kubelet.process.over:
		s.withoutAgent = true
		s.killAgent()
		s.api.put("gpunode/", nil)
		s.startForeign()
	}
}

// uninstallForeign ends the foreign drivers and starts the agent, which is there before they have ended if it is early. Each container of
// a driver is started by kubelet: one that is frozen, or whose disk is slow, starts none. So kubelet's files have what foreign drivers have
// answered.
func (s *simulation) uninstallForeign(early bool) {
	s.foreign.leaving = true
	switch {
	case !s.kubelet.hasWrittenAll():
		for _, uid := range s.kubelet.forgotten() {
			s.cluster.remove(uid) // nothing else ends one that has no end of its own
		}
		s.after(s.users, time.Second, "waits for kubelet", func() {
			if s.installed() {
				s.uninstallForeign(early)
			}
		})
	case early && (s.agent == nil || s.agent.process.over):
		s.withoutAgent = false
		s.startAgent()
		s.after(s.users, s.between(0, 10*time.Second), "uninstalls the foreign drivers", func() {
			if s.installed() {
				s.uninstallForeign(false)
			}
		})
	default:
		s.withoutAgent = false
		var calls time.Duration
		if s.agent != nil && !s.agent.process.over && s.agent.book.Withholds(sourceDriver) {
			calls = s.between(0, 44*time.Second)
		}
		s.foreign.end(calls)
		s.after(s.host.alive, s.between(2*time.Second, 5*time.Second), "starts the agent", func() {
			if !s.installed() && (s.agent == nil || s.agent.process.over) {
				s.startAgent()
			}
		})
	}
}

// forgotten are pods that run, and of which kubelet's files may not say what they have: those that were force-deleted, and, before 1.37, those
// that started with a claim while it was unprepared for another pod.
func (k *kubelet) forgotten() (uids []string) {
	for _, uid := range sorted(k.host.pods) {
		_, known := get[*pod](k.api, podKey(uid))
		lost := slices.ContainsFunc(k.host.pods[uid].grants, func(g grant) bool {
			has := func(name string) bool { return k.claims[name].uid == g.owner }
			return isClaim(g.owner) && !slices.ContainsFunc(sorted(k.claims), has)
		})
		if !known || lost {
			uids = append(uids, uid)
		}
	}
	return uids
}

// hasWrittenAll reports whether kubelet's files will have all that foreign drivers have answered.
func (k *kubelet) hasWrittenAll() bool {
	return len(k.forgotten()) == 0 && !k.process.over && k.sourcesReady && !k.admitting && len(k.writes) == 0 &&
		!k.process.frozen.After(time.Now()) && !time.Now().Before(k.host.slowUntil)
}

// onlyAgent ends the foreign drivers for good.
func (s *simulation) onlyAgent() {
	was := s.withoutAgent
	s.withoutAgent = false
	if s.installed() {
		s.uninstallForeign(false)
	}
	for end := time.Now().Add(3 * time.Minute); (was || s.installed()) && time.Now().Before(end) && s.fault == ""; {
		s.idle(time.Second)
		was = s.agent == nil || s.agent.process.over
	}
}

// takenByUnknown gives all GPUs to the pods whose GPUs the agent does not know.
func (s *simulation) takenByUnknown(taken, promised having) {
	for _, uid := range sorted(s.kubelet.devices.State().Pods) {
		if !slices.ContainsFunc(s.kubelet.devicesOfUUID(uid), isUnknown) {
			continue
		}
		for i := range s.host.gpus {
			taken.give("unknown", []string{fmt.Sprintf("gpu-%d", i)})
			promised.give("unknown", []string{fmt.Sprintf("gpu-%d", i)})
		}
	}
}

// countedAgain is how many devices of pods the scheduler counts twice: the agent does not list their IDs (docs/design/0007-coexistence.md).
func (s *simulation) countedAgain() (n int) {
	for _, uid := range sorted(s.kubelet.devices.State().Pods) {
		for _, id := range s.kubelet.devicesOfUUID(uid) {
			if !strings.HasPrefix(id, "GPU-") {
				n++
			}
		}
	}
	return n
}

// noClient knows of no other driver's slices.
func (noClient) ResourceV1() typedresourcev1.ResourceV1Interface { return noResources{} }

type noResources struct {
	typedresourcev1.ResourceV1Interface
}

func (noResources) ResourceSlices() typedresourcev1.ResourceSliceInterface { return noSlices{} }

type noSlices struct {
	typedresourcev1.ResourceSliceInterface
}

func (noSlices) List(context.Context, metav1.ListOptions) (*resourceapi.ResourceSliceList, error) {
	return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "resourceslices"}, "")
}
