// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/informers"
	resourceinformers "k8s.io/client-go/informers/resource/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/resourceslice/tracker"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/explain"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/device"
)

var (
	randomClaims = flag.Int("claims", 200, "pods with random claims that TestWhyAgreesWithTheScheduler asks about")
	randomSeed   = flag.Uint64("seed", 0, "seed of the random claims; 0 means a fresh one")
)

// TestWhyAgreesWithTheScheduler: for random claims on random nodes, why tells the outcome of the scheduler's own allocator, and for the same
// kind of reason. The devices are published by the agent's code.
func TestWhyAgreesWithTheScheduler(t *testing.T) {
	seed := *randomSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("go test ./cli/kubectl-gpu -run %s -seed %d -claims %d", t.Name(), seed, *randomClaims)
	oracle := oracle{cache: cel.NewCache(10_000, cel.Features{EnableConsumableCapacity: true})}
	for _, object := range classes() {
		oracle.classes = append(oracle.classes, *object.(*resourceapi.DeviceClass))
	}
	outcomes := map[string]int{}
	for i := range *randomClaims {
		r := dice{rand.New(rand.NewPCG(seed, uint64(i)))}
		w := r.world(t)
		want, detail := oracle.outcome(t, w)
		outcomes[want[0]]++
		if want[0] == longSearch {
			continue
		}
		got, err := explain.Why(t.Context(), w.facts(oracle.classes))
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Contains(want, string(got.Cause)) {
			spec, _ := yaml.Marshal(w.claims)
			t.Errorf("claim %d: %s: %s; the scheduler: %s: %s\n%+v\n%s\n%s", i, got.Cause, got.Summary, want, detail, got.Nodes, spec, w.describe())
		}
	}
	t.Log(outcomes)
	// One claim in about a hundred is excluded, so that 200 claims may have none.
	for cause, least := range map[explain.Cause]int{
		explain.CauseRoom: 100, explain.CauseFull: 100, explain.CauseNever: 100, explain.CauseSelector: 100, explain.CauseExcluded: 2000,
	} {
		if *randomClaims >= least && outcomes[string(cause)] == 0 {
			t.Errorf("no claim has the outcome %s", cause)
		}
	}
}

// random is a cluster with a pod that waits for claims.
type random struct {
	machines []*machine
	pod      *corev1.Pod
	claims   []*resourceapi.ResourceClaim
}

func (w random) facts(classes []resourceapi.DeviceClass) explain.Facts {
	f := explain.Facts{
		Driver: config.Defaults().DriverName, Pod: w.pod, Classes: classes, Claims: map[string]*resourceapi.ResourceClaim{},
		MayName: func(string) bool { return true },
	}
	for _, c := range w.claims {
		f.Claims[c.Name] = c
	}
	for _, m := range w.machines {
		f.Nodes, f.GPUNodes = append(f.Nodes, *m.node()), append(f.GPUNodes, *m.gpuNode())
		for _, s := range m.slices() {
			f.Slices = append(f.Slices, *s.(*resourceapi.ResourceSlice))
		}
	}
	return f
}

func (w random) describe() string {
	var text strings.Builder
	for _, m := range w.machines {
		fmt.Fprintf(&text, "%s: taints %v, claims %v\n", m.name, m.taints, m.claims)
		for _, s := range m.slices() {
			for _, d := range s.(*resourceapi.ResourceSlice).Spec.Devices {
				fmt.Fprintf(&text, "  %s %v\n", d.Name, d.Taints)
			}
		}
	}
	return text.String()
}

// oracle is the scheduler.
type oracle struct {
	classes []resourceapi.DeviceClass
	cache   *cel.Cache
}

func (o oracle) List() ([]*resourceapi.DeviceClass, error) { return nil, errors.New("not used") }

func (o oracle) Get(name string) (*resourceapi.DeviceClass, error) {
	for i := range o.classes {
		if o.classes[i].Name == name {
			return &o.classes[i], nil
		}
	}
	return nil, fmt.Errorf("no class %s", name)
}

// longSearch is the outcome where the scheduler tries combinations of devices for seconds: which one depends on its limit of time.
const longSearch = "long search"

// outcome returns the causes that are right.
func (o oracle) outcome(t *testing.T, w random) (causes []string, detail string) {
	t.Helper()
	mayRun := explain.MayRun(w.pod)
	var fits, would, wouldElsewhere, unsure bool
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	defer func(begin time.Time) {
		switch took := time.Since(begin); {
		case ctx.Err() != nil:
			causes = []string{longSearch}
		case took > 200*time.Millisecond: // why ends one that takes a second on a busy machine
			causes = append(causes, string(explain.CauseNotEvaluated))
		}
	}(time.Now())
	var failed []string // nodes may fail for different reasons
	for _, m := range w.machines {
		idle := *m
		idle.holds, idle.claims, idle.maintenance, idle.rules = nil, nil, nil, nil
		idle.gpus = slices.Clone(m.gpus)
		for i := range idle.gpus {
			idle.gpus[i].Health = device.Health{}
			idle.gpus[i].Partitions = slices.DeleteFunc(slices.Clone(idle.gpus[i].Partitions), func(p device.Partition) bool { return p.Made })
		}
		now, err := o.allocate(ctx, t, m, w.claims)
		then, errThen := o.allocate(ctx, t, &idle, w.claims)
		unsure = unsure || errThen != nil
		if !mayRun(m.node()) {
			wouldElsewhere = wouldElsewhere || now || then || err != nil // which devices it has is not known there
			continue
		}
		if err != nil {
			cause := explain.CauseGivenUp
			if strings.Contains(err.Error(), "CEL runtime error") {
				cause = explain.CauseSelector
			}
			failed, detail = append(failed, string(cause)), err.Error()
		}
		fits, would = fits || now, would || then
	}
	switch {
	case failed != nil:
		return failed, detail
	case fits:
		return []string{string(explain.CauseRoom)}, ""
	case unsure: // whether a device that has a holder would be the pod's without it
		return []string{string(explain.CauseFull), string(explain.CauseUnhealthy), string(explain.CauseNever), string(explain.CauseExcluded)}, ""
	case would:
		return []string{string(explain.CauseFull), string(explain.CauseUnhealthy)}, ""
	case wouldElsewhere:
		return []string{string(explain.CauseExcluded)}, ""
	default:
		return []string{string(explain.CauseNever)}, ""
	}
}

func (o oracle) allocate(ctx context.Context, t *testing.T, m *machine, claims []*resourceapi.ResourceClaim) (bool, error) {
	t.Helper()
	var published []*resourceapi.ResourceSlice
	for _, s := range m.slices() {
		published = append(published, s.(*resourceapi.ResourceSlice))
	}
	published = withRules(t, published, m.rules)
	state := structured.AllocatedState{
		AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection(),
	}
	for _, claim := range m.claims {
		for _, name := range claim.Devices {
			id := structured.MakeDeviceID(config.Defaults().DriverName, claim.Pools[0], name)
			if share, shared := claim.ShareOf(name); shared {
				state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, &claim.UID))
				state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, map[resourceapi.QualifiedName]resource.Quantity{
					"memory": *resource.NewQuantity(share.Memory, resource.BinarySI)}))
			} else {
				state.AllocatedDevices.Insert(id)
			}
		}
	}
	features := structured.Features{
		AdminAccess: true, PrioritizedList: true, DeviceTaints: true, ConsumableCapacity: true, PartitionableDevices: true, DeviceBindingAndStatus: true,
	}
	allocator, err := structured.NewAllocator(ctx, features, state, o, published, o.cache)
	if err != nil {
		t.Fatal(err)
	}
	results, err := allocator.Allocate(ctx, m.node(), claims)
	return results != nil, err
}

// withRules returns slices as the scheduler has them where there are rules.
func withRules(t *testing.T, published []*resourceapi.ResourceSlice, rules []v1alpha1.RuleTaint) []*resourceapi.ResourceSlice {
	t.Helper()
	if len(rules) == 0 {
		return published
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var objects []runtime.Object
	for _, s := range published {
		objects = append(objects, s)
	}
	for _, of := range rules {
		rule := &resourceapi.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: of.Rule}, Spec: resourceapi.DeviceTaintRuleSpec{
			DeviceSelector: &resourceapi.DeviceTaintSelector{Driver: ptr.To(config.Defaults().DriverName)},
			Taint:          resourceapi.DeviceTaint{Key: of.Key, Value: of.Value, Effect: resourceapi.DeviceTaintEffect(of.Effect)},
		}}
		if of.Pool != "" {
			rule.Spec.DeviceSelector.Pool = &of.Pool
		}
		if of.Device != "" {
			rule.Spec.DeviceSelector.Device = &of.Device
		}
		objects = append(objects, rule)
	}
	api := fake.NewClientset(objects...)
	factory := informers.NewSharedInformerFactory(api, 0)
	resources := factory.Resource().V1()
	tracked, err := tracker.StartTracker(ctx, tracker.Options{
		EnableDeviceTaintRules: true, KubeClient: api,
		SliceInformer: resourceinformers.ToTypedResourceSliceInformer(resources.ResourceSlices()),
		TaintInformer: resourceinformers.ToTypedDeviceTaintRuleInformer(resources.DeviceTaintRules()),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer tracked.Stop()
	factory.Start(ctx.Done())
	if !cache.WaitFor(ctx, "", tracked.HasSyncedChecker()) {
		t.Fatal("the tracker does not sync")
	}
	tainted, err := tracked.ListPatchedResourceSlices()
	if err != nil {
		t.Fatal(err)
	}
	return tainted
}

// dice generates worlds.
type dice struct{ *rand.Rand }

func pick[T any](r dice, of ...T) T { return of[r.IntN(len(of))] }

func (r dice) one(in int) bool { return r.IntN(in) == 0 }

func (r dice) world(t *testing.T) random {
	var w random
	for i := range 1 + r.IntN(3) {
		w.machines = append(w.machines, r.machine(fmt.Sprint("node-", i+1)))
	}
	w.pod = pending("late")
	if r.one(3) {
		w.pod.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	}
	for i := range 1 + r.IntN(5)/4 {
		name := fmt.Sprint("late-gpu-", i)
		w.pod.Spec.ResourceClaims = append(w.pod.Spec.ResourceClaims, corev1.PodResourceClaim{Name: fmt.Sprint("gpu-", i), ResourceClaimName: &name})
		w.claims = append(w.claims, r.claim(t, name))
	}
	return w
}

func (r dice) machine(name string) *machine {
	m := h100s(name, pick(r, 1, 2, 4, 8))
	for i := range m.gpus {
		g := m.gpu(i)
		g.Architecture, g.Brand, g.DriverVersion, g.ECCEnabled = "Hopper", "Nvidia", "580.95.5", ptr.To(true)
		g.PCIeRoot = fmt.Sprint("pci0000:", i/2)
	}
	switch r.IntN(6) {
	case 0: // another model, without NVLink
		for i := range m.gpus {
			g := m.gpu(i)
			g.ProductName, g.Architecture, g.ComputeCapability, g.MemoryBytes, g.NVLinkDomain, g.ECCEnabled = "NVIDIA L4", "Ada Lovelace", "8.9", 24*gib, "", nil
			g.MIGCapable, g.Profiles = false, nil
		}
	case 1: // one reports no memory and no compute capability
		m.gpu(0).MemoryBytes, m.gpu(0).ComputeCapability, m.gpu(0).ProductName = 0, "", "NVIDIA GB10"
	case 2: // static partitions
		m.limits.Strategy = pick(r, device.MIGStrategyMixed, device.MIGStrategyNone)
		m.partition(0, "3g.40gb", 0, false)
		if two := m.partition(0, "2g.20gb", 4, false); r.one(2) {
			m.claim("web", name+"-part", "part", two)
		}
	case 3: // partitions that Tandem creates
		m.gpu(0).Dynamic = true
		if r.one(2) {
			m.claim("web", name+"-half", "half", m.partition(0, "3g.40gb", 0, true))
		}
	case 4: // shares
		for i := range m.gpus {
			m.share(i)
			if r.one(2) {
				m.shareOf("web", fmt.Sprint(name, "-share-", i), "share", i, uint64(1+r.IntN(70))*gib)
			}
		}
	}
	for i := range m.gpus {
		if g := m.gpu(i); g.MIGEnabled || g.Dynamic || g.Sharing.Claims != "" {
			continue
		}
		switch r.IntN(8) {
		case 0:
			m.pod("web", fmt.Sprint(name, "-pod-", i), i)
		case 1, 2:
			m.claim("web", fmt.Sprint(name, "-claim-", i), "x", m.gpu(i).Ref())
		case 3:
			m.allocated("web", fmt.Sprint(name, "-allocated-", i), m.gpu(i).Ref())
		case 4:
			if r.one(2) {
				m.gpu(i).Health = device.Health{Reason: device.ReasonXID, XID: 79, Message: "XID 79"}
			} else {
				m.maintain(i, "fan")
			}
		}
	}
	for i := range pick(r, 0, 0, 0, 1, 2) {
		g := m.gpus[r.IntN(len(m.gpus))]
		pool := pick(r, "", "", name, device.OwnPool(name, g))
		m.taint(fmt.Sprint("rule-", i), pick(r, v1alpha1.TaintNoSchedule, v1alpha1.TaintNoExecute), pool, pick(r, "", g.Name(), g.Name(), g.Name()+"-mig-1g10gb-19-0"))
	}
	if r.one(4) {
		m.taints = []corev1.Taint{{Key: "team", Value: "web", Effect: corev1.TaintEffectNoSchedule}}
	}
	return m
}

func (r dice) claim(t *testing.T, name string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: name, UID: types.UID(name)}}
	var names []string
	for i := range 1 + r.IntN(4)/3 {
		request := resourceapi.DeviceRequest{Name: fmt.Sprint("r", i)}
		names = append(names, request.Name)
		if r.one(4) {
			for j := range 1 + r.IntN(3) {
				request.FirstAvailable = append(request.FirstAvailable, resourceapi.DeviceSubRequest(r.request(t, fmt.Sprint("s", j))))
			}
		} else {
			of := r.request(t, "")
			request.Exactly = &resourceapi.ExactDeviceRequest{DeviceClassName: of.DeviceClassName, Selectors: of.Selectors, AllocationMode: of.AllocationMode,
				Count: of.Count, Tolerations: of.Tolerations, Capacity: of.Capacity}
			if r.one(12) {
				request.Exactly.AdminAccess = ptr.To(true)
			}
		}
		c.Spec.Devices.Requests = append(c.Spec.Devices.Requests, request)
	}
	if r.one(5) {
		attribute := resourceapi.FullyQualifiedName(pick(r, "resource.kubernetes.io/pcieRoot", "resource.kubernetes.io/numaNode", "gpu.nvidia.com/nvlinkDomain",
			"gpu.nvidia.com/productName", "gpu.nvidia.com/uuid", "gpu.nvidia.com/parentUUID", "gpu.nvidia.com/nothing"))
		constraint := resourceapi.DeviceConstraint{MatchAttribute: &attribute}
		if r.one(4) {
			constraint = resourceapi.DeviceConstraint{DistinctAttribute: &attribute}
		}
		if r.one(2) {
			constraint.Requests = names[:1]
		}
		c.Spec.Devices.Constraints = append(c.Spec.Devices.Constraints, constraint)
	}
	return c
}

func (r dice) request(t *testing.T, name string) resourceapi.DeviceSubRequest {
	request := resourceapi.DeviceSubRequest{
		Name: name, DeviceClassName: pick(r, "gpu.nvidia.com", "gpu.nvidia.com", "gpu.nvidia.com", "mig.nvidia.com"),
		AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: pick[int64](r, 1, 1, 1, 1, 2, 2, 3, 4, 8, 9, 33),
	}
	if r.one(8) {
		request.AllocationMode, request.Count = resourceapi.DeviceAllocationModeAll, 0
	}
	for range pick(r, 0, 1, 1, 1, 2) {
		request.Selectors = append(request.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: r.selector(t)}})
	}
	if r.one(8) {
		request.Tolerations = []resourceapi.DeviceToleration{{Operator: resourceapi.DeviceTolerationOpExists}}
	}
	if r.one(6) {
		request.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
			pick[resourceapi.QualifiedName](r, "memory", "memory", "memory", "gpu.nvidia.com/memory", "shares", "multiprocessors", "memry"): resource.MustParse(
				pick(r, "1", "10Gi", "30Gi", "60Gi", "79Gi", "200Gi"))}}
	}
	return request
}

// selector returns an expression that the API server accepts. Attributes have any type there.
func (r dice) selector(t *testing.T) string {
	for {
		expression := r.boolean(2)
		compiled := cel.GetCompiler(cel.Features{EnableConsumableCapacity: true}).CompileCELExpression(expression, cel.Options{})
		if compiled.Error == nil && compiled.MaxCost <= resourceapi.CELSelectorExpressionMaxCost {
			return expression
		}
		if strings.Contains(fmt.Sprint(compiled.Error), "Syntax error") {
			t.Fatalf("%s: %v", expression, compiled.Error)
		}
	}
}

func (r dice) boolean(depth int) string {
	if depth > 0 && r.one(2) {
		a, b := r.boolean(depth-1), r.boolean(depth-1)
		return pick(r, "("+a+") && ("+b+")", "("+a+") || ("+b+")", "!("+a+")", "("+a+") ? ("+b+") : true")
	}
	domain := pick(r, "gpu.nvidia.com", "gpu.nvidia.com", "gpu.nvidia.com", "gpu.nvidia.com", "resource.kubernetes.io", "nvidia.com")
	of := `device.attributes["` + domain + `"]`
	key := pick(r, "productName", "architecture", "brand", "uuid", "index", "minor", "type", "profile", "cudaComputeCapability", "driverVersion", "eccEnabled",
		"numaNode", "pcieRoot", "nvlinkDomain", "parentUUID", "architectur", "Architecture", "memory", "product")
	text := pick(r, "Hopper", "hopper", "Ada Lovelace", "NVIDIA L4", "NVIDIA H100 80GB HBM3", "gpu", "mig", "3g.40gb", "1g.10gb", "Nvidia", "x")
	capacity := `device.capacity["` + pick(r, "gpu.nvidia.com", "gpu.nvidia.com", "nvidia.com") + `"].` + pick(r, "memory", "memory", "memory", "multiprocessors", "memry")
	return pick(r,
		fmt.Sprintf("%s.%s == %q", of, key, text),
		fmt.Sprintf("%s.%s != %q", of, key, text),
		fmt.Sprintf("%s.architecture == %q", `device.attributes["gpu.nvidia.com"]`, text),
		fmt.Sprintf("%s.productName.startsWith(%q)", `device.attributes["gpu.nvidia.com"]`, text),
		fmt.Sprintf("%s.?%s.orValue(%q) == %q", of, key, text, text),
		fmt.Sprintf("%s[?%q].hasValue()", of, key),
		fmt.Sprintf("%s.%s.orValue(%q) == %q", of, key, text, text),
		fmt.Sprintf("%q in %s", key, of),
		fmt.Sprintf("has(%s.%s)", of, key),
		fmt.Sprintf("%s.%s.startsWith(%q)", of, key, text),
		fmt.Sprintf("%s.%s.lowerAscii().contains(%q)", of, key, text),
		fmt.Sprintf("%s.%s.matches(%q)", of, key, pick(r, "^NVIDIA.*", "[", "H100|L4")),
		fmt.Sprintf("%s.%s < %d", of, key, r.IntN(4)),
		fmt.Sprintf("%s.index %% 2 == 0", `device.attributes["gpu.nvidia.com"]`),
		fmt.Sprintf("%s.%s", of, key),
		fmt.Sprintf("%s.%s.isGreaterThan(semver(%q))", of, key, pick(r, "8.0.0", "9.0.0", "500.0.0")),
		fmt.Sprintf("%s.%s.compareTo(semver(%q)) >= 0", of, key, pick(r, "8.0.0", "9.0.0", "9.0", "x")),
		fmt.Sprintf("%s.compareTo(quantity(%q)) >= 0", capacity, pick(r, "10Gi", "40Gi", "80Gi", "1", "x")),
		fmt.Sprintf("%s.isGreaterThan(quantity(%q))", capacity, pick(r, "10Gi", "40Gi")),
		fmt.Sprintf("%s == quantity(%q)", capacity, "24Gi"),
		fmt.Sprintf("device.driver == %q", pick(r, "gpu.nvidia.com", "other")),
		"device.allowMultipleAllocations",
		fmt.Sprintf("[%q, %q].exists(x, x == %s.%s)", text, "Hopper", of, key),
		fmt.Sprintf("%s.%s in [%q, %d]", of, key, text, r.IntN(4)),
		pick(r, "true", "true", "false"),
	)
}
