// SPDX-License-Identifier: Apache-2.0

package helm_test

import (
	"strings"
	"sync"
	"testing"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apiserver/pkg/cel/environment"
)

type object map[string]any

// slice is a ResourceSlice as the API server hands it to a policy.
func slice(driver, node, pool string) object {
	spec := object{"driver": driver, "pool": object{"name": pool}}
	if node != "" {
		spec["nodeName"] = node
	}
	return object{"spec": spec}
}

func TestPolicy(t *testing.T) {
	const (
		agent  = "system:serviceaccount:tandem-system:tandem"
		driver = "gpu.nvidia.com"
	)
	own := slice(driver, "a", "a")
	shared := slice(driver, "", "a")
	for name, c := range map[string]struct {
		user          string
		extra         object
		operation     string
		before, after any
		want          string // "" allowed, "-" not the policy's business, otherwise part of the message
	}{
		"create own":             {agent, onNode("a"), "CREATE", nil, own, ""},
		"update own":             {agent, onNode("a"), "UPDATE", own, own, ""},
		"delete own":             {agent, onNode("a"), "DELETE", own, nil, ""},
		"pool of one GPU":        {agent, onNode("a"), "CREATE", nil, slice(driver, "a", "a/gpu-00"), ""},
		"create other's":         {agent, onNode("b"), "CREATE", nil, own, "node 'b' may write ResourceSlices of that node"},
		"update other's":         {agent, onNode("b"), "UPDATE", own, own, "of that node only"},
		"take over other's":      {agent, onNode("b"), "UPDATE", own, slice(driver, "b", "b"), "of that node only"},
		"give away own":          {agent, onNode("a"), "UPDATE", own, slice(driver, "b", "b"), "of that node only"},
		"delete other's":         {agent, onNode("b"), "DELETE", own, nil, "of that node only"},
		"slice of many nodes":    {agent, onNode("a"), "CREATE", nil, shared, "of that node only"},
		"delete of many nodes":   {agent, onNode("a"), "DELETE", shared, nil, "of that node only"},
		"other driver":           {agent, onNode("a"), "CREATE", nil, slice("x.example", "a", "a"), "driver gpu.nvidia.com only"},
		"delete other driver's":  {agent, onNode("a"), "DELETE", slice("x.example", "a", "a"), nil, "driver gpu.nvidia.com only"},
		"other node's pool":      {agent, onNode("a"), "CREATE", nil, slice(driver, "a", "b"), "pools named 'a'"},
		"pool with like name":    {agent, onNode("a"), "CREATE", nil, slice(driver, "a", "ab"), "pools named 'a'"},
		"unbound token":          {agent, object{"x": []string{"a"}}, "CREATE", nil, own, "bound to its pod"},
		"no extra at all":        {agent, nil, "CREATE", nil, own, "bound to its pod"},
		"empty extra":            {agent, object{nodeNameKey: []string{}}, "CREATE", nil, own, "bound to its pod"},
		"unbound and node-less":  {agent, nil, "DELETE", shared, nil, "bound to its pod"},
		"kubelet":                {"system:node:b", nil, "DELETE", own, nil, "-"},
		"other service account":  {"system:serviceaccount:default:tandem", onNode("b"), "CREATE", nil, own, "-"},
		"the account NVIDIA has": {"system:serviceaccount:tandem-system:tandem-x", onNode("b"), "CREATE", nil, own, "-"},
	} {
		t.Run(name, func(t *testing.T) {
			user := object{"username": c.user}
			if c.extra != nil {
				user["extra"] = c.extra
			}
			got := decide(t, policyOf(t, "default", "-resourceslices"), map[string]any{
				"request":   object{"operation": c.operation, "userInfo": user},
				"object":    c.after,
				"oldObject": c.before,
			})
			if (c.want == "") != (got == "") || !strings.Contains(got, c.want) {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// The account in the condition is the one that the pods use, whatever it is called.
func TestPoliciesMatchTheAccounts(t *testing.T) {
	for _, name := range cases {
		agent := daemonSet(t, name).Spec.Template.Spec.ServiceAccountName
		controller := find[*appsv1.Deployment](t, name).Spec.Template.Spec.ServiceAccountName
		for suffix, account := range policies(agent, controller) {
			got := policyOf(t, name, suffix).Spec.MatchConditions[0].Expression
			want := "request.userInfo.username == 'system:serviceaccount:tandem-system:" + account + "'"
			if got != want {
				t.Errorf("%s%s: condition is %s, want %s", name, suffix, got, want)
			}
		}
	}
}

// policies are the ends of their names, each with whom it is about.
func policies(agent, controller string) map[string]string {
	return map[string]string{
		"-resourceslices": agent, "-gpunode-status": agent,
		"-controller-gpunodes": controller, "-controller-pods": controller, "-controller-evictions": controller, "-controller-nodes": controller,
	}
}

func TestPoliciesFailClosed(t *testing.T) {
	for _, name := range cases {
		for suffix := range policies("", "") {
			policy := policyOf(t, name, suffix)
			if *policy.Spec.FailurePolicy != admissionv1.Fail {
				t.Errorf("%s%s: failure policy is %s", name, suffix, *policy.Spec.FailurePolicy)
			}
			binding := findNamed[*admissionv1.ValidatingAdmissionPolicyBinding](t, name, suffix)
			if binding.Spec.PolicyName != policy.Name || binding.Spec.ValidationActions[0] != admissionv1.Deny {
				t.Errorf("%s%s: binding %+v", name, suffix, binding.Spec)
			}
		}
	}
}

func TestAgentsGPUNodePolicy(t *testing.T) {
	const agent = "system:serviceaccount:tandem-system:tandem"
	node := func(name string, claims ...any) object {
		o := object{"metadata": object{"name": name}, "spec": object{}, "status": object{"mode": "Dual"}}
		if len(claims) > 0 {
			o["spec"] = object{"claims": claims}
		}
		return o
	}
	claim := object{"uid": "u", "namespace": "n", "name": "c", "devices": []any{"gpu-0"}}
	withoutSpec := object{"metadata": object{"name": "a"}}
	for name, c := range map[string]struct {
		user          string
		extra         object
		operation     string
		before, after any
		want          string
	}{
		"create own":            {agent, onNode("a"), "CREATE", nil, node("a"), ""},
		"create without a spec": {agent, onNode("a"), "CREATE", nil, withoutSpec, ""},
		"update own":            {agent, onNode("a"), "UPDATE", node("a", claim), node("a", claim), ""},
		"delete own":            {agent, onNode("a"), "DELETE", node("a", claim), nil, ""},
		"create other's":        {agent, onNode("a"), "CREATE", nil, node("b"), "GPUNode of that node only"},
		"update other's":        {agent, onNode("a"), "UPDATE", node("b"), node("b"), "GPUNode of that node only"},
		"delete other's":        {agent, onNode("a"), "DELETE", node("b"), nil, "GPUNode of that node only"},
		"generated name":        {agent, onNode("a"), "CREATE", nil, object{"metadata": object{"generateName": "a"}}, "GPUNode of that node only"},
		"create with claims":    {agent, onNode("a"), "CREATE", nil, node("a", claim), "which is the controller's"},
		"add a claim":           {agent, onNode("a"), "UPDATE", node("a"), node("a", claim), "which is the controller's"},
		"drop a claim":          {agent, onNode("a"), "UPDATE", node("a", claim), node("a"), "which is the controller's"},
		"unbound token":         {agent, nil, "UPDATE", node("a"), node("a"), "bound to its pod"},
		"the controller":        {agent + "-controller", nil, "UPDATE", node("a"), node("a", claim), "-"},
	} {
		t.Run(name, func(t *testing.T) {
			user := object{"username": c.user}
			if c.extra != nil {
				user["extra"] = c.extra
			}
			judge(t, "-gpunode-status", object{"operation": c.operation, "userInfo": user}, c.before, c.after, c.want)
		})
	}
}

func TestControllersPolicies(t *testing.T) {
	request := object{"operation": "UPDATE", "userInfo": object{"username": "system:serviceaccount:tandem-system:tandem-controller"}}
	pod := func(image string, annotations object) object {
		metadata := object{"name": "p", "labels": object{"app": "x"}}
		if annotations != nil {
			metadata["annotations"] = annotations
		}
		return object{"metadata": metadata, "spec": object{"containers": []any{object{"image": image}}}}
	}
	node := func(gpus, cpu string) object {
		return object{
			"metadata": object{"name": "n", "labels": object{"zone": "a"}}, "spec": object{"podCIDR": "10.0.0.0/24"},
			"status": object{"phase": "x", "capacity": object{"nvidia.com/gpu": "8", "cpu": "4"}, "allocatable": object{"nvidia.com/gpu": gpus, "cpu": cpu}},
		}
	}
	parts := func(resource, n string) object {
		o := node("8", "4")
		o["status"].(object)["capacity"].(object)[resource] = "7"
		o["status"].(object)["allocatable"].(object)[resource] = n
		return o
	}
	change := func(o object, path string, value any) object {
		keys := strings.Split(path, ".")
		at := o
		for _, key := range keys[:len(keys)-1] {
			at = at[key].(object)
		}
		if value == nil {
			delete(at, keys[len(keys)-1])
		} else {
			at[keys[len(keys)-1]] = value
		}
		return o
	}
	preconditions := func(p object) object {
		return object{"metadata": object{"name": "p"}, "deleteOptions": object{"preconditions": p}}
	}
	retry := object{"tandem-gpu.dev/retry": "2026-01-01T00:00:00Z"}
	for name, c := range map[string]struct {
		policy        string
		before, after any
		want          string
	}{
		"first annotation":       {"-controller-pods", pod("i", nil), pod("i", retry), ""},
		"annotation anew":        {"-controller-pods", pod("i", object{"tandem-gpu.dev/retry": "x", "a": "b"}), pod("i", object{"tandem-gpu.dev/retry": "y", "a": "b"}), ""},
		"annotation gone":        {"-controller-pods", pod("i", retry), pod("i", nil), ""},
		"image":                  {"-controller-pods", pod("i", nil), pod("evil", retry), "the spec of a pod"},
		"another annotation":     {"-controller-pods", pod("i", nil), pod("i", object{"a": "b"}), "no metadata of a pod"},
		"changed annotation":     {"-controller-pods", pod("i", object{"a": "b"}), pod("i", object{"a": "c"}), "no metadata of a pod"},
		"dropped annotation":     {"-controller-pods", pod("i", object{"a": "b"}), pod("i", retry), "no metadata of a pod"},
		"label":                  {"-controller-pods", pod("i", nil), change(pod("i", nil), "metadata.labels.app", "y"), "no metadata of a pod"},
		"owner":                  {"-controller-pods", pod("i", nil), change(pod("i", nil), "metadata.ownerReferences", []any{}), "no metadata of a pod"},
		"fewer GPUs":             {"-controller-nodes", node("8", "4"), node("7", "4"), ""},
		"none":                   {"-controller-nodes", node("8", "4"), node("0", "4"), ""},
		"more GPUs":              {"-controller-nodes", node("0", "4"), node("8", "4"), ""},
		"more than there are":    {"-controller-nodes", node("8", "4"), node("9", "4"), "than the node has"},
		"fewer partitions":       {"-controller-nodes", parts("nvidia.com/mig-1g.10gb", "7"), parts("nvidia.com/mig-1g.10gb", "0"), ""},
		"more partitions":        {"-controller-nodes", parts("nvidia.com/mig-1g.10gb", "7"), parts("nvidia.com/mig-1g.10gb", "8"), "than the node has"},
		"others' partitions":     {"-controller-nodes", parts("example.com/mig-1g.10gb", "7"), parts("example.com/mig-1g.10gb", "6"), "nothing of a node's status"},
		"what is near":           {"-controller-nodes", parts("nvidia.com/gpu.shared", "7"), parts("nvidia.com/gpu.shared", "6"), "nothing of a node's status"},
		"more than none":         {"-controller-nodes", node("8", "4"), change(node("9", "4"), "status.capacity", object{"cpu": "4"}), "nothing of a node's status"},
		"CPUs":                   {"-controller-nodes", node("8", "4"), node("7", "5"), "nothing of a node's status"},
		"without CPUs":           {"-controller-nodes", node("8", "4"), change(node("7", "4"), "status.allocatable.cpu", nil), "nothing of a node's status"},
		"capacity":               {"-controller-nodes", node("8", "4"), change(node("8", "4"), "status.capacity.cpu", "9"), "nothing of a node's status"},
		"phase":                  {"-controller-nodes", node("8", "4"), change(node("8", "4"), "status.phase", "y"), "nothing of a node's status"},
		"without phase":          {"-controller-nodes", node("8", "4"), change(node("8", "4"), "status.phase", nil), "nothing of a node's status"},
		"a new field":            {"-controller-nodes", node("8", "4"), change(node("8", "4"), "status.conditions", []any{}), "nothing of a node's status"},
		"node label":             {"-controller-nodes", node("8", "4"), change(node("7", "4"), "metadata.labels.zone", "b"), "the metadata of a node"},
		"node annotation":        {"-controller-nodes", node("8", "4"), change(node("7", "4"), "metadata.annotations", object{"a": "b"}), "the metadata of a node"},
		"claims of a node":       {"-controller-gpunodes", change(node("8", "4"), "spec.claims", []any{}), change(node("8", "4"), "spec.claims", []any{object{}}), ""},
		"owner of a GPUNode":     {"-controller-gpunodes", node("8", "4"), change(node("8", "4"), "metadata.ownerReferences", []any{object{}}), "the metadata of a GPUNode"},
		"eviction as seen":       {"-controller-evictions", nil, preconditions(object{"uid": "u", "resourceVersion": "1"}), ""},
		"eviction by UID":        {"-controller-evictions", nil, preconditions(object{"uid": "u"}), "UID and resourceVersion"},
		"eviction of any":        {"-controller-evictions", nil, object{"metadata": object{"name": "p"}}, "UID and resourceVersion"},
		"eviction with an empty": {"-controller-evictions", nil, object{"deleteOptions": object{}}, "UID and resourceVersion"},
	} {
		t.Run(name, func(t *testing.T) { judge(t, c.policy, request, c.before, c.after, c.want) })
	}
}

// judge fails unless the policy's answer contains want: "" allowed, "-" not the policy's business.
func judge(t *testing.T, suffix string, request object, before, after any, want string) {
	t.Helper()
	got := decide(t, policyOf(t, "default", suffix), map[string]any{"request": request, "object": after, "oldObject": before})
	if (want == "") != (got == "") || !strings.Contains(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

const nodeNameKey = "authentication.kubernetes.io/node-name"

func onNode(name string) object { return object{nodeNameKey: []string{name}} }

func policyOf(t *testing.T, name, suffix string) *admissionv1.ValidatingAdmissionPolicy {
	t.Helper()
	return findNamed[*admissionv1.ValidatingAdmissionPolicy](t, name, suffix)
}

// decide evaluates the policy as the API server does: conditions, variables in order, then validations.
func decide(t *testing.T, policy *admissionv1.ValidatingAdmissionPolicy, input map[string]any) string {
	t.Helper()
	for _, c := range policy.Spec.MatchConditions {
		if evaluate(t, c.Expression, input) != types.True {
			return "-"
		}
	}
	variables := map[string]any{}
	input["variables"] = variables
	for _, v := range policy.Spec.Variables {
		variables[v.Name] = evaluate(t, v.Expression, input)
	}
	for _, v := range policy.Spec.Validations {
		if evaluate(t, v.Expression, input) == types.True {
			continue
		}
		// One that fails, or has more than a line, is not used.
		if v.MessageExpression != "" {
			if said, err := try(t, v.MessageExpression, input); err == nil && !strings.Contains(said.Value().(string), "\n") {
				return said.Value().(string)
			}
		}
		if v.Message == "" {
			t.Errorf("%s: fails without a message", v.Expression)
		}
		return v.Message
	}
	return ""
}

func evaluate(t *testing.T, expression string, input map[string]any) ref.Val {
	t.Helper()
	value, err := try(t, expression, input)
	if err != nil {
		t.Fatalf("%s: %v", expression, err)
	}
	return value
}

func try(t *testing.T, expression string, input map[string]any) (ref.Val, error) {
	t.Helper()
	compiled, _ := programs.LoadOrStore(expression, sync.OnceValue(func() cel.Program { return compile(t, expression) }))
	value, _, err := compiled.(func() cel.Program)().Eval(input)
	return value, err
}

// programs are those of expressions that were compiled before.
var programs sync.Map

func compile(t *testing.T, expression string) cel.Program {
	t.Helper()
	env, err := environment.MustBaseEnvSet(environment.DefaultCompatibilityVersion()).Env(environment.NewExpressions)
	if err != nil {
		t.Fatal(err)
	}
	env, err = env.Extend(cel.Variable("request", cel.DynType), cel.Variable("object", cel.DynType),
		cel.Variable("oldObject", cel.DynType), cel.Variable("variables", cel.DynType))
	if err != nil {
		t.Fatal(err)
	}
	ast, issues := env.Compile(expression)
	if issues.Err() != nil {
		t.Fatalf("%s: %v", expression, issues.Err())
	}
	program, err := env.Program(ast)
	if err != nil {
		t.Fatalf("%s: %v", expression, err)
	}
	return program
}
