// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/oracle"
)

// sharedRoom has GPUs of 81559 MiB: replicas of 20389 on 0 and 3, of 27186 on 1, of 40779 on 4.
func sharedRoom() room {
	memory := map[int]int{}
	for gpu := range gpusANode {
		memory[gpu] = 81559
	}
	return room{memory: memory}
}

func TestRoomBesideOthers(t *testing.T) {
	claim := func(n, gib int) ask { return ask{api: oracle.Claim, gpus: n, mib: gib * mibAGib} }
	limits := func(n int, renamed bool) ask { return ask{api: oracle.Limits, gpus: n, renamed: renamed} }
	all := func(gpus ...int) parts {
		p := parts{}
		for _, gpu := range gpus {
			p.give(gpu, "other", 0)
		}
		return p
	}
	with := func(p parts, gpu int, holder string, mib int) parts {
		p.give(gpu, holder, mib)
		return p
	}
	for name, test := range map[string]struct {
		ask   ask
		taken parts
		want  bool
	}{
		"every GPU is a claim's":                        {claim(8, 0), nil, true},
		"but not one with an allocated part":            {claim(8, 0), with(parts{}, 0, "x", 1), false},
		"shares of three GPUs and the rest":             {claim(3+5, 20), nil, true},
		"and no more":                                   {claim(3+5+1, 20), nil, false},
		"what is left beside replicas":                  {claim(1, 20), with(all(1, 2, 3, 4, 5, 6, 7), 0, "x", 2*20389), true},
		"what is left beside more of them":              {claim(1, 20), with(all(1, 2, 3, 4, 5, 6, 7), 0, "x", 4*20389), false},
		"a GPU without shares goes to a claim as it is": {claim(1, 60), all(0, 1, 2, 3, 4, 5, 6), true},
		"replicas of all, and whole ones":               {limits(4+0+1+2+3, false), nil, true},
		"one more":                                      {limits(4+0+1+2+3+1, false), nil, false},
		"renamed ones":                                  {limits(4, true), all(0, 1, 2, 4, 5, 6, 7), true},
		"are not for other GPUs":                        {limits(1, false), all(0, 1, 2, 4, 5, 6, 7), false},
		"replicas beside shares":                        {limits(2, false), with(all(1, 2, 4, 5, 6, 7), 0, "x", 35*mibAGib), true},
		"beside more of them":                           {limits(2, false), with(with(all(1, 2, 4, 5, 6, 7), 0, "x", 35*mibAGib), 0, "y", 5*mibAGib+400), false},
		"a GPU with shares only is whole for limits":    {limits(1, false), with(all(0, 1, 3, 4, 5, 6, 7), 2, "x", 1), false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := sharedRoom().fitsBeside(test.ask, test.taken); got != test.want {
				t.Errorf("fits: %t beside %s", got, test.taken)
			}
		})
	}
}

func TestWhatIsSeenIsAPart(t *testing.T) {
	for _, test := range []struct {
		ask  ask
		sees []uint32
		want string
	}{
		{ask{api: oracle.Limits, gpus: 1}, []uint32{7}, "7: x has all"},
		{ask{api: oracle.Limits, gpus: 1}, []uint32{0}, "0: x has 20389"},
		{ask{api: oracle.Limits, gpus: 2}, []uint32{0}, "0: x has 40778"},
		{ask{api: oracle.Limits, gpus: 2}, []uint32{0, 7}, "0: x has 20389; 7: x has all"},
		{ask{api: oracle.Limits, gpus: 2}, []uint32{0, 4}, "0: x has 20389; 4: x has 40779"},
		{ask{api: oracle.Claim, gpus: 1}, []uint32{0}, "0: x has all"},
		{ask{api: oracle.Claim, gpus: 1, mib: 5120}, []uint32{0}, "0: x has 5120"},
		{ask{api: oracle.Claim, gpus: 2, mib: 5120}, []uint32{0}, "0: x has 10240"},
		{ask{api: oracle.Claim, gpus: 2, mib: 5120}, []uint32{0, 4}, "0: x has 5120; 4: x has all"},
	} {
		var devices []oracle.Device
		for _, minor := range test.sees {
			devices = append(devices, gpu(minor))
		}
		if got := sharedRoom().seenBy("x", test.ask, devices).String(); got != test.want {
			t.Errorf("%s, sees %v: %s, want %s", test.ask, test.sees, got, test.want)
		}
	}
}

func TestSharesThatServe(t *testing.T) {
	for _, test := range []struct {
		ask    ask
		places []place
		want   bool
	}{
		{ask{api: oracle.Limits, gpus: 2}, []place{{gpu: 0}}, true},
		{ask{api: oracle.Limits, gpus: 2}, []place{{gpu: 7}}, false},
		{ask{api: oracle.Limits, gpus: 1}, []place{{gpu: 0}, {gpu: 1}}, false},
		{ask{api: oracle.Limits, gpus: 1}, []place{{gpu: 3}}, false},
		{ask{api: oracle.Limits, gpus: 1, renamed: true}, []place{{gpu: 3}}, true},
		{ask{api: oracle.Limits, gpus: 1, renamed: true}, []place{{gpu: 0}}, false},
		{ask{api: oracle.Claim, gpus: 2, mib: 30 * mibAGib}, []place{{gpu: 0}}, true},
		{ask{api: oracle.Claim, gpus: 2, mib: 60 * mibAGib}, []place{{gpu: 0}}, false},
		{ask{api: oracle.Claim, gpus: 2}, []place{{gpu: 0}}, false},
		{ask{api: oracle.Claim, gpus: 1}, nil, false},
	} {
		if got := sharedRoom().serves(test.ask, test.places); got != test.want {
			t.Errorf("%s served by %v: %t", test.ask, test.places, got)
		}
	}
}

// share allocates parts of a GPU to the claim of a pod, in MiB.
func (s *scene) share(pod string, minor uint32, parts ...int64) {
	id := types.UID("share")
	claim := resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "claim-of-" + pod}}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Name: pod}}
	claim.Status.Allocation = &resourceapi.AllocationResult{}
	for _, part := range parts {
		claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Driver: install.DriverName, Device: fmt.Sprintf("gpu-%d", minor), ShareID: &id,
			ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{memoryCapacity: *resource.NewQuantity(part*mibibytes, resource.BinarySI)},
		})
	}
	s.claims = append(s.claims, claim)
}

func ofMemory(gib int) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Labels[memoryLabel] = fmt.Sprint(gib) }
}

// TestTheJudgeOfShares: seven GPUs are in other hands as a whole, of the first the test decides.
func TestTheJudgeOfShares(t *testing.T) {
	for name, test := range map[string]struct {
		set  func(*scene)
		want string
	}{
		"a share beside replicas": {set: func(s *scene) {
			s.pod("a", oracle.Limits, 2, corev1.PodRunning, 0)
			ofMemory(30)(s.pod("b", oracle.Claim, 1, corev1.PodRunning, 0))
			s.share("b", 0, 30*mibAGib)
		}},
		"two shares of one GPU": {set: func(s *scene) {
			ofMemory(30)(s.pod("b", oracle.Claim, 2, corev1.PodRunning, 0))
			s.share("b", 0, 30*mibAGib, 30*mibAGib)
		}},
		"a share waits while there is room": {set: func(s *scene) {
			s.pod("a", oracle.Limits, 2, corev1.PodRunning, 0)
			ofMemory(30)(s.pod("b", oracle.Claim, 1, corev1.PodPending))
		}, want: "there is room beside 0: a has 40778"},
		"a share waits for more than there is": {set: func(s *scene) {
			s.pod("a", oracle.Limits, 3, corev1.PodRunning, 0)
			ofMemory(30)(s.pod("b", oracle.Claim, 1, corev1.PodPending))
		}},
		"a replica waits while there is room": {set: func(s *scene) {
			ofMemory(30)(s.pod("a", oracle.Claim, 1, corev1.PodRunning, 0))
			s.share("a", 0, 30*mibAGib)
			s.pod("b", oracle.Limits, 2, corev1.PodPending)
		}, want: "there is room"},
		"a replica waits for more than there is": {set: func(s *scene) {
			ofMemory(30)(s.pod("a", oracle.Claim, 1, corev1.PodRunning, 0))
			s.share("a", 0, 30*mibAGib)
			s.pod("b", oracle.Limits, 3, corev1.PodPending)
		}},
		"a claim in conflict waits for its share": {set: func(s *scene) {
			s.pod("a", oracle.Limits, 3, corev1.PodRunning, 0)
			ofMemory(30)(s.pod("b", oracle.Claim, 1, corev1.PodPending))
			s.share("b", 0, 30*mibAGib)
		}},
		"no holder has what its claim was allocated": {set: func(s *scene) {
			s.pod("a", oracle.Limits, 2, corev1.PodRunning, 0)
			ofMemory(30)(s.pod("b", oracle.Claim, 1, corev1.PodPending))
			s.share("b", 0, 30*mibAGib)
		}, want: "no other holder uses"},
		"a whole GPU waits for a share": {set: func(s *scene) {
			ofMemory(5)(s.pod("a", oracle.Claim, 1, corev1.PodRunning, 0))
			s.share("a", 0, 5*mibAGib)
			s.pod("b", oracle.Claim, 1, corev1.PodPending)
			s.share("b", 0, 81559)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &scene{snapshot{seen: map[string][]oracle.Device{}, room: sharedRoom()}}
			s.pod("others", oracle.Claim, 7, corev1.PodRunning, 1, 2, 3, 4, 5, 6, 7)
			s.allocated("others", 1, 2, 3, 4, 5, 6, 7)
			test.set(s)
			problems := fmt.Sprint(s.unsettled())
			if test.want == "" && problems != "map[]" || !strings.Contains(problems, test.want) {
				t.Errorf("problems: %s, want %q", problems, test.want)
			}
		})
	}
}

// TestKubeletGivesReplicas: they are as many as the limits asked for, of what the container sees.
func TestKubeletGivesReplicas(t *testing.T) {
	s := &scene{snapshot{seen: map[string][]oracle.Device{}, room: sharedRoom()}}
	s.pod("a", oracle.Limits, 2, corev1.PodRunning, 0)
	s.seen["a"][0].GPU.UUID = "GPU-0"
	for _, test := range []struct {
		given []string
		right bool
	}{
		{[]string{"GPU-0::0", "GPU-0::3"}, true}, {[]string{"GPU-0::0"}, false}, {[]string{"GPU-0::0", "GPU-1::0"}, false}, {nil, false},
	} {
		if problems := s.disagree(map[string][]string{"/a": test.given}); (len(problems) == 0) != test.right {
			t.Errorf("given %v: %v", test.given, problems)
		}
	}
}

// TestAPlanForSharing: what is asked for is to be had, and all of it is asked for.
func TestAPlanForSharing(t *testing.T) {
	shapes := map[string]int{}
	for seed := range uint64(30) {
		for _, op := range PlanRound(seed, 0, 100, Usual().WithSharing()).Ops {
			for _, w := range op.Workloads {
				asked := ask{api: w.API, gpus: w.GPUs, mib: w.Memory * mibAGib, renamed: w.Renamed}
				if !sharedRoom().fitsBeside(asked, nil) {
					t.Errorf("seed %d: %s: not to be had at all", seed, op)
				}
				shapes[fmt.Sprintf("%s %s %t %t", w.Shape, w.API, w.Memory > 0, w.Renamed)]++
			}
		}
	}
	for _, shape := range []string{
		"pod claim true false", "deployment claim true false", "job claim true false", "shared claim true false",
		"pod limits false true", "deployment limits false true", "job limits false true",
		"pod claim false false", "pod limits false false", "deployment limits false false",
	} {
		if shapes[shape] == 0 {
			t.Errorf("30 rounds without %s", shape)
		}
	}
}

func TestValuesOfPolicies(t *testing.T) {
	var values struct {
		Config struct {
			Sharing struct {
				MPS struct {
					Resources []struct {
						Devices  []string
						Replicas int
					}
				}
			}
			Tandem struct {
				Devices []struct {
					Match   struct{ Index int }
					Sharing struct {
						Strategy     string
						Replicas     int
						MemoryShares bool
					}
				}
			}
		}
	}
	if err := yaml.Unmarshal([]byte(valuesOfPolicies()), &values); err != nil {
		t.Fatal(err)
	}
	found := map[int]policy{}
	for _, rule := range values.Config.Tandem.Devices {
		found[rule.Match.Index] = policy{replicas: rule.Sharing.Replicas, memory: rule.Sharing.MemoryShares, mps: rule.Sharing.Strategy == "MPS"}
	}
	for _, r := range values.Config.Sharing.MPS.Resources {
		found[int(r.Devices[0][0]-'0')] = policy{replicas: r.Replicas, renamed: true, mps: true}
	}
	if fmt.Sprint(found) != fmt.Sprint(policies) {
		t.Errorf("the chart is told %v, not %v", found, policies)
	}
}

func TestVersionsThatShare(t *testing.T) {
	for version, want := range map[string]bool{"v1.37.1": true, "v1.36.0": true, "v1.35.9": false, "": false} {
		if Shares(version) != want {
			t.Errorf("%s: %t", version, !want)
		}
	}
}
