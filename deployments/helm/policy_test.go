// SPDX-License-Identifier: Apache-2.0

package helm_test

import (
	"strings"
	"testing"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	admissionv1 "k8s.io/api/admissionregistration/v1"
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
			got := decide(t, policyOf(t, "default"), map[string]any{
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
func TestPolicyMatchesTheAgentsAccount(t *testing.T) {
	for _, name := range cases {
		account := daemonSet(t, name).Spec.Template.Spec.ServiceAccountName
		got := policyOf(t, name).Spec.MatchConditions[0].Expression
		want := "request.userInfo.username == 'system:serviceaccount:tandem-system:" + account + "'"
		if got != want {
			t.Errorf("%s: condition is %s, want %s", name, got, want)
		}
	}
}

func TestPolicyFailsClosed(t *testing.T) {
	for _, name := range cases {
		policy := policyOf(t, name)
		if *policy.Spec.FailurePolicy != admissionv1.Fail {
			t.Errorf("%s: failure policy is %s", name, *policy.Spec.FailurePolicy)
		}
		binding := find[*admissionv1.ValidatingAdmissionPolicyBinding](t, name)
		if binding.Spec.PolicyName != policy.Name || binding.Spec.ValidationActions[0] != admissionv1.Deny {
			t.Errorf("%s: binding %+v", name, binding.Spec)
		}
	}
}

const nodeNameKey = "authentication.kubernetes.io/node-name"

func onNode(name string) object { return object{nodeNameKey: []string{name}} }

func policyOf(t *testing.T, name string) *admissionv1.ValidatingAdmissionPolicy {
	t.Helper()
	return find[*admissionv1.ValidatingAdmissionPolicy](t, name)
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
		if v.MessageExpression != "" {
			return evaluate(t, v.MessageExpression, input).Value().(string)
		}
		return v.Message
	}
	return ""
}

func evaluate(t *testing.T, expression string, input map[string]any) ref.Val {
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
	value, _, err := program.Eval(input)
	if err != nil {
		t.Fatalf("%s: %v", expression, err)
	}
	return value
}
