// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"fmt"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/test/oracle"
)

// What an administrator does to the GPUs, and what happens to their driver.
const (
	MakePartition   Kind = "make-partition"
	RemovePartition Kind = "remove-partition"
	FailCall        Kind = "fail-call"
	SlowCall        Kind = "slow-call"
	UsePartition    Kind = "use-partition"
)

var hardwareKinds = []Kind{MakePartition, RemovePartition, FailCall, SlowCall, UsePartition}

var (
	// limitsProfiles are those that limits request, and that the administrator leaves alone: kubelet keeps allocating a
	// partition for seconds after it is gone.
	limitsProfiles = []string{"1g.10gb", "2g.20gb", "3g.40gb"}
	// migCalls are those of the driver by which partitions are made and destroyed.
	migCalls = []string{
		"SetMigMode", "GetGpuInstances", "CreateGpuInstanceWithPlacement", "GpuInstance.GetInfo", "GpuInstance.CreateComputeInstance",
		"GpuInstance.GetComputeInstances", "MigDevice.GetUUID", "ComputeInstance.Destroy", "GpuInstance.Destroy",
	}
)

// WithMIG is a mix for a machine with MIG.
func (m Mix) WithMIG() Mix {
	m.MIG, m.HardwareEvery = true, [2]int{4, 10}
	// A plugin of whole GPUs has no words for partitions.
	return m.without(ForeignPlugin)
}

// onHardware draws what happens to the GPUs.
func (p *planner) onHardware() Op {
	op := Op{Kind: hardwareKinds[p.weighted(25, 20, 25, 15, 15)], Pick: p.rng.IntN(8)}
	switch op.Kind {
	case MakePartition:
		op.GPU = sharedGPU + p.rng.IntN(staticGPUs+1)
		op.Profile = profiles[p.weighted(35, 35, 15, 15)].name
	case RemovePartition:
		op.GPU = sharedGPU + p.rng.IntN(staticGPUs+1)
	case FailCall:
		op.GPU, op.Call, op.Pause = p.rng.IntN(dynamicGPUs), migCalls[p.rng.IntN(len(migCalls))], time.Second+p.upTo(maxFreeze)
		op.Answer = []string{"ERROR_UNKNOWN", "ERROR_IN_USE", "ERROR_INSUFFICIENT_RESOURCES"}[p.rng.IntN(3)]
	case SlowCall:
		op.GPU, op.Call, op.Pause = p.rng.IntN(dynamicGPUs), migCalls[p.rng.IntN(len(migCalls))], time.Second+p.upTo(maxFreeze)
		op.Delay = 100*time.Millisecond + p.upTo(2*time.Second)
	case UsePartition:
		op.GPU, op.Pause = p.rng.IntN(dynamicGPUs), time.Second+p.upTo(maxFreeze)
		op.Profile = profiles[p.rng.IntN(len(profiles))].name
	}
	// One at a time on each GPU.
	op.Component = gpuComponent(op.GPU)
	return op
}

// gpuComponent is the name of a GPU as what a fault hits.
func gpuComponent(gpu int) string { return fmt.Sprintf("gpu-%d", gpu) }

// createPartitions is create for partitions.
func (p *planner) createPartitions(name string) Op {
	w := Workload{Name: name, API: oracle.Claim, GPUs: 1, Replicas: 1, Profile: profiles[p.weighted(35, 10, 20, 20, 10, 5)].name}
	switch p.weighted(35, 35, 12, 18) {
	case 0:
		w.Shape = Bare
	case 1:
		w.Shape, w.Replicas = Deployment, p.between(1, 5)
	case 2:
		w.Shape, w.Replicas, w.Work = Job, p.between(1, 4), time.Duration(p.between(1, 8))*time.Second
	case 3:
		w.Shape, w.Replicas = Shared, p.between(2, 4)
	}
	switch {
	case w.Shape != Shared && p.chance(30):
		w.API = oracle.Limits
		w.Profile = limitsProfiles[p.rng.IntN(len(limitsProfiles))]
		w.Replicas = min(w.Replicas, 3)
	case len(profileNamed(w.Profile).starts) > 1 && p.chance(30):
		w.GPUs, w.Together, w.Replicas = 2, true, min(w.Replicas, 3)
	}
	return p.add(Create, p.decorate(w))
}

// burstOfPartitions asks for partitions of all dynamic GPUs by claims, and for all whole GPUs by limits, at once.
func (p *planner) burstOfPartitions(name string) Op {
	shape := Deployment
	if p.chance(50) {
		shape = Bare
	}
	wanted := profiles[p.weighted(30, 0, 20, 35, 0, 15)]
	claims := Workload{
		Name: name + "-claims", Shape: shape, API: oracle.Claim, GPUs: 1, Replicas: min(3*len(wanted.starts), 8), Profile: wanted.name,
	}
	limits := Workload{Name: name + "-limits", Shape: shape, API: oracle.Limits, GPUs: 1, Replicas: wholeGPUs}
	both := []Workload{p.decorate(claims), p.decorate(limits)}
	for i := range both {
		both[i].Crash = false
	}
	if p.chance(50) {
		slices.Reverse(both)
	}
	return p.add(Burst, both...)
}
