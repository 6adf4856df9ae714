// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

func TestARuntimeWithoutCDIGetsAnEvent(t *testing.T) {
	for name, c := range map[string]struct {
		runtime    string
		strategies []string
		want       string // "" for no event
		notWant    string
	}{
		"has it":                      {runtime: "containerd://2.1.4", strategies: []string{"cdi-cri"}},
		"lacks it":                    {runtime: "containerd://1.6.38", strategies: []string{"cdi-cri"}, want: "Warning RuntimeWithoutCDI Containers will start without the GPUs of their claims and limits"},
		"lacks it, limits do without": {runtime: "containerd://1.6.38", strategies: []string{"envvar"}, want: "Warning RuntimeWithoutCDI", notWant: "limits"},
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
