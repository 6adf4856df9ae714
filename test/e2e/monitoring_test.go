// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/hack/binaries"
	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/test/manifests"
	"github.com/tandem-gpu/tandem/test/oracle"
)

// sharers are two pods that share a claim, one of them with two containers and an init container that use it.
const sharers = `
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: shared}
spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]}}
---
apiVersion: v1
kind: Pod
metadata: {name: two}
spec:
  terminationGracePeriodSeconds: 1
  resourceClaims: [{name: gpu, resourceClaimName: shared}]
  initContainers:
  - {name: first, image: "docker.io/library/busybox:1.37", imagePullPolicy: Never, command: ["true"], resources: {claims: [{name: gpu}]}}
  containers:
  - {name: a, image: "docker.io/library/busybox:1.37", imagePullPolicy: Never, command: [sleep, infinity], resources: {claims: [{name: gpu}]}}
  - {name: b, image: "docker.io/library/busybox:1.37", imagePullPolicy: Never, command: [sleep, infinity], resources: {claims: [{name: gpu}]}}
---
apiVersion: v1
kind: Pod
metadata: {name: late}
spec:
  terminationGracePeriodSeconds: 1
  resourceClaims: [{name: gpu, resourceClaimName: shared}]
  containers:
  - {name: c, image: "docker.io/library/busybox:1.37", imagePullPolicy: Never, command: [sleep, infinity], resources: {claims: [{name: gpu}]}}
---
apiVersion: v1
kind: Pod
metadata: {name: init}
spec:
  terminationGracePeriodSeconds: 1
  initContainers:
  - {name: first, image: "docker.io/library/busybox:1.37", imagePullPolicy: Never, command: ["true"], resources: {limits: {nvidia.com/gpu: 1}}}
  containers:
  - {name: main, image: "docker.io/library/busybox:1.37", imagePullPolicy: Never, command: [sleep, infinity], resources: {limits: {nvidia.com/gpu: 2}}}
`

// TestHolderMetric: tandem_device_holder names the containers that kubelet lists, over both APIs, with partitions that are made for claims,
// while pods come and go. It still does while kubelet is away.
func TestHolderMetric(t *testing.T) {
	s := begin(t)
	pods := 5
	if s.CountersKept() {
		s.dynamic()
		s.Manifest(manifests.PartitionTemplate("ones", "1g.10gb") + manifests.ClaimPod("part", "ones"))
		pods++
	}
	s.Manifest(manifests.SingleTemplate + manifests.Pod("claim", "claim") + manifests.Pod("limit", "limit") + sharers)
	s.Running(soon, pods, 0)
	s.holdersEqual(pods)
	s.Kubectl("delete", "pod", "-n", s.Namespace, "late", "limit")
	s.holdersEqual(pods - 2)
	s.Manifest(manifests.Pod("limit", "next"))
	s.Running(soon, pods-1, 0)
	s.holdersEqual(pods - 1)
	before := s.holderMetric()
	s.withoutKubelet(func() {
		if diff := cmp.Diff(before, s.holderMetric()); diff != "" {
			t.Errorf("without kubelet the holders differ (-before +now):\n%s", diff)
		}
	})
	s.Ready()
	s.DeleteAll()
	s.holdersEqual(0)
	// An agent whose configuration is not dynamic leaves MIG mode as it is.
	s.Await(soon, "all GPUs to be whole", func() error { return errors.Join(s.noPartitions(), s.OfferedToPods(gpusANode)) })
}

// holdersEqual waits until the metric is what kubelet says, of so many pods.
func (s *story) holdersEqual(pods int) {
	s.Helper()
	s.Await(soon, fmt.Sprintf("the holders of %d pods to be kubelet's", pods), func() error {
		uses, err := oracle.Uses(s.Ctx, node())
		if err != nil {
			return err
		}
		want, names := []string{}, map[string]bool{}
		for _, use := range uses {
			names[use.Pod] = true
			want = append(want, fmt.Sprintf("%s/%s/%s %t %s", use.Namespace, use.Pod, use.Container, use.Claim, use.Device))
		}
		slices.Sort(want)
		if diff := cmp.Diff(want, s.holderMetric()); diff != "" || len(names) != pods {
			return fmt.Errorf("%d pods (-kubelet +metric):\n%s", len(names), diff)
		}
		return nil
	})
}

// holderMetric returns the series in the form of holdersEqual, sorted.
func (s *story) holderMetric() []string {
	s.Helper()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(s.MetricsText()))
	if err != nil {
		s.Fatal(err)
	}
	series := []string{}
	for _, m := range families["tandem_device_holder"].GetMetric() {
		l := map[string]string{}
		for _, pair := range m.GetLabel() {
			l[pair.GetName()] = pair.GetValue()
		}
		device := l["uuid"]
		if l["api"] == "claim" {
			device = l["device"]
		}
		series = append(series, fmt.Sprintf("%s/%s/%s %t %s", l["namespace"], l["pod"], l["container"], l["api"] == "claim", device))
	}
	slices.Sort(series)
	return series
}

// prometheusVariable lets TestMonitoring run. It is not part of make test because it compiles Prometheus the first time.
const prometheusVariable = "PROMETHEUS"

// TestMonitoring: a real Prometheus, configured as the user page says, scrapes agents and controller. Each query of the dashboard returns
// data. Alerts fire while their fault is there, and stop after it. Their times are shortened, and TandemPrepareSlow has the threshold zero.
// Package monitoring tests the alerts that this story does not cause.
func TestMonitoring(t *testing.T) {
	if os.Getenv(prometheusVariable) == "" {
		t.Skipf("compiling Prometheus takes minutes the first time; to play the story, run %s=1 make e2e RUN=TestMonitoring", prometheusVariable)
	}
	s := begin(t)
	s.startPrometheus()
	s.Await(patient, "no alert", func() error {
		if alerts := s.firing(); len(alerts) > 0 {
			return fmt.Errorf("%v", alerts)
		}
		_, err := s.query(`tandem_config_rejected`, 2)
		return err
	})

	s.Manifest(manifests.SingleTemplate + manifests.Pod("claim", "claim") + manifests.Pod("limit", "limit") + manifests.Pod("claim", "ended-claim") + manifests.Pod("limit", "ended-limit"))
	s.Running(soon, 5, 0) // Prometheus is one
	s.Kubectl("delete", "pod", "-n", s.Namespace, "ended-claim", "ended-limit")
	t.Cleanup(func() { s.Breaks() })
	if err := simulated.RaiseXID(s.Machine(), simulated.Event{GPU: "7", XID: 48}); err != nil {
		t.Fatal(err)
	}
	slow := simulated.Condition{Slowdown: []string{"hwThermal"}}
	s.Breaks(simulated.GPUFaults{GPU: "7", Condition: simulated.Condition{RecoveryAction: "reset"}}, simulated.GPUFaults{GPU: "6", Condition: slow})
	for _, panel := range s.panels() {
		for _, expr := range panel.queries {
			s.Await(soon, fmt.Sprintf("data of panel %q: %s", panel.title, expr), func() error {
				_, err := s.query(expr, 1)
				return err
			})
		}
	}
	s.fires("TandemGPUFault", "TandemGPUUnhealthy", "TandemGPUSlow")
	s.Breaks()
	s.stops("TandemGPUFault", "TandemGPUUnhealthy", "TandemGPUSlow")

	s.fires("TandemPrepareSlow") // every Prepare counts as slow
	s.stops("TandemPrepareSlow")

	s.UnlabelAtEnd()
	s.Labelled("Nonsense")
	s.fires("TandemConfigRejected")
	s.Labelled("Dual")
	s.stops("TandemConfigRejected")

	allow := s.holdSlices()
	s.Manifest(manifests.Pod("limit", "withdraws"))
	s.fires("TandemPublishErrors")
	allow()
	s.stops("TandemPublishErrors")

	end, _ := s.hang(node(), s.Pod("withdraws").UID)
	s.Kubectl("delete", "pod", "-n", s.Namespace, "withdraws", "--force", "--grace-period=0")
	s.fires("TandemGPUNotFreed")
	end()
	s.stops("TandemGPUNotFreed")

	lead := s.WithoutControllers()
	s.fires("TandemNoLeader")
	lead()
	s.stops("TandemNoLeader")

	s.withoutAgent(func() { s.fires("TandemAgentAbsent") })
	s.stops("TandemAgentAbsent")
	s.Ready()

	s.withoutGPUNodes(func() { s.fires("TandemWithoutGPUNodes") })
	s.stops("TandemWithoutGPUNodes")
	s.Ready()

	s.loseToPod(func() { s.Manifest(lastTry) })
	s.fires("TandemClaimNotMoved")
	s.Kubectl("delete", "job", "-n", s.Namespace, "last-try", "--cascade=foreground")
	s.stops("TandemClaimNotMoved")

	s.Installed("mps-sharing.values.yaml", "mps.resources.requests.cpu=1000")
	s.fires("TandemMPSDaemonNotRunning")
	s.Values()
	s.stops("TandemMPSDaemonNotRunning")
}

// lastTry is a Job that an eviction would make fail, so its pod is not evicted.
const lastTry = `
apiVersion: batch/v1
kind: Job
metadata: {name: last-try}
spec:
  backoffLimit: 0
  template:
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 1
      resourceClaims: [{name: gpu, resourceClaimTemplateName: preferring}]
      containers:
      - name: work
        image: docker.io/library/busybox:1.37
        imagePullPolicy: Never
        command: [sleep, infinity]
        resources: {claims: [{name: gpu}]}
`

// withoutGPUNodes takes the right to GPUNodes from the agents, restarts one, does something, and gives the right back.
func (s *story) withoutGPUNodes(part func()) {
	s.Helper()
	roles := theClient.RbacV1().ClusterRoles()
	role, err := roles.Get(s.Ctx, install.Release, metav1.GetOptions{})
	if err != nil {
		s.Fatal(err)
	}
	rules := role.Rules
	set := func(rules []rbacv1.PolicyRule) error {
		role, err := roles.Get(s.Ctx, install.Release, metav1.GetOptions{})
		if err == nil {
			role.Rules = rules
			_, err = roles.Update(s.Ctx, role, metav1.UpdateOptions{})
		}
		return err
	}
	back := s.Undo(func() error { return set(rules) })
	err = set(slices.DeleteFunc(slices.Clone(rules), func(r rbacv1.PolicyRule) bool { return slices.Contains(r.Resources, "gpunodes") }))
	if err != nil {
		s.Fatal(err)
	}
	s.Kubectl("delete", "pod", "-n", install.Namespace, s.AgentPod(gpuNode).Name)
	part()
	back()
}

// fires waits until alerts fire, stops until they do not.
func (s *story) fires(alerts ...string) { s.Helper(); s.alerts(true, alerts) }
func (s *story) stops(alerts ...string) { s.Helper(); s.alerts(false, alerts) }

func (s *story) alerts(firing bool, alerts []string) {
	s.Helper()
	s.Took(fmt.Sprintf("firing is %t for %v", firing, alerts), func() {
		s.Await(patient, fmt.Sprintf("firing to be %t for %v", firing, alerts), func() error {
			now := s.firing()
			for _, alert := range alerts {
				if slices.Contains(now, alert) != firing {
					return fmt.Errorf("firing are %v", now)
				}
			}
			return nil
		})
	})
}

// firing are the alerts that fire now.
func (s *story) firing() (alerts []string) {
	s.Helper()
	result, err := s.query(`group by (alertname) (ALERTS{alertstate="firing"})`, 0)
	if err != nil {
		s.Fatal(err)
	}
	for _, r := range result {
		alerts = append(alerts, r.Metric["alertname"])
	}
	return alerts
}

type sample struct {
	Metric map[string]string
	Value  [2]any
}

const prometheusPod = "prometheus"

// query asks Prometheus, and wants at least so many series with a number.
func (s *story) query(expr string, least int) ([]sample, error) {
	text, err := theClient.Discovery().RESTClient().Get().
		AbsPath("/api/v1/namespaces", s.Namespace, "pods", prometheusPod+":9090", "proxy/api/v1/query").Param("query", expr).DoRaw(s.Ctx)
	if err != nil {
		return nil, fmt.Errorf("query %s: %w: %s", expr, err, text)
	}
	var answer struct{ Data struct{ Result []sample } }
	if err := json.Unmarshal(text, &answer); err != nil {
		return nil, fmt.Errorf("query %s: %w", expr, err)
	}
	numbers := 0
	for _, r := range answer.Data.Result {
		text, _ := r.Value[1].(string)
		if number, err := strconv.ParseFloat(text, 64); err == nil && !math.IsNaN(number) {
			numbers++
		}
	}
	if numbers < least {
		return nil, fmt.Errorf("query %s: %d series, want %d: %s", expr, numbers, least, text)
	}
	return answer.Data.Result, nil
}

type boardPanel struct {
	title   string
	queries []string
}

// panels are those of the dashboard in the cluster, with all nodes and namespaces.
func (s *story) panels() (panels []boardPanel) {
	s.Helper()
	text := s.Kubectl("get", "configmap", "-n", install.Namespace, "-l", "grafana_dashboard=1", "-o", `jsonpath={.items[0].data.tandem\.json}`)
	var board struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal([]byte(text), &board); err != nil {
		s.Fatal(err)
	}
	variables := strings.NewReplacer("$__rate_interval", "2m", "$node", ".*", "$namespace", ".*")
	for _, p := range board.Panels {
		panel := boardPanel{title: p.Title}
		for _, target := range p.Targets {
			panel.queries = append(panel.queries, variables.Replace(target.Expr))
		}
		panels = append(panels, panel)
	}
	return panels
}

// soonerAlerts are the chart's alerts with times that fit into a story.
func (s *story) soonerAlerts() string {
	s.Helper()
	data, err := os.ReadFile("../../deployments/helm/tandem/files/alerts.yaml")
	if err != nil {
		s.Fatal(err)
	}
	text := regexp.MustCompile(`(?m)^ +for: .*\n`).ReplaceAllString(string(data), "")
	text = regexp.MustCompile(`\[\d+m\]`).ReplaceAllString(text, "[30s]")
	for long, short := range map[string]string{
		"(tandem_longest_wait_seconds) > 300\n": "(tandem_longest_wait_seconds) > 3\n",
		`{result="ok"}[30s]))) > 10` + "\n":     `{result="ok"}[30s]))) > 0` + "\n",
		"[30s])) > 5\n":                         "[30s])) > 1\n",
	} {
		if !strings.Contains(text, long) {
			s.Fatalf("the alerts have no %q", long)
		}
		text = strings.Replace(text, long, short, 1)
	}
	return text
}

// startPrometheus runs Prometheus in a pod of the story, with the configuration of the user page, and installs the dashboard.
func (s *story) startPrometheus() {
	s.Helper()
	program, err := binaries.Prometheus().Ensure(s.Ctx, os.Stdout)
	if err != nil {
		s.Fatal(err)
	}
	image := filepath.Join(s.TempDir(), "prometheus.tar")
	if err := cluster.WriteProgramImage(image, "docker.io/local/prometheus:"+binaries.Prometheus().Version, program, "prometheus"); err != nil {
		s.Fatal(err)
	}
	if err := node().LoadImage(s.Ctx, image); err != nil {
		s.Fatal(err)
	}
	page, err := os.ReadFile("../../docs/user/monitoring.md")
	if err != nil {
		s.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(string(page), -1)
	if len(blocks) != 1 {
		s.Fatalf("docs/user/monitoring.md has %d YAML blocks; want one, the configuration", len(blocks))
	}
	s.Values("metrics.dashboard.create=true")
	indent := func(text string) string { return strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n    ") }
	config := "global: {scrape_interval: 1s, evaluation_interval: 1s}\n" + blocks[0][1]
	s.Manifest(fmt.Sprintf(`
apiVersion: v1
kind: ConfigMap
metadata: {name: prometheus}
data:
  prometheus.yml: |
    %[1]s
  alerts.yaml: |
    %[2]s
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: prometheus}
---
apiVersion: v1
kind: Pod
metadata: {name: %[3]s}
spec:
  serviceAccountName: prometheus
  terminationGracePeriodSeconds: 1
  containers:
  - name: prometheus
    image: docker.io/local/prometheus:%[4]s
    imagePullPolicy: Never
    command: [/prometheus, --config.file=/etc/prometheus/prometheus.yml, --storage.tsdb.path=/data, --log.level=warn]
    ports: [{containerPort: 9090}]
    readinessProbe: {httpGet: {path: /-/ready, port: 9090}, periodSeconds: 1}
    volumeMounts: [{name: config, mountPath: /etc/prometheus}, {name: data, mountPath: /data}]
  volumes: [{name: config, configMap: {name: prometheus}}, {name: data, emptyDir: {}}]
`, indent(config), indent(s.soonerAlerts()), prometheusPod, binaries.Prometheus().Version))
	grant := fmt.Sprintf(`
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: prometheus, namespace: %[1]s}
rules: [{apiGroups: [""], resources: [pods], verbs: [get, list, watch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: prometheus, namespace: %[1]s}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: prometheus}
subjects: [{kind: ServiceAccount, name: prometheus, namespace: %[2]s}]
`, install.Namespace, s.Namespace)
	s.Undo(func() error {
		_, err := theCluster.Kubectl(s.Ctx, "delete", "role,rolebinding", "-n", install.Namespace, "prometheus", "--ignore-not-found")
		return err
	})
	if err := s.ApplyAnywhere(grant); err != nil {
		s.Fatal(err)
	}
	s.Kubectl("wait", "-n", s.Namespace, "pod/"+prometheusPod, "--for=condition=Ready", "--timeout="+soon.String())
}
