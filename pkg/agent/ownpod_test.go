// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// TestAgentEndsWithItsPod: a container runtime that hangs does not end it, and the next agent waits for the ledger's lock.
func TestAgentEndsWithItsPod(t *testing.T) {
	own := func() *corev1.Pod {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "tandem-system", Name: "agent", UID: "own"}}
		pod.Spec.NodeName = "node-1"
		return pod
	}
	other := own()
	other.Name, other.UID = "other", "other"
	remove := func(t *testing.T, client *fake.Clientset) {
		if err := client.CoreV1().Pods("tandem-system").Delete(t.Context(), "agent", metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	}
	terminate := func(t *testing.T, client *fake.Clientset) {
		deleted := own()
		deleted.DeletionTimestamp = &metav1.Time{Time: time.Now().Add(time.Minute)}
		if _, err := client.CoreV1().Pods("tandem-system").Update(t.Context(), deleted, metav1.UpdateOptions{}); err != nil {
			t.Error(err)
		}
	}
	for name, row := range map[string]struct {
		uid    string
		pods   []*corev1.Pod
		act    func(*testing.T, *fake.Clientset)
		before time.Duration // it serves that long
		ends   bool
	}{
		"it lives":                      {uid: "own", pods: []*corev1.Pod{own(), other}, before: time.Hour},
		"deleted by force":              {uid: "own", pods: []*corev1.Pod{own(), other}, act: remove, before: defaultTimes.goneFor - time.Second, ends: true},
		"deleted, in its grace period":  {uid: "own", pods: []*corev1.Pod{own(), other}, act: terminate, before: defaultTimes.goneFor + time.Minute - time.Second, ends: true},
		"gone before the agent started": {uid: "own", pods: []*corev1.Pod{other}, before: defaultTimes.goneFor - time.Second, ends: true},
		"outside a pod":                 {pods: []*corev1.Pod{other}, before: time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				client := fake.NewClientset()
				for _, pod := range row.pods {
					if err := client.Tracker().Add(pod); err != nil {
						t.Fatal(err)
					}
				}
				pods, err := podstate.NewPods(client, "node-1", podstate.NewCgroups(t.TempDir(), ""), t.TempDir())
				if err != nil {
					t.Fatal(err)
				}
				a := &Agent{config: config.Config{PodUID: row.uid}, token: &token{}, times: defaultTimes}
				watched, ended := make(chan error, 1), make(chan error, 1)
				go func() { watched <- pods.Run(ctx) }()
				pods.AwaitSync(ctx)
				go func() { ended <- a.endWithPod(ctx, pods) }()
				if row.act != nil {
					synctest.Wait() // the fake forgets what happens between the list and the watch
					row.act(t, client)
				}
				synctest.Wait()
				time.Sleep(row.before)
				select {
				case err := <-ended:
					t.Fatalf("ended early: %v", err)
				default:
				}
				if row.ends {
					time.Sleep(a.times.ownPod + time.Second)
				} else {
					cancel()
				}
				synctest.Wait()
				select {
				case err = <-ended:
				default:
					t.Error("it goes on")
				}
				if errors.Is(err, errPodGone) != row.ends {
					t.Errorf("ended with %v", err)
				}
				cancel()
				if err := <-watched; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestToken: only a token that was taken before, and that is refused again and again, ends the agent.
func TestToken(t *testing.T) {
	const away = 0
	every := func(code, n int) (codes []int) {
		for range n {
			codes = append(codes, code)
		}
		return codes
	}
	minutes := int(refusedFor / time.Minute)
	for name, row := range map[string]struct {
		codes []int // an answer a minute
		gone  bool
	}{
		"taken":                          {codes: every(200, 9)},
		"refused":                        {codes: append(every(200, 1), every(401, minutes+1)...), gone: true},
		"refused, with interruptions":    {codes: append([]int{200, 401, away, 503}, 401), gone: true},
		"not long enough":                {codes: append(every(200, 1), every(401, minutes)...)},
		"refused once, then away":        {codes: append([]int{200, 401}, every(away, 9)...)},
		"refused, and taken again":       {codes: append([]int{200}, append(every(401, minutes), 404, 401)...)},
		"refused from the start":         {codes: every(401, 9)},
		"overloaded":                     {codes: append([]int{200}, every(503, 9)...)},
		"forbidden, which is no refusal": {codes: append([]int{200}, every(403, 9)...)},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := &Agent{token: &token{}}
				code := 0
				transport := a.token.watch(roundTrip(func(*http.Request) (*http.Response, error) {
					if code == away {
						return nil, errors.New("connection refused")
					}
					return &http.Response{StatusCode: code, Body: http.NoBody}, nil
				}))
				for _, code = range row.codes {
					response, err := transport.RoundTrip(nil)
					if (err == nil) != (code != away) {
						t.Error(err)
					}
					if err == nil {
						_ = response.Body.Close()
					}
					time.Sleep(time.Minute)
				}
				if err := a.podGone(nil); errors.Is(err, errPodGone) != row.gone {
					t.Errorf("got %v", err)
				}
			})
		})
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(request *http.Request) (*http.Response, error) { return f(request) }

// The requests of the agent's clients are recorded.
func TestTokenOfClients(t *testing.T) {
	var code atomic.Int32
	code.Store(http.StatusOK)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(int(code.Load())) }))
	defer server.Close()
	c := nodeConfig(t)
	if err := os.WriteFile(c.Kubeconfig, []byte(strings.Replace(kubeconfig, "http://127.0.0.1:1", server.URL, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	a, err := newAgent(c)
	if err != nil {
		t.Fatal(err)
	}
	defer a.events.Shutdown()
	for _, next := range []int32{http.StatusOK, http.StatusUnauthorized} {
		code.Store(next)
		_, _ = a.client.CoreV1().Nodes().Get(t.Context(), "node-1", metav1.GetOptions{})
	}
	a.token.mu.Lock()
	defer a.token.mu.Unlock()
	if !a.token.taken || a.token.first.IsZero() {
		t.Error("the agent does not notice that its token is refused")
	}
}

// TestPodGoneEndsTheAgent: no retry, no new process in its place.
func TestPodGoneEndsTheAgent(t *testing.T) {
	c := nodeConfig(t)
	c.PodUID = "own"
	a, err := newAgent(c)
	if err != nil {
		t.Fatal(err)
	}
	a.client, a.times = fake.NewClientset(), times{ownPod: time.Millisecond}
	running := runAgent(t, a)
	select {
	case err := <-running.done:
		if !errors.Is(err, errPodGone) || Restarts(err) {
			t.Errorf("ended with %v", err)
		}
	case <-time.After(20 * time.Second):
		running.stop()
		t.Error("an agent without a pod goes on")
	}
}
