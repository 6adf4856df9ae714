// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/hack/cluster"
)

// Lookout looks at one node again and again at little cost: it walks the pods' control groups instead of all processes, and
// reads the device nodes of a container until all its processes are in its own file system, since they never change afterwards. It
// is for one goroutine.
type Lookout struct {
	node *cluster.Node
	// shared says how GPUs are shared by several holders, by minor.
	shared map[int]Sharing
	// known are the devices of containers whose processes are in their own file systems, by container ID.
	known map[string][]Device
}

// NewLookout does not look yet. shared has the GPUs that the node's configuration shares, by minor. The caller passes them because the
// oracle cannot see this configuration.
func NewLookout(node *cluster.Node, shared map[int]Sharing) *Lookout {
	return &Lookout{node: node, shared: shared, known: map[string][]Device{}}
}

// Glimpse is what one look found.
type Glimpse struct {
	sightings []sighting
}

// Look lists the live processes of containers that can see GPUs, one for each container. A node that is down has none.
func (l *Lookout) Look() (Glimpse, error) {
	root, err := l.node.Root()
	if err != nil {
		return Glimpse{}, nil //nolint:nilerr // nothing runs on a machine without a first process
	}
	glimpse, err := l.lookBelow(root)
	if gone(unlessEnded(filepath.Dir(root), err)) {
		return Glimpse{}, nil
	}
	if err != nil {
		return Glimpse{}, fmt.Errorf("look at %s: %w", l.node.Name(), err)
	}
	return glimpse, nil
}

func (l *Lookout) lookBelow(root string) (Glimpse, error) {
	own, err := newViewpoint(filepath.Dir(root))
	if err != nil {
		return Glimpse{}, err
	}
	found, err := containersBelow(root)
	if err != nil {
		return Glimpse{}, err
	}
	var glimpse Glimpse
	fresh := make(map[string][]Device, len(found))
	for _, c := range found {
		seen, err := l.lookInto(own, c)
		if err != nil {
			return Glimpse{}, err
		}
		if devices, ok := l.known[c.id]; ok {
			fresh[c.id] = devices
		}
		if seen != nil {
			glimpse.sightings = append(glimpse.sightings, *seen)
		}
	}
	l.known = fresh
	return glimpse, nil
}

// lookInto answers the first live process of a container that can see a GPU, or nil.
func (l *Lookout) lookInto(own viewpoint, c group) (*sighting, error) {
	devices, known := l.known[c.id]
	if known && len(devices) == 0 {
		return nil, nil
	}
	pids, err := processesBelow(c.path)
	if err != nil {
		return nil, err
	}
	if !known {
		return l.lookFirst(own.path, c, pids, own.look)
	}
	for _, pid := range pids {
		started, err := startTime(filepath.Join("/proc", strconv.Itoa(pid)))
		if err != nil {
			continue
		}
		return &sighting{node: l.node.Name(), pid: pid, started: started, pod: c.pod, container: c.id, devices: devices}, nil
	}
	return nil, nil
}

// lookFirst looks into a container whose devices are not known, and remembers them once all its processes were looked at in its own
// file system.
//
// Until then an empty view proves nothing. A hook of the runtime runs among the container's processes and may enter its file system
// before the container itself does (nvidia-cdi-hook update-ldcache), in a mount namespace of its own, which the kernel takes apart a
// moment before it says that the process has ended (do_exit: exit_task_namespaces, exit_notify): its /dev is empty in between.
func (l *Lookout) lookFirst(root string, c group, pids []int, look func(pid int) (*sighting, error)) (*sighting, error) {
	var first *sighting
	all := true
	for _, pid := range pids {
		seen, err := look(pid)
		switch {
		case gone(err):
			all = false
		case err != nil:
			return nil, err
		case seen == nil || seen.container != c.id:
			all = false // on its way into the container, or from one group to another
		case first == nil || len(first.devices) == 0:
			first = seen
		}
	}
	if first == nil {
		return nil, nil
	}
	named := l.name(root, first.devices)
	if all && named {
		l.known[c.id] = first.devices
	}
	if len(first.devices) == 0 {
		return nil, nil
	}
	first.node = l.node.Name()
	return first, nil
}

// name fills in the GPUs and reports whether the files below the node's root directory told them all.
func (l *Lookout) name(root string, devices []Device) (all bool) {
	if len(devices) == 0 {
		return true
	}
	known, err := readGPUs(root)
	all = err == nil
	for i := range devices {
		if err == nil {
			devices[i].GPU = known.find(devices[i].gpu())
			all = all && devices[i].GPU.UUID != "" && (devices[i].Whole() || devices[i].Partition.UUID != "")
		}
		if devices[i].Whole() {
			devices[i].GPU.Sharing = l.shared[devices[i].Minor()]
		}
	}
	return all
}

// Suspicion is hardware that containers of different pods could see at one moment: a device, or a partition and its GPU. Whether
// that is right is for Memory.
type Suspicion struct {
	// Number is the device of the first, other that of all others.
	Number, other Number
	// those are live processes, two of them, or all that see a GPU that is shared: there was an instant at which all were.
	those []sighting
}

// numberIn is the device that is suspected in a container.
func (s Suspicion) numberIn(container string) Number {
	if container == s.those[0].container {
		return s.Number
	}
	return s.other
}

// Key is equal for the same device in the same containers.
func (s Suspicion) Key() string {
	var ids []string
	for _, one := range s.those {
		ids = append(ids, one.container)
	}
	slices.Sort(ids)
	numbers := []Number{s.Number, s.other}
	slices.SortFunc(numbers, Number.compare)
	return fmt.Sprintf("%s %s %s", numbers[0], numbers[1], strings.Join(ids, " "))
}

// String names device, pods and processes by what is known without the API server.
func (s Suspicion) String() string {
	var parts []string
	for _, one := range s.those {
		parts = append(parts, fmt.Sprintf("device %s: container %.12s of pod %s (process %d)",
			s.numberIn(one.container), one.container, one.pod, one.pid))
	}
	return strings.Join(parts, " and ")
}

// Suspicions compares the containers with each other. Of two processes seen one after the other the first may have ended
// before the second began: both must be alive still. Of a GPU that is shared all are suspected together, since each two of them
// may be right.
func (g Glimpse) Suspicions() []Suspicion {
	found := g.crowds()
	for i, a := range g.sightings {
		for _, b := range g.sightings[i+1:] {
			if a.pod == b.pod {
				continue
			}
			for _, device := range a.devices {
				for _, other := range b.devices {
					if device.Overlaps(other) && !device.together(other) && a.alive() && b.alive() {
						found = append(found, Suspicion{Number: device.Number, other: other.Number, those: []sighting{a, b}})
					}
				}
			}
		}
	}
	return found
}

// together reports whether both are one device that several may have at once.
func (d Device) together(other Device) bool { return d.Number == other.Number && d.GPU.Replicas > 0 }

// crowds are those who see a device that is shared, where they are of several pods.
func (g Glimpse) crowds() []Suspicion {
	var found []Suspicion
	for i, a := range g.sightings {
		for _, device := range a.devices {
			sees := func(s sighting) bool { return slices.ContainsFunc(s.devices, device.together) }
			if slices.ContainsFunc(g.sightings[:i], sees) {
				continue
			}
			var those []sighting
			for _, b := range g.sightings[i:] {
				if sees(b) && b.alive() {
					those = append(those, b)
				}
			}
			if slices.ContainsFunc(those, func(b sighting) bool { return b.pod != those[0].pod }) {
				found = append(found, Suspicion{Number: device.Number, other: device.Number, those: those})
			}
		}
	}
	return found
}

// Pods answers which devices the containers of each pod can see, by the pod's UID.
func (g Glimpse) Pods() map[string][]Device {
	pods := map[string][]Device{}
	for _, seen := range g.sightings {
		for _, device := range seen.devices {
			if !slices.ContainsFunc(pods[seen.pod], func(d Device) bool { return d.Number == device.Number }) {
				pods[seen.pod] = append(pods[seen.pod], device)
			}
		}
	}
	for _, devices := range pods {
		slices.SortFunc(devices, func(a, b Device) int { return a.Number.compare(b.Number) })
	}
	return pods
}

// group is the control group of a container.
type group struct {
	path, pod, id string
}

// PodGroups answers the UIDs of the pods that have a control group on a node, sorted. A node that is down has none.
func PodGroups(node *cluster.Node) ([]string, error) {
	root, err := node.Root()
	if err != nil {
		return nil, nil //nolint:nilerr // nothing runs on a machine without a first process
	}
	var uids []string
	err = walkGroups(root, func(path string) {
		if match := podGroup.FindStringSubmatch(filepath.Base(path)); match != nil {
			uids = append(uids, strings.ReplaceAll(match[1], "_", "-"))
		}
	})
	slices.Sort(uids)
	return slices.Compact(uids), err
}

func containersBelow(root string) ([]group, error) {
	var found []group
	err := walkGroups(root, func(path string) {
		if pod, container := parseCgroup(path); container != "" && strings.HasSuffix(strings.TrimSuffix(path, ".scope"), container) {
			found = append(found, group{path: path, pod: pod, id: container})
		}
	})
	slices.SortFunc(found, func(a, b group) int { return cmp.Compare(a.path, b.path) })
	return found, err
}

// walkGroups visits every control group below kubelet's, of one hierarchy where there are several: kubelet and the runtime make
// the same groups in each.
func walkGroups(root string, visit func(path string)) error {
	mount := filepath.Join(root, "sys/fs/cgroup")
	// The first is cgroup v2's, the second each of v1's.
	for _, pattern := range []string{"kubepods*", "pids/kubepods*", "*/kubepods*"} {
		tops, err := filepath.Glob(filepath.Join(mount, pattern))
		if err != nil {
			return err
		}
		if len(tops) == 0 {
			continue
		}
		return filepath.WalkDir(tops[0], func(path string, entry fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil {
				return err
			}
			if entry.IsDir() {
				visit(path)
			}
			return nil
		})
	}
	return nil
}

// processesBelow lists the processes of a group and of those that the container itself has made below it.
func processesBelow(dir string) ([]int, error) {
	var pids []int
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if gone(err) {
			return nil
		}
		if err != nil || !entry.IsDir() {
			return err
		}
		text, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		// Removed between the listing and the reading: ENODEV.
		if err != nil {
			return nil //nolint:nilerr // then nothing lives in it
		}
		for line := range strings.Lines(string(text)) {
			if pid, err := strconv.Atoi(strings.TrimSpace(line)); err == nil && pid > 0 {
				pids = append(pids, pid)
			}
		}
		return nil
	})
	return pids, err
}
