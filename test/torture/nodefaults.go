// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/test/faults"
	"github.com/tandem-gpu/tandem/test/oracle"
)

const (
	// runDir is the file system of the agent's records and of the CDI specs.
	runDir = "/run"
	// recordsOfAgent is the directory of the agent's records, as its container has it.
	recordsOfAgent = "/run/tandem"
	// listEvery is a little more often than kubelet answers: 100 times a second (k8s.io/kubernetes pkg/kubelet/apis/podresources,
	// DefaultQPS).
	listEvery = 9 * time.Millisecond
)

// foreignIDs are the formats of a foreign plugin's device IDs: GKE's, and one that does not tell Tandem which GPU it means.
var foreignIDs = []string{"nvidia%d", "slot-%d"}

// victim is a pod that can see GPUs.
type victim struct{ uid, namespace, name, workload string }

// broken are the faults of the node's GPUs. It is safe for concurrent use.
type broken struct {
	// root answers the node's root directory; an error means that the node is down.
	root func() (string, error)

	// room keeps simulated GPUs from changing on a full disk: fillDisk locks it, and each change of the GPUs locks it for reading. The state of
	// simulated GPUs is in files of the same file system. That of real GPUs is not.
	room sync.RWMutex

	mu     sync.Mutex
	faults map[int]simulated.GPUFaults
}

// set puts a GPU's faults in the place of those before; nil is none.
func (b *broken) set(gpu int, fault *simulated.GPUFaults) error {
	b.room.RLock()
	defer b.room.RUnlock()
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.faults == nil {
		b.faults = map[int]simulated.GPUFaults{}
	}
	if delete(b.faults, gpu); fault != nil {
		b.faults[gpu] = *fault
	}
	var all simulated.Faults
	for _, gpu := range slices.Sorted(maps.Keys(b.faults)) {
		all.GPUs = append(all.GPUs, b.faults[gpu])
	}
	root, err := b.root()
	if err != nil {
		return err
	}
	err = simulated.WriteFaults(filepath.Join(root, machineDir), all)
	if errors.Is(err, fs.ErrNotExist) {
		// The node has just booted: there are no GPUs before the agent comes.
		return nil
	}
	return err
}

// lose makes a GPU fall off the bus until it is found.
func (b *broken) lose(gpu int) error {
	return b.set(gpu, &simulated.GPUFaults{GPU: strconv.Itoa(gpu), Lost: true})
}

func (b *broken) find(gpu int) error { return b.set(gpu, nil) }

func (s *injector) loseGPU(ctx context.Context, op Op) (done, error) {
	if err := s.broken.lose(op.GPU); err != nil {
		return done{}, err
	}
	broadcast.Sleep(ctx, op.Pause)
	return done{}, s.broken.find(op.GPU)
}

// hangPod deletes a pod whose processes do not end.
func (s *injector) hangPod(ctx context.Context, op Op) (done, error) {
	victims := s.victims()
	if len(victims) == 0 {
		return done{skipped: "no pod has a GPU"}, nil
	}
	v := victims[op.Pick%len(victims)]
	hung, err := s.hang(ctx, v, op.Grace)
	if errors.Is(err, faults.ErrNoProcess) {
		return done{skipped: err.Error()}, nil
	}
	if err != nil {
		return done{}, err
	}
	broadcast.Sleep(ctx, op.Pause)
	return done{}, hung.End(ctx)
}

// hang returns when the pod is being deleted, and ends nothing after an error.
func (s *injector) hang(ctx context.Context, v victim, grace int64) (faults.Hung, error) {
	hung, err := faults.Hang(ctx, s.node, v.uid)
	if err != nil {
		return hung, err
	}
	s.trace.note("hung: %s/%s", v.namespace, v.name)
	err = s.end(ctx, v, grace)
	if err != nil {
		err = errors.Join(err, hung.End(ctx))
	}
	return hung, err
}

// end deletes a pod as its user would.
func (s *injector) end(ctx context.Context, v victim, grace int64) error {
	s.changed(v.workload)
	options := withGrace(grace)
	options.Preconditions = metav1.NewUIDPreconditions(v.uid)
	return persist(ctx, "delete pod", func(ctx context.Context) error {
		return unlessConflict(s.client.CoreV1().Pods(v.namespace).Delete(ctx, v.name, options))
	})
}

// listPods asks kubelet for pod resources as often as it answers.
func (s *injector) listPods(ctx context.Context, op Op) (done, error) {
	limited, cancel := context.WithTimeout(ctx, op.Pause)
	defer cancel()
	kubelet, err := oracle.AskKubelet(s.node)
	if err != nil {
		return done{}, err
	}
	defer kubelet.Close()
	ticker := time.NewTicker(listEvery)
	defer ticker.Stop()
	lists := 0
	for limited.Err() == nil {
		// It refuses those that are too many, and does not answer while it is frozen or down.
		if _, err := kubelet.Granted(limited); err == nil {
			lists++
		}
		select {
		case <-limited.Done():
		case <-ticker.C:
		}
	}
	s.trace.note("listed pod resources %d times", lists)
	return done{}, nil
}

// fillDisk fills a file system. The simulated GPUs do not change while it is full.
func (s *injector) fillDisk(ctx context.Context, op Op) (done, error) {
	s.broken.room.Lock()
	defer s.broken.room.Unlock()
	filler, err := faults.Fill(ctx, s.node, op.Component)
	if err != nil {
		return done{}, err
	}
	broadcast.Sleep(ctx, op.Pause)
	return done{}, filler.Stop(ctx)
}

// readOnly keeps the agent from writing into a directory. The CDI specs are lost as well: otherwise they would be as good as before. The
// agent is left alone meanwhile, and so is kubelet: each has to know that no device can be given.
func (s *injector) readOnly(ctx context.Context, op Op) (did done, err error) {
	defer s.alone(agentName)()
	defer s.alone(kubeletName)()
	found, err := faults.SetReadOnly(ctx, s.node, agentProgram, op.Component, true)
	if err == nil && found == 0 {
		return done{skipped: "the agent does not run"}, nil
	}
	if err == nil && op.Component == cdiDir {
		err = s.wipeCDI(ctx)
	}
	if err == nil {
		s.unusable(true)
		broadcast.Sleep(ctx, op.Pause)
		s.unusable(false)
	}
	return done{}, errors.Join(err, s.writable(ctx, op.Component))
}

// writable ends what readOnly began. Idempotent.
func (s *injector) writable(ctx context.Context, dirs ...string) error {
	for _, dir := range dirs {
		if _, err := faults.SetReadOnly(ctx, s.node, agentProgram, dir, false); err != nil {
			return err
		}
	}
	return nil
}

func (s *injector) wipeCDI(ctx context.Context) error {
	return s.onNode(ctx, "sh", "-c", "rm -rf "+cdiDir+"/* "+cdiDir+"/.[!.]*")
}

const (
	// registerPatience is how long kubelet may take to answer a plugin that comes; noticePatience is how long Tandem may take to stop giving
	// GPUs away beside it. What the plugin gives away then it gives away whatever Tandem does.
	registerPatience = 10 * time.Second
	noticePatience   = 15 * time.Second
	// settled is how long Tandem offers nothing before that counts.
	noticeSettled = time.Second
	// comebackPatience is how long Tandem has to live with pods on unknown GPUs after the plugin has gone. If it offers GPUs meanwhile, which
	// it must not, placePause is the time in which pods get them.
	comebackPatience = 10 * time.Second
	placePause       = 4 * time.Second
)

// foreignPlugin serves GPUs to limits by a plugin of another vendor for a while. The plugin knows what it may give away: once Tandem offers
// nothing, the GPUs that no container sees, that no claim is allocated, that the ledger has no record of, and that no foreign plugin before
// it has given away. Until then it refuses. Pods with an ID that does not
// tell their GPU are deleted later, as Tandem's event asks for.
func (s *injector) foreignPlugin(ctx context.Context, op Op) (did done, err error) {
	defer func() { err = errors.Join(err, s.reviveKubelet(ctx)) }()
	leaveAlone := sync.OnceFunc(s.alone(agentName))
	defer leaveAlone()
	minors := map[string]int{}
	for gpu := range gpusANode {
		minors[fmt.Sprintf(op.Answer, gpu)] = gpu
	}
	// Tandem finds IDs that tell it nothing once kubelet has a healthy one.
	plugin := faults.NewDevicePlugin(minors)
	plugin.Give()
	socket := filepath.Join(faults.DevicePluginDir, fmt.Sprintf("nvidiaGPU-%d.sock", op.Index))
	server, err := faults.Serve(s.node, socket, func(server *grpc.Server) { pluginapi.RegisterDevicePluginServer(server, plugin) })
	if err != nil {
		return done{}, err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()
	if err := s.register(ctx, server); err != nil {
		return done{skipped: err.Error()}, nil //nolint:nilerr // kubelet is frozen or down
	}
	noticed := s.awaitNotice(ctx)
	leaveAlone()
	taken, err := s.taken(ctx)
	if err != nil {
		return done{skipped: err.Error()}, nil //nolint:nilerr // the plugin gives away nothing if it is not sure
	}
	var free []string
	for id, gpu := range minors {
		if !taken[gpu] {
			free = append(free, id)
		}
	}
	slices.Sort(free)
	plugin.Offer(free...)
	plugin.Give(free...)
	broadcast.Sleep(ctx, op.Pause)
	plugin.Give()
	s.trace.note("the foreign plugin of %05d was noticed: %t; it offered %v and gave away %v", op.Index, noticed, free, plugin.Allocated())
	if err := server.Stop(); err != nil || op.Answer == foreignIDs[0] {
		return done{}, err
	}
	if s.awaitReturn(ctx) {
		s.trace.note("GPUs are offered beside pods on unknown ones")
		broadcast.Sleep(ctx, placePause)
	}
	return done{}, s.endForeign(ctx, op.Answer)
}

// reviveKubelet starts kubelet again, as a service manager does, if it has ended because the list of one device plugin replaced that of another
// during an Allocate (docs/design/0003-withdrawing.md). Neither plugin can prevent that.
func (s *injector) reviveKubelet(ctx context.Context) error {
	defer s.alone(kubeletName)()
	kubelet := s.component(kubeletName)
	if _, err := kubelet.Pid(); !errors.Is(err, cluster.ErrNotRunning) {
		return err
	}
	log, err := os.ReadFile(kubelet.LogPath())
	if err != nil {
		return fmt.Errorf("read why kubelet has ended: %w", err)
	}
	if !endedInAllocate(log) {
		return errors.New("kubelet has ended, which no fault does; the end of its log says why")
	}
	s.trace.say("kubelet has ended in an Allocate, beside another device plugin: it is started again")
	return restart(ctx, kubelet.Start)
}

// endedInAllocate reports whether kubelet's log ends with its dereference of a device that is not in the list any more.
func endedInAllocate(log []byte) bool {
	const kept = 8 << 10
	_, stack, panicked := bytes.Cut(log[max(0, len(log)-kept):], []byte("panic: runtime error: invalid memory address"))
	return panicked && bytes.Contains(stack, []byte("devicemanager.(*ManagerImpl).allocateContainerResources("))
}

// awaitReturn reports whether Tandem offers anything before patience ends.
func (s *injector) awaitReturn(ctx context.Context) bool {
	for deadline := time.Now().Add(comebackPatience); time.Now().Before(deadline) && ctx.Err() == nil; broadcast.Sleep(ctx, retryPause) {
		if offers, err := s.offersAny(ctx); err == nil && offers {
			return true
		}
	}
	return false
}

func (s *injector) register(ctx context.Context, server *faults.Server) (err error) {
	for deadline := time.Now().Add(registerPatience); time.Now().Before(deadline) && ctx.Err() == nil; broadcast.Sleep(ctx, retryPause) {
		once, cancel := context.WithTimeout(ctx, registerPatience/2)
		err = server.Register(once, install.ResourceName)
		cancel()
		if err == nil {
			return nil
		}
	}
	return err
}

// awaitNotice returns once Tandem offers nothing by either API, or patience ends.
func (s *injector) awaitNotice(ctx context.Context) (noticed bool) {
	var since time.Time
	for deadline := time.Now().Add(noticePatience); time.Now().Before(deadline) && ctx.Err() == nil; broadcast.Sleep(ctx, retryPause) {
		if offers, err := s.offersAny(ctx); err != nil || offers {
			since = time.Time{}
		} else if since.IsZero() {
			since = time.Now()
		} else if time.Since(since) >= noticeSettled {
			return true
		}
	}
	return false
}

// offersAny reports whether Tandem has a plugin registered, or a device in the slices.
func (s *injector) offersAny(ctx context.Context) (bool, error) {
	sockets, err := s.auditor.list(faults.DevicePluginDir)
	if err != nil {
		return false, err
	}
	if slices.ContainsFunc(sockets, func(name string) bool { return strings.HasPrefix(name, "tandem") }) {
		return true, nil
	}
	ctx, cancel := context.WithTimeout(ctx, callPatience)
	defer cancel()
	offered, err := s.auditor.claimsOffer(ctx)
	return len(offered) > 0, err
}

// taken answers the minors of the GPUs that are, or may be, given away.
func (s *injector) taken(ctx context.Context) (map[int]bool, error) {
	used, err := s.used(ctx)
	if err != nil {
		return nil, err
	}
	taken := map[int]bool{}
	for _, at := range used {
		taken[at.gpu] = true
	}
	root, err := s.node.Root()
	if err != nil {
		return nil, err
	}
	gpus, err := oracle.GPUs(root)
	if err != nil {
		return nil, err
	}
	// Those of a plugin before that Tandem has not adopted yet.
	recorded, err := oracle.Recorded(root)
	if err != nil {
		return nil, err
	}
	for _, ids := range recorded {
		for _, id := range ids {
			if gpu, is := oracle.ForeignID(id); is {
				taken[gpu] = true
			}
		}
	}
	// The names of the records are enough: they have the UUIDs.
	holds, err := s.auditor.list(holdsDir)
	if err != nil {
		return nil, err
	}
	for gpu := range gpusANode {
		uuid := gpus[gpu].UUID
		taken[gpu] = taken[gpu] || uuid == "" || slices.ContainsFunc(holds, func(name string) bool { return strings.Contains(name, uuid) })
	}
	return taken, nil
}

// endForeign deletes the pods that kubelet has given a device of an unknown GPU.
func (s *injector) endForeign(ctx context.Context, format string) error {
	root, err := s.node.Root()
	if err != nil {
		return err
	}
	recorded, err := oracle.Recorded(root)
	if err != nil {
		return err
	}
	for _, v := range s.pods() {
		if slices.ContainsFunc(recorded[v.uid], func(id string) bool { return strings.HasPrefix(id, strings.TrimSuffix(format, "%d")) }) {
			if err := s.end(ctx, v, short); err != nil {
				return err
			}
		}
	}
	return nil
}
