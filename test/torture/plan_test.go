// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/test/oracle"
)

func TestAPlanDependsOnTheSeedOnly(t *testing.T) {
	for round := range 5 {
		first, again := PlanRound(7, round, 100, Usual()), PlanRound(7, round, 100, Usual())
		if !reflect.DeepEqual(first, again) {
			t.Fatalf("round %d of one seed was drawn differently", round)
		}
	}
	if reflect.DeepEqual(PlanRound(7, 0, 100, Usual()).Ops, PlanRound(8, 0, 100, Usual()).Ops) {
		t.Error("two seeds give the same plan")
	}
	if PlanRound(7, 0, 100, Usual()).Ops[0].Kind != Create || PlanRound(7, 1, 100, Usual()).Ops[0].Index != 100 {
		t.Error("a round does not begin where the one before ended")
	}
}

// A drawn seed has faults early, whatever was drawn before it.
func TestDrawSeed(t *testing.T) {
	for name, mix := range map[string]Mix{"whole": Usual(), "shared": Usual().WithSharing(), "partitions": Usual().WithMIG()} {
		next, drawn := uint64(0), 0
		for range 50 {
			seed := DrawSeed(func() uint64 { next++; drawn++; return next }, mix)
			kills, bursts := 0, 0
			for _, op := range PlanRound(seed, 0, early, mix).Ops {
				switch {
				case op.Kind == Burst:
					bursts++
				case op.Kind == Kill && slices.Contains([]string{cluster.Kubelet, cluster.Containerd, cluster.APIServer}, op.Component):
					kills++
				}
			}
			if kills == 0 || bursts == 0 {
				t.Errorf("%s, seed %d: %d kills, %d bursts", name, seed, kills, bursts)
			}
		}
		if drawn == 50 || drawn > 400 {
			t.Errorf("%s: %d draws for 50 seeds", name, drawn)
		}
	}
}

// TestAPlanIsSound: what is changed was created before and not deleted since, names are used once, and numbers are in bounds.
func TestAPlanIsSound(t *testing.T) {
	kinds := map[Kind]int{}
	formats, shapes, bursts := map[string]bool{}, map[Shape]int{}, map[Shape]int{}
	for seed := range uint64(60) {
		there, used := map[string]Shape{}, map[string]bool{}
		for _, op := range PlanRound(seed, int(seed%3), 100, Usual()).Ops {
			kinds[op.Kind]++
			for _, w := range op.Workloads {
				if shapes[w.Shape]++; op.Kind == Burst {
					bursts[w.Shape]++
				}
				if used[w.Name] {
					t.Fatalf("seed %d: %s: the name was used before", seed, op)
				}
				used[w.Name], there[w.Name] = true, w.Shape
				if w.GPUs < 1 || w.GPUs > 4 || w.Replicas < 1 || w.Replicas > 8 {
					t.Errorf("seed %d: %s", seed, op)
				}
			}
			if _, ok := there[op.Target]; op.Target != "" && !ok {
				t.Fatalf("seed %d: %s: there is none", seed, op)
			}
			switch op.Kind {
			case Delete:
				delete(there, op.Target)
			case Scale:
				if there[op.Target] != Deployment {
					t.Errorf("seed %d: %s is a %s", seed, op, there[op.Target])
				}
			case Join:
				if there[op.Target] != Shared || op.Joined.Name != op.Target {
					t.Errorf("seed %d: %s is a %s", seed, op, there[op.Target])
				}
			case HangPod, ListPods, FillDisk, ReadOnly:
				grace := time.Duration(0)
				if op.Kind == ReadOnly {
					grace = unusableGrace
				}
				if op.Pause < grace+2*time.Second || op.Pause > grace+10*time.Second || op.Grace < PodsOwn || op.Component == "" {
					t.Errorf("seed %d: %s", seed, op)
				}
			case ForeignPlugin:
				formats[op.Answer] = true
				if minor, is := oracle.ForeignID(fmt.Sprintf(op.Answer, 3)); op.Pause < 5*time.Second || minor != 3 || !is {
					t.Errorf("seed %d: %s", seed, op)
				}
			case LoseGPU, TaintGPU, MaintainGPU:
				if op.Pause < 2*time.Second || op.Pause > 25*time.Second || op.Component != fmt.Sprintf("gpu-%d", op.GPU) || op.GPU >= gpusANode {
					t.Errorf("seed %d: %s", seed, op)
				}
			case Freeze:
				if op.Pause < 50*time.Millisecond || op.Pause > 8*time.Second {
					t.Errorf("seed %d: %s", seed, op)
				}
			}
		}
	}
	for _, kind := range []Kind{
		Create, Burst, Scale, Join, DeletePod, Delete, Kill, Restart, Freeze, Reboot, WipeCDI, Upgrade, Downgrade, Away, HangPod, ListPods,
		ForeignPlugin, FillDisk, ReadOnly, LoseGPU, TaintGPU, MaintainGPU, DeleteNode,
	} {
		if kinds[kind] == 0 {
			t.Errorf("60 rounds without any %s", kind)
		}
	}
	if len(formats) != len(foreignIDs) || shapes[Workflow] == 0 || bursts[Workflow] == 0 {
		t.Errorf("60 rounds with device IDs %v, workloads %v, bursts %v", formats, shapes, bursts)
	}
}

// TestAPlanForMIG: what is asked for is to be had, what limits ask for is not removed, and all of it happens.
func TestAPlanForMIG(t *testing.T) {
	kinds, shapes := map[Kind]int{}, map[string]int{}
	for seed := range uint64(30) {
		for _, op := range PlanRound(seed, 0, 100, Usual().WithMIG()).Ops {
			kinds[op.Kind]++
			for _, w := range op.Workloads {
				if w.Profile == "" {
					continue
				}
				shapes[fmt.Sprintf("%s %s %t", w.Shape, w.API, w.Together)]++
				if taken := []place(nil); !machineWithMIG().fits(ask{api: w.API, gpus: w.GPUs, profile: w.Profile, together: w.Together}, taken) {
					t.Errorf("seed %d: %s: not to be had at all", seed, op)
				}
			}
			if op.onHardware() && (!op.IsFault() || op.Component != fmt.Sprintf("gpu-%d", op.GPU)) {
				t.Errorf("seed %d: %s", seed, op)
			}
		}
	}
	for _, kind := range hardwareKinds {
		if kinds[kind] < 30 {
			t.Errorf("30 rounds with %d times %s", kinds[kind], kind)
		}
	}
	for _, shape := range []string{
		"pod claim false", "pod claim true", "pod limits false", "deployment claim false", "deployment claim true", "deployment limits false",
		"job claim false", "job limits false", "shared claim false", "shared claim true",
	} {
		if shapes[shape] == 0 {
			t.Errorf("30 rounds without %s", shape)
		}
	}
}

// TestForeignPluginsAreOfWholeGPUs: not where GPUs have parts.
func TestForeignPluginsAreOfWholeGPUs(t *testing.T) {
	for _, mix := range []Mix{Usual().WithMIG(), Usual().WithSharing()} {
		if slices.ContainsFunc(mix.Faults, func(f Fault) bool { return f.Kind == ForeignPlugin }) || len(mix.Faults) != len(Usual().Faults)-1 {
			t.Errorf("faults: %v", mix.Faults)
		}
	}
}

func TestFaultsComeEvery15To35Operations(t *testing.T) {
	last := -1
	for _, op := range PlanRound(3, 0, 5000, Usual()).Ops {
		if !op.IsFault() || op.Kind == Freeze {
			continue
		}
		if gap := op.Index - last; last >= 0 && (gap < 15 || gap > 35) {
			t.Errorf("%s comes %d operations after the fault before", op, gap)
		}
		last = op.Index
	}
}

func TestOperationsOnOneWorkloadKnowEachOther(t *testing.T) {
	w := Workload{Name: "w1"}
	if got := (Op{Workloads: []Workload{w, {Name: "w2"}}}).touches(); !slices.Equal(got, []string{"w1", "w2"}) {
		t.Errorf("touches %v", got)
	}
	if got := (Op{Target: "w1"}).touches(); !slices.Equal(got, []string{"w1"}) {
		t.Errorf("touches %v", got)
	}
}

// TestAgentsTakeTurns: a downgrade goes back from the newer agent, so that today's finds records from the future.
func TestAgentsTakeTurns(t *testing.T) {
	began := map[bool]int{}
	for number := range 200 {
		round := PlanRound(5, number, 100, Usual())
		newer := round.Newer
		began[newer]++
		for _, op := range round.Ops {
			if op.Kind == Upgrade && newer || op.Kind == Downgrade && !newer {
				t.Fatalf("round %d: %s, and the newer agent is there: %t", number, op, newer)
			}
			newer = newer != (op.Kind == Upgrade || op.Kind == Downgrade)
		}
	}
	if began[true] == 0 || began[false] == 0 {
		t.Errorf("200 rounds begin with %v", began)
	}
}
