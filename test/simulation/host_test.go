// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"encoding/json"
	"fmt"
	"hash/crc32"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/podstate"
	"github.com/tandem-gpu/tandem/test/kubeletmodel"
)

const (
	nodeName     = "node-1"
	driverName   = "gpu.nvidia.com"
	resourceName = "nvidia.com/gpu"
)

// limits asks for whole GPUs only.
var limits = device.Resources{GPU: resourceName}

// host is the machine: what lives on it without regard to kubelet and agent. It is the oracle, too: it knows which GPUs a
// container was really given, and by whom.
type host struct {
	*schedule
	dir  string
	gpus int
	boot int
	pods map[string]*podGroup
	// alive is the life of what runs on the machine.
	alive *process
	// written is closed when kubelet writes its device checkpoint or its claim state.
	written chan struct{}
	// clock is how far the clock of file stamps is ahead.
	clock time.Duration
	// slowUntil is when the disk is no longer slow.
	slowUntil time.Time
	// stamped is when, named are the IDs in it.
	stamped time.Time
	named   []string

	// unhealthy are the GPUs that have a fault, clocks those that a holder has set, by UUID.
	unhealthy     map[string]bool
	faultsChanged broadcast.Signal
	clocks        map[string]clock
	// foreign are the holders, by UID, that foreign drivers served: what they set before the agent came counts as an administrator's settings.
	foreign map[string]bool
	// driver guards what the driver knows, unhealthy, clocks and modes: some loops of the agent run beside the schedule.
	driver sync.Mutex
	// modes are the compute modes of GPUs by UUID, where they are not the default.
	modes       map[string]device.ComputeMode
	mig         migDriver
	devices     *clientDevices
	supervisors map[string]*supervisor // by the names of their pods
	// answers are the daemons of pods with limits, by UID, and the CDI devices of claims, by UID: kubelet stores both.
	answers map[string]string
	cdi     map[string][]string
	// mixed are the claims, by UID, for which a kubelet before 1.37 still has CDI devices of an earlier allocation. The runtime cannot make
	// their pods' containers when such a device is gone, until kubelet unprepares the claim.
	mixed map[string]bool
}

// podGroup is what there is of a pod on the machine: a cgroup, and processes in it or not.
type podGroup struct {
	// grants are what its containers run with, or ran with.
	grants []grant
	busy   bool
}

// grant is what a pod has of one holder: of a claim, or of the pod itself by its limit.
type grant struct {
	owner string // the holder's UID
	parts []string
	// cdi are the CDI devices of a claim, daemon is the MPS daemon of which the containers are clients; empty for none.
	cdi    []string
	daemon string
}

// ran reports whether its containers were started.
func (g *podGroup) ran() bool { return g != nil && len(g.grants) > 0 }

func newHost(s *schedule, dir string, gpus int) (*host, error) {
	h := &host{
		schedule: s, dir: dir, gpus: gpus, boot: 1, pods: map[string]*podGroup{}, alive: newProcess("host"), written: make(chan struct{}),
		unhealthy: map[string]bool{}, clocks: map[string]clock{}, foreign: map[string]bool{}, modes: map[string]device.ComputeMode{}, devices: &clientDevices{daemons: map[string]string{}}, supervisors: map[string]*supervisor{},
		answers: map[string]string{}, cdi: map[string][]string{}, mixed: map[string]bool{},
	}
	for _, sub := range []string{h.kubeletDir() + "/device-plugins", h.cgroups() + "/kubepods/burstable", h.run()} {
		if err := os.MkdirAll(sub, 0o700); err != nil {
			return nil, err
		}
	}
	return h, nil
}

func (h *host) kubeletDir() string { return filepath.Join(h.dir, "kubelet") }
func (h *host) cgroups() string    { return filepath.Join(h.dir, "cgroup") }
func (h *host) run() string        { return filepath.Join(h.dir, "run") }
func (h *host) bootID() string     { return fmt.Sprintf("boot-%d", h.boot) }

func gpuUUID(i int) string { return fmt.Sprintf("GPU-%d", i) }

// start runs the containers of a pod. Here is where a GPU would get its second owner.
func (h *host) start(uid string, grants []grant) {
	h.note(fmt.Sprintf("    pod %s runs with %v", uid, grants))
	h.pods[uid] = &podGroup{grants: grants, busy: true}
	h.write(uid)
	for _, g := range grants {
		h.checkOwner(uid, g)
		h.checkDaemon(uid, g)
		h.checkPartitions(uid, g)
		h.checkSettings(uid, g)
		h.changeClocks(g)
	}
}

// checkOwner compares a grant of a pod that starts to those of all pods that run, itself among them.
func (h *host) checkOwner(uid string, mine grant) {
	beside := having{}
	for _, other := range sorted(h.pods) {
		for _, g := range h.pods[other].grants {
			if !h.pods[other].busy || g.owner == mine.owner {
				continue
			}
			for _, p := range mine.parts {
				if slices.ContainsFunc(g.parts, func(q string) bool { return gpuOf(q) == gpuOf(p) && amountOf(q).excludes(amountOf(p)) }) {
					h.fail("%s has two owners: %s in pod %s still runs, %s in pod %s starts", p, g.owner, other, mine.owner, uid)
				}
			}
			beside.give(g.owner, g.parts)
		}
	}
	for _, p := range mine.parts {
		has := amountOf(p)
		if !has.all && beside.fit(gpuOf(p), mine.owner, has) == 0 {
			h.fail("%s is too much for %s in pod %s beside %v", p, mine.owner, uid, beside)
		}
		if !has.all {
			h.sawBeside(mine.owner, has, beside[gpuOf(p)])
		}
	}
}

// sawBeside counts what starts with a part of a GPU of which others have some, too.
func (h *host) sawBeside(owner string, has amount, others map[string]amount) {
	for _, other := range sorted(others) {
		if has.slices != 0 {
			h.hit(partitionBesidePartition)
			continue
		}
		switch both := isClaim(owner) && isClaim(other); {
		case both && has == amount{}:
			h.hit(noLimitBesideShare)
		case both && has.of > 0:
			h.hit(equalBesideEqual)
		case has.of > 0 && isClaim(owner) != isClaim(other):
			h.hit(equalBesideReplica)
		}
		switch {
		case isClaim(owner) && isClaim(other):
			h.hit(shareBesideShare)
		case isClaim(owner) || isClaim(other):
			h.hit(shareBesideReplica)
		default:
			h.hit(replicaBesideReplica)
		}
	}
}

// isClaim reports whether a holder is a claim.
func isClaim(owner string) bool { return strings.HasPrefix(owner, "claim-") }

// makeGroup is the cgroup before the first container.
func (h *host) makeGroup(uid string) {
	if h.pods[uid] == nil {
		h.pods[uid] = &podGroup{}
		h.write(uid)
	}
}

// end kills the processes of a pod; its cgroup stays.
func (h *host) end(uid string) {
	if group := h.pods[uid]; group != nil && group.busy {
		group.busy = false
		h.write(uid)
	}
}

// removeGroup removes what is left of a pod.
func (h *host) removeGroup(uid string) {
	if h.pods[uid] != nil {
		delete(h.pods, uid)
		h.check(os.RemoveAll(h.group(uid)))
	}
}

func (h *host) busy(uid string) bool { return h.pods[uid] != nil && h.pods[uid].busy }

func (h *host) group(uid string) string { return filepath.Join(h.cgroups(), "kubepods", "pod"+uid) }

func (h *host) write(uid string) {
	populated := "populated 0\n"
	if h.pods[uid].busy {
		populated = "populated 1\n"
	}
	h.check(os.MkdirAll(h.group(uid), 0o700))
	h.check(os.WriteFile(filepath.Join(h.group(uid), "cgroup.events"), []byte(populated), 0o600))
}

func (h *host) check(err error) {
	if err != nil {
		h.fail("host: %v", err)
	}
}

// reboot ends every process and empties what does not survive it.
func (h *host) reboot() {
	h.boot++
	h.kill(h.alive)
	h.alive = newProcess("host")
	for _, uid := range sorted(h.pods) {
		h.removeGroup(uid)
	}
	for _, name := range sorted(h.supervisors) {
		v := h.supervisors[name]
		h.kill(v.process)
		if v.holder != nil {
			h.check(v.holder.Release())
		}
	}
	clear(h.supervisors)
	h.driver.Lock()
	clear(h.modes)
	clear(h.clocks)
	clear(h.mig.partitions)
	clear(h.mig.enabled)
	clear(h.mig.was)
	clear(h.mig.foreign)
	h.driver.Unlock()
	clear(h.devices.daemons)
	h.check(os.RemoveAll(h.run()))
	h.check(os.MkdirAll(h.run(), 0o700))
}

// stamp is the clock of file stamps. It ticks every 4 ms, and faults set it.
func (h *host) stamp() time.Time { return time.Now().Add(h.clock).Truncate(4 * time.Millisecond) }

// setClock sets the clock of file stamps, most often by less than a tick or by milliseconds.
func (s *simulation) setClock() {
	most := []time.Duration{4 * time.Millisecond, 100 * time.Millisecond, 10 * time.Second, time.Hour}[s.rand.IntN(4)]
	before := s.host.clock
	if s.host.clock = s.between(0, 2*most) - most; s.host.clock < before {
		s.hit(clockSetBack)
	}
}

func (h *host) writeFile(path string, data []byte) {
	temporary := path + ".tmp"
	h.check(os.WriteFile(temporary, data, 0o600))
	h.check(os.Chtimes(temporary, h.stamp(), h.stamp()))
	h.check(os.Rename(temporary, path))
}

// encode returns kubelet's account of limits as it is in its file, and the IDs in it.
func (h *host) encode(c kubeletmodel.Checkpoint) (data []byte, named []string) {
	entries := []any{}
	for _, uid := range sorted(c.Pods) {
		for _, container := range sorted(c.Pods[uid]) {
			ids := c.Pods[uid][container][resourceName]
			named = append(named, ids...)
			entries = append(entries, map[string]any{
				"PodUID": uid, "ContainerName": container, "ResourceName": resourceName, "DeviceIDs": map[string]any{"0": ids},
			})
		}
	}
	data, err := json.Marshal(map[string]any{
		"Data": map[string]any{"PodDeviceEntries": entries, "RegisteredDevices": c.Registered}, "Checksum": 1,
	})
	h.check(err)
	return data, named
}

// writeCheckpoint writes kubelet's account of limits.
func (h *host) writeCheckpoint(data []byte, named []string) {
	h.writeFile(podstate.DeviceCheckpointPath(h.kubeletDir()), data)
	h.stamped, h.named = h.stamp(), named
	h.wrote()
}

// wrote tells who watches kubelet's files.
func (h *host) wrote() {
	close(h.written)
	h.written = make(chan struct{})
}

func (h *host) readCheckpoint() *kubeletmodel.Checkpoint {
	read, err := podstate.ReadDeviceCheckpoint(h.kubeletDir())
	h.check(err)
	if read.Written.IsZero() {
		return nil
	}
	pods := kubeletmodel.PodDevices{}
	for _, d := range read.Devices {
		if pods[d.PodUID] == nil {
			pods[d.PodUID] = map[string]kubeletmodel.ByResource{}
		}
		if pods[d.PodUID][d.Container] == nil {
			pods[d.PodUID][d.Container] = kubeletmodel.ByResource{}
		}
		pods[d.PodUID][d.Container][d.Resource] = append(pods[d.PodUID][d.Container][d.Resource], d.ID)
	}
	return &kubeletmodel.Checkpoint{Pods: pods, Registered: read.Registered}
}

// claimInfo is kubelet's account of a claim.
type claimInfo struct {
	uid, name             string
	pods                  map[string]bool
	devices               []string
	prepared, unpreparing bool
}

func (h *host) statePath() string { return filepath.Join(h.kubeletDir(), "dra_manager_state") }

func (h *host) writeState(claims map[string]*claimInfo) {
	list := []any{}
	for _, name := range sorted(claims) {
		c := claims[name]
		devices := []any{}
		for _, d := range c.devices {
			devices = append(devices, map[string]any{"PoolName": h.poolOf(d), "DeviceName": d, "CDIDeviceIDs": h.cdi[c.uid]})
		}
		pods := map[string]any{}
		for uid := range maps.Keys(c.pods) {
			pods[uid] = struct{}{}
		}
		list = append(list, map[string]any{
			"ClaimUID": c.uid, "ClaimName": c.name, "Namespace": namespace, "PodUIDs": pods,
			"DriverState": map[string]any{driverName: map[string]any{"Devices": devices}},
		})
	}
	inner, err := json.Marshal(map[string]any{"ClaimInfoStateList": list})
	h.check(err)
	data, err := json.Marshal(map[string]any{"Data": string(inner), "Checksum": crc32.ChecksumIEEE(inner)})
	h.check(err)
	h.writeFile(h.statePath(), data)
	h.wrote()
}

func (h *host) readState() map[string]*claimInfo {
	claims := map[string]*claimInfo{}
	known, err := podstate.ReadClaimState(h.kubeletDir(), driverName)
	h.check(err)
	for _, k := range known {
		c := &claimInfo{uid: k.UID, name: k.Name, pods: map[string]bool{}}
		for _, uid := range k.PodUIDs {
			c.pods[uid] = true
		}
		for _, d := range k.Devices {
			c.devices = append(c.devices, d.Device)
		}
		claims[c.name] = c
	}
	return claims
}
