// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/status"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

func TestARuntimeWithoutCDIGetsAnEvent(t *testing.T) {
	for name, c := range map[string]struct {
		runtime    string
		strategies []string
		names      string // cdiDeviceNames; "" for auto
		want       string // "" for no event
		notWant    string
		wantNames  []bool // whether they are secret, after each change; nil if never
	}{
		"has it":                      {runtime: "containerd://2.4.2", strategies: []string{"cdi-cri"}},
		"lacks it":                    {runtime: "containerd://1.6.38", strategies: []string{"cdi-cri"}, want: "Warning RuntimeWithoutCDI Containers will start without the GPUs of their claims and limits"},
		"lacks it, limits do without": {runtime: "containerd://1.6.38", strategies: []string{"envvar"}, want: "Warning RuntimeWithoutCDI", notWant: "limits"},
		"trusts images":               {runtime: "containerd://2.1.4", strategies: []string{"cdi-cri"}, wantNames: []bool{true, false}, want: "Warning RuntimeTrustsImages If CRIU is installed on the node, everyone who may create pods can get the GPUs of others: containerd 2.1.4"},
		"restores with privileges":    {runtime: "containerd://2.2.5", strategies: []string{"cdi-cri"}, want: "Warning RuntimeTrustsImages"},
		"stable names":                {runtime: "containerd://2.1.4", strategies: []string{"cdi-cri"}, names: "stable", want: "Warning RuntimeTrustsImages"},
		"secret names":                {runtime: "containerd://2.4.2", strategies: []string{"cdi-cri"}, names: "secret", wantNames: []bool{true, true}},
		"may lack it":                 {runtime: "containerd://1.7.27", strategies: []string{"cdi-cri"}, want: "Warning RuntimeMayLackCDI"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}
				node.Status.NodeInfo.ContainerRuntimeVersion = c.runtime
				events := record.NewFakeRecorder(1)
				a := &Agent{
					config:   config.Config{NodeName: "node-1", HostRoot: t.TempDir(), DeviceListStrategies: c.strategies, CDIDeviceNames: cmp.Or(c.names, "auto")},
					client:   fake.NewClientset(node),
					recorder: events,
				}
				ctx, cancel := context.WithCancel(t.Context())
				self := podstate.NewNode(a.client, "node-1")
				watched := make(chan error, 1)
				go func() { watched <- self.Run(ctx) }()
				checked := make(chan error, 1)
				var names kindsOfNames
				go func() { checked <- a.checkRuntime(ctx, self, &names) }()
				synctest.Wait()
				said := ""
				if len(events.Events) > 0 {
					said = <-events.Events
				}
				if !strings.Contains(said, c.want) || (said == "") != (c.want == "") || c.notWant != "" && strings.Contains(said, c.notWant) {
					t.Errorf("event %q, want %q", said, c.want)
				}
				// The runtime is replaced while the agent runs.
				for want, version := range []string{c.runtime, "containerd://1.5.0"} {
					node.Status.NodeInfo.ContainerRuntimeVersion = version
					node.Labels = map[string]string{"of": version}
					if _, err := a.client.CoreV1().Nodes().Update(ctx, node, metav1.UpdateOptions{}); err != nil {
						t.Fatal(err)
					}
					synctest.Wait()
					if len(events.Events) != want {
						t.Errorf("%d more events for %s, want %d", len(events.Events), version, want)
					}
				}
				cancel()
				if err := errors.Join(<-watched, <-checked); err != nil {
					t.Error(err)
				}
				if want := append(c.wantNames, make([]bool, 2)...)[:2]; !slices.Equal(names, want) {
					t.Errorf("secret names: %v, want %v", names, want)
				}
			})
		})
	}
}

// kindsOfNames records whether names became secret.
type kindsOfNames []bool

func (k *kindsOfNames) UseSecretNames(secret bool) { *k = append(*k, secret) }

// With --cgroups-per-qos=false kubelet makes no cgroup for a pod, and no pod counts as ended.
func TestNodeWithoutPodCgroups(t *testing.T) {
	for name, left := range map[string]string{"none": "system.slice", "those of the kubelet before": "kubepods/besteffort"} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			if err := os.MkdirAll(filepath.Join(root, left), 0o755); err != nil {
				t.Fatal(err)
			}
			events := record.NewFakeRecorder(10)
			a := &Agent{config: config.Config{NodeName: "node-1"}, status: status.New("", nil), recorder: events, times: times{cgroups: time.Millisecond}}
			pods, err := podstate.NewPods(fake.NewClientset(), "node-1", podstate.NewCgroups(root, "own"), t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- a.checkCgroups(ctx, pods) }()
			report := func(want string) {
				t.Helper()
				if said := <-events.Events; !strings.HasPrefix(said, "Warning NoPodCgroups GPUs of pods that have ended stay taken: ") || !strings.Contains(said, want) {
					t.Errorf("event %q, want %q", said, want)
				}
				if err := a.status.Ready(); err == nil || !strings.HasPrefix(err.Error(), "cgroups: ") {
					t.Errorf("readiness: %v", err)
				}
			}
			report("--cgroups-per-qos=false")
			own := filepath.Join(root, "kubepods/podown")
			if err := os.MkdirAll(own, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(own, "cgroup.events"), []byte("populated 1\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			for a.status.Ready() != nil {
				time.Sleep(time.Millisecond)
			}
			if err := os.Rename(root, filepath.Join(t.TempDir(), "away")); err != nil {
				t.Fatal(err)
			}
			report("no such file") // also other errors, and later ones
			cancel()
			if err := <-done; err != nil || len(events.Events) > 0 {
				t.Errorf("%v, %d more events", err, len(events.Events))
			}
		})
	}
}
