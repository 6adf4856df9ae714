// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1apply "k8s.io/client-go/applyconfigurations/core/v1"

	"github.com/tandem-gpu/tandem/hack/install"
)

// group is what some stories need installed. A cluster keeps it until a story of another group begins, so that an installation is not
// upgraded twice for each story.
type group struct {
	name string
	// profile is the simulated machine, example a values file of examples/; either may be empty.
	profile, example string
	values           []string
	// from136 says why the stories need Kubernetes 1.36. since136 says that the slices are those below from Kubernetes 1.36 on.
	from136  string
	since136 bool
	// limits and devices are how many the node offers while all is free, to limits and by its slices. Zero devices are counted when the
	// pools of all GPUs are there, which is how dynamic partitions are published.
	limits  int64
	devices int
	// shared is how slices offer GPUs to several claims (sharedAs).
	shared string
	// daemons says that MPS daemons run while no pod has a GPU.
	daemons bool
	stories []func(*testing.T)
}

// usualGroup is that of all stories that no other group names. Stories that change its values in between restore them.
var usualGroup = &group{name: "usual", limits: gpusANode, devices: gpusANode}

// theGroup is what is installed, nil where a story has failed that may have changed it.
var theGroup *group

// groupsByStory are the groups of stories that need other values than usual.
var groupsByStory = map[string]*group{}

const (
	droppedCapacity = "the API server drops consumable capacity before Kubernetes 1.36"
	droppedClasses  = "extended resources of device classes are off by default before Kubernetes 1.36"
	droppedCounters = "the API server drops shared counters before Kubernetes 1.36"
)

func init() {
	for _, g := range []group{
		{name: "mig-dynamic", example: "mig-dynamic.values.yaml", since136: true, limits: gpusANode, stories: []func(*testing.T){
			TestPartitionsOnDemand, TestPartitionsOfExamples, TestGPUsFullOfPartitions, TestMixOfPartitions, TestWholeOrParts,
			TestPartitionFaults, TestBusyPartition, TestPartitionsRebooted, TestPartitionPolicyEnds,
		}},
		{name: "mig-limits", example: "mig-limits.values.yaml", limits: gpusANode, devices: gpusANode, stories: []func(*testing.T){
			TestStaticPartitions, TestMIGManager,
		}},
		{
			name: "mig-single", example: "mig-limits.values.yaml", values: []string{"config.flags.migStrategy=single"},
			limits: gpusANode, devices: gpusANode, stories: []func(*testing.T){TestSingleStrategy},
		},
		{
			name: "split", example: "split.values.yaml", values: []string{"config.tandem.mode=Dual"}, limits: gpusANode, devices: gpusANode,
			stories: []func(*testing.T){TestModeChangesOnALiveNode},
		},
		{
			name: "claims-only", example: "claims-only.values.yaml", from136: droppedClasses, devices: gpusANode,
			stories: []func(*testing.T){TestLimitsByClaims},
		},
		{
			name: "quota", values: []string{"deviceClasses.countInQuota=true"}, from136: droppedClasses, limits: gpusANode, devices: gpusANode,
			stories: []func(*testing.T){TestQuota, TestLimitsStayWithTheDevicePlugin},
		},
		{
			name: "handover-reset", example: "handover-reset.values.yaml", limits: gpusANode, devices: gpusANode,
			stories: []func(*testing.T){TestReset},
		},
		{
			name: "mps", example: "mps-sharing.values.yaml", since136: true, limits: wholeGPUs + 2*replicas, devices: gpusANode, shared: sharedByMemory,
			daemons: true, stories: []func(*testing.T){TestMPSByPolicy, TestMPSNamespaces},
		},
		{
			// Four replicas of one GPU for limits, and two GPUs as a whole.
			name: "l4-sharing", profile: "l4x4", example: "sharing.values.yaml", since136: true, limits: 4 + 2, devices: 3, shared: sharedByMemory,
			stories: []func(*testing.T){TestMemoryShares, TestOneBudget},
		},
		{
			// Four replicas for limits, and three GPUs as a whole.
			name: "l4-claim-shares", profile: "l4x4", example: "claim-shares.values.yaml", since136: true, limits: 4 + 3, devices: 4,
			shared: sharedByNumber, stories: []func(*testing.T){TestSharesOfClaims},
		},
		{
			// The value of NVIDIA's chart, for every GPU.
			name: "l4-unlimited", profile: "l4x4", values: []string{"consumableShares=unlimited"}, from136: droppedCapacity,
			limits: 4, devices: 4, shared: sharedUnlimited, stories: []func(*testing.T){TestUnlimitedShares},
		},
		{
			name: "strict", values: []string{"strict=true"}, from136: "the API server drops binding conditions before Kubernetes 1.36",
			limits: gpusANode, devices: gpusANode, stories: []func(*testing.T){TestStrict},
		},
		{
			name:   "device-specs",
			values: []string{"config.version=v1", "config.flags.plugin.deviceListStrategy={envvar}", "config.flags.plugin.passDeviceSpecs=true"},
			limits: gpusANode, devices: gpusANode, stories: []func(*testing.T){TestNUMAAlignedByDeviceSpecs},
		},
		// Values and machines of published manifests. NVIDIA's tests install with a number of shares for the manifests that ask for memory, too.
		{
			name: "published-number", values: []string{"consumableShares=4"}, from136: droppedCapacity, limits: gpusANode, devices: gpusANode,
			shared: sharedByNumber, stories: []func(*testing.T){TestPublishedSharesByNumber},
		},
		{
			name: "published-memory", values: []string{"consumableShares=memory"}, from136: droppedCapacity, limits: gpusANode, devices: gpusANode,
			shared: sharedByMemory, stories: []func(*testing.T){TestPublishedSharesByMemory},
		},
		{
			name: "published-unlimited", values: []string{"consumableShares=unlimited"}, from136: droppedCapacity, limits: gpusANode,
			devices: gpusANode, shared: sharedUnlimited, stories: []func(*testing.T){TestPublishedSharesUnlimited},
		},
		{
			name: "published-replicas", limits: 10 * gpusANode, devices: gpusANode, stories: []func(*testing.T){TestPublishedReplicas}, values: []string{
				"config.version=v1", "config.sharing.timeSlicing.failRequestsGreaterThanOne=true",
				"config.sharing.timeSlicing.resources[0].name=nvidia.com/gpu", "config.sharing.timeSlicing.resources[0].replicas=10",
			},
		},
		{
			// Four whole GPUs, and four with four partitions each.
			name: "published-partitions", profile: "a100x8-40gb-mig", example: "mig-limits.values.yaml", limits: 4, devices: 4 + 4*4,
			stories: []func(*testing.T){TestPublishedPartitions},
		},
		{
			name: "published-on-demand", profile: "gh200x2", example: "claims-only.values.yaml", from136: droppedCounters,
			values:  []string{"config.tandem.devices[0].match.model=NVIDIA GH200 480GB", "config.tandem.devices[0].mig=dynamic"},
			stories: []func(*testing.T){TestPublishedPartitionsOnDemand},
		},
	} {
		for _, story := range g.stories {
			_, name, _ := strings.Cut(filepath.Base(runtime.FuncForPC(reflect.ValueOf(story).Pointer()).Name()), ".")
			groupsByStory[name] = &g
		}
	}
}

// groupOf returns the group of a story, or of a part of one.
func groupOf(name string) *group {
	story, _, _ := strings.Cut(name, "/")
	if g, ok := groupsByStory[story]; ok {
		return g
	}
	return usualGroup
}

// A cluster plays the stories of its group, then those of other groups, then the usual ones: each installation is upgraded once.

func ofTheSameGroup(name string) bool { return theGroup != usualGroup && groupOf(name) == theGroup }

func ofAnotherGroup(name string) bool { return groupOf(name) != usualGroup }

// has installs what a group says, unless it is installed, and waits until all its devices are offered.
func (s *story) has(g *group) {
	s.Helper()
	older := !s.ExtendedResources()
	if g.from136 != "" && older {
		s.Skip(g.from136)
	}
	// An agent ends MPS daemons by their GPUs, and those of another machine are others.
	if theGroup != nil && theGroup.daemons && theGroup.profile != g.profile {
		s.has(usualGroup)
	}
	s.Limits, s.Offered, s.DaemonsStay = g.limits, g.devices, g.daemons
	if g.since136 && older {
		s.Offered = -1
	}
	if theGroup != g {
		before := s.Agents()
		theGroup = nil
		o := install.Options{Profile: g.profile, Detached: g != usualGroup, Values: g.values}
		if g.example != "" {
			o.ValuesFiles = []string{filepath.Join("..", "..", "examples", g.example)}
		}
		if err := s.Install(s.Ctx, o); err != nil {
			s.Fatal(err)
		}
		s.RolledOut()
		s.ReplaceAgents(before)
		s.Logf("installed: %s", g.name)
		s.Await(patient, "what "+g.name+" offers", func() error { return errors.Join(s.offersAll(g), s.NothingLeft()) })
		theGroup = g
	}
	if s.Offered == 0 {
		s.Offered = g.devices
	}
}

// offersAll reports whether the node offers what the group says.
func (s *story) offersAll(g *group) error {
	if err := s.OfferedToPods(g.limits); err != nil || s.Offered < 0 {
		return err
	}
	if shared, err := s.sharedAs(); err != nil || shared != g.shared {
		return errors.Join(err, fmt.Errorf("claims share GPUs by %q, not by %q", shared, g.shared))
	}
	if g.devices > 0 {
		return s.OfferedToClaims(g.devices)
	}
	if pools, gpus := s.poolsOfGPUs(), len(s.uuidsInOrder()); len(pools) != gpus {
		return fmt.Errorf("pools of %d GPUs: %v", gpus, pools)
	}
	var err error
	g.devices, err = s.Claimable()
	return err
}

// configure changes the configuration of the nodes until the story ends, without Helm. Its agents have it when kubelet has brought it.
func (s *story) configure(text string) {
	s.Helper()
	configMap, err := theClient.CoreV1().ConfigMaps(install.Namespace).Get(s.Ctx, install.Release, metav1.GetOptions{})
	if err != nil {
		s.Fatal(err)
	}
	const key = "config.yaml"
	before := configMap.Data[key]
	helm := slices.IndexFunc(configMap.ManagedFields, func(f metav1.ManagedFieldsEntry) bool {
		return f.Operation == metav1.ManagedFieldsOperationApply
	})
	if helm < 0 {
		s.Fatal("Helm has not applied the ConfigMap")
	}
	// As Helm: the next upgrade would be refused a field that another manager has.
	options := metav1.ApplyOptions{FieldManager: configMap.ManagedFields[helm].Manager, Force: true}
	set := func(text string) error {
		data := maps.Clone(configMap.Data)
		data[key] = text
		applied := corev1apply.ConfigMap(configMap.Name, configMap.Namespace).WithData(data).
			WithLabels(configMap.Labels).WithAnnotations(configMap.Annotations)
		_, err := theClient.CoreV1().ConfigMaps(configMap.Namespace).Apply(context.WithoutCancel(s.Ctx), applied, options)
		return err
	}
	s.Undo(func() error {
		err := set(before)
		s.RetryAgent()
		return err
	})
	if err := set(text); err != nil {
		s.Fatal(err)
	}
}
