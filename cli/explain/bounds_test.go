// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// costly is a selector that matches every device and costs 130,000. The API server accepts one that costs 1,000,000.
func costly(t *testing.T) string {
	t.Helper()
	numbers := strings.TrimSuffix(strings.Repeat("1,", 100), ",")
	expression := fmt.Sprintf("[%s].all(a, [%[1]s].all(b, [%s].all(c, a + b + c > 0)))", numbers, numbers[:1])
	if compiled := cel.GetCompiler(cel.Features{}).CompileCELExpression(expression, cel.Options{}); compiled.Error != nil ||
		compiled.MaxCost > resourceapi.CELSelectorExpressionMaxCost || len(expression) > resourceapi.CELSelectorExpressionMaxLength {
		t.Fatalf("cost %d, %v", compiled.MaxCost, compiled.Error)
	}
	return expression
}

// most is the largest claim that the API server accepts: 32 requests with 32 selectors each.
func most(t *testing.T) (requests []resourceapi.DeviceRequest) {
	t.Helper()
	expression := costly(t)
	for i := range 32 {
		var selectors []string
		for j := range 32 {
			selectors = append(selectors, fmt.Sprintf("%s && %d > 0", expression, 32*i+j+1))
		}
		r := exactly(1, selectors...)[0]
		r.Name = fmt.Sprint("r", i)
		requests = append(requests, r)
	}
	return requests
}

// TestCostlySelectors: a tenant's selectors do not keep the viewer waiting, and what is not evaluated is not answered as if it were.
func TestCostlySelectors(t *testing.T) {
	requests := most(t)
	cancelled, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("the viewer has gone"))
	for name, c := range map[string]struct {
		ctx   context.Context
		b     bounds
		nodes []string
		want  string
	}{
		"cost":           {t.Context(), bounds{300_000, time.Hour}, []string{"--------", "--------"}, errCost.Error()},
		"cost, all held": {t.Context(), bounds{300_000, time.Hour}, []string{"xxxxxxxx"}, errCost.Error()},
		"time":           {t.Context(), bounds{1 << 60, 500 * time.Millisecond}, []string{"--------"}, "the pod's requests take longer than 500ms"},
		"viewer":         {cancelled, bounds{1 << 60, time.Hour}, []string{"--------"}, "the viewer has gone"},
	} {
		t.Run(name, func(t *testing.T) {
			f, begin := facts(requests, c.nodes...), time.Now()
			got := f.why(c.ctx, c.b)
			if got.Cause != CauseNotEvaluated || got.Summary != "waits: not evaluated: "+c.want {
				t.Errorf("%s: %s", got.Cause, got.Summary)
			}
			for _, n := range got.Nodes {
				if n.Fit != FitUnknown || n.Fit.Words() != "not evaluated" || n.Reason != c.want || len(n.Holders) > 0 {
					t.Errorf("node %+v", n)
				}
			}
			if len(got.Nodes) != 1 || got.Nodes[0].Count != len(c.nodes) || len(got.Frees) > 0 {
				t.Errorf("nodes %+v, frees %q", got.Nodes, got.Frees)
			}
			// All of them would take many minutes.
			if took := time.Since(begin); took > time.Minute {
				t.Errorf("it took %s", took)
			}
		})
	}
}

// TestUsualBounds: one costly selector is evaluated, and all that is evaluated takes seconds. A unit takes some 0.2 microseconds.
func TestUsualBounds(t *testing.T) {
	if usual.cost < 5_000_000 || usual.cost > 50_000_000 || usual.time < time.Second || usual.time > 10*time.Second {
		t.Errorf("%+v", usual)
	}
	f := facts(exactly(1, costly(t)), "-")
	if got := f.why(t.Context(), bounds{usual.cost, time.Hour}); got.Cause != CauseRoom {
		t.Errorf("one selector: %+v", got)
	}
	// One of 200,000 devices may cost 100. A device is tried for a need four times and evaluated once.
	m, left := newMatcher(Facts{Driver: testDriver}, bounds{cost: usual.cost}), int64(0)
	for range 2 { // the second node without the compilation
		left = m.left
		newStock(m, f.GPUNodes[0], f.Slices, nil, false).shortages(t.Context(), []need{{count: 2, selectors: []string{
			gpuClass().Spec.Selectors[0].CEL.Expression, `device.attributes["gpu.nvidia.com"].productName == "H100"`, "true"}}})
	}
	if cost := left - m.left; cost < 3*10 || cost > 100 {
		t.Errorf("one device costs %d", cost)
	}
}

// TestSearchEnds: the allocator tries all combinations of devices. Where the count knows that there are too few, the answer says so.
func TestSearchEnds(t *testing.T) {
	begin := time.Now()
	f := facts(exactly(16), strings.Repeat("-", 32))
	none := exactly(1, "false")
	none[0].Name = "none"
	f.Claims["c"].Spec.Devices.Requests = append(f.Claims["c"].Spec.Devices.Requests, none...)
	if got := answerTo(t, f); got.Cause != CauseNever || !strings.Contains(got.Summary, "no device matches false of claim c") {
		t.Errorf("%s: %s", got.Cause, got.Summary)
	}
	// One of each of 28 pairs, in 2^28 ways, and one more of another pair.
	attribute := resourceapi.FullyQualifiedName("gpu.nvidia.com/pair")
	f = facts(exactly(28), strings.Repeat("-", 56))
	for i := range f.Slices[0].Spec.Devices {
		f.Slices[0].Spec.Devices[i].Attributes["pair"] = resourceapi.DeviceAttribute{StringValue: ptr.To(fmt.Sprint(i / 2))}
	}
	f.Claims["c"].Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{DistinctAttribute: &attribute}}
	second := exactly(1)
	second[0].Name = "second"
	f.Claims["c"].Spec.Devices.Requests = append(f.Claims["c"].Spec.Devices.Requests, second...)
	if got := answerTo(t, f); got.Cause != CauseNotEvaluated || !strings.Contains(got.Summary, errSearch.Error()) || got.Nodes[0].Fit != FitUnknown {
		t.Errorf("%s: %s: %+v", got.Cause, got.Summary, got.Nodes)
	}
	if took := time.Since(begin); took > time.Minute {
		t.Errorf("it took %s", took)
	}
}

// endsLater is done after its first Err.
type endsLater struct {
	context.Context
	asked bool
}

func (c *endsLater) Err() error {
	if !c.asked {
		c.asked = true
		return nil
	}
	return c.Context.Err()
}

// TestEndsWithinASelector: an evaluation ends when its context does, and its result does not count.
func TestEndsWithinASelector(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	m := newMatcher(Facts{Driver: testDriver}, bounds{cost: 1 << 60})
	_, _ = m.broken(t.Context(), []string{costly(t)})
	left := m.left
	m.matches(&endsLater{Context: ctx}, costly(t), candidate{})
	if cost := left - m.left; cost > 50_000 || m.goesOn(ctx) {
		t.Errorf("it cost %d, ended: %v", cost, m.ended)
	}
}

// TestSelectorsWithoutCost: also the evaluation of a selector that costs nothing counts, and so does its compilation.
func TestSelectorsWithoutCost(t *testing.T) {
	m := newMatcher(Facts{Driver: testDriver}, bounds{cost: 1000})
	evaluated := 0
	for ; m.goesOn(t.Context()) && evaluated < 1000; evaluated++ {
		m.matches(t.Context(), "true", candidate{})
	}
	if evaluated > 100 {
		t.Errorf("%d evaluations for 1000", evaluated)
	}
	m = newMatcher(Facts{Driver: testDriver}, bounds{cost: 1_000_000})
	var selectors []string
	for i := range 1024 {
		selectors = append(selectors, fmt.Sprintf("[%s%d].size() > 0", strings.Repeat("1,", 500), i))
	}
	if _, err := m.broken(t.Context(), selectors); err != nil || len(m.compiled) == 0 || len(m.compiled) > 100 {
		t.Errorf("%d compilations, %v", len(m.compiled), err)
	}
}

// TestRoomBeforeTheBound: a node with room answers the question, whatever the others have. Nodes of both kinds are in the answer.
func TestRoomBeforeTheBound(t *testing.T) {
	f := facts(exactly(1, costly(t)), "-", "x", "-")
	got := f.why(t.Context(), bounds{220_000, time.Hour})
	if got.Cause != CauseRoom || len(got.Nodes) != 2 || got.Nodes[0].Fit != FitRoom || got.Nodes[1].Fit != FitUnknown || got.Nodes[1].Count != 2 {
		t.Errorf("%+v", got)
	}
	// The second node has no room, and the third, which has, is not evaluated, so that no answer is known.
	f = facts(exactly(1, costly(t)), "x", "-", "-")
	got = f.why(t.Context(), bounds{220_000, time.Hour})
	if got.Cause != CauseNotEvaluated || len(got.Nodes) != 2 || got.Nodes[0].Fit != FitFull || got.Nodes[1].Fit != FitUnknown || got.Nodes[1].Count != 2 {
		t.Errorf("%+v", got)
	}
	// A toleration would help if the node had room, which is not known.
	f = facts(exactly(1, costly(t)), "-")
	f.Nodes[0].Spec.Taints = []corev1.Taint{{Key: "team", Effect: corev1.TaintEffectNoSchedule}}
	got = f.why(t.Context(), bounds{80_000, time.Hour})
	if got.Cause != CauseNotEvaluated || len(got.Frees) > 0 {
		t.Errorf("%+v", got)
	}
}

// TestExcludedNodesCostLast: what a pod may run on is evaluated before nodes that exclude it, however many those are.
func TestExcludedNodesCostLast(t *testing.T) {
	for want, mine := range map[Cause]string{CauseRoom: "-", CauseFull: "x"} {
		f := facts(exactly(1, costly(t)), "-", "-", "-", mine)
		for i := range 3 {
			f.Nodes[i].Spec.Taints = []corev1.Taint{{Key: "team", Effect: corev1.TaintEffectNoSchedule}}
		}
		got := f.why(t.Context(), bounds{220_000, time.Hour})
		if got.Cause != want || got.Nodes[0].Names[0] != "node-3" {
			t.Errorf("%s: %+v", want, got)
		}
		for _, n := range got.Nodes[1:] {
			if n.Fit != FitNever || !strings.Contains(n.Reason, "taint") {
				t.Errorf("%s: node %+v", want, n)
			}
		}
	}
	if text := errCost.Error(); !strings.Contains(text, "each device") {
		t.Errorf("%q blames the pod alone", text)
	}
}

// TestTooManyRequests: a pod may name thousands of claims, or the same one thousands of times, and a claim may have 32 requests with 8
// alternatives.
func TestTooManyRequests(t *testing.T) {
	long := strings.Repeat("1 + ", 50) + "1 > 0"
	alternatives := func(n int) (requests []resourceapi.DeviceRequest) {
		for i := range n {
			r := resourceapi.DeviceRequest{Name: fmt.Sprint("r", i)}
			for j := range 8 {
				r.FirstAvailable = append(r.FirstAvailable, resourceapi.DeviceSubRequest{
					Name: fmt.Sprint("s", j), DeviceClassName: "gpu.nvidia.com", Count: 1, Selectors: exactly(1, long, long, long)[0].Exactly.Selectors})
			}
			requests = append(requests, r)
		}
		return requests
	}
	for name, c := range map[string]struct {
		claims   int
		requests []resourceapi.DeviceRequest
		cause    Cause
		summary  string
		lines    int
	}{
		"one large claim":    {1, alternatives(32), CauseNever, "", 32},
		"two of them":        {2, alternatives(32), CauseNotEvaluated, "the pod makes 512 requests, alternatives included, and at most 256 are evaluated", 33},
		"many claims":        {64, exactly(1), CauseNever, "", 33},
		"too many claims":    {65, exactly(1), CauseNotEvaluated, "the pod has 65 claims, and at most 64 are evaluated", 33},
		"claims of thousand": {5000, alternatives(32), CauseNotEvaluated, "the pod has 5000 claims, and at most 64 are evaluated", 33},
	} {
		t.Run(name, func(t *testing.T) {
			f := facts(c.requests, "-")
			f.Pod.Spec.ResourceClaims = slices.Repeat([]corev1.PodResourceClaim{{Name: "x", ResourceClaimName: ptr.To("c")}}, c.claims)
			got := answerTo(t, f)
			if got.Cause != c.cause || c.summary != "" && got.Summary != "waits: not evaluated: "+c.summary || len(got.Requests) != c.lines {
				t.Errorf("%s: %s: %d lines", got.Cause, got.Summary, len(got.Requests))
			}
			for _, line := range append(got.Requests, got.Summary) {
				if len(line) > 2000 {
					t.Errorf("a line has %d bytes", len(line))
				}
			}
		})
	}
	// The claims that are not evaluated may be of Tandem's.
	f := facts(exactly(1), "-")
	f.Classes = append(f.Classes, class("nic", `device.driver == "net.example.com"`))
	f.Claims["c"].Spec.Devices.Requests[0].Exactly.DeviceClassName = "nic"
	f.Pod.Spec.ResourceClaims = slices.Repeat([]corev1.PodResourceClaim{{Name: "x", ResourceClaimName: ptr.To("c")}}, 65)
	if got := answerTo(t, f); got.Cause != CauseNotEvaluated {
		t.Errorf("others' claims: %+v", got)
	}
}

// TestManyOthersWait: the list does not count the nodes again for each of many pods that request different numbers, and a pod's line is
// bounded.
func TestManyOthersWait(t *testing.T) {
	var nodes []v1alpha1.GPUNode
	for i := range 10 {
		_, n, _ := reported(fmt.Sprint("n", i), true)
		n.Status.ExtendedResource, n.Status.Counts = testResource, v1alpha1.DeviceCounts{Total: 1, Pods: 1}
		nodes = append(nodes, n)
	}
	q := NewQueue(nodes)
	for i := range int64(1000) {
		q.Reason(newPod("p", func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{testResource: *resource.NewQuantity(i+1, resource.DecimalSI)}
		}))
	}
	if len(q.reasons) == 0 || len(q.reasons) > 100 {
		t.Errorf("the nodes were counted for %d requests", len(q.reasons))
	}
	many := newPod("p", func(p *corev1.Pod) {
		for i := range 5000 {
			p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, corev1.PodResourceClaim{Name: fmt.Sprint("claim-", i)})
		}
	})
	if texts := q.Requests(many); len(texts) != 9 || texts[8] != "and 4992 more" {
		t.Errorf("%d texts, %q", len(texts), texts[len(texts)-1])
	}
}

// TestOffersAreBounded: a selector of 10 KiB may have hundreds of keys and strings, which are compared with each value of the nodes.
func TestOffersAreBounded(t *testing.T) {
	f, expression := facts(exactly(1), "-"), "false"
	for i := range 400 {
		expression += fmt.Sprintf(` || device.attributes["gpu.nvidia.com"].key%d == "GPU-%d"`, i, i)
	}
	o := f.offers(expression)
	if len(o.asked) != mostAsked || len(o.values) != mostAsked || len(o.literals) != mostAsked {
		t.Errorf("%d keys, %d values, %d strings", len(o.asked), len(o.values), len(o.literals))
	}
	if !slices.Equal(o.literals[:3], []string{"gpu.nvidia.com", "GPU-0", "GPU-1"}) {
		t.Errorf("%q", o.literals)
	}
	f.byNode = f.published()
	f.Slices = nil
	if got := f.offers(`device.attributes["gpu.nvidia.com"].uuid == "GPU-1"`).String(); got != "; the nodes offer uuid GPU-0 (did you mean GPU-0?)" {
		t.Error(got)
	}
}

// TestTextsAreBounded: tenants write events and owner references of any size, and a long list of nodes is a long reason.
func TestTextsAreBounded(t *testing.T) {
	long := strings.Repeat("x ", 500_000)
	for name, message := range map[string]string{
		"message": long, "quota": "exceeded quota: q, requested: " + long[:2000] + ", used: 1, limited: 1", "more than is read": "exceeded quota: q, requested: " + long + ", used: 1, limited: 1",
	} {
		f := facts(nil, "-")
		f.Claims = nil
		f.Pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "x", ResourceClaimTemplateName: ptr.To("t")}}
		of := &resourceapi.ResourceClaimTemplate{}
		of.Spec.Spec.Devices.Requests = exactly(1)
		f.Templates = map[string]*resourceapi.ResourceClaimTemplate{"t": of}
		f.Events = []corev1.Event{
			{Reason: claimNotCreated, Message: message}, {Reason: "Other\n", Message: long, InvolvedObject: corev1.ObjectReference{Name: long}},
			{Reason: "FailedScheduling", Message: long},
		}
		a := answerTo(t, f)
		if len(a.Scheduler) > mostMessage+3 {
			t.Errorf("%s: the scheduler's message has %d bytes", name, len(a.Scheduler))
		}
		for _, text := range append(a.Events, a.Summary) {
			if len(text) > mostText+3 || strings.Contains(text, "\n") {
				t.Errorf("%s: %d bytes: %.80q", name, len(text), text)
			}
		}
	}
	var nodes []v1alpha1.GPUNode
	for i := range namedNodes {
		nodes = append(nodes, v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(i, strings.Repeat("n", 200))}})
		nodes[i].Status.ExtendedResource, nodes[i].Status.Counts = testResource, v1alpha1.DeviceCounts{Total: 1, Pods: 1}
	}
	pod := newPod("a", func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources = gpuLimits("1")
		p.Labels = map[string]string{"pod-template-hash": "h"}
		p.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: long + "-h", Controller: ptr.To(true)}}
	})
	if reason := NewQueue(nodes).Reason(pod); len(reason) != mostReason+3 {
		t.Errorf("a reason of %d bytes", len(reason))
	}
	if kind, name := ownerOf(pod); kind != "Deployment" || len(name) != mostOwner+3 {
		t.Errorf("%s with a name of %d bytes", kind, len(name))
	}
}
