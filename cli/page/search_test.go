// SPDX-License-Identifier: Apache-2.0

package page

import (
	"fmt"
	"html"
	"net/http/httptest"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/browser"
	"github.com/tandem-gpu/tandem/cli/overview"
)

const gpuResource = "nvidia.com/gpu"

// gpus returns a node with 8 GPUs. A pod of namespace team-N has the first four.
func gpus(i int) v1alpha1.GPUNode {
	n := v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("gpu-node-%04d", i)}}
	n.Status = v1alpha1.GPUNodeStatus{Mode: "Dual", ExtendedResource: gpuResource}
	for g := range 8 {
		d := v1alpha1.DeviceStatus{
			Name: fmt.Sprintf("gpu-%d", g), UUID: fmt.Sprintf("GPU-%04d-%d", i, g), Model: "NVIDIA H100 80GB HBM3", ExtendedResource: gpuResource,
		}
		if g < 4 {
			d.Holders = []v1alpha1.DeviceHolder{{Kind: v1alpha1.HolderPod, UID: "u", State: v1alpha1.HoldHeld,
				Pods: []v1alpha1.PodReference{{Namespace: fmt.Sprintf("team-%d", i%50), Name: fmt.Sprintf("train-%d", i)}}}}
		}
		n.Status.Devices = append(n.Status.Devices, d)
	}
	return n
}

// divided lets each GPU of a node have seven partitions.
func divided(n v1alpha1.GPUNode) v1alpha1.GPUNode {
	for _, gpu := range slices.Clone(n.Status.Devices) {
		for start := range 7 {
			n.Status.Devices = append(n.Status.Devices, v1alpha1.DeviceStatus{
				Name: fmt.Sprintf("%s-mig-1g10gb-19-%d", gpu.Name, start), UUID: fmt.Sprintf("MIG-%s-%d", gpu.UUID, start), Parent: gpu.Name, Profile: "1g.10gb",
			})
		}
	}
	return n
}

// since is when something in large began, three hours ago.
var since = metav1.NewTime(time.Now().Add(-3 * time.Hour))

// large is the page of a cluster of 5000 nodes. 2000 pods wait: 20 of each of 50 Deployments, and 1000 without an owner.
func large() *Page {
	p := newPage()
	p.fleet.rights = allowed(p)
	for i := range 5000 {
		n := gpus(i)
		switch {
		case i == 4700:
			n.Status.Devices[7].Maintenance = &v1alpha1.DeviceMaintenance{Reason: "a new fan", Since: &since}
		case i == 4600:
			n.Status.Devices[7].Taints = []v1alpha1.DeviceTaint{{Rule: "fans", Taint: v1alpha1.Taint{Key: "repair", Value: "fan", Effect: "NoSchedule", Since: &since}}}
		case i == 4800:
			n.Status.Devices[7].UnhealthyReason = "XID: XID 79: GPU has fallen off the bus"
		case i == 4900:
			n.Status.Conflicts = []v1alpha1.ConflictingClaim{{Namespace: "team-0", Name: "late", Devices: []string{"gpu-1"}, Since: metav1.NewMicroTime(since.Time), Message: "a pod has it"}}
		case i == 4999:
			n.Status.Waiting, n.Status.Devices = "no NVIDIA driver", nil
		case i%10 == 9:
			n = divided(n)
		}
		p.fleet.show(overview.Change{GPUNode: n})
	}
	p.fleet.listed, p.fleet.user = true, "jane"
	p.fleet.pods = cache.NewStore(cache.MetaNamespaceKeyFunc)
	for i := range 2000 {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: fmt.Sprintf("team-%d", i%50), Name: fmt.Sprintf("late-%d", i), CreationTimestamp: since}}
		pod.Status.Phase = corev1.PodPending
		pod.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{gpuResource: resource.MustParse("9")}}}}
		if i < 1000 {
			pod.Labels = map[string]string{"pod-template-hash": "5d"}
			pod.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "web-5d", Controller: ptr.To(true)}}
		}
		_ = p.fleet.pods.Add(pod) // it has a name
	}
	return p
}

var (
	nodeIn    = regexp.MustCompile(`<details id="node-([^"]*)"`)
	countIn   = regexp.MustCompile(`<li[^>]*><a href="\./([^"]*)">([^<]*)</a></li>`)
	elementIn = regexp.MustCompile(`<[a-z]`)
)

// found returns the nodes in a page.
func found(body string) (names []string) {
	for _, match := range nodeIn.FindAllStringSubmatch(body, -1) {
		names = append(names, strings.TrimPrefix(match[1], "gpu-node-"))
	}
	return names
}

// small checks the bounds of a page.
func small(t *testing.T, what, body string) {
	t.Helper()
	if n := len(elementIn.FindAllString(body, -1)); n > 3000 || len(body) > 256<<10 {
		t.Errorf("%s: %d elements in %d bytes", what, n, len(body))
	}
}

// TestLarge: of many nodes those with a problem come first, each count leads to what it counts, and the filter and the pages reach all.
func TestLarge(t *testing.T) {
	p := large()
	read := func(query string) string {
		answer := ask(p, "GET", p.Path()+query, "localhost")
		if answer.Code != 200 {
			t.Fatalf("%s: %d: %s", query, answer.Code, answer.Body)
		}
		small(t, query, answer.Body.String())
		return answer.Body.String()
	}
	body := read("")
	if diff := cmp.Diff([]string{"4999", "4900", "4800", "4600", "4700", "0000"}, found(body)[:6]); diff != "" {
		t.Errorf("the first nodes (-want +got):\n%s", diff)
	}
	exact := since.UTC().Format(time.RFC3339)
	for _, text := range []string{
		`<b>demo</b> <span>127.0.0.1:6443</span> <span>as jane</span>`, "gpu-7: Unhealthy: XID: XID 79: GPU has fallen off the bus",
		`gpu-7: Maintenance: a new fan <time datetime="` + exact + `" title="` + exact + `">3 h</time>`, `gpu-7: Tainted: repair=fan:NoSchedule of DeviceTaintRule fans <time datetime="` + exact + `"`, "Conflict: claim team-0/late, gpu-1: a pod has it <time", ": no NVIDIA driver<",
		`>Deployment team-0/web</a> <span>20 pods</span> <span>9 nvidia.com/gpu</span>`, "1040 more owners",
	} {
		if !strings.Contains(body, text) {
			t.Errorf("no %q in\n%s", text, body)
		}
	}
	counts := map[string]string{}
	for _, match := range countIn.FindAllStringSubmatch(body, -1) {
		counts[html.UnescapeString(match[2])] = html.UnescapeString(match[1])
	}
	for text, want := range map[string][]string{
		"5 with a problem": {"4999", "4900", "4800", "4600", "4700"}, "1 without a serving agent": {"4999"}, "1 with a claim in conflict": {"4900"},
		"✗ Unhealthy 1": {"4800"}, "◇ Maintenance 1": {"4700"}, "◆ Tainted 1": {"4600"}, "2000 waiting pods": nil,
	} {
		query, has := counts[text]
		if body := read(query); !has || !slices.Equal(found(body), want) || strings.Contains(body, "Waiting pods") != (want == nil) {
			t.Errorf("%q, %q: %v, want %v", text, query, found(body), want)
		}
	}
	for query, want := range map[string][]string{
		"node:4711": {"4711"}, "NODE-4711": {"4711"}, "pod:team-11/train-4711": {"4711"}, "namespace:team-11 node:47": {"4711", "4761"},
		"namespace:team": nil, "GPU-4711-3": {"4711"}, "state:unhealthy node:471": nil, "state:maintenance fan": {"4700"}, "pod:": nil, "state:Conflict": {"4900"},
	} {
		if got := found(read("?q=" + url.QueryEscape(query))); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", query, got, want)
		}
	}
	for query, want := range map[string]int{"pod:team-7/late-1": 22, "namespace:team-7": 40, "late-1999": 1, "deployment": 1000, "namespace:team-7 state:waiting": 40} {
		_, pods := browser.Waiting(read("?q=" + url.QueryEscape(query)))
		if pods != want {
			t.Errorf("%s: %d pods, want %d", query, pods, want)
		}
	}
	last := read("?page=99999")
	if got := found(last); !slices.Contains(got, "4998") || !strings.Contains(last, ` of 5000</h2>`) || strings.Contains(last, `rel="next"`) {
		t.Errorf("a page beyond the last: %v", got)
	}
	previous := regexp.MustCompile(`rel="prev" href="\./([^"]*)"`).FindStringSubmatch(last)
	if previous == nil || !strings.Contains(read(html.UnescapeString(previous[1])), `rel="next"`) {
		t.Errorf("the page before the last: %v", previous)
	}
}

// TestPages: the pages have each node once, and each draws a bounded number of GPUs and partitions.
func TestPages(t *testing.T) {
	var nodes []overview.Node
	for i := range 500 {
		n := gpus(i)
		if i%7 == 0 {
			n = divided(n)
		}
		nodes = append(nodes, overview.NodeOf(n))
	}
	next := 0
	for number, pages := 1, 2; number <= pages; number++ {
		from, to, got, of := pageOf(nodes, number)
		parts := 0
		for _, n := range nodes[from:to] {
			parts += partsOf(n)
		}
		if pages = of; from != next || to <= from || got != number || to-from > mostNodes || parts > mostParts {
			t.Errorf("page %d of %d: nodes %d to %d, %d parts, page %d", number, of, from, to, parts, got)
		}
		next = to
	}
	if next != len(nodes) {
		t.Errorf("the pages end at %d", next)
	}
	if from, to, number, pages := pageOf(nil, 3); from != 0 || to != 0 || number != 1 || pages != 1 {
		t.Error("pages without nodes", from, to, number, pages)
	}
	big := nodes[0]
	for range 100 {
		big.Devices = append(big.Devices, nodes[0].Devices...)
	}
	if from, to, _, pages := pageOf([]overview.Node{big, big}, 1); from != 0 || to != 1 || pages != 2 {
		t.Error("a node that is larger than a page", from, to, pages)
	}
}

// TestOpened: the devices of a node and the pods of an owner are sent when the viewer opens them, of a few at a time.
func TestOpened(t *testing.T) {
	p := large()
	body := ask(p, "GET", p.Path(), "localhost").Body.String()
	if strings.Contains(body, "<table") || strings.Contains(body, "late-50<") {
		t.Errorf("it is sent at first:\n%s", body)
	}
	open := ""
	for _, id := range regexp.MustCompile(`<details id="([^"]*)"`).FindAllStringSubmatch(body, -1) {
		open += "&open=" + id[1]
	}
	body = ask(p, "GET", p.Path()+"?q="+open, "localhost").Body.String()
	small(t, "all open", body)
	if !strings.Contains(body, fmt.Sprintf(`data-opened="%d"`, mostOpened)) {
		t.Error("the browser does not know how many it may open")
	}
	if n := strings.Count(body, " open>"); n != mostOpened {
		t.Errorf("%d are open", n)
	}
	if tables := strings.Count(body, "<table"); tables == 0 || !strings.Contains(body, `pod=late-50">team-0/late-50</a> <time datetime=`) {
		t.Errorf("%d tables:\n%s", tables, body)
	}
}

// TestInABrowser: a page of 5000 nodes is small, and as wide as the browser shows.
func TestInABrowser(t *testing.T) {
	p := large()
	server := httptest.NewServer(p)
	defer server.Close()
	for _, c := range []struct {
		name, query string
		width       int
	}{{"nodes", "", 400}, {"nodes", "", 1100}, {"waiting", "?q=state:waiting", 400}, {"partitions", "?q=1g.10gb", 400}, {"few", "?q=pod:train-4711", 400}} {
		of := browser.Measure(t, fmt.Sprintf("%s-%d", c.name, c.width), server.URL+p.Path()+c.query, c.width)
		if of.ClientWidth != c.width || of.ScrollWidth > c.width || len(of.Wide) > 0 || of.Elements > 3000 || of.Elements < 100 {
			t.Errorf("%s: %+v", c.name, of)
		}
	}
}
