// SPDX-License-Identifier: Apache-2.0

package helm_test

import (
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/cel/environment"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/driverroot"
	"github.com/tandem-gpu/tandem/pkg/controller"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/nodelabels"
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
	t.Parallel()
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
	t.Parallel()
	for _, name := range cases {
		agent := daemonSet(t, name).Spec.Template.Spec.ServiceAccountName
		controller := find[*appsv1.Deployment](t, name).Spec.Template.Spec.ServiceAccountName
		for suffix, account := range policies(agent, controller) {
			got := policyOf(t, name, suffix).Spec.MatchConditions[0].Expression
			is := "=="
			if suffix == "-controller-gpunode-taints" { // it restricts all others
				is = "!="
			}
			want := "request.userInfo.username " + is + " 'system:serviceaccount:tandem-system:" + account + "'"
			if got != want {
				t.Errorf("%s%s: condition is %s, want %s", name, suffix, got, want)
			}
		}
	}
}

// policies are the suffixes of the policies' names, each with the account that it restricts.
func policies(agent, controller string) map[string]string {
	return map[string]string{
		"-resourceslices": agent, "-gpunode-status": agent, "-resourceclaims": agent, "-agent-events": agent, "-node-labels": agent, "-node-features": agent,
		"-controller-events": controller, "-controller-leases": controller, "-controller-protected": controller,
		"-controller-secrets": controller, "-controller-gpunodes": controller, "-controller-gpunode-taints": controller, "-controller-pods": controller, "-controller-evictions": controller, "-controller-nodes": controller,
		"-controller-daemons": controller, "-controller-webhook": controller,
	}
}

func TestPoliciesFailClosed(t *testing.T) {
	t.Parallel()
	for _, name := range cases {
		for _, suffix := range append(slices.Collect(maps.Keys(policies("", ""))), "-gpunode-maintenance") {
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

// The agent writes events of itself only, also those in which client-go combines similar ones: they lack the reporting controller.
func TestAgentsEventPolicy(t *testing.T) {
	t.Parallel()
	request := object{"operation": "CREATE", "userInfo": object{
		"username": "system:serviceaccount:tandem-system:tandem", "extra": object{"authentication.kubernetes.io/node-name": []any{"n"}},
	}}
	event := func(controller, instance, component, host string) object {
		return object{
			"reportingController": controller, "reportingInstance": instance, "deprecatedSource": object{"component": component, "host": host},
			"regarding": object{"kind": "Node", "name": "n"},
		}
	}
	const itself = "may write events of itself only"
	for name, c := range map[string]struct {
		event object
		want  string
	}{
		"new":                   {event("tandem", "n", "tandem", "n"), ""},
		"of events.k8s.io":      {event("tandem", "n", "", ""), ""},
		"combined":              {event("", "", "tandem", "n"), ""},
		"of no component":       {event("", "", "", ""), itself},
		"of no node":            {event("", "", "tandem", ""), itself},
		"of kubelet":            {event("", "", "kubelet", "n"), itself},
		"of another node":       {event("", "", "tandem", "m"), itself},
		"by half of two":        {event("tandem", "", "", "n"), itself},
		"of kubelet and tandem": {event("kubelet", "n", "tandem", "n"), itself},
	} {
		t.Run(name, func(t *testing.T) { judge(t, "-agent-events", request, nil, c.event, c.want) })
	}
}

// The agent writes the labels of GPU Feature Discovery to its own node, and nothing else.
func TestNodeLabelPolicy(t *testing.T) {
	t.Parallel()
	node := func(change func(metadata, spec object)) object {
		metadata := object{
			"name": "a", "labels": object{"zone": "z", "nvidia.com/gpu.count": "4", "nvidia.com/gpu.present": "true"},
			"annotations": object{"k": "v"},
		}
		spec := object{"podCIDR": "10.0.0.0/24"}
		change(metadata, spec)
		return object{"metadata": metadata, "spec": spec, "status": object{}}
	}
	same := func(object, object) {}
	set := func(key, value string) func(object, object) {
		return func(metadata, _ object) { metadata["labels"].(object)[key] = value }
	}
	without := func(key string) func(object, object) {
		return func(metadata, _ object) { delete(metadata["labels"].(object), key) }
	}
	const others = "no labels of a node but those of GPU Feature Discovery"
	const nothing = "nothing of a node but labels"
	for name, c := range map[string]struct {
		extra  object
		change func(metadata, spec object)
		want   string
	}{
		"nothing":             {onNode("a"), same, ""},
		"a value":             {onNode("a"), set("nvidia.com/gpu.count", "8"), ""},
		"a new label":         {onNode("a"), set("nvidia.com/mig-1g.10gb.me.product", "x"), ""},
		"removes its own":     {onNode("a"), without("nvidia.com/gpu.count"), ""},
		"all labels":          {onNode("a"), func(m, _ object) { delete(m, "labels") }, others},
		"another node":        {onNode("b"), set("nvidia.com/gpu.count", "8"), "node 'b' may write labels of that node only"},
		"unbound token":       {nil, set("nvidia.com/gpu.count", "8"), "bound to its pod"},
		"other labels":        {onNode("a"), set("zone", "y"), others},
		"removes another's":   {onNode("a"), without("zone"), others},
		"GPU Operator's":      {onNode("a"), without("nvidia.com/gpu.present"), others},
		"pauses":              {onNode("a"), set("nvidia.com/gpu.deploy.driver", "false"), others},
		"deploys":             {onNode("a"), set("nvidia.com/gpu.deploy.product", "true"), others},
		"configuration":       {onNode("a"), set("nvidia.com/device-plugin.config", "x"), others},
		"MIG manager's":       {onNode("a"), set("nvidia.com/mig.config", "all-disabled"), others},
		"MIG manager's state": {onNode("a"), set("nvidia.com/mig.config.state", "success"), others},
		"mode":                {onNode("a"), set("tandem-gpu.dev/mode", "Split"), others},
		"another domain":      {onNode("a"), set("xnvidia.com/gpu.count", "8"), others},
		"domain of machine":   {onNode("a"), set("xnvidia.com/gpu.machine", "x"), others},
		"domain of CUDA":      {onNode("a"), set("xnvidia.com/cuda.driver.major", "1"), others},
		"MIG's other labels":  {onNode("a"), set("nvidia.com/mig.strategy.x", "x"), others},
		"CUDA's other labels": {onNode("a"), set("nvidia.com/cuda.driver.major.x", "x"), others},
		"longer key":          {onNode("a"), set("nvidia.com/gpu.count.x", "8"), others},
		"another character":   {onNode("a"), set("nvidia.com/gpuxcount", "8"), others},
		"role":                {onNode("a"), set("node-role.kubernetes.io/control-plane", ""), others},
		"taints":              {onNode("a"), func(_, s object) { s["taints"] = []any{} }, nothing},
		"cordons":             {onNode("a"), func(_, s object) { s["unschedulable"] = true }, nothing},
		"annotations":         {onNode("a"), func(m, _ object) { m["annotations"].(object)["k"] = "w" }, nothing},
		"finalizers":          {onNode("a"), func(m, _ object) { m["finalizers"] = []any{"x.example/y"} }, nothing},
		"owner":               {onNode("a"), func(m, _ object) { m["ownerReferences"] = []any{object{"name": "x"}} }, nothing},
	} {
		t.Run(name, func(t *testing.T) {
			user := object{"username": "system:serviceaccount:tandem-system:tandem"}
			if c.extra != nil {
				user["extra"] = c.extra
			}
			judge(t, "-node-labels", object{"operation": "UPDATE", "userInfo": user}, node(same), node(c.change), c.want)
		})
	}
	// Others are not restricted.
	judge(t, "-node-labels", object{"operation": "UPDATE", "userInfo": object{"username": "system:node:a"}}, node(same), node(set("zone", "y")), "-")
}

// The agent writes the labels of GPU Feature Discovery for its own node to one NodeFeature, and nothing else.
func TestNodeFeaturePolicy(t *testing.T) {
	t.Parallel()
	feature := func(name, node string, change func(metadata, spec object)) object {
		metadata := object{"name": name, "labels": object{"nfd.node.kubernetes.io/node-name": node}, "ownerReferences": []any{object{"kind": "DaemonSet"}}}
		spec := object{"labels": object{"nvidia.com/gpu.count": "4", "nvidia.com/mig-1g.10gb.count": "2"}}
		if change != nil {
			change(metadata, spec)
		}
		return object{"metadata": metadata, "spec": spec}
	}
	label := func(key string) func(object, object) {
		return func(_, spec object) { spec["labels"].(object)[key] = "x" }
	}
	finalizer := func(metadata, _ object) { metadata["finalizers"] = []any{"x.example/y"} }
	const name, own, other, others = "nvidia-features-for-a", "a", "the NodeFeature nvidia-features-for-a only", "nothing in a NodeFeature but labels of GPU Feature Discovery"
	for what, c := range map[string]struct {
		extra         object
		before, after any
		want          string
	}{
		"creates":                 {onNode("a"), nil, feature(name, own, nil), ""},
		"updates":                 {onNode("a"), feature(name, own, nil), feature(name, own, label("nvidia.com/gpu.product")), ""},
		"deletes":                 {onNode("a"), feature(name, own, nil), nil, ""},
		"no labels":               {onNode("a"), nil, feature(name, own, func(_, spec object) { delete(spec, "labels") }), ""},
		"unbound token":           {nil, nil, feature(name, own, nil), "bound to its pod"},
		"deletes, unbound token":  {nil, feature(name, own, nil), nil, "bound to its pod"},
		"creates another node's":  {onNode("a"), nil, feature("nvidia-features-for-b", "b", nil), other},
		"deletes another node's":  {onNode("a"), feature("nvidia-features-for-b", "b", nil), nil, other},
		"the worker's":            {onNode("a"), nil, feature("a", own, nil), other},
		"for another node":        {onNode("a"), nil, feature(name, "b", nil), "for that node only"},
		"for no node":             {onNode("a"), nil, feature(name, own, func(metadata, _ object) { delete(metadata, "labels") }), "for that node only"},
		"redirects":               {onNode("a"), feature(name, own, nil), feature(name, "b", nil), "for that node only"},
		"pauses":                  {onNode("a"), nil, feature(name, own, label("nvidia.com/gpu.deploy.driver")), others},
		"configuration":           {onNode("a"), nil, feature(name, own, label("nvidia.com/device-plugin.config")), others},
		"role":                    {onNode("a"), nil, feature(name, own, label("node-role.kubernetes.io/control-plane")), others},
		"a label of NFD's":        {onNode("a"), nil, feature(name, own, label("cpu-cpuid.AVX")), others},
		"features":                {onNode("a"), nil, feature(name, own, func(_, spec object) { spec["features"] = object{} }), others},
		"keeps it by a finalizer": {onNode("a"), nil, feature(name, own, finalizer), "may not set finalizers"},
		"another's finalizer":     {onNode("a"), feature(name, own, finalizer), feature(name, own, finalizer), ""},
	} {
		t.Run(what, func(t *testing.T) {
			user := object{"username": "system:serviceaccount:tandem-system:tandem"}
			if c.extra != nil {
				user["extra"] = c.extra
			}
			operation := map[[2]bool]string{{false, true}: "CREATE", {true, true}: "UPDATE", {true, false}: "DELETE"}[[2]bool{c.before != nil, c.after != nil}]
			judge(t, "-node-features", object{"operation": operation, "userInfo": user}, c.before, c.after, c.want)
		})
	}
	request := object{"operation": "CREATE", "userInfo": object{"username": "system:serviceaccount:nfd:worker"}}
	judge(t, "-node-features", request, nil, feature("b", "b", label("cpu-cpuid.AVX")), "-")
}

// The agent has rights on NodeFeatures only in its own namespace.
func TestNodeFeatureRights(t *testing.T) {
	t.Parallel()
	for _, name := range cases {
		agent := daemonSet(t, name)
		binding := findNamed[*rbacv1.RoleBinding](t, name, agent.Name)
		role := findNamed[*rbacv1.Role](t, name, binding.RoleRef.Name)
		if role.Namespace != agent.Namespace || binding.Namespace != agent.Namespace || len(binding.Subjects) != 1 ||
			binding.Subjects[0].Name != agent.Spec.Template.Spec.ServiceAccountName || len(role.Rules) != 1 || !slices.Equal(role.Rules[0].Resources, []string{"nodefeatures"}) {
			t.Errorf("%s: binding %+v, role %+v", name, binding, role)
		}
		for _, rule := range findNamed[*rbacv1.ClusterRole](t, name, agent.Name).Rules {
			if slices.Contains(rule.APIGroups, "nfd.k8s-sigs.io") || slices.Contains(rule.APIGroups, "*") {
				t.Errorf("%s: rule of the ClusterRole %+v", name, rule)
			}
		}
	}
}

// The policies allow each label that the agent writes.
func TestNodeLabelPolicyAllowsAllLabels(t *testing.T) {
	t.Parallel()
	part := func(profile string) device.Partition {
		return device.Partition{UUID: "MIG-" + profile, Profile: profile}
	}
	gpu := device.GPU{
		UUID: "GPU-a", ProductName: "NVIDIA H100", MemoryBytes: 80 << 30, ComputeCapability: "9.0", CUDADriverVersion: "13.0", MIGCapable: true,
		FabricClique: "c.1",
	}
	parted := gpu
	parted.MIGEnabled, parted.Partitions = true, []device.Partition{part("1g.10gb"), part("1g.20gb+me"), part("2c.3g.40gb"), part("1g.24gb-me")}
	one := parted
	one.Partitions = parted.Partitions[:1]
	request := object{"operation": "UPDATE", "userInfo": object{"username": "system:serviceaccount:tandem-system:tandem", "extra": onNode("a")}}
	for strategy, gpus := range map[device.MIGStrategy][]device.GPU{
		device.MIGStrategyNone: {gpu}, device.MIGStrategySingle: {one}, device.MIGStrategyMixed: {gpu, parted},
	} {
		labels := nodelabels.Of(device.Inventory{DriverVersion: "580.95.05", GPUs: gpus}, nodelabels.Options{
			Resources: device.Resources{GPU: "example.com/card", Strategy: strategy}, Timestamp: time.Unix(1, 0),
		})
		if len(labels) < 20 {
			t.Errorf("%s: only %d labels", strategy, len(labels))
		}
		for key, value := range labels {
			before := object{"metadata": object{"name": "a"}}
			after := object{"metadata": object{"name": "a", "labels": object{key: value}}}
			judge(t, "-node-labels", request, before, after, "")
			judge(t, "-node-labels", request, after, before, "")
			feature := object{"metadata": object{"name": "nvidia-features-for-a", "labels": object{"nfd.node.kubernetes.io/node-name": "a"}}, "spec": object{"labels": object{key: value}}}
			judge(t, "-node-features", object{"operation": "CREATE", "userInfo": request["userInfo"]}, nil, feature, "")
			if t.Failed() {
				t.Fatalf("%s: %s", strategy, key)
			}
		}
	}
}

// The agent writes status.devices of its own node, and nothing else of a claim's status.
func TestAgentsClaimPolicy(t *testing.T) {
	t.Parallel()
	const agent = "system:serviceaccount:tandem-system:tandem"
	result := func(driver, pool string) object { return object{"driver": driver, "pool": pool, "device": "gpu-0"} }
	said := func(driver, pool, reason string) object {
		return object{"driver": driver, "pool": pool, "device": "gpu-0", "conditions": []any{object{"type": "MemoryLimit", "reason": reason}}}
	}
	claim := func(results []any, devices ...any) object {
		status := object{"allocation": object{"devices": object{"results": results}}, "reservedFor": []any{object{"resource": "pods", "name": "p"}}}
		if len(devices) > 0 {
			status["devices"] = devices
		}
		return object{"metadata": object{"name": "c"}, "spec": object{}, "status": status}
	}
	ours, partition := []any{result("gpu.nvidia.com", "a")}, []any{result("gpu.nvidia.com", "a/gpu-00")}
	both := []any{result("gpu.nvidia.com", "a"), result("nic.example.com", "a")}
	nic := said("nic.example.com", "a", "Up")
	elsewhere := claim(ours)
	elsewhere["status"].(object)["reservedFor"] = []any{}
	for name, c := range map[string]struct {
		user          string
		extra         object
		before, after object
		want          string
	}{
		"say something":           {agent, onNode("a"), claim(ours), claim(ours, said("gpu.nvidia.com", "a", "Daemon")), ""},
		"say something else":      {agent, onNode("a"), claim(ours, said("gpu.nvidia.com", "a", "Daemon")), claim(ours, said("gpu.nvidia.com", "a", "Advisory")), ""},
		"of a partition":          {agent, onNode("a"), claim(partition), claim(partition, said("gpu.nvidia.com", "a/gpu-00", "Daemon")), ""},
		"beside another driver":   {agent, onNode("a"), claim(both, nic), claim(both, nic, said("gpu.nvidia.com", "a", "Daemon")), ""},
		"drop another driver's":   {agent, onNode("a"), claim(both, nic), claim(both), "of devices that are not that node's"},
		"say another driver's":    {agent, onNode("a"), claim(both), claim(both, nic), "of devices that are not that node's"},
		"say another node's":      {agent, onNode("a"), claim(ours), claim(ours, said("gpu.nvidia.com", "b", "Daemon")), "of devices that are not that node's"},
		"a claim of another node": {agent, onNode("b"), claim(ours), claim(ours, said("gpu.nvidia.com", "a", "Daemon")), "devices of that node only"},
		"a node of like name":     {agent, onNode("gpu"), claim([]any{result("gpu.nvidia.com", "gpu-b")}), claim(ours), "devices of that node only"},
		"another driver's claim":  {agent, onNode("a"), claim([]any{result("nic.example.com", "a")}), claim([]any{result("nic.example.com", "a")}, nic), "devices of that node only"},
		"no allocation":           {agent, onNode("a"), object{"metadata": object{"name": "c"}}, object{"metadata": object{"name": "c"}}, "devices of that node only"},
		"allocate":                {agent, onNode("a"), object{"metadata": object{"name": "c"}}, claim(ours), "allocated or reserved for"},
		"allocate more":           {agent, onNode("a"), claim(ours), claim(both), "allocated or reserved for"},
		"reserve":                 {agent, onNode("a"), elsewhere, claim(ours), "allocated or reserved for"},
		"unbound token":           {agent, nil, claim(ours), claim(ours), "bound to its pod"},
		"the scheduler":           {"system:kube-scheduler", nil, claim(ours), claim(both), "-"},
	} {
		t.Run(name, func(t *testing.T) {
			user := object{"username": c.user}
			if c.extra != nil {
				user["extra"] = c.extra
			}
			got := decide(t, policyOf(t, "default", "-resourceclaims"), map[string]any{
				"request": object{"operation": "UPDATE", "userInfo": user}, "object": c.after, "oldObject": c.before,
			})
			if (c.want == "") != (got == "") || !strings.Contains(got, c.want) {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func TestAgentsGPUNodePolicy(t *testing.T) {
	t.Parallel()
	const (
		agent       = "system:serviceaccount:tandem-system:tandem"
		spec, owner = "only the controller and administrators may", "may not write the owner"
	)
	ownedBy := func(name string, owners ...any) object {
		return object{"metadata": object{"name": name, "ownerReferences": owners}, "spec": object{}, "status": object{"mode": "Dual"}}
	}
	reference := func(apiVersion, kind, name string) object {
		return object{"apiVersion": apiVersion, "kind": kind, "name": name, "uid": "u"}
	}
	node := func(name string, claims ...any) object {
		o := object{"metadata": object{"name": name}, "spec": object{}, "status": object{"mode": "Dual"}}
		if len(claims) > 0 {
			o["spec"] = object{"claims": claims}
		}
		return o
	}
	with := func(o object, field string, value any) object {
		o[field] = value
		return o
	}
	claim := object{"uid": "u", "namespace": "n", "name": "c", "devices": []any{"gpu-0"}}
	maintained := with(node("a"), "spec", object{"maintenance": []any{object{"uuid": "GPU-0"}}})
	withoutSpec, owned := node("a"), ownedBy("a", reference("v1", "Node", "a"))
	delete(withoutSpec, "spec")
	slice := ownedBy("a", reference("resource.k8s.io/v1", "ResourceSlice", "own"))
	for name, c := range map[string]struct {
		user          string
		extra         object
		operation     string
		before, after any
		want          string
	}{
		"create own":                 {agent, onNode("a"), "CREATE", nil, node("a"), ""},
		"create without a spec":      {agent, onNode("a"), "CREATE", nil, withoutSpec, ""},
		"update own":                 {agent, onNode("a"), "UPDATE", node("a", claim), with(node("a", claim), "status", object{}), ""},
		"delete own":                 {agent, onNode("a"), "DELETE", node("a"), nil, "may not delete a GPUNode"},
		"delete one under repair":    {agent, onNode("a"), "DELETE", maintained, nil, "may not delete a GPUNode"},
		"create other's":             {agent, onNode("a"), "CREATE", nil, node("b"), "GPUNode of that node only"},
		"update other's":             {agent, onNode("a"), "UPDATE", node("b"), node("b"), "GPUNode of that node only"},
		"delete other's":             {agent, onNode("a"), "DELETE", node("b"), nil, "GPUNode of that node only"},
		"generated name":             {agent, onNode("a"), "CREATE", nil, object{"metadata": object{"generateName": "a"}}, "GPUNode of that node only"},
		"create with claims":         {agent, onNode("a"), "CREATE", nil, node("a", claim), spec},
		"add a claim":                {agent, onNode("a"), "UPDATE", node("a"), node("a", claim), spec},
		"drop a claim":               {agent, onNode("a"), "UPDATE", node("a", claim), node("a"), spec},
		"drop the spec":              {agent, onNode("a"), "UPDATE", node("a", claim), withoutSpec, spec},
		"add a daemon's trouble":     {agent, onNode("a"), "UPDATE", node("a"), with(node("a"), "spec", object{"daemons": []any{object{"name": "d"}}}), spec},
		"add what is not known here": {agent, onNode("a"), "UPDATE", node("a"), with(node("a"), "spec", object{"later": true}), spec},
		"create with that":           {agent, onNode("a"), "CREATE", nil, with(node("a"), "spec", object{"later": true}), spec},
		"drop a maintenance":         {agent, onNode("a"), "UPDATE", maintained, node("a"), spec},
		"create with one":            {agent, onNode("a"), "CREATE", nil, maintained, spec},
		"keep a maintenance":         {agent, onNode("a"), "UPDATE", maintained, maintained, ""},
		"create for its node":        {agent, onNode("a"), "CREATE", nil, owned, owner},
		"create for its slice":       {agent, onNode("a"), "CREATE", nil, slice, owner},
		"take an owner":              {agent, onNode("a"), "UPDATE", node("a"), owned, owner},
		"drop the owner":             {agent, onNode("a"), "UPDATE", owned, node("a"), owner},
		"change the owner":           {agent, onNode("a"), "UPDATE", owned, slice, owner},
		"change its UID":             {agent, onNode("a"), "UPDATE", owned, ownedBy("a", with(reference("v1", "Node", "a"), "uid", "gone")), owner},
		"keep an owner":              {agent, onNode("a"), "UPDATE", owned, with(ownedBy("a", reference("v1", "Node", "a")), "status", object{}), ""},
		"unbound token":              {agent, nil, "UPDATE", node("a"), node("a"), "bound to its pod"},
		"unbound deletion":           {agent, nil, "DELETE", node("a"), nil, "bound to its pod"},
		"the controller":             {agent + "-controller", nil, "UPDATE", node("a"), node("a", claim), "-"},
		"the garbage collector":      {"system:serviceaccount:kube-system:generic-garbage-collector", nil, "DELETE", maintained, nil, "-"},
		"an administrator":           {"kubernetes-admin", nil, "DELETE", maintained, nil, "-"},
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

// No user deletes a GPUNode with GPUs under maintenance.
func TestMaintenancePolicy(t *testing.T) {
	t.Parallel()
	gpuNodeWith := func(spec any) object { return object{"metadata": object{"name": "a"}, "spec": spec} }
	for name, c := range map[string]struct {
		before object
		want   string
	}{
		"without a spec":    {object{"metadata": object{"name": "a"}}, ""},
		"no entry":          {gpuNodeWith(object{"claims": []any{object{}}}), ""},
		"an empty list":     {gpuNodeWith(object{"maintenance": []any{}}), ""},
		"under maintenance": {gpuNodeWith(object{"maintenance": []any{object{"uuid": "GPU-0"}}}), "kubectl gpu undrain a"},
	} {
		for _, user := range []string{"kubernetes-admin", "system:serviceaccount:kube-system:generic-garbage-collector"} {
			t.Run(name+" "+user, func(t *testing.T) {
				judge(t, "-gpunode-maintenance", object{"operation": "DELETE", "userInfo": object{"username": user}}, c.before, nil, c.want)
			})
		}
	}
}

// The agent has no right to what the policy forbids: it creates its GPUNode and writes the status.
func TestGPUNodeRights(t *testing.T) {
	t.Parallel()
	for _, name := range cases {
		granted := map[string][]string{}
		for _, rule := range findNamed[*rbacv1.ClusterRole](t, name, daemonSet(t, name).Name).Rules {
			if !slices.Contains(rule.APIGroups, v1alpha1.GroupVersion.Group) && !slices.Contains(rule.APIGroups, "*") {
				continue
			}
			for _, resource := range rule.Resources {
				granted[resource] = append(granted[resource], rule.Verbs...)
			}
		}
		want := map[string][]string{"gpunodes": {"get", "list", "watch", "create"}, "gpunodes/status": {"update", "patch"}}
		if diff := cmp.Diff(want, granted); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

func TestControllersPolicies(t *testing.T) {
	t.Parallel()
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
	conditions := func(kinds ...string) object {
		o := node("8", "4")
		var all []any
		for _, kind := range kinds {
			all = append(all, object{"type": kind, "status": "True"})
		}
		o["status"].(object)["conditions"] = all
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
	ownedBy := func(kinds ...string) object {
		var owners []any
		for _, kind := range kinds {
			owners = append(owners, object{"apiVersion": "v1", "kind": kind, "name": "n", "uid": "u"})
		}
		return change(node("8", "4"), "metadata.ownerReferences", owners)
	}
	preconditions := func(p object) object {
		return object{"metadata": object{"name": "p"}, "deleteOptions": object{"preconditions": p}}
	}
	secret := func(name, kind string) object { return object{"metadata": object{"name": name}, "type": kind} }
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
		"fewer replicas":         {"-controller-nodes", parts("nvidia.com/gpu.shared", "7"), parts("nvidia.com/gpu.shared", "6"), ""},
		"more replicas":          {"-controller-nodes", parts("nvidia.com/gpu.shared", "7"), parts("nvidia.com/gpu.shared", "8"), "than the node has"},
		"what is near":           {"-controller-nodes", parts("nvidia.com/gpu.shared.x", "7"), parts("nvidia.com/gpu.shared.x", "6"), "nothing of a node's status"},
		"more than none":         {"-controller-nodes", node("8", "4"), change(node("9", "4"), "status.capacity", object{"cpu": "4"}), "nothing of a node's status"},
		"CPUs":                   {"-controller-nodes", node("8", "4"), node("7", "5"), "nothing of a node's status"},
		"without CPUs":           {"-controller-nodes", node("8", "4"), change(node("7", "4"), "status.allocatable.cpu", nil), "nothing of a node's status"},
		"capacity":               {"-controller-nodes", node("8", "4"), change(node("8", "4"), "status.capacity.cpu", "9"), "nothing of a node's status"},
		"phase":                  {"-controller-nodes", node("8", "4"), change(node("8", "4"), "status.phase", "y"), "nothing of a node's status"},
		"without phase":          {"-controller-nodes", node("8", "4"), change(node("8", "4"), "status.phase", nil), "nothing of a node's status"},
		"a new field":            {"-controller-nodes", node("8", "4"), change(node("8", "4"), "status.images", []any{}), "nothing of a node's status"},
		"its condition":          {"-controller-nodes", conditions("Ready"), conditions("Ready", "GPUsHealthy", "GPURepairNeeded"), ""},
		"its first condition":    {"-controller-nodes", node("8", "4"), conditions("GPUsHealthy"), ""},
		"another condition":      {"-controller-nodes", conditions("Ready"), conditions("Ready", "GPUsHealthy", "Other"), "no conditions of a node but GPUsHealthy"},
		"without a condition":    {"-controller-nodes", conditions("Ready", "GPUsHealthy"), conditions("GPUsHealthy"), "no conditions of a node but GPUsHealthy"},
		"a changed condition":    {"-controller-nodes", conditions("Ready"), change(conditions("Ready"), "status.conditions", []any{object{"type": "Ready", "status": "False"}}), "no conditions of a node but GPUsHealthy"},
		"node label":             {"-controller-nodes", node("8", "4"), change(node("7", "4"), "metadata.labels.zone", "b"), "the metadata of a node"},
		"node annotation":        {"-controller-nodes", node("8", "4"), change(node("7", "4"), "metadata.annotations", object{"a": "b"}), "the metadata of a node"},
		"claims of a node":       {"-controller-gpunodes", change(node("8", "4"), "spec.claims", []any{}), change(node("8", "4"), "spec.claims", []any{object{}}), ""},
		"maintenance of a GPU":   {"-controller-gpunodes", node("8", "4"), change(node("8", "4"), "spec.maintenance", []any{object{"uuid": "GPU-0"}}), "spec.maintenance of a GPUNode"},
		"its end":                {"-controller-gpunodes", change(node("8", "4"), "spec.maintenance", []any{object{"uuid": "GPU-0"}}), node("8", "4"), "spec.maintenance of a GPUNode"},
		"owner of a GPUNode":     {"-controller-gpunodes", node("8", "4"), change(node("8", "4"), "metadata.ownerReferences", []any{object{"apiVersion": "v1", "kind": "Node"}}), "the metadata of a GPUNode"},
		"without its Node":       {"-controller-gpunodes", ownedBy("Node", "Machine"), ownedBy("Machine"), ""},
		"without another owner":  {"-controller-gpunodes", ownedBy("Node", "Machine"), ownedBy("Node"), "the metadata of a GPUNode"},
		"without any":            {"-controller-gpunodes", ownedBy("Node"), node("8", "4"), ""},
		"its Secret":             {"-controller-secrets", nil, secret("tandem-webhook", "kubernetes.io/tls"), ""},
		"another Secret":         {"-controller-secrets", nil, secret("tandem", "kubernetes.io/tls"), "no Secret but tandem-webhook"},
		"a token":                {"-controller-secrets", nil, secret("tandem-webhook", "kubernetes.io/service-account-token"), "of type kubernetes.io/tls"},
		"a Secret without name":  {"-controller-secrets", nil, object{"metadata": object{"generateName": "tandem-webhook"}}, "no Secret but"},
		"eviction as seen":       {"-controller-evictions", nil, preconditions(object{"uid": "u", "resourceVersion": "1"}), ""},
		"eviction by UID":        {"-controller-evictions", nil, preconditions(object{"uid": "u"}), ""},
		"eviction at once":       {"-controller-evictions", nil, change(preconditions(object{"uid": "u", "resourceVersion": "1"}), "deleteOptions.gracePeriodSeconds", int64(0)), "own grace period"},
		"eviction at its time":   {"-controller-evictions", nil, change(preconditions(object{"uid": "u", "resourceVersion": "1"}), "deleteOptions.gracePeriodSeconds", int64(30)), "own grace period"},
		"eviction without UID":   {"-controller-evictions", nil, preconditions(object{"resourceVersion": "1"}), "UID as a precondition"},
		"eviction of any":        {"-controller-evictions", nil, object{"metadata": object{"name": "p"}}, "UID as a precondition"},
		"eviction with an empty": {"-controller-evictions", nil, object{"deleteOptions": object{}}, "UID as a precondition"},
	} {
		t.Run(name, func(t *testing.T) { judge(t, c.policy, request, c.before, c.after, c.want) })
	}
}

// The controller may set the webhook's caBundle, and not its rules or its address.
func TestControllersWebhookPolicy(t *testing.T) {
	t.Parallel()
	request := object{"operation": "UPDATE", "userInfo": object{"username": "system:serviceaccount:tandem-system:tandem-controller"}}
	raw := func(c *admissionv1.ValidatingWebhookConfiguration) map[string]any {
		o, err := runtime.DefaultUnstructuredConverter.ToUnstructured(c)
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	const only = "but caBundle"
	for name, c := range map[string]struct {
		change func(*admissionv1.ValidatingWebhookConfiguration)
		want   string
	}{
		"nothing":        {func(*admissionv1.ValidatingWebhookConfiguration) {}, ""},
		"another bundle": {func(c *admissionv1.ValidatingWebhookConfiguration) { c.Webhooks[0].ClientConfig.CABundle = []byte("b") }, ""},
		"no bundle":      {func(c *admissionv1.ValidatingWebhookConfiguration) { c.Webhooks[0].ClientConfig.CABundle = nil }, ""},
		"its version": {func(c *admissionv1.ValidatingWebhookConfiguration) {
			c.ResourceVersion, c.Generation, c.ManagedFields = "2", 2, []metav1.ManagedFieldsEntry{{Manager: "m"}}
		}, ""},
		"a URL": {func(c *admissionv1.ValidatingWebhookConfiguration) {
			c.Webhooks[0].ClientConfig.Service, c.Webhooks[0].ClientConfig.URL = nil, ptr.To("https://example.com")
		}, only},
		"a URL besides": {func(c *admissionv1.ValidatingWebhookConfiguration) {
			c.Webhooks[0].ClientConfig.URL = ptr.To("https://example.com")
		}, only},
		"another Service": {func(c *admissionv1.ValidatingWebhookConfiguration) {
			c.Webhooks[0].ClientConfig.Service.Namespace = "default"
		}, only},
		"everything": {func(c *admissionv1.ValidatingWebhookConfiguration) {
			c.Webhooks[0].Rules[0].Resources = []string{"*/*"}
		}, only},
		"fail closed": {func(c *admissionv1.ValidatingWebhookConfiguration) {
			c.Webhooks[0].FailurePolicy = ptr.To(admissionv1.Fail)
		}, only},
		"every request": {func(c *admissionv1.ValidatingWebhookConfiguration) { c.Webhooks[0].MatchConditions = nil }, only},
		"one namespace only": {func(c *admissionv1.ValidatingWebhookConfiguration) {
			c.Webhooks[0].NamespaceSelector = &metav1.LabelSelector{}
		}, only},
		"another name": {func(c *admissionv1.ValidatingWebhookConfiguration) { c.Webhooks[0].Name = "other.tandem-gpu.dev" }, only},
		"one more":     {func(c *admissionv1.ValidatingWebhookConfiguration) { c.Webhooks = append(c.Webhooks, c.Webhooks[0]) }, only},
		"none":         {func(c *admissionv1.ValidatingWebhookConfiguration) { c.Webhooks = nil }, only},
		"a label":      {func(c *admissionv1.ValidatingWebhookConfiguration) { c.Labels["stolen"] = "true" }, "the metadata of a webhook"},
		"an owner": {func(c *admissionv1.ValidatingWebhookConfiguration) {
			c.OwnerReferences = []metav1.OwnerReference{{Kind: "Node"}}
		}, "the metadata of a webhook"},
	} {
		t.Run(name, func(t *testing.T) {
			before := find[*admissionv1.ValidatingWebhookConfiguration](t, "default").DeepCopy()
			before.Webhooks[0].ClientConfig.CABundle = []byte("a")
			after := before.DeepCopy()
			c.change(after)
			judge(t, "-controller-webhook", request, raw(before), raw(after), c.want)
		})
	}
}

// daemonPods are the controller's settings in the chart.
func daemonPods(t *testing.T, name string) controller.DaemonPods {
	t.Helper()
	args := find[*appsv1.Deployment](t, name).Spec.Template.Spec.Containers[0].Args
	c, err := config.LoadController(append([]string{"--namespace=tandem-system", "--pod-name=p"}, args...), func(string) (string, bool) { return "", false }, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	template, err := controller.DaemonTemplate(c.DaemonPod)
	if err != nil {
		t.Fatal(err)
	}
	memory, err := c.SharedMemory()
	if err != nil {
		t.Fatal(err)
	}
	return controller.DaemonPods{Template: template, Namespace: c.Namespace, RunDir: c.RunDir, KubeletDir: c.KubeletDir, DriverRoots: c.DriverRoots, SharedMemory: memory}
}

// daemonPod is the pod that the controller creates with the chart's settings, for a driver at that root.
func daemonPod(t *testing.T, name, driverRoot string) *corev1.Pod {
	t.Helper()
	node := &v1alpha1.GPUNode{}
	node.Name, node.UID = "node-1", "uid"
	settings := v1alpha1.MPSSettings{Devices: []string{"GPU-1"}, DriverRoot: driverRoot}
	pod, err := daemonPods(t, name).Pod(node, v1alpha1.MPSDaemon{Name: "d", MPSSettings: settings})
	if err != nil {
		t.Fatal(err)
	}
	return pod
}

// The policy admits the pods that the controller creates, and rejects pods that differ in one field.
func TestDaemonsPolicy(t *testing.T) {
	t.Parallel()
	for _, name := range cases {
		t.Run(name, func(t *testing.T) {
			roots := daemonPods(t, name).DriverRoots
			made, policy := daemonPod(t, name, roots[0]), policyOf(t, name, "-controller-daemons")
			user := object{"username": "system:serviceaccount:tandem-system:" + find[*appsv1.Deployment](t, name).Spec.Template.Spec.ServiceAccountName}
			judge := func(t *testing.T, operation string, before, after *corev1.Pod, want string) {
				t.Helper()
				input := map[string]any{"request": object{"operation": operation, "userInfo": user}, "object": nil, "oldObject": nil}
				for key, pod := range map[string]*corev1.Pod{"oldObject": before, "object": after} {
					if pod == nil {
						continue
					}
					raw, err := runtime.DefaultUnstructuredConverter.ToUnstructured(pod)
					if err != nil {
						t.Fatal(err)
					}
					input[key] = raw
				}
				if got := decide(t, policy, input); (want == "") != (got == "") || !strings.Contains(got, want) {
					t.Errorf("got %q, want %q", got, want)
				}
			}
			for what, c := range map[string]struct {
				change func(*corev1.Pod)
				want   string
			}{
				"nothing":      {func(*corev1.Pod) {}, ""},
				"image":        {func(p *corev1.Pod) { p.Spec.Containers[0].Image = "evil" }, "nothing else, without a token"},
				"command":      {func(p *corev1.Pod) { p.Spec.Containers[0].Command = []string{"/usr/bin/mps-daemon", "other"} }, "nothing else"},
				"arguments":    {func(p *corev1.Pod) { p.Spec.Containers[0].Args = []string{"x"} }, "nothing else"},
				"another":      {func(p *corev1.Pod) { p.Spec.Containers = append(p.Spec.Containers, p.Spec.Containers[0]) }, "nothing else"},
				"first":        {func(p *corev1.Pod) { p.Spec.InitContainers = p.Spec.Containers }, "nothing else"},
				"as the agent": {func(p *corev1.Pod) { p.Spec.ServiceAccountName = "tandem" }, "without a token"},
				"with a token": {func(p *corev1.Pod) { p.Spec.AutomountServiceAccountToken = nil }, "without a token"},
				"host network": {func(p *corev1.Pod) { p.Spec.HostNetwork = true }, "nothing else"},
				"hook": {func(p *corev1.Pod) {
					p.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{PostStart: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"/driver-root/bin/sh"}}}}
				}, "nothing else"},
				"ready by other": {func(p *corev1.Pod) { p.Spec.Containers[0].ReadinessProbe.Exec.Command[0] = "/driver-root/bin/sh" }, "nothing else"},
				"live by other":  {func(p *corev1.Pod) { p.Spec.Containers[0].LivenessProbe.Exec.Command[1] = "run" }, "nothing else"},
				"live over HTTP": {func(p *corev1.Pod) {
					p.Spec.Containers[0].LivenessProbe.ProbeHandler = corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Host: "10.0.0.1"}}
				}, "nothing else"},
				"a startup probe": {func(p *corev1.Pod) { p.Spec.Containers[0].StartupProbe = p.Spec.Containers[0].LivenessProbe }, "nothing else"},
				"ephemeral": {func(p *corev1.Pod) {
					p.Spec.EphemeralContainers = []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "e"}}}
				}, "nothing else"},

				"privileges": {func(p *corev1.Pod) {
					p.Spec.Containers[0].SecurityContext.Privileged = ptr.To(!*p.Spec.Containers[0].SecurityContext.Privileged)
				}, "privileges"},
				"no container's": {func(p *corev1.Pod) { p.Spec.Containers[0].SecurityContext = nil }, "privileges"},
				"capabilities": {func(p *corev1.Pod) {
					p.Spec.Containers[0].SecurityContext.Capabilities = &corev1.Capabilities{Add: []corev1.Capability{"SYS_ADMIN"}}
				}, "privileges"},
				"writable root": {func(p *corev1.Pod) { p.Spec.Containers[0].SecurityContext.ReadOnlyRootFilesystem = nil }, "privileges"},
				"all of proc":   {func(p *corev1.Pod) { p.Spec.Containers[0].SecurityContext.ProcMount = ptr.To(corev1.UnmaskedProcMount) }, "privileges"},
				"SELinux": {func(p *corev1.Pod) {
					p.Spec.Containers[0].SecurityContext.SELinuxOptions = &corev1.SELinuxOptions{Type: "other_t"}
				}, "privileges"},
				"unconfined": {func(p *corev1.Pod) { p.Spec.SecurityContext.SeccompProfile.Type = corev1.SeccompProfileTypeUnconfined }, "privileges"},
				"no pod's":   {func(p *corev1.Pod) { p.Spec.SecurityContext = nil }, "privileges"},
				"sysctls": {func(p *corev1.Pod) {
					p.Spec.SecurityContext.Sysctls = []corev1.Sysctl{{Name: "kernel.msgmax", Value: "1"}}
				}, "privileges"},
				"own process IDs": {func(p *corev1.Pod) { p.Spec.HostPID = false }, "privileges"},
				"another runtime": {func(p *corev1.Pod) { p.Spec.RuntimeClassName = ptr.To("other") }, "privileges"},
				"a port": {func(p *corev1.Pod) {
					p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 1, HostPort: 1}}
				}, "privileges"},

				"a node's CPUs": {func(p *corev1.Pod) { requests(p)[corev1.ResourceCPU] = resource.MustParse("127") }, "resources"},
				"a bit more":    {func(p *corev1.Pod) { requests(p)[corev1.ResourceCPU] = resource.MustParse("11m") }, "resources"},
				"less":          {func(p *corev1.Pod) { requests(p)[corev1.ResourceCPU] = resource.MustParse("1m") }, ""},
				"the same":      {func(p *corev1.Pod) { requests(p)[corev1.ResourceCPU] = resource.MustParse("0.01") }, ""},
				"none":          {func(p *corev1.Pod) { p.Spec.Containers[0].Resources = corev1.ResourceRequirements{} }, ""},
				"GPUs":          {func(p *corev1.Pod) { requests(p)["nvidia.com/gpu"] = resource.MustParse("1") }, "resources"},
				"a limit": {func(p *corev1.Pod) {
					p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("127")}
				}, "resources"},
				"a claim": {func(p *corev1.Pod) {
					p.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "c"}}
				}, "resources"},
				"a pod's claim": {func(p *corev1.Pod) { p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "c"}} }, "resources"},
				"the pod's CPUs": {func(p *corev1.Pod) {
					p.Spec.Resources = &corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("127")}}
				}, "resources"},
				"another priority": {func(p *corev1.Pod) { p.Spec.PriorityClassName = "system-cluster-critical" }, "priority"},
				"no priority":      {func(p *corev1.Pod) { p.Spec.PriorityClassName = "" }, ""},

				"secrets": {func(p *corev1.Pod) {
					p.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "any"}}}}
				}, "environment"},
				"preload": {func(p *corev1.Pod) {
					p.Spec.Containers[0].Env = append(p.Spec.Containers[0].Env, corev1.EnvVar{Name: "LD_PRELOAD", Value: "/x"})
				}, "environment"},
				"another's memory": {func(p *corev1.Pod) { envOf(p, "KUBELET_DIR").Value = "/etc" }, "environment"},
				"all devices":      {func(p *corev1.Pod) { envOf(p, "NVIDIA_VISIBLE_DEVICES").Value = "0" }, "environment"},
				"a secret": {func(p *corev1.Pod) {
					envOf(p, "POD_UID").ValueFrom = &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{Key: "k"}}
				}, "environment"},
				"settings of a secret": {func(p *corev1.Pod) {
					envOf(p, "MPS_SETTINGS").ValueFrom = &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{Key: "k"}}
				}, "environment"},

				"secret": {func(p *corev1.Pod) {
					p.Spec.Volumes[0].VolumeSource = corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{}}
				}, "nothing else of the host"},
				"host directory":   {func(p *corev1.Pod) { p.Spec.Volumes[0].HostPath.Path = "/etc" }, "nothing else of the host"},
				"way out":          {func(p *corev1.Pod) { p.Spec.Volumes[0].HostPath.Path += "/../../.." }, "nothing else of the host"},
				"another daemon's": {func(p *corev1.Pod) { p.Spec.Volumes[0].HostPath.Path = runDirOf(p) + "/mps/e" }, "nothing else of the host"},
				"pipes on the host": {func(p *corev1.Pod) {
					p.Spec.Volumes[1].VolumeSource = corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{
						Path: runDirOf(p) + "/mps/d/pipe", Type: ptr.To(corev1.HostPathDirectory),
					}}
				}, "nothing else of the host"},
				"pipes on the disk": {func(p *corev1.Pod) { p.Spec.Volumes[1].EmptyDir.Medium = "" }, "nothing else of the host"},
				"pipes of any size": {func(p *corev1.Pod) { p.Spec.Volumes[1].EmptyDir.SizeLimit = nil }, "nothing else of the host"},
				"large pipes":       {func(p *corev1.Pod) { p.Spec.Volumes[1].EmptyDir.SizeLimit = ptr.To(resource.MustParse("65Mi")) }, "at most the chart's sizes"},
				"large logs":        {func(p *corev1.Pod) { p.Spec.Volumes[2].EmptyDir.SizeLimit = ptr.To(resource.MustParse("1Ti")) }, "at most the chart's sizes"},
				"small pipes":       {func(p *corev1.Pod) { p.Spec.Volumes[1].EmptyDir.SizeLimit = ptr.To(resource.MustParse("1Mi")) }, ""},
				"large memory":      {func(p *corev1.Pod) { p.Spec.Volumes[5].EmptyDir.SizeLimit = ptr.To(resource.MustParse("5Gi")) }, "at most the chart's sizes"},
				"all memory":        {func(p *corev1.Pod) { p.Spec.Volumes[5].EmptyDir.SizeLimit = nil }, "at most the chart's sizes"},
				"another volume":    {func(p *corev1.Pod) { p.Spec.Volumes[0].Name = "other" }, "nothing else of the host"},
				"made if need be":   {func(p *corev1.Pod) { p.Spec.Volumes[3].HostPath.Type = ptr.To(corev1.HostPathDirectoryOrCreate) }, "nothing else of the host"},
				"memory of a claim": {func(p *corev1.Pod) { p.Spec.Volumes[5].VolumeSource = p.Spec.Volumes[3].VolumeSource }, "nothing else of the host"},

				"host to be written": {func(p *corev1.Pod) {
					p.Spec.Volumes[3].HostPath.Path, p.Spec.Containers[0].VolumeMounts[1].ReadOnly = "/", false
				}, "of an MPS daemon"},
				"agent's programs": {func(p *corev1.Pod) { p.Spec.Volumes[3].HostPath.Path = runDirOf(p) + "/x" }, "the driver root"},
				"containers' files": {func(p *corev1.Pod) {
					p.Spec.Volumes[3].HostPath.Path = "/run/containerd/io.containerd.runtime.v2.task/k8s.io/x/rootfs"
				}, "the driver root"},
				"images":           {func(p *corev1.Pod) { p.Spec.Volumes[3].HostPath.Path = "/var/lib/containerd" }, "the driver root"},
				"configuration":    {func(p *corev1.Pod) { p.Spec.Volumes[3].HostPath.Path = "/etc" }, "the driver root"},
				"below a driver":   {func(p *corev1.Pod) { p.Spec.Volumes[3].HostPath.Path += "/tmp" }, "the driver root"},
				"another spelling": {func(p *corev1.Pod) { p.Spec.Volumes[3].HostPath.Path = "/" + p.Spec.Volumes[3].HostPath.Path }, "the driver root"},
				"by a process":     {func(p *corev1.Pod) { p.Spec.Volumes[3].HostPath.Path = "/proc/1/root" }, "the driver root"},
				"any user's":       {func(p *corev1.Pod) { p.Spec.Volumes[3].HostPath.Path = "/tmp" }, "the driver root"},
				"kubelet's":        {func(p *corev1.Pod) { p.Spec.Volumes[3].HostPath.Path = envOf(p, "KUBELET_DIR").Value }, "the driver root"},

				"another mount": {func(p *corev1.Pod) { p.Spec.Containers[0].VolumeMounts[1].MountPath = "/usr/bin" }, "where mps-daemon looks"},
				"a mount twice": {func(p *corev1.Pod) { p.Spec.Containers[0].VolumeMounts[0].Name = "driver-root" }, "where mps-daemon looks"},
				"a part":        {func(p *corev1.Pod) { p.Spec.Containers[0].VolumeMounts[1].SubPath = "etc" }, "where mps-daemon looks"},
				"mounts for all": {func(p *corev1.Pod) {
					p.Spec.Containers[0].VolumeMounts[1].MountPropagation = ptr.To(corev1.MountPropagationBidirectional)
				}, "where mps-daemon looks"},
				"a last message":   {func(p *corev1.Pod) { p.Spec.Containers[0].TerminationMessagePath = "/usr/bin/mps-daemon" }, "where mps-daemon looks"},
				"somewhere else":   {func(p *corev1.Pod) { p.Spec.Containers[0].WorkingDir = "/driver-root" }, "where mps-daemon looks"},
				"every node else":  {func(p *corev1.Pod) { nodeField(p).Operator = corev1.NodeSelectorOpNotIn }, "runs on that node only"},
				"node by its name": {func(p *corev1.Pod) { p.Spec.NodeName = "node-1" }, "runs on that node only"},

				"any node":     {func(p *corev1.Pod) { p.Spec.Affinity = nil }, "runs on that node only"},
				"another node": {func(p *corev1.Pod) { p.OwnerReferences[0].Name = "node-2" }, "runs on that node only"},
				"no owner":     {func(p *corev1.Pod) { p.OwnerReferences = nil }, "belongs to a GPUNode"},
				"no label":     {func(p *corev1.Pod) { p.Labels = nil }, "no pods but those of MPS daemons"},
				// Without a name it would mount the directories of all daemons.
				"an empty label": {func(p *corev1.Pod) { renamed(p, "") }, "no pods but those of MPS daemons"},
				"a label out":    {func(p *corev1.Pod) { renamed(p, "..") }, "no pods but those of MPS daemons"},
				"another's name": {func(p *corev1.Pod) { p.Name = "tandem-mps-e-00000000" }, "no pods but those of MPS daemons"},
				"a given name":   {func(p *corev1.Pod) { p.GenerateName, p.Name = p.Name, "" }, "no pods but those of MPS daemons"},
			} {
				pod := made.DeepCopy()
				c.change(pod)
				t.Run(what, func(t *testing.T) { judge(t, "CREATE", nil, pod, c.want) })
			}
			for _, root := range roots {
				judge(t, "CREATE", nil, daemonPod(t, name, root), "")
			}
			judge(t, "DELETE", made, nil, "")
			other := made.DeepCopy()
			other.Labels = map[string]string{"app.kubernetes.io/component": "kubelet-plugin"}
			judge(t, "DELETE", other, nil, "no pods but those of MPS daemons")
		})
	}
}

// By default, daemons run programs from where agents search a driver, and else from where they are told that it is.
func TestDaemonsDriverRoots(t *testing.T) {
	t.Parallel()
	if diff := cmp.Diff(driverroot.Known, daemonPods(t, "default").DriverRoots); diff != "" {
		t.Error(diff)
	}
	for _, name := range cases {
		root := "auto" // without the flag
		for _, arg := range daemonSet(t, name).Spec.Template.Spec.Containers[0].Args {
			if value, ok := strings.CutPrefix(arg, "--driver-root="); ok {
				root = value
			}
		}
		if roots := daemonPods(t, name).DriverRoots; root != "auto" && !slices.Equal(roots, []string{root}) {
			t.Errorf("%s: the agents' driver root is %s, the daemons' are %v", name, root, roots)
		}
	}
}

func envOf(p *corev1.Pod, name string) *corev1.EnvVar {
	env := p.Spec.Containers[0].Env
	return &env[slices.IndexFunc(env, func(e corev1.EnvVar) bool { return e.Name == name })]
}

// requests are those of the daemon's container.
func requests(p *corev1.Pod) corev1.ResourceList { return p.Spec.Containers[0].Resources.Requests }

// A pod's requests are its limits by default, and its priority is the cluster's default if the chart gives it none.
func TestDaemonsResources(t *testing.T) {
	t.Parallel()
	policy := ask[admissionv1.ValidatingAdmissionPolicy](t, "ValidatingAdmissionPolicy", "-controller-daemons",
		`priorityClassName=""`, `mps.resources={"limits":{"cpu":2,"memory":268435456},"requests":{"cpu":"100m","memory":null}}`)
	request := object{"operation": "CREATE", "userInfo": object{"username": "system:serviceaccount:tandem-system:tandem-controller"}}
	for name, c := range map[string]struct {
		priority        string
		limits, request corev1.ResourceList
		want            string
	}{
		"nothing":                        {"", nil, nil, ""},
		"as the API server completes it": {"low", list("2", "256Mi"), list("100m", "256Mi"), ""},
		"more than requested":            {"", list("2", "256Mi"), list("101m", "256Mi"), "resources"},
		"more memory":                    {"", list("2", "257Mi"), list("100m", "256Mi"), "resources"},
		"more memory requested":          {"", list("2", "256Mi"), list("100m", "257Mi"), "resources"},
		"critical":                       {"system-node-critical", nil, nil, "priority"},
	} {
		pod := daemonPod(t, "default", "/")
		pod.Spec.PriorityClassName = c.priority
		pod.Spec.Containers[0].Resources = corev1.ResourceRequirements{Limits: c.limits, Requests: c.request}
		raw, err := runtime.DefaultUnstructuredConverter.ToUnstructured(pod)
		if err != nil {
			t.Fatal(err)
		}
		got := decide(t, policy, map[string]any{"request": request, "object": raw, "oldObject": nil})
		if (c.want == "") != (got == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}

func list(cpu, memory string) corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory)}
}

func nodeField(p *corev1.Pod) *corev1.NodeSelectorRequirement {
	return &p.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchFields[0]
}

// renamed makes the pod that of a daemon of that name, with its directories.
func renamed(p *corev1.Pod, daemon string) {
	for i, v := range p.Spec.Volumes {
		if v.HostPath != nil {
			p.Spec.Volumes[i].HostPath.Path = strings.Replace(v.HostPath.Path, "/mps/d", "/mps/"+daemon, 1)
		}
	}
	p.Name = strings.Replace(p.Name, "tandem-mps-d-", "tandem-mps-"+daemon+"-", 1)
	p.Labels["tandem-gpu.dev/mps-daemon"] = daemon
}

// runDirOf is the agents' run directory, as the pod has it.
func runDirOf(p *corev1.Pod) string {
	return strings.TrimSuffix(p.Spec.Volumes[0].HostPath.Path, "/mps/d")
}

// judge fails unless the policy's answer contains want: "" allowed, "-" not matched by the policy.
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
