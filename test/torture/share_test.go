// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/cel"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/oracle"
)

// sharedRoom has GPUs of 81559 MiB. Replicas have 20389 MiB on GPUs 0 and 3, and two of four equal shares on GPU 2.
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
	of := func(n int, w way) ask { return ask{api: oracle.Claim, gpus: n, of: w} }
	shares := func(n, gib int) ask { return ask{api: oracle.Claim, gpus: 1, shares: n, mib: gib * mibAGib} }
	all := func(gpus ...int) parts {
		p := parts{}
		for _, gpu := range gpus {
			p.give(gpu, "other", part{all: true})
		}
		return p
	}
	has := func(p parts, gpu int, holder string, one part) parts {
		p.give(gpu, holder, one)
		return p
	}
	with := func(p parts, gpu int, holder string, mib int) parts { return has(p, gpu, holder, part{mib: mib}) }
	butTwo, butFour := all(0, 1, 3, 4, 5, 6, 7), all(0, 1, 2, 3, 5, 6, 7)
	clone := func(p parts) parts { q := parts{}; q.add(p); return q }
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
		"replicas of all, and whole ones":               {limits(4+0+2+1+3, false), nil, true},
		"one more":                                      {limits(4+0+2+1+3+1, false), nil, false},
		"renamed ones":                                  {limits(4, true), all(0, 1, 2, 4, 5, 6, 7), true},
		"are not for other GPUs":                        {limits(1, false), all(0, 1, 2, 4, 5, 6, 7), false},
		"replicas beside shares":                        {limits(2, false), with(all(1, 2, 4, 5, 6, 7), 0, "x", 35*mibAGib), true},
		"beside more of them":                           {limits(2, false), with(with(all(1, 2, 4, 5, 6, 7), 0, "x", 35*mibAGib), 0, "y", 5*mibAGib+400), false},
		"a GPU with shares only is whole for limits":    {limits(1, false), has(clone(butFour), 4, "x", part{}), false},
		"and for no holder beside that":                 {of(1, unlimited), has(clone(butFour), 4, "x", part{all: true}), false},
		"claims without a limit beside each other":      {of(1, unlimited), has(clone(butFour), 4, "x", part{}), true},
		"beside one with memory":                        {of(1, unlimited), with(clone(butFour), 4, "x", 81559), true},
		"memory without a limit counts":                 {claim(1, 60), with(clone(butFour), 4, "x", 20*mibAGib), false},
		"one without a limit, but not two":              {of(2, unlimited), nil, false},
		"claims alone on a GPU":                         {of(6, alone), nil, true},
		"and not on others":                             {of(7, alone), nil, false},
		"an equal share by default":                     {of(1, equal), has(clone(butTwo), 2, "x", part{shares: 3}), true},
		"of which none is left":                         {of(1, equal), has(clone(butTwo), 2, "x", part{shares: 4}), false},
		"all of them":                                   {shares(4, 0), clone(butTwo), true},
		"more than there are":                           {shares(5, 0), nil, false},
		"beside a replica of two":                       {shares(2, 60), has(clone(butTwo), 2, "x", part{shares: 2}), true},
		"not beside two replicas":                       {shares(1, 0), has(clone(butTwo), 2, "x", part{shares: 4}), false},
		"a replica beside two shares":                   {limits(1, false), has(clone(butTwo), 2, "x", part{shares: 2}), true},
		"not beside three":                              {limits(1, false), has(clone(butTwo), 2, "x", part{shares: 3}), false},
		"equal shares with memory":                      {shares(1, 60), has(clone(butTwo), 2, "x", part{shares: 1, mib: 20 * mibAGib}), false},
		"memory of a GPU whose shares are gone":         {claim(1, 5), has(clone(butTwo), 2, "x", part{shares: 4}), false},
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
		{ask{api: oracle.Limits, gpus: 2}, []uint32{0, 2}, "0: x has 20389; 2: x has 2 shares"},
		{ask{api: oracle.Limits, gpus: 2}, []uint32{2}, "2: x has 4 shares"},
		{ask{api: oracle.Limits, gpus: 1}, []uint32{4}, "4: x has all"},
		{ask{api: oracle.Claim, gpus: 2}, []uint32{2, 4}, "2: x has 1 shares; 4: x has no limit"},
		{ask{api: oracle.Claim, gpus: 1, shares: 3, mib: 5120}, []uint32{2}, "2: x has 3 shares with 5120"},
		{ask{api: oracle.Claim, gpus: 2, mib: 5120}, []uint32{2, 4}, "2: x has 1 shares with 5120; 4: x has 5120"},
		{ask{api: oracle.Claim, gpus: 1}, []uint32{0}, "0: x has all"},
		{ask{api: oracle.Claim, gpus: 1, mib: 5120}, []uint32{0}, "0: x has 5120"},
		{ask{api: oracle.Claim, gpus: 2, mib: 5120}, []uint32{0}, "0: x has 10240"},
		{ask{api: oracle.Claim, gpus: 2, mib: 5120}, []uint32{0, 7}, "0: x has 5120; 7: x has all"},
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
		{ask{api: oracle.Limits, gpus: 2}, []place{{gpu: 2}}, true},
		{ask{api: oracle.Limits, gpus: 3}, []place{{gpu: 2}}, false},
		{ask{api: oracle.Claim, gpus: 1, shares: 4}, []place{{gpu: 2}}, true},
		{ask{api: oracle.Claim, gpus: 1, shares: 1}, []place{{gpu: 0}}, false},
		{ask{api: oracle.Claim, gpus: 1, of: equal}, []place{{gpu: 2}}, true},
		{ask{api: oracle.Claim, gpus: 1, of: equal}, []place{{gpu: 4}}, false},
		{ask{api: oracle.Claim, gpus: 1, of: unlimited}, []place{{gpu: 4}}, true},
		{ask{api: oracle.Claim, gpus: 1, of: alone}, []place{{gpu: 4}}, false},
		{ask{api: oracle.Claim, gpus: 2, of: alone}, []place{{gpu: 0}, {gpu: 7}}, true},
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

// equal allocates equal shares of a GPU, and no memory, to the claim of a pod.
func (s *scene) equal(pod string, minor uint32, shares int64) {
	s.share(pod, minor, 0)
	results := s.claims[len(s.claims)-1].Status.Allocation.Devices.Results
	results[0].ConsumedCapacity[sharesCapacity] = *resource.NewQuantity(shares, resource.DecimalSI)
}

// hold adds a running pod with a GPU that has no limit.
func (s *scene) hold(pod string, minor uint32) {
	asking(Workload{Of: unlimited})(s.pod(pod, oracle.Claim, 1, corev1.PodRunning, minor))
	s.share(pod, minor, 0)
}

// asking returns a function that labels a pod like the pods of a workload.
func asking(w Workload) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		w.GPUs, w.API = max(1, w.GPUs), oracle.Claim
		maps.Copy(p.Labels, labels(w))
	}
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

// TestTheJudgeOfEqualShares: only GPU 2, with equal shares, and GPU 4, without a limit, are free. Another pod has all other GPUs alone.
func TestTheJudgeOfEqualShares(t *testing.T) {
	for name, test := range map[string]struct {
		set  func(*scene)
		want string
	}{
		"shares beside a replica": {set: func(s *scene) {
			s.pod("a", oracle.Limits, 1, corev1.PodRunning, 2)
			asking(Workload{Shares: 2})(s.pod("b", oracle.Claim, 1, corev1.PodRunning, 2))
			s.equal("b", 2, 2)
		}},
		"a share waits while there is one": {set: func(s *scene) {
			s.pod("a", oracle.Limits, 1, corev1.PodRunning, 2)
			asking(Workload{Shares: 1})(s.pod("b", oracle.Claim, 1, corev1.PodRunning, 2))
			s.equal("b", 2, 1)
			asking(Workload{Of: equal})(s.pod("c", oracle.Claim, 1, corev1.PodPending))
		}, want: "2: a has 2 shares, claim-of-b has 1 shares"},
		"shares wait for more than there are": {set: func(s *scene) {
			s.pod("a", oracle.Limits, 1, corev1.PodRunning, 2)
			asking(Workload{Shares: 3})(s.pod("c", oracle.Claim, 1, corev1.PodPending))
		}},
		"a replica waits while there are two shares": {set: func(s *scene) {
			asking(Workload{Shares: 2})(s.pod("b", oracle.Claim, 1, corev1.PodRunning, 2))
			s.equal("b", 2, 2)
			s.hold("f", 4)
			s.pod("c", oracle.Limits, 1, corev1.PodPending)
		}, want: "there is room"},
		"a replica waits for more than there are": {set: func(s *scene) {
			asking(Workload{Shares: 3})(s.pod("b", oracle.Claim, 1, corev1.PodRunning, 2))
			s.equal("b", 2, 3)
			s.hold("f", 4)
			s.pod("c", oracle.Limits, 1, corev1.PodPending)
		}},
		"a claim in conflict waits for its shares": {set: func(s *scene) {
			s.pod("a", oracle.Limits, 2, corev1.PodRunning, 2)
			asking(Workload{Shares: 1})(s.pod("b", oracle.Claim, 1, corev1.PodPending))
			s.equal("b", 2, 1)
		}},
		"no holder has the shares that its claim was allocated": {set: func(s *scene) {
			s.pod("a", oracle.Limits, 1, corev1.PodRunning, 2)
			asking(Workload{Shares: 1})(s.pod("b", oracle.Claim, 1, corev1.PodPending))
			s.equal("b", 2, 1)
		}, want: "no other holder uses"},
		"a claim waits for a GPU without a limit": {set: func(s *scene) {
			s.hold("f", 4)
			asking(Workload{Of: unlimited})(s.pod("c", oracle.Claim, 1, corev1.PodPending))
		}, want: "there is room"},
		"a limit has it alone": {set: func(s *scene) {
			s.pod("a", oracle.Limits, 1, corev1.PodRunning, 4)
			asking(Workload{Of: unlimited})(s.pod("c", oracle.Claim, 1, corev1.PodPending))
		}},
		"a limit waits for it": {set: func(s *scene) {
			s.pod("a", oracle.Limits, 2, corev1.PodRunning, 2)
			s.hold("f", 4)
			s.pod("c", oracle.Limits, 1, corev1.PodPending)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &scene{snapshot{seen: map[string][]oracle.Device{}, room: sharedRoom()}}
			asking(Workload{Of: alone, GPUs: 6})(s.pod("others", oracle.Claim, 6, corev1.PodRunning, 0, 1, 3, 5, 6, 7))
			s.allocated("others", 0, 1, 3, 5, 6, 7)
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

// TestWorkloadsOfParts: together they fit, so none may wait, and each kind of part is among them.
func TestWorkloadsOfParts(t *testing.T) {
	room, taken := sharedRoom(), parts{}
	kinds := map[string]bool{}
	for _, w := range workloadsOfParts() {
		asked, _ := askOf(barePod(w, 0))
		gpu := slices.IndexFunc(slices.Sorted(maps.Keys(room.memory)), func(gpu int) bool {
			_, shared := policies[gpu]
			return shared && room.sharedUnits(gpu, asked, taken) > 0
		})
		if gpu < 0 {
			t.Fatalf("no room for %s beside %s", asked, taken)
		}
		one, _ := room.one(gpu, asked)
		taken.give(gpu, w.Name, one)
		kinds[fmt.Sprintf("%s memory=%t of=%s renamed=%t", w.API, w.Memory > 0, w.Of, w.Renamed)] = true
	}
	for _, kind := range []string{
		"claim memory=true of= renamed=false", "claim memory=false of=equal renamed=false", "claim memory=false of=unlimited renamed=false",
		"limits memory=false of= renamed=false", "limits memory=false of= renamed=true",
	} {
		if !kinds[kind] {
			t.Errorf("no workload with %s", kind)
		}
	}
}

// TestAPlanForSharing: what is asked for is to be had, and all of it is asked for.
func TestAPlanForSharing(t *testing.T) {
	shapes := map[string]int{}
	for seed := range uint64(30) {
		for _, op := range PlanRound(seed, 0, 100, Usual().WithSharing()).Ops {
			for _, w := range op.Workloads {
				asked, _ := askOf(barePod(w, 0))
				if !sharedRoom().fitsBeside(asked, nil) {
					t.Errorf("seed %d: %s: not to be had at all", seed, op)
				}
				shapes[fmt.Sprintf("%s %s %t %t", w.Shape, w.API, w.Memory > 0, w.Renamed)]++
				shapes[fmt.Sprintf("%s shares=%d of=%s memory=%t", w.Shape, w.Shares, w.Of, w.Memory > 0)]++
			}
		}
	}
	for _, shape := range []string{
		"pod claim true false", "deployment claim true false", "job claim true false", "shared claim true false",
		"pod limits false true", "deployment limits false true", "job limits false true",
		"pod claim false false", "pod limits false false", "deployment limits false false",
		"pod shares=0 of=alone memory=false", "pod shares=0 of=equal memory=false", "deployment shares=0 of=unlimited memory=false",
		"shared shares=2 of= memory=false", "pod shares=1 of= memory=true", "pod shares=0 of=unlimited memory=true", "job shares=1 of= memory=false",
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
						Shares       int
						Unlimited    bool
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
		found[rule.Match.Index] = policy{replicas: rule.Sharing.Replicas, memory: rule.Sharing.MemoryShares, mps: rule.Sharing.Strategy == "MPS",
			shares: rule.Sharing.Shares, unlimited: rule.Sharing.Unlimited}
	}
	for _, r := range values.Config.Sharing.MPS.Resources {
		found[int(r.Devices[0][0]-'0')] = policy{replicas: r.Replicas, renamed: true, mps: true}
	}
	if fmt.Sprint(found) != fmt.Sprint(policies) {
		t.Errorf("the chart is told %v, not %v", found, policies)
	}
}

// TestClaimsOfAWay: the selector of a claim for a way matches the GPUs of this way, and no other GPUs.
func TestClaimsOfAWay(t *testing.T) {
	for _, w := range []way{alone, equal, unlimited} {
		selectors := claimSpec(Workload{GPUs: 1, Of: w}).Devices.Requests[0].Exactly.Selectors
		compiled := cel.GetCompiler(cel.Features{}).CompileCELExpression(selectors[0].CEL.Expression, cel.Options{})
		if compiled.Error != nil {
			t.Fatal(compiled.Error)
		}
		for gpu := range int64(gpusANode) {
			matches, _, err := compiled.DeviceMatches(t.Context(), cel.Device{
				Driver: install.DriverName, Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"index": {IntValue: &gpu}},
			})
			if want := policies[int(gpu)].way() == w; err != nil || matches != want {
				t.Errorf("a claim for %s matches GPU %d: %t, %v", w, gpu, matches, err)
			}
		}
	}
}

func TestVersionsThatShare(t *testing.T) {
	for version, want := range map[string]bool{"v1.37.1": true, "v1.36.0": true, "v1.35.9": false, "": false} {
		if Shares(version) != want {
			t.Errorf("%s: %t", version, !want)
		}
	}
}
