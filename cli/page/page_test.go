// SPDX-License-Identifier: Apache-2.0

package page

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sync/errgroup"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/overview"
)

// What the views show is tested in cli/kubectl-gpu, whose tests have nodes.

func newPage() *Page {
	objects := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{v1alpha1.Resource: "GPUNodeList"})
	return New(overview.Cluster{Client: fake.NewClientset(), Dynamic: objects, DriverName: "gpu.nvidia.com"}, Options{Where: Where{"demo", "127.0.0.1:6443"}, Namespace: "ml"})
}

// hostile is a node with HTML in every text that an API server stores as it is.
func hostile() v1alpha1.GPUNode {
	const html = `<script>alert(1)</script>"'&`
	var n v1alpha1.GPUNode
	n.Name = html
	n.Status = v1alpha1.GPUNodeStatus{Mode: html, Waiting: html,
		Devices: []v1alpha1.DeviceStatus{
			{Name: "gpu-0", UUID: html, Model: html, UnhealthyReason: html, Slowdown: html, Sharing: &v1alpha1.DeviceSharing{Strategy: html, Memory: 1},
				Holders: []v1alpha1.DeviceHolder{{Kind: "Claim", Namespace: html, Name: html, WaitsFor: html, Pods: []v1alpha1.PodReference{{Namespace: html, Name: html}}}}},
			{Name: "gpu-0-mig-1g10gb-19-0", Parent: "gpu-0", Profile: html, Maintenance: &v1alpha1.DeviceMaintenance{Reason: html}},
			{Name: "gpu-1", Taints: []v1alpha1.DeviceTaint{{Rule: html, Taint: v1alpha1.Taint{Key: html, Value: html, Effect: "NoSchedule"}}}},
		},
		Conflicts: []v1alpha1.ConflictingClaim{{Namespace: html, Name: html, Devices: []string{html}, Message: html}},
	}
	return n
}

// ask sends one request to the page.
func ask(p *Page, method, path, host string, change ...func(*http.Request)) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, path, nil)
	r.Host = host
	for _, c := range change {
		c(r)
	}
	w := httptest.NewRecorder()
	p.ServeHTTP(w, r)
	return w
}

// TestOnlyTheViewer: without the token, under another name of this machine and with another method there is no answer.
func TestOnlyTheViewer(t *testing.T) {
	p := newPage()
	p.fleet.listed = true
	for _, c := range []struct {
		method, path, host string
		want               int
	}{
		{"GET", p.Path(), "127.0.0.1:4711", 200},
		{"GET", p.Path(), "localhost:4711", 200},
		{"GET", p.Path(), "[::1]:4711", 200},
		{"GET", p.Path(), "localhost", 200},
		{"HEAD", p.Path(), "localhost", 200},
		{"GET", p.Path() + "files/page.js", "localhost", 200},
		{"GET", p.Path(), "evil.example", 403},
		{"GET", p.Path(), "127.0.0.1.evil.example:4711", 403},
		{"GET", p.Path(), "localhost.evil.example", 403},
		{"GET", p.Path(), "", 403},
		{"GET", "/", "localhost", 403},
		{"GET", "/files/page.js", "localhost", 403},
		{"GET", strings.ToLower(p.Path()), "localhost", 403},
		{"GET", p.Path()[:len(p.Path())-2] + "/", "localhost", 403},
		{"GET", "//" + p.Path(), "localhost", 403},
		{"POST", p.Path(), "localhost", 405},
		{"PUT", p.Path() + "node", "localhost", 405},
		{"DELETE", p.Path() + "why", "localhost", 405},
		{"OPTIONS", p.Path(), "localhost", 405},
		{"GET", p.Path() + "metrics", "localhost", 404},
		{"GET", p.Path() + "files/../page.go", "localhost", 307}, // to /page.go, which has no token
	} {
		answer := ask(p, c.method, c.path, c.host)
		if answer.Code != c.want {
			t.Errorf("%s %s of %s: %d, want %d", c.method, c.path, c.host, answer.Code, c.want)
		}
		if body := answer.Body.String(); c.want != 200 && strings.Contains(body+answer.Header().Get("Location"), p.token) {
			t.Errorf("%s %s of %s tells the token: %s", c.method, c.path, c.host, body)
		}
		for name, want := range map[string]string{
			"Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; " +
				"frame-ancestors 'none'",
			"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
			"Access-Control-Allow-Origin": "", "Set-Cookie": "",
		} {
			if got := answer.Header().Get(name); got != want {
				t.Errorf("%s %s: %s is %q, want %q", c.method, c.path, name, got, want)
			}
		}
	}
	if another := newPage(); another.token == p.token || len(p.token) < 26 {
		t.Errorf("tokens %q and %q", p.token, another.token)
	}
}

// TestEscaping: no text of the cluster becomes HTML.
func TestEscaping(t *testing.T) {
	p := newPage()
	p.fleet.show(overview.Change{GPUNode: hostile()})
	p.fleet.listed = true
	p.fleet.notes["a"], p.fleet.user = hostile().Name, hostile().Name
	p.where = Where{hostile().Name, moment}
	p.fleet.rights = allowed(p)
	for _, path := range []string{"", "?q=%3Cscript%3E", "node?name=%3Cscript%3Ealert(1)%3C/script%3E%22%27%26"} {
		answer := ask(p, "GET", p.Path()+path, "localhost")
		if body := answer.Body.String(); answer.Code != 200 || strings.Contains(body, "<script>") || strings.Count(body, "alert(1)") < 10 {
			t.Errorf("%s: %d\n%s", path, answer.Code, body)
		}
	}
}

// TestUnchanged: a view is sent again only if it has changed.
func TestUnchanged(t *testing.T) {
	p := newPage()
	p.fleet.listed = true
	tag := ask(p, "GET", p.Path(), "localhost").Header().Get("ETag")
	again := func(r *http.Request) { r.Header.Set("If-None-Match", tag) }
	if answer := ask(p, "GET", p.Path(), "localhost", again); answer.Code != http.StatusNotModified {
		t.Errorf("unchanged: %d", answer.Code)
	}
	p.fleet.show(overview.Change{GPUNode: hostile()})
	if answer := ask(p, "GET", p.Path(), "localhost", again); answer.Code != 200 || answer.Header().Get("ETag") == tag {
		t.Errorf("changed: %d", answer.Code)
	}
}

// TestTime: a view says when its data were so, also while it does not change, and while the nodes are not up to date.
func TestTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPage()
		p.fleet.listed = true
		at := func(change ...func(*http.Request)) (shown, header string) {
			answer := ask(p, "GET", p.Path(), "localhost", change...)
			if match := regexp.MustCompile(`<time id="at" datetime="([^"]*)"`).FindStringSubmatch(answer.Body.String()); match != nil {
				shown = match[1]
			}
			return shown, answer.Header().Get("Data-Time")
		}
		now := func() string { return time.Now().Format(time.RFC3339) }
		if shown, header := at(); shown != now() || header != shown {
			t.Errorf("it is %s: %s, header %s", now(), shown, header)
		}
		tag := ask(p, "GET", p.Path(), "localhost").Header().Get("ETag")
		time.Sleep(time.Hour)
		if shown, header := at(func(r *http.Request) { r.Header.Set("If-None-Match", tag) }); shown != "" || header != now() {
			t.Errorf("unchanged: it is %s: %q, header %s", now(), shown, header)
		}
		p.fleet.fail(errors.New("the API server is away"))
		failed := now()
		time.Sleep(time.Hour)
		p.fleet.fail(errors.New("the API server is still away"))
		if shown, header := at(); shown != failed || header != failed {
			t.Errorf("failed at %s: %s, header %s", failed, shown, header)
		}
	})
}

// TestUser: the page says who the API server takes the viewer for, once it answers.
func TestUser(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPage()
		var answers atomic.Bool
		p.fleet.cluster.Client.(*fake.Clientset).PrependReactor("create", "selfsubjectreviews", func(clienttesting.Action) (bool, runtime.Object, error) {
			if !answers.Load() {
				return true, nil, errors.New("the API server is away")
			}
			return true, &authenticationv1.SelfSubjectReview{Status: authenticationv1.SelfSubjectReviewStatus{UserInfo: authenticationv1.UserInfo{Username: "jane"}}}, nil
		})
		done := make(chan error)
		go func() { done <- p.fleet.askUser(t.Context()) }()
		synctest.Wait()
		if body := ask(p, "GET", p.Path(), "localhost").Body.String(); strings.Contains(body, "<span>as ") || !strings.Contains(body, "<b>demo</b>") {
			t.Errorf("at first:\n%s", body)
		}
		answers.Store(true)
		if err := <-done; err != nil {
			t.Error(err)
		}
		for _, path := range []string{"", "why?namespace=ml&pod=p", "node?name=" + url.QueryEscape(hostile().Name)} {
			if path != "" {
				_ = p.fleet.cluster.Client.(*fake.Clientset).Tracker().Add(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: "p"}})
				p.fleet.show(overview.Change{GPUNode: hostile()})
			}
			if body := ask(p, "GET", p.Path()+path, "localhost").Body.String(); !strings.Contains(body, "<span>as jane</span>") {
				t.Errorf("%s:\n%s", path, body)
			}
		}
	})
}

// TestRun: the page is served on the loopback interface only, and ends with its context, also while a browser keeps its connection.
func TestRun(t *testing.T) {
	var config net.ListenConfig
	everywhere, err := config.Listen(t.Context(), "tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	done, cancel := context.WithCancel(t.Context())
	cancel()
	if err := newPage().Run(done, everywhere); err == nil || !strings.Contains(err.Error(), "loopback") {
		t.Errorf("on all interfaces: %v", err)
	}
	if _, err := everywhere.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the listener is open: %v", err)
	}
	listener, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := newPage()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx, listener) }()
	answer, err := http.Get("http://" + listener.Addr().String() + p.Path())
	if err != nil || answer.StatusCode != 200 {
		t.Fatal(answer, err)
	}
	defer answer.Body.Close()
	stop()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(endsWithin + 10*time.Second):
		t.Error("it does not end")
	}
}

// TestNotUpToDate: a page says so while the watch is interrupted.
func TestNotUpToDate(t *testing.T) {
	p := newPage()
	p.fleet.cluster.Dynamic.(*dynamicfake.FakeDynamicClient).PrependWatchReactor("gpunodes", func(clienttesting.Action) (bool, watch.Interface, error) {
		return true, nil, errors.New("the API server is away")
	})
	group, ctx := errgroup.WithContext(t.Context())
	ctx, cancel := context.WithCancel(ctx)
	p.fleet.run(ctx, group)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		body := ask(p, "GET", p.Path(), "localhost").Body.String()
		if strings.Contains(body, "<li>The nodes are not up to date: the API server is away</li>") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s", body)
		}
	}
	cancel()
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
}

// TestPodsRefused: a refused watch of pods is reported while it is refused, and no longer some time after it is allowed.
func TestPodsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPage()
		p.fleet.rights = allowed(p)
		var refuses atomic.Bool
		refuses.Store(true)
		p.fleet.cluster.Client.(*fake.Clientset).PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
			return refuses.Load(), nil, apierrors.NewForbidden(corev1.Resource("pods"), "", errors.New("the roles are not read yet"))
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- p.fleet.watchPods(ctx) }()
		time.Sleep(10 * refusedFor)
		if s := p.fleet.now(ctx); s.notes[aboutWatch] == "" {
			t.Error("a refused watch is not reported")
		}
		refuses.Store(false)
		time.Sleep(2 * refusedFor)
		if s := p.fleet.now(ctx); s.notes[aboutWatch] != "" {
			t.Errorf("later: %s", s.notes[aboutWatch])
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestPodsLater: an API server that does not answer at first does not hide the waiting pods for long.
func TestPodsLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPage()
		client := p.fleet.cluster.Client.(*fake.Clientset)
		if err := client.Tracker().Add(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "web", Name: "late"}, Status: corev1.PodStatus{Phase: corev1.PodPending}}); err != nil {
			t.Fatal(err)
		}
		p.fleet.rights = allowed(p)
		var answers atomic.Bool
		client.PrependReactor("create", "selfsubjectaccessreviews", func(clienttesting.Action) (bool, runtime.Object, error) {
			return !answers.Load(), nil, errors.New("the API server is away")
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- p.fleet.watchPods(ctx) }()
		synctest.Wait()
		if s := p.fleet.now(ctx); s.notes[aboutPods] == "" || len(s.pending) > 0 {
			t.Errorf("at first: %q, %d pods", s.notes[aboutPods], len(s.pending))
		}
		answers.Store(true)
		time.Sleep(asksEvery)
		synctest.Wait()
		if s := p.fleet.now(ctx); s.notes[aboutPods] != "" || len(s.pending) != 1 {
			t.Errorf("later: %q, %d pods", s.notes[aboutPods], len(s.pending))
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// whyOf asks why a pod waits that has a claim. lists is called when the last objects for the answer are listed.
func whyOf(t *testing.T, ctx context.Context, lists func()) *httptest.ResponseRecorder {
	t.Helper()
	p := newPage()
	client := p.fleet.cluster.Client.(*fake.Clientset)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: "late"}, Spec: corev1.PodSpec{
		ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: ptr.To("gpu")}}}}
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: "gpu"}, Spec: resourceapi.ResourceClaimSpec{
		Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "r", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu"}}}}}}
	class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "gpu"}}
	for _, o := range []runtime.Object{pod, claim, class} {
		if err := client.Tracker().Add(o); err != nil {
			t.Fatal(err)
		}
	}
	client.PrependReactor("list", "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
		lists()
		return false, nil, nil
	})
	answer := ask(p, "GET", p.Path()+"why?namespace=ml&pod=late", "localhost", func(r *http.Request) { *r = *r.WithContext(ctx) })
	if len(p.why) != 0 {
		t.Error("the next question has to wait")
	}
	return answer
}

// TestWhyEnds: an answer ends with its request, when the tab is closed, and before the page gives up writing it.
func TestWhyEnds(t *testing.T) {
	if answer := whyOf(t, t.Context(), func() {}); answer.Code != 200 || !strings.Contains(answer.Body.String(), "no node has") {
		t.Errorf("%d: %s", answer.Code, answer.Body)
	}
	ctx, closeTab := context.WithCancel(t.Context())
	if answer := whyOf(t, ctx, closeTab); answer.Code != http.StatusBadGateway || !strings.Contains(answer.Body.String(), "context canceled") {
		t.Errorf("a closed tab: %d: %s", answer.Code, answer.Body)
	}
	synctest.Test(t, func(t *testing.T) {
		answer := whyOf(t, t.Context(), func() { time.Sleep(5 * time.Minute) }) // what the server allows for all of a request
		if answer.Code != http.StatusBadGateway || !strings.Contains(answer.Body.String(), "context deadline exceeded") {
			t.Errorf("a slow API server: %d: %s", answer.Code, answer.Body)
		}
	})
}

// TestTrim: what the list needs of a pod is kept, and the rest is not.
func TestTrim(t *testing.T) {
	var pod corev1.Pod
	pod.Name, pod.Annotations = "p", map[string]string{"a": strings.Repeat("x", 1<<10)}
	pod.Spec.Containers = []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": {}}}}}
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Message: "m"}, {Type: corev1.PodReady}}
	pod.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu"}}
	object, err := trim(&pod)
	got := object.(*corev1.Pod)
	if err != nil || got.Name != "p" || got.Annotations != nil || got.Spec.Containers[0].Image != "" || len(got.Spec.Containers[0].Resources.Limits) != 1 ||
		len(got.Status.Conditions) != 1 || got.Status.Conditions[0].Message != "m" || len(got.Status.ResourceClaimStatuses) != 1 {
		t.Errorf("%v, %v", got, err)
	}
}

// allowed are the rights of a viewer who may list all pods.
func allowed(p *Page) *overview.Rights {
	client := p.fleet.cluster.Client.(*fake.Clientset)
	client.PrependReactor("create", "selfsubjectaccessreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		review := action.(clienttesting.CreateAction).GetObject().(*authorizationv1.SelfSubjectAccessReview)
		review.Status.Allowed = true
		return true, review, nil
	})
	return overview.NewRights(p.fleet.cluster, "ml")
}
