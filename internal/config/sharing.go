// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// SharingRule sets how the GPUs of a DeviceRule are shared.
type SharingRule struct {
	// Strategy is TimeSlicing, MPS, or None.
	Strategy device.SharingStrategy `json:"strategy"`
	// Interval is for TimeSlicing: Default, Short, Medium or Long.
	Interval string `json:"interval,omitempty"`
	// Replicas is the number of devices that the device plugin offers for each GPU: 2 or more, or zero for no replicas.
	Replicas int `json:"replicas,omitempty"`
	// MemoryShares lets claims request a part of the memory (capacity.requests.memory).
	MemoryShares bool `json:"memoryShares,omitempty"`
	// Namespaces are those that may be clients of the daemon (strategy MPS). Without the key, all may.
	Namespaces namespaceList `json:"namespaces,omitempty"`
}

// namespaceList is a list of names that can be compared: sorted and joined by commas.
type namespaceList string

// UnmarshalJSON implements json.Unmarshaler. An empty list is an error, because it would mean all namespaces.
func (n *namespaceList) UnmarshalJSON(text []byte) error {
	var names []string
	if err := json.Unmarshal(text, &names); err != nil {
		return fmt.Errorf("namespaces: %w", err)
	}
	if len(names) == 0 {
		return errors.New("namespaces: the list is empty: name a namespace, or remove the key to admit all")
	}
	for _, name := range names {
		if wrong := validation.IsDNS1123Label(name); len(wrong) > 0 {
			return fmt.Errorf("namespaces: %q is no name of a namespace: %s", name, strings.Join(wrong, "; "))
		}
	}
	slices.Sort(names)
	*n = namespaceList(strings.Join(slices.Compact(names), ","))
	return nil
}

// notShared is the strategy of a rule that excludes sharing.
const notShared device.SharingStrategy = "None"

func (r SharingRule) check(p *problems, at string) {
	if r.Strategy == notShared {
		if r != (SharingRule{Strategy: notShared}) {
			p.add(at, "strategy None excludes sharing: remove interval, replicas, memoryShares and namespaces")
		}
		return
	}
	oneOf(p, at+".strategy", r.Strategy, device.TimeSlicing, device.MPS, notShared)
	if r.Replicas == 0 && !r.MemoryShares {
		p.add(at, "has no effect: set replicas (for limits), memoryShares (for claims) or both")
	}
	if r.Interval != "" {
		oneOf(p, at+".interval", r.Interval, device.Intervals...)
		if r.Strategy == device.MPS {
			p.add(at+".interval", "is for strategy %s: with %s processes run at the same time", device.TimeSlicing, device.MPS)
		}
	}
	if r.Namespaces != "" && r.Strategy != device.MPS {
		p.add(at+".namespaces", "is for strategy %s, whose clients share memory and sockets", device.MPS)
	}
	if r.Replicas != 0 && r.Replicas < 2 {
		p.add(at+".replicas", tooFew)
	}
	if r.Strategy == device.MPS && r.Replicas > device.MPSClients {
		p.add(at+".replicas", "%s", tooManyClients)
	}
}

const tooFew = "number of replicas must be >= 2"

var tooManyClients = fmt.Sprintf("maximum allowed replicas is %d with MPS, the most clients that a daemon serves", device.MPSClients)

// policy returns the rule's policy for one GPU.
func (r SharingRule) policy() device.Sharing {
	if r.Strategy == notShared {
		return device.Sharing{}
	}
	s := device.Sharing{Strategy: r.Strategy, Interval: r.Interval, MemoryShares: r.MemoryShares}
	if r.Namespaces != "" {
		s.Namespaces = strings.Split(string(r.Namespaces), ",")
	}
	if r.Replicas > 1 {
		s.Replicas = map[string]device.Replicas{"": {Count: r.Replicas}}
	}
	return s
}

// fileSharing has NVIDIA's keys.
type fileSharing struct {
	TimeSlicing *fileReplicated `json:"timeSlicing"`
	MPS         *fileReplicated `json:"mps"`
}

type fileReplicated struct {
	RenameByDefault            bool                 `json:"renameByDefault"`
	FailRequestsGreaterThanOne *bool                `json:"failRequestsGreaterThanOne"`
	Resources                  []fileSharedResource `json:"resources"`
}

type fileSharedResource struct {
	Name     string          `json:"name"`
	Rename   string          `json:"rename"`
	Devices  json.RawMessage `json:"devices"`
	Replicas *int            `json:"replicas"`
}

// NodeSharing is how pods share the GPUs that no rule matches, with NVIDIA's keys.
type NodeSharing struct {
	Strategy  device.SharingStrategy
	Resources []SharedResource
}

// SharedResource is how the devices of one resource are shared.
type SharedResource struct {
	Name     string
	Replicas device.Replicas
	// GPUs by UUID or index; nil for all. First, if it is not zero, is the number of GPUs instead, from the lowest index.
	GPUs  []string
	First int
}

// setSharing reads the section of NVIDIA's device plugin.
func (c *Config) setSharing(f fileSharing) error {
	section, path, strategy := f.TimeSlicing, "sharing.timeSlicing", device.TimeSlicing
	switch {
	case f.MPS == nil, section != nil && len(f.MPS.Resources) == 0:
	case section != nil && len(section.Resources) > 0:
		return errors.New("sharing.mps: conflicts with sharing.timeSlicing: set one of the two")
	default:
		section, path, strategy = f.MPS, "sharing.mps", device.MPS
	}
	if section == nil {
		return nil
	}
	// It applies to the replicas of rules, too.
	c.FailRequestsGreaterThanOne = ptr.Deref(section.FailRequestsGreaterThanOne, false)
	if strategy == device.MPS && !ptr.Deref(section.FailRequestsGreaterThanOne, true) {
		return fmt.Errorf("%s.failRequestsGreaterThanOne: false is not supported: a container can be the client of one MPS daemon", path)
	}
	switch {
	case len(section.Resources) > 0:
	case section.RenameByDefault:
		return fmt.Errorf("%s.resources: no resources specified", path)
	default:
		return nil
	}
	sharing := NodeSharing{Strategy: strategy}
	var errs []error
	for i, r := range section.Resources {
		shared, err := c.sharedResource(r, section.RenameByDefault)
		switch {
		case err != nil:
		case strategy != device.MPS:
		case shared.Name != c.ResourceName:
			err = errors.New("name: sharing using MPS is not supported for MIG devices")
		case shared.Replicas.Count > device.MPSClients:
			err = errors.New("replicas: " + tooManyClients)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s.resources[%d].%w", path, i, err))
		}
		sharing.Resources = append(sharing.Resources, shared)
	}
	errs = append(errs, sharing.ambiguous(path))
	c.Sharing = sharing
	return errors.Join(errs...)
}

func (c *Config) sharedResource(r fileSharedResource, renamed bool) (SharedResource, error) {
	if r.Name == "" {
		return SharedResource{}, errors.New("name: no resource name specified")
	}
	domain, _, _ := strings.Cut(c.ResourceName, "/")
	shared := SharedResource{Name: r.Name}
	if !strings.Contains(r.Name, "/") {
		shared.Name = domain + "/" + r.Name
	}
	if !(device.Resources{GPU: c.ResourceName}).Has(shared.Name) {
		return SharedResource{}, fmt.Errorf("name: %s is not a resource of GPUs (%s, %s/mig-<profile>)", shared.Name, c.ResourceName, domain)
	}
	if r.Replicas == nil {
		return SharedResource{}, errors.New("replicas: no replicas specified")
	}
	if *r.Replicas < 2 {
		return SharedResource{}, errors.New("replicas: " + tooFew)
	}
	if only := shared.Name + device.SharedSuffix; r.Rename != "" && r.Rename != only && domain+"/"+r.Rename != only {
		return SharedResource{}, fmt.Errorf("rename: %q is not supported by this version of Tandem: only %s is", r.Rename, only)
	}
	shared.Replicas = device.Replicas{Count: *r.Replicas, Renamed: renamed || r.Rename != ""}
	return shared, shared.setDevices(r.Devices)
}

// setDevices reads "all", a number, or a list of UUIDs and indices of GPUs.
func (s *SharedResource) setDevices(raw json.RawMessage) error {
	if len(raw) == 0 || string(raw) == "null" {
		return nil
	}
	var word string
	if json.Unmarshal(raw, &word) == nil {
		if word != "all" {
			return fmt.Errorf("devices: devices set as '%s' but the only valid string input is 'all'", word)
		}
		return nil
	}
	if json.Unmarshal(raw, &s.First) == nil {
		if s.First <= 0 {
			return fmt.Errorf("devices: devices set as '%d' but a count of devices must be > 0", s.First)
		}
		return nil
	}
	var list []any
	if err := json.Unmarshal(raw, &list); err != nil || len(list) == 0 {
		return fmt.Errorf("devices: unrecognized type for devices spec: %s", raw)
	}
	for i, item := range list {
		text := fmt.Sprint(item)
		if _, isIndex := strconv.Atoi(text); isIndex != nil && !strings.HasPrefix(text, "GPU-") {
			return fmt.Errorf("devices[%d]: %q is neither the index of a GPU nor its UUID (all partitions of a GPU are shared in the same way)", i, text)
		}
		s.GPUs = append(s.GPUs, text)
	}
	return nil
}

// ambiguous returns an error if two entries set the same resource for the same GPU.
func (s NodeSharing) ambiguous(path string) error {
	for i, r := range s.Resources {
		for j, other := range s.Resources[:i] {
			apart := r.GPUs != nil && other.GPUs != nil && !slices.ContainsFunc(r.GPUs, func(g string) bool { return slices.Contains(other.GPUs, g) })
			if r.Name == other.Name && !apart {
				return fmt.Errorf("%s.resources[%d] and %s.resources[%d] both set %s", path, j, path, i, r.Name)
			}
		}
	}
	return nil
}

func (s SharedResource) has(gpu device.GPU) bool {
	switch {
	case s.First > 0:
		return gpu.Index < s.First
	case s.GPUs == nil:
		return true
	default:
		return slices.Contains(s.GPUs, gpu.UUID) || slices.Contains(s.GPUs, strconv.Itoa(gpu.Index))
	}
}

// SharingOf returns the sharing policy of a GPU. It is pure, and does not depend on the mode. It returns no sharing for a GPU
// with contradicting rules and for an excluded GPU.
func (c Config) SharingOf(gpu device.GPU) device.Sharing {
	if c.Excluded(gpu) {
		return device.Sharing{}
	}
	rule, err := agreed(c, gpu, "different sharing", DeviceRule.sharing)
	if err != nil {
		return device.Sharing{}
	}
	if rule != (SharingRule{}) {
		return rule.policy()
	}
	s := device.Sharing{Strategy: c.Sharing.Strategy}
	for _, r := range c.Sharing.Resources {
		if !r.has(gpu) {
			continue
		}
		if s.Replicas == nil {
			s.Replicas = map[string]device.Replicas{}
		}
		name := r.Name
		if s.Strategy == device.MPS {
			name = "" // that of GPUs, the only one
		}
		s.Replicas[name] = r.Replicas
	}
	if !s.Shared() {
		return device.Sharing{}
	}
	return s
}
