// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"cmp"
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
	// Shares is the number of equal shares of the GPU. A claim gets one, or as many as it requests (capacity.requests.shares).
	Shares int `json:"shares,omitempty"`
	// Unlimited lets any number of claims share the GPU.
	Unlimited bool `json:"unlimited,omitempty"`
	// Namespaces are a list of the namespaces that may be clients of the daemon (strategy MPS). Without the key, all may.
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
			p.add(at, "strategy None excludes sharing: remove all other keys")
		}
		return
	}
	oneOf(p, at+".strategy", r.Strategy, device.TimeSlicing, device.MPS, notShared)
	claims := r.claims()
	if r.Replicas == 0 && len(claims) == 0 {
		p.add(at, "has no effect: set replicas (for limits), or one of memoryShares, shares and unlimited (for claims), or both")
	}
	if len(claims) > 1 {
		p.add(at, "claims share a GPU in one way: set only one of memoryShares, shares and unlimited")
	}
	if r.Shares < 0 || r.Shares > maxShares {
		p.add(at+".shares", "must be 1 to %d, or 0 for none", maxShares)
	}
	if r.Strategy == device.MPS && (r.Shares != 0 || r.Unlimited) {
		p.add(at, "shares and unlimited are for strategy %s: with %s set memoryShares", device.TimeSlicing, device.MPS)
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

// maxShares bounds the equal shares of a GPU.
const maxShares = 1024

// claims returns the ways in which the rule lets claims share a GPU.
func (r SharingRule) claims() (ways []device.ClaimShares) {
	if r.MemoryShares {
		ways = append(ways, device.ByMemory)
	}
	if r.Shares != 0 {
		ways = append(ways, device.ByCount)
	}
	if r.Unlimited {
		ways = append(ways, device.Unlimited)
	}
	return ways
}

// claimShares returns ConsumableShares as a policy. ok is false if it has no such value.
func (c Config) claimShares() (claims device.ClaimShares, shares int, ok bool) {
	switch c.ConsumableShares {
	case "", "disabled":
		return "", 0, true
	case string(device.ByMemory), string(device.Unlimited):
		return device.ClaimShares(c.ConsumableShares), 0, true
	}
	shares, err := strconv.Atoi(c.ConsumableShares)
	return device.ByCount, shares, err == nil && shares >= 1 && shares <= maxShares && strconv.Itoa(shares) == c.ConsumableShares
}

func (c Config) checkConsumableShares(p *problems) {
	claims, _, ok := c.claimShares()
	switch {
	case !ok:
		p.add("--consumable-shares", "%q is not disabled, memory, unlimited or a number from 1 to %d", c.ConsumableShares, maxShares)
	case c.Sharing.Strategy == device.MPS && (claims == device.ByCount || claims == device.Unlimited):
		p.add("--consumable-shares", "%s is for time-slicing, but sharing.mps is set: choose memory, or remove sharing.mps", c.ConsumableShares)
	}
}

const tooFew = "number of replicas must be >= 2"

var tooManyClients = fmt.Sprintf("maximum allowed replicas is %d with MPS, the most clients that a daemon serves", device.MPSClients)

func (r SharingRule) policy() device.Sharing {
	if r.Strategy == notShared {
		return device.Sharing{}
	}
	s := device.Sharing{Strategy: r.Strategy, Interval: r.Interval, Shares: r.Shares}
	for _, way := range r.claims() {
		s.Claims = way
	}
	if r.Namespaces != "" {
		s.Namespaces = strings.Split(string(r.Namespaces), ",")
	}
	if r.Replicas > 1 {
		s.Replicas = map[string]device.Replicas{"": {Count: r.Replicas}}
	}
	return withinShares(s)
}

// ChecksNamespaces reports whether some GPUs may be shared by pods of some namespaces only.
func (c Config) ChecksNamespaces() bool {
	return slices.ContainsFunc(c.Devices, func(r DeviceRule) bool { return r.Sharing != nil && r.Sharing.Namespaces != "" })
}

// fileSharing has NVIDIA's keys.
type fileSharing struct {
	// TimeSlicing offers replicas of devices to pods with limits, whose processes take turns.
	TimeSlicing *fileReplicated `json:"timeSlicing"`
	// MPS offers replicas of GPUs to pods with limits, as clients of an MPS daemon. It overrides timeSlicing.
	MPS *fileReplicated `json:"mps"`
}

type fileReplicated struct {
	// RenameByDefault appends .shared to the names of the resources.
	RenameByDefault bool `json:"renameByDefault"`
	// FailRequestsGreaterThanOne refuses a container that requests several replicas. With mps they are always refused.
	FailRequestsGreaterThanOne *bool `json:"failRequestsGreaterThanOne"`
	// Resources are what to share.
	Resources []fileSharedResource `json:"resources"`
}

type fileSharedResource struct {
	// Name is the name of the extended resource.
	Name string `json:"name"`
	// Rename has no effect, as in NVIDIA's device plugin: only renameByDefault renames.
	Rename string `json:"rename"`
	// Devices are all (the default), a number of GPUs, or a list of indices and UUIDs; "0:1" is a partition. MPS shares GPUs only.
	Devices json.RawMessage `json:"devices"`
	// Replicas is the number for each device, 2 or more; 48 at most with mps.
	Replicas *int `json:"replicas"`
}

// NodeSharing is how pods share the GPUs that no rule matches, with NVIDIA's keys.
type NodeSharing struct {
	Strategy  device.SharingStrategy
	Resources []SharedResource
}

// SharedResource is how the devices of one resource are shared.
type SharedResource struct {
	// Path is the entry's place in the file.
	Path     string
	Name     string
	Replicas device.Replicas
	// Only are GPUs and partitions by UUID or index, "<index of the GPU>:<index>" for a partition. nil is for all. First, if it is not zero, is
	// the number of GPUs instead, from the lowest index.
	Only  []string
	First int
}

// setSharing reads the section of NVIDIA's device plugin. If both strategies are set, MPS counts, as there (api/config/v1,
// ReplicatedResources).
func (c *Config) setSharing(f fileSharing) error {
	sliced, slicedErr := c.replicated(f.TimeSlicing, "sharing.timeSlicing", device.TimeSlicing)
	mps, mpsErr := c.replicated(f.MPS, "sharing.mps", device.MPS)
	section := f.TimeSlicing
	c.Sharing = sliced
	if f.MPS != nil && (f.TimeSlicing == nil || len(f.MPS.Resources) > 0) {
		section = f.MPS
		c.Sharing = mps
		if len(sliced.Resources) > 0 {
			c.Unused = append(c.Unused, "sharing.timeSlicing: sharing.mps is set as well, and takes precedence")
		}
		if !ptr.Deref(f.MPS.FailRequestsGreaterThanOne, true) {
			c.Unused = append(c.Unused, "sharing.mps.failRequestsGreaterThanOne: a container can be the client of only one MPS daemon, so a request for several replicas is always refused")
		}
	}
	if section != nil {
		// It applies to the replicas of rules, too.
		c.FailRequestsGreaterThanOne = ptr.Deref(section.FailRequestsGreaterThanOne, false)
	}
	return errors.Join(slicedErr, mpsErr)
}

func (c *Config) replicated(section *fileReplicated, path string, strategy device.SharingStrategy) (NodeSharing, error) {
	switch {
	case section == nil, len(section.Resources) == 0 && !section.RenameByDefault:
		return NodeSharing{}, nil
	case len(section.Resources) == 0:
		return NodeSharing{}, fmt.Errorf("%s.resources: no resources specified", path)
	}
	sharing := NodeSharing{Strategy: strategy}
	var errs []error
	for i, r := range section.Resources {
		at := fmt.Sprintf("%s.resources[%d]", path, i)
		shared, err := c.sharedResource(r, section.RenameByDefault)
		if err == nil && !(device.Resources{GPU: c.ResourceName}).Has(shared.Name) {
			c.Unused = append(c.Unused, at+": Tandem serves no resource "+shared.Name)
			continue
		}
		if r.Rename != "" && !isSharedName(r.Rename, shared.Name, section.RenameByDefault) {
			c.Unused = append(c.Unused, at+".rename: only renameByDefault renames, as in NVIDIA's device plugin")
		}
		if strategy == device.MPS && slices.ContainsFunc(shared.Only, isPartition) {
			c.Unused = append(c.Unused, at+".devices: MPS shares GPUs only, so the partitions in the list are not shared")
		}
		switch {
		case err != nil:
		case strategy != device.MPS:
		case shared.Name != c.ResourceName:
			err = errors.New("name: sharing using MPS is not supported for MIG devices")
		case shared.Replicas.Count > device.MPSClients:
			err = errors.New("replicas: " + tooManyClients)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s.%w", at, err))
		}
		shared.Path = at
		sharing.Resources = append(sharing.Resources, shared)
	}
	return sharing, errors.Join(errs...)
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
	if r.Replicas == nil {
		return SharedResource{}, errors.New("replicas: no replicas specified")
	}
	if *r.Replicas < 2 {
		return SharedResource{}, errors.New("replicas: " + tooFew)
	}
	if r.Rename != "" {
		if err := checkRename(r.Rename); err != nil {
			return SharedResource{}, fmt.Errorf("rename: %w", err)
		}
	}
	shared.Replicas = device.Replicas{Count: *r.Replicas, Renamed: renamed}
	return shared, shared.setDevices(r.Devices)
}

// isSharedName reports whether rename asks for the name that a shared resource has anyway.
func isSharedName(rename, name string, renamed bool) bool {
	domain, _, _ := strings.Cut(name, "/")
	return renamed && domain+"/"+strings.TrimPrefix(rename, domain+"/") == name+device.SharedSuffix
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
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber()
	if err := decoder.Decode(&list); err != nil {
		return fmt.Errorf("devices: unrecognized type for devices spec: %s", raw)
	}
	s.Only = []string{}
	for i, item := range list {
		text := fmt.Sprint(item)
		_, isNumber := item.(json.Number)
		switch index, err := strconv.ParseUint(text, 10, 31); {
		case err == nil:
			text = strconv.FormatUint(index, 10)
		case isNumber, !isPartition(text) && !strings.HasPrefix(text, "GPU-"):
			return fmt.Errorf("devices[%d]: unsupported type for device in devices list: %q is neither an index (0, or 0:1 for a partition) nor a UUID", i, text)
		}
		s.Only = append(s.Only, text)
	}
	return nil
}

func isIndex(text string) bool {
	_, err := strconv.ParseUint(text, 10, 31)
	return err == nil
}

func isPartition(text string) bool {
	gpu, index, found := strings.Cut(text, ":")
	return found && isIndex(gpu) && isIndex(index) || strings.HasPrefix(text, "MIG-")
}

// matches reports whether the list names the GPU.
func (s SharedResource) matches(gpu device.GPU) bool {
	if s.First > 0 {
		return gpu.Index < s.First
	}
	return s.Only == nil || slices.Contains(s.Only, gpu.UUID) || slices.Contains(s.Only, strconv.Itoa(gpu.Index))
}

// partitions returns the UUIDs of partitions that the list names, in any form of NVIDIA's device plugin (api/config/v1, IsMigIndex,
// IsMigUUID).
func (s SharedResource) partitions(gpu device.GPU) (uuids []string) {
	for _, p := range gpu.Partitions {
		for _, name := range []string{p.UUID, fmt.Sprintf("%d:%d", gpu.Index, p.Index), fmt.Sprintf("MIG-%s/%d/%d", gpu.UUID, p.GPUInstance, p.ComputeInstance)} {
			if p.UUID != "" && slices.Contains(s.Only, name) {
				uuids = append(uuids, p.UUID)
				break
			}
		}
	}
	return uuids
}

// CheckSharing returns an error for each entry of sharing whose devices are not on this node: it has no effect. One configuration may
// serve several nodes.
func (c Config) CheckSharing(inv device.Inventory) error {
	var errs []error
	for _, r := range c.Sharing.Resources {
		matches := func(g device.GPU) bool {
			return r.matches(g) || c.Sharing.Strategy != device.MPS && len(r.partitions(g)) > 0
		}
		if len(r.Only) > 0 && !slices.ContainsFunc(inv.GPUs, matches) {
			errs = append(errs, fmt.Errorf("%s.devices: %s is not shared on this node, because it has none of the devices %s", r.Path, r.Name, strings.Join(r.Only, ", ")))
		}
	}
	return errors.Join(errs...)
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
	if claims, shares, _ := c.claimShares(); claims != "" {
		s.Claims, s.Shares = claims, shares
		s.Strategy = cmp.Or(s.Strategy, device.TimeSlicing)
	}
	replicas := map[string]device.Replicas{}
	for _, r := range c.Sharing.Resources {
		name := r.Name
		if s.Strategy == device.MPS {
			name = "" // MPS shares GPUs only
		}
		now := replicas[name]
		now.Renamed = r.Replicas.Renamed
		if r.matches(gpu) {
			now.Count = max(now.Count, r.Replicas.Count)
		}
		if s.Strategy != device.MPS {
			for _, uuid := range r.partitions(gpu) {
				if now.Of == nil {
					now.Of = map[string]int{}
				}
				now.Of[uuid] = max(now.Of[uuid], r.Replicas.Count)
			}
		}
		if now.Count > 0 || now.Of != nil {
			replicas[name] = now
		}
	}
	if len(replicas) > 0 {
		s.Replicas = replicas
	}
	if !s.Shared() {
		return device.Sharing{}
	}
	return withinShares(s)
}

// withinShares limits the replicas of a device to the number of its equal shares.
func withinShares(s device.Sharing) device.Sharing {
	if s.Claims != device.ByCount {
		return s
	}
	for resource, r := range s.Replicas {
		r.Count = min(r.Count, s.Shares)
		for uuid, n := range r.Of {
			r.Of[uuid] = min(n, s.Shares)
		}
		s.Replicas[resource] = r
	}
	return s
}
