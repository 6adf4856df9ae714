// SPDX-License-Identifier: Apache-2.0

package helm_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// ask renders the default case with more values and decodes the first object of a kind whose name ends so; nil if there is none.
func ask[T any](t *testing.T, kind, suffix string, set ...string) *T {
	t.Helper()
	args := []string{"-f", valuesFile("default")}
	for _, value := range set {
		args = append(args, "--set-json", value)
	}
	for doc := range bytes.SplitSeq(renderWith(t, args...), []byte("\n---\n")) {
		var head struct {
			Kind     string
			Metadata struct{ Name string }
		}
		if err := yaml.Unmarshal(doc, &head); err != nil {
			t.Fatal(err)
		}
		if head.Kind == kind && strings.HasSuffix(head.Metadata.Name, suffix) {
			found := new(T)
			if err := yaml.UnmarshalStrict(doc, found); err != nil {
				t.Fatal(err)
			}
			return found
		}
	}
	return nil
}

// Server-side apply refuses two variables of one name. extraEnv wins, or is refused.
func TestNoVariableTwice(t *testing.T) {
	t.Parallel()
	type container struct{ name, extra, refused string }
	for _, file := range []string{"default", "runtimeclass"} {
		for _, c := range []container{{"DaemonSet", "extraEnv", "in extraEnv"}, {"Deployment", "controller.extraEnv", "in controller.extraEnv"}} {
			env := daemonSet(t, file).Spec.Template.Spec.Containers[0].Env
			if c.name == "Deployment" {
				env = find[*appsv1.Deployment](t, file).Spec.Template.Spec.Containers[0].Env
			}
			var own []corev1.EnvVar
			for _, e := range env {
				if e.Name != "GOMEMLIMIT" && (e.Name != "NVIDIA_VISIBLE_DEVICES" || file == "runtimeclass") {
					own = append(own, corev1.EnvVar{Name: e.Name, Value: "x"})
				}
			}
			text, err := json.Marshal(own)
			if err != nil {
				t.Fatal(err)
			}
			out, err := run("template", "tandem", "tandem", "-f", valuesFile(file), "--set-json", c.extra+"="+string(text))
			if err == nil {
				t.Errorf("%s, %s: accepted", file, c.extra)
			}
			for _, e := range own {
				if !strings.Contains(string(out), e.Name+" "+c.refused) {
					t.Errorf("%s: %s %s is not named: %s", file, e.Name, c.refused, out)
				}
			}
		}
		if file == "runtimeclass" {
			continue // with another value, the agent would see no GPU
		}
		const visible = `=[{"name":"NVIDIA_VISIBLE_DEVICES","value":"none"}]`
		for _, key := range []string{"extraEnv", "kubeletPlugin.containers.gpus.env"} {
			for _, object := range decode(t, renderWith(t, "-f", valuesFile(file), "--set-json", key+visible)) {
				set, ok := object.(*appsv1.DaemonSet)
				if !ok {
					continue
				}
				var values []string
				for _, e := range set.Spec.Template.Spec.Containers[0].Env {
					if e.Name == "NVIDIA_VISIBLE_DEVICES" {
						values = append(values, e.Value)
					}
				}
				if !slices.Equal(values, []string{"none"}) {
					t.Errorf("%s, %s: NVIDIA_VISIBLE_DEVICES is %v", file, key, values)
				}
			}
		}
	}
}

// Go collects garbage before the kernel ends the process. The limit follows the container's, and extraEnv wins.
func TestGoMemoryLimit(t *testing.T) {
	t.Parallel()
	for limit, want := range map[string]string{
		`"512Mi"`: "483183820", `"1Gi"`: "966367641", `"1.5Gi"`: "1449551462", `"500M"`: "450000000", `268435456`: "241591910", `"268435456"`: "241591910",
		`"1Pi"`: "", `null`: "",
	} {
		both := []string{`controller.resources.limits.memory=` + limit, `resources.limits.memory=` + limit}
		deployment, agents := ask[appsv1.Deployment](t, "Deployment", "", both...), ask[appsv1.DaemonSet](t, "DaemonSet", "", both...)
		for what, c := range map[string]corev1.Container{"controller": deployment.Spec.Template.Spec.Containers[0], "agent": agents.Spec.Template.Spec.Containers[0]} {
			if got := variables(c)["GOMEMLIMIT"]; got != want {
				t.Errorf("%s with %s: GOMEMLIMIT is %q, want %q", what, limit, got, want)
			}
		}
	}
	// Null removes the chart's resources.
	for _, none := range [][]string{{`controller.resources=null`, `resources=null`, `mps.resources=null`}, {`controller.resources.limits=null`, `resources.limits=null`}} {
		deployment, agents := ask[appsv1.Deployment](t, "Deployment", "", none...), ask[appsv1.DaemonSet](t, "DaemonSet", "", none...)
		for what, c := range map[string]corev1.Container{"controller": deployment.Spec.Template.Spec.Containers[0], "agent": agents.Spec.Template.Spec.Containers[0]} {
			if got := variables(c)["GOMEMLIMIT"]; got != "" || len(c.Resources.Limits) > 0 {
				t.Errorf("%s with %s: GOMEMLIMIT is %q, limits %v", what, none, got, c.Resources.Limits)
			}
		}
	}
	own := []string{`controller.extraEnv=[{"name":"GOMEMLIMIT","value":"1GiB"}]`, `extraEnv=[{"name":"GOMEMLIMIT","value":"1GiB"}]`}
	deployment, agents := ask[appsv1.Deployment](t, "Deployment", "", own...), ask[appsv1.DaemonSet](t, "DaemonSet", "", own...)
	for what, c := range map[string]corev1.Container{"controller": deployment.Spec.Template.Spec.Containers[0], "agent": agents.Spec.Template.Spec.Containers[0]} {
		// Server-side apply refuses two variables of one name.
		others := slices.DeleteFunc(slices.Clone(c.Env), func(e corev1.EnvVar) bool { return e.Name == "GOMEMLIMIT" })
		if got := variables(c)["GOMEMLIMIT"]; got != "1GiB" || len(others) != len(c.Env)-1 {
			t.Errorf("%s with extraEnv: GOMEMLIMIT is %s, %v", what, got, c.Env)
		}
	}
}

// helm uninstall does not end MPS daemons, which go with the GPUNodes, nor their clients.
func TestDefinitionIsKept(t *testing.T) {
	t.Parallel()
	for _, name := range cases {
		definition := find[*apiextensionsv1.CustomResourceDefinition](t, name)
		if definition.Annotations["helm.sh/resource-policy"] != "keep" {
			t.Errorf("%s: annotations %v", name, definition.Annotations)
		}
	}
}

// The labels and the condition of nodes are removed after the agents and their rights: an agent would write them again.
func TestLabelsAreRemoved(t *testing.T) {
	t.Parallel()
	const suffix = "-remove-labels"
	for _, name := range cases {
		job := findNamed[*batchv1.Job](t, name, suffix)
		account := findNamed[*corev1.ServiceAccount](t, name, suffix)
		binding := findNamed[*rbacv1.ClusterRoleBinding](t, name, suffix)
		role := findNamed[*rbacv1.ClusterRole](t, name, suffix)
		for _, o := range []metav1.Object{job, account, binding, role} {
			hook := o.GetAnnotations()
			if hook["helm.sh/hook"] != "post-delete" || (hook["helm.sh/hook-weight"] == "0") != (o == metav1.Object(job)) {
				t.Errorf("%s: %T has annotations %v", name, o, hook)
			}
		}
		pod := job.Spec.Template.Spec
		if pod.ServiceAccountName != account.Name || binding.Subjects[0].Name != account.Name || binding.RoleRef.Name != role.Name ||
			len(role.Rules) != 2 || !slices.Equal(role.Rules[0].Verbs, []string{"list", "patch"}) || !slices.Equal(role.Rules[0].Resources, []string{"nodes"}) ||
			!slices.Equal(role.Rules[1].Verbs, []string{"patch"}) || !slices.Equal(role.Rules[1].Resources, []string{"nodes/status"}) {
			t.Errorf("%s: role %+v, binding %+v", name, role.Rules, binding)
		}
		if s := pod.Containers[0].SecurityContext; !*pod.SecurityContext.RunAsNonRoot || *s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem || len(pod.Volumes) > 0 {
			t.Errorf("%s: %+v", name, pod)
		}
		if agents := daemonSet(t, name).Spec.Selector.MatchLabels; labels.SelectorFromSet(agents).Matches(labels.Set(job.Spec.Template.Labels)) {
			t.Errorf("%s: the agents' selector takes the Job's pod", name)
		}
	}
	for _, set := range []string{"gfd.enabled=false", "gfd=null"} {
		want := set == "gfd=null"
		if ask[batchv1.Job](t, "Job", suffix, set) == nil {
			t.Errorf("%s: no Job removes the condition of nodes", set)
		}
		agents := ask[appsv1.DaemonSet](t, "DaemonSet", "", set)
		if slices.Contains(agents.Spec.Template.Spec.Containers[0].Args, "--node-labels=false") == want {
			t.Errorf("%s: arguments %v", set, agents.Spec.Template.Spec.Containers[0].Args)
		}
	}
	agents := ask[appsv1.DaemonSet](t, "DaemonSet", "", `gfd={"noTimestamp":false,"sleepInterval":"5m"}`)
	if env := variables(agents.Spec.Template.Spec.Containers[0]); env["GFD_NO_TIMESTAMP"] != "false" || env["GFD_SLEEP_INTERVAL"] != "5m" {
		t.Errorf("variables %v", env)
	}
	for nfd, want := range map[string]string{`null`: "", `{"enableNodeFeatureApi":null}`: "", `{"enableNodeFeatureApi":true,"master":{}}`: "true", `{"enableNodeFeatureApi":false}`: "false"} {
		agents := ask[appsv1.DaemonSet](t, "DaemonSet", "", "nfd="+nfd)
		if env := variables(agents.Spec.Template.Spec.Containers[0]); env["GFD_USE_NODE_FEATURE_API"] != want {
			t.Errorf("nfd: %s: variables %v", nfd, env)
		}
	}
}

// A rollout over thousands of nodes takes minutes, not hours.
func TestRolloutOfManyNodes(t *testing.T) {
	t.Parallel()
	if got := daemonSet(t, "default").Spec.UpdateStrategy.RollingUpdate.MaxUnavailable.String(); got != "10%" {
		t.Errorf("maxUnavailable is %s", got)
	}
}

// Where the host's root is mounted, kubelet's directory and the host's processes are hidden below it.
func TestHostIsHidden(t *testing.T) {
	t.Parallel()
	for _, name := range cases {
		pod := daemonSet(t, name).Spec.Template.Spec
		if !mountsHost(pod, "/") {
			continue
		}
		mounts := pod.Containers[0].VolumeMounts
		at := func(volume, path string) int {
			return slices.IndexFunc(mounts, func(m corev1.VolumeMount) bool { return m.Name == volume && m.MountPath == path && m.ReadOnly })
		}
		for _, path := range []string{"/host/var/lib/kubelet", "/host/proc"} {
			if host, hidden := at("host", "/host"), at("nothing", path); hidden < 0 || host < 0 {
				t.Errorf("%s: %s is not hidden: %+v", name, path, mounts)
			}
		}
	}
}

// Through the host's proc an agent that runs as root reads the files and environments of other processes of root, so an unprivileged
// one has no mount of it, unless the machine is simulated.
func TestHostProcesses(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]bool{"default": true, "gke": true, "simulated": true, "runtimeclass": false, "everything": false} {
		pod := daemonSet(t, name).Spec.Template.Spec
		if mountsHost(pod, "/proc") != want || slices.Contains(pod.Containers[0].Args, "--proc-root=/node/proc") != want {
			t.Errorf("%s: volumes %v, arguments %v", name, pod.Volumes, pod.Containers[0].Args)
		}
	}
}

// A fleet with labels keeps privileged agents off nodes without GPUs. Without labels the agent must be everywhere: a default that
// asks for a label would install nothing on a cluster without feature discovery.
func TestOnlyNodesWithGPUs(t *testing.T) {
	t.Parallel()
	if got := daemonSet(t, "default").Spec.Template.Spec; len(got.NodeSelector) != 1 || got.NodeSelector["kubernetes.io/os"] != "linux" || got.Affinity != nil {
		t.Errorf("by default on nodes with %v, %v", got.NodeSelector, got.Affinity)
	}
	for _, label := range []string{"feature.node.kubernetes.io/pci-10de.present", "nvidia.com/gpu.present"} {
		got := ask[appsv1.DaemonSet](t, "DaemonSet", "", `nodeSelector={"`+label+`":"true"}`).Spec.Template.Spec.NodeSelector
		if len(got) != 2 || got[label] != "true" || got["kubernetes.io/os"] != "linux" {
			t.Errorf("%s: on nodes with %v", label, got)
		}
	}
}

// The README's affinity keeps agents off control-plane nodes, whose taint they tolerate.
func TestNotOnTheControlPlane(t *testing.T) {
	t.Parallel()
	const label = "node-role.kubernetes.io/control-plane"
	spec := ask[appsv1.DaemonSet](t, "DaemonSet", "", `affinity={"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":`+
		`{"nodeSelectorTerms":[{"matchExpressions":[{"key":"`+label+`","operator":"DoesNotExist"}]}]}}}`).Spec.Template.Spec
	term := spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchExpressions[0]
	if term.Key != label || term.Operator != corev1.NodeSelectorOpDoesNotExist {
		t.Errorf("affinity %+v", spec.Affinity)
	}
	if readme, err := os.ReadFile("tandem/README.md"); err != nil || !strings.Contains(string(readme), "{key: "+label+", operator: DoesNotExist}") {
		t.Errorf("the README does not say so: %v", err)
	}
}

func TestPodPolicy(t *testing.T) {
	t.Parallel()
	const kind, binding, suffix = "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "-pods-around-the-ledger"
	for action, want := range map[string][]admissionv1.ValidationAction{
		`"off"`: nil, `false`: nil, `"audit"`: {admissionv1.Audit}, `"warn"`: {admissionv1.Warn, admissionv1.Audit}, `"deny"`: {admissionv1.Deny, admissionv1.Audit},
	} {
		set := []string{`podPolicy={"action":` + action + `,"exemptNamespaces":["kube-system","monitoring"]}`}
		policy, bound := ask[admissionv1.ValidatingAdmissionPolicy](t, kind, suffix, set...), ask[admissionv1.ValidatingAdmissionPolicyBinding](t, binding, suffix, set...)
		if want == nil {
			if policy != nil || bound != nil {
				t.Errorf("%s: there is a policy", action)
			}
			continue
		}
		exempt := policy.Spec.MatchConstraints.NamespaceSelector.MatchExpressions[0]
		if !slices.Equal(bound.Spec.ValidationActions, want) || !slices.Equal(exempt.Values, []string{"kube-system", "monitoring", "tandem-system"}) {
			t.Errorf("%s: %v, not in %v", action, bound.Spec.ValidationActions, exempt.Values)
		}
	}
}

// The namespaces that podPolicy exempts, also by default and without the policy, are those whose processes the handover lets stay.
func TestExemptNamespacesOfTheHandover(t *testing.T) {
	t.Parallel()
	for want, set := range map[string][]string{
		"--exempt-namespaces=kube-system,gpu-operator": nil,
		"--exempt-namespaces=monitoring":               {`podPolicy={"action":"deny","exemptNamespaces":["monitoring"]}`},
		"":                                             {`podPolicy={"exemptNamespaces":[]}`},
	} {
		got := ""
		for _, arg := range ask[appsv1.DaemonSet](t, "DaemonSet", "", set...).Spec.Template.Spec.Containers[0].Args {
			if strings.HasPrefix(arg, "--exempt-namespaces") {
				got = arg
			}
		}
		if got != want {
			t.Errorf("%v: %q, want %q", set, got, want)
		}
	}
}

// What a pod may not say, in the spellings that NVIDIA's runtime understands (nvidia-container-toolkit, internal/config/image).
func TestPodsAroundTheLedger(t *testing.T) {
	t.Parallel()
	policyWith := func(set ...string) *admissionv1.ValidatingAdmissionPolicy {
		return ask[admissionv1.ValidatingAdmissionPolicy](t, "ValidatingAdmissionPolicy", "-pods-around-the-ledger", set...)
	}
	policy := policyWith(`podPolicy={"action":"deny"}`)
	env := func(pairs ...any) object {
		var list []any
		for i := 0; i < len(pairs); i += 2 {
			list = append(list, object{"name": pairs[i], "value": pairs[i+1]})
		}
		return object{"containers": []any{object{"env": list}}}
	}
	mount := func(path string) object {
		return object{"containers": []any{object{"volumeMounts": []any{object{"mountPath": path}}}}}
	}
	class := func(name string) object { return object{"containers": []any{object{}}, "runtimeClassName": name} }
	from := func(kind, prefix string, env ...any) object {
		source := object{"configMapRef": object{"name": "settings"}}
		if prefix != "" {
			source["prefix"] = prefix
		}
		return object{"containers": []any{object{}}, kind: []any{object{"envFrom": []any{object{"prefix": "APP_", "secretRef": object{"name": "app"}}, source}, "env": env}}}
	}
	for name, c := range map[string]struct {
		policy *admissionv1.ValidatingAdmissionPolicy
		spec   object
		want   string
	}{
		"nothing":             {policy, env(), ""},
		"all":                 {policy, env("NVIDIA_VISIBLE_DEVICES", "all"), "NVIDIA_VISIBLE_DEVICES would"},
		"an old image":        {policy, env("CUDA_VERSION", "8.0"), "CUDA_VERSION without"},
		"an old image, void":  {policy, env("CUDA_VERSION", "8.0", "NVIDIA_VISIBLE_DEVICES", "void"), ""},
		"no version":          {policy, env("CUDA_VERSION", ""), ""},
		"a version elsewhere": {policy, object{"containers": []any{object{"env": []any{object{"name": "CUDA_VERSION", "valueFrom": object{}}}}}}, "CUDA_VERSION without"},
		"from elsewhere":      {policy, from("containers", ""), "envFrom could"},
		"first":               {policy, from("initContainers", ""), "envFrom could"},
		"for debugging":       {policy, from("ephemeralContainers", ""), "envFrom could"},
		"in two parts":        {policy, from("containers", "NVIDIA_"), "envFrom could"},
		"a version in two":    {policy, from("containers", "CUDA_"), "envFrom could"},
		"of another prefix":   {policy, from("containers", "DB_"), ""},
		"from elsewhere, but": {policy, from("containers", "", object{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}), ""},
		"and other variables": {policy, from("containers", "", object{"name": "OTHER", "value": "void"}), "envFrom could"},
		"not checked":         {policyWith(`podPolicy={"action":"deny","checkEnvFrom":false}`), from("containers", ""), ""},
		"a mount":             {policy, mount("/var/run/nvidia-container-devices/all"), "a mount at"},
		"spelled otherwise":   {policy, mount("//var/run/./nvidia-container-devices/all"), "a mount at"},
		"where it links to":   {policy, mount("/run/nvidia-container-devices/all"), "a mount at"},
		"nvidia":              {policy, class("nvidia"), "RuntimeClass"},
		"nvidia-legacy":       {policy, class("nvidia-legacy"), "RuntimeClass"},
		"another class":       {policy, class("gvisor"), ""},
		"of another name":     {policyWith(`podPolicy={"action":"deny","runtimeClasses":["gpus"]}`), class("gpus"), "RuntimeClass"},
		"no classes":          {policyWith(`podPolicy={"action":"deny","runtimeClasses":[]}`), class("nvidia"), ""},
	} {
		input := map[string]any{"request": object{"operation": "CREATE"}, "object": object{"spec": c.spec}, "oldObject": nil}
		if got := decide(t, c.policy, input); (c.want == "") != (got == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
	update := map[string]any{"request": object{"operation": "UPDATE"}, "object": object{"spec": class("nvidia")}, "oldObject": nil}
	if got := decide(t, policy, update); got != "" {
		t.Errorf("debugging a pod that has the class: %q", got)
	}
}

// A policy without the API servers' addresses would be either no protection or no webhook.
func TestNetworkPolicies(t *testing.T) {
	t.Parallel()
	const from = `[{"ipBlock":{"cidr":"10.0.0.10/32"}}]`
	if ask[networkingv1.NetworkPolicy](t, "NetworkPolicy", "") != nil {
		t.Error("there is one by default")
	}
	if out, err := run("template", "tandem", "tandem", "-f", valuesFile("default"), "--set", "networkPolicy.create=true"); err == nil || !strings.Contains(string(out), "networkPolicy.webhookFrom") {
		t.Errorf("without addresses: %v\n%s", err, out)
	}
	controllers := ask[networkingv1.NetworkPolicy](t, "NetworkPolicy", "-controller", `networkPolicy={"create":true,"webhookFrom":`+from+`}`)
	template := ask[appsv1.Deployment](t, "Deployment", "").Spec.Template
	selector := labels.SelectorFromSet(controllers.Spec.PodSelector.MatchLabels)
	if !selector.Matches(labels.Set(template.Labels)) || selector.Matches(labels.Set(daemonSet(t, "default").Spec.Template.Labels)) {
		t.Errorf("selects %v", controllers.Spec.PodSelector)
	}
	if in := controllers.Spec.Ingress; len(in) != 1 || in[0].From[0].IPBlock.CIDR != "10.0.0.10/32" || in[0].Ports[0].Port.StrVal != template.Spec.Containers[0].Ports[1].Name {
		t.Errorf("lets in %+v", in)
	}
	for _, monitor := range []string{"podMonitor", "serviceMonitor"} {
		values := []string{"template", "tandem", "tandem", "-f", valuesFile("default"), "--set-json", `networkPolicy={"create":true,"webhookFrom":` + from + `}`,
			"--set", "metrics.service.create=true,metrics." + monitor + ".create=true"}
		if out, err := run(values...); err == nil || !strings.Contains(string(out), "networkPolicy.metricsFrom") {
			t.Errorf("a %s that reaches nothing: %v", monitor, err)
		}
		if out, err := run(append(values, "--set-json", `networkPolicy.metricsFrom=[{"namespaceSelector":{}}]`)...); err != nil {
			t.Errorf("a %s: %v\n%s", monitor, err, out)
		}
	}
	set := `networkPolicy={"create":true,"metricsFrom":[{"namespaceSelector":{}}]}`
	if in := ask[networkingv1.NetworkPolicy](t, "NetworkPolicy", "-controller", `webhook.enabled=false`, set).Spec.Ingress; len(in) != 1 || in[0].Ports[0].Port.StrVal != "http" {
		t.Errorf("without a webhook: %+v", in)
	}
	daemons := ask[networkingv1.NetworkPolicy](t, "NetworkPolicy", "-mps-daemon", `webhook.enabled=false`, set)
	if !labels.SelectorFromSet(daemons.Spec.PodSelector.MatchLabels).Matches(labels.Set(daemonPod(t, "default", "/").Labels)) || len(daemons.Spec.PolicyTypes) != 2 || daemons.Spec.Ingress != nil || daemons.Spec.Egress != nil {
		t.Errorf("daemons: %+v", daemons.Spec)
	}
}

// Helm creates kinds that it does not know last, policies among them, whatever the chart says. The README says what to do about that;
// when Helm knows them, it need not.
func TestHelmInstallsPoliciesLast(t *testing.T) {
	t.Parallel()
	text := string(render(t, "default"))
	if strings.Index(text, "\nkind: ValidatingAdmissionPolicy\n") < strings.Index(text, "\nkind: DaemonSet\n") {
		t.Error("Helm installs policies first now: remove the section of the chart's README")
	}
	none := ask[appsv1.DaemonSet](t, "DaemonSet", "", `nodeSelector={"tandem-gpu.dev/install":"later"}`, `controller.replicas=0`)
	replicas := ask[appsv1.Deployment](t, "Deployment", "", `controller.replicas=0`).Spec.Replicas
	if none.Spec.Template.Spec.NodeSelector["tandem-gpu.dev/install"] != "later" || *replicas != 0 {
		t.Error("the README's first step starts pods")
	}
}

func TestProtectedNamespaces(t *testing.T) {
	t.Parallel()
	policy := ask[admissionv1.ValidatingAdmissionPolicy](t, "ValidatingAdmissionPolicy", "-controller-protected", `controller.protectedNamespaces=["a"]`)
	if got := policy.Spec.Validations[0].Expression; got != `!(request.namespace in ["a","tandem-system"])` {
		t.Error(got)
	}
}

func TestFlowControl(t *testing.T) {
	t.Parallel()
	for set, want := range map[string]int{`flowControl.create=false`: 0, `rbac.create=true`: 3, `rbac.create=false`: 3} {
		text := string(renderWith(t, "-f", valuesFile("default"), "--set", set))
		if got := strings.Count(text, "flowcontrol.apiserver.k8s.io/v1"); got != want {
			t.Errorf("%s: %d objects, want %d", set, got, want)
		}
	}
}

// TestRemoveLabelsHasItsRights: without them the Job would fail, and helm uninstall with it.
func TestRemoveLabelsHasItsRights(t *testing.T) {
	t.Parallel()
	for _, create := range []bool{true, false} {
		text := string(renderWith(t, "-f", valuesFile("default"), "--set", fmt.Sprint("rbac.create=", create)))
		if got := strings.Contains(text, "[/usr/bin/controller, remove-labels]"); got != create {
			t.Errorf("rbac.create=%t: the Job exists: %t", create, got)
		}
	}
}
