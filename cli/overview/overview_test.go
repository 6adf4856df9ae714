// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Screens of cli/kubectl-gpu show whole nodes. These tests have what its nodes do not.

func holder(kind v1alpha1.HolderKind, state v1alpha1.HoldState) v1alpha1.DeviceHolder {
	return v1alpha1.DeviceHolder{Kind: kind, State: state, UID: "u", Namespace: "ml", Name: "c"}
}

// TestStates: the states agree with the counts that the agent reports, and tell Draining and Allocated apart.
func TestStates(t *testing.T) {
	for name, c := range map[string]struct {
		holders []v1alpha1.DeviceHolder
		claims  []v1alpha1.AllocatedClaim
		change  func(*v1alpha1.DeviceStatus)
		want    State
	}{
		"free":              {want: Free},
		"claim":             {holders: []v1alpha1.DeviceHolder{holder("Claim", "Held")}, want: Claim},
		"restored":          {holders: []v1alpha1.DeviceHolder{holder("Claim", "Restored")}, want: Claim},
		"pod":               {holders: []v1alpha1.DeviceHolder{holder("Pod", "Held")}, want: Pod},
		"draining claim":    {holders: []v1alpha1.DeviceHolder{holder("Claim", "Draining")}, want: Draining},
		"draining pod":      {holders: []v1alpha1.DeviceHolder{holder("Pod", "Draining")}, want: Draining},
		"one of two drains": {holders: []v1alpha1.DeviceHolder{holder("Pod", "Draining"), holder("Pod", "Held")}, want: Pod},
		"allocated":         {claims: []v1alpha1.AllocatedClaim{{UID: "u", Devices: []string{"gpu-0"}}}, want: Allocated},
		"prepared":          {claims: []v1alpha1.AllocatedClaim{{UID: "u", Devices: []string{"gpu-0"}}}, holders: []v1alpha1.DeviceHolder{holder("Claim", "Held")}, want: Claim},
		"unhealthy, held":   {change: func(d *v1alpha1.DeviceStatus) { d.UnhealthyReason = "Lost" }, holders: []v1alpha1.DeviceHolder{holder("Pod", "Held")}, want: Unhealthy},
		"excluded":          {change: func(d *v1alpha1.DeviceStatus) { d.Excluded = true }, want: Excluded},
	} {
		d := v1alpha1.DeviceStatus{Name: "gpu-0", Holders: c.holders}
		if c.change != nil {
			c.change(&d)
		}
		node := v1alpha1.GPUNode{Spec: v1alpha1.GPUNodeSpec{Claims: c.claims}, Status: v1alpha1.GPUNodeStatus{Devices: []v1alpha1.DeviceStatus{d}}}
		got := NodeOf(node).Devices[0].State
		if got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
		if d.Excluded {
			continue
		}
		var counts v1alpha1.DeviceCounts
		availability.NewNode(node.Status, nil).Count(&counts, d)
		ours := New([]Node{NodeOf(node)}).GPUs
		drainingPods := got == Draining && counts.Pods == 1
		if ours.Unhealthy != int(counts.Unhealthy) || ours.Free+ours.Allocated != int(counts.Free) || !drainingPods && ours.Claims+ours.Draining != int(counts.Claims) {
			t.Errorf("%s: counts %+v, the agent has %+v", name, ours, counts)
		}
	}
}

func TestOrder(t *testing.T) {
	var node v1alpha1.GPUNode
	for _, name := range []string{"gpu-10", "gpu-2-mig-1g10gb-19-0", "gpu-2", "gpu-0"} {
		d := v1alpha1.DeviceStatus{Name: name}
		if gpu := device.GPUName(name); gpu != name {
			d.Parent = gpu
		}
		node.Status.Devices = append(node.Status.Devices, d)
	}
	var names []string
	for _, d := range NodeOf(node).Devices {
		names = append(names, d.Name)
	}
	if want := []string{"gpu-0", "gpu-2", "gpu-2-mig-1g10gb-19-0", "gpu-10"}; !slices.Equal(names, want) {
		t.Errorf("%v", names)
	}
}

func TestChanges(t *testing.T) {
	row := func(key, text string) Row {
		return Row{Key: key, cells: []cell{{text: "n"}, {text: key}, {text: "m"}, {text: text, state: State(text)}, {text: "-"}}}
	}
	got := Changes([]Row{row("a", "Free"), row("b", "Free"), row("c", "Free")}, []Row{row("a", "Free"), row("b", "Pod"), row("d", "Free")})
	var texts []string
	for _, r := range got {
		texts = append(texts, r.Key+" "+r.cells[stateColumn].text)
	}
	if want := []string{"b Pod", "d Free", "c Gone"}; !slices.Equal(texts, want) {
		t.Errorf("%v, want %v", texts, want)
	}
}

// TestParts: the sizes of partitions are those that slices publish, or of a published partition of the same profile, or usual ones. They
// never overlap the next partition.
func TestParts(t *testing.T) {
	published := func(name, profile string, slices ...int) resourceapi.Device {
		d := resourceapi.Device{Name: name, Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{}}
		d.Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"profile": {StringValue: ptr.To(profile)}}
		for _, i := range slices {
			d.Capacity[resourceapi.QualifiedName(fmt.Sprintf("memorySlice%d", i))] = resourceapi.DeviceCapacity{Value: resource.MustParse("1")}
		}
		return d
	}
	for name, c := range map[string]struct {
		profiles  []string // with their starts
		published []resourceapi.Device
		counters  int
		want      string
	}{
		"published":      {[]string{"1g.20gb 0"}, []resourceapi.Device{published("gpu-0-mig-1g20gb-15-0", "1g.20gb", 0, 1)}, 0, "8: 1g.20gb 0+2, free 2+6"},
		"like another":   {[]string{"1g.20gb 0", "1g.20gb 4"}, []resourceapi.Device{published("gpu-0-mig-1g20gb-15-4", "1g.20gb", 4, 5)}, 0, "8: 1g.20gb 0+2, free 2+2, 1g.20gb 4+2, free 6+2"},
		"usual":          {[]string{"3g.40gb 0", "1g.10gb 4"}, nil, 0, "8: 3g.40gb 0+4, 1g.10gb 4+1, free 5+3"},
		"an A30":         {[]string{"2g.12gb 0", "1g.6gb 3"}, nil, 4, "4: 2g.12gb 0+2, free 2+1, 1g.6gb 3+1"},
		"without room":   {[]string{"7g.80gb 0", "1g.10gb 2"}, nil, 0, "8: 7g.80gb 0+2, 1g.10gb 2+1, free 3+5"},
		"unknown":        {[]string{"9x 6"}, nil, 0, "8: free 0+6, 9x 6+1, free 7+1"},
		"none":           {nil, nil, 8, "0: "},
		"with a compute": {[]string{"1c.3g.40gb 4"}, nil, 0, "8: free 0+4, 1c.3g.40gb 4+4"},
	} {
		var node v1alpha1.GPUNode
		node.Status.Devices = []v1alpha1.DeviceStatus{{Name: "gpu-0"}}
		for _, of := range c.profiles {
			profile, start, _ := strings.Cut(of, " ")
			var at int
			if _, err := fmt.Sscan(start, &at); err != nil {
				t.Fatal(err)
			}
			id := device.PartitionName(0, profile, 15, device.Placement{Start: at})
			if strings.HasPrefix(profile, "1c.") {
				id += "-0"
			}
			node.Status.Devices = append(node.Status.Devices, v1alpha1.DeviceStatus{Name: id, Parent: "gpu-0", Profile: profile})
		}
		slice := resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Driver: "gpu.nvidia.com", Devices: c.published}}
		if c.counters > 0 {
			set := resourceapi.CounterSet{Name: "gpu-0-counter-set", Counters: map[string]resourceapi.Counter{}}
			for i := range c.counters {
				set.Counters[fmt.Sprintf("memory-slice-%d", i)] = resourceapi.Counter{}
			}
			slice.Spec.SharedCounters = []resourceapi.CounterSet{set}
		}
		gpu := PictureOf(NodeOf(node), []resourceapi.ResourceSlice{slice}, "gpu.nvidia.com").Groups[0].GPUs[0]
		var parts []string
		for _, p := range gpu.Parts {
			what := "free"
			if p.Partition != nil {
				what = p.Partition.Profile
			}
			parts = append(parts, fmt.Sprintf("%s %s", what, p.Placement))
		}
		if got := fmt.Sprintf("%d: %s", gpu.Slices, strings.Join(parts, ", ")); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// TestCutProfile: a profile that does not fit into the bar is not drawn as another one.
func TestCutProfile(t *testing.T) {
	var node v1alpha1.GPUNode
	node.Status.Devices = []v1alpha1.DeviceStatus{{Name: "gpu-0"}, {Name: "gpu-0-mig-1g10gb-me-20-0", Parent: "gpu-0", Profile: "1g.10gb+me"}}
	for cut, style := range map[string]Style{"|1g.10g~|": {}, "│1g.10g…│": {UTF8: true}} {
		if got := style.Draw(PictureOf(NodeOf(node), nil, "")); !strings.Contains(got, cut) || strings.Contains(got, "1g.10gb|") {
			t.Errorf("no %s in\n%s", cut, got)
		}
	}
}

func TestWrap(t *testing.T) {
	long := strings.Repeat("word ", 60)
	for line := range strings.Lines(wrap("  ", strings.TrimSpace(long))) {
		if len(line) > 101 || !strings.HasPrefix(line, "  ") {
			t.Errorf("%q", line)
		}
	}
	if got := wrap("  ", "https://example.com/"+strings.Repeat("x", 200)); strings.Count(got, "\n") != 1 {
		t.Errorf("%q", got)
	}
}

func TestWithoutAgent(t *testing.T) {
	if n := WithoutAgent(node("gpu", "nvidia.com/gpu.present")); !strings.HasPrefix(n.Problem, "it has GPUs") {
		t.Error(n)
	}
	if n := WithoutAgent(node("cpu", "")); !strings.HasPrefix(n.Problem, "no GPUNode") {
		t.Error(n)
	}
}

func node(name, label string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{label: "true"}}}
}

// The names of devices, which an agent writes, do not control the terminal.
func TestNamesArePlain(t *testing.T) {
	d := Device{Name: "gpu\x1b[2J", UUID: "\u009b2J", Model: "\u202e", State: Free}
	n := Node{Name: "node\x1b[2J", Devices: []Device{d}}
	style := Style{UTF8: true}
	for name, got := range map[string]string{
		"Draw":    style.Draw(Picture{Node: n, Groups: []Group{{GPUs: []GPU{{Device: d, NVLink: "A", Clique: "\x1b"}}}}}),
		"Table":   style.Table(New([]Node{n}), View{Wide: true}),
		"Changed": style.Changed(style.Rows(n, View{Wide: true})),
	} {
		if strings.ContainsAny(got, "\x1b\u009b\u202e") || !strings.Contains(got, "gpu?[2J") {
			t.Errorf("%s: %q", name, got)
		}
	}
}

// TestEqualSharesLeft: what is left of a GPU that claims divide into equal shares is shares, which need not have memory.
func TestEqualSharesLeft(t *testing.T) {
	var node v1alpha1.GPUNode
	d := v1alpha1.DeviceStatus{Name: "gpu-0", Sharing: &v1alpha1.DeviceSharing{Strategy: "TimeSlicing", Claims: "shares", Memory: 80 << 30, Shares: 4}}
	for held := 1; held <= 4; held++ {
		d.Holders = append(d.Holders, v1alpha1.DeviceHolder{Kind: v1alpha1.HolderClaim, State: v1alpha1.HoldHeld, Shared: true, Shares: 1})
		node.Status.Devices = []v1alpha1.DeviceStatus{d}
		want := map[int]string{1: "3 shares", 2: "2 shares", 3: "1 share "}[held]
		got := Style{}.Draw(PictureOf(NodeOf(node), nil, ""))
		if strings.Contains(got, "MiB free") || strings.Contains(got, "free") != (held < 4) || !strings.Contains(got, want) {
			t.Errorf("%d of 4 shares are held:\n%s", held, got)
		}
	}
}

// TestAllocatedPartition: a claim has a part of a GPU before its partition is made.
func TestAllocatedPartition(t *testing.T) {
	node := v1alpha1.GPUNode{
		Spec:   v1alpha1.GPUNodeSpec{Claims: []v1alpha1.AllocatedClaim{{UID: "u", Namespace: "ml", Name: "part", Devices: []string{"gpu-0-mig-1g10gb-19-0"}}}},
		Status: v1alpha1.GPUNodeStatus{Devices: []v1alpha1.DeviceStatus{{Name: "gpu-0"}, {Name: "gpu-1"}}},
	}
	n := NodeOf(node)
	if len(n.Devices[0].Allocated) != 1 || len(n.Devices[1].Allocated) != 0 || n.Devices[0].State != Allocated {
		t.Errorf("devices %+v", n.Devices)
	}
}
