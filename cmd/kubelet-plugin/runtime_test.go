// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
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
		want       string // "" for no event
		notWant    string
	}{
		"has it":                      {runtime: "containerd://2.4.2", strategies: []string{"cdi-cri"}},
		"lacks it":                    {runtime: "containerd://1.6.38", strategies: []string{"cdi-cri"}, want: "Warning RuntimeWithoutCDI Containers will start without the GPUs of their claims and limits"},
		"lacks it, limits do without": {runtime: "containerd://1.6.38", strategies: []string{"envvar"}, want: "Warning RuntimeWithoutCDI", notWant: "limits"},
		"trusts images":               {runtime: "containerd://2.1.4", strategies: []string{"cdi-cri"}, want: "Warning RuntimeTrustsImages If CRIU is installed on the node, everyone who may create pods can get the GPUs of others: containerd 2.1.4"},
		"may lack it":                 {runtime: "containerd://1.7.27", strategies: []string{"cdi-cri"}, want: "Warning RuntimeMayLackCDI"},
	} {
		t.Run(name, func(t *testing.T) {
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}
			node.Status.NodeInfo.ContainerRuntimeVersion = c.runtime
			events := record.NewFakeRecorder(1)
			a := &agent{
				config:   config.Config{NodeName: "node-1", HostRoot: t.TempDir(), DeviceListStrategies: c.strategies},
				client:   fake.NewClientset(node),
				recorder: events,
			}
			ctx, cancel := context.WithCancel(t.Context())
			self := podstate.NewNode(a.client, "node-1")
			watched := make(chan error, 1)
			go func() { watched <- self.Run(ctx) }()
			if err := a.checkRuntime(ctx, self); err != nil {
				t.Fatal(err)
			}
			cancel()
			if err := <-watched; err != nil {
				t.Error(err)
			}
			close(events.Events)
			said := <-events.Events
			if !strings.Contains(said, c.want) || (said == "") != (c.want == "") || c.notWant != "" && strings.Contains(said, c.notWant) {
				t.Errorf("event %q, want %q", said, c.want)
			}
		})
	}
}

// With --cgroups-per-qos=false kubelet makes no cgroup for a pod, and no pod counts as ended.
func TestNodeWithoutPodCgroups(t *testing.T) {
	for name, left := range map[string]string{"none": "system.slice", "those of the kubelet before": "kubepods/besteffort"} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			if err := os.MkdirAll(filepath.Join(root, left), 0o755); err != nil {
				t.Fatal(err)
			}
			events := record.NewFakeRecorder(10)
			a := &agent{config: config.Config{NodeName: "node-1"}, status: status.New("", nil), recorder: events, times: times{cgroups: time.Millisecond}}
			done := make(chan error, 1)
			go func() { done <- a.checkCgroups(t.Context(), podstate.NewCgroups(root, "own")) }()
			if said := <-events.Events; !strings.HasPrefix(said, "Warning NoPodCgroups GPUs of pods that have ended stay taken") || !strings.Contains(said, "--cgroups-per-qos=false") {
				t.Errorf("event %q", said)
			}
			if err := a.status.Ready(); err == nil || !strings.HasPrefix(err.Error(), "cgroups: ") {
				t.Errorf("readiness: %v", err)
			}
			own := filepath.Join(root, "kubepods/podown")
			if err := os.MkdirAll(own, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(own, "cgroup.events"), []byte("populated 1\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil || a.status.Ready() != nil || len(events.Events) > 0 {
				t.Errorf("%v, readiness %v, %d more events", err, a.status.Ready(), len(events.Events))
			}
		})
	}
}
